"""Between Megatron-LM's arguments, as its checkpoints hold them, and our configuration.

Our fields have the names of its argparse destinations, so most values go over as they are.
What changes the numbers and is not ours is refused by name and value. Torch-free.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_lite.config import plan
from megatron_lite.config.options import load_known_rows
from megatron_lite.config.plan import ModelShape
from megatron_lite.config.schema import Config
from megatron_lite.errors import DamagedError, UserError

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
# Fields of ours that a model is built from, with further names of older versions.
FIELDS: Mapping[str, tuple[str, ...]] = {
    **{name: () for name in (*REQUIRED, "ffn_hidden_size", "kv_channels", "seq_length")},
    **{name: () for name in ("group_query_attention", "num_query_groups", "normalization")},
    **{name: () for name in ("position_embedding_type", "use_rotary_position_embeddings")},
    **{name: () for name in ("add_position_embedding", "rotary_base", "rotary_percent")},
    **{name: () for name in ("rotary_interleaved", "use_rope_scaling", "rope_scaling_factor")},
    "rotary_seq_len_interpolation_factor": (),
    "layernorm_epsilon": ("norm_epsilon",),
    "layernorm_zero_centered_gamma": ("apply_layernorm_1p",),
    **{name: () for name in ("qk_layernorm", "swiglu", "squared_relu", "openai_gelu")},
    **{name: () for name in ("add_bias_linear", "add_qkv_bias", "init_method_std")},
    **{name: () for name in ("untie_embeddings_and_output_weights",)},
    **{name: () for name in ("make_vocab_size_divisible_by",)},
}
# What a model of ours never has: destination -> values that mean "not used".
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "multi_latent_attention": (False,),
    "mtp_num_layers": (None, 0),
    "experimental_attention_variant": (None,),
    "softmax_type": ("vanilla",),
    "apply_residual_connection_post_layernorm": (False,),
    "glu_linear_offset": (0, 0.0),
    "quick_geglu": (False,),
    "activation_func_clamp_value": (None,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "use_mup": (False,),
    "window_size": (None,),
    "window_attn_skip_freq": (None,),
    "no_rope_freq": (None,),
    "mrope_section": (None,),
    "is_hybrid_model": (False,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "spec": (None,),
    "enable_mhc_connections": (False,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "retro_add_retriever": (False,),
    "fp8_param_gather": (False,),
    "fp4_param_gather": (False,),
    "expert_model_parallel_size": (1, None),
}
POSITIONS = ("learned_absolute", "rope", "none")


def config_from(args: Mapping[str, Any], source: str) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration that builds the architecture of a checkpoint, and notes.

    Raises:
        UserError: the model has a part that ours cannot have.
        DamagedError: an argument is missing or of another type.
    """
    refuse_unknown_parts(args, source)
    missing = [name for name in REQUIRED if args.get(name) is None]
    if missing:
        raise DamagedError(f"{source}: its args lack {', '.join(missing)}")
    values: dict[str, Any] = {}
    for name, others in FIELDS.items():
        found = [args[spelling] for spelling in (name, *others) if args.get(spelling) is not None]
        if found:
            values[name] = _typed(name, found[0], source)
    values.setdefault("seq_length", values["max_position_embeddings"])
    if values.get("position_embedding_type", "learned_absolute") != "learned_absolute":
        # --no-position-embedding beside it only says that there is no learned table.
        values.pop("add_position_embedding", None)
    notes: list[str] = []
    if _has_fused_gelu(args):
        # The kernel that adds the bias computes the tanh form, whatever the flag says.
        values["openai_gelu"] = True
        notes.append("GELU fused with its bias is the tanh form: the model has --openai-gelu")
    config = replace(Config(), **values)
    position = plan.position_kind(config)
    if position not in POSITIONS:
        raise UserError(
            f"{source}: --position-embedding-type {position} is not supported; legal: "
            f"{', '.join(POSITIONS)}"
        )
    # The older spellings would contradict the resolved one.
    config = replace(
        config,
        position_embedding_type=position,
        use_rotary_position_embeddings=False,
        add_position_embedding=True,
    )
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        raise UserError(f"{source}: --normalization {config.normalization} is not supported")
    return config, tuple(notes)


