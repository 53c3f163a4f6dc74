"""Faults that users of such systems met, at the smallest size that shows them."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.writer import DatasetWriter
from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    sequence_axis,
    tensor_axis,
)
from megatron_lite.verify.scale import VOCABULARY
from tests.parity.conftest import Certifiers
from tests.parity.models import SEQ_LENGTH

pytestmark = pytest.mark.parity

BY_MICROBATCH = (microbatch_axis(1),)
BY_RANK = (data_axis(2),)
BY_BOTH = (data_axis(2), microbatch_axis(1))


def axes_name(axes: Sequence[Axis]) -> str:
    return "+".join(f"{axis.name}{axis.ranks}" for axis in axes)


def write_samples(prefix: Path, valid: Sequence[int]) -> str:
    """A data set in which sample i has valid[i] tokens that count, in some order.

    Every document is one sample long; end-of-document tokens fill it and do not count.
    """
    rng = np.random.default_rng(7)
    eod = VOCABULARY - 1
    with DatasetWriter(prefix, np.uint16) as writer:
        for count in valid:
            tokens = np.full(SEQ_LENGTH, eod)
            tokens[:count] = rng.integers(0, eod, count)
            writer.add_document(tokens)
        writer.add_document([eod])  # the last sample's last label
        writer.finalize()
    return f"--data-path {prefix}"


@pytest.mark.parametrize("axes", [BY_MICROBATCH, BY_RANK, BY_BOTH], ids=axes_name)
def test_uneven_valid_tokens_weigh_by_token_in_every_layout(
    certifier_of: Certifiers, tmp_path_factory: pytest.TempPathFactory, axes: tuple[Axis, ...]
) -> None:
    prefix = tmp_path_factory.getbasetemp() / "uneven"
    extra = f"--data-path {prefix}"
    if not prefix.with_suffix(".idx").exists():
        extra = write_samples(prefix, [1, 9] * 8)
    certifier = certifier_of("llama", extra=extra, steps=2)
    differences, _ = certifier.compare(axes)
    assert not differences, str(differences[0])
    samples = certifier.reference.samples(1)
    sums = [row["loss_sum"] for row in samples]
    counts = [row["valid_tokens"] for row in samples]
    assert {1, 9} <= set(counts)
    loss = certifier.reference.train_rows[0]["lm_loss"]
    assert loss == pytest.approx(sum(sums) / sum(counts), rel=1e-12)
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    assert abs(loss - sum(means) / len(means)) > 1e-4


@pytest.mark.parametrize("axes", [BY_MICROBATCH, (data_axis(4),), BY_BOTH], ids=axes_name)
def test_a_rank_or_microbatch_without_valid_tokens_is_nothing_special(
    certifier_of: Certifiers, tmp_path: Path, axes: tuple[Axis, ...]
) -> None:
    extra = write_samples(tmp_path / "holes", [24, 10, 0, 5, 0, 0, 3, 0] * 2)
    certifier = certifier_of("gpt2", extra=extra, steps=2)
    differences, _ = certifier.compare(axes)
    assert not differences, str(differences[0])
    assert 0 in {row["valid_tokens"] for row in certifier.reference.samples(1)}


def test_a_batch_without_valid_tokens_changes_no_weight(
    certifier_of: Certifiers, tmp_path: Path
) -> None:
    certifier = certifier_of("llama", extra=write_samples(tmp_path / "none", [0] * 16), steps=2)
    differences, _ = certifier.compare(BY_BOTH)
    assert not differences, str(differences[0])
    record = certifier.reference
    assert [row["valid_tokens"] for row in record.train_rows] == [0, 0]
    assert [row["lm_loss"] for row in record.train_rows] == [0.0, 0.0]
    before, after = record.tensors(0, "weight"), record.tensors(2, "weight")
    assert all(np.array_equal(before[name], after[name]) for name in before)


ODD = "--make-vocab-size-divisible-by 1"


@pytest.mark.parametrize("axes", [(), (tensor_axis(2),)], ids=["tp1", "tp2"])
def test_zero_weights_lose_the_log_of_the_true_vocabulary(
    certifier_of: Certifiers, axes: tuple[Axis, ...]
) -> None:
    certifier = certifier_of("llama", extra=f"{ODD} --init-method-std 0", steps=1)
    record, _ = certifier.run(axes)
    assert record.train_rows[0]["lm_loss"] == pytest.approx(math.log(101), rel=1e-12)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_an_odd_vocabulary_trains_the_same_when_it_is_padded(
    certifier_of: Certifiers, tp: int
) -> None:
    differences, _ = certifier_of("llama", extra=ODD, steps=2).compare((tensor_axis(tp),))
    assert not differences, str(differences[0])


@pytest.mark.parametrize(
    "axes",
    [
        (tensor_axis(2),),
        (tensor_axis(4),),
        (tensor_axis(2), sequence_axis(), data_axis(2)),
    ],
    ids=["tp2", "tp4", "tp2-sp-dp2"],
)
def test_one_kv_head_with_biases_stays_one_over_tp(
    certifier_of: Certifiers, axes: tuple[Axis, ...]
) -> None:
    certifier = certifier_of("qwen2", extra="--num-query-groups 1")
    differences, shares = certifier.compare(axes)  # among them: equal bits on all replicas
    assert not differences, str(differences[0])
    shared = {digest for share in shares for name, _, digest in share.weights if "0" in name
              and name.endswith("linear_k.bias")}  # fmt: skip
    assert len(shared) == 1


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_head_norm_gradients_are_counted_once(certifier_of: Certifiers, sp: bool) -> None:
    certifier = certifier_of("qwen3", steps=2)
    record, _ = certifier.run((tensor_axis(2), sequence_axis()) if sp else (tensor_axis(2),))
    wanted, got = certifier.reference.tensors(1, "grad"), record.tensors(1, "grad")
    names = [name for name in wanted if "layernorm" in name]
    assert len(names) == 2 * 4 + 1
    for name in names:
        ratio = np.linalg.norm(got[name]) / np.linalg.norm(wanted[name])
        assert ratio == pytest.approx(1.0, rel=1e-12), name
