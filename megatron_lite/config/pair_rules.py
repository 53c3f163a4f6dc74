"""Rules of pairs: when a forward and a backward may run at the same time.

What hides is the all-to-all of experts; what must not be is state that both halves write in
an order that depends on timing. One config, one message: the first that applies.
"""

from __future__ import annotations

from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.layout_rules import ETP
from megatron_lite.config.pipeline_rules import (
    NAME,
    file_fault,
    file_table,
    schedule_name_of,
    schedule_unknown,
)
from megatron_lite.config.sharding_plan import sharding_strategy
from megatron_lite.pipeline.schedules import PAIRED

FLAG = "--overlap-moe-expert-parallel-comm"
EP = "--expert-model-parallel-size"


def pairs_fault(f: Facts) -> str:
    """Say why there can be no pairs where they are asked for, or ''."""
    if not f.config.overlap_moe_expert_parallel_comm:
        return ""
    return _nothing_to_hide(f) or _no_pairs(f) or _shared_state(f)


def _nothing_to_hide(f: Facts) -> str:
    dispatcher = f.config.moe_token_dispatcher_type
    if f.config.num_experts is None:
        return f"{FLAG} hides the all-to-alls of experts, there are none; give --num-experts"
    if f.ep * f.etp == 1:
        return (
            f"{FLAG}: every rank has all experts ({EP} 1, {ETP} 1), nothing travels; nearest "
            f"legal: {EP} 2"
        )
    if dispatcher != "alltoall":
        return (
            f"{FLAG} needs --moe-token-dispatcher-type alltoall, not {dispatcher}, which has no "
            "all-to-all to hide"
        )
    return ""


def _no_pairs(f: Facts) -> str:
    if f.pp == 1 or schedule_unknown(f) or file_fault(f):
        return ""
    name, table = schedule_name_of(f), file_table(f)
    if table is not None:
        return "" if table.has_pairs else f"{FLAG}: {NAME} {name} is a table without pairs"
    if name in PAIRED:
        return ""
    legal = ", ".join(known for known in PAIRED if known != "single")
    return f"{FLAG}: {NAME} {name} has no pairs of a forward and a backward; legal: {legal}"


def _shared_state(f: Facts) -> str:
    strategy = sharding_strategy(f.config)
    if not f.config.untie_embeddings_and_output_weights:
        return (
            f"{FLAG} needs --untie-embeddings-and-output-weights: the forward of the head and the "
            "backward of the embedding would add to one gradient at the same time"
        )
    if strategy in ("optim_grads", "optim_grads_params"):
        return (
            f"{FLAG} with --data-parallel-sharding-strategy {strategy}: both halves of a pair "
            "would reduce gradients or gather parameters; legal: no_shard, optim"
        )
    return ""


def pairs_unasked(f: Facts) -> bool:
    """A file's table has pairs and the flag is missing."""
    table = file_table(f)
    asked = f.config.overlap_moe_expert_parallel_comm
    return table is not None and table.has_pairs and not asked


PAIR_RULES: tuple[Rule, ...] = (
    Rule("pairs", lambda f: bool(pairs_fault(f)), pairs_fault),
    Rule(
        "pairs-unasked",
        pairs_unasked,
        lambda f: f"{NAME} {f.config.pipeline_schedule}: a table with pairs needs {FLAG}",
    ),
)
