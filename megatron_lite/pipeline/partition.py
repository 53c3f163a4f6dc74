"""Which layers a stage holds: the cut of the model in depth.

The layers are dealt out in the order of the stages, whatever rank holds a stage, so their
global order cannot be confused; every cut is checked to hold every layer exactly once,
one embedding on the first stage and one loss on the last. Cuts come from Megatron's layout
strings, or from an even split with unequal ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_lite.errors import UserError

LAYOUT = "--pipeline-model-parallel-layout"
PP = "--pipeline-model-parallel-size"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
EMBEDDING = "--account-for-embedding-in-pipeline-split"
LOSS = "--account-for-loss-in-pipeline-split"
MTP = "--account-for-mtp-in-pipeline-split"
_MAX_LAYERS = 2**20
# Use-sites of parameters outside the layers.
AT_EMBEDDING, AT_FINAL_NORM, AT_HEAD = "embedding", "final_norm", "head"


@dataclass(frozen=True)
class StagePart:
    """What one stage holds and computes.

    Attributes:
        stage: its number over the whole model.
        layers: global indices of decoder layers, ascending.
        embedding: it begins with the word (and position) embeddings.
        head: it ends with the final norm, the output layer and the loss.
        mtp: depths of multi-token prediction, ascending.
    """

    stage: int
    layers: tuple[int, ...]
    embedding: bool = False
    head: bool = False
    mtp: tuple[int, ...] = ()

    @property
    def uses(self) -> tuple[str, ...]:
        """Use-sites of the parameters it needs, in forward order."""
        first = (AT_EMBEDDING,) if self.embedding else ()
        last = (AT_FINAL_NORM, AT_HEAD) if self.head else ()
        further = (use for depth in self.mtp for use in further_uses(depth))
        return (*first, *(f"layer.{layer}" for layer in self.layers), *last, *further)

    @property
    def backward_uses(self) -> tuple[str, ...]:
        """Those whose backward pass reads the parameters again, in its order."""
        ends = {AT_EMBEDDING, AT_HEAD}
        for depth in self.mtp:
            embedding, _, head = further_uses(depth)
            ends |= {embedding, head}
        return tuple(use for use in reversed(self.uses) if use not in ends)


def further_uses(depth: int) -> tuple[str, str, str]:
    """Use-sites of a depth of multi-token prediction: embedding, its own layer, head."""
    return f"mtp.{depth}.{AT_EMBEDDING}", f"mtp.{depth}", f"mtp.{depth}.{AT_HEAD}"


def whole_model(num_layers: int, num_mtp: int = 0) -> tuple[StagePart, ...]:
    """Return the one stage of a model that is not cut."""
    layers, mtp = tuple(range(num_layers)), tuple(range(num_mtp))
    return (StagePart(0, layers, embedding=True, head=True, mtp=mtp),)


@dataclass(frozen=True)
class Split:
    """The wishes of the flags for a split without a layout string.

    Attributes:
        first, last: decoder layers of the first and the last rank, over all its stages.
        with_embedding, with_loss: count the embedding, the loss as a layer.
        with_mtp: count each depth of multi-token prediction as a layer.
    """

    first: int | None = None
    last: int | None = None
    with_embedding: bool = False
    with_loss: bool = False
    with_mtp: bool = False


def check_parts(parts: Sequence[StagePart], num_layers: int, num_mtp: int = 0) -> None:
    """Check that every layer is on exactly one stage, in order, and the ends at the ends.

    Raises:
        UserError: naming the layers that are missing, double or out of order.
    """
    held = [layer for part in parts for layer in part.layers]
    counts = Counter(held)
    missing = [layer for layer in range(num_layers) if layer not in counts]
    twice = sorted(layer for layer, count in counts.items() if count > 1)
    unknown = sorted(layer for layer in counts if not 0 <= layer < num_layers)
    problems = [
        f"{what} {_ranges(layers)}"
        for what, layers in (
            ("on no stage: layers", missing),
            ("on several stages: layers", twice),
            (f"not among the {num_layers} layers:", unknown),
        )
        if layers
    ]
    if not problems and held != sorted(held):
        problems.append("the layers are not in the order of the stages")
    if [k for k, part in enumerate(parts) if part.embedding] != [0]:
        problems.append("the embedding belongs on the first stage, once")
    if [k for k, part in enumerate(parts) if part.head] != [len(parts) - 1]:
        problems.append("the loss belongs on the last stage, once")
    if [depth for part in parts for depth in part.mtp] != list(range(num_mtp)):
        problems.append(f"the {num_mtp} MTP depths must each be on one stage, in order")
    if problems:
        raise UserError(
            f"the split of {num_layers} layers over {len(parts)} pipeline stages is wrong: "
            + "; ".join(problems)
        )


def _ranges(layers: Sequence[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2, 5"."""
    texts: list[str] = []
    start = previous = layers[0]
    for layer in (*layers[1:], None):
        if layer is not None and layer == previous + 1:
            previous = layer
            continue
        texts.append(str(start) if start == previous else f"{start}-{previous}")
        if layer is not None:
            start = previous = layer
    return ", ".join(texts)


