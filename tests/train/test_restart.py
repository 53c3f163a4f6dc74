"""Restarts that go wrong elsewhere: pointers, other models, other data, other cuts of the batch."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint import catalog, load
from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.data.indexed import bin_path
from megatron_lite.data.writer import DatasetWriter
from megatron_lite.train.step import StepReport, TrainStep
from tests.cases.ranks import program
from tests.pool import RankError, RankPool, fork_ranks
from tests.train.program import LAYOUTS, LLAMA, OWN_DATA, RUN, rows, train_rank
from tests.train.test_state import printed

MORE = ["--eval-iters", "0", "--save-interval", "100"]
ARGV, OWN = [*LLAMA, *RUN, *MORE], [*LLAMA, *OWN_DATA, *MORE]


def save(pool: RankPool, root: Path, steps: int = 2, layout: str = "1", *more: str) -> None:
    size, flags = LAYOUTS[layout]
    argv = [*ARGV, *flags, "--save", str(root), "--load", str(root)]
    pool.run(size, train_rank, argv=[*argv, "--exit-interval", str(steps), *more])


def resume(pool: RankPool, root: Path, *more: str, layout: str = "1") -> str:
    """What a resume prints that ends after one more step."""
    size, flags = LAYOUTS[layout]
    argv = [*ARGV, *flags, "--load", str(root), "--exit-interval", "1", *more]
    return "".join(pool.run(size, printed, argv=argv))


# Row 43: the newest published checkpoint that verifies is chosen, by one rank for all.


@pytest.mark.parametrize("text", ["", "garbage", "4160813071", "release", "2"])
def test_row_43_a_tracker_that_lies_changes_nothing(
    rank_pool: RankPool, tmp_path: Path, text: str
) -> None:
    save(rank_pool, tmp_path, 2)
    save(rank_pool, tmp_path, 4)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert "at iteration 4" in resume(rank_pool, tmp_path, layout="dp2")


def test_row_43_a_garbled_pointer_is_passed_over_with_its_reason(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path, 2)
    save(rank_pool, tmp_path, 4)
    (tmp_path / "published" / "4.json").write_text("{}")
    told = resume(rank_pool, tmp_path, layout="tp2")
    assert "warning: step 4 passed over: " in told
    assert "at iteration 2" in told
    (tmp_path / "published" / "2.json").write_text("{}")
    with pytest.raises(RankError, match="DamagedError"):
        resume(rank_pool, tmp_path, layout="tp2")


def resume_blind(argv: Sequence[str], rank: int, world_size: int) -> str:
    """A resume in which all ranks but the first see the directory as it was before."""
    original = catalog.find_checkpoint

    def stale(path: Path, step: int | None = None, **options: object) -> catalog.Found:
        return original(path, 2, **options)  # type: ignore[arg-type]

    with patch.object(load, "find_checkpoint", original if rank == 0 else stale):
        return printed(argv, rank, world_size)


def test_row_43_ranks_that_see_other_checkpoints_load_the_same_one(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path, 2)
    save(rank_pool, tmp_path, 4)
    argv = [*ARGV, "--load", str(tmp_path), "--exit-interval", "1"]
    argv += ["--metrics-jsonl", str(tmp_path / "m")]
    told = "".join(rank_pool.run(2, resume_blind, argv=argv))
    assert "at iteration 4" in told
    assert [row["iteration"] for row in rows(tmp_path / "m")] == [5]


# Row 46: another model is refused, whatever differs.


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--ffn-hidden-size", "64"], "ffn_hidden_size: 48 in the checkpoint, 64 now"),
        (["--rotary-base", "500"], "rotary_base.base: 10000.0 in the checkpoint, 500.0 now"),
        (["--norm-epsilon", "1e-3"], "layernorm_epsilon: 1e-05 in the checkpoint"),
        (["--qk-layernorm"], "qk_layernorm: False in the checkpoint, True now"),
        (["--fp64"], "dtype: decoder.final_layernorm.weight is float32, expected float64"),
        (["--bf16"], "missing: optim/master/"),
    ],
)
def test_row_46_another_model_is_refused_before_anything_is_loaded(
    rank_pool: RankPool, tmp_path: Path, change: list[str], told: str
) -> None:
    save(rank_pool, tmp_path)
    with pytest.raises(RankError, match="UserError") as refused:
        resume(rank_pool, tmp_path, *change, layout="dp2")
    assert told in str(refused.value)


# Row 47: the cursor is global.


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_row_47_no_sample_is_skipped_or_repeated_on_other_data_ranks(
    rank_pool: RankPool, tmp_path: Path, ranks: int, workers: str
) -> None:
    dump = ["--debug-dump", str(tmp_path / "dump"), "--num-workers", workers]
    save(rank_pool, tmp_path / "save", 3, "dp2", *dump)
    argv = [*ARGV, "--load", str(tmp_path / "save"), "--train-iters", "10", *dump]
    told = "".join(rank_pool.run(ranks, printed, argv=argv))
    assert (
        f"resume contract: coverage-equivalent: layout changed (dp 2 -> {ranks}, edp 2 -> {ranks}, "
        f"world_size 2 -> {ranks}), same samples in the same global batches"
    ) in told
    steps = [json.loads(path.read_text()) for path in sorted((tmp_path / "dump").glob("*.json"))]
    seen = [[row["consumed_index"] for row in step["samples"]] for step in steps]
    assert seen == [list(range(4 * k, 4 * k + 4)) for k in range(10)]


# Row 48: the data of a resumed run is the data it was started with.


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Two data sets of one length, as a blend."""
    words: list[str] = []
    for number, weight in enumerate(("0.7", "0.3")):
        prefix = tmp_path / f"part{number}"
        rng = np.random.default_rng(number)
        with DatasetWriter(prefix, np.uint16) as writer:
            for _ in range(200):
                writer.add_document(np.append(rng.integers(0, 89, 40), 89))
            writer.finalize()
        words += [weight, str(prefix)]
    return words


