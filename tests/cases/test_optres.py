"""Resume (OPTRES): new processes continue a run as if it had never stopped, bit by bit."""

from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.reader import open_checkpoint
from tests.cases.conftest import Resumed
from tests.cases.layouts import FEW, LAYOUTS, REFERENCE, with_axes
from tests.cases.ranks import evaluate_then_step, weight_decays
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN, train_rank

# One process, tensor and data parallelism; a later axis brings its own.
EXACT = dict.fromkeys(
    (REFERENCE, "tp2-sp", "dp2", "tp2-sp-dp2", *with_axes({"pp"}), *with_axes({"zero"}))
)


@pytest.mark.parametrize("layout", EXACT)
def test_c033_a_resumed_run_prints_the_same_lines_and_leaves_the_same_bits(
    resumed: Resumed, layout: str
) -> None:
    whole, rest = resumed(layout)
    assert len(whole.lines) == 10 and len(rest.lines) == 5
    assert rest.lines == whole.lines[5:]
    for found, wanted in zip(rest.rows, whole.rows[5:], strict=True):
        for key in ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
            assert found[key] == wanted[key], key
    first, second = open_checkpoint(whole.save), open_checkpoint(rest.save)
    assert first.step == second.step == 10
    assert first.names == second.names
    assert any(name.startswith("optim/exp_avg_sq/") for name in first.names)
    for name in first.names:
        assert torch.equal(first.read(name), second.read(name)), name


QUIET = ["--hidden-dropout", "0", "--attention-dropout", "0", "--weight-decay", "0"]
BF16 = [*LLAMA, *RUN, *QUIET, "--bf16", "--save-interval", "100", "--eval-global-batch-size", "4"]


SHARDED = ("dp2-optim", "dp2-grads", "dp2-params")


@pytest.mark.parametrize("layout", (*FEW, *SHARDED, "dp4-hybrid", "zbv-dp2-params"))
def test_c034_weights_alone_are_what_the_next_step_computes_with(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    size, flags = LAYOUTS[layout].ranks, LAYOUTS[layout].flags
    saving = ["--save", str(tmp_path / "a"), "--exit-interval", "3"]
    rank_pool.run(size, train_rank, argv=[*BF16, *flags, *saving])
    argv = [*BF16, *flags, "--load", str(tmp_path / "a"), "--no-load-optim"]
    argv += ["--lr", "0", "--min-lr", "0", "--override-opt_param-scheduler"]
    argv += ["--save", str(tmp_path / "b"), "--save-interval", "1"]
    found = rank_pool.run(size, evaluate_then_step, argv=argv)
    evaluated, stepped = found[0]
    assert all(other == found[0] for other in found)
    assert stepped == pytest.approx(evaluated, rel=1e-6)  # sums of fp32, in another order
    before, after = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert (before.step, after.step) == (3, 4)
    for name in after.names:
        if "/" not in name:
            assert torch.equal(before.read(name), after.read(name)), name
        elif name.startswith("optim/master/"):
            weight = before.read(name.removeprefix("optim/master/"))
            assert after.dtype(name) == torch.float32
            assert torch.equal(after.read(name).bfloat16(), weight), name


@pytest.mark.parametrize("layout", (REFERENCE, *SHARDED))
def test_c034_masters_are_kept_in_full_precision_over_a_resume(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    size, flags = LAYOUTS[layout].ranks, LAYOUTS[layout].flags
    for name, stop in (("whole", 10), ("parts", 5), ("parts", 10)):
        save = ["--save", str(tmp_path / name), "--load", str(tmp_path / name)]
        argv = [*BF16, *flags, *save, "--exit-interval", str(stop)]
        rank_pool.run(size, train_rank, argv=argv)
    whole, checkpoint = open_checkpoint(tmp_path / "whole"), open_checkpoint(tmp_path / "parts")
    assert whole.step == checkpoint.step == 10
    assert whole.names == checkpoint.names
    for name in whole.names:
        assert torch.equal(whole.read(name), checkpoint.read(name)), name
    masters = [name for name in checkpoint.names if name.startswith("optim/master/")]
    assert masters
    values = [checkpoint.read(name) for name in masters]
    assert all(value.dtype == torch.float32 for value in values)
    # Rebuilt from bf16 they would hold nothing below its bits.
    assert any(not torch.equal(value, value.bfloat16().float()) for value in values)


@pytest.mark.parametrize("layout", dict.fromkeys((*FEW, *with_axes({"pp"}))))
def test_c037_every_rank_decays_the_same_parameters_before_and_after_a_load(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    size, flags = LAYOUTS[layout].ranks, LAYOUTS[layout].flags
    words = [word for word in LLAMA if word != "--disable-bias-linear"]
    argv = [*words, *RUN, *flags, "--weight-decay", "0.1"]
    before = rank_pool.run(size, weight_decays, argv=argv)
    saving = ["--save", str(tmp_path), "--save-interval", "100", "--exit-interval", "1"]
    rank_pool.run(size, train_rank, argv=[*argv, *saving])
    after = rank_pool.run(size, weight_decays, argv=[*argv, "--load", str(tmp_path)])
    assert after == before
    seen: dict[str, float] = {}
    for rank in before:
        for name, (dims, decay) in rank.items():
            assert decay == (0.1 if dims > 1 else 0.0), name
            assert seen.setdefault(name, decay) == decay, name
    assert set(seen.values()) == {0.0, 0.1}
    names = {name for name in open_checkpoint(tmp_path).names if "/" not in name}
    assert set(seen) == names
