"""Between the tensors of a family and the logical parameters, both ways, as recipes.

A tensor of the family is its logical parts joined along dim 0, transposed where the family
stores [in, out], or one expert of a stack. One table serves both directions, so a round trip
is exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_lite.checkpoint.convert.hf_families import Family, Weight
from megatron_lite.checkpoint.direct import LogicalTensor
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.spec.params import ParamSpec

COUNTS = ".router.expert_counts"


@dataclass(frozen=True)
class Stored:
    """One tensor of the family for one model, with the parameters it is joined from.

    `expert` is its number in a stack, which then is its only part; `interleaved` parts are
    stacks whose rows take turns; a `copy` repeats a parameter that another tensor holds.
    """

    name: str
    parts: tuple[ParamSpec, ...]
    transposed: bool
    expert: int | None = None
    interleaved: bool = False
    copy: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the family's file."""
        if self.expert is not None:
            return self.parts[0].shape[1:]
        if self.interleaved:
            experts, rows, *rest = self.parts[0].shape
            shape = (experts, rows * len(self.parts), *rest)
        else:
            rows = sum(part.shape[0] for part in self.parts)
            shape = (rows, *self.parts[0].shape[1:])
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def rows_of(self, number: int) -> slice:
        """Rows of the logical (not transposed) tensor that are part `number`."""
        first = sum(part.shape[0] for part in self.parts[:number])
        return slice(first, first + self.parts[number].shape[0])


def stored_tensors(
    family: Family, specs: Sequence[ParamSpec], num_layers: int
) -> tuple[Stored, ...]:
    """List the tensors of a model in this family, in the order of its table.

    Raises:
        ValueError: a parameter that the table does not place: a defect of the table.
    """
    by_name = {spec.name: spec for spec in specs}
    found: list[Stored] = []
    for weight in family.weights:
        for layer in range(num_layers) if "{i}" in weight.name else (0,):
            names = [part.format(i=layer) for part in weight.parts]
            present = [name for name in names if name in by_name]
            if len(present) not in (0, len(names)):
                raise ValueError(f"{weight.name}: only {present} of its parts exist")
            if present:
                found += _stored(weight, layer, tuple(by_name[name] for name in names))
    for depth in range(sum(name.endswith(".eh_proj.weight") for name in by_name)):
        found += _further_tensors(family, by_name, num_layers + depth, depth)
    placed = {part.name for stored in found for part in stored.parts}
    # State of a loss in training, which no family knows.
    left = {name for name in by_name.keys() - placed if not name.endswith(COUNTS)}
    if left:
        raise ValueError(f"{family.architecture} has no place for {left}")
    return tuple(found)


def _further_tensors(
    family: Family, by_name: Mapping[str, ParamSpec], layer: int, depth: int
) -> list[Stored]:
    """Tensors of a depth of multi-token prediction, which stands at layer number `layer`."""
    found = []
    here, ours = f"decoder.layers.{layer}.", f"mtp.{depth}.transformer_layer."
    for weight in (*family.weights, *family.further):
        if "{i}" not in weight.name:
            continue
        names = [part.format(i=layer, d=depth).replace(here, ours) for part in weight.parts]
        if all(name in by_name for name in names):
            found += _stored(weight, layer, tuple(by_name[name] for name in names))
    for name, part in family.copies:
        if part in by_name:
            found.append(Stored(name.format(i=layer), (by_name[part],), False, copy=True))
    return found


def _stored(weight: Weight, layer: int, parts: tuple[ParamSpec, ...]) -> list[Stored]:
    if "{e}" not in weight.name:
        name, form = weight.name.format(i=layer), (weight.transposed, None, weight.interleaved)
        return [Stored(name, parts, *form)]
    return [
        Stored(weight.name.format(i=layer, e=expert), parts, False, expert)
        for expert in range(parts[0].shape[0])
    ]


