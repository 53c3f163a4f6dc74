"""A plain-torch decoder on logical weights: the oracle for our hand-written gradients.

Written for clarity with autograd doing all the work; no fused weights, no tricks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.config.plan import ModelShape
from megatron_lite.ops.rotary import inverse_frequencies


def _norm(model: ModelShape, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = weights[f"{name}.weight"] + (1 if model.norm_one_plus else 0)
    if model.normalization == "LayerNorm":
        return functional.layer_norm(
            x, weight.shape, weight, weights[f"{name}.bias"], model.norm_epsilon
        )
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + model.norm_epsilon) * weight


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _rope(model: ModelShape, x: Tensor) -> Tensor:
    """Rotate [s, b, n, d] as complex numbers."""
    assert model.rotary is not None
    half = model.rotary.dim // 2
    positions = torch.arange(x.shape[0], dtype=x.dtype) / model.rotary.interpolation_factor
    angles = torch.outer(positions, inverse_frequencies(model.rotary, x.dtype))
    size = 1.0 if model.rotary.yarn is None else model.rotary.yarn.magnitude
    turn = torch.polar(torch.full_like(angles, size), angles)[:, None, None, :]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if model.rotary.interleaved:
        pairs = torch.view_as_complex(turned.unflatten(-1, (half, 2)).contiguous())
        turned = torch.view_as_real(pairs * turn).flatten(-2)
    else:
        pairs = torch.complex(turned[..., :half], turned[..., half:]) * turn
        turned = torch.cat((pairs.real, pairs.imag), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _softmax(model: ModelShape, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Probabilities of scores [b, n, s, s], sinks beside them left out."""
    if model.sinks == "none":
        return x.softmax(-1)
    sinks = torch.zeros(x.shape[1], dtype=x.dtype)
    if model.sinks == "learned":
        sinks = weights[f"{name}.core_attention.softmax_offset"]
    return torch.cat((x, sinks.view(1, -1, 1, 1).expand(*x.shape[:-1], 1)), -1).softmax(-1)[
        ..., :-1
    ]


def _hidden(model: ModelShape, layer: int, s: int) -> Tensor:
    """[s, s]: keys that a layer's queries do not see."""
    age = torch.arange(s).unsqueeze(1) - torch.arange(s)
    left = model.window_left(layer)
    return (age < 0) | (age > (s if left < 0 else left))


def _attention(
    model: ModelShape, weights: Mapping[str, Tensor], layer: int, name: str, x: Tensor
) -> Tensor:
    d, n, g = model.kv_channels, model.num_attention_heads, model.num_query_groups
    if model.latent is not None:
        q, k, v = _latent_heads(model, weights, name, x)
        return _core(model, weights, layer, name, q, k, v)
    q = _linear(weights, f"{name}.linear_q", x).unflatten(-1, (n, d))
    k = _linear(weights, f"{name}.linear_k", x).unflatten(-1, (g, d))
    v = _linear(weights, f"{name}.linear_v", x).unflatten(-1, (g, d))
    if model.qk_norm:
        q = _norm(model, weights, f"{name}.q_layernorm", q)
        k = _norm(model, weights, f"{name}.k_layernorm", k)
    if model.rotary is not None:
        q, k = _rope(model, q), _rope(model, k)
    k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    return _core(model, weights, layer, name, q, k, v)


