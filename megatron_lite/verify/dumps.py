"""What a run left behind: its metrics rows and its `--debug-dump` files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from megatron_lite.errors import DamagedError


class RunRecord:
    """Metrics and dumps of one finished run, read when asked for."""

    def __init__(self, directory: Path) -> None:
        """Open `directory`, which holds metrics.jsonl and dump/."""
        self.directory = directory

    @cached_property
    def train_rows(self) -> list[dict[str, Any]]:
        """The rows of kind "train", in order."""
        path = self.directory / "metrics.jsonl"
        try:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise DamagedError(f"{path}: no readable metrics of a run ({error})") from error
        return [row for row in rows if row["kind"] == "train"]

    @property
    def steps(self) -> int:
        """Number of steps that were run."""
        return len(self.train_rows)

    def tensors(self, step: int, kind: str) -> Mapping[str, np.ndarray[Any, Any]]:
        """Dumped tensors of one-based `step` and kind "act", "grad" or "weight", kind cut off."""
        path = self.directory / "dump" / f"step_{step:07d}.safetensors"
        prefix = f"{kind}/"
        return {
            name.removeprefix(prefix): values
            for name, values in load_file(path).items()
            if name.startswith(prefix)
        }

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Per-sample rows of one-based `step`."""
        path = self.directory / "dump" / f"step_{step:07d}.json"
        rows: list[dict[str, Any]] = json.loads(path.read_text())["samples"]
        return rows
