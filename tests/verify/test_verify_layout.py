"""The tool: exit codes, and an answer that names axis, phase and tensor."""

import functools
from pathlib import Path

import pytest

from megatron_lite.verify.certify import Certifier
from tools.verify_layout import main

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 16 --train-iters 100 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--tensor-model-parallel-size 2 --sequence-parallel"
)


def test_a_good_layout_is_certified(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    assert main(["--ranks", "4", "--steps", "2", "--keep", str(keep), *FLAGS.split()]) == 0
    out = capsys.readouterr().out
    assert "hidden_size: 256 -> 32" in out
    assert "equal: tp+sp+dp+micro-batch+native-on on 4 rank(s)" in out
    assert len(list(keep.glob("*/dump/step_0000002.safetensors"))) == 2  # reference and layout


def test_a_difference_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "tests.parity.faults:sp_row_bias_reduction_dropped"
    planted = functools.partialmethod(Certifier.certify, fault=fault)
    monkeypatch.setattr(Certifier, "certify", planted)
    assert main(["--ranks", "2", "--steps", "1", *FLAGS.split()]) == 1
    out = capsys.readouterr().out
    assert "differs: tp+sp+micro-batch+native-on on 2 rank(s), by MATCH64" in out
    assert "axis sp: gradient of decoder.layers.1.mlp.linear_fc2.bias at step 1" in out


def test_a_sharded_data_axis_is_certified(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS.split()[:-3], "--use-megatron-fsdp", "--overlap-param-gather"]
    assert main(["--ranks", "2", "--steps", "1", *flags]) == 0
    assert "equal: dp+sharding+micro-batch+native-on on 2 rank(s)" in capsys.readouterr().out


PIPELINE = (
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--pipeline-schedule interleaved-zb"
)


def test_a_pipeline_is_certified(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS.split(), *PIPELINE.split(), "--micro-batch-size", "1"]
    assert main(["--ranks", "8", "--steps", "1", *flags]) == 0
    out = capsys.readouterr().out
    assert "stages per pipeline rank: 2, of equally many layers" in out
    assert "equal: tp+sp+pp+dp+micro-batch+native-on on 8 rank(s)" in out


def test_a_fault_of_the_pipeline_is_told_as_its_axis(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "tests.parity.pipeline_faults:norm_of_one_stage_missing"
    planted = functools.partialmethod(Certifier.certify, fault=fault)
    monkeypatch.setattr(Certifier, "certify", planted)
    flags = [*FLAGS.split(), "--tensor-model-parallel-size", "1", *PIPELINE.split()]
    flags.remove("--sequence-parallel")
    assert main(["--ranks", "2", "--steps", "1", *flags]) == 1
    assert "axis pp: norm of grad_norm at step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "3"], "--tensor-model-parallel-size 2"),
        (["--ranks", "9"], "--ranks 9: 1 to 8"),
        (["--ranks", "2", "--steps", "0"], "--steps 0"),
        (["--ranks", "2", "--no-such-flag"], "unknown flag --no-such-flag"),
    ],
)
def test_what_cannot_run_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*words, *FLAGS.split()]) == 2
    assert message in capsys.readouterr().err
