"""The model families of Hugging Face that convert: one table each, no code.

A table says which flags build the architecture, which configuration fields carry a
number, which fields may only have values that change nothing, and which tensor holds
which logical parameters. A family is added as one more table. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Weight:
    """One tensor of a family: logical parameters joined along dim 0, then maybe transposed.

    `name` and `parts` are templates; {i} is the layer. It exists where its parts exist. With
    {e} in its name it is expert e of its only part, a stack. A stack `interleaved` has the rows
    of its parts in turn, and a stack is transposed expert by expert.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Choice:
    """Fields that together choose flags: by their legal values, the flags of each."""

    fields: tuple[str, ...]
    flags: Mapping[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """What is known of one architecture.

    Attributes:
        architecture: class name in `architectures`.
        model_type: `model_type` of config.json.
        prefix: of the tensor names of the body; files of a bare body come without it.
        numbers: configuration field -> our field, copied both ways.
        flags: flags that every model of the family has.
        choices: fields that choose flags; other values are refused.
        defaults: what Hugging Face assumes for a field that is absent.
        harmless: fields that change no number.
        weights: tensors; `head` is the output layer, absent when tied.
        derived: patterns of buffers that older files hold and that are computed.
        rotary: whether positions are rotary.
        grouped: whether the family has key/value heads of their own number.
        mixture: how it spells a mixture of experts (`hf_experts`); "": it has none.
        latent: whether its attention is multi-latent.
        further: what a depth {d} of multi-token prediction has beside its layer, which stands
            behind the model's last one, at {i}.
        copies: (tensor, parameter) that such a depth's files repeat.
    """

    architecture: str
    model_type: str
    prefix: str
    numbers: Mapping[str, str]
    flags: Mapping[str, Any]
    choices: tuple[Choice, ...]
    defaults: Mapping[str, Any]
    harmless: frozenset[str]
    weights: tuple[Weight, ...]
    derived: tuple[str, ...]
    rotary: bool = True
    grouped: bool = True
    head: str = "lm_head.weight"
    mixture: str = ""
    latent: bool = False
    further: tuple[Weight, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()


HARMLESS = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype"),
        *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
        *("sep_token_id", "decoder_start_token_id", "initializer_range", "pretraining_tp"),
        *("_name_or_path", "name_or_path", "id2label", "label2id", "num_labels", "problem_type"),
        *("return_dict", "output_attentions", "output_hidden_states", "torchscript"),
        *("use_bfloat16", "is_decoder", "is_encoder_decoder", "chunk_size_feed_forward"),
        *("attn_implementation", "_attn_implementation", "gradient_checkpointing"),
        *("task_specific_params", "finetuning_task", "prefix", "tokenizer_class", "max_length"),
        *("min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p"),
        *("repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("output_scores", "return_dict_in_generate", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
        *("suppress_tokens", "begin_suppress_tokens", "tf_legacy_loss"),
        *("cross_attention_hidden_size",),
    )
)
# Read by code of their own, for every family.
HANDLED = frozenset(
    (
        *("vocab_size", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
        *("sliding_window", "use_sliding_window", "layer_types", "partial_rotary_factor"),
        *("original_max_position_embeddings", "quantization_config", "num_key_value_heads"),
        *("head_dim", "n_inner", "pruned_heads", "attention_dropout", "resid_pdrop"),
        *("embd_pdrop", "attn_pdrop", "max_window_layers"),
    )
)

LAYER = "decoder.layers.{i}."
ATTENTION = LAYER + "self_attention."


def pair(name: str, *parts: str, transposed: bool = False) -> tuple[Weight, Weight]:
    """Weight and bias of one module; the bias only exists where the model has one."""
    return (
        Weight(f"{name}.weight", tuple(f"{part}.weight" for part in parts), transposed),
        Weight(f"{name}.bias", tuple(f"{part}.bias" for part in parts)),
    )


LLAMA_WEIGHTS = (
    Weight("model.embed_tokens.weight", ("embedding.word_embeddings.weight",)),
    *pair("model.layers.{i}.input_layernorm", LAYER + "input_layernorm"),
    *pair("model.layers.{i}.self_attn.q_proj", ATTENTION + "linear_q"),
    *pair("model.layers.{i}.self_attn.k_proj", ATTENTION + "linear_k"),
    *pair("model.layers.{i}.self_attn.v_proj", ATTENTION + "linear_v"),
    *pair("model.layers.{i}.self_attn.q_norm", ATTENTION + "q_layernorm"),
    *pair("model.layers.{i}.self_attn.k_norm", ATTENTION + "k_layernorm"),
    *pair("model.layers.{i}.self_attn.o_proj", ATTENTION + "linear_proj"),
    *pair("model.layers.{i}.post_attention_layernorm", LAYER + "pre_mlp_layernorm"),
    *pair("model.layers.{i}.mlp.gate_proj", LAYER + "mlp.linear_gate"),
    *pair("model.layers.{i}.mlp.up_proj", LAYER + "mlp.linear_up"),
    *pair("model.layers.{i}.mlp.down_proj", LAYER + "mlp.linear_fc2"),
    *pair("model.norm", "decoder.final_layernorm"),
    Weight("lm_head.weight", ("output_layer.weight",)),
)
_GPT2_WEIGHTS = (
    Weight("transformer.wte.weight", ("embedding.word_embeddings.weight",)),
    Weight("transformer.wpe.weight", ("embedding.position_embeddings.weight",)),
    *pair("transformer.h.{i}.ln_1", LAYER + "input_layernorm"),
    *pair(
        "transformer.h.{i}.attn.c_attn",
        *(f"{ATTENTION}linear_{letter}" for letter in "qkv"),
        transposed=True,
    ),
    *pair("transformer.h.{i}.attn.c_proj", ATTENTION + "linear_proj", transposed=True),
    *pair("transformer.h.{i}.ln_2", LAYER + "pre_mlp_layernorm"),
    *pair("transformer.h.{i}.mlp.c_fc", LAYER + "mlp.linear_fc1", transposed=True),
    *pair("transformer.h.{i}.mlp.c_proj", LAYER + "mlp.linear_fc2", transposed=True),
    *pair("transformer.ln_f", "decoder.final_layernorm"),
    Weight("lm_head.weight", ("output_layer.weight",)),
)

LLAMA_NUMBERS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "layernorm_epsilon",
    "initializer_range": "init_method_std",
}
# Every family sets each of these, in `flags` or in a choice: they name an architecture.
LLAMA_FLAGS = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "squared_relu": False,
    "openai_gelu": False,
    "qk_layernorm": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
}
SILU = Choice(("hidden_act",), {("silu",): {}, ("swish",): {}})
LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "num_key_value_heads": None,
    "head_dim": None,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
