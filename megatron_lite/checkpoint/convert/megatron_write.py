"""Writing Megatron-LM's `torch` layout: release/mp_rank_XX[_YYY]/model_optim_rng.pt.

Names are Megatron-core's with Transformer Engine's norms, its default. Everything is
written beside the target and moved there at the end, the tracker last, so that nothing is
left where it fails. Memory: the weights of one rank.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.commit import TRACKER_FILE
from megatron_lite.checkpoint.convert.bundle import Bundle, check_bundle, logical_specs
from megatron_lite.checkpoint.convert.megatron_args import args_for
from megatron_lite.checkpoint.convert.megatron_names import LAYER, fused_name
from megatron_lite.checkpoint.convert.megatron_source import rank_file
from megatron_lite.checkpoint.convert.tokenizer_files import asset_bytes
from megatron_lite.checkpoint.files import FILE_MODE, FileSystem, storage_error
from megatron_lite.checkpoint.tensors import TORCH_DTYPES
from megatron_lite.config.plan import ModelShape
from megatron_lite.errors import UserError
from megatron_lite.spec.params import ParamSpec

CHECKPOINT_VERSION = 3.0
RELEASE = "release"
TOKENIZER_DIRECTORY = "tokenizer"
TARGET_TP = "--target-tensor-parallel-size"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
TE_NORMS = (
    (re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.linear_qkv.layer_norm_\1"),
    (re.compile(r"\.pre_mlp_layernorm\.(weight|bias)$"), r".mlp.linear_fc1.layer_norm_\1"),
)


def write_megatron(
    bundle: Bundle, directory: str | Path, *, tp: int, pp: int, overwrite: bool = False
) -> int:
    """Write a bundle as a `release` checkpoint in this layout; return its bytes.

    Args:
        directory: the SAVE root, created when missing.
        tp, pp: tensor and pipeline ranks of the run that will load it.
        overwrite: replace a release that is there.

    Raises:
        UserError: the model does not divide, or something is there already.
    """
    check_bundle(bundle)
    root, model = Path(directory), bundle.model
    _check_layout(model, tp, pp)
    target = root / RELEASE
    if not overwrite and (target.exists() or (root / TRACKER_FILE).exists()):
        raise UserError(f"{root}: holds a checkpoint already; --overwrite replaces its release")
    files = FileSystem()
    building = root / f".release-{secrets.token_hex(8)}"
    try:
        files.ensure_directory(root)
        files.make_directory(building)
        written = sum(
            _write_rank(bundle, rank_file(building, t, p, pp), t, tp, p, pp, files)
            for p in range(pp)
            for t in range(tp)
        )
        _write_assets(bundle, building / TOKENIZER_DIRECTORY, files)
        if target.exists():
            old = root / f".old-{secrets.token_hex(8)}"
            files.rename(target, old)
            files.rename(building, target)
            shutil.rmtree(old)
        else:
            files.rename(building, target)
        tracker = root / f".tracker-{secrets.token_hex(8)}"
        files.write_file(tracker, RELEASE.encode())
        files.rename(tracker, root / TRACKER_FILE)
        files.sync_directory(root)
    except OSError as error:
        raise storage_error(error, root) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return written


def _write_assets(bundle: Bundle, folder: Path, files: FileSystem) -> None:
    """Let the tokenizer go along; Megatron-LM itself does not look there."""
    if bundle.assets:
        files.make_directory(folder)
        for name, asset in bundle.assets.items():
            files.write_file(folder / name, asset_bytes(asset))


def _check_layout(model: ModelShape, tp: int, pp: int) -> None:
    lines = [
        f"{name} {size} is not a multiple of {flag} {parts}"
        for name, size, flag, parts in (
            ("--num-layers", model.num_layers, "--target-pipeline-parallel-size", pp),
            ("--num-attention-heads", model.num_attention_heads, TARGET_TP, tp),
            ("KV heads", model.num_query_groups, TARGET_TP, tp),
            ("--ffn-hidden-size", model.ffn_hidden_size, TARGET_TP, tp),
        )
        if parts < 1 or size % parts
    ]
    if lines:
        raise UserError("the model does not divide: " + "; ".join(lines))


def _write_rank(
    bundle: Bundle, path: Path, tensor_rank: int, tp: int, stage: int, pp: int, files: FileSystem
) -> int:
    """Write one rank's file; return its bytes."""
    weights = _rank_weights(bundle, tensor_rank, tp, stage, pp)
    args = args_for(bundle.config, bundle.model, tp=tp, pp=pp)
    dtype = TORCH_DTYPES[bundle.tensors[EMBEDDING].dtype]
    args |= {
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }
    content = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "model": weights,
    }
    files.make_directory(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, FILE_MODE), "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    files.sync_directory(path.parent)
    return path.stat().st_size


