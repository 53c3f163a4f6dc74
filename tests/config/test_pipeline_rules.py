"""Rules of the depth axis: what fits a schedule, and what is legal instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.pipeline_plan import plain_table
from megatron_lite.config.plan import Plan, build_plan
from megatron_lite.config.rules import check_config, violations
from megatron_lite.errors import UserError
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.table_files import format_json
from tests.config.lines import line

PP2 = "--pipeline-model-parallel-size 2"
V2 = "--num-virtual-stages-per-pipeline-rank 2"
LAYOUT = "--pipeline-model-parallel-layout"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
SCHEDULES = ("gpipe", "zb-h1", "zb-h2", "v-half", "v-min", "dualpipev", "auto")


def plan_of(flags: str, world_size: int = 2) -> Plan:
    config = parse_config(line(flags), {})
    check_config(config, world_size)
    return build_plan(config, world_size, 512)


def layers(plan: Plan) -> list[int]:
    return [len(part.layers) for part in plan.pipeline.parts]


# flags, rule, what the message must say; one fault each, on two ranks
BAD = {
    "1f1b-virtual": (
        f"{PP2} {V2} --pipeline-schedule 1f1b",
        "schedule-chunks",
        ["1f1b runs 1 stage ", "means 2", "--pipeline-schedule interleaved"],
    ),
    "zb-virtual": (f"{PP2} {V2} --pipeline-schedule zb-h1", "schedule-chunks", ["zb-h1 runs 1"]),
    "zbv-single": (
        f"{PP2} --num-virtual-stages-per-pipeline-rank 1 --pipeline-schedule zbv",
        "schedule-chunks",
        ["zbv runs 2 stages", "--num-virtual-stages-per-pipeline-rank 2"],
    ),
    "zbv-per-stage": (
        f"{PP2} --num-layers-per-virtual-pipeline-stage 2 --pipeline-schedule zbv",
        "schedule-chunks",
        ["--num-layers-per-virtual-pipeline-stage 2 means 1"],
    ),
    "zbv-odd": (
        f"--num-layers 6 {PP2} --pipeline-schedule zbv",
        "pipeline-cut",
        ["gets 3 layers", "2 virtual stages", "2 or 4"],
    ),
    "v-half-layout": (
        f"{PP2} --pipeline-schedule v-half {LAYOUT} Ett|ttL",
        "schedule-chunks",
        ["v-half runs 2", "means 1"],
    ),
    "layout-layers": (f"{PP2} {LAYOUT} Ett|tL", "pipeline-cut", ["3 decoder layers", "has 4"]),
    "layout-stages": (f"{PP2} {LAYOUT} Et|tt|tL", "pipeline-cut", ["3 stages", "legal: 2"]),
    "layout-mtp-early": (
        f"{PP2} {LAYOUT} Ettttm|L --mtp-num-layers 1 --position-embedding-type rope",
        "pipeline-cut",
        ["MTP depths (m) on a stage before the loss"],
    ),
    "layout-letters": (f"{PP2} {LAYOUT} Ext|tL", "pipeline-cut", ["x is not part of a layout"]),
    "layout-twice": (
        f"{PP2} {LAYOUT} Ett|ttL {FIRST} 1",
        "layout-exclusive",
        [FIRST, "give one"],
    ),
    "ends": (
        f"--num-layers 5 --pipeline-model-parallel-size 2 {FIRST} 1 {LAST} 1",
        "pipeline-cut",
        [f"{FIRST} 1, {LAST} 1", "--num-layers 5"],
    ),
    "ends-account": (
        f"{PP2} {FIRST} 1 --account-for-loss-in-pipeline-split",
        "pipeline-cut",
        ["give one kind"],
    ),
    "account": (
        f"{PP2} --account-for-loss-in-pipeline-split",
        "pipeline-cut",
        ["4 + 1 for the loss = 5", "3 or 5"],
    ),
    "uneven-virtual": (
        f"{PP2} {FIRST} 1 --num-layers-per-virtual-pipeline-stage 1",
        "uneven-virtual",
        ["unequal"],
    ),
    "group-alone": (f"{PP2} {GROUP} 2", "schedule-group", [f"{GROUP} 2 belongs to virtual"]),
    "group-small": (f"{PP2} {V2} {GROUP} 1", "schedule-group", ["smaller than", "legal: 2"]),
    "auto-ramp": (
        f"{PP2} --pipeline-schedule auto --rampup-batch-size 2 2 8 --global-batch-size 8",
        "schedule-microbatches",
        ["(1 to 4)", "constant"],
    ),
    "no-file": (
        f"{PP2} --pipeline-schedule file:/nowhere.json",
        "schedule-file",
        ["/nowhere.json"],
    ),
    "idle-rank": (f"{PP2} --num-layers 2 {LAYOUT} Ett||L|", "pipeline-cut", ["L at the end"]),
    "empty-rank": (
        f"--num-layers 2 {PP2} {LAYOUT} Ett||||L|",
        "pipeline-cut",
        ["legal"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_pipeline_that_cannot_run_is_refused_with_what_is_legal(name: str) -> None:
    flags, rule, parts = BAD[name]
    found = dict(violations(parse_config(line(flags), {}), 2))
    assert list(found) == [rule]
    for part in parts:
        assert part in found[rule]


@pytest.mark.parametrize("flags", [f"{LAYOUT} EttttL", f"{FIRST} 1", f"{LAST} 1", f"{GROUP} 2"])
def test_flags_of_the_cut_need_a_pipeline(flags: str) -> None:
    found = dict(violations(parse_config(line(flags), {}), 1))
    assert list(found) == ["flags-need-pipeline"]
    assert flags in found["flags-need-pipeline"]


def test_further_depths_stand_on_the_stage_of_the_loss() -> None:
    further = "--mtp-num-layers 2 --position-embedding-type rope"
    for cut in ("", f"{LAYOUT} Ett|ttmmL"):
        first, last = plan_of(f"{PP2} {further} {cut}").pipeline.parts
        assert (first.mtp, last.mtp) == ((), (0, 1))


def test_a_rank_without_a_layer_is_refused() -> None:
    flags = f"--num-layers 2 --pipeline-model-parallel-size 4 {LAYOUT} Et||t|L"
    found = dict(violations(parse_config(line(flags), {}), 4))
    assert "pipeline rank 1 would hold no layer" in found["pipeline-cut"]


@pytest.mark.parametrize(
    ("flags", "schedule", "cut", "placement"),
    [
        (PP2, "1f1b", [2, 2], (0, 1)),
        (f"{PP2} {V2}", "interleaved", [1, 1, 1, 1], (0, 1, 0, 1)),
        (f"{PP2} --pipeline-schedule zbv", "zbv", [1, 1, 1, 1], (0, 1, 1, 0)),
        (f"{PP2} {LAYOUT} Et|tttL", "1f1b", [1, 3], (0, 1)),
        (f"{PP2} {LAYOUT} E|t|tt|tL", "interleaved", [0, 1, 2, 1], (0, 1, 0, 1)),
        (f"{PP2} {FIRST} 3", "1f1b", [3, 1], (0, 1)),
        (
            f"{PP2} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "1f1b",
            [2, 2],
            (0, 1),
        ),
        (
            f"--num-layers 5 {PP2} --account-for-loss-in-pipeline-split",
            "1f1b",
            [3, 2],
            (0, 1),
        ),
    ],
)
def test_the_plan_holds_schedule_placement_and_cut(
    flags: str, schedule: str, cut: list[int], placement: tuple[int, ...]
) -> None:
    plan = plan_of(flags)
    assert (plan.pipeline.schedule, layers(plan)) == (schedule, cut)
    assert plan.pipeline.placement == placement
    assert plan.parallel.vpp == plan.pipeline.chunks == len(placement) // 2


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("batch", [2, 6])
def test_every_schedule_has_a_table_for_any_batch(name: str, batch: int) -> None:
    plan = plan_of(f"{PP2} --pipeline-schedule {name} --global-batch-size {batch}")
    table = plan.pipeline.table(plan.batch.num_microbatches_at(0))
    assert table.placement == plan.pipeline.placement
    assert table.num_microbatches == batch // 2


def test_a_group_size_reaches_the_table() -> None:
    tables = [
        plan_of(f"{PP2} {V2} --global-batch-size 16 {group}").pipeline.table(8)
        for group in ("", f"{GROUP} 4")
    ]
    assert tables[0].digest() != tables[1].digest()


def write_table(path: Path, ranks: int = 2, microbatches: int = 4) -> str:
    path.write_text(format_json(build_schedule("zbv", ranks, 2, microbatches)))
    return f"--pipeline-schedule file:{path}"


def test_a_table_file_decides_stages_and_placement(tmp_path: Path) -> None:
    flag = write_table(tmp_path / "table.json")
    plan = plan_of(f"{PP2} {flag} --global-batch-size 8")
    assert plan.pipeline.placement == (0, 1, 1, 0)
    assert layers(plan) == [1, 1, 1, 1]
    assert plan.pipeline.table(4).ranks == build_schedule("zbv", 2, 2, 4).ranks


@pytest.mark.parametrize(
    ("world_size", "flags", "rule", "parts"),
    [
        (2, f"{PP2} --global-batch-size 16", "schedule-microbatches", ["has 8", "size 8"]),
        (4, "--pipeline-model-parallel-size 4", "schedule-file", ["2 ranks", "size 2"]),
        (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 1", "schedule-chunks", ["2 stages"]),
    ],
)
def test_a_table_file_of_other_sizes_is_refused(
    tmp_path: Path, world_size: int, flags: str, rule: str, parts: list[str]
) -> None:
    flag = write_table(tmp_path / "table.json")
    found = dict(violations(parse_config(line(f"{flag} {flags}"), {}), world_size))
    assert rule in found
    for part in parts:
        assert part in found[rule]


def test_a_damaged_table_file_ends_with_code_2(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(UserError, match=r"table\.json") as caught:
        plan_of(f"{PP2} --pipeline-schedule file:{path}")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("placement", [(0,), (0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2)])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_any_placement_has_a_plain_table(placement: tuple[int, ...], microbatches: int) -> None:
    table = plain_table(placement, microbatches)
    assert (table.placement, table.num_microbatches) == (placement, microbatches)
