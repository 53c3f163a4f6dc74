"""Logits and loss equal Hugging Face transformers on the same random weights.

fp32 against unmodified transformers to 1e-5. In fp64 transformers itself is only good to
6e-7, because its RMSNorm and rotary tables compute in fp32; with those two replaced here
(and SDPA attention) the two implementations agree to 1e-10.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from megatron_lite.config.plan import ModelShape, PrecisionShape, RotaryShape
from megatron_lite.mesh.groups import local_groups
from megatron_lite.model.gpt import GPTStage
from megatron_lite.spec.model import model_spec
from tests.model.builders import GPT2, LLAMA, build_context, build_plan_of, logical_pieces

transformers = pytest.importorskip("transformers", reason="needs the [convert] extra")

S, B, V = 48, 2, 100
ORIGIN = {"tp": 0, "cp": 0, "dp": 0, "pp": 0}
BASE = replace(
    LLAMA, hidden_size=64, num_attention_heads=8, num_query_groups=2, ffn_hidden_size=96,
    vocab_size=V, seq_length=S, max_position_embeddings=64, norm_epsilon=1e-6,
)  # fmt: skip


def rope(base: float = 10000.0, factor: float | None = None) -> RotaryShape:
    return RotaryShape(base, 8, False, 1.0, factor)


SHAPES: dict[str, ModelShape] = {
    "gpt2": replace(
        GPT2, hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_channels=16,
        ffn_hidden_size=256, vocab_size=V, seq_length=S, max_position_embeddings=64,
        activation="gelu_tanh", norm_epsilon=1e-6,
    ),
    "llama": replace(BASE, rotary=rope()),
    "llama_tied_biased": replace(BASE, rotary=rope(), tied=True, linear_bias=True),
    "llama3_scaled": replace(BASE, rotary=rope(500000.0, 8.0)),
    "qwen2": replace(BASE, rotary=rope(), qkv_bias=True, tied=True),
    "qwen3": replace(BASE, rotary=rope(), qk_norm=True, tied=True),
}  # fmt: skip


def build_peer(family: str, shape: ModelShape, dtype: torch.dtype) -> torch.nn.Module:
    """A transformers model of the family with random weights."""
    common = {
        "vocab_size": V,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.kv_channels,
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": 131072 if family == "llama3_scaled" else 64,
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied,
        "attn_implementation": "sdpa",
    }
    if shape.rotary is not None:
        common["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.rotary.base}
        if shape.rotary.llama3_factor is not None:
            common["rope_parameters"] = {
                "rope_type": "llama3",
                "rope_theta": shape.rotary.base,
                "factor": shape.rotary.llama3_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=V, n_embd=64, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0,
            embd_pdrop=0.0, resid_pdrop=0.0, layer_norm_epsilon=1e-6, attn_implementation="sdpa",
        )  # fmt: skip
    elif family == "qwen2":
        config = transformers.Qwen2Config(**common)
    elif family == "qwen3":
        config = transformers.Qwen3Config(**common)
    else:
        biases = {"attention_bias": shape.linear_bias, "mlp_bias": shape.linear_bias}
        config = transformers.LlamaConfig(**common, **biases)
    torch.manual_seed(3)
    peer = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, param in peer.named_parameters():
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            param.copy_(offset + 0.1 * torch.randn(param.shape, dtype=torch.float64))
    return peer


LLAMA_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_q": "self_attn.q_proj",
    "self_attention.linear_k": "self_attn.k_proj",
    "self_attention.linear_v": "self_attn.v_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_gate": "mlp.gate_proj",
    "mlp.linear_up": "mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}


def llama_weight(peer: torch.nn.Module, name: str) -> torch.Tensor:
    """The tensor of a Llama-like peer under our logical name."""
    stem, suffix = name.rsplit(".", 1)
    state = peer.state_dict()
    if stem.startswith("decoder.layers."):
        _, _, layer, part = stem.split(".", 3)
        return state[f"model.layers.{layer}.{LLAMA_NAMES[part]}.{suffix}"]
    return state[f"{LLAMA_NAMES[stem]}.{suffix}"]


GPT2_NAMES = {
    "input_layernorm": "ln_1",
    "pre_mlp_layernorm": "ln_2",
    "self_attention.linear_proj": "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def gpt2_weight(peer: torch.nn.Module, name: str) -> torch.Tensor:
    """The tensor of a GPT-2 peer; its linears are stored [in, out] and q, k, v fused."""
    state = peer.state_dict()
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("decoder.layers."):
        fixed = {
            "embedding.word_embeddings": "wte",
            "embedding.position_embeddings": "wpe",
            "decoder.final_layernorm": "ln_f",
        }
        return state[f"transformer.{fixed[stem]}.{suffix}"]
    _, _, layer, part = stem.split(".", 3)
    prefix = f"transformer.h.{layer}"
    if part.startswith("self_attention.linear_") and part[-1] in "qkv":
        fused = state[f"{prefix}.attn.c_attn.{suffix}"]
        return fused.chunk(3, dim=-1)["qkv".index(part[-1])].t()
    tensor = state[f"{prefix}.{GPT2_NAMES[part]}.{suffix}"]
    return tensor.t() if ".linear_" in part and suffix == "weight" else tensor


def build_ours(family: str, shape: ModelShape, peer: torch.nn.Module, dtype: torch.dtype):
    """Our stage with the peer's weights, and its plan."""
    name = str(dtype).removeprefix("torch.")
    plan = replace(build_plan_of(shape), precision=PrecisionShape(name, name, name))
    stage = GPTStage(plan, model_spec(shape, plan.parallel), local_groups(), ORIGIN)
    stage.allocate()
    pick = gpt2_weight if family == "gpt2" else llama_weight
    for spec, piece in logical_pieces(stage, ORIGIN, lambda p: p.data):
        source = pick(peer, spec.name)
        assert source.shape == piece.shape, spec.name
        piece.copy_(source)
    return stage, plan


