"""The ledger of a pipeline rank: live activations as the table has them, as measured."""

from __future__ import annotations

import pytest

from megatron_lite.pipeline.schedules import FIXED_CHUNKS, build_schedule
from megatron_lite.telemetry.memory import StageMemory
from megatron_lite.telemetry.pipeline_memory import peak_alive
from tests.pool import RankPool
from tests.telemetry.pipeline_ranks import measure_forwards
from tests.train.program import LLAMA, RUN

STAGE = StageMemory(kept_bytes=10, deferred_bytes=6, working_bytes=0)
SIZES_WORDS = (
    "--num-layers 8 --hidden-size 64 --ffn-hidden-size 96 --seq-length 32 "
    "--max-position-embeddings 32 --global-batch-size 6 --hidden-dropout 0 "
    "--attention-dropout 0 --native-ops off --train-iters 2"
)


def peak(name: str, rank: int, microbatches: int = 8) -> int:
    chunks = FIXED_CHUNKS[name]
    table = build_schedule(name, 4, chunks, microbatches)
    stages = dict.fromkeys(range(4 * chunks), STAGE)
    return peak_alive(table.ranks[rank], stages, message_bytes=0).activations_bytes


def test_1f1b_keeps_as_many_microbatches_as_ranks_follow() -> None:
    assert [peak("1f1b", rank) for rank in range(4)] == [40, 30, 20, 10]


def test_gpipe_keeps_all() -> None:
    assert peak("gpipe", 0) == peak("gpipe", 3) == 80


def test_deferred_weight_gradients_cost_only_what_i_leaves() -> None:
    # Rank 3 has one microbatch between F and I and three between I and W.
    assert peak("zb-h1", 3) == 10 + 3 * 6
    assert peak("zb-h1", 0) == 40


def test_messages_under_way_are_counted() -> None:
    table = build_schedule("1f1b", 2, 1, 4)
    peaks = [peak_alive(row, {0: STAGE, 1: STAGE}, message_bytes=1) for row in table.ranks]
    assert all(peak.messages_bytes > 0 for peak in peaks)
    assert peaks[0].total_bytes == peaks[0].activations_bytes + peaks[0].messages_bytes


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_measured_live_tensors_equal_the_estimate_at_every_forward(
    rank_pool: RankPool, schedule: str
) -> None:
    argv = [*LLAMA, *RUN, *SIZES_WORDS.split(), "--pipeline-model-parallel-size", "2"]
    argv += ["--pipeline-schedule", schedule]
    for rank in rank_pool.run(2, measure_forwards, argv=argv):
        for measured, estimated in rank:
            # What the formula leaves out: the sums of every microbatch's loss.
            assert estimated == pytest.approx(measured, rel=0.015)
