"""A process of its own that reads Megatron-LM's pickles; started only by megatron_source.py.

It turns rank files (`torch`) or a distributed checkpoint (`torch_dist`) into plain
safetensors and one JSON file. Nothing a pickle names is ever imported or called: torch's
weights-only reader takes tensors, plain values and Namespaces; classes of known libraries
(enums in the arguments, random states) become inert stand-ins; any other name is refused.
The process is started with `python -I`, without the parent's environment.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULT_FILE = "result.json"
# Libraries whose classes turn up in arguments and random states.
STAND_IN_PACKAGES = (
    *("megatron", "transformer_engine", "numpy", "apex", "io", "_io"),
    *("enum", "signal", "pathlib", "datetime", "functools"),
)
METADATA_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
SKIPPED_PREFIXES = ("optimizer.", "optimizer/", "chained_", "rng_state", "rerun_state")


class Refused(Exception):
    """What is told to the user in one line."""


def stand_in(full_name: str) -> type:
    """Return an inert class in place of `full_name`: it takes everything and does nothing."""

    def accept(self: Any, *args: Any, **kwargs: Any) -> None:
        del self, args, kwargs

    def create(cls: type, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return object.__new__(cls)

    members = {"__new__": create, "__init__": accept, "__setstate__": accept}
    return type("StandIn", (), members | {"full_name": full_name})


def load_pickle(path: Path) -> dict[str, Any]:
    """Read one file of torch.save; tensors are mapped, not read."""
    import argparse
    import types

    import torch

    plain: list[Any] = [argparse.Namespace, types.SimpleNamespace]
    with torch.serialization.safe_globals(plain):
        try:
            foreign = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
            mapped = True
        except (ValueError, RuntimeError):  # torch's oldest format: no zip file
            foreign, mapped = [], False
    refused = [name for name in foreign if name.split(".")[0] not in STAND_IN_PACKAGES]
    if refused:
        raise Refused(f"{path}: names code that no checkpoint needs: {', '.join(refused)}")
    stand_ins: list[Any] = [(stand_in(name), name) for name in foreign]
    try:
        with torch.serialization.safe_globals(plain + stand_ins):
            value = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:
        raise Refused(f"{path}: cannot be read: {str(error).splitlines()[0][:300]}") from error
    if not isinstance(value, dict):
        raise Refused(f"{path}: holds {type(value).__name__}, not a checkpoint's dictionary")
    return value


def plain_value(value: Any) -> Any:
    """Return a JSON-able form of one argument."""
    import torch

    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value)
    return f"object {getattr(value, 'full_name', type(value).__name__)}"


def plain_arguments(holder: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the checkpoint's arguments by name, None without any."""
    args = holder.get("args")
    if args is None:
        return None
    values = args if isinstance(args, dict) else vars(args)
    return {str(name): plain_value(value) for name, value in values.items()}


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk nested dictionaries; names are joined with dots."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict):
            yield from flatten(item, f"{name}.")
        else:
            yield name, item


