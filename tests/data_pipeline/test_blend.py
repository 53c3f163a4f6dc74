"""Blends: known sequences, bounds, many datasets, blocks replayed as if never cut."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data import blend
from megatron_lite.data.blend import BlendIndex, normalize_weights
from megatron_lite.data.build import build_datasets
from megatron_lite.data.gpt_dataset import BlendedDataset
from megatron_lite.data.native import NUMPY_BACKEND, IndexBackend, load_backend
from megatron_lite.errors import UserError
from tests.data_pipeline.corpora import Settings, write_dataset

NO_LIMIT = np.empty(0, dtype=np.int64)


@pytest.fixture(params=["numpy", "native"])
def backend(request: pytest.FixtureRequest) -> IndexBackend:
    if request.param == "numpy":
        return NUMPY_BACKEND
    found = load_backend(False, lambda _: None)
    if found.name != "native":
        pytest.skip("the C++ extension is not built")
    return found


def sequence(weights: list[float], size: int, backend: IndexBackend) -> list[int]:
    index = BlendIndex(normalize_weights(weights), size, backend)
    return [index.locate(i)[0] for i in range(size)]


def test_known_sequences(backend: IndexBackend) -> None:
    known = [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1]
    assert sequence([0.3, 0.7], 20, backend) == known
    assert sequence([0.5, 0.25, 0.25], 12, backend) == [0, 1, 2, 0] * 3


def test_exhaustive_blend_takes_every_sample_once(backend: IndexBackend) -> None:
    sizes = np.array([2, 3, 4], dtype=np.int64)
    index = BlendIndex(normalize_weights([2, 3, 4]), 9, backend, sizes)
    located = [index.locate(i) for i in range(9)]
    assert [dataset for dataset, _ in located] == [2, 1, 0, 2, 1, 2, 0, 1, 2]
    assert sorted(located) == [(d, i) for d in range(3) for i in range(int(sizes[d]))]


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8),
    size=st.integers(1, 120),
    block=st.integers(1, 40),
)
def test_native_blend_equals_the_oracle(weights: list[float], size: int, block: int) -> None:
    native = load_backend(False, lambda _: None)
    normal = normalize_weights(weights)
    starts = native.blend_starts(normal, NO_LIMIT, size, block)
    np.testing.assert_array_equal(starts, blend.blend_starts(normal, NO_LIMIT, size, block))
    for number, counts in enumerate(starts[:-1]):
        length = min(block, size - number * block)
        oracle = blend.blend_block(normal, NO_LIMIT, counts, number * block, length)
        fast = native.blend_block(normal, NO_LIMIT, counts, number * block, length)
        for a, b in zip(oracle, fast, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("weights", "size", "counts"),
    [
        ([0.001, 0.999], 100, ([1, 99], [0, 100])),
        ([0.5, 0.3, 0.2], 10, ([5, 3, 2],)),
        ([0.999999, 0.000001], 7, ([7, 0], [6, 1])),
    ],
)
def test_c016_extreme_weights_stay_near_their_share_at_every_prefix(
    weights: list[float], size: int, counts: tuple[list[int], ...], backend: IndexBackend
) -> None:
    chosen = sequence(weights, size, backend)
    totals = np.zeros(len(weights))
    for k, dataset in enumerate(chosen, 1):
        totals[dataset] += 1
        assert np.all(np.abs(totals - np.array(weights) * k) <= 1)
    assert totals.tolist() in [list(map(float, c)) for c in counts]
    assert sequence(weights, 5 * size, backend)[:size] == chosen


def test_c016_no_index_passes_a_dataset(tmp_path: Path) -> None:
    paths = [
        write_dataset(tmp_path / name, [[1, 2, 3, 4, 5] * 20] * 4) for name in ("tiny", "large")
    ]
    for weights in ((0.001, 0.999), (0.999999, 0.000001), (1e-9, 1.0)):
        words = (str(weights[0]), paths[0], str(weights[1]), paths[1])
        datasets = build_datasets(
            Settings(data_path=words),
            train_samples=100,
            valid_samples=0,
            test_samples=0,
            vocab_size=256,
            eod=None,
        )
        assert isinstance(datasets.train, BlendedDataset)
        assert len(datasets.train) >= 100
        for index in range(len(datasets.train)):
            assert datasets.train[index].dataset in (0, 1)


def test_c017_three_hundred_datasets_are_each_used_once(backend: IndexBackend) -> None:
    assert sorted(sequence([1.0] * 300, 300, backend)) == list(range(300))


def test_c017_too_many_datasets_are_refused_with_the_limit() -> None:
    with pytest.raises(UserError, match="32767"):
        normalize_weights([1.0] * 40_000)


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_weights_must_be_positive(weights: list[float]) -> None:
    with pytest.raises(UserError, match="positive"):
        normalize_weights(weights)


def test_blocks_do_not_show(backend: IndexBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sequence([0.2, 0.5, 0.3], 50, backend)
    monkeypatch.setattr(blend, "BLOCK", 7)
    index = BlendIndex(normalize_weights([0.2, 0.5, 0.3]), 50, backend)
    backwards = [index.locate(i)[0] for i in reversed(range(50))]
    assert backwards[::-1] == whole
    assert index.counts.tolist() == [whole.count(d) for d in range(3)]
    with pytest.raises(IndexError):
        index.locate(50)


def test_unweighted_blend_is_one_epoch_of_each_and_no_more(tmp_path: Path) -> None:
    paths = (
        write_dataset(tmp_path / "a", [[1] * 41]),
        write_dataset(tmp_path / "b", [[2] * 81]),
    )

    def build(samples: int) -> BlendedDataset:
        datasets = build_datasets(
            Settings(data_path=paths),
            train_samples=samples,
            valid_samples=0,
            test_samples=0,
            vocab_size=256,
            eod=None,
        )
        assert isinstance(datasets.train, BlendedDataset)
        return datasets.train

    train = build(30)
    origins = {(train[i].dataset, train[i].dataset_index) for i in range(30)}
    assert origins == {(0, i) for i in range(10)} | {(1, i) for i in range(20)}
    with pytest.raises(UserError, match="30 train samples, but the run needs 31"):
        build(31)


def test_weights_whose_sum_overflows_keep_their_shares() -> None:
    assert normalize_weights([1e308, 1e308, 2e307 * 5]).tolist() == pytest.approx([1 / 3] * 3)