def _latent_heads(
    model: ModelShape, weights: Mapping[str, Tensor], name: str, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of multi-latent attention, head by head."""
    latent, n = model.latent, model.num_attention_heads
    assert latent is not None

    def normed(part: str, low: Tensor) -> Tensor:
        return _norm(model, weights, f"{name}.{part}", low) if model.qk_norm else low

    if latent.q_lora_rank:
        low = normed("q_layernorm", _linear(weights, f"{name}.linear_q_down_proj", x))
        q = _linear(weights, f"{name}.linear_q_up_proj", low)
    else:
        q = _linear(weights, f"{name}.linear_q_proj", x)
    low = _linear(weights, f"{name}.linear_kv_down_proj", x)
    shared = _rope(model, low[..., latent.kv_lora_rank :].unsqueeze(2))
    low = normed("kv_layernorm", low[..., : latent.kv_lora_rank])
    kv = _linear(weights, f"{name}.linear_kv_up_proj", low).unflatten(-1, (n, -1))
    plain = latent.qk_head_dim
    heads_q, heads_k = [], []
    for head, of_k in zip(q.unflatten(-1, (n, -1)).unbind(2), kv.unbind(2), strict=True):
        turned = _rope(model, head[..., plain:].unsqueeze(2)).squeeze(2)
        heads_q.append(torch.cat((head[..., :plain], turned), -1))
        heads_k.append(torch.cat((of_k[..., :plain], shared.squeeze(2)), -1))
    return torch.stack(heads_q, 2), torch.stack(heads_k, 2), kv[..., plain:]


def _core(
    model: ModelShape,
    weights: Mapping[str, Tensor],
    layer: int,
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Softmax, context and projection of [s, b, n, d] heads."""
    scale = 1 / math.sqrt(model.kv_channels)
    if model.latent is not None and model.rotary is not None and model.rotary.yarn is not None:
        yarn = model.rotary.yarn
        scale *= (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1) ** 2
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    scores = scores.masked_fill(_hidden(model, layer, q.shape[0]), -torch.inf)
    probs = _softmax(model, weights, name, scores)
    return _linear(
        weights, f"{name}.linear_proj", torch.einsum("bnst,tbnd->sbnd", probs, v).flatten(2)
    )


_ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: functional.relu(x) ** 2,
}


def _mlp(model: ModelShape, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    act = _ACTIVATIONS[model.activation]
    if model.gated:
        limit = model.activation_limit
        gate = act(_linear(weights, f"{name}.linear_gate", x).clamp(max=limit))
        up = _linear(weights, f"{name}.linear_up", x).clamp(-limit, limit)
        return _linear(weights, f"{name}.linear_fc2", gate * (up + model.linear_offset))
    return _linear(weights, f"{name}.linear_fc2", act(_linear(weights, f"{name}.linear_fc1", x)))


def _layer(
    model: ModelShape, weights: Mapping[str, Tensor], layer: int, prefix: str, x: Tensor
) -> Tensor:
    normed = _norm(model, weights, f"{prefix}.input_layernorm", x)
    x = x + _attention(model, weights, layer, f"{prefix}.self_attention", normed)
    normed = _norm(model, weights, f"{prefix}.pre_mlp_layernorm", x)
    return x + _mlp(model, weights, f"{prefix}.mlp", normed)


def _head(weights: Mapping[str, Tensor]) -> Tensor:
    return weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])


def reference_hidden(model: ModelShape, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Hidden states [s, b, h] behind the final norm."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    if model.position == "learned_absolute":
        rows = weights["embedding.position_embeddings.weight"][: tokens.shape[0]]
        x = x + rows.unsqueeze(1)
    for layer in range(model.num_layers):
        x = _layer(model, weights, layer, f"decoder.layers.{layer}", x)
    return _norm(model, weights, "decoder.final_layernorm", x)


def reference_logits(model: ModelShape, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [s, b, v] of tokens [s, b] without dropout."""
    return reference_hidden(model, weights, tokens) @ _head(weights).t()


def reference_further_logits(
    model: ModelShape, weights: Mapping[str, Tensor], stream: Tensor
) -> list[Tensor]:
    """Logits of every depth of multi-token prediction, position by position.

    Args:
        stream: [s + 1, b], the tokens and the last label.

    Returns:
        per depth [s - 1 - depth, b, v]: of the positions that have a target.
    """
    found, hidden = [], reference_hidden(model, weights, stream[:-1])
    for depth in range(model.mtp_depths):
        prefix = f"mtp.{depth}"
        count = len(stream) - 2 - depth  # positions with a token to embed and a target behind it
        embedded = weights["embedding.word_embeddings.weight"][stream[depth + 1 :][:count]]
        pair = (
            _norm(model, weights, f"{prefix}.enorm", embedded),
            _norm(model, weights, f"{prefix}.hnorm", hidden[:count]),
        )
        x = _linear(weights, f"{prefix}.eh_proj", torch.cat(pair, -1))
        layer = model.num_layers + depth
        x = _layer(model, weights, layer, f"{prefix}.transformer_layer", x)
        hidden = _norm(model, weights, f"{prefix}.final_layernorm", x)
        found.append(hidden @ _head(weights).t())
    return found
