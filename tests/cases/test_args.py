"""Argument checks (ARGS): readable, early, once, complete, with legal values that are legal."""

import itertools
import re
from pathlib import Path

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import violations
from tests.cases.layouts import LAYOUTS
from tests.cases.ranks import program, program_that_lost_a_layer
from tests.config.lines import line
from tests.config.test_rules import BAD_LAYOUTS
from tests.pool import fork_ranks, run_ranks
from tests.train.program import LLAMA, RUN

RULE_OF = {
    "world": "world-divides",
    "heads": "heads-divide-tp",
    "layers": "layers-divide-pp",
    "sequence": "sequence-divides-tp",
    "precision": "one-precision",
    "experts": "experts-divide-ep",
    "no-experts": "ep-needs-experts",
    "virtual": "virtual-needs-pipeline",
    "batch": "batch-divides",
    "dropped-layers": "virtual-divides",
}
# Said aloud, or a second command's flags would take the fault away.
IMPLIED = {"virtual": "--pipeline-model-parallel-size 1"}
HANG_S = 60.0


def flags_of(name: str) -> str:
    return f"{BAD_LAYOUTS[name][1]} {IMPLIED.get(name, '')}"


def broken(text: str, world: int) -> dict[str, str]:
    return dict(violations(parse_config(line(text), {}), world))


def can_meet(one: str, other: str) -> bool:
    """Whether no flag of one command is a flag of the other."""
    names = [set(re.findall(r"--[a-z-]+", flags_of(name))) for name in (one, other)]
    return not names[0] & names[1]


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_c091_a_bad_command_is_told_once_by_ranks_that_never_load_torch(
    tmp_path: Path, name: str
) -> None:
    world, _, parts = BAD_LAYOUTS[name]
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    results = run_ranks(
        world, line(flags_of(name)), env={"PYTHONPATH": str(tmp_path)}, timeout=HANG_S
    )
    assert [result.code for result in results] == [2] * world, results
    told = "".join(result.stderr for result in results)
    assert told.count("configuration refused") == 1
    assert "Traceback" not in told and "".join(result.stdout for result in results) == ""
    for part in parts:
        assert part in told
    if name != "precision":  # two flags exclude each other: leave one out
        assert "nearest legal" in told


def test_c091_each_command_breaks_its_rule() -> None:
    assert set(RULE_OF) == set(BAD_LAYOUTS)
    for name, rule in RULE_OF.items():
        assert rule in broken(flags_of(name), BAD_LAYOUTS[name][0]), name


PAIRS = [pair for pair in itertools.combinations(RULE_OF, 2) if can_meet(*pair)]


def test_c091_of_two_bad_commands_in_one_both_faults_are_told() -> None:
    assert len(PAIRS) > 25
    for one, other in PAIRS:
        found = broken(f"{flags_of(one)} {flags_of(other)}", 4)
        assert {RULE_OF[one], RULE_OF[other]} <= set(found), (one, other)


def test_c091_many_faults_of_one_command_are_one_message_of_the_program() -> None:
    text = (
        "--tensor-model-parallel-size 3 --num-attention-heads 8 --seq-length 32 "
        "--sequence-parallel --fp16 --bf16 --num-layers 5 --pipeline-model-parallel-size 2 "
        "--num-experts 4 --expert-model-parallel-size 3 --global-batch-size 10 "
        "--micro-batch-size 4"
    )
    results = run_ranks(4, line(text), timeout=HANG_S)
    assert [result.code for result in results] == [2] * 4
    told = "".join(result.stderr for result in results)
    assert told.count("configuration refused") == 1
    found = violations(parse_config(line(text), {}), 4)
    assert {RULE_OF[name] for name in ("world", "heads", "layers", "precision", "batch")} <= {
        rule for rule, _ in found
    }
    for _, message in found:
        assert message in told


