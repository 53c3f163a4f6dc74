"""Scale a mixture of experts down with the rest of a layout.

Kept are the router and its losses, which layers are of which kind, and the relation of EP,
ETP, TP and DP; scaled are the numbers of experts and groups and the widths.
"""

from __future__ import annotations

from typing import Any

from megatron_lite.config.expert_plan import moe_layers
from megatron_lite.config.schema import Config
from megatron_lite.verify.axes import Axis, expert_axis

MOST_EXPERTS = 8
WIDTH = 8  # of an expert, on each rank that holds a slice of it


def scale_experts(config: Config, num_layers: int, tp: int) -> dict[str, Any]:
    """Flags of the scaled mixture by destination; none for a dense model.

    Args:
        config: the user's, accepted by the rules.
        num_layers: of the scaled model.
        tp: of the scaled layout.
    """
    if config.num_experts is None:
        return {}
    experts = min(config.num_experts, MOST_EXPERTS)
    groups = config.moe_router_num_groups
    chosen, topk = config.moe_router_group_topk, config.moe_router_topk
    # A choice stays one: experts are left over where the user has some.
    topk = experts if topk == config.num_experts else min(topk, 4, experts - 1)
    if groups is not None and chosen is not None:
        groups = next(n for n in (4, 2, 1) if groups >= n and experts % n == 0)
        chosen = 2 if chosen > 1 and groups > 1 else 1
        topk = min(max(topk // chosen, 1) * chosen, chosen * (experts // groups))
    width = WIDTH * tp
    return {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_replicated_experts": min(config.moe_replicated_experts, experts - 1),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": (
            None if config.moe_shared_expert_intermediate_size is None else width
        ),
        "moe_reroute_candidates": min(
            config.moe_reroute_candidates, experts // (groups or 1) * (chosen or 1) - topk
        ),
        "moe_layer_freq": scale_layers(config, num_layers),
    }


def scale_layers(config: Config, num_layers: int) -> str:
    """All MoE, or both kinds, beginning with the user's."""
    layers = config.num_layers or 1
    kinds = moe_layers(config, layers)
    if len(kinds) == layers or num_layers == 1:
        return "1"
    first = int(0 in kinds)
    return str([first] + [1 - first] * (num_layers - 1)).replace(" ", "")


def scaled_expert_axis(config: Config, tp: int, dp: int) -> list[Axis]:
    """How the user's layout cuts experts: over data ranks where there are some, else over TP."""
    if config.num_experts is None:
        return []
    own = config.expert_tensor_parallel_size
    tensor = None if own is None or own == config.tensor_model_parallel_size else min(own, tp)
    ranks, needs = (dp, "dp") if dp > 1 else (tp, "tp")
    most = MOST_EXPERTS if config.expert_model_parallel_size > 1 else 1
    over_tensor = tensor if tensor is not None else 1
    if ranks == tp and needs == "tp" and tensor is None:
        most = 1  # the experts' tensor ranks are all there are
    size = next(n for n in (2, 1) if (n <= most and ranks % (n * over_tensor) == 0) or n == 1)
    if size == 1 and tensor is None and config.moe_token_dispatcher_type == "allgather":
        return []
    return [expert_axis(size, tensor, config.moe_token_dispatcher_type, needs=needs)]