def flip(words: list[str]) -> None:
    """One bit of one token, inside a block that is looked at."""
    path = bin_path(words[3])
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))


def replace(words: list[str]) -> None:
    """Other tokens of the same lengths."""
    path = bin_path(words[1])
    size = path.stat().st_size // 2
    tokens = np.random.default_rng(9).integers(0, 89, size).astype("<u2")
    path.write_bytes(tokens.tobytes())


def reweight(words: list[str]) -> None:
    words[0], words[2] = "0.5", "0.5"


def reorder(words: list[str]) -> None:
    words[:] = [words[0], words[3], words[2], words[1]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (flip, "part1: data_path.train.1.bin_sampled_sha256: "),
        (replace, "part0: data_path.train.0.bin_sampled_sha256: "),
        (reweight, "part0: data_path.train.0.weight: 0.7 in the checkpoint, 0.5 now"),
        (reorder, "data_path.train.0.bin_sampled_sha256: "),
    ],
)
def test_row_48_changed_data_is_refused_by_its_fingerprint(
    rank_pool: RankPool,
    tmp_path: Path,
    corpus: list[str],
    change: Callable[[list[str]], None],
    told: str,
) -> None:
    argv = [*OWN, "--split", "1", "--data-path"]
    saving = ["--save", str(tmp_path / "save"), "--exit-interval", "2"]
    rank_pool.run(1, train_rank, argv=[*argv, *corpus, *saving])
    state = open_checkpoint(tmp_path / "save").state
    assert state["cursor"]["blend"] == [5, 3]  # of eight samples
    change(corpus)
    again = [*argv, *corpus, "--load", str(tmp_path / "save")]
    again += ["--metrics-jsonl", str(tmp_path / "m")]
    with pytest.raises(RankError, match="UserError") as refused:
        rank_pool.run(2, train_rank, argv=again)
    assert told in str(refused.value)
    assert "--data-path; --allow-resume-change data_path accepts it" in str(refused.value)
    assert not (tmp_path / "m").exists()
    accepted = [*again, "--allow-resume-change", "data_path", "--exit-interval", "3"]
    (text,) = rank_pool.run(1, printed, argv=accepted)
    assert "resume contract: neither replay nor coverage-equivalent" in text
    assert "(data_path)" in text


def test_row_48_a_data_file_that_is_gone_is_named_before_the_first_step(
    rank_pool: RankPool, tmp_path: Path, corpus: list[str]
) -> None:
    argv = [*OWN, "--split", "1", "--data-path", *corpus]
    saving = ["--save", str(tmp_path / "save"), "--exit-interval", "2"]
    rank_pool.run(1, train_rank, argv=[*argv, *saving])
    bin_path(corpus[1]).unlink()
    with pytest.raises(RankError, match=r"part0\.bin does not exist"):
        rank_pool.run(1, train_rank, argv=[*argv, "--load", str(tmp_path / "save")])


def damage_at(step: int, path: str, place: int, argv: Sequence[str]) -> int:
    """The program, on whose disk one byte rots while a step is under way."""
    run = TrainStep.run

    def run_and_rot(self: TrainStep) -> StepReport:
        if self.state.iteration == step and self.parts.groups.world.rank == 0:
            with Path(path).open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))
        return run(self)

    with patch.object(TrainStep, "run", run_and_rot):
        return program(argv)


def test_row_48_a_byte_that_changes_during_the_run_ends_it_with_file_and_offset(
    corpus: list[str],
) -> None:
    path = bin_path(corpus[3])
    size, flags = LAYOUTS["dp2"]
    argv = [*OWN, *flags, "--split", "1", "--data-path", *corpus, "--train-iters", "200"]
    argv += ["--data-check-interval", "1"]
    exits = fork_ranks(size, damage_at, 3, str(path), 5000, argv)
    assert [found.code for found in exits] == [3] * size, exits
    told = "".join(found.stderr for found in exits)
    assert told.count(f"{path}: the block of 4096 bytes at offset ") == 1, told
    offset = int(told.split("at offset ")[1].split()[0])
    assert offset <= 5000 < offset + 4096


