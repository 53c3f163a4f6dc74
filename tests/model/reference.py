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
    turn = torch.polar(torch.ones_like(angles), angles)[:, None, None, :]
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
    q = _linear(weights, f"{name}.linear_q", x).unflatten(-1, (n, d))
    k = _linear(weights, f"{name}.linear_k", x).unflatten(-1, (g, d))
    v = _linear(weights, f"{name}.linear_v", x).unflatten(-1, (g, d))
    if model.qk_norm:
        q = _norm(model, weights, f"{name}.q_layernorm", q)
        k = _norm(model, weights, f"{name}.k_layernorm", k)
    if model.rotary is not None:
        q, k = _rope(model, q), _rope(model, k)
    k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / math.sqrt(d)
    scores = scores.masked_fill(_hidden(model, layer, x.shape[0]), -torch.inf)
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


def reference_logits(model: ModelShape, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [s, b, v] of tokens [s, b] without dropout."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    if model.position == "learned_absolute":
        rows = weights["embedding.position_embeddings.weight"][: tokens.shape[0]]
        x = x + rows.unsqueeze(1)
    for layer in range(model.num_layers):
        prefix = f"decoder.layers.{layer}"
        normed = _norm(model, weights, f"{prefix}.input_layernorm", x)
        x = x + _attention(model, weights, layer, f"{prefix}.self_attention", normed)
        normed = _norm(model, weights, f"{prefix}.pre_mlp_layernorm", x)
        x = x + _mlp(model, weights, f"{prefix}.mlp", normed)
    x = _norm(model, weights, "decoder.final_layernorm", x)
    head = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    return x @ head.t()
