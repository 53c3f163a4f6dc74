"""What stages share: odd numbers of microbatches (PIPE), one loss, one norm, tied ends."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.mesh.launch import RunStatus
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    pipeline_axis,
    sharding_axis,
)
from megatron_lite.verify.certify import Certifier
from megatron_lite.verify.classes import MATCH64
from tests.cases.ranks import _digest, program
from tests.cases.tiny import SGD, flags
from tests.parity.models import parity_case
from tests.pool import RankPool, fork_ranks
from tests.train.program import build_and

Certifiers = Callable[..., Certifier]
WORDS = "embedding.word_embeddings.weight"
DEADLINE_S = 60.0


@pytest.fixture(scope="session")
def tiny_certifier(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Certifiers:
    """`tiny_certifier(model, batch, extra)`: micro-batches of one sample in every run."""
    made: dict[tuple[str, int, str], Certifier] = {}
    root: Path = tmp_path_factory.mktemp("pipe")

    def find(model: str, batch: int, extra: str) -> Certifier:
        key = (model, batch, extra)
        if key not in made:
            data = root / "data"
            case = parity_case(model, data, steps=2, extra=extra, batch=batch, micro=1)
            folder = root / str(len(made))
            made[key] = Certifier(rank_pool, folder, case, MATCH64, timeout_s=DEADLINE_S)
        return made[key]

    return find


FOUR_RANKS = {
    "gpipe": pipeline_axis(4, "gpipe"),
    "1f1b": pipeline_axis(4, "1f1b"),
    "interleaved": pipeline_axis(4, None, 2),
    "zb-h1": pipeline_axis(4, "zb-h1"),
}


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_c072_fewer_microbatches_than_stages_match_and_never_hang(
    tiny_certifier: Certifiers, name: str, microbatches: int
) -> None:
    certifier = tiny_certifier("llama", microbatches, "--num-layers 8")
    differences, _ = certifier.compare((FOUR_RANKS[name],))
    assert not differences, str(differences[0])


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb"])
def test_c073_microbatches_need_not_be_a_multiple_of_the_stages(
    tiny_certifier: Certifiers, schedule: str
) -> None:
    certifier = tiny_certifier("llama", 5, "--num-layers 4")
    differences, _ = certifier.compare((pipeline_axis(2, schedule, 2),))
    assert not differences, str(differences[0])


SMALL = ("--ddp-bucket-size", "1000")
SHARDED = {
    "optim": (data_axis(2), sharding_axis("optim", *SMALL)),
    "optim-ahead": (data_axis(2), sharding_axis("optim", "--overlap-param-gather", *SMALL)),
    "grads": (data_axis(2), sharding_axis("optim_grads", *SMALL)),
    "params": (data_axis(2), sharding_axis("optim_grads_params")),
}
STAGES: dict[str, tuple[Axis, ...]] = {
    "pp2": (pipeline_axis(2),),
    "pp4": (pipeline_axis(4),),
    "zbv2": (pipeline_axis(2, "zbv"),),
    "pp2-optim": (pipeline_axis(2), *SHARDED["optim"]),
    "pp4-grads": (pipeline_axis(4), *SHARDED["grads"]),
    "zbv2-params": (pipeline_axis(2, "zbv"), *SHARDED["params"]),
}


@pytest.mark.parametrize("axes", STAGES.values(), ids=STAGES)
def test_c054_the_norm_is_that_of_all_stages(
    tiny_certifier: Certifiers, axes: tuple[Axis, ...]
) -> None:
    certifier = tiny_certifier("gpt2", 4, "--num-layers 4")
    differences, _ = certifier.compare(axes)
    assert not differences, str(differences[0])
    record, _ = certifier.run(axes)
    for row, wanted in zip(record.train_rows, certifier.reference.train_rows, strict=True):
        assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-10)
    figures = json.loads((record.directory / "dump" / "step_0000001.json").read_text())
    squares = [float(np.square(g).sum()) for g in record.tensors(1, "grad").values()]
    assert figures["grad_norm"] == pytest.approx(math.sqrt(sum(squares)), rel=1e-12)
    assert figures["clip_coefficient"] < 1  # the clip acts, with the norm of the whole model


def hashes_per_step(argv: Sequence[str], rank: int, world_size: int) -> Any:
    """Reports, and the hashes of all parameters that this rank holds, of five steps."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        told = []
        for _ in range(5):
            report = vars(TrainStep(parts, state).run())
            pieces = [
                (piece.spec.name, piece.box.offset, _digest(piece.tensor))
                for piece in parts.optimizer.state_pieces()  # gathered, where they are whole
                if piece.kind == "param"
            ]
            told.append((report, pieces))
        return told

    return build_and(use, argv, rank, world_size)


