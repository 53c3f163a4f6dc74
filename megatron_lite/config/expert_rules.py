"""Rules of the mixture of experts: routing, capacity, and how experts divide."""

from __future__ import annotations

from collections.abc import Callable

from megatron_lite.config.expert_plan import moe_layers
from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.layout_rules import CP, EP, ETP, PP, TP, ffn_width
from megatron_lite.config.legal import nearest_divisors, nearest_multiples
from megatron_lite.config.model_rules import LARGEST_SIZE, at_least_rule, at_most_rule

TOPK = "--moe-router-topk"
GROUPS = "--moe-router-num-groups"
GROUP_TOPK = "--moe-router-group-topk"
REROUTE = "--moe-reroute-candidates"
REPLICATED = "--moe-replicated-experts"
LARGEST_EXPERTS = 65_536


def pattern_fault(f: Facts) -> str:
    """What is wrong with `--moe-layer-freq`; empty if nothing is."""
    layers = f.number("num_layers") if f.has("num_layers") else 0
    if not layers:
        return ""
    try:
        chosen = moe_layers(f.config, layers)
    except ValueError as fault:
        return str(fault)
    return "" if chosen else "makes no layer a MoE layer"


def topk_message(f: Facts) -> str:
    """Tell which counts are legal."""
    return (
        f"{TOPK} {f.config.moe_router_topk} must lie in 1..--num-experts {f.number('num_experts')}"
    )


def lone_expert(f: Facts) -> bool:
    """One chosen expert whose softmax over itself is 1: the router would never learn."""
    config = f.config
    return (
        config.moe_router_topk == 1
        and config.moe_router_score_function == "softmax"
        and not config.moe_router_pre_softmax
        and "sinkhorn" not in config.moe_router_load_balancing_type
    )


