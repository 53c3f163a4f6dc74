"""Rules of the model, its numbers, precision and recomputation."""

from __future__ import annotations

from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.legal import nearest_divisors, nearest_multiples
from megatron_lite.config.plan import ROTARY, position_kind, rotary_dim

REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
)
# A tensor dim of this program fits 32 bits; more is a slip of the finger, and would be tried.
LARGEST_SIZE = 2**31 - 1
LARGEST_LAYERS = 2**16
LARGEST_SEED = 2**32 - 1  # of the generator that shuffles the data
LARGEST_TIMEOUT = 366 * 24 * 60  # minutes of a year
RECOMPUTE_FULL = "--recompute-granularity full"


def flag_name(field: str) -> str:
    """Return the usual spelling of a field."""
    return "--" + field.replace("_", "-")


def required_rule(field: str) -> Rule:
    """A field that has no default."""
    return Rule(
        f"required-{flag_name(field)[2:]}",
        lambda f: getattr(f.config, field) is None,
        lambda f: f"{flag_name(field)} is required",
    )


def _is_below(value: int | float | str | None, least: int) -> bool:
    """Compare a number; None and words such as auto pass."""
    return isinstance(value, int | float) and value < least


def at_least_rule(field: str, least: int, name: str = "") -> Rule:
    """A number with a lower bound; an unset field passes."""
    spelled = name or flag_name(field)
    return Rule(
        f"at-least-{spelled[2:]}",
        lambda f: _is_below(getattr(f.config, field), least),
        lambda f: (
            f"{spelled} {getattr(f.config, field)} must be at least {least}; nearest legal: {least}"
        ),
    )


def at_most_rule(field: str, most: int) -> Rule:
    """A number with an upper bound; an unset field passes."""
    return Rule(
        f"at-most-{flag_name(field)[2:]}",
        lambda f: getattr(f.config, field) is not None and getattr(f.config, field) > most,
        lambda f: (
            f"{flag_name(field)} {getattr(f.config, field)} must be at most {most}; nearest "
            f"legal: {most}"
        ),
    )


def fraction_rule(field: str, *, one_allowed: bool = False) -> Rule:
    """A number in [0, 1), or [0, 1] with `one_allowed`."""
    bracket = "[0, 1]" if one_allowed else "[0, 1)"

    def broken(f: Facts) -> bool:
        value = getattr(f.config, field)
        return value is not None and not (0 <= value < 1 or (one_allowed and value == 1))

    def message(f: Facts) -> str:
        value = getattr(f.config, field)
        near = "0.0" if value < 0 else "1.0" if one_allowed else "0.9"
        return f"{flag_name(field)} {value} must lie in {bracket}; nearest legal: {near}"

    return Rule(f"fraction-{flag_name(field)[2:]}", broken, message)


def above_zero_rule(field: str, name: str = "") -> Rule:
    """A number that must be greater than 0."""
    spelled = name or flag_name(field)
    return Rule(
        f"above-zero-{spelled[2:]}",
        lambda f: not getattr(f.config, field) > 0,
        lambda f: f"{spelled} {getattr(f.config, field)} must be greater than 0",
    )


def exclusive_rule(rule_id: str, *fields: str, why: str) -> Rule:
    """At most one of these switches."""

    def given(f: Facts) -> list[str]:
        return [flag_name(field) for field in fields if getattr(f.config, field)]

    return Rule(
        rule_id,
        lambda f: len(given(f)) > 1,
        lambda f: f"{' and '.join(given(f))} exclude each other ({why}): give one of them",
    )


def hidden_broken(f: Facts) -> bool:
    """Without --kv-channels the heads must divide the width."""
    if f.config.multi_latent_attention:
        return False
    if f.config.kv_channels is not None or not f.has("hidden_size", "num_attention_heads"):
        return False
    return f.number("hidden_size") % f.number("num_attention_heads") != 0