WINDOWED = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
ROTARY_BUFFERS = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"model\.rotary_emb\.inv_freq",
)
NO_BIAS = Choice(("attention_bias",), {(False,): {}})

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    prefix="model.",
    numbers=LLAMA_NUMBERS,
    flags={k: v for k, v in LLAMA_FLAGS.items() if k != "add_bias_linear"},
    choices=(
        SILU,
        Choice(
            ("attention_bias", "mlp_bias"),
            {
                (False, False): {"add_bias_linear": False},
                (True, True): {"add_bias_linear": True},
            },
        ),
    ),
    defaults=LLAMA_DEFAULTS,
    harmless=HARMLESS,
    weights=LLAMA_WEIGHTS,
    derived=ROTARY_BUFFERS,
)
MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    prefix="model.",
    numbers=LLAMA_NUMBERS,
    flags=LLAMA_FLAGS,
    choices=(SILU,),
    defaults=LLAMA_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
    harmless=HARMLESS,
    weights=LLAMA_WEIGHTS,
    derived=ROTARY_BUFFERS,
)
QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    prefix="model.",
    numbers=LLAMA_NUMBERS,
    flags=LLAMA_FLAGS | {"add_qkv_bias": True},
    choices=(SILU,),
    defaults=LLAMA_DEFAULTS | WINDOWED | {"num_key_value_heads": 32},
    harmless=HARMLESS,
    weights=LLAMA_WEIGHTS,
    derived=ROTARY_BUFFERS,
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    prefix="model.",
    numbers=LLAMA_NUMBERS,
    flags=LLAMA_FLAGS | {"qk_layernorm": True},
    choices=(SILU, NO_BIAS),
    defaults=LLAMA_DEFAULTS | WINDOWED | {"num_key_value_heads": 32, "head_dim": 128},
    harmless=HARMLESS,
    weights=LLAMA_WEIGHTS,
    derived=ROTARY_BUFFERS,
)
_TANH = {"openai_gelu": True, "squared_relu": False}
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    prefix="transformer.",
    numbers={
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "ffn_hidden_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layernorm_epsilon",
        "initializer_range": "init_method_std",
    },
    flags={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "qk_layernorm": False,
        "add_bias_linear": True,
        "add_qkv_bias": False,
    },
    choices=(
        Choice(
            ("activation_function",),
            {
                ("gelu_new",): _TANH,
                ("gelu_pytorch_tanh",): _TANH,
                ("gelu",): {"openai_gelu": False, "squared_relu": False},
                ("relu2",): {"openai_gelu": False, "squared_relu": True},
            },
        ),
        Choice(("scale_attn_weights",), {(True,): {}}),
        Choice(("scale_attn_by_inverse_layer_idx",), {(False,): {}}),
        Choice(("reorder_and_upcast_attn",), {(False,): {}}),
        Choice(("add_cross_attention",), {(False,): {}}),
    ),
    defaults={
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    harmless=HARMLESS
    | {
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    },
    weights=_GPT2_WEIGHTS,
    derived=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    rotary=False,
    grouped=False,
)
