"""Checkpoints as Megatron-LM writes them, made from the facts of its formats alone.

Nothing of the converter is used: queries, keys and values are laid out head by head in
plain loops, the halves of a gated MLP rank by rank, layers by the formula of virtual
stages. Values are random, so that every misplaced row shows.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """What a small model is; `padded` rows of the vocabulary are stored."""

    layers: int = 4
    hidden: int = 24
    heads: int = 6
    groups: int = 2
    channels: int = 4
    ffn: int = 20
    vocabulary: int = 100
    padded: int = 128
    positions: int = 12
    rope: bool = True
    gated: bool = True
    norm_bias: bool = False
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    dtype: torch.dtype = torch.float32


LLAMA = Model()
QWEN = Model(qkv_bias=True, qk_norm=True, dtype=torch.bfloat16)
GPT2 = Model(
    hidden=16, heads=4, groups=4, ffn=32, rope=False, gated=False, norm_bias=True, bias=True,
    qkv_bias=True, tied=True,
)  # fmt: skip


def logical_weights(model: Model, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by logical name, whole and unpadded."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (model.vocabulary, model.hidden)
    }
    if not model.rope:
        shapes["embedding.position_embeddings.weight"] = (model.positions, model.hidden)
    wide, narrow = model.heads * model.channels, model.groups * model.channels
    for layer in range(model.layers):
        prefix = f"decoder.layers.{layer}"
        attention, mlp = f"{prefix}.self_attention", f"{prefix}.mlp"
        rows = {
            f"{attention}.linear_q": (wide, model.hidden, model.qkv_bias),
            f"{attention}.linear_k": (narrow, model.hidden, model.qkv_bias),
            f"{attention}.linear_v": (narrow, model.hidden, model.qkv_bias),
            f"{attention}.linear_proj": (model.hidden, wide, model.bias),
            f"{mlp}.linear_fc2": (model.hidden, model.ffn, model.bias),
        }
        for name in ("linear_gate", "linear_up") if model.gated else ("linear_fc1",):
            rows[f"{mlp}.{name}"] = (model.ffn, model.hidden, model.bias)
        for name, (out, into, bias) in rows.items():
            shapes[f"{name}.weight"] = (out, into)
            if bias:
                shapes[f"{name}.bias"] = (out,)
        norms = [f"{prefix}.input_layernorm", f"{prefix}.pre_mlp_layernorm"]
        shapes |= norm_shapes(model, norms, model.hidden)
        if model.qk_norm:
            names = [f"{attention}.q_layernorm", f"{attention}.k_layernorm"]
            shapes |= norm_shapes(model, names, model.channels)
    shapes |= norm_shapes(model, ["decoder.final_layernorm"], model.hidden)
    if not model.tied:
        shapes["output_layer.weight"] = (model.vocabulary, model.hidden)
    return {
        name: torch.randn(shape, generator=generator).to(model.dtype)
        for name, shape in shapes.items()
    }


def norm_shapes(model: Model, names: list[str], length: int) -> dict[str, tuple[int, ...]]:
    """Shapes of norms."""
    suffixes = ("weight", "bias") if model.norm_bias else ("weight",)
    return {f"{name}.{suffix}": (length,) for name in names for suffix in suffixes}


def fuse_qkv(model: Model, q: Tensor, k: Tensor, v: Tensor, rank: int, tp: int) -> Tensor:
    """Rows of one tensor rank: for each of its KV heads, its queries, its key, its value."""
    d, ratio, rows = model.channels, model.heads // model.groups, []
    for group in range(rank * model.groups // tp, (rank + 1) * model.groups // tp):
        for head in range(group * ratio, (group + 1) * ratio):
            rows += [q[head * d + i] for i in range(d)]
        rows += [k[group * d + i] for i in range(d)]
        rows += [v[group * d + i] for i in range(d)]
    return torch.stack(rows)


def rank_rows(whole: Tensor, rank: int, tp: int) -> Tensor:
    """One rank's rows."""
    count = whole.shape[0] // tp
    return torch.stack([whole[rank * count + i] for i in range(count)])


