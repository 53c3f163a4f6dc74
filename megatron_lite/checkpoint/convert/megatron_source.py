"""Megatron-LM's directories: where the files are, and reading them in another process.

A pickle can run code of whoever made it, so nothing is read without the user's word, and
then by `megatron_unpickle.py`: its own process, `python -I`, an empty environment, a
private temporary directory. This process reads only what that one wrote, plain safetensors
and JSON, with the strict readers. On disk it takes as much as the weights, in that process
the memory of the largest tensor.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.commit import TRACKER_FILE
from megatron_lite.checkpoint.convert import megatron_unpickle
from megatron_lite.checkpoint.files import read_file
from megatron_lite.checkpoint.shards import ShardTensor, read_header
from megatron_lite.checkpoint.strict_json import parse_json
from megatron_lite.errors import DamagedError, UserError

RANK_FILE = "model_optim_rng.pt"
RANK_DIRECTORY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
ITERATION_DIRECTORY = re.compile(r"iter_\d{7,}|release")
MAX_RESULT_BYTES = 64 * 2**20
NEEDS_TRUST = (
    "holds pickles of Megatron-LM, and a pickle can run code of whoever made it: "
    "--trust-pickle reads it, in a process of its own without your environment, "
    "and takes nothing but tensors and plain values"
)


@dataclass(frozen=True)
class Located:
    """An iteration's directory and what is in it.

    Attributes:
        kind: "torch" (a file per rank) or "torch_dist".
        files: (tensor rank, pipeline rank) -> rank file, for "torch".
    """

    directory: Path
    kind: str
    files: Mapping[tuple[int, int], Path]


@dataclass(frozen=True)
class RankTensors:
    """What one source file held, converted: tensors by (chunk, name as it was)."""

    path: Path
    origin: Path
    tensors: Mapping[tuple[int, str], ShardTensor]
    others: tuple[tuple[int, str], ...]
    chunks: int
    args: Mapping[str, Any]
    version: Any


def locate(directory: str | Path, step: int | None) -> Located:
    """Find the iteration to read in a SAVE root, or take the directory of an iteration.

    Raises:
        UserError: nothing of Megatron-LM is there, or not this iteration.
    """
    place = Path(directory)
    if not place.is_dir():
        raise UserError(f"{place}: is no directory")
    if not _holds_ranks(place):
        place = place / _iteration_name(place, step)
        if not place.is_dir():
            raise UserError(f"{place}: is missing")
    elif step is not None and place.name != f"iter_{step:07d}":
        raise UserError(f"{place}: is one iteration's directory, and not that of step {step}")
    if (place / ".metadata").exists():
        return Located(place, "torch_dist", {})
    files = {}
    for child in sorted(place.iterdir()):
        match = RANK_DIRECTORY.fullmatch(child.name)
        if match is None:
            continue
        if match[3] is not None:
            raise UserError(f"{child}: expert-parallel checkpoints are not converted yet")
        files[int(match[1]), int(match[2] or 0)] = child / RANK_FILE
    if not files:
        raise UserError(f"{place}: holds neither mp_rank_XX nor .metadata")
    return Located(place, "torch", files)


def check_ranks(located: Located, tp: int, pp: int) -> None:
    """Compare the rank files with the layout that their arguments tell.

    Raises:
        DamagedError: naming the files that are missing or too many.
    """
    wanted = {(t, p) for p in range(pp) for t in range(tp)}
    layout = f"its args say tensor parallel {tp}, pipeline parallel {pp}"
    missing = sorted(wanted - located.files.keys())
    if missing:
        names = ", ".join(str(rank_file(located.directory, t, p, pp)) for t, p in missing[:8])
        raise DamagedError(f"{located.directory}: {layout}; missing: {names}")
    extra = sorted(located.files.keys() - wanted)
    if extra:
        names = ", ".join(str(located.files[key].parent) for key in extra[:8])
        raise DamagedError(f"{located.directory}: {layout}; beyond that there are: {names}")


def rank_file(directory: Path, tensor_rank: int, pipeline_rank: int, pp: int) -> Path:
    """Return the path of one rank's file."""
    suffix = f"_{pipeline_rank:03d}" if pp > 1 else ""
    return directory / f"mp_rank_{tensor_rank:02d}{suffix}" / RANK_FILE


