"""Is a checkpoint directory what its manifest says? Torch-free, used by writer and reader.

`check_structure` costs a look at every file (receipts, shard headers, sizes, coverage);
`check_data` reads and hashes every byte. Both raise `DamagedError` naming file and reason.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron_lite.checkpoint.boxes import tiling_fault
from megatron_lite.checkpoint.files import open_regular, read_file, storage_error
from megatron_lite.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    MAX_RECEIPT_BYTES,
    Entry,
    Manifest,
    Piece,
    Receipt,
    TensorRecord,
    parse_manifest,
    parse_receipt,
    piece_key,
    receipt_file,
    shard_file,
)
from megatron_lite.checkpoint.ranges import Fetch, already_here, open_range, run_jobs
from megatron_lite.checkpoint.shards import ShardHeader, ShardTensor, read_header
from megatron_lite.errors import DamagedError


def load_manifest(directory: Path, sha256: str | None = None) -> tuple[Manifest, str]:
    """Read manifest.json, checking it against the hash that a pointer has published.

    Returns:
        The manifest and the sha256 of its file.
    """
    path = directory / MANIFEST_FILE
    data = read_file(path, MAX_MANIFEST_BYTES)
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256:
        raise DamagedError(f"{path}: is not the manifest that was published (sha256 differs)")
    manifest = parse_manifest(data, str(path))
    check_coverage(manifest, str(path))
    return manifest, found


def check_coverage(manifest: Manifest, source: str) -> None:
    """Check that the pieces of each logical tensor tile it exactly once."""
    for name, tensor in manifest.tensors.items():
        fault = tiling_fault(tensor.shape, [(p.offset, p.shape) for p in tensor.pieces])
        if fault is not None:
            raise DamagedError(f"{source}: {name} {list(tensor.shape)}: {fault}")


def check_structure(directory: Path, manifest: Manifest) -> None:
    """Check receipts, shard headers and file sizes against the manifest; reads no tensor."""
    pieces: list[dict[str, tuple[TensorRecord, Piece]]] = [{} for _ in manifest.shards]
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            key = piece_key(name, tensor.shape, piece.offset, piece.shape)
            pieces[piece.rank][key] = (tensor, piece)
    for rank, record in enumerate(manifest.shards):
        receipt_path = directory / receipt_file(rank)
        data = read_file(receipt_path, MAX_RECEIPT_BYTES)
        if hashlib.sha256(data).hexdigest() != record.receipt_sha256:
            raise DamagedError(f"{receipt_path}: differs from the manifest (sha256)")
        header = load_shard_header(directory, manifest, rank)
        path = directory / shard_file(rank)
        if header.tensors.keys() != pieces[rank].keys():
            raise DamagedError(f"{path}: does not hold the tensors that the manifest lists")
        for key, (tensor, piece) in pieces[rank].items():
            _match(header.tensors[key], tensor.dtype, piece.shape, f"{path}, {key}")


def load_shard_header(directory: Path, manifest: Manifest, rank: int) -> ShardHeader:
    """Read the header of one shard, checking it and the file's size against the manifest."""
    path = directory / shard_file(rank)
    header = read_header(path)
    record = manifest.shards[rank]
    if header.size != record.size:
        raise DamagedError(f"{path}: {header.size} bytes, the manifest says {record.size}")
    if header.sha256 != record.header_sha256:
        raise DamagedError(f"{path}: header differs from the manifest (sha256)")
    return header


def check_receipt(directory: Path, rank: int) -> tuple[Receipt, str]:
    """Check one rank's receipt against its shard; return it and the sha256 of its file."""
    path = directory / receipt_file(rank)
    data = read_file(path, MAX_RECEIPT_BYTES)
    receipt = parse_receipt(data, str(path))
    if receipt.rank != rank:
        raise DamagedError(f"{path}: is the receipt of rank {receipt.rank}")
    shard = directory / shard_file(rank)
    header = read_header(shard)
    if (header.size, header.sha256) != (receipt.size, receipt.header_sha256):
        raise DamagedError(f"{shard}: is not the file that its receipt describes")
    entries: dict[str, Entry] = {entry.key: entry for entry in receipt.entries}
    if len(entries) != len(receipt.entries):
        raise DamagedError(f"{path}: lists a piece twice")
    if header.tensors.keys() != entries.keys():
        raise DamagedError(f"{shard}: does not hold the tensors that its receipt lists")
    for key, entry in entries.items():
        _match(header.tensors[key], entry.dtype, entry.shape, f"{shard}, {key}")
    return receipt, hashlib.sha256(data).hexdigest()


def check_data(directory: Path, manifest: Manifest, fetch: Fetch = already_here) -> None:
    """Read every tensor of every shard and compare its sha256, pieces side by side."""
    headers: Mapping[int, ShardHeader] = {
        rank: load_shard_header(directory, manifest, rank) for rank in range(len(manifest.shards))
    }
    jobs = []
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            key = piece_key(name, tensor.shape, piece.offset, piece.shape)
            found = headers[piece.rank].tensors[key]
            path = directory / shard_file(piece.rank)
            work = partial(_check_piece, path, found, piece.sha256, f"{path}: {key}", fetch)
            jobs.append((found.end - found.begin, work))
    run_jobs(jobs)


def _check_piece(path: Path, tensor: ShardTensor, sha256: str, what: str, fetch: Fetch) -> None:
    fetch(path, tensor.begin, tensor.end)
    with open_range(path, tensor.begin, tensor.end) as reader:
        reader.finish(sha256, what)


@contextmanager
def map_range(path: Path, tensor: ShardTensor) -> Iterator[memoryview]:
    """Map the bytes of one tensor privately; views of them must be gone at the end.

    One tensor and not the file: address space and the kernel's accounting of private
    mappings stay bounded by the largest piece. The mapping is writable (and private)
    because tensors over read-only memory are a warning in torch.
    """
    if tensor.begin == tensor.end:
        yield memoryview(b"")
        return
    descriptor, size = open_regular(path)
    try:
        if tensor.end > size:  # touching pages behind the end would kill the process
            raise DamagedError(f"{path}: truncated to {size} bytes")
        start = tensor.begin - tensor.begin % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            descriptor,
            tensor.end - start,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=start,
        )
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        os.close(descriptor)
    with mapped, memoryview(mapped) as whole, whole[tensor.begin - start :] as part:
        yield part


def _match(found: ShardTensor, dtype: str, shape: tuple[int, ...], what: str) -> None:
    if (found.dtype, found.shape) != (dtype, shape):
        raise DamagedError(
            f"{what}: is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}"
        )
