"""What the simulation offers gives CUDA's results, in every order of execution."""

import ml_dtypes
import numpy as np
import pytest

from tests.sim.build import Kernels, SimError, poisoned, sparse


def test_indices_number_threads_and_blocks(ordered: Kernels) -> None:
    grid, block = (3, 2, 2), (5, 3, 4)
    out = poisoned((2, 2, 3, 4, 3, 5, 7), np.int32)
    ordered.call("launch_indices", out, *grid, *block)
    z, y, x, tz, ty, tx = np.indices(out.shape[:-1])
    want = np.stack([tx, ty, tz, x, y, z, np.full_like(x, 60)], axis=-1)
    np.testing.assert_array_equal(out, want)


def test_no_blocks_is_no_launch(kernels: Kernels) -> None:
    kernels.call("launch_indices", None, 0, 1, 1, 32, 1, 1)


@pytest.mark.parametrize("threads", [0, 1025])
def test_block_of_a_size_that_no_gpu_takes_is_refused(kernels: Kernels, threads: int) -> None:
    with pytest.raises(SimError, match="1 to 1024 threads"):
        kernels.call("launch_indices", None, 1, 1, 1, threads, 1, 1)


@pytest.mark.parametrize("width", [2, 8, 32])
@pytest.mark.parametrize("parameter", [0, 1, 3, 4, 17])
def test_shuffles_follow_the_ptx_manual(ordered: Kernels, width: int, parameter: int) -> None:
    values = np.random.default_rng(0).integers(0, 1000, 32).astype(np.int32)
    out = poisoned((4, 32), np.int32)
    ordered.call("launch_shuffle", values, out, width, parameter)
    lane = np.arange(32)
    first, last = lane & ~(width - 1), lane | (width - 1)
    index = first | (parameter & (width - 1))
    up = np.where(lane - parameter < first, lane, lane - parameter)
    down = np.where(lane + parameter > last, lane, lane + parameter)
    xor = np.where(lane ^ parameter > last, lane, lane ^ parameter)
    np.testing.assert_array_equal(out, values[np.stack([index, up, down, xor])])


def test_shuffle_width_must_be_a_power_of_two(kernels: Kernels) -> None:
    with pytest.raises(SimError, match="power of two"):
        kernels.call("launch_shuffle", poisoned(32, np.int32), poisoned((4, 32), np.int32), 12, 1)


def test_shuffles_move_every_type_of_cuda(ordered: Kernels) -> None:
    out = poisoned(32, np.float64)
    ordered.call("launch_shuffle_types", out)
    np.testing.assert_array_equal(out, (np.arange(32) + 1) % 32 * (4.0 + 2.0**33))


