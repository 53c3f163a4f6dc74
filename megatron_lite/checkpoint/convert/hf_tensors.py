"""Between the tensors of a family and the logical parameters, both ways, as recipes.

A tensor of the family is its logical parts joined along dim 0, transposed where the family
stores [in, out]. One table serves both directions, so a round trip is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.checkpoint.convert.hf_families import Family, Weight
from megatron_lite.checkpoint.direct import LogicalTensor
from megatron_lite.spec.params import ParamSpec


@dataclass(frozen=True)
class Stored:
    """One tensor of the family for one model, with the parameters it is joined from."""

    name: str
    parts: tuple[ParamSpec, ...]
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the family's file."""
        rows = sum(part.shape[0] for part in self.parts)
        shape = (rows, *self.parts[0].shape[1:])
        return shape[::-1] if self.transposed else shape

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
                parts = tuple(by_name[name] for name in names)
                found.append(Stored(weight.name.format(i=layer), parts, _turned(weight)))
    placed = {part.name for stored in found for part in stored.parts}
    if placed != by_name.keys():
        raise ValueError(f"{family.architecture} has no place for {by_name.keys() - placed}")
    return tuple(found)


def _turned(weight: Weight) -> bool:
    return weight.transposed


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
    """
    tensors = {}
    for item in stored:
        for number, spec in enumerate(item.parts):
            load = _import_recipe(item, number, read)
            tensors[spec.name] = LogicalTensor(spec.name, dtypes[item.name], spec.shape, load)
    return tensors


def _import_recipe(
    item: Stored, number: int, read: Callable[[str, Callable[[Tensor], Tensor]], Tensor]
) -> Callable[[], Tensor]:
    def take(view: Tensor) -> Tensor:
        return (view.t() if item.transposed else view)[item.rows_of(number)]

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
    for item in stored:
        parts = [tensors[spec.name] for spec in item.parts]
        dtypes = {part.dtype for part in parts}
        if len(dtypes) != 1:
            raise ValueError(f"{item.name}: its parts have the dtypes {sorted(dtypes)}")
        yield Outgoing(item.name, parts[0].dtype, item.shape, _export_recipe(item, parts))


def _export_recipe(item: Stored, parts: Sequence[LogicalTensor]) -> Callable[[], Tensor]:
    def load() -> Tensor:
        whole = parts[0].load() if len(parts) == 1 else torch.cat([p.load() for p in parts])
        return (whole.t() if item.transposed else whole).contiguous()

    return load
