"""The attention of newer families equals Hugging Face transformers on the same random weights.

Only attention is compared here: the peers' experts are silenced or left out. In fp64 the
peers' norms and rotary tables, which compute in fp32, are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lite.config.attention_plan import LatentShape, WindowShape, YarnShape
from megatron_lite.config.plan import ModelShape, PrecisionShape, RotaryShape
from megatron_lite.mesh.groups import local_groups
from megatron_lite.model.attention import KeyValueCache
from megatron_lite.model.gpt import GPTStage
from megatron_lite.ops.activation import activate
from megatron_lite.ops.rotary import inverse_frequencies
from megatron_lite.spec.model import model_spec
from tests.model.builders import (
    FAMILIES,
    LLAMA,
    build_context,
    build_plan_of,
    build_stage,
    logical_pieces,
    sample_batch,
)

transformers = pytest.importorskip("transformers", reason="needs the [convert] extra")

S, B, V = 40, 2, 100
ORIGIN = {"tp": 0, "cp": 0, "dp": 0, "pp": 0}
YARN = YarnShape(4.0, 16, 32.0, 1.0, 1.0, 0.0, False)
GPT_OSS = replace(
    LLAMA,
    num_layers=4,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=2,
    vocab_size=V,
    seq_length=S,
    max_position_embeddings=64,
    position="yarn",
    rotary=RotaryShape(150000.0, 8, False, 1.0, None, YARN),
    sinks="learned",
    window=WindowShape(6, (0, 2)),
    linear_bias=True,
    qkv_bias=True,
)


def gpt_oss_peer() -> torch.nn.Module:
    """GPT-OSS whose experts give nothing."""
    config = transformers.GptOssConfig(
        vocab_size=V,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=7,
        max_position_embeddings=64,
        rms_norm_eps=GPT_OSS.norm_epsilon,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return transformers.GptOssForCausalLM(config)


GPT_OSS_NAMES = {
    "self_attention.linear_q": "self_attn.q_proj",
    "self_attention.linear_k": "self_attn.k_proj",
    "self_attention.linear_v": "self_attn.v_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.core_attention": "self_attn",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
ENDS = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}


def peer_name(names: dict[str, str], ours: str) -> str:
    """The peer's name of one of our parameters."""
    stem, suffix = ours.rsplit(".", 1)
    if stem in ENDS:
        return f"{ENDS[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"model.layers.{layer}.{names[part]}.{'sinks' if 'offset' in suffix else suffix}"


def draw(peer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Random weights; experts that would be added give zero."""
    torch.manual_seed(3)
    peer = peer.to(dtype).eval()
    with torch.no_grad():
        for name, param in peer.named_parameters():
            offset = 1.0 if "norm" in name else 0.0
            param.copy_(offset + 0.15 * torch.randn(param.shape, dtype=torch.float64))
            if ".mlp.experts." in name:
                param.zero_()
            if name.endswith("sinks"):
                param.mul_(10)
    return peer


def widen(peer: torch.nn.Module, shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the peer's norms and rotary tables compute in fp64."""
    assert shape.rotary is not None and shape.rotary.yarn is not None
    exact = inverse_frequencies(shape.rotary, torch.float64)
    magnitude = shape.rotary.yarn.magnitude

    def norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.variance_epsilon) * self.weight

    def rotary_forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angles = position_ids[:, :, None].double() * exact
        if type(self).__name__ != "GptOssRotaryEmbedding":
            angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * magnitude, angles.sin() * magnitude

    for module in peer.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", norm_forward)
        if type(module).__name__.endswith("RotaryEmbedding"):
            monkeypatch.setattr(type(module), "forward", rotary_forward)


