"""Vocabulary padding (CONV): padding rows are in no loss, no gradient and no file."""

import math
from pathlib import Path

import pytest

from tests.cases.conftest import Replicated
from tests.cases.layouts import LAYOUTS, PARALLEL, REFERENCE
from tests.cases.tiny import SGD, flags
from tests.pool import RankPool
from tests.train.program import rows, train_rank


@pytest.mark.parametrize("ends", ["tied", "untied"])
@pytest.mark.parametrize("layout", [REFERENCE, "tp2", "tp4-sp", "tp2-sp-dp2"])
def test_c024_zero_weights_have_the_loss_of_the_true_vocabulary(
    rank_pool: RankPool, tmp_path: Path, layout: str, ends: str
) -> None:
    text = f"{SGD} --num-layers 1 --make-vocab-size-divisible-by 1 --init-method-std 0"
    argv = flags(text, steps=1, vocabulary=101)
    if ends == "tied":
        argv.remove("--untie-embeddings-and-output-weights")
    argv += [*LAYOUTS[layout].flags, "--metrics-jsonl", str(tmp_path / "metrics.jsonl")]
    rank_pool.run(LAYOUTS[layout].ranks, train_rank, argv=argv)
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert row["lm_loss"] == pytest.approx(math.log(101), rel=1e-14)
    assert f"{row['lm_loss']:.6f}" == "4.615121"


@pytest.mark.parametrize("layout", PARALLEL)
def test_c024_random_weights_with_an_odd_vocabulary_equal_one_process(
    replicated: Replicated, layout: str
) -> None:
    run = replicated(layout)
    assert run.differences == ()
    for kind in ("grad", "weight"):
        assert run.record.tensors(1, kind)["output_layer.weight"].shape == (101, 64)
