"""What the optimizer flags come to: update rules, groups, frozen parameters, the average.

From it follows, by specs alone and on every rank alike, which state a run has, of which
shape: what a checkpoint must hold, and what is allocated. State kinds belong to the group of
a parameter, so nothing has a moment that its rule does not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.optim.adafactor import Adafactor, build_adafactor
from megatron_lite.optim.adamw import AdamW
from megatron_lite.optim.factored import COLUMN, ROW, is_factored, statistic_spec
from megatron_lite.optim.groups import (
    Grouping,
    ParamGroup,
    build_grouping,
    frozen_names,
    is_matrix,
)
from megatron_lite.optim.muon import Muon, build_muon
from megatron_lite.optim.rules import UpdateRule
from megatron_lite.optim.sgd import SGD
from megatron_lite.spec.params import ParamSpec

AVERAGE = "ema"


@dataclass(frozen=True)
class MatrixRules:
    """Muon for the matrices, an elementwise rule for everything else."""

    matrices: Muon
    others: UpdateRule


Rule = UpdateRule | MatrixRules | Adafactor


@dataclass(frozen=True)
class Recipe:
    """How the parameters of a run are updated.

    Attributes:
        rule: of all parameters, or one each for matrices and for the others.
        grouping: parameter -> group.
        frozen: logical names of parameters that are not trained.
        average_decay: of the moving average of the weights; None: there is none.
    """

    rule: Rule
    grouping: Grouping = field(default_factory=Grouping)
    frozen: frozenset[str] = frozenset()
    average_decay: float | None = None

    def elementwise(self, group: ParamGroup) -> UpdateRule | None:
        """The rule that updates a group element by element; None where none does."""
        if isinstance(self.rule, MatrixRules):
            return None if group.matrix else self.rule.others
        return None if isinstance(self.rule, Adafactor) else self.rule

    def kinds(self, group: ParamGroup) -> tuple[str, ...]:
        """State of the weights' shape that the parameters of a group have."""
        rule = self.rule
        if isinstance(rule, MatrixRules):
            return rule.matrices.kinds if group.matrix else rule.others.kinds
        if isinstance(rule, Adafactor):
            first = ("exp_avg",) if rule.beta1 else ()
            return first if group.matrix else (*first, "exp_avg_sq")
        return rule.kinds

    def state_shapes(self, spec: ParamSpec) -> dict[str, tuple[int, ...]]:
        """Kind -> logical shape of all state of a parameter, masters left aside."""
        if spec.name in self.frozen:
            return {}
        shapes = dict.fromkeys(self.kinds(self.grouping.of_spec(spec)), spec.shape)
        if isinstance(self.rule, Adafactor) and is_factored(spec):
            shapes |= {kind: statistic_spec(spec, kind).shape for kind in (ROW, COLUMN)}
        if self.average_decay is not None:
            shapes[AVERAGE] = spec.shape
        return shapes


def build_recipe(config: Config, specs: Sequence[ParamSpec]) -> Recipe:
    """The recipe that the flags describe.

    Args:
        config: accepted by the rules.
        specs: every logical parameter of the model, not only this rank's.

    Raises:
        UserError: a pattern of `--param-group` or `--freeze` matches nothing.
    """
    rule = build_rule(config)
    chosen = None
    if isinstance(rule, MatrixRules):
        chosen = is_matrix
    elif isinstance(rule, Adafactor):
        chosen = is_factored
    return Recipe(
        rule,
        build_grouping(config, specs, chosen),
        frozen_names(config, specs),
        config.weight_ema_decay,
    )


def build_rule(config: Config) -> Rule:
    """The update rule that `--optimizer` names."""
    adamw = AdamW(config.adam_beta1, config.adam_beta2, config.adam_eps)
    if config.optimizer == "adam":
        return adamw
    if config.optimizer == "sgd":
        return SGD(config.sgd_momentum)
    if config.optimizer == "muon":
        return MatrixRules(build_muon(config), adamw)
    if config.optimizer == "adafactor":
        return build_adafactor(config)
    raise UserError(
        f"--optimizer {config.optimizer} is not supported; use adam, sgd, muon or adafactor"
    )