# Flags of loading.


def test_the_pretrained_checkpoint_is_taken_where_load_is_empty(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path / "old")
    argv = [*ARGV, "--save", str(tmp_path / "new"), "--load", str(tmp_path / "new")]
    argv += ["--pretrained-checkpoint", str(tmp_path / "old"), "--seed", "7"]
    metrics = ["--metrics-jsonl", str(tmp_path / "m")]
    (first,) = rank_pool.run(1, printed, argv=[*argv, *metrics, "--exit-interval", "3"])
    (event,) = [row for row in rows(tmp_path / "m", "event") if row["event"] == "load"]
    assert event["directory"] == str(tmp_path / "old")
    assert "weights come from --pretrained-checkpoint" in first
    assert "weights only, this run starts at step 0" in first
    assert "iteration        1/" in first
    (second,) = rank_pool.run(1, printed, argv=[*argv, "--exit-interval", "4"])
    assert "resume contract: deterministic replay: same layout, bitwise" in second
    assert "iteration        4/" in second and "--pretrained" not in second
    with pytest.raises(RankError, match="no checkpoint of step 1; published are 4, 3"):
        rank_pool.run(1, train_rank, argv=[*argv, "--ckpt-step", "1"])


def test_a_pretrained_checkpoint_that_is_not_there_is_refused(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    argv = [*ARGV, "--pretrained-checkpoint", str(tmp_path / "none")]
    with pytest.raises(RankError, match="UserError: --pretrained-checkpoint: "):
        rank_pool.run(1, train_rank, argv=argv)


def test_weights_alone_fill_the_masters_as_precisely_as_they_are_stored(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path / "wide")
    argv = [*ARGV, "--bf16", "--load", str(tmp_path / "wide"), "--finetune", "--lr", "0"]
    argv += ["--min-lr", "0", "--weight-decay", "0", "--save", str(tmp_path / "narrow")]
    rank_pool.run(2, train_rank, argv=[*argv, *LAYOUTS["tp2"][1], "--train-iters", "1"])
    wide, narrow = open_checkpoint(tmp_path / "wide"), open_checkpoint(tmp_path / "narrow")
    names = [name for name in wide.names if not name.startswith("optim/")]
    for name in names:
        assert torch.equal(narrow.read(f"optim/master/{name}"), wide.read(name)), name
        assert torch.equal(narrow.read(name), wide.read(name).bfloat16()), name
    assert any(not torch.equal(wide.read(n), wide.read(n).bfloat16().float()) for n in names)


def test_a_step_can_be_chosen_and_a_missing_one_is_refused(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path, 2)
    save(rank_pool, tmp_path, 4)
    assert "at iteration 2" in resume(rank_pool, tmp_path, "--ckpt-step", "2")
    with pytest.raises(RankError, match="no checkpoint of step 3; published are 4, 2"):
        resume(rank_pool, tmp_path, "--ckpt-step", "3")


def test_flags_of_random_states_are_accepted_since_there_are_none(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path / "a", 2, "1", "--no-save-rng")
    told = resume(rank_pool, tmp_path / "a", "--no-load-rng")
    assert "resume contract: deterministic replay" in told
    assert "accepted, no effect: --no-load-rng (randomness has no state here)" in told


def test_without_the_optimizer_the_run_goes_on_at_its_step(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path)
    told = resume(rank_pool, tmp_path, "--no-load-optim")
    assert "--no-load-optim: the optimizer's state starts at zero" in told
    assert "iteration        3/" in told


def test_differences_are_logged_line_by_line_with_both_values(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path)
    told = resume(rank_pool, tmp_path, "--clip-grad", "0.5", layout="tp2-sp")
    for line in (
        "clip_grad: 1.0 in the checkpoint, 0.5 now",
        "layout.tp: 1 in the checkpoint, 2 now",
        "layout.sequence_parallel: False in the checkpoint, True now",
        "tensor_model_parallel_size: 1 in the checkpoint, 2 now",
    ):
        assert told.count(f"changed since the checkpoint: {line}") == 1, line
    assert "neither replay nor coverage-equivalent: " in told and "(clip_grad)" in told


def test_weights_alone_tell_changed_flags_and_not_where_the_other_run_stood(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path)
    told = resume(rank_pool, tmp_path, "--finetune", "--clip-grad", "0.5", layout="tp2-sp")
    assert told.count("changed since the checkpoint: clip_grad: 1.0 in the checkpoint") == 1
    assert "checkpoint: layout." not in told and "checkpoint: cursor." not in told