def pad_rows(whole: Tensor, rows: int) -> Tensor:
    """Add rows that are in no vocabulary, filled with a number that would show."""
    filler = torch.full((rows - whole.shape[0], *whole.shape[1:]), 777.0, dtype=whole.dtype)
    return torch.cat([whole, filler])


def core_layer(
    model: Model, weights: dict[str, Tensor], layer: int, rank: int, tp: int
) -> dict[str, Tensor]:
    """One layer of one tensor rank, in Megatron-core's names with norms of their own."""
    prefix = f"decoder.layers.{layer}."
    part = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    found: dict[str, Tensor] = {}
    for suffix in ("weight", "bias"):
        heads = [part.get(f"self_attention.linear_{kind}.{suffix}") for kind in "qkv"]
        if all(tensor is not None for tensor in heads):
            q, k, v = (tensor for tensor in heads if tensor is not None)
            name = f"self_attention.linear_qkv.{suffix}"
            found[name] = fuse_qkv(model, q, k, v, rank, tp)
        gate, up = (part.get(f"mlp.linear_{kind}.{suffix}") for kind in ("gate", "up"))
        if gate is not None and up is not None:
            halves = [rank_rows(gate, rank, tp), rank_rows(up, rank, tp)]
            found[f"mlp.linear_fc1.{suffix}"] = torch.cat(halves)
        elif f"mlp.linear_fc1.{suffix}" in part:
            whole = part[f"mlp.linear_fc1.{suffix}"]
            found[f"mlp.linear_fc1.{suffix}"] = rank_rows(whole, rank, tp)
    for name in ("self_attention.linear_proj", "mlp.linear_fc2"):
        whole = part[f"{name}.weight"]
        found[f"{name}.weight"] = rank_rows(whole.t(), rank, tp).t()
        if f"{name}.bias" in part:
            found[f"{name}.bias"] = part[f"{name}.bias"].clone()
    found |= {n: t.clone() for n, t in part.items() if "layernorm" in n}
    return found


def chunk_layers(model: Model, pp: int, vp: int, rank: int, chunk: int) -> list[int]:
    """Layers of a virtual stage: chunk by chunk around the pipeline."""
    count = model.layers // (pp * vp)
    start = chunk * (model.layers // vp) + rank * count
    return list(range(start, start + count))


def core_chunk(
    model: Model, weights: dict[str, Tensor], layers: list[int], rank: int, tp: int, *,
    first: bool, last: bool,
) -> dict[str, Any]:  # fmt: skip
    """The state dict of one model chunk of one rank, Megatron-core's names."""
    state: dict[str, Any] = {}
    if first:
        word = pad_rows(weights["embedding.word_embeddings.weight"], model.padded)
        state["embedding.word_embeddings.weight"] = rank_rows(word, rank, tp)
        if not model.rope:
            name = "embedding.position_embeddings.weight"
            state[name] = weights[name].clone()
    for number, layer in enumerate(layers):
        for name, tensor in core_layer(model, weights, layer, rank, tp).items():
            state[f"decoder.layers.{number}.{name}"] = tensor
        state[f"decoder.layers.{number}.self_attention.linear_qkv._extra_state"] = None
    if last:
        for name, tensor in weights.items():
            if name.startswith("decoder.final_layernorm"):
                state[name] = tensor.clone()
        if not model.tied or not first:
            source = "embedding.word_embeddings.weight" if model.tied else "output_layer.weight"
            head = pad_rows(weights[source], model.padded)
            state["output_layer.weight"] = rank_rows(head, rank, tp)
    return state


def te_names(state: dict[str, Any]) -> dict[str, Any]:
    """Norms inside the linears that follow them."""
    renamed = {}
    for name, value in state.items():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        renamed[name] = value
    return renamed


def older_names(state: dict[str, Any]) -> dict[str, Any]:
    """The nested dictionaries of the older models."""
    words = {
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }
    model: dict[str, Any] = {"language_model": {"encoder": {}}}
    language = model["language_model"]
    for name, value in state.items():
        for new, old in words.items():
            name = name.replace(new, old)
        if name.endswith("_extra_state"):
            continue
        if name.startswith("embedding."):
            _, table, suffix = name.split(".")
            language.setdefault("embedding", {})[table] = {suffix: value}
        elif name == "output_layer.weight" and "embedding" not in language:
            model["word_embeddings_for_head"] = {"weight": value}
        else:
            language["encoder"][name.removeprefix("decoder.")] = value
    return model


def arguments(model: Model, tp: int, pp: int, vp: int, **changes: Any) -> argparse.Namespace:
    """Arguments as a run of Megatron-LM has them."""
    values = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "group_query_attention": model.groups != model.heads,
        "num_query_groups": model.groups if model.groups != model.heads else 1,
        "kv_channels": model.channels,
        "ffn_hidden_size": model.ffn,
        "max_position_embeddings": model.positions,
        "seq_length": model.positions,
        "position_embedding_type": "rope" if model.rope else "learned_absolute",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "normalization": "LayerNorm" if model.norm_bias else "RMSNorm",
        "norm_epsilon": 1e-6,
        "apply_layernorm_1p": False,
        "swiglu": model.gated,
        "openai_gelu": not model.gated,
        "bias_gelu_fusion": False,
        "add_bias_linear": model.bias,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "untie_embeddings_and_output_weights": not model.tied,
        "make_vocab_size_divisible_by": 64,
        "vocab_size": model.vocabulary,
        "padded_vocab_size": model.padded,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vp if vp > 1 else None,
        "params_dtype": model.dtype,
        "num_experts": None,
        "lr": 1e-3,
    }
    return argparse.Namespace(**(values | changes))


