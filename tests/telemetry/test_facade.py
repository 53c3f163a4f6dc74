"""One speaker writes; log interval, averages and files are as documented."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.schema import Config
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.telemetry import external
from megatron_lite.telemetry.facade import Telemetry
from megatron_lite.telemetry.flops import MachinePeak
from megatron_lite.telemetry.options import TelemetryOptions, read_options
from megatron_lite.telemetry.records import TrainRow, ValidRow
from megatron_lite.telemetry.sinks import JsonlSink
from tests.telemetry.shapes import layout, tiny_plan


def row(iteration: int, loss: float = 5.0, **changes: Any) -> TrainRow:
    base = TrainRow(
        iteration=iteration,
        consumed_samples=8 * iteration,
        lm_loss=loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        weight_decay=0.1,
        global_batch_size=8,
        valid_tokens=256,
        loss_scale=1.0,
        skipped=False,
        nan=False,
        elapsed_ms=100.0,
    )
    return replace(base, **changes)


def lines_of(stream: io.StringIO) -> list[str]:
    return [line for line in stream.getvalue().splitlines() if " iteration " in line]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_console_prints_the_first_iteration_and_every_interval() -> None:
    stream = io.StringIO()
    with Telemetry(TelemetryOptions(log_interval=4), tiny_plan(), True, stream=stream) as telemetry:
        for iteration in range(1, 11):
            telemetry.train(row(iteration))
    printed = [line.split("iteration ")[1].split("/")[0].strip() for line in lines_of(stream)]
    assert printed == ["1", "4", "8"]


def test_a_resumed_run_prints_its_own_first_iteration() -> None:
    telemetry = Telemetry(
        TelemetryOptions(log_interval=100), tiny_plan(), False, start_iteration=42
    )
    assert [i for i in range(43, 205) if telemetry.prints_at(i)] == [43, 100, 200]


def test_the_line_averages_over_its_interval_without_skipped_iterations() -> None:
    stream = io.StringIO()
    telemetry = Telemetry(TelemetryOptions(log_interval=4), tiny_plan(), True, stream=stream)
    telemetry.train(row(1, 9.0))
    telemetry.train(row(2, 4.0, elapsed_ms=50.0))
    telemetry.train(row(3, float("nan"), skipped=True, nan=True))
    telemetry.train(row(4, 2.0, elapsed_ms=60.0))
    line = lines_of(stream)[1]
    assert "| lm loss: 3.000000E+00 |" in line
    assert "| elapsed time per iteration (ms): 70.0 |" in line
    assert line.endswith("| number of skipped iterations:   1 | number of nan iterations:   1 |")
    telemetry.train(row(8))
    assert lines_of(stream)[2].endswith("iterations:   0 | number of nan iterations:   0 |")


def test_an_interval_of_skipped_iterations_prints_no_loss() -> None:
    stream = io.StringIO()
    telemetry = Telemetry(TelemetryOptions(log_interval=1), tiny_plan(), True, stream=stream)
    telemetry.train(row(1, skipped=True))
    assert "lm loss" not in lines_of(stream)[0]


def test_throughput_is_model_flops_per_rank_and_only_on_demand() -> None:
    stream = io.StringIO()
    plan = tiny_plan(layout(tp=2))
    telemetry = Telemetry(
        TelemetryOptions(log_interval=1, log_throughput=True), plan, True, stream=stream
    )
    elapsed_ms = 276_824_064 / 2 / 1e12 * 1e3 / 12.5  # 12.5 TFLOP/s per rank
    telemetry.train(row(1, elapsed_ms=elapsed_ms))
    assert "| throughput per GPU (TFLOP/s/GPU): 12.5 |" in lines_of(stream)[0]
    stream = io.StringIO()
    Telemetry(TelemetryOptions(log_interval=1), plan, True, stream=stream).train(row(1))
    assert "throughput" not in stream.getvalue()


def test_only_the_speaker_prints_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    stream = io.StringIO()
    options = TelemetryOptions(log_interval=1, metrics_jsonl=str(path))
    with Telemetry(options, tiny_plan(), False, stream=stream) as telemetry:
        telemetry.header(1, 1)
        telemetry.train(row(1))
        telemetry.say("hello")
        telemetry.event("save", 1)
    assert stream.getvalue() == ""
    assert not path.exists()


def test_the_metrics_file_has_a_header_every_iteration_and_is_flushed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    options = TelemetryOptions(log_interval=100, metrics_jsonl=str(path))
    peak = MachinePeak(1e12, "measured")
    telemetry = Telemetry(options, tiny_plan(), True, peak=peak, stream=io.StringIO())
    telemetry.header(1000, 500, seed=7)
    for iteration in (1, 2, 3):
        telemetry.train(row(iteration, float("inf") if iteration == 2 else 1 / 3))
        assert len(read_rows(path)) == 1 + iteration  # there before the next one
    telemetry.valid(ValidRow(3, "valid", 2.0, 99))
    telemetry.event("exit", 3, code=0)
    telemetry.close()
    rows = read_rows(path)
    assert [line["kind"] for line in rows] == ["header", *["train"] * 3, "valid", "event"]
    header = rows[0]
    assert header["flops_convention"] == "full_square"
    assert (header["parameters"], header["parameters_per_rank"], header["seed"]) == (1000, 500, 7)
    assert header["layout"]["tp"] == 1
    assert header["versions"]["python"]
    assert header["peak_convention"] == "measured"
    assert rows[1]["lm_loss"] == 1 / 3
    assert rows[2]["lm_loss"] is None
    assert rows[1]["tokens_per_s"] == 8 * 32 / 0.1
    assert rows[1]["model_tflops_per_rank"] == pytest.approx(276_824_064 / 0.1 / 1e12)
    assert rows[1]["mfu"] == pytest.approx(276_824_064 / 0.1 / 1e12)


def test_without_a_peak_mfu_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    options = TelemetryOptions(metrics_jsonl=str(path))
    with Telemetry(options, tiny_plan(), True, stream=io.StringIO()) as telemetry:
        telemetry.header(1, 1)
        telemetry.train(row(1))
    assert read_rows(path)[0]["peak_flops_per_rank"] is None
    assert read_rows(path)[1]["mfu"] is None


def test_a_resumed_run_appends_after_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "iteration": 1}\n{"kind": "tra')
    sink = JsonlSink(str(path))
    sink.header({"seed": 1})
    sink.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"kind": "tra'
    assert json.loads(lines[2]) == {"kind": "header", "seed": 1}


def test_an_unusable_metrics_path_is_refused_at_start(tmp_path: Path) -> None:
    options = TelemetryOptions(metrics_jsonl=str(tmp_path))
    with pytest.raises(UserError, match="--metrics-jsonl") as caught:
        Telemetry(options, tiny_plan(), True)
    assert caught.value.exit_code == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_with_the_file() -> None:
    sink = JsonlSink("/dev/full")
    with pytest.raises(DamagedError, match="--metrics-jsonl /dev/full: No space left"):
        sink.event("save", 1, {})
    sink.close()  # must not hide the first error behind a second one


def test_validation_is_printed_between_dashes() -> None:
    stream = io.StringIO()
    telemetry = Telemetry(TelemetryOptions(), tiny_plan(), True, stream=stream)
    telemetry.valid(ValidRow(20, "valid", 2.0, 99))
    rule, line, last = stream.getvalue().splitlines()
    assert rule == last == "-" * (len(line) + 1)
    assert line.startswith(" validation loss at iteration 20 | lm loss value: 2.000000E+00 | ")


def test_options_are_read_from_the_configuration() -> None:
    options = read_options(Config(log_interval=7, log_throughput=True, metrics_jsonl="m.jsonl"))
    assert options.log_interval == 7
    assert options.log_throughput
    assert options.metrics_jsonl == "m.jsonl"


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("tensorboard", TelemetryOptions(tensorboard_dir="tb")),
        ("wandb", TelemetryOptions(wandb_project="p")),
    ],
)
def test_without_a_recorders_package_there_is_one_warning_and_the_run_goes_on(
    package: str, options: TelemetryOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external.importlib.util, "find_spec", lambda name: None)
    telemetry = Telemetry(options, tiny_plan(), True, stream=io.StringIO())
    assert len(telemetry.warnings) == 1
    assert f"{package} is not installed" in telemetry.warnings[0]
    telemetry.header(1, 1)
    telemetry.train(row(1))
    telemetry.close()


@dataclass
class FakeRun:
    """Records what a wandb run is given."""

    logged: list[tuple[int, dict[str, float]]]
    finished: bool = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_one_run_all_iterations_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[dict[str, Any], FakeRun]] = []

    def init(**settings: Any) -> FakeRun:
        runs.append((settings, FakeRun([])))
        return runs[-1][1]

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "wandb", module)
    options = TelemetryOptions(wandb_project="p", wandb_exp_name="e", wandb_save_dir="d")
    for is_speaker in (False, False, True):
        telemetry = Telemetry(options, tiny_plan(), is_speaker, stream=io.StringIO())
        telemetry.header(1, 1, wandb_api_key="x" * 40, tokenizer_model="tok.model")
        for iteration in (1, 2, 3):
            telemetry.train(row(iteration, 1.0 / iteration))
        telemetry.valid(ValidRow(3, "valid", 2.0, 99))
        telemetry.scalars({"mem-peak-bytes": 5.0}, 3)
        telemetry.close()
    assert len(runs) == 1
    settings, run = runs[0]
    assert (settings["project"], settings["name"], settings["dir"]) == ("p", "e", "d")
    assert "wandb_api_key" not in settings["config"]
    assert settings["config"]["tokenizer_model"] == "tok.model"
    assert [step for step, values in run.logged if "lm loss" in values] == [1, 2, 3]
    assert (3, {"lm loss validation": 2.0}) in run.logged
    assert (3, {"mem-peak-bytes": 5.0}) in run.logged
    assert run.finished


def test_a_failing_wandb_start_is_refused_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: Any) -> None:
        raise RuntimeError("no network")

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "wandb", module)
    telemetry = Telemetry(
        TelemetryOptions(wandb_project="p"), tiny_plan(), True, stream=io.StringIO()
    )
    with pytest.raises(UserError, match=r"--wandb-project p: wandb\.init failed: no network"):
        telemetry.header(1, 1)


def test_a_broken_package_is_refused_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("No module named 'protobuf'")

    monkeypatch.setattr(external.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(external.importlib, "import_module", broken)
    with pytest.raises(UserError, match=r"--wandb-project: wandb .*'protobuf'"):
        Telemetry(TelemetryOptions(wandb_project="p"), tiny_plan(), True)


class FakeWriter:
    """Records what TensorBoard's writer is given."""

    made: list[FakeWriter]

    def __init__(self, log_dir: str, max_queue: int) -> None:
        self.settings = (log_dir, max_queue)
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False
        FakeWriter.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int | None = None) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_tensorboard_uses_the_known_tags_at_its_own_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeWriter.made = []
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setattr(external.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(external.importlib, "import_module", lambda name: module)
    options = TelemetryOptions(
        tensorboard_dir="tb",
        tensorboard_log_interval=2,
        log_validation_ppl_to_tensorboard=True,
        log_loss_scale_to_tensorboard=False,
    )
    with Telemetry(options, tiny_plan(), True, stream=io.StringIO()) as telemetry:
        telemetry.header(1, 1)
        for iteration in (1, 2, 3, 4):
            telemetry.train(row(iteration))
        telemetry.valid(ValidRow(4, "valid", 0.0, 99))
    (writer,) = FakeWriter.made
    assert writer.settings == ("tb", 1000)
    assert [step for tag, _, step in writer.scalars if tag == "lm loss"] == [2, 4]
    assert ("lm loss vs samples", 5.0, 32) in writer.scalars
    assert ("lm loss validation ppl", 1.0, 4) in writer.scalars
    tags = {tag for tag, _, _ in writer.scalars}
    assert {"learning-rate", "batch-size", "grad-norm", "iteration-time"} <= tags
    assert "loss-scale" not in tags
    assert writer.closed


def test_reporting_imports_no_torch() -> None:
    script = (
        "import sys\n"
        "import megatron_lite.telemetry.facade, megatron_lite.telemetry.summary\n"
        "import megatron_lite.telemetry.timers, megatron_lite.resilience.signals\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_reader_that_leaves_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with (
        os.fdopen(writing, "w") as stream,
        Telemetry(TelemetryOptions(log_interval=1), tiny_plan(), True, stream=stream) as telemetry,
    ):
        for iteration in range(1, 4):
            telemetry.train(row(iteration))
        telemetry.say("more")
    assert capsys.readouterr().err == "note: nobody reads the output any more; the run goes on\n"
