"""Which parameters a pipeline rank holds, and what follows where two ranks hold one.

A stage is a run of layers, the first with the embedding, the last with the final norm and
the head. A parameter lives where its use-sites are. Only a tied embedding has two, at both
ends of the model: on one rank (V placements) it is one parameter used twice, on two ranks
it is a copy on each, whose gradient is a partial sum over the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_lite.pipeline.partition import StagePart
from megatron_lite.spec.params import ParamSpec


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