def split_layers(
    num_layers: int, placement: Sequence[int], split: Split = Split(), num_mtp: int = 0
) -> tuple[StagePart, ...]:
    """Deal the layers out evenly, with unequal ends where the flags ask for them.

    Args:
        placement: stage -> rank, of the schedule; p ranks with v stages each.
        num_mtp: depths of multi-token prediction, all on the last stage.

    Raises:
        UserError: the layers cannot be dealt out so; with the numbers and legal values.
    """
    ranks = max(placement) + 1
    chunks = len(placement) // ranks
    depths = num_mtp * split.with_mtp
    units = num_layers + split.with_embedding + depths + split.with_loss
    if split.first is not None or split.last is not None:
        if split.with_embedding or split.with_loss or split.with_mtp:
            raise UserError(
                f"{FIRST} and {LAST} fix the ends, {EMBEDDING}, {MTP} and {LOSS} move them: give "
                "one kind"
            )
        per_rank = _with_ends(num_layers, ranks, split)
    else:
        if units % ranks:
            counted = " + 1 for the embedding" * split.with_embedding
            counted += f" + {depths} for multi-token prediction" if depths else ""
            counted += " + 1 for the loss" * split.with_loss
            raise UserError(
                f"--num-layers {num_layers}{counted} = {units} is not a multiple of {PP} {ranks}; "
                f"nearest legal --num-layers: {_nearest(units, ranks, num_layers)}"
            )
        per_rank = [units // ranks] * ranks
    for rank, count in enumerate(per_rank):
        if count % chunks:
            raise UserError(
                f"--num-layers {num_layers}: pipeline rank {rank} gets {count} layers, which its "
                f"{chunks} virtual stages do not divide; legal: a multiple of {chunks}, e.g. "
                f"{max(1, count // chunks) * chunks} or {(count // chunks + 1) * chunks}"
            )
    counts = [per_rank[rank] // chunks for rank in placement]
    counts[0] -= split.with_embedding
    counts[-1] -= split.with_loss + depths
    if min(counts) < 0:
        raise UserError(f"--num-layers {num_layers}: too few layers for {len(placement)} stages")
    return _deal(counts, num_layers, num_mtp)


def _with_ends(num_layers: int, ranks: int, split: Split) -> list[int]:
    """Layers per rank with the first and last as given."""
    ends = {0: split.first, ranks - 1: split.last}
    if ranks == 1:
        raise UserError(f"{FIRST} and {LAST} need {PP} above 1")
    given = {rank: count for rank, count in ends.items() if count is not None}
    flags = ", ".join(
        f"{name} {count}"
        for name, count in ((FIRST, split.first), (LAST, split.last))
        if count is not None
    )
    left, others = num_layers - sum(given.values()), ranks - len(given)
    if min(given.values()) < 1 or left < others or (others == 0 and left):
        raise UserError(
            f"{flags} of --num-layers {num_layers} leave {left} layers for the other {others} "
            f"pipeline ranks; each rank needs a layer and every layer a rank"
        )
    if others and left % others:
        raise UserError(
            f"{flags} of --num-layers {num_layers} leave {left} layers, which the other {others} "
            f"pipeline ranks do not divide; nearest legal --num-layers: "
            f"{_nearest(left, others, num_layers)}"
        )
    return [given.get(rank, left // others if others else 0) for rank in range(ranks)]


def _nearest(units: int, by: int, num_layers: int) -> str:
    below, above = units // by * by, (units // by + 1) * by
    legal = [num_layers + count - units for count in (below, above)]
    return " or ".join(str(count) for count in legal if count > 0)


def _deal(counts: Sequence[int], num_layers: int, num_mtp: int) -> tuple[StagePart, ...]:
    """Give each stage so many of the following layers."""
    ends = list(accumulate(counts))
    last = len(counts) - 1
    parts = tuple(
        StagePart(
            stage,
            tuple(range(end - count, end)),
            embedding=stage == 0,
            head=stage == last,
            mtp=tuple(range(num_mtp)) if stage == last else (),
        )
        for stage, (count, end) in enumerate(zip(counts, ends, strict=True))
    )
    check_parts(parts, num_layers, num_mtp)
    return parts


def parse_layout(
    text: str, num_layers: int, num_ranks: int, chunks: int | None = None, num_mtp: int = 0
) -> tuple[StagePart, ...]:
    """Read a layout string: E embedding, t decoder layer, m MTP, L loss, | next stage.

    `x*n` repeats one letter, `(...)*n` a group; commas and blanks have no meaning. Stages
    stand in the order of the model: all ranks' first stages, then all second ones.

    Args:
        chunks: stages per rank if another flag says so.

    Raises:
        UserError: what is wrong, where, and what is legal.
    """
    where = f"{LAYOUT} {_short(text)}"
    stages = list_stages(text)
    if len(stages) % num_ranks or (chunks is not None and len(stages) != num_ranks * chunks):
        legal = f"a multiple of {num_ranks}" if chunks is None else str(num_ranks * chunks)
        raise UserError(f"{where}: {len(stages)} stages for {PP} {num_ranks}; legal: {legal}")
    letters = "".join(stages)
    for letter, name, wanted in (
        ("E", "embeddings", 1),
        ("t", "decoder layers", num_layers),
        ("m", "MTP depths", num_mtp),
        ("L", "losses", 1),
    ):
        if letters.count(letter) != wanted:
            raise UserError(
                f"{where}: {letters.count(letter)} {name} ({letter}); the model has {wanted}"
            )
    if letters != "E" + "t" * num_layers + "m" * num_mtp + "L" or not (
        stages[0].startswith("E") and stages[-1].endswith("L")
    ):
        raise UserError(
            f"{where}: legal is E first, on the first stage, then all t, then all m, and L at the "
            "end of the last stage"
        )
    parts, layer, depth = [], 0, 0
    for number, stage in enumerate(stages):
        num, mtp = stage.count("t"), stage.count("m")
        parts.append(
            StagePart(
                number,
                tuple(range(layer, layer + num)),
                "E" in stage,
                "L" in stage,
                tuple(range(depth, depth + mtp)),
            )
        )
        layer, depth = layer + num, depth + mtp
    check_parts(parts, num_layers, num_mtp)
    return tuple(parts)


def list_stages(text: str) -> list[str]:
    """Write a layout string out, one string of letters per stage.

    Raises:
        UserError: it is not made of these letters and repetitions.
    """
    return _expand(text, f"{LAYOUT} {_short(text)}").split("|")


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


_GROUP = re.compile(r"\(([EtmL|]*)\)\*([0-9]{1,7})")
_LETTER = re.compile(r"([EtmL|])\*([0-9]{1,7})")


def _expand(text: str, where: str) -> str:
    """Write out repetitions; letters inside groups first, groups from the inside out."""
    plain = re.sub(r"[,\s]", "", text)
    illegal = sorted(set(plain) - set("EtmL|()*0123456789"))
    if illegal:
        raise UserError(
            f"{where}: {' '.join(illegal)} is not part of a layout; legal: E t m L | ( ) *N"
        )

    def repeat(match: re.Match[str]) -> str:
        if len(match[1]) * int(match[2]) > _MAX_LAYERS:
            raise UserError(f"{where}: more than {_MAX_LAYERS} layers")
        return match[1] * int(match[2])

    while True:
        expanded = _GROUP.sub(repeat, _LETTER.sub(repeat, plain))
        if len(expanded) > 4 * _MAX_LAYERS:
            raise UserError(f"{where}: more than {_MAX_LAYERS} layers")
        if expanded == plain:
            break
        plain = expanded
    if not set(plain) <= set("EtmL|"):
        raise UserError(
            f"{where}: repetitions are x*N or (...)*N with a number N; read as far as "
            f"{_short(plain)}"
        )
    return plain
