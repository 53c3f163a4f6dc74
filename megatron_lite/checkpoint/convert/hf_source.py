"""The files of a Hugging Face directory: which there are, and tensors out of them.

Nothing is trusted: names in the index are plain file names, JSON is parsed strictly, and a
link is followed only inside the directory or, in a download cache (models--X/snapshots/REV),
into that model's own blobs. Pickles are converted in a process of their own, on demand.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint.files import read_file
from megatron_lite.checkpoint.shards import ShardTensor, read_header
from megatron_lite.checkpoint.strict_json import parse_json
from megatron_lite.checkpoint.tensors import tensor_over
from megatron_lite.checkpoint.verify import map_range
from megatron_lite.errors import DamagedError, UserError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_CONFIG_BYTES = 4 * 2**20
MAX_INDEX_BYTES = 128 * 2**20
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}")
PACKAGE_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the source and the file it lies in."""

    path: Path
    record: ShardTensor


class HFSource:
    """Tensors of a directory by name; headers are read at once, tensors when asked for."""

    def __init__(self, tensors: Mapping[str, SourceTensor], notes: tuple[str, ...] = ()):
        self.tensors = tensors
        self.notes = notes

    def read(self, name: str, take: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a copy of what `take` picks from a view of the tensor."""
        found = self.tensors[name]
        with map_range(found.path, found.record) as data:
            view = tensor_over(data, found.record.dtype, found.record.shape)
            copy = take(view).contiguous()
            if copy.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
                copy = copy.clone()
            del view  # the mapping cannot be closed while a tensor looks into it
        return copy


def locate(directory: Path, name: str) -> Path | None:
    """Return the real path of a file of the directory, None where there is none.

    Raises:
        DamagedError: no plain name, or a link that leads elsewhere.
    """
    if not PLAIN_NAME.fullmatch(name) or ".." in name:
        raise DamagedError(f"{directory}: {name!r} is not the name of a file in this directory")
    path = directory / name
    if not os.path.lexists(path):
        return None
    root, real = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if real.parent not in allowed:
        raise DamagedError(f"{path}: is a link to {real}, outside of the directory")
    if not real.is_file():
        raise DamagedError(f"{path}: is not a regular file")
    return real


def read_json(directory: Path, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return a JSON object of the directory."""
    path = locate(directory, name)
    if path is None:
        raise UserError(f"{directory}: has no {name}")
    value = parse_json(read_file(path, max_bytes), str(directory / name), max_bytes)
    if not isinstance(value, dict):
        raise DamagedError(f"{directory / name}: expected an object")
    return value


def open_source(directory: Path, scratch: Path | None) -> HFSource:
    """Read the headers of all safetensors files that belong to the model.

    Args:
        directory: with config.json.
        scratch: where safetensors made of pickles may be put; None refuses pickles.

    Raises:
        UserError: no weights, or only pickles and no leave to load them.
        DamagedError: index and files disagree, or a file is damaged.
    """
    if locate(directory, INDEX_FILE) is not None:
        return _indexed(directory)
    single = locate(directory, SINGLE_FILE)
    if single is not None:
        return _collect({SINGLE_FILE: single}, None, directory)
    pickles = [name for name in PICKLE_FILES if locate(directory, name) is not None]
    if not pickles:
        raise UserError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    if scratch is None:
        raise UserError(
            f"{directory}: has weights only as pickles ({pickles[0]}), and loading a pickle can "
            "run code of whoever made it; --trust-pickle loads it in a process of its own"
        )
    return _unpickled(directory, pickles[-1], scratch)


def _indexed(directory: Path) -> HFSource:
    weight_map = _weight_map(directory, INDEX_FILE)
    paths = {}
    for name in sorted(set(weight_map.values())):
        path = locate(directory, name)
        if path is None or not name.endswith(".safetensors"):
            raise DamagedError(f"{directory / INDEX_FILE}: {name} is missing or no safetensors")
        paths[name] = path
    return _collect(paths, weight_map, directory)


def _weight_map(directory: Path, name: str) -> dict[str, str]:
    value = read_json(directory, name, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(value, dict) or not value:
        raise DamagedError(f"{directory / name}: has no weight_map")
    odd = [item for item in value.values() if not isinstance(item, str)]
    if odd:
        raise DamagedError(f"{directory / name}: weight_map has the file {odd[0]!r}")
    return value


def _collect(
    paths: Mapping[str, Path], weight_map: Mapping[str, str] | None, directory: Path
) -> HFSource:
    """Gather the tensors of all files; the index and the files must say the same."""
    tensors: dict[str, SourceTensor] = {}
    for file, path in paths.items():
        for name, record in read_header(path).tensors.items():
            if name in tensors:
                raise DamagedError(f"{directory}: {name} lies in {file} and in another file")
            if weight_map is not None and weight_map.get(name) != file:
                listed = weight_map.get(name, "nowhere")
                raise DamagedError(f"{directory}: {name} lies in {file}, the index says {listed}")
            tensors[name] = SourceTensor(path, record)
    if weight_map is not None and tensors.keys() != weight_map.keys():
        missing = sorted(weight_map.keys() - tensors.keys())
        raise DamagedError(
            f"{directory / INDEX_FILE}: lists {len(missing)} tensors that no file holds, "
            f"such as {missing[0]}"
        )
    others = sorted(p.name for p in directory.glob("*.safetensors") if p.name not in paths)
    told = f"note: {directory} also has {', '.join(others)}: not read" if others else ""
    return HFSource(tensors, (told,) if told else ())


def _unpickled(directory: Path, found: str, scratch: Path) -> HFSource:
    names = [found]
    weight_map = None
    if found.endswith(".json"):
        weight_map = _weight_map(directory, found)
        names = sorted(set(weight_map.values()))
    paths = {}
    for number, name in enumerate(names):
        path = locate(directory, name)
        if path is None:
            raise DamagedError(f"{directory / found}: {name} is missing")
        target = scratch / f"{number}.safetensors"
        _convert_pickle(path, target)
        paths[name] = target
    return _collect(paths, weight_map, directory)


def _convert_pickle(source: Path, target: Path) -> None:
    """Turn one pickle into safetensors in a process of its own."""
    module = "megatron_lite.checkpoint.convert.unpickle"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE_ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", module, str(source), str(target)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DamagedError(f"{source}: could not be unpickled: {reason}")
