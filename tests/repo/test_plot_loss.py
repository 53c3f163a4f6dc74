"""The loss tool reads metrics files, draws them, and measures the unigram entropy exactly."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.writer import DatasetWriter

ROOT = Path(__file__).resolve().parents[2]


def plot_loss(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/plot_loss.py", *map(str, arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    rows: list[dict[str, object]] = [{"kind": "header"}]
    rows += [{"kind": "train", "iteration": i, "lm_loss": 9.0} for i in range(40, 60)]
    rows += [{"kind": "train", "iteration": i, "lm_loss": 5 - 0.05 * i} for i in range(1, 61)]
    rows += [{"kind": "train", "iteration": 61, "lm_loss": None}]
    rows += [{"kind": "valid", "iteration": 60, "split": "valid", "lm_loss": 0.5}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_dataset(prefix: Path) -> float:
    """Write tokens of frequencies 1/2, 1/4, 1/4 and return their entropy."""
    with DatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in ([7, 7, 7, 7], [1, 1, 300, 300]):
            writer.add_document(np.array(document, dtype=np.uint16))
        writer.finalize()
    return 0.5 * math.log(2) + 0.5 * math.log(4)


def test_repeated_iterations_count_once_and_nulls_not_at_all(metrics: Path) -> None:
    result = plot_loss(metrics)
    assert result.returncode == 0, result.stderr
    assert "1 to 60 iterations" in result.stdout
    assert "4.950 |o" in result.stdout and "2.000 |" in result.stdout
    assert "9.000" not in result.stdout


def test_validation_loss_is_compared_with_the_unigram_entropy(
    metrics: Path, tmp_path: Path
) -> None:
    entropy = write_dataset(tmp_path / "data")
    result = plot_loss(metrics, "--dataset", tmp_path / "data")
    assert result.returncode == 0, result.stderr
    assert f"unigram entropy of the corpus: {entropy:.3f} nat" in result.stdout
    assert f"0.500 nat per token, {entropy - 0.5:.3f} below it" in result.stdout


def test_picture_is_written(metrics: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = plot_loss(metrics, "--output", tmp_path / "loss.png")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, "not json\n", '{"kind": "header"}\n'])
def test_unusable_metrics_file_is_one_message_and_exit_2(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    result = plot_loss(path)
    assert result.returncode == 2
    assert str(path) in result.stderr and "Traceback" not in result.stderr