def describe(holder: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Collect what is beside the tensors."""
    args = plain_arguments(holder)
    if args is None:
        raise Refused(f"{source}: has no `args`, so nothing says which model this is")
    version = plain_value(holder.get("checkpoint_version", 0))
    return {"args": args, "checkpoint_version": version}


def convert_rank(path: Path, target: Path) -> dict[str, Any]:
    """Write the model tensors of one rank file to `target`, keyed CHUNK/NAME."""
    import torch

    from megatron_lite.checkpoint.tensors import write_safetensors

    holder = load_pickle(path)
    chunks = {0: holder["model"]} if "model" in holder else {}
    for number in range(len(holder)):
        if f"model{number}" in holder:
            chunks[number] = holder[f"model{number}"]
    if not chunks:
        raise Refused(f"{path}: has no `model`")
    tensors, others = {}, []
    for number, chunk in chunks.items():
        for name, value in flatten(chunk):
            key = f"{number}/{name}"
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif value is not None:
                others.append(key)
    report = describe(holder, path) | {"others": others, "chunks": len(chunks)}
    write_safetensors(target, tensors)
    return report


def metadata_class(module: str, name: str) -> Any:
    """Return what a name in .metadata stands for, None for what has no place there."""
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    if module.startswith("torch.distributed.checkpoint") and name in METADATA_CLASSES:
        return getattr(metadata, name)
    known = {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
        ("torch.serialization", "_get_layout"): getattr(torch.serialization, "_get_layout", None),
        ("torch", "Size"): torch.Size,
        ("collections", "OrderedDict"): dict,
    }
    if (module, name) in known:
        return known[module, name]
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if module.split(".")[0] in STAND_IN_PACKAGES:
        return stand_in(f"{module}.{name}")
    return None


def read_metadata(path: Path) -> Any:
    """Read .metadata of torch.distributed.checkpoint with its own record classes only."""
    import pickle

    class MetadataReader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = metadata_class(module, name)
            if found is None:
                raise Refused(f"{path}: names code that no checkpoint needs: {module}.{name}")
            return found

    with open(path, "rb") as file:
        try:
            found = MetadataReader(file).load()
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"{path}: cannot be read: {error}") from error
    if not hasattr(found, "state_dict_metadata") or not hasattr(found, "storage_data"):
        raise Refused(f"{path}: is no metadata of torch.distributed.checkpoint")
    return found


class DistReader:
    """Slices of the tensors of a distributed checkpoint, one in memory at a time."""

    def __init__(self, directory: Path):
        import re

        from torch.distributed.checkpoint import FileSystemReader

        self.metadata = read_metadata(directory / ".metadata")
        for info in self.metadata.storage_data.values():
            name = str(info.relative_path)
            if not re.fullmatch(r"__\d+_\d+\.distcp", name):
                raise Refused(f"{directory}: data file {name!r} is no __RANK_NUMBER.distcp")
            if (directory / name).is_symlink() or not (directory / name).is_file():
                raise Refused(f"{directory / name}: is missing, or not a regular file")
        self.reader = FileSystemReader(directory)
        self.reader.set_up_storage_reader(self.metadata, True)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        """Return one box of a tensor."""
        import torch
        from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        record = self.metadata.state_dict_metadata[name]
        out = torch.empty(shape, dtype=record.properties.dtype)
        filled = [0]

        class Box(DefaultLoadPlanner):
            def resolve_tensor(self, read_item: Any) -> Any:
                part = out
                pairs = zip(read_item.dest_offsets, read_item.lengths, strict=True)
                for dim, (start, length) in enumerate(pairs):
                    part = part.narrow(dim, start, length)
                filled[0] += part.numel()
                return part

            def commit_tensor(self, read_item: Any, tensor: Any) -> None:
                del read_item, tensor

        box = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        items = create_read_items_for_chunk_list(name, record, [box])
        self.reader.read_data(LoadPlan(items), Box()).wait()
        if filled[0] != out.numel():
            raise Refused(f"{name}: its pieces hold {filled[0]} of {out.numel()} elements")
        return out


def dist_items(reader: DistReader) -> tuple[list[Any], list[str]]:
    """List what to write: stacked tensors layer by layer; and the entries without tensors."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megatron_lite.checkpoint.shards import ShardItem
    from megatron_lite.checkpoint.tensors import DTYPE_NAMES, tensor_bytes

    items, others, marker = [], [], "decoder.layers."
    for name, record in sorted(reader.metadata.state_dict_metadata.items()):
        plain = name.removeprefix("model.").removeprefix("module.")
        if name.startswith(SKIPPED_PREFIXES):
            continue
        if not isinstance(record, TensorStorageMetadata):
            others.append(f"0/{name}")
            continue
        dtype, size = DTYPE_NAMES[record.properties.dtype], tuple(record.size)
        boxes = [(plain, (0,) * len(size), size, size)]
        rest = plain.removeprefix(marker)
        if plain.startswith(marker) and not rest.split(".")[0].isdigit():
            inner = size[1:]
            origin = (0,) * len(inner)
            boxes = [
                (f"{marker}{layer}.{rest}", (layer, *origin), (1, *inner), inner)
                for layer in range(size[0])
            ]
        for key, offset, shape, final in boxes:

            def load(
                name: str = name,
                offset: tuple[int, ...] = offset,
                shape: tuple[int, ...] = shape,
                final: tuple[int, ...] = final,
            ) -> memoryview:
                return tensor_bytes(reader.read(name, offset, shape).reshape(final))

            items.append(ShardItem(f"0/{key}", dtype, final, load))
    return items, others


def convert_dist(directory: Path, target: Path) -> dict[str, Any]:
    """Write the model tensors of a distributed checkpoint to `target`, layer by layer."""
    from megatron_lite.checkpoint.files import FileSystem
    from megatron_lite.checkpoint.shards import write_shard

    common = directory / "common.pt"
    if not common.is_file():
        raise Refused(f"{common}: is missing, so nothing says which model this is")
    report = describe(load_pickle(common), common)
    items, others = dist_items(DistReader(directory))
    write_shard(FileSystem(), target, items, {})
    return report | {"others": others, "chunks": 1}


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Convert everything the request names; see `megatron_source.unpickle`."""
    out = Path(request["out"])
    reports = []
    for number, source in enumerate(request["sources"]):
        convert = convert_dist if request["kind"] == "torch_dist" else convert_rank
        reports.append(convert(Path(source), out / f"{number}.safetensors"))
    return {"reports": reports}


def main() -> int:
    """Read a request on stdin, leave result.json in its directory."""
    request = json.loads(sys.stdin.read())
    sys.path.extend(place for place in request["path"] if place not in sys.path)
    try:
        result = run(request)
    except Refused as error:
        result = {"error": str(error), "exit_code": 3}
    except Exception as error:
        # Errors of this program carry their exit code; the rest is damaged input.
        result = {"error": str(error), "exit_code": getattr(error, "exit_code", 3)}
        if not hasattr(error, "exit_code"):
            result["error"] = f"{type(error).__name__}: {error}"
    text = json.dumps(result, allow_nan=False)
    (Path(request["out"]) / RESULT_FILE).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