def hidden_message(f: Facts) -> str:
    """Tell which widths and heads fit."""
    hidden, heads = f.number("hidden_size"), f.number("num_attention_heads")
    return (
        f"--hidden-size {hidden} must be a multiple of --num-attention-heads {heads} (or give "
        f"--kv-channels); nearest legal: --hidden-size {nearest_multiples(heads, hidden)}, "
        f"--num-attention-heads {nearest_divisors(hidden, heads)}"
    )


def groups_broken(f: Facts) -> bool:
    """KV heads must divide the query heads."""
    if not f.config.group_query_attention or not f.has("num_attention_heads", "num_query_groups"):
        return False
    return f.number("num_attention_heads") % f.number("num_query_groups") != 0


def groups_message(f: Facts) -> str:
    """Tell which KV heads fit."""
    heads, groups = f.number("num_attention_heads"), f.number("num_query_groups")
    return (
        f"--num-query-groups {groups} must divide --num-attention-heads {heads}; nearest legal: "
        f"--num-query-groups {nearest_divisors(heads, groups)}"
    )


def rotary_broken(f: Facts) -> bool:
    """Rotated channels come in pairs."""
    if position_kind(f.config) not in ROTARY or hidden_broken(f):
        return False
    free = f.config.kv_channels is not None or f.config.multi_latent_attention
    if not free and not f.has("hidden_size", "num_attention_heads"):
        return False
    channels = rotary_dim(f.config)
    return channels < 2 or channels % 2 != 0


def positions_message(f: Facts) -> str:
    """Tell the shortest legal range of positions."""
    length = f.number("seq_length")
    return (
        f"--max-position-embeddings {f.config.max_position_embeddings} is smaller than "
        f"--seq-length {length}; nearest legal: --max-position-embeddings {length}"
    )