@contextmanager
def unpickle(
    kind: str, sources: Mapping[tuple[int, int], Path]
) -> Iterator[dict[tuple[int, int], RankTensors]]:
    """Convert pickled files in another process; the result is gone at the end of the block.

    Args:
        kind: "torch", or "torch_dist" for the directory of a distributed checkpoint.
        sources: what to read, by rank.

    Raises:
        DamagedError: a file cannot be read, or names code.
    """
    for path in sources.values():
        if not path.exists():
            raise DamagedError(f"{path}: is missing")
    with tempfile.TemporaryDirectory(prefix="megatron-") as name:
        out = Path(name)
        request = {
            "kind": kind,
            "sources": [str(path.resolve()) for path in sources.values()],
            "out": str(out),
            "path": [str(Path(__file__).parents[3]), str(Path(torch.__file__).parents[1])],
        }
        result = run_reader(request, out)
        yield {
            key: _rank_tensors(out / f"{number}.safetensors", path, result[number])
            for number, (key, path) in enumerate(sources.items())
        }


def run_reader(request: Mapping[str, Any], out: Path) -> list[Any]:
    """Run `megatron_unpickle.py` in its own process; return its report on each source."""
    # Only what finds shared libraries; no credentials, no proxies, no home.
    environ = {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-I", str(megatron_unpickle.__file__)],
        input=json.dumps(request).encode(),
        capture_output=True,
        cwd=out,
        env=environ | {"OMP_NUM_THREADS": "1", "PATH": os.defpath},
        check=False,
    )
    path = out / megatron_unpickle.RESULT_FILE
    if done.returncode != 0 or not path.is_file():
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise DamagedError(
            f"{request['sources'][0]}: the process that reads pickles failed with code "
            f"{done.returncode}: {''.join(last)[:300]}"
        )
    result = parse_json(read_file(path, MAX_RESULT_BYTES), str(path), MAX_RESULT_BYTES)
    if "error" in result:
        kind = UserError if result.get("exit_code") == UserError.exit_code else DamagedError
        raise kind(str(result["error"]))
    reports: list[Any] = result["reports"]
    return reports


def _rank_tensors(path: Path, origin: Path, report: Mapping[str, Any]) -> RankTensors:
    header = read_header(path)
    return RankTensors(
        path=path,
        origin=origin,
        tensors={_split_key(key): tensor for key, tensor in header.tensors.items()},
        others=tuple(_split_key(key) for key in report["others"]),
        chunks=report["chunks"],
        args=report["args"],
        version=report["checkpoint_version"],
    )


def _split_key(key: str) -> tuple[int, str]:
    chunk, _, name = key.partition("/")
    return int(chunk), name


def _holds_ranks(place: Path) -> bool:
    return (place / ".metadata").exists() or any(
        RANK_DIRECTORY.fullmatch(child.name) for child in place.iterdir()
    )


def _iteration_name(root: Path, step: int | None) -> str:
    if step is not None:
        return f"iter_{step:07d}"
    tracker = root / TRACKER_FILE
    if not tracker.is_file():
        found = sorted(c.name for c in root.iterdir() if ITERATION_DIRECTORY.fullmatch(c.name))
        hint = f"; it holds {', '.join(found[:8])}, name one" if found else ""
        raise UserError(f"{root}: holds no {TRACKER_FILE} of Megatron-LM{hint}")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return text
    if not re.fullmatch(r"\d{1,12}", text):
        raise DamagedError(f"{tracker}: says {text[:40]!r}, neither a number nor `release`")
    return f"iter_{int(text):07d}"
