"""Rules of pairs: what they need, what they refuse, and what the plan makes of them."""

from pathlib import Path

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.notices import notices
from megatron_lite.config.plan import build_plan
from megatron_lite.config.rules import check_config, violations
from megatron_lite.pipeline.schedules import SCHEDULES, Options
from megatron_lite.pipeline.table_files import write_table
from tests.config.lines import line

FLAG = "--overlap-moe-expert-parallel-comm"
UNTIED = "--untie-embeddings-and-output-weights"
EP = "--expert-model-parallel-size"
EXPERTS = f"--num-experts 8 {EP} 2 --moe-token-dispatcher-type alltoall"
PP2 = "--pipeline-model-parallel-size 2"
GOOD = f"{FLAG} {UNTIED} {EXPERTS}"

# flags, what the one message must say; on four ranks
BAD = {
    "dense": (f"{FLAG} {UNTIED}", ["there are none", "--num-experts"]),
    "one-rank": (f"{FLAG} {UNTIED} --num-experts 8", ["nothing travels", f"{EP} 2"]),
    "allgather": (
        f"{FLAG} {UNTIED} --num-experts 8 {EP} 2",
        ["--moe-token-dispatcher-type alltoall, not allgather"],
    ),
    "zbv": (
        f"{GOOD} {PP2} --pipeline-schedule zbv",
        ["zbv has no pairs", "legal: 1f1b, interleaved, dualpipev"],
    ),
    "auto": (f"{GOOD} {PP2} --pipeline-schedule auto", ["auto has no pairs"]),
    "tied": (f"{FLAG} {EXPERTS}", [UNTIED, "one gradient at the same time"]),
    "zero-2": (
        f"{GOOD} --data-parallel-sharding-strategy optim_grads",
        ["optim_grads", "legal: no_shard, optim"],
    ),
    "zero-3": (
        f"{GOOD} --data-parallel-sharding-strategy optim_grads_params",
        ["optim_grads_params", "legal: no_shard, optim"],
    ),
}


def found(flags: str) -> list[tuple[str, str]]:
    return violations(parse_config(line(flags), {}), 4)


@pytest.mark.parametrize("name", BAD)
def test_what_pairs_cannot_do_is_one_clear_message(name: str) -> None:
    flags, told = BAD[name]
    ((rule, message),) = found(flags)
    assert rule == "pairs"
    assert message.startswith(FLAG)
    assert all(words in message for words in told), message


def test_without_the_flag_the_same_lines_are_legal() -> None:
    for flags, _ in BAD.values():
        assert not found(flags.replace(FLAG, ""))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        PP2,
        f"{PP2} --pipeline-schedule dualpipev",
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
        "--data-parallel-sharding-strategy optim",
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ],
)
def test_legal_layouts_run_tables_with_pairs(flags: str) -> None:
    config = parse_config(line(f"{GOOD} {flags}"), {})
    check_config(config, 4)
    assert not any(FLAG in told for told in notices(config, 4))
    shape = build_plan(config, 4, 512).pipeline
    assert shape.paired
    assert shape.table(6).has_pairs
    plain = parse_config(line(f"{GOOD.replace(FLAG, '')} {flags}"), {})
    assert not build_plan(plain, 4, 512).pipeline.table(6).has_pairs


def test_etp_alone_is_a_block_that_tokens_travel_in() -> None:
    flags = (
        f"{FLAG} {UNTIED} --num-experts 8 --moe-token-dispatcher-type alltoall "
        "--expert-tensor-parallel-size 2"
    )
    assert not found(flags)


def test_a_file_has_pairs_if_and_only_if_they_are_asked_for(tmp_path: Path) -> None:
    size = 8  # microbatches: the lines of these tests have a global batch of 8 on one dp rank
    for is_paired in (False, True):
        path = tmp_path / f"{is_paired}.json"
        write_table(SCHEDULES["1f1b"](2, 1, size, Options(paired=is_paired)), path)
        where = f"{PP2} --pipeline-schedule file:{path}"
        rules = [rule for rule, _ in found(f"{GOOD} {where}") if rule.startswith("pairs")]
        assert rules == ([] if is_paired else ["pairs"])
        plain = GOOD.replace(FLAG, "")
        rules = [rule for rule, _ in found(f"{plain} {where}") if rule.startswith("pairs")]
        assert rules == (["pairs-unasked"] if is_paired else [])
