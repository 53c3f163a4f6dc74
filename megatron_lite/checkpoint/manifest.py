"""Receipts, manifests and pointers: what they hold, how they are named and checked.

A hash chain, root first: published/STEP.json pins the manifest; the manifest pins each
rank's receipt, shard header and tensor pieces. Every rank writes one receipt about its
own shard; the manifest gathers them under logical names. Torch-free.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.shards import DTYPES
from megatron_lite.checkpoint.strict_json import (
    encode_json,
    expect_dims,
    expect_int,
    expect_list,
    expect_object,
    expect_text,
    parse_json,
)
from megatron_lite.errors import DamagedError

FORMAT = "megatron_lite.checkpoint.1"
MANIFEST_FILE = "manifest.json"
MAX_POINTER_BYTES = 4096
MAX_RECEIPT_BYTES = 64 * 2**20
MAX_MANIFEST_BYTES = 512 * 2**20
MAX_RANK = 10**6

ATTEMPT_PATTERN = re.compile(r"(0|[1-9][0-9]{0,11})-(0|[1-9][0-9]{0,8})-[0-9a-f]{16}")
POINTER_PATTERN = re.compile(r"(0|[1-9][0-9]{0,11})\.json")
NAME_PATTERN = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_][A-Za-z0-9_./\-]{0,510}(?<![/.])")
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
DTYPE_PATTERN = re.compile("|".join(DTYPES))
FORMAT_PATTERN = re.compile(re.escape(FORMAT))


@dataclass(frozen=True)
class Entry:
    """One piece of a logical tensor, as a rank has written it."""

    name: str
    dtype: str
    logical_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: str

    @property
    def key(self) -> str:
        return piece_key(self.name, self.logical_shape, self.offset, self.shape)


@dataclass(frozen=True)
class Receipt:
    """What one rank wrote: its shard file and the pieces in it."""

    attempt: str
    step: int
    epoch: int
    rank: int
    size: int
    header_sha256: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class ShardRecord:
    """A shard file and its receipt, as the manifest pins them."""

    size: int
    header_sha256: str
    receipt_sha256: str


@dataclass(frozen=True)
class Piece:
    """A piece of a logical tensor and the rank whose shard holds it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """A logical tensor and where its pieces are."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint. `shards[r]` is the shard of rank r of the run that saved it."""

    attempt: str
    step: int
    epoch: int
    state: Mapping[str, Any]
    shards: tuple[ShardRecord, ...]
    tensors: Mapping[str, TensorRecord]

    @property
    def num_bytes(self) -> int:
        return sum(shard.size for shard in self.shards)


@dataclass(frozen=True)
class Pointer:
    """The content of published/STEP.json; its existence is what makes a step a checkpoint."""

    step: int
    attempt: str
    manifest_sha256: str


def attempt_name(step: int, epoch: int, nonce: str) -> str:
    """Return the name of one try to save `step`; the nonce is 16 hex digits."""
    return f"{step}-{epoch}-{nonce}"


def attempt_directory(root: Path, attempt: str) -> Path:
    """Return the directory of an attempt below a SAVE root."""
    return root / "attempts" / attempt


def pointer_path(root: Path, step: int) -> Path:
    """Return the file whose existence publishes `step`."""
    return root / "published" / f"{step}.json"


def shard_file(rank: int) -> str:
    """Return the name of a rank's shard inside its attempt directory."""
    return f"rank{rank:05d}.safetensors"


def receipt_file(rank: int) -> str:
    """Return the name of a rank's receipt inside its attempt directory."""
    return f"rank{rank:05d}.receipt.json"


def piece_key(
    name: str, logical_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]
) -> str:
    """Return the key of a piece in its shard: NAME when whole, else NAME[low:high,...]."""
    if tuple(shape) == tuple(logical_shape):
        return name
    ranges = (f"{low}:{low + size}" for low, size in zip(offset, shape, strict=True))
    return f"{name}[{','.join(ranges)}]"


def is_legal_name(name: str) -> bool:
    """Whether `name` can be the name of a logical tensor."""
    return NAME_PATTERN.fullmatch(name) is not None


def encode_receipt(receipt: Receipt) -> bytes:
    """Return the bytes of a receipt file."""
    return encode_json(
        {
            "format": FORMAT,
            "attempt": receipt.attempt,
            "step": receipt.step,
            "epoch": receipt.epoch,
            "rank": receipt.rank,
            "file": shard_file(receipt.rank),
            "size": receipt.size,
            "header_sha256": receipt.header_sha256,
            "entries": [
                {
                    "name": entry.name,
                    "dtype": entry.dtype,
                    "logical_shape": list(entry.logical_shape),
                    "offset": list(entry.offset),
                    "shape": list(entry.shape),
                    "sha256": entry.sha256,
                }
                for entry in receipt.entries
            ],
        }
    )