def groups_fault(f: Facts) -> str:
    """What is wrong with the groups of experts; empty if nothing is."""
    config, experts = f.config, f.number("num_experts")
    groups, chosen, topk = (
        config.moe_router_num_groups,
        config.moe_router_group_topk,
        config.moe_router_topk,
    )
    if groups is None and chosen is None:
        return ""
    if groups is None or chosen is None:
        missing, given = (GROUPS, GROUP_TOPK) if groups is None else (GROUP_TOPK, GROUPS)
        return f"{given} needs {missing}"
    if groups < 1 or experts % groups:
        return (
            f"{GROUPS} {groups} must divide --num-experts {experts}; nearest legal: {GROUPS} "
            f"{nearest_divisors(experts, groups)}"
        )
    if not 1 <= chosen <= groups:
        return f"{GROUP_TOPK} {chosen} must lie in 1..{GROUPS} {groups}"
    if topk > chosen * (experts // groups):
        return (
            f"{TOPK} {topk} experts do not fit into {GROUP_TOPK} {chosen} groups of "
            f"{experts // groups}; at most {chosen * (experts // groups)}"
        )
    if topk % chosen:
        return (
            f"{TOPK} {topk} must be a multiple of {GROUP_TOPK} {chosen}: a group counts by its "
            f"{TOPK} / {GROUP_TOPK} largest scores"
        )
    return ""


def coefficients_fault(f: Facts) -> str:
    """What is wrong with kinds and weights of the balancing losses; empty if nothing is."""
    kinds, weights = f.config.moe_router_load_balancing_type, f.config.moe_aux_loss_coeff
    if len(set(kinds)) < len(kinds):
        return f"--moe-router-load-balancing-type {' '.join(kinds)}: a kind is named twice"
    if len(kinds) > 1 and {"none", "sinkhorn"} & set(kinds):
        return f"--moe-router-load-balancing-type {' '.join(kinds)}: none and sinkhorn stand alone"
    if len(weights) not in (1, len(kinds)):
        return (
            f"--moe-aux-loss-coeff has {len(weights)} values for {len(kinds)} kinds of balancing "
            f"({' '.join(kinds)}): give one, or one for each"
        )
    return ""


def sinkhorn_fault(f: Facts) -> str:
    """What Sinkhorn's assignment would leave unheeded; empty if nothing."""
    config = f.config
    unheeded = {
        GROUPS: config.moe_router_num_groups is not None,
        "--moe-router-enable-expert-bias": config.moe_router_enable_expert_bias,
        f"--moe-router-score-function {config.moe_router_score_function}": (
            config.moe_router_score_function != "softmax"
        ),
    }
    given = [flag for flag, is_given in unheeded.items() if is_given]
    if "sinkhorn" not in config.moe_router_load_balancing_type or not given:
        return ""
    return (
        f"{given[0]} has no effect beside --moe-router-load-balancing-type sinkhorn, which assigns "
        "tokens to experts by the logits alone: leave one of the two out"
    )


def rerouting_fault(f: Facts) -> str:
    """What is wrong with the experts that an overflowing choice tries; empty if nothing is."""
    config, experts = f.config, f.number("num_experts")
    groups, chosen = config.moe_router_num_groups or 1, config.moe_router_group_topk or 1
    allowed, tried = experts // groups * chosen, config.moe_reroute_candidates
    spare = allowed - config.moe_router_topk
    if tried == 0:
        return ""
    if config.moe_expert_capacity_factor is None:
        return f"{REROUTE} {tried} needs --moe-expert-capacity-factor: nothing overflows without"
    if not 0 < tried <= spare:
        return (
            f"{REROUTE} {tried} must lie in 0..{spare}, the experts that a token may choose and "
            f"does not ({allowed} less {TOPK} {config.moe_router_topk})"
        )
    return ""


def replicated_fault(f: Facts) -> str:
    """Say why the asked experts cannot be replicated, or ''."""
    config, asked = f.config, f"{REPLICATED} {f.config.moe_replicated_experts}"
    if not config.moe_replicated_experts:
        return ""
    if config.num_experts is None:
        return f"{asked}: there are no experts; give --num-experts, or leave it out"
    if not 0 <= config.moe_replicated_experts < config.num_experts:
        return (
            f"{asked} must lie in 0..{config.num_experts - 1} (--num-experts {config.num_experts} "
            f"less one; all experts on every rank are {EP} 1)"
        )
    if f.ep > 1 and config.moe_token_dispatcher_type != "alltoall":
        return (
            f"{asked} needs --moe-token-dispatcher-type alltoall, not "
            f"{config.moe_token_dispatcher_type}, which sends every token to every rank anyway"
        )
    if config.overlap_moe_expert_parallel_comm:
        return (
            f"{asked} with --overlap-moe-expert-parallel-comm: both halves of a pair would bring "
            "weights and sum gradients at the same time; leave one of the two out"
        )
    return ""


def expert_width(f: Facts) -> int:
    """Inner width of an expert; 0 where it is unknown."""
    return f.config.moe_ffn_hidden_size or ffn_width(f)


def shared_width(f: Facts) -> int:
    """Inner width of the shared expert; 0 where there is none."""
    return f.config.moe_shared_expert_intermediate_size or 0


def width_message(name: str, width: int, axis: str, size: int) -> str:
    """Tell which widths fit the axis."""
    return (
        f"{name} {width} must be a multiple of {axis} {size}; nearest legal: {name} "
        f"{nearest_multiples(size, width)}"
    )


def fault_rule(rule_id: str, fault: Callable[[Facts], str]) -> Rule:
    """A rule whose function says what is wrong."""
    return Rule(rule_id, lambda f: f.has("num_experts") and bool(fault(f)), fault)


EXPERT_RULES: tuple[Rule, ...] = (
    *(
        at_least_rule(field, 1)
        for field in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    ),
    *(
        at_most_rule(field, LARGEST_SIZE)
        for field in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    ),
    at_most_rule("num_experts", LARGEST_EXPERTS),
    *(
        at_least_rule(field, 0)
        for field in ("moe_z_loss_coeff", "moe_router_bias_update_rate", "moe_input_jitter_eps")
    ),
    Rule(
        "moe-layer-freq",
        lambda f: f.has("num_experts") and bool(pattern_fault(f)),
        lambda f: f"--moe-layer-freq {f.config.moe_layer_freq}: {pattern_fault(f)}",
    ),
    Rule(
        "topk-fits-experts",
        lambda f: (
            f.has("num_experts") and not 1 <= f.config.moe_router_topk <= f.number("num_experts")
        ),
        topk_message,
    ),
    Rule(
        "top-1-needs-pre-softmax",
        lambda f: f.has("num_experts") and lone_expert(f),
        lambda f: (
            f"{TOPK} 1 with a softmax over the chosen expert alone: its score is always 1 and "
            "the router gets no gradient; give --moe-router-pre-softmax, or "
            "--moe-router-score-function sigmoid"
        ),
    ),
    fault_rule("router-groups", groups_fault),
    Rule(
        "balancing-weights-not-negative",
        lambda f: any(weight < 0 for weight in f.config.moe_aux_loss_coeff),
        lambda f: (
            f"--moe-aux-loss-coeff {' '.join(map(str, f.config.moe_aux_loss_coeff))} must not be "
            "negative: it would reward imbalance"
        ),
    ),
    Rule(
        "jitter-below-one",
        lambda f: f.config.moe_input_jitter_eps is not None and f.config.moe_input_jitter_eps >= 1,
        lambda f: (
            f"--moe-input-jitter-eps {f.config.moe_input_jitter_eps} must be below 1: inputs are "
            "multiplied by 1 +- this"
        ),
    ),
    Rule(
        "experts-in-a-stage",
        lambda f: (
            f.has("num_experts")
            and f.config.use_tp_pp_dp_mapping
            and f.pp > 1
            and f.tp * f.cp != f.etp * f.ep
        ),
        lambda f: (
            f"--use-tp-pp-dp-mapping with {PP} {f.pp} needs {TP} {f.tp} x {CP} {f.cp} = {ETP} "
            f"{f.etp} x {EP} {f.ep}, because a rank has one pipeline stage for dense and expert "
            "layers; without --use-tp-pp-dp-mapping there is no such limit"
        ),
    ),
    fault_rule("balancing-coefficients", coefficients_fault),
    fault_rule("sinkhorn-decides-alone", sinkhorn_fault),
    Rule("replicated-experts", lambda f: bool(replicated_fault(f)), replicated_fault),
    Rule(
        "expert-bias-needs-sigmoid",
        lambda f: (
            f.has("num_experts")
            and f.config.moe_router_enable_expert_bias
            and f.config.moe_router_score_function == "softmax"
        ),
        lambda f: (
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid or "
            "sqrtsoftplus"
        ),
    ),
    Rule(
        "scaling-factor-positive",
        lambda f: (
            f.config.moe_router_topk_scaling_factor is not None
            and not f.config.moe_router_topk_scaling_factor > 0
        ),
        lambda f: (
            f"--moe-router-topk-scaling-factor {f.config.moe_router_topk_scaling_factor} must be "
            "greater than 0"
        ),
    ),
    Rule(
        "capacity-positive",
        lambda f: (
            f.config.moe_expert_capacity_factor is not None
            and not f.config.moe_expert_capacity_factor > 0
        ),
        lambda f: (
            f"--moe-expert-capacity-factor {f.config.moe_expert_capacity_factor} must be greater "
            "than 0; leave it out for no dropped tokens"
        ),
    ),
    Rule(
        "padding-needs-capacity",
        lambda f: (
            f.config.moe_pad_expert_input_to_capacity
            and f.config.moe_expert_capacity_factor is None
        ),
        lambda f: "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor",
    ),
    fault_rule("rerouting-has-candidates", rerouting_fault),
    Rule(
        "running-form-of-a-global-loss",
        lambda f: (
            f.config.moe_global_aux_loss_form == "running"
            and "global_aux_loss" not in f.config.moe_router_load_balancing_type
        ),
        lambda f: (
            "--moe-global-aux-loss-form running needs --moe-router-load-balancing-type "
            "global_aux_loss"
        ),
    ),
    Rule(
        "shared-gate-needs-shared-expert",
        lambda f: (
            f.config.moe_shared_expert_gate and f.config.moe_shared_expert_intermediate_size is None
        ),
        lambda f: "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size",
    ),
    Rule(
        "expert-width-divides-etp",
        lambda f: f.has("num_experts") and expert_width(f) % f.etp != 0,
        lambda f: width_message("--moe-ffn-hidden-size", expert_width(f), ETP, f.etp),
    ),
    Rule(
        "shared-width-divides-tp",
        lambda f: f.has("num_experts") and shared_width(f) % f.tp != 0,
        lambda f: width_message("--moe-shared-expert-intermediate-size", shared_width(f), TP, f.tp),
    ),
    Rule(
        "experts-slice-the-sequence",
        lambda f: (
            f.has("num_experts", "seq_length")
            and not f.config.sequence_parallel  # it has the same rule
            and f.number("seq_length") % f.tp != 0
        ),
        lambda f: (
            f"--seq-length {f.number('seq_length')} must be a multiple of {TP} {f.tp}: MoE layers "
            f"give each rank a slice of it; nearest legal: --seq-length "
            f"{nearest_multiples(f.tp, f.number('seq_length'))}"
        ),
    ),
)