# What a user may write -> the rule it breaks, for many values.
FAMILIES = {
    "heads-divide-tp": "--num-attention-heads {a} --kv-channels 8 --tensor-model-parallel-size {b}",
    "layers-divide-pp": "--num-layers {a} --pipeline-model-parallel-size {b}",
    "sequence-divides-tp": (
        "--seq-length {a} --sequence-parallel --tensor-model-parallel-size {b}"
    ),
    "experts-divide-ep": "--num-experts {a} --expert-model-parallel-size {b}",
    "batch-divides": "--global-batch-size {a} --micro-batch-size {b}",
    "ffn-divides-tp": "--ffn-hidden-size {a} --tensor-model-parallel-size {b}",
    "kv-heads-fit-tp": (
        "--num-attention-heads 24 --hidden-size 192 --group-query-attention "
        "--num-query-groups {a} --tensor-model-parallel-size {b}"
    ),
    "sequence-divides-cp": "--seq-length {a} --context-parallel-size {b}",
    "virtual-divides": (
        "--num-layers {a} --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage {b}"
    ),
}


@pytest.mark.parametrize("rule", FAMILIES)
def test_c091_every_legal_value_that_is_named_is_legal(rule: str) -> None:
    met = 0
    for a, b in itertools.product((3, 5, 10, 12, 33), (2, 3, 7, 8)):
        text = FAMILIES[rule].format(a=a, b=b)
        message = broken(text, 1).get(rule)
        if message is None:
            continue
        met += 1
        named = message.partition("nearest legal: ")[2]
        assert named, message
        for flag, values in re.findall(r"(--[a-z-]+) (\d+(?: or \d+)*)", named):
            for value in values.split(" or "):
                assert rule not in broken(f"{text} {flag} {value}", 1), (text, flag, value)
    assert met > 5


@pytest.mark.parametrize(("world", "tp"), [(4, 3), (6, 4), (8, 3), (12, 8), (5, 2), (7, 4)])
def test_c091_every_layout_that_is_named_for_a_world_fits_it(world: int, tp: int) -> None:
    text = f"--tensor-model-parallel-size {tp}"
    named = broken(text, world)["world-divides"].partition("nearest legal: ")[2]
    sizes, worlds = named.split(", a world of ")
    for size in re.findall(r"\d+", sizes):
        assert "world-divides" not in broken(f"--tensor-model-parallel-size {size}", world)
    for size in re.findall(r"\d+", worlds):
        assert "world-divides" not in broken(text, int(size))


@pytest.mark.parametrize("layout", ["1", "tp2-sp-dp2", "pp4", "pp2-v2", "zbv"])
def test_c032_every_start_counts_the_layers_over_the_ranks(layout: str) -> None:
    argv = [*LLAMA, *RUN, "--train-iters", "0", *LAYOUTS[layout].flags]
    exits = fork_ranks(LAYOUTS[layout].ranks, program, argv)
    assert {found.code for found in exits} == {0}, exits
    printed = "".join(found.stdout for found in exits)
    assert printed.count(" > layers total 4, as requested") == 1


def test_c032_a_lost_layer_stops_the_run_before_the_first_step() -> None:
    (found,) = fork_ranks(1, program_that_lost_a_layer, [*LLAMA, *RUN])
    assert found.code == 1
    assert "the stages hold 3 layers, --num-layers is 4" in found.stderr
    assert "iteration        1/" not in found.stdout


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("per_stage", [1, 2, 3])
def test_c032_a_cut_that_would_lose_layers_is_always_refused(pp: int, per_stage: int) -> None:
    for layers in range(1, 26):
        text = (
            f"--num-layers {layers} --pipeline-model-parallel-size {pp} "
            f"--num-layers-per-virtual-pipeline-stage {per_stage}"
        )
        refused = {"layers-divide-pp", "virtual-divides"} & set(broken(text, pp))
        assert bool(refused) == (layers % (pp * per_stage) != 0), layers
