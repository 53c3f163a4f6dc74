"""Parameter groups and freezing by rule."""

import re
from typing import Any

import pytest

from megatron_lite.config.param_groups import parse_group_rule
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.optim.groups import (
    DECAYED,
    NOT_DECAYED,
    frozen_names,
    is_frozen,
    param_group,
)
from megatron_lite.optim.recipe import build_recipe
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.physical import physical_params
from tests.shard.stand import model_shape, parallel_shape

SPECS = model_spec(model_shape(), parallel_shape())
PHYSICALS = {physical.name: physical for physical in physical_params(SPECS)}
BY_NAME = {spec.name: spec for spec in SPECS}


def groups(*rules: str, **fields: Any) -> dict[str, Any]:
    grouping = build_recipe(Config(param_group=rules, **fields), SPECS).grouping
    return {name: grouping(physical) for name, physical in PHYSICALS.items()}


def test_without_flags_matrices_decay_and_vectors_do_not() -> None:
    for name, group in groups().items():
        assert group == (DECAYED if PHYSICALS[name].views[0].spec.decay else NOT_DECAYED)
        assert group == param_group(PHYSICALS[name])


def test_the_first_rule_that_matches_wins() -> None:
    found = groups("*.layers.0.mlp.*:lr_mult=0.5", "*.mlp.*:lr_mult=2,wd_mult=0.25")
    first = found["decoder.layers.0.mlp.linear_fc1.weight"]
    second = found["decoder.layers.1.mlp.linear_fc1.weight"]
    assert (first.lr_mult, first.wd_mult) == (0.5, 1.0)
    assert (second.lr_mult, second.wd_mult) == (2.0, 0.25)
    other = found["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert (other.lr_mult, other.wd_mult) == (1.0, 1.0)


def test_a_rule_changes_only_what_it_names() -> None:
    found = groups("decoder.final_layernorm.weight:lr_mult=3")["decoder.final_layernorm.weight"]
    assert (found.lr_mult, found.wd_mult) == (3.0, 0.0)
    found = groups("decoder.final_layernorm.weight:wd_mult=1")["decoder.final_layernorm.weight"]
    assert (found.lr_mult, found.wd_mult) == (1.0, 1.0)


def test_equal_multipliers_make_one_group_and_others_have_other_names() -> None:
    found = groups("*.layers.0.*:lr_mult=0.1", "*.layers.1.*:lr_mult=0.1000001")
    assert len(set(found.values())) == len({group.name for group in found.values()}) == 6
    found = groups("*.layers.0.*:lr_mult=2", "*.layers.1.*:lr_mult=2")
    assert len(set(found.values())) == 4


def test_decoupled_rates_are_for_embeddings_and_output() -> None:
    found = groups(decoupled_lr=1.0)
    names = {name for name, group in found.items() if group.decoupled}
    assert names == {n for n in PHYSICALS if n.startswith(("embedding.", "output_layer."))}
    assert names and not any(group.decoupled for group in groups().values())


def test_the_ends_of_a_tied_model_are_ends_on_every_stage() -> None:
    for uses in (("embedding", "head"), ("embedding",), ("head",)):
        spec = ParamSpec("w", (4, 4), uses=uses, matrix=(4, 4))
        recipe = build_recipe(Config(optimizer="muon", decoupled_lr=1.0), [spec])
        group = recipe.grouping.of_spec(spec)
        assert group.decoupled and not group.matrix


def test_matrices_of_layers_are_matrices_with_muon_only() -> None:
    found = groups(optimizer="muon")
    names = {name for name, group in found.items() if group.matrix}
    linear = {n for n in PHYSICALS if ".linear_" in n and n.endswith(".weight")}
    assert names == linear
    assert not any(group.matrix for group in groups().values())


def test_a_pattern_without_a_match_is_told_with_near_names() -> None:
    with pytest.raises(UserError) as told:
        groups("*.mpl.linear_fc2.weight:lr_mult=2")
    assert "--param-group *.mpl.linear_fc2.weight: matches no parameter" in str(told.value)
    assert "decoder.layers.*.mlp.linear_fc2.weight" in str(told.value)
    assert told.value.exit_code == 2


def test_a_pattern_that_earlier_ones_leave_nothing_is_told() -> None:
    with pytest.raises(UserError, match=r"\*\.mlp\.\*: never used, .* fall to decoder\.\*"):
        groups("decoder.*:lr_mult=2", "*.mlp.*:lr_mult=3")


def test_parameters_stored_as_one_cannot_be_told_apart() -> None:
    with pytest.raises(UserError, match=r"linear_qkv\.weight is stored as one"):
        groups("*.linear_q.weight:lr_mult=2")
    found = groups("*.linear_[qkv].weight:lr_mult=2")
    assert found["decoder.layers.0.self_attention.linear_qkv.weight"].lr_mult == 2.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("*.mlp.*", "is not PATTERN:lr_mult=X"),
        (":lr_mult=1", "is not PATTERN:lr_mult=X"),
        ("*:lr=1", "'lr=1' is neither"),
        ("*:", "'' is neither"),
        ("*:lr_mult=x", "must be a number >= 0, not 'x'"),
        ("*:lr_mult=nan", "must be a number >= 0"),
        ("*:wd_mult=inf", "must be a number >= 0"),
        ("*:lr_mult=1,lr_mult=2", "lr_mult is given twice"),
    ],
)
def test_words_of_a_rule_are_checked(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_group_rule(text)


def test_c037_groups_have_one_order_whatever_a_rank_holds() -> None:
    found = groups("*.linear_proj.*:lr_mult=2", decoupled_lr=1.0)
    for order in (list(found.values()), list(reversed(found.values()))):
        names = [group.name for group in sorted(set(order))]
        assert names == sorted(names)
        assert names == [group.name for group in sorted(set(found.values()))]


def test_frozen_parameters_are_those_that_match() -> None:
    config = Config(freeze=("embedding.*", "*.layers.0.*"))
    frozen = frozen_names(config, SPECS)
    assert frozen == {n for n in BY_NAME if n.startswith(("embedding.", "decoder.layers.0."))}
    chosen = {name for name, physical in PHYSICALS.items() if is_frozen(physical, frozen)}
    assert chosen == {n for n in PHYSICALS if n.startswith(("embedding.", "decoder.layers.0."))}
    assert frozen_names(Config(), SPECS) == frozenset()


def test_freezing_is_refused_where_it_cannot_be_meant() -> None:
    with pytest.raises(UserError, match=r"--freeze \*\.mlpp\.\*: matches no parameter"):
        frozen_names(Config(freeze=("*.mlpp.*",)), SPECS)
    with pytest.raises(UserError, match="leaves no parameter to train"):
        frozen_names(Config(freeze=("*",)), SPECS)
    frozen = frozen_names(Config(freeze=("*.linear_q.*",)), SPECS)
    physical = PHYSICALS["decoder.layers.0.self_attention.linear_qkv.weight"]
    with pytest.raises(UserError, match=r"stored as one with .*linear_k\.weight"):
        is_frozen(physical, frozen)
