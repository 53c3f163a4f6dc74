"""Wire bytes in closed form, the fit, and the file of measured costs, also a damaged one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.errors import UserError
from megatron_lite.mesh.cost import (
    OPERATIONS,
    AlphaBeta,
    CollectiveCosts,
    Measurement,
    fit_all,
    fit_alpha_beta,
    load_costs,
    save_costs,
    wire_bytes,
)

ROOT = Path(__file__).resolve().parents[2]
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


def measured(op: str, ranks: int, alpha: float, beta: float, nodes: int = 1) -> list[Measurement]:
    times = [alpha + beta * wire_bytes(op, ranks, size) for size in SIZES]
    return [
        Measurement(op, ranks, nodes, size, us, 0.9 * us)
        for size, us in zip(SIZES, times, strict=True)
    ]


def costs() -> CollectiveCosts:
    rows = measured("all_reduce", 2, 30.0, 1e-3) + measured("all_gather", 4, 50.0, 2e-3, nodes=2)
    fits = fit_all(rows, "median_us")
    texts = ("gloo", "a processor", "float32", "2.14.1", "2026-11-29", "median_us")
    return CollectiveCosts(*texts, tuple(rows), fits)


# ---- arithmetic ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("op", "of_four"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_wire_bytes_are_those_of_a_ring(op: str, of_four: float) -> None:
    assert wire_bytes(op, 4, 1000) == 1000 * of_four
    assert wire_bytes(op, 1, 1000) == 0


def test_all_reduce_sends_what_its_two_halves_send() -> None:
    for ranks in range(2, 20):
        halves = wire_bytes("reduce_scatter", ranks, 64) + wire_bytes("all_gather", ranks, 64)
        assert wire_bytes("all_reduce", ranks, 64) == pytest.approx(halves)


def test_fit_recovers_the_line_that_made_the_points() -> None:
    fit = fit_alpha_beta((size, 12.5 + 3e-4 * size) for size in SIZES)
    assert fit.alpha_us == pytest.approx(12.5, rel=1e-9)
    assert fit.beta_us_per_byte == pytest.approx(3e-4, rel=1e-9)
    assert fit.error < 1e-9
    assert fit.estimate_us(1e6) == pytest.approx(312.5)


def test_fit_is_of_relative_errors() -> None:
    # 20% off at the largest message, which absolute squares would follow alone.
    points = [(size, 10 + 1e-3 * size) for size in SIZES]
    points[-1] = (points[-1][0], 1.2 * points[-1][1])
    fit = fit_alpha_beta(points)
    assert fit.alpha_us == pytest.approx(10, rel=0.1)
    assert 0.05 < fit.error < 0.2


def test_neither_term_is_negative() -> None:
    steep = fit_alpha_beta([(100, 1.0), (200, 4.0), (400, 16.0)])
    assert steep.alpha_us == 0 and steep.beta_us_per_byte > 0
    falling = fit_alpha_beta([(100, 4.0), (200, 3.0), (400, 2.0)])
    assert falling.beta_us_per_byte == 0 and 2 < falling.alpha_us < 4


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, 2.0), (1, 3.0)], [(1, 0.0), (2, 1.0)]])
def test_too_few_points_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit_alpha_beta(points)


def test_either_times_can_be_fitted() -> None:
    rows = measured("broadcast", 2, 20.0, 1e-3)
    assert fit_all(rows, "least_us")["broadcast", 2, 1].alpha_us == pytest.approx(18)
    assert fit_all(rows, "median_us")["broadcast", 2, 1].alpha_us == pytest.approx(20)


def test_bandwidths_are_of_message_and_of_wire() -> None:
    row = Measurement("all_reduce", 4, 1, 3_000_000, 1000.0, 900.0)
    assert row.algorithm_gb_per_s == pytest.approx(3.0)
    assert row.bus_gb_per_s == pytest.approx(4.5)


# ---- the file --------------------------------------------------------------------------------
def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    before = costs()
    save_costs(before, tmp_path / "costs.json")
    after = load_costs(tmp_path / "costs.json")
    assert replace(after, fits={}) == replace(before, fits={})
    assert after.fits == before.fits
    assert after.estimate_us("all_reduce", 2, 1e6) == pytest.approx(30 + 1e3)
    assert after.estimate_us("all_reduce", 1, 1e6) == 0
    assert after.estimate_us("all_gather", 4, 1e6, nodes=2) == pytest.approx(50 + 1500)


def test_group_that_was_not_measured_is_refused_with_those_that_were() -> None:
    with pytest.raises(UserError, match=r"all_reduce over 8 .*measured: all_gather 4 ranks 2 node"):
        costs().estimate_us("all_reduce", 8, 1e6)
    with pytest.raises(UserError, match=r"all_gather over 4 ranks on 1 node"):
        costs().estimate_us("all_gather", 4, 1e6)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("schema",), "collective-costs/2", "schema"),
        (("device",), 5, '"device" is 5'),
        (("rows",), [], '"rows" is not a list'),
        (("fits",), [7], '"fits" has 7'),
        (("rows", 0, "op"), "all_reduced", "'all_reduced' is not one of"),
        (("rows", 0, "ranks"), 1, "are no group"),
        (("rows", 0, "nodes"), 3, "are no group"),
        (("rows", 0, "nodes"), True, '"nodes" is True'),
        (("rows", 0, "message_bytes"), 1.5, '"message_bytes" is 1.5'),
        (("rows", 0, "median_us"), 0, '"median_us" is 0'),
        (("fits", 0, "alpha_us"), -1, '"alpha_us" is -1'),
        (("fits", 0, "alpha_us"), 10**400, '"alpha_us" is 1000'),
        (("fits", 0, "beta_us_per_byte"), None, '"beta_us_per_byte" is None'),
        (("fits", 0, "error"), float("nan"), "NaN is not a number"),
        (("fits", 1), {"op": "all_reduce", "ranks": 2, "nodes": 1}, "twice"),
    ],
)
def test_damaged_file_is_refused_and_the_entry_named(
    tmp_path: Path, place: tuple[Any, ...], value: Any, said: str
) -> None:
    path = tmp_path / "costs.json"
    save_costs(costs(), path)
    document = json.loads(path.read_text())
    target = document
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"costs\.json") as caught:
        load_costs(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"\xff", b'{"schema"'])
def test_file_that_is_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"costs\.json"):
        load_costs(path)
    with pytest.raises(UserError, match=r"absent\.json"):
        load_costs(tmp_path / "absent.json")


def test_every_operation_has_wire_bytes_and_no_torch_is_loaded() -> None:
    assert all(wire_bytes(op, 3, 9) > 0 for op in OPERATIONS)
    script = "import sys, megatron_lite.mesh.cost; print('torch' in sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
    assert AlphaBeta(1.0, 2.0, 0.0).estimate_us(3.0) == 7.0
