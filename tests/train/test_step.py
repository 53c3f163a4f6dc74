"""One step: losses, denominators, verdicts, what is sent, and what is dumped."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lite.checkpoint.tensors import read_safetensors
from megatron_lite.data.loader import Batch
from megatron_lite.mesh.groups import Group, local_group
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.pipeline.actions import Kind
from megatron_lite.train.closing import reduce_closing
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from tests.pool import RankError, RankPool
from tests.train.program import LAYOUTS, LLAMA, RUN, build_and, rows, train_rank

QUIET = ["--hidden-dropout", "0", "--attention-dropout", "0", "--weight-decay", "0"]
EXACT = [*LLAMA, *RUN, *QUIET, "--fp64"]


def masked_batches(valid: Sequence[int], micro: int, rank: int, size: int) -> list[Batch]:
    """Microbatches of fixed samples of which the first so many targets count."""
    s, vocab = 16, 90
    batches = []
    for first in range(rank * micro, len(valid), micro * size):
        ids = torch.arange(first, first + micro)
        stream = (ids[:, None] * 31 + torch.arange(s + 1)[None, :] * 7) % vocab
        counts = torch.tensor(valid[first : first + micro])
        mask = (torch.arange(s)[None, :] < counts[:, None]).float()
        origins = [(0, int(index)) for index in ids]
        tokens, labels = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
        batches.append(Batch(tokens, labels, mask, ids, origins, [(0,)] * micro))
    return batches


def masked_step(
    argv: Sequence[str], valid: Sequence[int], micro: int, rank: int, world_size: int
) -> list[float]:
    """Loss, grad norm, valid tokens of one step; and how much the weights moved."""

    def use(parts: Parts, state: TrainState, status: object) -> list[float]:
        dp = parts.groups.dp
        parts.train_loader = iter([masked_batches(valid, micro, dp.rank, dp.size)])
        before = [p.tensor.clone() for p in parts.optimizer.weight_pieces()]
        report = TrainStep(parts, state).run()
        after = [p.tensor for p in parts.optimizer.weight_pieces()]
        moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
        return [report.lm_loss, report.grad_norm, float(report.valid_tokens), moved]

    sizes = ["--micro-batch-size", str(micro), "--global-batch-size", str(len(valid))]
    result: list[float] = build_and(use, [*argv, *sizes], rank, world_size)
    return result


def test_unequal_valid_tokens_weigh_alike_in_every_cut_of_the_batch(rank_pool: RankPool) -> None:
    def run(size: int, micro: int, *extra: str) -> list[float]:
        argv = [*EXACT, *extra]
        found = rank_pool.run(size, masked_step, argv=argv, valid=[1, 9], micro=micro)
        assert all(other == found[0] for other in found)
        return list(found[0])

    together = run(1, 2)
    assert together[2] == 10
    assert run(1, 1) == pytest.approx(together, rel=1e-12)
    assert run(2, 1) == pytest.approx(together, rel=1e-12)
    legacy = run(1, 1, "--legacy-loss-normalization")
    assert legacy[0] == pytest.approx(together[0], rel=1e-12)  # the log is the token mean
    assert legacy[1] != pytest.approx(together[1], rel=1e-3)
    assert run(2, 1, "--legacy-loss-normalization") == pytest.approx(legacy, rel=1e-12)


def test_legacy_normalization_is_the_mean_of_microbatch_means(rank_pool: RankPool) -> None:
    argv = [*EXACT, "--optimizer", "sgd", "--sgd-momentum", "0", "--clip-grad", "0"]

    def norm(valid: list[int], *extra: str) -> float:
        found = rank_pool.run(1, masked_step, argv=[*argv, *extra], valid=valid, micro=1)
        return float(found[0][1])

    legacy = ("--legacy-loss-normalization",)
    # With equal counts the two normalisations are one; an empty microbatch halves the mean.
    assert norm([5, 5], *legacy) == pytest.approx(norm([5, 5]), rel=1e-12)
    assert norm([5, 0], *legacy) == pytest.approx(norm([5, 0]) / 2, rel=1e-12)


def test_microbatch_without_valid_tokens_changes_nothing_else(rank_pool: RankPool) -> None:
    def run(valid: list[int], micro: int) -> list[float]:
        found: list[list[float]] = rank_pool.run(
            1, masked_step, argv=EXACT, valid=valid, micro=micro
        )
        return found[0]

    third_masked = run([3, 16, 0, 7], 1)
    assert third_masked[2] == 26
    assert run([3, 16, 0, 7], 4) == pytest.approx(third_masked, rel=1e-12)
    loss, norm, valid, moved = run([0, 0, 0, 0], 1)
    assert (loss, norm, valid, moved) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("layout", ["1", "dp2", "tp2"])
def test_non_finite_step_follows_the_policy_on_all_ranks(
    rank_pool: RankPool, layout: str, policy: str
) -> None:
    size, flags = LAYOUTS[layout]
    argv = [*EXACT, *flags, "--nan-policy", policy]
    if policy == "stop":
        with pytest.raises(RankError, match="step 2 stopped before the update") as stopped:
            rank_pool.run(size, poisoned_steps, argv=argv)
        assert "loss of the samples [4" in str(stopped.value)
        return
    found = rank_pool.run(size, poisoned_steps, argv=argv)
    assert all(result == found[0] for result in found)
    reports, counters, moved = found[0]
    assert [report["skipped"] for report in reports] == [False, True, False]
    assert [report["nan"] for report in reports] == [False, True, False]
    assert counters["consumed_samples"] == 12  # the cursor goes on
    assert counters["updates"] == 2
    # The rate of the step after a skipped one is the rate that the skipped one would have used.
    assert reports[2]["learning_rate"] == reports[1]["learning_rate"]
    assert moved == [True, False, True]


def poisoned_steps(argv: Sequence[str], rank: int, world_size: int) -> Any:
    """Three steps; during the second one a weight of data rank 0 is NaN."""

    def use(parts: Parts, state: TrainState, status: object) -> Any:
        reports, moved = [], []
        weight = parts.stage.param("decoder.final_layernorm.weight").detach()
        for number in range(3):
            before = [p.tensor.clone() for p in parts.optimizer.weight_pieces()]
            poisoned = number == 1 and parts.groups.dp.rank == 0
            saved = weight[0].clone()
            weight[0] = float("nan") if poisoned else saved
            reports.append(vars(TrainStep(parts, state).run()))
            if poisoned:
                weight[0] = saved
            after = [p.tensor for p in parts.optimizer.weight_pieces()]
            moved.append(not all(torch.equal(a, b) for a, b in zip(after, before, strict=True)))
        del reports[1]["lm_loss"], reports[1]["grad_norm"]  # NaN equals nothing
        return reports, state.to_dict(), moved

    return build_and(use, argv, rank, world_size)


def test_layouts_train_alike_with_dropout(rank_pool: RankPool, tmp_path: Path) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for layout, (size, flags) in LAYOUTS.items():
        metrics = tmp_path / f"{layout}.jsonl"
        argv = [*LLAMA, *RUN, *flags, "--fp64", "--metrics-jsonl", str(metrics)]
        rank_pool.run(size, train_rank, argv=argv)
        found[layout] = [(row["lm_loss"], row["grad_norm"]) for row in rows(metrics)]
    assert found["1"][-1][0] < found["1"][0][0] - 0.2
    for layout in LAYOUTS:
        for mine, reference in zip(found[layout], found["1"], strict=True):
            assert mine == pytest.approx(reference, rel=1e-9), layout


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_recomputation_changes_no_bit(rank_pool: RankPool, tmp_path: Path, kind: str) -> None:
    def run(*extra: str) -> list[tuple[float, float]]:
        metrics = tmp_path / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        argv = [*LLAMA, *RUN, "--train-iters", "3", *LAYOUTS["tp2-sp"][1], *extra]
        rank_pool.run(2, train_rank, argv=[*argv, "--metrics-jsonl", str(metrics)])
        return [(row["lm_loss"], row["grad_norm"]) for row in rows(metrics)]

    flags = [] if kind == "none" else ["--recompute-granularity", kind]
    if kind == "full":
        flags += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    assert run(*flags) == run()


def test_a_step_sends_one_opening_and_one_closing_reduction(rank_pool: RankPool) -> None:
    argv = [*LLAMA, *RUN, "--ddp-bucket-size", "8000"]
    found = rank_pool.run(2, recorded_step, argv=argv)
    assert found[0] == found[1]
    sent, buckets = found[0]
    opening, *reductions, closing = sent
    assert opening == ["all_reduce.sum", "dp_cp", 1, "float64"]
    assert len(buckets) > 2
    assert reductions == [["all_reduce.sum", "dp_cp", n, "float32"] for n in buckets]
    assert closing == ["all_reduce.sum", "world", 7, "float64"]


def recorded_step(argv: Sequence[str], rank: int, world_size: int) -> Any:
    recorder = Recorder()

    def use(parts: Parts, state: TrainState, status: object) -> Any:
        recorder.clear()
        TrainStep(parts, state).run()
        assert parts.runner.counts[Kind.F] == parts.runner.counts[Kind.B] == 2
        assert parts.runner.counts[Kind.STEP] == 1
        sent = [[r.op, r.group, r.elements, r.dtype] for r in recorder.records]
        return sent, [bucket.elements for bucket in parts.gradients.buckets]

    return build_and(use, argv, rank, world_size, recorder)


def test_dump_is_the_same_in_every_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    argv = [*LLAMA, *RUN, "--fp64", "--train-iters", "2", "--debug-dump-weights"]
    argv += ["--debug-dump-activations", "--optimizer", "sgd"]
    dumps = {}
    for layout, (size, flags) in LAYOUTS.items():
        directory = tmp_path / layout
        rank_pool.run(size, train_rank, argv=[*argv, *flags, "--debug-dump", str(directory)])
        assert not list(directory.glob("*.part"))
        dumps[layout] = (
            read_safetensors(directory / "step_0000002.safetensors"),
            json.loads((directory / "step_0000002.json").read_text()),
        )
    tensors, record = dumps["1"]
    assert tensors["act/embedding"].shape == tensors["act/layers.1"].shape == (16, 4, 32)
    assert "act/final_norm" in tensors
    assert tensors["grad/output_layer.weight"].shape == (90, 32)
    assert tensors["weight/decoder.layers.1.self_attention.linear_k.weight"].dtype == torch.float64
    gradients = [value for name, value in tensors.items() if name.startswith("grad/")]
    squares = sum(float(value.square().sum()) for value in gradients)
    assert squares**0.5 == pytest.approx(record["grad_norm"], rel=1e-12)
    assert record["iteration"] == 2
    samples = record["samples"]
    assert [row["consumed_index"] for row in samples] == [4, 5, 6, 7]
    assert [row["dataset_index"] for row in samples] == [4, 5, 6, 7]
    assert all(row["valid_tokens"] == 16 and row["dataset"] == 0 for row in samples)
    for layout, (others, other) in dumps.items():
        assert others.keys() == tensors.keys()
        for name, value in tensors.items():
            limit = 1e-10 * max(float(value.norm()), 1e-6)
            assert float((others[name] - value).norm()) <= limit, (layout, name)
        assert [row["loss_sum"] for row in other["samples"]] == pytest.approx(
            [row["loss_sum"] for row in samples], rel=1e-10
        )


def test_step_disagreement_is_noticed(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, closing_agrees, steps=[7, 7]) == [True, True]
    assert rank_pool.run(2, closing_agrees, steps=[7, 8]) == [False, False]


def closing_agrees(steps: Sequence[int], rank: int, world_size: int) -> bool:
    group = Group("world", tuple(range(world_size)), rank, dist.group.WORLD, None)
    zero = torch.zeros((), dtype=torch.float64)
    closing = reduce_closing(
        squares=(zero, zero), sums={}, step=steps[rank], vote=0.0, world_group=group
    )
    return closing.step_agrees


def test_closing_vector_is_unpacked_in_its_order() -> None:
    number = [torch.tensor(float(n), dtype=torch.float64) for n in (9, 2, 30, 40)]
    closing = reduce_closing(
        squares=(number[0], number[1]),
        sums={"lm": number[2], "valid": number[3]},
        step=4097,
        vote=5.0,
        world_group=local_group("world"),
    )
    assert (closing.grad_norm, closing.non_finite, closing.vote) == (3.0, 2, 5.0)
    assert closing.sums == {"lm": 30.0, "valid": 40.0}
    assert closing.step_agrees
