"""The depth axis scales with what makes it special: unequal cuts, long groups, a table."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import check_config
from megatron_lite.pipeline.schedules import SCHEDULES
from megatron_lite.pipeline.table_files import format_json
from megatron_lite.verify.scale import Scaled, scale_down
from megatron_lite.verify.scale_pipeline import scale_cut, scale_group
from tools.verify_layout import main

FLAGS = (
    "--num-layers 32 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000"
)
PP = "--pipeline-model-parallel-size"


def scaled(flags: str, ranks: int, tmp_path: Path) -> Scaled:
    """The case, legal with all its axes."""
    config = parse_config(f"{FLAGS} {flags}".split(), {})
    check_config(config, ranks)
    result = scale_down(config, ranks, tmp_path, steps=2, precision="fp64")
    layout = result.case.layout(result.case.axes)
    check_config(parse_config([*result.case.flags, *layout.flags], {}), layout.ranks)
    return result


def pipeline_words(result: Scaled) -> str:
    (axis,) = (axis for axis in result.case.axes if axis.name.startswith("pp"))
    return " ".join(axis.flags)


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (f"{PP} 4", f"{PP} 4"),
        (
            f"{PP} 4 --pipeline-model-parallel-layout Et*7|t*9|t*9|t*7L",
            f"{PP} 4 --pipeline-model-parallel-layout Et|tt|tt|tL",
        ),
        (
            f"{PP} 2 --pipeline-model-parallel-layout E|t*16|t*16|L",
            f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--pipeline-model-parallel-layout E|t|t|L",
        ),
        (
            f"{PP} 4 --decoder-first-pipeline-num-layers 2",
            f"{PP} 4 --pipeline-model-parallel-layout Et|tt|tt|ttL",
        ),
        (
            f"{PP} 16 --num-layers 62 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            f"{PP} 8 --pipeline-model-parallel-layout Et|{'|'.join(['tt'] * 6)}|tL",
        ),
        (
            f"{PP} 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 6",
            f"{PP} 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 6",
        ),
    ],
    ids=["even", "layout", "lone ends", "first rank", "accounted", "groups"],
)
def test_unequal_cuts_and_groups_are_kept(tmp_path: Path, flags: str, kept: str) -> None:
    assert pipeline_words(scaled(flags, 16, tmp_path)) == kept


@given(st.lists(st.integers(0, 40), min_size=2, max_size=64), st.data())
def test_a_scaled_cut_keeps_the_order_of_sizes(counts: list[int], data: st.DataObject) -> None:
    if not any(counts):
        return
    stages = data.draw(st.integers(1, len(counts)))
    small = scale_cut(counts, stages)
    assert len(small) == stages and sum(small) > 0 and max(small) <= len(counts)
    if stages == len(counts):
        assert [a < b for a, b in pairwise(small)] == [a < b for a, b in pairwise(counts)]
        assert [a > b for a, b in pairwise(small)] == [a > b for a, b in pairwise(counts)]
        assert [k == 0 for k in small] == [k == 0 for k in counts]


def test_a_longer_group_stays_longer_than_the_pipeline() -> None:
    assert [scale_group(g, 8, 2) for g in (None, 8, 9, 16, 64)] == [None, None, 3, 4, 16]


def test_a_table_of_a_file_is_kept_with_its_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(format_json(SCHEDULES["zb-h1"](2, 1, 5)))
    result = scaled(f"{PP} 2 --pipeline-schedule file:{path} --global-batch-size 20", 8, tmp_path)
    assert f"--pipeline-schedule file:{path}" in pipeline_words(result)
    (axis,) = (axis for axis in result.case.axes if axis.name == "pp x dp")
    assert (axis.ranks, axis.data_ranks) == (8, 4)
    assert result.case.global_batch_size == 5 * 4


def test_an_uneven_cut_by_a_table_of_a_file_is_certified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    path.write_text(format_json(SCHEDULES["interleaved-zb"](2, 2, 3)))
    flags = f"{FLAGS} --num-layers 4 {PP} 2 --pipeline-schedule file:{path} --global-batch-size 6"
    flags += " --pipeline-model-parallel-layout E|t|tt|tL"
    assert main(["--ranks", "4", "--steps", "1", *flags.split()]) == 0
    out = capsys.readouterr().out
    assert "stages per pipeline rank: 2, cut as E|t|tt|tL" in out
    assert "equal: pp x dp+native-on on 4 rank(s)" in out