def parse_receipt(data: bytes, source: str) -> Receipt:
    """Parse a receipt file, refusing anything unexpected."""
    value = expect_object(
        parse_json(data, source, MAX_RECEIPT_BYTES),
        ("format", "attempt", "step", "epoch", "rank", "file", "size", "header_sha256", "entries"),
        source,
    )
    expect_text(value["format"], FORMAT_PATTERN, source)
    rank = expect_int(value["rank"], source, MAX_RANK)
    expect_text(value["file"], re.compile(re.escape(shard_file(rank))), source)
    return Receipt(
        attempt=expect_text(value["attempt"], ATTEMPT_PATTERN, source),
        step=expect_int(value["step"], source),
        epoch=expect_int(value["epoch"], source),
        rank=rank,
        size=expect_int(value["size"], source),
        header_sha256=expect_text(value["header_sha256"], SHA256_PATTERN, source),
        entries=tuple(_parse_entry(e, source) for e in expect_list(value["entries"], source)),
    )


def _parse_entry(value: Any, source: str) -> Entry:
    item = expect_object(
        value, ("name", "dtype", "logical_shape", "offset", "shape", "sha256"), source
    )
    return Entry(
        name=expect_text(item["name"], NAME_PATTERN, source),
        dtype=expect_text(item["dtype"], DTYPE_PATTERN, source),
        logical_shape=expect_dims(item["logical_shape"], source),
        offset=expect_dims(item["offset"], source),
        shape=expect_dims(item["shape"], source),
        sha256=expect_text(item["sha256"], SHA256_PATTERN, source),
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json; `content_sha256` covers all the rest of it."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "attempt": manifest.attempt,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "state": manifest.state,
        "shards": [
            {
                "size": shard.size,
                "header_sha256": shard.header_sha256,
                "receipt_sha256": shard.receipt_sha256,
            }
            for shard in manifest.shards
        ],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "pieces": [
                    [piece.rank, list(piece.offset), list(piece.shape), piece.sha256]
                    for piece in tensor.pieces
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    return encode_json({**content, "content_sha256": _content_hash(content)})


def parse_manifest(data: bytes, source: str) -> Manifest:
    """Parse manifest.json, refusing anything unexpected or altered."""
    value = expect_object(
        parse_json(data, source, MAX_MANIFEST_BYTES),
        ("format", "attempt", "step", "epoch", "state", "shards", "tensors", "content_sha256"),
        source,
    )
    expect_text(value["format"], FORMAT_PATTERN, source)
    claimed = value.pop("content_sha256")
    if claimed != _content_hash(value):
        raise DamagedError(f"{source}: content does not match its sha256")
    if not isinstance(value["state"], dict) or not isinstance(value["tensors"], dict):
        raise DamagedError(f"{source}: state and tensors must be objects")
    shards = tuple(_parse_shard(item, source) for item in expect_list(value["shards"], source))
    return Manifest(
        attempt=expect_text(value["attempt"], ATTEMPT_PATTERN, source),
        step=expect_int(value["step"], source),
        epoch=expect_int(value["epoch"], source),
        state=value["state"],
        shards=shards,
        tensors={
            expect_text(name, NAME_PATTERN, source): _parse_tensor(item, len(shards), source)
            for name, item in value["tensors"].items()
        },
    )


def _content_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode_json(content)).hexdigest()


def _parse_shard(value: Any, source: str) -> ShardRecord:
    item = expect_object(value, ("size", "header_sha256", "receipt_sha256"), source)
    return ShardRecord(
        size=expect_int(item["size"], source),
        header_sha256=expect_text(item["header_sha256"], SHA256_PATTERN, source),
        receipt_sha256=expect_text(item["receipt_sha256"], SHA256_PATTERN, source),
    )


def _parse_tensor(value: Any, world_size: int, source: str) -> TensorRecord:
    item = expect_object(value, ("dtype", "shape", "pieces"), source)
    pieces = []
    for fields in expect_list(item["pieces"], source):
        if len(expect_list(fields, source)) != 4:
            raise DamagedError(f"{source}: a piece has {len(fields)} fields, expected 4")
        rank, offset, shape, sha256 = fields
        pieces.append(
            Piece(
                rank=expect_int(rank, source, world_size - 1),
                offset=expect_dims(offset, source),
                shape=expect_dims(shape, source),
                sha256=expect_text(sha256, SHA256_PATTERN, source),
            )
        )
    return TensorRecord(
        dtype=expect_text(item["dtype"], DTYPE_PATTERN, source),
        shape=expect_dims(item["shape"], source),
        pieces=tuple(pieces),
    )


def encode_pointer(pointer: Pointer) -> bytes:
    """Return the bytes of published/STEP.json."""
    return encode_json(
        {
            "step": pointer.step,
            "attempt": pointer.attempt,
            "manifest_sha256": pointer.manifest_sha256,
        }
    )


def parse_pointer(data: bytes, source: str) -> Pointer:
    """Parse published/STEP.json; only the exact bytes that we write are accepted."""
    value = expect_object(
        parse_json(data, source, MAX_POINTER_BYTES), ("step", "attempt", "manifest_sha256"), source
    )
    pointer = Pointer(
        step=expect_int(value["step"], source),
        attempt=expect_text(value["attempt"], ATTEMPT_PATTERN, source),
        manifest_sha256=expect_text(value["manifest_sha256"], SHA256_PATTERN, source),
    )
    if encode_pointer(pointer) != data:
        raise DamagedError(f"{source}: not in the form in which it is written")
    return pointer
