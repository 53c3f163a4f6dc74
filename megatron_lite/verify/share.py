"""What each rank of a layout has to hold and compute, from the spec and closed formulas.

Equal numbers prove nothing if every rank did the whole work: a matching run must also be a
parallel one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_lite.config.flags import parse_config
from megatron_lite.config.pipeline_plan import PipelineShape
from megatron_lite.config.plan import Plan, build_plan
from megatron_lite.mesh.grid import build_grids
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import local_box, local_shape
from megatron_lite.spec.stages import specs_on_rank
from megatron_lite.telemetry.flops import count_rank_gemm_flops
from megatron_lite.verify.session import RankShare


def expected_shares(argv: Sequence[str], ranks: int) -> list[tuple[int, int]]:
    """(stored elements, matrix-product FLOPs of the whole run) of every rank.

    Args:
        argv: flags of a run with a NullTokenizer, constant batch size; no dropped tokens.
        ranks: number of ranks.
    """
    config = parse_config(argv, {})
    assert config.vocab_size is not None
    plan = build_plan(config, ranks, config.vocab_size)
    cut = plan.pipeline
    grid = build_grids(plan.parallel).dense
    samples = plan.batch.ramp[-1][1] // plan.parallel.dp * plan.batch.train_iters
    block = config.recompute_num_layers if config.recompute_method == "block" else None
    shares = []
    for rank in range(ranks):
        coordinate = grid.coordinate(rank)
        here = rank_specs(plan, cut, coordinate["pp"])
        elements = sum(math.prod(local_shape(spec)) for spec in here)
        flops = 0
        for part in cut.parts:
            if cut.placement[part.stage] != coordinate["pp"]:
                continue
            head_rows = 0
            if part.head:
                head = next(spec for spec in reversed(here) if "head" in spec.uses)
                head_rows = local_box(head, coordinate, plan.parallel).shape[0]
            flops += count_rank_gemm_flops(
                plan.model,
                plan.parallel,
                samples=samples,
                layers=part.layers,
                head_rows=head_rows,
                recompute=plan.recompute,
                recomputed_layers=block,
            ).total
        shares.append((elements, flops))
    return shares


def rank_specs(plan: Plan, cut: PipelineShape, pipeline_rank: int) -> tuple[ParamSpec, ...]:
    """Return the parameters that a pipeline rank holds."""
    specs = model_spec(plan.model, plan.parallel)
    return specs_on_rank(specs, cut.parts, cut.placement, pipeline_rank)


def find_share_faults(
    argv: Sequence[str], ranks: int, measured: Sequence[RankShare]
) -> tuple[str, ...]:
    """One sentence per rank and figure that is not the spec's share.

    FLOPs of a rank that did not count them (0) are left out; no ranks, no faults. With experts
    a rank's FLOPs depend on the routing, so their sum is compared.
    """
    faults = []
    expected = expected_shares(argv, ranks) if measured else []
    if expected and parse_config(argv, {}).num_experts is not None:
        total, counted = sum(flops for _, flops in expected), [s.gemm_flops for s in measured]
        if all(counted) and sum(counted) != total:
            faults.append(
                f"the ranks computed {sum(counted):,} matrix-product FLOPs together, the model "
                f"has {total:,}"
            )
        expected = [(elements, 0) for elements, _ in expected]
    for rank, (share, (elements, flops)) in enumerate(zip(measured, expected, strict=True)):
        if share.elements != elements:
            faults.append(f"rank {rank} holds {share.elements:,} elements, its share: {elements:,}")
        if share.gemm_flops and flops and share.gemm_flops != flops:
            faults.append(
                f"rank {rank} computed {share.gemm_flops:,} matrix-product FLOPs, its share: "
                f"{flops:,}"
            )
    return tuple(faults)
