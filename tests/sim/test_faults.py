"""Every planted fault is caught by the mechanism that is there for it; correct twins pass."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.sim import build
from tests.sim.build import Kernels, SimError, poisoned
from tests.sim.program import ROW_BYTES, ROWS, arguments

FAULTS = build.ROOT / "tests/sim/kernels/faults.cu"
# Room for building in every mode on a busy machine; a hang still ends.
pytestmark = pytest.mark.timeout(300)
EVERY = re.findall(r"^__global__ void (\w+)", FAULTS.read_text(), re.MULTILINE)


def outcome(kernels: Kernels, name: str, broken: int, **options: str | int) -> np.ndarray:
    """The output array of one launch: the last array among its arguments."""
    given = arguments(name)
    with kernels.options(**options):
        kernels.call(f"launch_{name}", *given, broken)
    return [value for value in given if isinstance(value, np.ndarray)][-1]


def line_of(mark: str) -> int:
    """The line of faults.cu that holds a mark."""
    lines = FAULTS.read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if mark in line]
    return found


def body_of(name: str) -> range:
    """The lines of one kernel."""
    lines = FAULTS.read_text().splitlines()
    start = next(i for i, line in enumerate(lines, 1) if f"void {name}(" in line)
    return range(start, next(i for i in range(start, len(lines)) if lines[i - 1] == "}") + 1)


@pytest.mark.parametrize("order", ["fwd", "rev", "rand:3"])
@pytest.mark.parametrize("name", EVERY)
def test_correct_twins_run_in_every_order(kernels: Kernels, name: str, order: str) -> None:
    outcome(kernels, name, 0, order=order)


# ---- poison ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["removed_barrier", "wrong_wait_count", "unsynchronised_copy"])
def test_missing_synchronisation_reads_poison(kernels: Kernels, name: str) -> None:
    want = outcome(kernels, name, 0)
    assert np.isfinite(want).all()
    assert np.isnan(outcome(kernels, name, 1)).any()


def test_wrong_wait_count_passes_only_where_copies_land_early(kernels: Kernels) -> None:
    """Why copies land late: with early ones the same fault gives the right numbers."""
    want = outcome(kernels, "wrong_wait_count", 0)
    got = outcome(kernels, "wrong_wait_count", 1, cp_async="early")
    np.testing.assert_array_equal(got, want)


def test_unwritten_tail_stays_poison(kernels: Kernels) -> None:
    assert np.isfinite(outcome(kernels, "unwritten_tail", 0)).all()
    assert np.isnan(outcome(kernels, "unwritten_tail", 1)[48:]).all()


def test_fully_masked_row_without_its_guard_is_nan(kernels: Kernels) -> None:
    assert outcome(kernels, "masked_row", 0)[3] == -np.inf
    assert np.isnan(outcome(kernels, "masked_row", 1)[3])


# ---- order -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["order_dependence", "shared_race"])
def test_results_that_depend_on_order_differ_between_orders(kernels: Kernels, name: str) -> None:
    for broken, distinct in ((0, 1), (1, 2)):
        orders = ("fwd", "rev")
        runs = {outcome(kernels, name, broken, order=o, threads=1).tobytes() for o in orders}
        assert len(runs) == distinct


# ---- reports ---------------------------------------------------------------------------------
def report(kernels: Kernels, name: str) -> str:
    with pytest.raises(SimError) as caught:
        outcome(kernels, name, 1)
    return str(caught.value)


def test_divergent_barrier_names_both_lines(kernels: Kernels) -> None:
    text = report(kernels, "divergent_barrier")
    assert "divergent barrier" in text
    first = f"in __syncthreads at faults.cu:{line_of('first line')}"
    assert f"threads 0-31 (warp 0 lane 0 to warp 0 lane 31): {first}" in text
    assert f"faults.cu:{line_of('second line')}" in text


def test_barrier_that_some_threads_never_reach_is_a_deadlock(kernels: Kernels) -> None:
    text = report(kernels, "barrier_after_return")
    assert "deadlock" in text
    assert re.search(r"threads 0-31 .*: in __syncthreads at faults.cu:\d+", text)
    assert re.search(r"threads 32-63 .*: exited", text)
    assert "kernel barrier_after_return launched at faults.cu:" in text


def test_deadlock_names_where_each_thread_waits(kernels: Kernels) -> None:
    text = report(kernels, "deadlock")
    assert "deadlock" in text
    shuffle = f"in __shfl_xor_sync at faults.cu:{line_of('// waits here')}"
    assert f"threads 0-15 (warp 0 lane 0 to warp 0 lane 15): {shuffle}" in text
    assert f"in __syncthreads at faults.cu:{line_of('// and here')}" in text


@pytest.mark.parametrize("order", ["fwd", "rev"])
def test_shuffle_with_exited_lanes_is_reported(kernels: Kernels, order: str) -> None:
    with kernels.options(order=order):
        text = report(kernels, "shuffle_after_exit")
    assert re.search(r"exits while __shfl_xor_sync waits for it|names lanes that have exited", text)
    assert re.match(r"sim: faults.cu:\d+", text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lane_outside_mask", "lane 31 is not in the mask that it passes"),
        ("read_outside_mask", "a shuffle reads a lane outside of its mask"),
        ("misaligned_ldmatrix", "ldmatrix: the address of a row is not 16-byte aligned"),
        ("misaligned_copy", "cp_async: an address is not aligned"),
    ],
)
def test_misuse_is_reported_with_its_line(kernels: Kernels, name: str, message: str) -> None:
    text = report(kernels, name)
    assert message in text
    found = re.match(r"sim: faults.cu:(\d+)", text)
    assert found is not None
    assert int(found.group(1)) in body_of(name)


def test_simulation_goes_on_after_a_failed_launch(kernels: Kernels) -> None:
    for _ in range(3):
        report(kernels, "deadlock")
        assert np.isfinite(outcome(kernels, "removed_barrier", 0)).all()


# ---- what the layer lacks --------------------------------------------------------------------
@pytest.mark.parametrize(
    "line",
    [
        "__shared__ float values[4];",
        "unsigned mask = __activemask();",
        "__nanosleep(10);",
        "float v = __ldg(out);",
        'asm volatile("bar.sync 0;");',
    ],
)
def test_unknown_cuda_does_not_compile(tmp_path: Path, kernels: Kernels, line: str) -> None:
    source = tmp_path / "lacking.cu"
    source.write_text(
        f'#include "device.h"\n__global__ void lacking(float* out) {{ {line} }}\n'
        "ML_EXPORT int launch_lacking(float* out, void* stream) {\n"
        "  return ML_LAUNCH(lacking, 1, 1, 0, stream, out);\n}\n"
    )
    with pytest.raises(RuntimeError, match=r"error|Error"):
        build.build([source])


# ---- sanitizers ------------------------------------------------------------------------------
def run(mode: str, broken: int, *names: str) -> tuple[int, str]:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.run_python(mode, ["-m", "tests.sim.program", str(broken), *names])


@pytest.mark.parametrize("mode", ["asan", "ubsan", "tsan"])
def test_correct_twins_are_clean_under_sanitizers(mode: str) -> None:
    code, text = run(mode, 0, *EVERY)
    assert code == 0, text
    assert text.splitlines() == [f"== {name}" for name in EVERY]


@pytest.mark.parametrize("mode", ["asan", "ubsan", "tsan"])
def test_features_are_clean_under_sanitizers(mode: str) -> None:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    files = [f"tests/sim/test_{name}.py" for name in ("features", "tensor_core", "counters")]
    code, text = build.run_python(mode, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files])
    assert code == 0, text[-5000:]


@pytest.mark.parametrize("name", ["shared_off_by_one", "missing_guard"])
def test_address_sanitizer_sees_the_first_byte_beyond(name: str) -> None:
    code, text = run("asan", 1, name)
    assert code != 0
    assert "heap-buffer-overflow" in text
    lines = {int(number) for number in re.findall(r"faults\.cu:(\d+)", text)}
    assert lines & set(body_of(name)), text


def test_overflow_sanitizer_sees_an_index_of_32_bits() -> None:
    assert ROWS * ROW_BYTES > 2**31
    code, text = run("ubsan", 1, "narrow_index")
    assert code != 0
    assert "signed integer overflow" in text
    assert int(re.findall(r"faults\.cu:(\d+)", text)[0]) in body_of("narrow_index")


RACES = ["shared_race", "global_race", "removed_barrier", "unsynchronised_copy", "wrong_wait_count"]


def test_thread_sanitizer_names_both_lines_of_a_race() -> None:
    code, text = run("tsan", 1, *RACES)
    assert code == 66, text
    sections = dict(zip(RACES, re.split(r"^== \w+$", text, flags=re.MULTILINE)[1:], strict=True))
    for name, section in sections.items():
        assert "WARNING: ThreadSanitizer: data race" in section, (name, section)
        first = section.split("WARNING: ThreadSanitizer")[1]
        accesses = re.split(r"Previous (?:atomic )?(?:read|write)", first)[:2]
        for access in accesses:  # both stacks hold a line of the kernel
            lines = {int(number) for number in re.findall(r"faults\.cu:(\d+)", access)}
            assert lines & set(body_of(name)), (name, first)
    shared = sections["shared_race"]
    assert f"faults.cu:{line_of('racing write')}" in shared
    assert f"faults.cu:{line_of('racing read')}" in shared
    assert f"faults.cu:{line_of('racing update')}" in sections["global_race"]


def test_poisoned_outputs_have_the_exact_size() -> None:
    assert poisoned((3, 5), np.float32).nbytes == 60