def test_votes_matches_and_reductions_honour_their_masks(ordered: Kernels) -> None:
    values = np.random.default_rng(1).integers(0, 9, 32).astype(np.int32)
    values[:16] |= 2  # all above 1 in the lower half
    values[16:] = 5  # all equal in the upper half
    out = poisoned((10, 32), np.int32)
    ordered.call("launch_vote", values, out)
    for half in (slice(0, 16), slice(16, 32)):
        mine, got, lanes = values[half], out[:, half].view(np.uint32), np.arange(32)[half]
        whole = np.sum(2**lanes, dtype=np.uint64).astype(np.uint32)
        equal = np.all(mine // 8 == mine[0] // 8)
        assert (got[0] == np.sum(2 ** lanes[mine % 2 == 1], dtype=np.uint64)).all()
        assert (got[1] == np.any(mine > 6)).all()
        assert (got[2] == np.all(mine > 1)).all()
        same = [np.sum(2 ** lanes[mine == value], dtype=np.uint64) for value in mine]
        np.testing.assert_array_equal(got[3], same)
        assert (got[4] == (whole if equal else 0)).all()
        assert (got[5] == equal).all()
        assert (got[6] == mine.sum()).all()
        assert (out[7, half] == mine.min() - 4).all()
        assert (got[8] == mine.max()).all()
    assert (out[9, :16] == np.bitwise_xor.reduce(values[:16])).all()
    np.testing.assert_array_equal(out[9, 16:], values[16:].reshape(8, 2)[:, ::-1].reshape(16))


@pytest.mark.parametrize("threads", [1, 33, 64, 1000])
def test_counting_barriers_see_the_whole_block(ordered: Kernels, threads: int) -> None:
    for values in (np.arange(threads) % 3, np.ones(threads), np.zeros(threads)):
        out = poisoned((3, threads), np.int32)
        ordered.call("launch_count_in_block", values.astype(np.int32), out, threads)
        want = [(values > 0).sum(), (values > 0).any(), (values > 0).all()]
        np.testing.assert_array_equal(out, np.repeat(want, threads).reshape(3, threads))


@pytest.mark.parametrize("os_threads", [1, 4])
def test_atomics_lose_nothing(ordered: Kernels, os_threads: int) -> None:
    values = np.random.default_rng(2).integers(-1000, 1000, 1500).astype(np.int32)
    ints = np.array([0, -5000, 5000, 0, -1, 0, 0, 0], np.int32)
    big, real, real64 = np.zeros(1, np.uint64), np.zeros(1, np.float32), np.zeros(1)
    with ordered.options(threads=os_threads):
        ordered.call("launch_accumulate", values, values.size, ints, big, real, real64)
    bits = [f.reduce(values) for f in (np.bitwise_or, np.bitwise_and, np.bitwise_xor)]
    want = [values.sum(), values.max(), values.min(), *bits, values.size % 7, values.size]
    np.testing.assert_array_equal(ints, want)
    assert big[0] == values.size << 33
    assert real[0] == real64[0] == values.sum()


def test_static_and_dynamic_shared_memory(ordered: Kernels) -> None:
    values = np.random.default_rng(3).random((32, 32), np.float32)
    out = poisoned((32, 32), np.float32)
    ordered.call("launch_transpose_and_reverse", values, out)
    np.testing.assert_array_equal(out, values.T[:, ::-1])


def test_vectors_of_four(ordered: Kernels) -> None:
    values = np.random.default_rng(4).random(1000, np.float32)
    out = poisoned(1000, np.float32)
    ordered.call("launch_double_vectors", values, out, 250)
    np.testing.assert_array_equal(out, values * 2)


def test_misaligned_vectors_are_refused(kernels: Kernels) -> None:
    values = np.zeros(1004, np.float32)
    with pytest.raises(SimError, match="misaligned"):
        kernels.call("launch_double_vectors", values[1:], poisoned(1000, np.float32), 250)


def test_types_round_as_ml_dtypes(kernels: Kernels) -> None:
    rng = np.random.default_rng(5)
    values = (rng.standard_normal(2000) * 10.0 ** rng.integers(-9, 5, 2000)).astype(np.float32)
    out = poisoned((4, 2000), np.float32)
    kernels.call("launch_round_trip", values, out, 2000)
    e4m3 = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    e5m2 = np.clip(values, -57344, 57344).astype(ml_dtypes.float8_e5m2)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    for got, want in zip(out, (values.astype(ml_dtypes.bfloat16), half, e4m3, e5m2), strict=True):
        np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("mode", ["late", "early"])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_asynchronous_copies_with_groups_and_zero_fill(
    ordered: Kernels, width: int, mode: str
) -> None:
    values = np.random.default_rng(6).integers(1, 256, 128 * width).astype(np.uint8)
    for valid in (128 * width, 100 * width - 3, 0):
        out = poisoned(128 * width, np.uint8)
        with ordered.options(cp_async=mode):
            ordered.call("launch_copy_async", values, out, width, valid)
        np.testing.assert_array_equal(out, np.where(np.arange(out.size) < valid, values, 0))


def test_integer_intrinsics(kernels: Kernels) -> None:
    values = np.array([0, 1, 0x80000000, 0xFFFFFFFF, 0x12345678, 0x4B7FFFFF, 0x3F000000], np.uint32)
    out = poisoned((8, values.size), np.uint32)
    kernels.call("launch_integer_intrinsics", values, out, values.size)
    words = [int(v) for v in values]
    flipped = [w ^ 0xFFFFFFFF for w in words]
    want = [
        [bin(w).count("1") for w in words],
        [32 - w.bit_length() for w in words],
        [(w & -w).bit_length() for w in words],
        [int(f"{w:032b}"[::-1], 2) for w in words],
        [w * 0x9E3779B9 >> 32 for w in words],
        [w & 0xFFFFFF | f & 0xFF000000 for w, f in zip(words, flipped, strict=True)],
        [((f << 32 | w) << 5 >> 32) & 0xFFFFFFFF for w, f in zip(words, flipped, strict=True)],
        [int(np.rint(x)) if np.isfinite(x) else 0 for x in values.view(np.float32)],
    ]
    np.testing.assert_array_equal(out, np.array(want, np.int64).astype(np.uint32))


def test_named_barriers_part_a_block(ordered: Kernels) -> None:
    values = np.arange(128, dtype=np.float32)
    out = poisoned(128, np.float32)
    ordered.call("launch_two_groups", values, out)
    np.testing.assert_array_equal(out, values.reshape(2, 64)[:, ::-1].reshape(128))


def test_last_block_sees_all_partial_sums(ordered: Kernels) -> None:
    values = np.arange(32 * 9, dtype=np.float32)
    partial, arrived, total = poisoned(9, np.float32), np.zeros(1, np.uint32), poisoned(1, "f4")
    for _ in range(2):  # the counter is back at 0 after each launch
        ordered.call("launch_sum_by_last_block", values, partial, arrived, total, 9)
        assert total[0] == values.sum()


def test_blocks_alone_reach_offsets_over_two_gigabytes(kernels: Kernels) -> None:
    rows, row_bytes = 3_000_000, 4096
    memory = sparse(rows * row_bytes, np.uint8)  # 12 GB of address space
    with kernels.options(blocks=f"{rows // 32 - 2}:2"):
        kernels.call("launch_mark_rows", memory, rows, row_bytes)
    marks = memory[::row_bytes][-80:]
    np.testing.assert_array_equal(marks[-64:], np.arange(rows - 64, rows) % 251 + 1)
    assert not marks[:-64].any()


def test_every_thread_has_a_stack_for_large_arrays(ordered: Kernels) -> None:
    out = poisoned(300, np.float32)
    ordered.call("launch_use_the_stack", out, 300)
    np.testing.assert_array_equal(out, (np.arange(2048) % 7).sum() + 2048.0 * np.arange(300))


def test_unknown_options_are_refused(kernels: Kernels) -> None:
    for option in ({"order": "backwards"}, {"speed": 1}, {"blocks": "-1:2"}):
        with pytest.raises(ValueError, match="no option"):
            kernels.set(**option)
