"""The safetensors format: 8 bytes length, JSON header, raw little-endian tensor bytes.

The writer streams: it holds one piece at a time and hashes it while writing. The header
hash covers the length, the JSON and its padding; with one hash per tensor and no gaps
between tensors, every byte of a file is covered. Torch is not needed here.
"""

import hashlib
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.files import FileSystem, open_regular
from megatron_lite.checkpoint.strict_json import (
    encode_json,
    expect_dims,
    expect_int,
    expect_list,
    expect_object,
    parse_json,
)
from megatron_lite.errors import DamagedError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
ALIGNMENT = 8
CHUNK_BYTES = 2**20  # hashed and written while it is in the processor's cache


@dataclass(frozen=True)
class DtypeFormat:
    """How a dtype is written: safetensors' code and the bytes of one element."""

    code: str
    itemsize: int


DTYPES: Mapping[str, DtypeFormat] = {
    "float64": DtypeFormat("F64", 8),
    "float32": DtypeFormat("F32", 4),
    "bfloat16": DtypeFormat("BF16", 2),
    "float16": DtypeFormat("F16", 2),
    "float8_e4m3fn": DtypeFormat("F8_E4M3", 1),
    "float8_e5m2": DtypeFormat("F8_E5M2", 1),
    "int64": DtypeFormat("I64", 8),
    "int32": DtypeFormat("I32", 4),
    "int16": DtypeFormat("I16", 2),
    "int8": DtypeFormat("I8", 1),
    "uint8": DtypeFormat("U8", 1),
    "bool": DtypeFormat("BOOL", 1),
}
DTYPE_OF_CODE: Mapping[str, str] = {form.code: name for name, form in DTYPES.items()}


@dataclass(frozen=True)
class ShardItem:
    """One tensor to write; `load` returns its bytes when its turn has come."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], memoryview]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class ShardTensor:
    """One tensor of a shard: bytes begin..end of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ShardHeader:
    """What the head of a shard says; `size` is the file's exact length in bytes."""

    tensors: Mapping[str, ShardTensor]
    metadata: Mapping[str, str]
    size: int
    sha256: str


@dataclass(frozen=True)
class WrittenShard:
    """What was written: exact size, header hash and one hash per key."""

    size: int
    header_sha256: str
    hashes: Mapping[str, str]


def write_shard(
    files: FileSystem, path: Path, items: Iterable[ShardItem], metadata: Mapping[str, str]
) -> WrittenShard:
    """Write one safetensors file, on the device when it returns.

    Larger elements come first, so that every tensor is aligned to its own element size.
    """
    ordered = sorted(items, key=lambda item: (-DTYPES[item.dtype].itemsize, item.key))
    head = _encode_header(ordered, metadata)
    hashes: dict[str, str] = {}
    file = files.create(path)
    try:
        file.write(head)
        size = len(head)
        for item in ordered:
            data = item.load()
            if data.nbytes != item.num_bytes:
                raise ValueError(f"{item.key}: {data.nbytes} bytes, expected {item.num_bytes}")
            digest = hashlib.sha256()
            for start in range(0, data.nbytes, CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
            hashes[item.key] = digest.hexdigest()
            size += data.nbytes
            data = chunk = memoryview(b"")  # one piece is let go before the next is loaded
        file.sync()
    finally:
        file.close()
    return WrittenShard(size, hashlib.sha256(head).hexdigest(), hashes)


def _encode_header(items: Sequence[ShardItem], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for item in items:
        if item.key in header:
            raise ValueError(f"tensor {item.key!r} is given twice")
        end = position + item.num_bytes
        header[item.key] = {
            "dtype": DTYPES[item.dtype].code,
            "shape": list(item.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = encode_json(header).rstrip(b"\n")
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(text)} bytes, at most {MAX_HEADER_BYTES}")
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> ShardHeader:
    """Read and check the head of a safetensors file: ranges contiguous, size exact."""
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size + 1
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise DamagedError(f"{path}: no safetensors header in {size} bytes")
        text = file.read(length)
    if len(text) != length:
        raise DamagedError(f"{path}: ends inside its header")
    source = f"{path} (header)"
    value = parse_json(text, source, MAX_HEADER_BYTES)
    if not isinstance(value, dict):
        raise DamagedError(f"{source}: expected an object")
    metadata = value.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedError(f"{source}: __metadata__ maps strings to strings")
    tensors = {
        key: _parse_tensor(item, 8 + length, f"{source}, {key}") for key, item in value.items()
    }
    position = 8 + length
    for key, tensor in sorted(tensors.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if tensor.begin != position:
            raise DamagedError(f"{source}: {key} starts at byte {tensor.begin}, not at {position}")
        position = tensor.end
    if position != size:
        raise DamagedError(f"{path}: {size} bytes, its header describes {position}")
    return ShardHeader(tensors, metadata, size, hashlib.sha256(prefix + text).hexdigest())


def _parse_tensor(value: Any, data_start: int, source: str) -> ShardTensor:
    item = expect_object(value, ("dtype", "shape", "data_offsets"), source)
    dtype = DTYPE_OF_CODE.get(item["dtype"]) if isinstance(item["dtype"], str) else None
    if dtype is None:
        raise DamagedError(f"{source}: unknown dtype {item['dtype']!r}")
    shape = expect_dims(item["shape"], source)
    offsets = expect_list(item["data_offsets"], source)
    if len(offsets) != 2:
        raise DamagedError(f"{source}: data_offsets has {len(offsets)} numbers")
    begin, end = (expect_int(offset, source) for offset in offsets)
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise DamagedError(f"{source}: {end - begin} bytes do not hold {dtype} {list(shape)}")
    return ShardTensor(dtype, shape, data_start + begin, data_start + end)