def replace_fp32_parts(peer: torch.nn.Module, shape: ModelShape, monkeypatch) -> None:
    """Let the peer's RMSNorm and rotary tables compute in fp64."""

    def norm_forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.variance_epsilon) * self.weight

    def rotary_forward(self, x, position_ids):
        angles = position_ids[:, :, None].double() * exact[None, None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    exact = None
    if shape.rotary is not None:
        exact = exact_frequencies(shape.rotary)
    for module in peer.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", norm_forward)
        if type(module).__name__.endswith("RotaryEmbedding"):
            monkeypatch.setattr(type(module), "forward", rotary_forward)


def exact_frequencies(rotary: RotaryShape) -> torch.Tensor:
    """The published frequencies, channel by channel."""
    values = []
    for channel in range(0, rotary.dim, 2):
        frequency = rotary.base ** (-channel / rotary.dim)
        if rotary.llama3_factor is not None:
            turns = 8192 * frequency / (2 * math.pi)
            if turns < 1:
                frequency /= rotary.llama3_factor
            elif turns <= 4:
                share = (turns - 1) / 3
                frequency *= share + (1 - share) / rotary.llama3_factor
        values.append(frequency / rotary.interpolation_factor)
    return torch.tensor(values, dtype=torch.float64)


def tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    stream = torch.randint(0, V, (B, S + 1), generator=generator)
    return stream[:, :-1], stream[:, 1:]


def compare(family: str, dtype: torch.dtype, tolerance: float, monkeypatch) -> None:
    shape = SHAPES[family]
    peer = build_peer(family, shape, dtype)
    stage, plan = build_ours(family, shape, peer, dtype)
    if dtype == torch.float64:
        replace_fp32_parts(peer, shape, monkeypatch)
    tokens, labels = tokens_and_labels()
    with torch.no_grad():
        wanted = peer(input_ids=tokens).logits
    mb = build_context(plan, None, torch.ones(S, B, dtype=dtype))
    got = stage.logits(tokens.t(), mb, None).transpose(0, 1)
    assert wanted.std() > 0.1
    assert (got - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())
    wanted_loss = functional.cross_entropy(wanted.flatten(0, 1).to(dtype), labels.flatten())
    with torch.no_grad():
        loss = stage(tokens.t(), labels.t(), mb)
    assert abs(loss - wanted_loss) <= tolerance * wanted_loss


@pytest.mark.parametrize("family", SHAPES)
def test_logits_and_loss_equal_unmodified_transformers_in_fp32(family, monkeypatch):
    compare(family, torch.float32, 1e-5, monkeypatch)


@pytest.mark.parametrize("family", SHAPES)
def test_logits_and_loss_equal_transformers_in_fp64(family, monkeypatch):
    compare(family, torch.float64, 1e-10, monkeypatch)


def test_llama3_scaling_is_visible_to_the_comparison():
    plain, scaled = exact_frequencies(rope(500000.0)), exact_frequencies(rope(500000.0, 8.0))
    assert (plain[:1] == scaled[:1]).all() and (plain[-1:] / scaled[-1:] == 8).all()
