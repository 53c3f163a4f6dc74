"""Optimizer groups: which parameters share an update rule, a learning rate and a decay.

The spec says whether a parameter decays (Megatron's rule: vectors and biases do not) and
which matrix it is; the flags add rules by logical name (`config/param_groups.py`). Flat
buffers keep the members of a group side by side (shard/flat.py). Invariant: a group is a
function of the parameter and the flags alone and groups are ordered by name, so every rank
has the same ones in the same order, whichever parameters it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lite.config.param_groups import GroupRule, match_patterns, parse_group_rule
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.physical import PhysicalParam

ENDS = frozenset(("embedding", "head"))


@dataclass(frozen=True, order=True)
class ParamGroup:
    """What the parameters of one group have in common.

    Attributes:
        name: unique among the groups of a run.
        lr_mult: factor of the scheduled learning rate.
        wd_mult: factor of the scheduled weight decay.
        decoupled: follows the schedule of `--decoupled-lr`.
        matrix: updated as whole matrices, or by their rows and columns; else by elements.
    """

    name: str
    lr_mult: float = 1.0
    wd_mult: float = 1.0
    decoupled: bool = False
    matrix: bool = False


DECAYED = ParamGroup("decayed")
NOT_DECAYED = ParamGroup("not_decayed", wd_mult=0.0)


def is_end(spec: ParamSpec) -> bool:
    """Whether it is an embedding or the output layer, which `--decoupled-lr` is for."""
    return bool(spec.uses) and all(use.rpartition(".")[2] in ENDS for use in spec.uses)


def is_matrix(spec: ParamSpec) -> bool:
    """Whether a matrix optimizer acts on it: embeddings and output are tables of vectors."""
    return spec.matrix is not None and not is_end(spec)


@dataclass(frozen=True)
class Grouping:
    """Assigns the parameters of a run to groups.

    Attributes:
        rules: of `--param-group`, in order.
        rule_of: logical name -> index of its rule.
        decoupled: whether `--decoupled-lr` is given.
        is_matrix: which parameters the optimizer treats as matrices; None: no one.
    """

    rules: tuple[GroupRule, ...] = ()
    rule_of: Mapping[str, int] = field(default_factory=dict)
    decoupled: bool = False
    is_matrix: Callable[[ParamSpec], bool] | None = None

    def of_spec(self, spec: ParamSpec) -> ParamGroup:
        """The group of a logical parameter."""
        rule = self.rules[self.rule_of[spec.name]] if spec.name in self.rule_of else None
        lr_mult = 1.0 if rule is None or rule.lr_mult is None else rule.lr_mult
        wd_mult = float(spec.decay) if rule is None or rule.wd_mult is None else rule.wd_mult
        decoupled = self.decoupled and is_end(spec)
        matrix = self.is_matrix is not None and self.is_matrix(spec)
        words = ["decayed" if wd_mult else "not_decayed"]
        words += ["matrix"] if matrix else []
        words += ["decoupled"] if decoupled else []
        words += [f"lr_mult={lr_mult!r}"] if lr_mult != 1.0 else []
        words += [f"wd_mult={wd_mult!r}"] if wd_mult not in (0.0, 1.0) else []
        return ParamGroup(" ".join(words), lr_mult, wd_mult, decoupled, matrix)

    def __call__(self, physical: PhysicalParam) -> ParamGroup:
        """The group of a stored parameter; its logical members must agree.

        Raises:
            UserError: a rule tells parameters apart that are stored as one.
        """
        groups = {view.spec.name: self.of_spec(view.spec) for view in physical.views}
        if len(set(groups.values())) > 1:
            told = "; ".join(f"{name}: {group.name}" for name, group in groups.items())
            raise UserError(
                f"--param-group: {physical.name} is stored as one and cannot be told apart "
                f"({told}): give its members one rule"
            )
        return next(iter(groups.values()))


param_group = Grouping()


@dataclass(frozen=True)
class StepRates:
    """Scheduled rates of one update."""

    lr: float
    weight_decay: float
    decoupled_lr: float

    def of(self, group: ParamGroup) -> tuple[float, float]:
        """Learning rate and weight decay of a group."""
        lr = self.decoupled_lr if group.decoupled else self.lr
        return lr * group.lr_mult, self.weight_decay * group.wd_mult


def build_grouping(
    config: Config,
    specs: Sequence[ParamSpec],
    is_matrix: Callable[[ParamSpec], bool] | None = None,
) -> Grouping:
    """The grouping that the flags describe.

    Args:
        config: accepted by the rules.
        specs: every logical parameter of the model, not only this rank's.
        is_matrix: which parameters the optimizer treats as matrices.

    Raises:
        UserError: a pattern matches nothing.
    """
    rules = tuple(parse_group_rule(word) for word in config.param_group)
    names = [spec.name for spec in specs]
    try:
        rule_of = match_patterns([rule.pattern for rule in rules], names, "--param-group")
    except ValueError as fault:
        raise UserError(str(fault)) from None
    return Grouping(rules, rule_of, config.decoupled_lr is not None, is_matrix)


def frozen_names(config: Config, specs: Sequence[ParamSpec]) -> frozenset[str]:
    """Logical names that no gradient changes: what `--freeze` names, and state in the spec.

    Args:
        config: accepted by the rules.
        specs: every logical parameter of the model.

    Raises:
        UserError: a pattern matches nothing, or nothing is left to train.
    """
    names = [spec.name for spec in specs if spec.trained]
    try:
        found = frozenset(match_patterns(config.freeze, names, "--freeze"))
    except ValueError as fault:
        raise UserError(str(fault)) from None
    if len(found) == len(names):
        raise UserError(f"--freeze {' '.join(config.freeze)}: leaves no parameter to train")
    return found | {spec.name for spec in specs if not spec.trained}


def is_frozen(physical: PhysicalParam, frozen: Iterable[str]) -> bool:
    """Whether a stored parameter is frozen; its logical members must agree.

    Raises:
        UserError: only some of the parameters that are stored as one are frozen.
    """
    names = [view.spec.name for view in physical.views]
    chosen = [name for name in names if name in set(frozen)]
    if chosen and len(chosen) < len(names):
        raise UserError(
            f"--freeze: {', '.join(chosen)}: stored as one with "
            f"{', '.join(name for name in names if name not in chosen)}: freeze all of "
            "them or none"
        )
    return bool(chosen)