MODEL_RULES: tuple[Rule, ...] = (
    *(required_rule(field) for field in REQUIRED),
    *(at_least_rule(field, 1) for field in REQUIRED),
    *(
        at_least_rule(field, 1)
        for field in (
            "ffn_hidden_size",
            "kv_channels",
            "num_query_groups",
            "rotary_base",
            "rotary_seq_len_interpolation_factor",
            "make_vocab_size_divisible_by",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "microbatch_group_size_per_vp_stage",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "num_experts",
            "ddp_bucket_size",
            "num_distributed_optimizer_instances",
            "distributed_timeout_minutes",
            "loss_chunks",
            "seed",
            "recompute_num_layers",
        )
    ),
    at_least_rule("vocab_size", 2),
    *(
        at_most_rule(field, LARGEST_SIZE)
        for field in (
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "kv_channels",
            "seq_length",
            "max_position_embeddings",
            "micro_batch_size",
            "global_batch_size",
            "vocab_size",
            "make_vocab_size_divisible_by",
        )
    ),
    at_most_rule("num_layers", LARGEST_LAYERS),
    at_most_rule("seed", LARGEST_SEED),
    at_most_rule("distributed_timeout_minutes", LARGEST_TIMEOUT),
    at_least_rule("init_method_std", 0),
    above_zero_rule("layernorm_epsilon", "--norm-epsilon"),
    above_zero_rule("rotary_percent"),
    above_zero_rule("rope_scaling_factor"),
    fraction_rule("hidden_dropout"),
    fraction_rule("attention_dropout"),
    Rule(
        "mtp-positions",
        lambda f: f.has("mtp_num_layers") and position_kind(f.config) == "learned_absolute",
        lambda f: (
            f"--mtp-num-layers {f.config.mtp_num_layers} needs --position-embedding-type rope, "
            "yarn or none: learned positions are not those of the tokens further on"
        ),
    ),
    Rule(
        "mtp-token-mean",
        lambda f: f.has("mtp_num_layers") and f.config.legacy_loss_normalization,
        lambda f: (
            f"--mtp-num-layers {f.config.mtp_num_layers} has no --legacy-loss-normalization: each "
            "depth has its own number of targets"
        ),
    ),
    at_least_rule("mtp_num_layers", 0),
    at_least_rule("mtp_loss_scaling_factor", 0),
    Rule(
        "rotary-percent",
        lambda f: f.config.rotary_percent > 1,
        lambda f: (
            f"--rotary-percent {f.config.rotary_percent} is a fraction of the head channels; "
            "nearest legal: 1.0"
        ),
    ),
    Rule("heads-divide-hidden", hidden_broken, hidden_message),
    Rule("kv-heads-divide-heads", groups_broken, groups_message),
    Rule(
        "rotary-even",
        rotary_broken,
        lambda f: (
            f"rotary positions turn {rotary_dim(f.config)} channels per head (--rotary-percent "
            f"{f.config.rotary_percent} of --kv-channels), which must be an even number; nearest "
            f"legal: {nearest_multiples(2, rotary_dim(f.config))}"
        ),
    ),
    Rule(
        "positions-cover-sequence",
        lambda f: (
            f.has("seq_length", "max_position_embeddings")
            and f.number("seq_length") > f.number("max_position_embeddings")
        ),
        positions_message,
    ),
    Rule(
        "position-spellings",
        lambda f: (
            (f.config.use_rotary_position_embeddings and not f.config.add_position_embedding)
            or (
                f.config.use_rotary_position_embeddings
                and f.config.position_embedding_type not in ("learned_absolute", "rope")
            )
            or (
                not f.config.add_position_embedding
                and f.config.position_embedding_type not in ("learned_absolute", "none")
            )
        ),
        lambda f: (
            f"--position-embedding-type {f.config.position_embedding_type} contradicts an older "
            "spelling (--use-rotary-position-embeddings is rope, --no-position-embedding is "
            "none): give only --position-embedding-type"
        ),
    ),
    exclusive_rule(
        "one-activation",
        *("swiglu", "quick_geglu", "squared_relu", "openai_gelu"),
        why="each names the activation",
    ),
    exclusive_rule("one-precision", "fp16", "bf16", "fp64", why="each names the compute format"),
    exclusive_rule(
        "one-loss-normalization",
        "calculate_per_token_loss",
        "legacy_loss_normalization",
        why="token mean of the global batch, or mean of micro-batch means",
    ),
    Rule(
        "recompute-shorthand",
        lambda f: f.config.recompute_activations and f.config.recompute_granularity == "full",
        lambda f: (
            f"--recompute-activations means --recompute-granularity selective, which contradicts "
            f"{RECOMPUTE_FULL}: give one"
        ),
    ),
    Rule(
        "recompute-full-method",
        lambda f: (
            f.config.recompute_granularity == "full"
            and (f.config.recompute_method is None or f.config.recompute_num_layers is None)
        ),
        lambda f: (
            f"{RECOMPUTE_FULL} needs --recompute-method and --recompute-num-layers; nearest legal: "
            "--recompute-method uniform --recompute-num-layers 1"
        ),
    ),
    Rule(
        "recompute-method-needs-full",
        lambda f: (
            f.config.recompute_granularity != "full" and f.config.recompute_method is not None
        ),
        lambda f: (
            f"--recompute-method {f.config.recompute_method} belongs to {RECOMPUTE_FULL}, but the "
            f"granularity is {f.config.recompute_granularity}: give {RECOMPUTE_FULL}, or leave out "
            "--recompute-method"
        ),
    ),
    Rule(
        "recompute-layers",
        lambda f: (
            f.has("recompute_num_layers", "num_layers")
            and f.number("recompute_num_layers") > max(1, f.number("num_layers") // f.pp)
        ),
        lambda f: (
            f"--recompute-num-layers {f.config.recompute_num_layers} exceeds the layers of a "
            f"pipeline rank; nearest legal: {max(1, f.number('num_layers') // f.pp)}"
        ),
    ),
    Rule(
        "recompute-modules",
        lambda f: (
            f.config.recompute_modules is not None
            and (f.config.recompute_granularity == "full" or not f.config.recompute_modules)
        ),
        lambda f: (
            "--recompute-modules names parts for --recompute-granularity selective; nearest legal: "
            "--recompute-granularity selective --recompute-modules core_attn"
        ),
    ),
)