def _rank_weights(
    bundle: Bundle, tensor_rank: int, tp: int, stage: int, pp: int
) -> dict[str, Tensor | None]:
    """Cut this rank's pieces out of the logical tensors, under Megatron-core's names."""
    model = bundle.model
    per_stage = model.num_layers // pp
    specs = {spec.name: spec for spec in logical_specs(bundle.config, bundle.vocab_size)}
    weights: dict[str, Tensor | None] = {}
    for name, members in _stored_tensors(specs).items():
        match = LAYER.fullmatch(name)
        layer = int(match[1]) if match else None
        if layer is not None and layer // per_stage != stage:
            continue
        if layer is None and stage != (0 if name.startswith("embedding.") else pp - 1):
            continue
        if match is not None and layer is not None:
            local = f"decoder.layers.{layer - stage * per_stage}.{match[2]}"
        else:
            local = name
        for pattern, replacement in TE_NORMS:
            local = pattern.sub(replacement, local)
        loaders = [bundle.tensors[member].load for member in members]
        weights[local] = _cut(specs[members[0]], name, loaders, tensor_rank, tp, model)
        if re.search(r"\.linear_(qkv|proj|fc1|fc2)\.weight$", local):
            weights[local.removesuffix("weight") + "_extra_state"] = None
    if model.tied and pp > 1 and stage == pp - 1:
        loaders = [bundle.tensors[EMBEDDING].load]
        weights[OUTPUT] = _cut(specs[EMBEDDING], EMBEDDING, loaders, tensor_rank, tp, model)
    return weights


def _stored_tensors(specs: Mapping[str, ParamSpec]) -> dict[str, list[str]]:
    """Group the logical tensors into what Megatron-core stores, in its order of rows."""
    stored: dict[str, list[str]] = {}
    for name in specs:
        stored.setdefault(fused_name(name), []).append(name)
    return stored


def _cut(
    spec: ParamSpec,
    name: str,
    loaders: list[Callable[[], Tensor]],
    tensor_rank: int,
    tp: int,
    model: ModelShape,
) -> Tensor:
    """Return one tensor-parallel rank's piece of a stored tensor."""
    if ".linear_qkv." in name:
        groups, d = model.num_query_groups // tp, model.kv_channels
        parts = []
        for load in loaders:  # q, k, v, as the specification lists them
            whole = load()
            grouped = whole.view(model.num_query_groups, -1, d, *whole.shape[1:])
            parts.append(grouped.narrow(0, tensor_rank * groups, groups).clone())
            del whole, grouped
        return torch.cat(parts, dim=1).reshape(-1, *parts[0].shape[3:])
    if len(loaders) > 1:  # gate, up
        return torch.cat([load().chunk(tp)[tensor_rank].clone() for load in loaders])
    whole = loaders[0]()
    if name in (EMBEDDING, OUTPUT):
        rows = model.padded_vocab_size(tp) // tp
        piece = torch.zeros(rows, *whole.shape[1:], dtype=whole.dtype)  # padding rows are 0
        kept = whole[tensor_rank * rows : (tensor_rank + 1) * rows]
        piece[: kept.shape[0]] = kept
        return piece
    if spec.tensor_cut is None:
        return whole.clone()
    return whole.chunk(tp, dim=spec.tensor_cut.dim)[tensor_rank].clone(
        memory_format=torch.contiguous_format
    )
