"""The table of cross-field rules, and the one place that applies it.

Every rule is a row (id, predicate, message). All violated rows are told in one message,
before any process group exists, so a user repairs a command in one go. A predicate must
hold for any config, however incomplete: a missing field has its own row.
"""

from __future__ import annotations

from megatron_lite.config.attention_rules import ATTENTION_RULES
from megatron_lite.config.batch_rules import BATCH_RULES
from megatron_lite.config.expert_rules import EXPERT_RULES
from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.flags import format_faults
from megatron_lite.config.layout_rules import LAYOUT_RULES
from megatron_lite.config.model_rules import MODEL_RULES
from megatron_lite.config.optimizer_rules import OPTIMIZER_RULES
from megatron_lite.config.pair_rules import PAIR_RULES
from megatron_lite.config.pipeline_rules import PIPELINE_RULES
from megatron_lite.config.run_rules import RUN_RULES
from megatron_lite.config.schema import Config
from megatron_lite.config.sharding_rules import SHARDING_RULES
from megatron_lite.config.state_rules import STATE_RULES
from megatron_lite.config.support_rules import SUPPORT_RULES
from megatron_lite.config.upcycling import UPCYCLING_RULES
from megatron_lite.errors import UserError

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *ATTENTION_RULES,
    *LAYOUT_RULES,
    *EXPERT_RULES,
    *UPCYCLING_RULES,
    *PIPELINE_RULES,
    *PAIR_RULES,
    *SHARDING_RULES,
    *BATCH_RULES,
    *OPTIMIZER_RULES,
    *STATE_RULES,
    *RUN_RULES,
    *SUPPORT_RULES,
)


def violations(config: Config, world_size: int) -> list[tuple[str, str]]:
    """Return (rule id, message) of every violated rule, in the order of the table."""
    facts = Facts(config, world_size)
    return [(rule.id, rule.message(facts)) for rule in RULES if rule.broken(facts)]


def check_config(config: Config, world_size: int) -> None:
    """Refuse a config that cannot run in a world of this size.

    Raises:
        UserError: with one message that lists every violated rule.
    """
    faults = [message for _, message in violations(config, world_size)]
    if faults:
        raise UserError(format_faults(faults))