def logits_of(
    shape: ModelShape, weight: Callable[[str], torch.Tensor | None], dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Our model with these weights, as a function of tokens [b, s]; zero where there are none."""
    name = str(dtype).removeprefix("torch.")
    plan = replace(build_plan_of(shape), precision=PrecisionShape(name, name, name))
    stage = GPTStage(plan, model_spec(shape, plan.parallel), local_groups(), ORIGIN)
    stage.allocate()
    for spec, piece in logical_pieces(stage, ORIGIN, lambda p: p.data):
        source = weight(spec.name)
        if source is not None:
            assert source.shape == piece.shape, spec.name
            piece.copy_(source)
    mb = build_context(plan, None, torch.ones(S, B, dtype=dtype))
    return lambda tokens: stage.logits(tokens.t(), mb, None).transpose(0, 1)


def check(
    shape: ModelShape,
    peer: torch.nn.Module,
    weight: Callable[[str], torch.Tensor | None],
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (B, S), generator=generator)
    with torch.no_grad():
        wanted = peer(input_ids=tokens).logits
    got = logits_of(shape, weight, dtype)(tokens)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert wanted.std() > 0.1
    assert (got - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sinks_windows_and_yarn_equal_gpt_oss(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = draw(gpt_oss_peer(), dtype)
    if dtype == torch.float64:
        widen(peer, GPT_OSS, monkeypatch)
    state = peer.state_dict()

    def weight(name: str) -> torch.Tensor | None:
        return None if ".mlp." in name else state[peer_name(GPT_OSS_NAMES, name)]

    check(GPT_OSS, peer, weight, dtype)


def test_the_gate_equals_that_of_gpt_oss_s_experts() -> None:
    experts = gpt_oss_peer().model.layers[0].mlp.experts
    x = torch.randn(9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 6
    wanted = experts._apply_gate(x)
    halves = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)  # they lie side by side there
    got = activate(halves, "quick_gelu", True, False, 7.0, 1.0)
    torch.testing.assert_close(got, wanted, rtol=1e-14, atol=1e-14)


DEEPSEEK_YARN = YarnShape(40.0, 16, 32.0, 1.0, 1.0, 1.0, True)
DEEPSEEK = replace(
    LLAMA,
    hidden_size=64,
    num_query_groups=4,
    kv_channels=20,
    vocab_size=V,
    seq_length=S,
    max_position_embeddings=64,
    norm_epsilon=1e-6,
    position="rope",
    qk_norm=True,
    latent=LatentShape(24, 32, 12, 8, 16),
    rotary=RotaryShape(10000.0, 8, True, 1.0, None, DEEPSEEK_YARN),
)
DEEPSEEK_NAMES = {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_gate": "mlp.gate_proj",
    "mlp.linear_up": "mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}


def deepseek_peer(q_lora_rank: int | None) -> torch.nn.Module:
    """DeepSeek-V3 whose layers are all dense."""
    config = transformers.DeepseekV3Config(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=DEEPSEEK.ffn_hidden_size,
        num_hidden_layers=DEEPSEEK.num_layers,
        first_k_dense_replace=DEEPSEEK.num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=32,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        },
        attn_implementation="sdpa",
    )
    return transformers.DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize("q_lora_rank", [24, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_multi_latent_attention_equals_deepseek_v3(
    dtype: torch.dtype, q_lora_rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEEPSEEK.latent is not None
    shape = replace(DEEPSEEK, latent=replace(DEEPSEEK.latent, q_lora_rank=q_lora_rank or 0))
    peer = draw(deepseek_peer(q_lora_rank), dtype)
    if dtype == torch.float64:
        widen(peer, shape, monkeypatch)
    state = peer.state_dict()
    check(shape, peer, lambda name: state[peer_name(DEEPSEEK_NAMES, name)], dtype)


def test_cached_keys_give_the_tokens_that_the_whole_sequence_gives() -> None:
    plan = build_plan_of(FAMILIES["mla"])
    stage, _ = build_stage(plan)
    tokens, _, weights = sample_batch(plan.model)
    mb = build_context(plan, None, weights)
    whole, cache = stage.logits(tokens, mb, None), KeyValueCache()
    for first, last in ((0, 5), (5, 6), (6, 12)):
        part = replace(
            mb, positions=mb.positions[first:last], full_positions=mb.full_positions[first:last]
        )
        got = stage.logits(tokens[first:last], part, cache)
        torch.testing.assert_close(got, whole[first:last], rtol=1e-11, atol=1e-11)