OPTIMIZERS = {"sgd": SGD, "adam": "--fp64 --optimizer adam --lr 1e-3"}


@pytest.mark.parametrize("strategy", ["no_shard", *SHARDED])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c060_both_copies_of_a_tied_embedding_stay_equal_bit_by_bit(
    rank_pool: RankPool, optimizer: str, strategy: str
) -> None:
    words = [w for w in flags(OPTIMIZERS[optimizer]) if "untie" not in w]
    pp2 = [*words, "--pipeline-model-parallel-size", "2"]
    pp2 += [word for axis in SHARDED.get(strategy, ()) for word in axis.flags]
    ranks = rank_pool.run(4, hashes_per_step, argv=pp2, timeout_s=DEADLINE_S)
    alone = rank_pool.run(1, hashes_per_step, argv=words, timeout_s=DEADLINE_S)[0]
    seen = set()
    for step in range(5):
        held: dict[tuple[int, ...], list[str]] = {}
        for found in ranks:
            for name, offset, digest in found[step][1]:
                if name == WORDS:
                    held.setdefault(offset, []).append(digest)
        # Whole on all four ranks, or the same parts of it on the two of each data rank.
        assert (len(held) > 1) == (strategy == "params")
        for offset, digests in held.items():
            assert len(digests) == (2 if strategy == "params" else 4), offset
            assert len(set(digests)) == 1, (step, offset)
        seen.add(held[0, 0][0])
        report, wanted = ranks[0][step][0], alone[step][0]
        assert report["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=1e-10)
        assert report["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-9)
    assert len(seen) == 5  # it is trained


@pytest.mark.parametrize("ranks", [2, 4])
def test_c052_one_finite_loss_per_iteration_is_printed_and_written(
    tmp_path: Path, ranks: int
) -> None:
    def run(size: int) -> tuple[list[float], list[float]]:
        metrics = tmp_path / f"{size}.jsonl"
        words = f"{SGD} --log-interval 1 --metrics-jsonl {metrics}"
        if size > 1:
            words += f" --pipeline-model-parallel-size {size}"
        exits = fork_ranks(size, program, flags(words, steps=3), timeout=DEADLINE_S)
        assert {found.code for found in exits} == {0}, exits
        printed = "".join(found.stdout for found in exits)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        written = [row["lm_loss"] for row in rows if row["kind"] == "train"]
        return written, [float(x) for x in re.findall(r"lm loss: +([0-9.E+-]+)", printed)]

    wanted, _ = run(1)
    written, printed = run(ranks)
    assert written == pytest.approx(wanted, rel=1e-10)
    assert printed == pytest.approx(wanted, rel=1e-5)
    assert len(printed) == 3


@pytest.mark.parametrize("strategy", ["no_shard", *SHARDED])
def test_c060_tied_ends_match_one_process_with_data_parallel_ranks(
    tiny_certifier: Certifiers, strategy: str
) -> None:
    certifier = tiny_certifier("gpt2", 4, "--num-layers 4")
    data = SHARDED.get(strategy, (data_axis(2),))
    differences, _ = certifier.compare((pipeline_axis(2), *data, microbatch_axis(1)))
    assert not differences, str(differences[0])
