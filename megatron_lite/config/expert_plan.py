"""What a mixture of experts is, resolved from its flags.

The step's auxiliary losses, capacities and counts are defined over one microbatch with all
of its tensor and context parts, so nothing here depends on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.layer_pattern import expand_pattern
from megatron_lite.config.schema import Config

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True)
class ExpertShape:
    """The mixture of experts of a model.

    Attributes:
        num_experts: of every MoE layer.
        topk: experts per token.
        ffn_hidden_size: inner width of one expert.
        layers: global numbers of the MoE layers, ascending; the others are dense.
        shared_ffn_hidden_size: inner width of the shared expert; 0: none.
        shared_gate: the shared expert's output is multiplied by a sigmoid of the token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        pre_softmax: softmax over all experts, then the k largest; else the softmax of the k.
        scaling_factor: of the chosen scores.
        num_groups, group_topk: experts form groups of which a token may use so many; 1, 1:
            no limit.
        expert_bias: the choice adds a bias that is moved towards balance after every step.
        bias_update_rate: by so much.
        router_dtype: "float32" or "float64"; the scores' dtype at least.
        balancing: (kind, coefficient) of the auxiliary losses in force.
        sinkhorn: the choice follows Sinkhorn's balanced assignment.
        z_loss_coeff: of the router's z-loss; 0: none.
        jitter: inputs of the router are multiplied by 1 +- this while training; 0: none.
        capacity_factor: rows of an expert in units of its fair share; None: dropless.
        pad_to_capacity: an expert's rows are padded to its capacity.
        drop_policy: "probs" or "position", what overflows.
        reroute_candidates: next best experts that an overflowing choice tries; 0: dropped.
        running_global: the global loss compares with the step's counts so far, not with those
            of the step before.
        dispatcher: "allgather" or "alltoall".
        replicated: experts that every rank computes for its own tokens, the most chosen ones.
    """

    num_experts: int
    topk: int
    ffn_hidden_size: int
    layers: tuple[int, ...]
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    score_function: str = "softmax"
    pre_softmax: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    group_topk: int = 1
    expert_bias: bool = False
    bias_update_rate: float = 0.001
    router_dtype: str = "float32"
    balancing: tuple[tuple[str, float], ...] = ()
    sinkhorn: bool = False
    z_loss_coeff: float = 0.0
    jitter: float = 0.0
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    drop_policy: str = "probs"
    reroute_candidates: int = 0
    running_global: bool = False
    dispatcher: str = "allgather"
    replicated: int = 0

    @property
    def is_limited(self) -> bool:
        """Whether a token's experts come from some groups only."""
        return self.num_groups > 1

    @property
    def running_balance(self) -> bool:
        """Whether there is a global loss in its running form."""
        return self.running_global and self.coefficient("global_aux_loss") > 0

    @property
    def keeps_counts(self) -> bool:
        """Whether the step's counts are state of the next step."""
        is_compared = not self.running_global and self.coefficient("global_aux_loss") > 0
        return is_compared or self.replicated > 0

    def coefficient(self, kind: str) -> float:
        """Weight of an auxiliary loss; 0 where it is off."""
        return sum(weight for name, weight in self.balancing if name == kind)


def moe_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the MoE layers by `--moe-layer-freq`.

    Raises:
        ValueError: the pattern is not one, or has another length than the model.
    """
    flags = expand_pattern(config.moe_layer_freq, num_layers)
    return tuple(layer for layer, is_moe in enumerate(flags) if is_moe)


def balancing_terms(config: Config) -> tuple[tuple[str, float], ...]:
    """Return (kind, coefficient) of every auxiliary loss with weight.

    One coefficient serves all kinds; else there is one per kind, in their order.
    """
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if len(weights) == 1:
        weights = weights * len(kinds)
    pairs = zip(kinds, weights, strict=True)
    return tuple((kind, weight) for kind, weight in pairs if kind in AUX_LOSSES and weight)


def plan_experts(config: Config, num_layers: int, ffn_hidden_size: int) -> ExpertShape | None:
    """Resolve the flags of the mixture of experts; None for a dense model.

    Args:
        config: accepted by the rules.
        num_layers: of the model.
        ffn_hidden_size: of a dense layer, the width of experts too where none is given.
    """
    if config.num_experts is None:
        return None
    return ExpertShape(
        num_experts=config.num_experts,
        topk=config.moe_router_topk,
        ffn_hidden_size=config.moe_ffn_hidden_size or ffn_hidden_size,
        layers=moe_layers(config, num_layers),
        shared_ffn_hidden_size=config.moe_shared_expert_intermediate_size or 0,
        shared_gate=config.moe_shared_expert_gate,
        score_function=config.moe_router_score_function,
        pre_softmax=config.moe_router_pre_softmax,
        scaling_factor=config.moe_router_topk_scaling_factor or 1.0,
        num_groups=config.moe_router_num_groups or 1,
        group_topk=config.moe_router_group_topk or 1,
        expert_bias=config.moe_router_enable_expert_bias,
        bias_update_rate=config.moe_router_bias_update_rate,
        router_dtype="float64" if config.moe_router_dtype == "fp64" else "float32",
        balancing=balancing_terms(config),
        sinkhorn="sinkhorn" in config.moe_router_load_balancing_type,
        z_loss_coeff=config.moe_z_loss_coeff or 0.0,
        jitter=config.moe_input_jitter_eps or 0.0,
        capacity_factor=config.moe_expert_capacity_factor,
        pad_to_capacity=config.moe_pad_expert_input_to_capacity,
        drop_policy=config.moe_token_drop_policy,
        reroute_candidates=config.moe_reroute_candidates,
        running_global=config.moe_global_aux_loss_form == "running",
        dispatcher=config.moe_token_dispatcher_type,
        replicated=config.moe_replicated_experts,
    )