def rank_directory(tp_rank: int, pp_rank: int, pp: int) -> str:
    """Name of a rank's directory."""
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")


def write_torch(
    root: Path, model: Model, weights: dict[str, Tensor], *, tp: int, pp: int, vp: int = 1,
    spelling: str = "te", split: tuple[int, ...] | None = None,
    more: dict[str, Any] | None = None, **changes: Any,
) -> Path:  # fmt: skip
    """Write iteration 5 in the `torch` layout; return its directory.

    `split` gives the layers of each pipeline stage where they are uneven.
    """
    directory = root / "iter_0000005"
    for p in range(pp):
        for t in range(tp):
            content: dict[str, Any] = {
                "args": arguments(model, tp, pp, vp, **changes),
                "checkpoint_version": 3.0,
                "iteration": 5,
                "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
                **(more or {}),
            }
            for chunk in range(vp):
                layers = chunk_layers(model, pp, vp, p, chunk)
                if split is not None:
                    layers = list(range(sum(split[:p]), sum(split[: p + 1])))
                first, last = p == chunk == 0, (p, chunk) == (pp - 1, vp - 1)
                state = core_chunk(model, weights, layers, t, tp, first=first, last=last)
                if spelling != "core":
                    state = te_names(state) if spelling == "te" else older_names(state)
                content["model" if vp == 1 else f"model{chunk}"] = state
            path = directory / rank_directory(t, p, pp) / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save(content, path)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return directory


def write_torch_dist(
    root: Path, model: Model, weights: dict[str, Tensor], *, stacked: bool, **changes: Any
) -> Path:
    """Write iteration 5 in the `torch_dist` layout, layers stacked or each under its name."""
    from torch.distributed import checkpoint

    directory = root / "iter_0000005"
    layers = list(range(model.layers))
    state = te_names(core_chunk(model, weights, layers, 0, 1, first=True, last=True))
    state = {name: value for name, value in state.items() if value is not None}
    if stacked:
        single = [n.removeprefix("decoder.layers.0.") for n in state if ".layers.0." in n]
        for name in single:
            parts = [state.pop(f"decoder.layers.{layer}.{name}") for layer in layers]
            state[f"decoder.layers.{name}"] = torch.stack(parts)
        # Objects lie beside the tensors; nobody reads them.
        state["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_1"] = "bytes"
    state["optimizer.state.exp_avg.output_layer.weight"] = torch.ones(4)
    checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(directory), no_dist=True)
    content = {
        "args": arguments(model, 2, 1, 1, **changes),
        "checkpoint_version": 3.0,
        "iteration": 5,
    }
    torch.save(content, directory / "common.pt")
    metadata = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(metadata))
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return directory