def import_tensors(
    stored: Sequence[Stored],
    dtypes: Mapping[str, str],
    read: Callable[[str, Callable[[Tensor], Tensor]], Tensor],
) -> dict[str, LogicalTensor]:
    """Return the logical tensors of a source.

    Args:
        stored: the table of this model.
        dtypes: of the source's tensors, by name.
        read: returns a copy of what a function takes from a view of a tensor.

    Raises:
        DamagedError: (a recipe) a copy differs from what it repeats.
    """
    tensors: dict[str, LogicalTensor] = {}
    stacks: dict[str, list[Stored]] = {}
    for item in stored:
        if item.copy:
            whole = tensors[item.parts[0].name]
            checked = partial(_load_checked, whole.load, item.name, read)
            tensors[whole.name] = dataclasses.replace(whole, load=checked)
            continue
        if item.expert is not None:
            stacks.setdefault(item.parts[0].name, []).append(item)
            continue
        for number, spec in enumerate(item.parts):
            load = _import_recipe(item, number, read)
            tensors[spec.name] = LogicalTensor(spec.name, dtypes[item.name], spec.shape, load)
    for name, items in stacks.items():
        found = {dtypes[item.name] for item in items}
        if len(found) != 1:
            raise UserError(f"{items[0].name} and the experts beside it are {sorted(found)}")
        shape, load = items[0].parts[0].shape, _stack_recipe(items, read)
        tensors[name] = LogicalTensor(name, found.pop(), shape, load)
    return tensors


def _load_checked(
    load: Callable[[], Tensor], copy: str, read: Callable[[str, Callable[[Tensor], Tensor]], Tensor]
) -> Tensor:
    whole = load()
    if not torch.equal(whole.view(torch.uint8), read(copy, lambda view: view).view(torch.uint8)):
        raise DamagedError(
            f"{copy} differs from the model's own embedding or output layer, which multi-token "
            "prediction shares here"
        )
    return whole


def _stack_recipe(
    items: Sequence[Stored], read: Callable[[str, Callable[[Tensor], Tensor]], Tensor]
) -> Callable[[], Tensor]:
    def load() -> Tensor:
        first = read(items[0].name, lambda view: view)
        whole = first.new_empty((len(items), *first.shape))
        whole[0] = first
        for item in items[1:]:
            whole[item.expert] = read(item.name, lambda view: view)
        return whole

    return load


def _import_recipe(
    item: Stored, number: int, read: Callable[[str, Callable[[Tensor], Tensor]], Tensor]
) -> Callable[[], Tensor]:
    def take(view: Tensor) -> Tensor:
        whole = view.transpose(-1, -2) if item.transposed else view
        if item.interleaved:
            return whole[:, number :: len(item.parts)]
        return whole[item.rows_of(number)]

    return lambda: read(item.name, take)


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write: its name, dtype, shape, and how to compute it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def export_tensors(
    stored: Sequence[Stored], tensors: Mapping[str, LogicalTensor]
) -> Iterator[Outgoing]:
    """Yield the tensors of the family, joined from logical ones.

    Raises:
        ValueError: parts of one tensor differ in dtype.
    """
    last = _LastStack()
    for item in stored:
        parts = [tensors[spec.name] for spec in item.parts]
        dtypes = {part.dtype for part in parts}
        if len(dtypes) != 1:
            raise ValueError(f"{item.name}: its parts have the dtypes {sorted(dtypes)}")
        load = _export_recipe(item, parts)
        if item.expert is not None:
            load = partial(last.expert, parts[0], item.expert)
        yield Outgoing(item.name, parts[0].dtype, item.shape, load)


class _LastStack:
    """Holds the stack that was read last: its experts are written one after another."""

    def __init__(self) -> None:
        self._name = ""
        self._whole: Tensor | None = None

    def expert(self, stack: LogicalTensor, number: int) -> Tensor:
        """One expert; the stack is let go of with the last."""
        if self._whole is None or self._name != stack.name:
            self._whole = None  # before there are two
            self._name, self._whole = stack.name, stack.load()
        found = self._whole[number].contiguous()
        if number == stack.shape[0] - 1:
            self._whole, found = None, found.clone()
        return found


def _export_recipe(item: Stored, parts: Sequence[LogicalTensor]) -> Callable[[], Tensor]:
    def load() -> Tensor:
        if item.interleaved:
            whole = torch.stack([p.load() for p in parts], dim=2).flatten(1, 2)
        else:
            whole = parts[0].load() if len(parts) == 1 else torch.cat([p.load() for p in parts])
        return (whole.transpose(-1, -2) if item.transposed else whole).contiguous()

    return load
