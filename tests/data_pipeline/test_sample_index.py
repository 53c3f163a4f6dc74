"""The sample index: known vectors, exact layout, epochs, and C++ against the oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_lite.data.native import NUMPY_BACKEND, IndexBackend, load_backend
from megatron_lite.data.sample_index import SampleIndex, build_index, build_sample_index, plan_index
from megatron_lite.errors import UserError
from tests.data_pipeline.corpora import plan_of

GOLDEN_LENGTHS = np.array([7, 3, 12, 5, 9, 4, 20, 6, 8, 11], dtype=np.int32)


@pytest.fixture(scope="module")
def native() -> IndexBackend:
    backend = load_backend(False, lambda _: None)
    if backend.name != "native":
        pytest.skip("the C++ extension is not built")
    return backend


@pytest.fixture(params=["numpy", "native"])
def backend(request: pytest.FixtureRequest) -> IndexBackend:
    if request.param == "numpy":
        return NUMPY_BACKEND
    found: IndexBackend = request.getfixturevalue("native")
    return found


def golden_index(num_samples: int | None, backend: IndexBackend) -> SampleIndex:
    plan = plan_of(GOLDEN_LENGTHS[:8].tolist(), 8, num_samples)
    return build_index(GOLDEN_LENGTHS, 0, plan, 1234, backend.build_sample_index)


def loop_sample_index(stream_lengths: list[int], seq_length: int) -> list[list[int]]:
    """Walk token by token: the definition, with nothing clever in it."""
    places = [
        [position, offset]
        for position, length in enumerate(stream_lengths)
        for offset in range(length)
    ]
    return places[::seq_length][: (len(places) - 1) // seq_length + 1]


def test_known_vector_with_a_separate_last_epoch(backend: IndexBackend) -> None:
    index = golden_index(10, backend)
    assert index.documents.tolist() == [2, 1, 6, 0, 4, 5, 3, 7, 5, 0, 3, 4, 2, 6, 1, 7]
    expected = "0,0 0,8 2,1 2,9 2,17 3,5 4,6 6,1 7,4 9,2 10,3 11,6 12,5 13,1 13,9 13,17 15,2"
    assert [f"{a},{b}" for a, b in index.samples.tolist()] == expected.split()
    assert index.shuffle.tolist() == [5, 1, 3, 7, 0, 6, 2, 4, 13, 14, 12, 11, 15, 10, 9, 8]
    assert (index.documents.dtype, index.samples.dtype) == (np.int32, np.int32)
    assert index.shuffle.dtype == np.uint32


def test_known_vectors_of_one_and_of_four_joint_epochs(backend: IndexBackend) -> None:
    one = golden_index(None, backend)
    assert one.documents.tolist() == [2, 1, 6, 0, 4, 5, 3, 7]
    assert one.shuffle.tolist() == [5, 0, 3, 4, 2, 6, 1, 7]
    four = golden_index(30, backend)
    assert len(four.documents) == 32
    assert four.documents[:10].tolist() == [7, 2, 4, 1, 2, 0, 3, 7, 6, 5]
    assert four.shuffle[:8].tolist() == [21, 31, 3, 8, 6, 22, 18, 20]


def test_c014_samples_of_consecutive_tokens_share_one_token(backend: IndexBackend) -> None:
    lengths = np.array([5, 3, 7], dtype=np.int32)
    rows = backend.build_sample_index(lengths, np.arange(3, dtype=np.int32), 4, 3, False)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    flat = [int(starts[position] + offset) for position, offset in rows.tolist()]
    assert flat == [0, 4, 8, 12]
    assert plan_of([5, 3, 7], 4, None).num_samples == 3


corpora = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda x: sum(x) > 1)


@settings(max_examples=1000, deadline=None)
@given(
    lengths=corpora,
    seq_length=st.integers(1, 16),
    num_samples=st.none() | st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_c014_native_numpy_and_definition_agree_on_random_corpora(
    native: IndexBackend,
    lengths: list[int],
    seq_length: int,
    num_samples: int | None,
    seed: int,
    data: st.DataObject,
) -> None:
    if num_samples is None:
        seq_length = min(seq_length, sum(lengths) - 1)
    first = data.draw(st.integers(0, 3))
    whole = np.array([5] * first + lengths + [9], dtype=np.int32)
    plan = plan_of(lengths, seq_length, num_samples)
    oracle = build_index(whole, first, plan, seed, NUMPY_BACKEND.build_sample_index)
    fast = build_index(whole, first, plan, seed, native.build_sample_index)
    for name in ("documents", "samples", "shuffle"):
        expected, found = getattr(oracle, name), getattr(fast, name)
        assert expected.dtype == found.dtype
        np.testing.assert_array_equal(expected, found)
    stream = whole[oracle.documents].tolist()
    assert oracle.samples.tolist() == loop_sample_index(stream, seq_length)
    assert sorted(oracle.shuffle.tolist()) == list(range(plan.num_samples))
    assert len(oracle.shuffle) >= (num_samples or 1)


@pytest.mark.parametrize(("request_size", "epochs"), [(10, 1), (20, 2), (21, 3), (29, 3), (30, 3)])
def test_c015_requests_at_epoch_boundaries_build(request_size: int, epochs: int) -> None:
    plan = plan_of([41], 4, request_size)
    assert plan.epochs == epochs
    index = build_index(np.array([41], dtype=np.int32), 0, plan, 1234)
    flat = [41 * position + offset for position, offset in index.samples.tolist()]
    assert flat == list(range(0, 4 * len(flat), 4))
    again = build_index(np.array([41], dtype=np.int32), 0, plan, 1234)
    assert again.shuffle.tolist() == index.shuffle.tolist()
    if plan.separate_last_epoch:
        assert set(index.shuffle[:20].tolist()) == set(range(20))


def test_c015_a_barely_used_last_epoch_comes_last() -> None:
    assert plan_of([41], 4, 21).separate_last_epoch
    assert not plan_of([41], 4, 29).separate_last_epoch


def test_c013_integer_width_follows_the_largest_value() -> None:
    large = plan_index(
        num_sequences=200_000_000,
        tokens_per_epoch=200_000_000 * 1000,
        max_length=1000,
        sequence_length=2048,
        num_samples=11 * 200_000_000 * 1000 // 2048 - 1,
    )
    assert large.epochs == 11 and large.wide_samples
    rows = large.num_samples
    assert large.predicted_bytes == 4 * 2_200_000_000 + 16 * (rows + 1) + 4 * rows
    small = plan_of([10] * 1000, 8, 2000)
    assert small.epochs == 2 and not small.wide_samples


def test_c013_flat_positions_beyond_32_bits_are_exact(backend: IndexBackend) -> None:
    lengths = np.array([2**31 - 1, 2**31 - 1], dtype=np.int32)
    order = np.array([0, 1], dtype=np.int32)
    wide = backend.build_sample_index(lengths, order, 2**31 - 1, 1, True)
    assert wide.dtype == np.int64 and wide.tolist() == [[0, 0], [1, 0]]
    narrow: NDArray[np.signedinteger] = backend.build_sample_index(lengths, order, 2**30, 1, False)
    assert narrow.tolist() == [[0, 0], [0, 2**30]]


def test_c013_the_oracle_refuses_to_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lite.data.sample_index.INT32_MAX", 5)
    with pytest.raises(OverflowError):
        build_sample_index(
            np.array([20], dtype=np.int32), np.array([0], dtype=np.int32), 8, 2, False
        )


def test_more_samples_than_tokens_raise(backend: IndexBackend) -> None:
    lengths, order = np.array([5], dtype=np.int32), np.array([0], dtype=np.int32)
    with pytest.raises(IndexError):
        backend.build_sample_index(lengths, order, 4, 2, False)


def test_a_part_without_tokens_or_shorter_than_a_sample_is_refused() -> None:
    with pytest.raises(UserError, match="no tokens"):
        plan_of([0, 0], 4, 10)
    with pytest.raises(UserError, match="at most 3"):
        plan_of([4], 4, None)
    assert plan_of([4], 4, 10).epochs == 11


def test_a_missing_extension_warns_once_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lite.data.native.NATIVE_MODULE", "megatron_lite.data._absent")
    said: list[str] = []
    assert load_backend(False, said.append).name == "numpy"
    assert len(said) == 1 and "not built" in said[0]
    with pytest.raises(UserError, match="--require-native"):
        load_backend(True, said.append)