def refuse_unknown_parts(args: Mapping[str, Any], source: str) -> None:
    """Raise if the arguments ask for a part of a model that ours cannot have."""
    reasons = {row.dest: (row.names[0], row.reason) for row in load_known_rows()}
    lines = []
    for name, neutral in NEUTRAL.items():
        if name in args and args[name] not in neutral:
            flag, reason = reasons.get(name, (f"--{name.replace('_', '-')}", "not supported"))
            lines.append(f"\n  {flag} {args[name]}: {reason or 'not supported'}")
    if lines:
        raise UserError(f"{source}: a model with parts that are not converted:{''.join(lines)}")


def true_vocabulary(args: Mapping[str, Any], asked: int | None, padded: int, source: str) -> int:
    """Return the vocabulary without padding rows.

    Args:
        asked: `--true-vocab-size`, which wins over the arguments.
        padded: rows that are stored.

    Raises:
        UserError: nothing says it, or it is more than is stored.
    """
    found = asked if asked is not None else args.get("vocab_size")
    if found is None:
        raise UserError(
            f"{source}: holds {padded} vocabulary rows, padding included, and its args do not say "
            f"how many are true: give --true-vocab-size N ({padded} if none is padding)"
        )
    if type(found) is not int or not 1 <= found <= padded:
        where = "--true-vocab-size" if asked is not None else "vocab_size of its args"
        raise UserError(f"{source}: {where} {found}, but {padded} rows are stored")
    return found


def args_for(config: Config, model: ModelShape, *, tp: int, pp: int) -> dict[str, Any]:
    """Return the arguments of a checkpoint for Megatron-LM in this layout.

    Every field of ours is there under its destination; sizes are resolved, so that
    `--use-checkpoint-args` builds the same model.

    Raises:
        UserError: the model has a part whose weights are not converted.
    """
    parts = {name: getattr(config, name) for name in NEUTRAL if hasattr(config, name)}
    parts["expert_model_parallel_size"] = 1  # the layout of a run, not a part
    refuse_unknown_parts(parts, "this model as a checkpoint of Megatron-LM")
    names = {row.dest for row in load_known_rows()}
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name in names
    }
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
    return values | {
        "ffn_hidden_size": model.ffn_hidden_size,
        "kv_channels": model.kv_channels,
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "position_embedding_type": model.position,
        "use_rotary_position_embeddings": model.position == "rope",
        "add_position_embedding": model.position == "learned_absolute",
        "norm_epsilon": model.norm_epsilon,
        "layernorm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": model.norm_one_plus,
        "bias_gelu_fusion": False,  # it would compute the tanh form
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.padded_vocab_size(tp),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "transformer_impl": "transformer_engine",
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": model.seq_length,
        "num_experts": None,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "iteration": 0,
        "data_parallel_random_init": False,
        "use_distributed_optimizer": False,
        "ckpt_format": "torch",
        "save": None,
        "load": None,
    }


def _has_fused_gelu(args: Mapping[str, Any]) -> bool:
    plain = not any(args.get(name) for name in ("swiglu", "squared_relu", "openai_gelu"))
    return plain and bool(args.get("bias_gelu_fusion")) and args.get("add_bias_linear") is not False


def _typed(name: str, value: Any, source: str) -> Any:
    """Return the value in the type of our field, refusing another kind of value."""
    wanted = typing.get_type_hints(Config)[name]
    kinds = typing.get_args(wanted) or (wanted,)
    if int in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        raise DamagedError(f"{source}: {name} of its args is {value!r}")
    return value
