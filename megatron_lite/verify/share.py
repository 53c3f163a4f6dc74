"""What each rank of a layout has to hold and compute, from the spec and closed formulas.

Equal numbers prove nothing if every rank did the whole work: a matching run must also be a
parallel one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_lite.config.flags import parse_config
from megatron_lite.config.plan import build_plan
from megatron_lite.mesh.grid import build_grids
from megatron_lite.spec.params import model_spec
from megatron_lite.spec.shards import local_box, local_shape
from megatron_lite.telemetry.flops import count_rank_gemm_flops
from megatron_lite.verify.session import RankShare


def expected_shares(argv: Sequence[str], ranks: int) -> list[tuple[int, int]]:
    """(stored elements, matrix-product FLOPs of the whole run) of every rank.

    Args:
        argv: flags of a run with a NullTokenizer, constant batch size and dense layers.
        ranks: number of ranks.
    """
    config = parse_config(argv, {})
    assert config.vocab_size is not None
    plan = build_plan(config, ranks, config.vocab_size)
    specs = model_spec(plan.model, plan.parallel)
    grid = build_grids(plan.parallel).dense
    head = next(spec for spec in reversed(specs) if "head" in spec.uses)
    elements = sum(math.prod(local_shape(spec)) for spec in specs)
    samples = plan.batch.ramp[-1][1] // plan.parallel.dp * plan.batch.train_iters
    shares = []
    for rank in range(ranks):
        box = local_box(head, grid.coordinate(rank), plan.parallel)
        flops = count_rank_gemm_flops(
            plan.model,
            plan.parallel,
            samples=samples,
            layers=plan.model.num_layers,
            head_rows=box.shape[0],
            recompute=plan.recompute,
            recomputed_layers=config.recompute_num_layers
            if config.recompute_method == "block"
            else None,
        )
        shares.append((elements, flops.total))
    return shares


def find_share_faults(
    argv: Sequence[str], ranks: int, measured: Sequence[RankShare]
) -> tuple[str, ...]:
    """One sentence per rank and figure that is not the spec's share.

    FLOPs of a rank that did not count them (0) are left out; no ranks, no faults.
    """
    faults = []
    for rank, (share, (elements, flops)) in enumerate(
        zip(measured, expected_shares(argv, ranks), strict=bool(measured))
    ):
        if share.elements != elements:
            faults.append(f"rank {rank} holds {share.elements:,} elements, its share: {elements:,}")
        if share.gemm_flops and share.gemm_flops != flops:
            faults.append(
                f"rank {rank} computed {share.gemm_flops:,} matrix-product FLOPs, its share: "
                f"{flops:,}"
            )
    return tuple(faults)
