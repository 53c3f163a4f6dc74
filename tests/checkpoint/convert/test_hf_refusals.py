"""What this model cannot follow is refused by name and value, never converted in silence."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint.convert.hf_config import build_config, choose_family, parse_config
from megatron_lite.checkpoint.convert.hf_families import HANDLED
from megatron_lite.checkpoint.convert.hf_registry import FAMILIES
from megatron_lite.config.plan import build_model
from megatron_lite.errors import UserError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


def parse(changes: dict[str, Any], base: dict[str, Any] = LLAMA) -> Any:
    return parse_config({**base, **changes}, "config.json")


def base_of(name: str) -> dict[str, Any]:
    """The least that a family's config.json has to say."""
    if name == "GPT2LMHeadModel":
        return GPT2
    alone = {"num_key_value_heads": LLAMA["num_attention_heads"], "first_k_dense_replace": 1}
    if FAMILIES[name].mixture == "gpt-oss":
        return {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"}
    return LLAMA | {"sliding_window": None} | (alone if FAMILIES[name].latent else {})


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
REFUSALS = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "biases of attention alone": ({"attention_bias": True}, "attention_bias True, mlp_bias False"),
    "rope type": ({"rope_scaling": DYNAMIC}, "'dynamic'"),
    "rope type, new spelling": ({"rope_parameters": DYNAMIC}, "'dynamic'"),
    "yarn of unknown length": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "needs original_max_position_embeddings",
    ),
    "yarn that shrinks": ({"rope_parameters": YARN | {"factor": 0.5}}, "at least 1"),
    "yarn by a small growth": (
        {"rope_parameters": YARN | {"attention_factor": 0.5}},
        "attention_factor 0.5",
    ),
    "two spellings that disagree": (
        {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 4.0}},
        "disagree",
    ),
    "other constants of llama3": (
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 2.0}},
        "high_freq_factor 2.0",
    ),
    "other original context": (
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}},
        "original_max_position_embeddings 4096",
    ),
    "attention scaling": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "attention_factor": 0.5}},
        "attention_factor 0.5",
    ),
    "broken linear factor": ({"rope_scaling": {"type": "linear", "factor": 2.5}}, "2.5"),
    "broken theta": ({"rope_theta": 10000.5}, "10000.5"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "a theta for each kind of layer": ({"rope_parameters": {"full": {}}}, "layer to layer"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "pruned": ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
    "kv heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    "no number": ({"hidden_size": "64"}, "hidden_size '64'"),
    "a flag as a number": ({"num_hidden_layers": True}, "num_hidden_layers True"),
    "more layers than there can be": (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers 1000000000 must be at most",
    ),
    "negative": ({"vocab_size": -1}, "vocab_size -1"),
    "tie is no flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings 1"),
    "window of a Llama": ({"sliding_window": 32}, "sliding_window 32"),
    "unknown architecture": ({"architectures": ["XForCausalLM"]}, "XForCausalLM"),
    "two architectures": ({"architectures": ["A", "B"]}, "architectures"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_field_that_changes_the_numbers_is_refused_with_its_value(name: str) -> None:
    changes, words = REFUSALS[name]
    parse({})
    with pytest.raises(UserError) as caught:
        parse(changes)
    assert words in str(caught.value)


MIXTURE_REFUSALS = {
    "groups by another count": (
        "DeepseekV3ForCausalLM",
        {"num_experts_per_tok": 6, "topk_group": 2},
        "topk_group 2 with num_experts_per_tok 6",
    ),
    "a lone expert's sum": ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 1}, "norm_topk_prob"),
    "shared heads": ("DeepseekV3ForCausalLM", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
    "halves": ("DeepseekV3ForCausalLM", {"rope_interleave": False}, "rope_interleave False"),
    "scores": ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    "no experts": ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts 0"),
    "odd dense layers": ("Qwen3MoeForCausalLM", {"mlp_only_layers": "all"}, "no list of layers"),
    "another alpha": ("GptOssForCausalLM", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
    "odd layers": ("GptOssForCausalLM", {"layer_types": ["chunked"] * 2}, "layer_types"),
    "no window": ("GptOssForCausalLM", {"sliding_window": 0}, "sliding_window 0"),
    "no biases": ("GptOssForCausalLM", {"attention_bias": False}, "attention_bias False"),
}


@pytest.mark.parametrize("what", MIXTURE_REFUSALS)
def test_what_experts_and_latents_compute_otherwise_is_refused(what: str) -> None:
    name, changes, words = MIXTURE_REFUSALS[what]
    parse({"architectures": [name]}, base_of(name))
    with pytest.raises(UserError) as caught:
        parse({"architectures": [name]} | changes, base_of(name))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("reorder_and_upcast_attn", True),
        ("add_cross_attention", True),
        ("activation_function", "silu"),
    ],
)
def test_gpt2_variants_are_refused_with_their_value(field: str, value: Any) -> None:
    parse({}, GPT2)
    with pytest.raises(UserError, match=f"{field} {value!r} is not supported"):
        parse({field: value}, GPT2)


MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}


def test_a_window_as_long_as_the_positions_is_no_window() -> None:
    parse({"sliding_window": 64}, MISTRAL)
    parse({"sliding_window": None}, MISTRAL)
    with pytest.raises(UserError, match="sliding_window 63 is smaller than the 64 positions"):
        parse({"sliding_window": 63}, MISTRAL)


def test_an_absent_window_is_what_the_family_assumes() -> None:
    with pytest.raises(UserError, match="sliding_window 4096 is smaller"):
        parse({"max_position_embeddings": 32768}, MISTRAL)


def test_windows_of_qwen_count_only_where_they_are_used() -> None:
    parse({"sliding_window": 32}, QWEN2)
    parse({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}, QWEN2)
    used = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
    with pytest.raises(UserError, match="sliding_window 32"):
        parse(used, QWEN2)
    parse(used | {"layer_types": ["full_attention"] * 2}, QWEN2)


def test_unknown_fields_are_told_unless_they_are_off() -> None:
    found = parse({"logit_softcap": 30.0, "use_mrope": False, "something": None})
    (note,) = found.notes
    assert "logit_softcap 30.0" in note and "use_mrope" not in note and "something" not in note
    assert parse({}).notes == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_that_was_written_reads_as_the_same_model(name: str) -> None:
    base = base_of(name)
    found = parse({"architectures": [name]}, base)
    model = build_model(found.config, found.vocab_size)
    family = choose_family(model, name, None)
    assert family.architecture == name
    again = parse_config(json.loads(json.dumps(build_config(family, model, "float32"))), "written")
    assert build_model(again.config, again.vocab_size) == model
    assert again.notes == () and again.dtype == "float32"


def test_a_model_that_no_family_expresses_is_refused_with_every_reason() -> None:
    from dataclasses import replace

    config = replace(parse({}).config, squared_relu=True, swiglu=False)
    with pytest.raises(UserError) as caught:
        choose_family(build_model(config, 100), None, None)
    assert all(name in str(caught.value) for name in FAMILIES)
    partly = replace(parse({}).config, rotary_percent=0.5)
    with pytest.raises(UserError, match="only 4 of 8 channels per head are rotated"):
        choose_family(build_model(partly, 100), None, "LlamaForCausalLM")
    with pytest.raises(UserError, match="GPT2LMHeadModel: position_embedding_type is 'rope'"):
        choose_family(build_model(parse({}).config, 100), None, "GPT2LMHeadModel")


ODD_VALUES = (None, True, False, -1, 0, 1.5, 2**40, "x", "", [], [None], {}, {"a": {}}, 1e300)


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_a_field_holds_it_is_read_or_refused_in_words(name: str) -> None:
    base = base_of(name)
    family = FAMILIES[name]
    fields = {*base, *family.numbers, *family.defaults, *HANDLED, "dtype", "model_type"}
    fields |= {field for choice in family.choices for field in choice.fields}
    read = 0
    for field in sorted(fields):
        for value in ODD_VALUES:
            try:
                found = parse({"architectures": [name], field: value}, base)
            except UserError:
                continue
            build_model(found.config, found.vocab_size)
            read += 1
    nested = ("rope_type", "type", "factor", "rope_theta", *LLAMA3)
    for field in nested:
        for value in ODD_VALUES:
            for spelling in ("rope_scaling", "rope_parameters"):
                try:
                    parse({"architectures": [name], spelling: LLAMA3 | {field: value}}, base)
                except UserError:
                    continue
    assert read > 20


def test_config_json_is_parsed_strictly(tmp_path: Path) -> None:
    from megatron_lite.checkpoint.convert.hf_read import read_hf
    from megatron_lite.errors import DamagedError

    for text in ('{"a": 1, "a": 2}', '{"a": NaN}', "[]", "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DamagedError, match=r"config\.json"):
            read_hf(tmp_path)
