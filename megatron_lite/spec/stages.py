"""Which parameters a pipeline rank holds, and what follows where two ranks hold one.

A stage is a run of layers, the first with the embedding, the last with the final norm and
the head. A parameter lives where its use-sites are. Only a tied embedding has two, at both
ends of the model: on one rank (V placements) it is one parameter used twice, on two ranks
it is a copy on each, whose gradient is a partial sum over the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_lite.spec.params import ParamSpec

EMBEDDING, FINAL_NORM, HEAD = "embedding", "final_norm", "head"


@dataclass(frozen=True)
class StagePart:
    """What one pipeline stage computes.

    Attributes:
        stage: its number over the whole model.
        layers: global layer numbers, ascending.
        embedding: it begins with the embedding.
        head: it ends with the final norm, the output layer and the loss.
    """

    stage: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool

    @property
    def uses(self) -> frozenset[str]:
        """Use-sites of the parameters it needs."""
        ends = ((EMBEDDING,) if self.embedding else ()) + ((FINAL_NORM, HEAD) if self.head else ())
        return frozenset((*ends, *(f"layer.{layer}" for layer in self.layers)))


def whole_model(num_layers: int) -> tuple[StagePart, ...]:
    """The one stage of a model that is not cut."""
    return (StagePart(0, tuple(range(num_layers)), embedding=True, head=True),)


def check_parts(parts: Sequence[StagePart], num_layers: int) -> None:
    """Raise unless the stages hold every layer once, in order, and the two ends."""
    layers = [layer for part in parts for layer in part.layers]
    if layers != list(range(num_layers)):
        raise ValueError(f"the stages hold the layers {layers}, the model has {num_layers}")
    ends = [(part.embedding, part.head) for part in parts]
    last = len(parts) - 1
    if ends != [(stage == 0, stage == last) for stage in range(len(parts))]:
        raise ValueError(f"embedding and head are not at the two ends: {ends}")


def specs_on_rank(
    specs: Sequence[ParamSpec],
    parts: Sequence[StagePart],
    placement: Sequence[int],
    pipeline_rank: int,
) -> tuple[ParamSpec, ...]:
    """Return the parameters of one pipeline rank, in forward order.

    Args:
        specs: of the whole model.
        parts: all stages.
        placement: stage -> pipeline rank.
        pipeline_rank: whose parameters.

    Returns:
        Specs with the uses that are here; where several ranks hold a parameter, with its
        holders and a gradient that is partial over them.
    """
    at = [use for part in parts for use in part.uses]
    ranks = [placement[part.stage] for part in parts for _ in part.uses]
    home = dict(zip(at, ranks, strict=True))
    found = []
    for spec in specs:
        here = tuple(use for use in spec.uses if home[use] == pipeline_rank)
        if not here:
            continue
        holders = tuple(sorted({home[use] for use in spec.uses}))
        if len(holders) > 1:
            spec = replace(spec, holders=holders, partial_axes=(*spec.partial_axes, "tied_ends"))
        found.append(replace(spec, uses=here))
    return tuple(found)
