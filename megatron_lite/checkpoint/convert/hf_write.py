"""Writing a bundle as a Hugging Face directory that transformers opens.

Everything is written into a directory with a temporary name beside the target, synced, and
published by one rename: the target has all files or is as it was. Tensors are computed one
at a time, in shards of bounded size.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.convert.bundle import Bundle, check_bundle, logical_specs
from megatron_lite.checkpoint.convert.hf_config import build_config, choose_family
from megatron_lite.checkpoint.convert.hf_source import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from megatron_lite.checkpoint.convert.hf_tensors import Outgoing, export_tensors, stored_tensors
from megatron_lite.checkpoint.convert.tokenizer_files import (
    GENERATION_FILE,
    asset_bytes,
    special_ids,
)
from megatron_lite.checkpoint.convert.transform import half_split_rotary, plain_norms
from megatron_lite.checkpoint.files import FileSystem, storage_error
from megatron_lite.checkpoint.shards import DTYPES, ShardItem, write_shard
from megatron_lite.checkpoint.tensors import tensor_bytes
from megatron_lite.errors import UserError

DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class WrittenHF:
    """What was written: the family, tensors, bytes of weights, and the weight files."""

    architecture: str
    tensors: int
    bytes: int
    weight_files: tuple[str, ...]


def write_hf(
    bundle: Bundle,
    directory: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    architecture: str | None = None,
    overwrite: bool = False,
    files: FileSystem | None = None,
) -> WrittenHF:
    """Write config.json, weights, generation and tokenizer files.

    Args:
        bundle: any; interleaved rotary rows are permuted, norms stored minus 1 completed.
        directory: must not exist, or be empty, unless `overwrite`.
        max_shard_bytes: largest weight file; a larger tensor has one of its own.
        architecture: family to write, instead of the one that the bundle came from or the
            first that fits.
        overwrite: replace a Hugging Face directory (one without subdirectories).

    Raises:
        UserError: no family expresses the model, or the target is in use.
        DamagedError: no space. The target is as it was before.
    """
    files = files or FileSystem()
    target = Path(os.path.abspath(directory))
    check_target(target, overwrite)
    bundle = plain_norms(half_split_rotary(bundle))
    check_bundle(bundle)
    model = bundle.model
    family = choose_family(model, bundle.source.removeprefix("hf "), architecture)
    specs = logical_specs(bundle.config, bundle.vocab_size)
    outgoing = list(export_tensors(stored_tensors(family, specs, model.num_layers), bundle.tensors))
    config = build_config(family, model, outgoing[0].dtype)
    ids = {"bos_token_id": None, "eos_token_id": None} | special_ids(bundle.assets)
    content = {CONFIG_FILE: _encode(config | ids)}
    content[GENERATION_FILE] = _encode({k: v for k, v in ids.items() if v is not None})
    content |= {name: asset_bytes(asset) for name, asset in bundle.assets.items()}
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        files.ensure_directory(target.parent)
        files.make_directory(temporary)
        names, total = _write_weights(temporary, outgoing, max_shard_bytes, files)
        for name, data in content.items():
            files.write_file(temporary / name, data)
        files.sync_directory(temporary)
        _publish(temporary, target, files)
    except BaseException as error:
        files.remove_tree(temporary)
        if isinstance(error, OSError):
            raise storage_error(error, target) from error
        raise
    return WrittenHF(family.architecture, len(outgoing), total, names)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that is in use, or that replacing would do more than it should.

    Raises:
        UserError: saying what is there.
    """
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise UserError(f"{target}: is not a directory")
    names = [entry.name for entry in os.scandir(target)]
    if not names:
        return
    if not overwrite:
        raise UserError(f"{target}: is not empty; --overwrite replaces a model that is there")
    folders = [entry.name for entry in os.scandir(target) if entry.is_dir(follow_symlinks=False)]
    if folders or CONFIG_FILE not in names:
        raise UserError(
            f"{target}: is not a Hugging Face directory of one model ("
            + (f"it has the directory {folders[0]}" if folders else f"it has no {CONFIG_FILE}")
            + "), so --overwrite does not replace it"
        )


def plan_shards(tensors: Sequence[Outgoing], limit: int) -> list[list[Outgoing]]:
    """Cut a list of tensors into files of at most `limit` bytes, in order."""
    shards: list[list[Outgoing]] = []
    used = 0
    for tensor in tensors:
        size = _num_bytes(tensor)
        if not shards or used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def _num_bytes(tensor: Outgoing) -> int:
    return tensor.elements * DTYPES[tensor.dtype].itemsize


def _write_weights(
    folder: Path, tensors: Sequence[Outgoing], limit: int, files: FileSystem
) -> tuple[tuple[str, ...], int]:
    shards = plan_shards(tensors, limit)
    total = sum(map(_num_bytes, tensors))
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    for name, shard in zip(names, shards, strict=True):
        write_shard(files, folder / name, _items(shard), {"format": "pt"})
    if len(shards) > 1:
        weight_map = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        files.write_file(folder / INDEX_FILE, _encode(index))
    return tuple(names), total


def _items(shard: Iterable[Outgoing]) -> list[ShardItem]:
    def item(tensor: Outgoing) -> ShardItem:
        return ShardItem(
            tensor.name, tensor.dtype, tensor.shape, lambda: tensor_bytes(tensor.load())
        )

    return [item(tensor) for tensor in shard]


def _publish(temporary: Path, target: Path, files: FileSystem) -> None:
    """Give the finished directory its name; an older one goes only then."""
    if not target.is_dir() or not any(os.scandir(target)):
        files.rename(temporary, target)
        files.sync_directory(target.parent)
        return
    old = target.with_name(f".{target.name}.old-{secrets.token_hex(8)}")
    files.rename(target, old)
    try:
        files.rename(temporary, target)
    except OSError:
        files.rename(old, target)
        raise
    files.sync_directory(target.parent)
    files.remove_tree(old)


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, allow_nan=False).encode() + b"\n"
