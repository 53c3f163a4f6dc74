"""tools/bench/kernels.py: its figures, its table and rows, every case, early refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_lite.native.load import load_native
from tools.bench import kernel_layers, kernel_products, kernels
from tools.bench.kernel_cases import SCALES, Case, Contestant, Inputs

GENERATORS = kernel_layers.CASES | kernel_products.CASES


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """CPU time is what the test's calls add to the first entry."""
    spent = [0.0]
    monkeypatch.setattr("tools.bench.kernels.time.process_time", lambda: spent[0])
    return spent


def a_case(bound: str = "memory", target: float | None = None) -> Case:
    contestants = {"ours": Contestant(torch.neg), "torch": Contestant(torch.neg)}
    return Case("norm", "one", bound, 4e9, None, (), (), contestants, target)


def test_rounds_alternate_and_failures_of_peers_are_told(ticking: list[float]) -> None:
    order = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        ticking[0] += seconds

    def broken() -> None:
        raise ValueError("needs sm_90\nand more")

    clock = kernels.Clock("cpu", window_ms=1000, rounds=2)
    calls = {"ours": lambda: call("ours", 0.5), "torch": lambda: call("torch", 1.0)}
    samples, failed = clock.rounds_of({**calls, "peer": broken})
    assert samples == {"ours": [0.5, 0.5], "torch": [1.0, 1.0]}
    assert failed == {"peer": "ValueError: needs sm_90"}
    timed = order[4:]  # after one call to warm up and one to choose the count, each
    assert timed == ["ours", "ours", "torch"] * 2
    with pytest.raises(ValueError, match="sm_90"):
        clock.rounds_of({"ours": broken})


def test_rates_shares_and_ratios_are_medians_over_rounds() -> None:
    samples = {"ours": [1.0, 2.0, 4.0], "torch": [3.0, 3.0, 4.0], "ceiling": [0.5, 0.5, 0.5]}
    row = kernels.row_of(a_case(target=1.5), "forward", 4e9, 4e9, samples, {}, "bf16")
    assert (row["ms"], row["least_ms"]) == (2000.0, 1000.0)
    assert (row["rate"], row["ceiling_rate"], row["share"]) == (2.0, 8.0, 0.25)
    assert row["ratios"] == {"torch": 1.5}
    assert row["target"] is None, "promises are of forward and backward"
    both = kernels.row_of(a_case(target=1.5), "forward+backward", 4e9, 4e9, samples, {}, "bf16")
    assert "| 1.50 | 1.50 | met |" in kernels.acceptance([both])
    both["ratios"]["torch"] = 1.4
    assert "| 1.50 | 1.40 | MISSED |" in kernels.acceptance([both])


def test_table_has_a_column_per_peer_and_units_by_bound() -> None:
    samples = {"ours": [1e-3], "torch": [2e-3], "ceiling": [1e-3]}
    memory = kernels.row_of(a_case(), "forward", 4e6, 4e6, samples, {}, "bf16")
    samples["flash-attn"] = [5e-4]
    compute = kernels.row_of(a_case("compute"), "forward", 5e10, 1e11, samples, {}, "bf16")
    lines = kernels.table([memory, compute]).splitlines()
    assert lines[0].endswith("| of ceiling | x torch | x flash-attn |")
    assert len({line.count("|") for line in lines}) == 1
    assert "| 4.0 GB/s | 100% | 2.00 |  |" in lines[2]
    assert "| 50.0 TFLOP/s | 50% | 2.00 | 0.50 |" in lines[3]


def test_ceiling_moves_as_many_bytes_as_the_operation() -> None:
    call = kernels.ceiling_call(a_case(), 1000, 8, torch.float32, "cpu")
    copied = call()
    assert isinstance(copied, torch.Tensor)
    assert 2 * copied.nbytes == 1000
    product = kernels.ceiling_call(a_case("compute"), 1000, 8, torch.float32, "cpu")()
    assert isinstance(product, torch.Tensor) and product.shape == (8, 8)


@pytest.mark.parametrize("operation", kernels.OPERATIONS)
def test_contestants_of_a_case_compute_the_same(operation: str) -> None:
    assert set(kernels.OPERATIONS) == set(GENERATORS)
    if load_native().library is None:
        pytest.skip("no native library")
    torch.manual_seed(1)
    draw = Inputs(torch.bfloat16, torch.device("cpu"))
    for case in GENERATORS[operation](draw, SCALES["quick"]):
        assert case.forward > 0 and (case.both is None or case.both >= case.forward)
        if case.operation == "dropout" or "AdamW" in case.label:
            continue  # masks differ; the peer's steps go on
        results = []
        for name in ("ours", "torch"):
            contestant = case.contestants[name]
            inputs = [x if x.requires_grad else x.clone() for x in case.inputs]
            out = contestant.function(*inputs, *contestant.extra)
            out = inputs[0] if out is None else out  # changed in place
            results.append(out[0] if isinstance(out, tuple) else out)
        ours, plain = results
        if isinstance(ours, torch.Tensor):
            wanted = plain.double().square() if "squared norm" in case.label else plain.double()
            got = ours.double()[0] if "squared norm" in case.label else ours.double()
            torch.testing.assert_close(got, wanted.view_as(got), rtol=2e-2, atol=5e-2)
        else:
            assert torch.equal(ours.codes.view(torch.uint8), plain.codes.view(torch.uint8))


def test_program_prints_the_table_and_keeps_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if load_native().library is None:
        pytest.skip("no native library")
    path = tmp_path / "rows.json"
    threads = torch.get_num_threads()
    arguments = ["--device", "cpu", "--quick", "--ops", "norm", "attention", "--json", str(path)]
    assert kernels.main(arguments) == 0
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert kept["facts"]["threads"] == 1 and kept["facts"]["torch"] == torch.__version__
    assert [(row["operation"], row["pass"]) for row in kept["rows"]] == [
        ("norm", "forward"),
        ("norm", "forward+backward"),
    ] * 2 + [("attention", "forward"), ("attention", "forward+backward")]
    for row in kept["rows"]:
        assert row["case"] in printed
        assert row["ms"] > 0 and row["share"] > 0 and row["ratios"]["torch"] > 0
        assert row["failed"] == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--threads", "0"], "--threads and --rounds are at least 1"),
        (["--rounds", "0"], "--threads and --rounds are at least 1"),
        (["--window-ms", "0"], "--window-ms 0: above 0, at most 10000"),
        (["--json", "/nonexistent/rows.json"], "--json /nonexistent/rows.json: no file"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert kernels.main(["--device", "cpu", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert kernels.main(["--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_an_unknown_operation_names_the_legal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--ops", "convolution"])
    assert stopped.value.code == 2
    assert "cross_entropy" in capsys.readouterr().err


def test_a_level_limits_torch_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(kernels.os, "environ", seen)
    assert kernels.main(["--device", "cpu", "--isa", "bf16", "--rounds", "0"]) == 2
    assert seen["MLITE_CPU_ISA"] == "bf16"
    assert seen["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert seen["ATEN_CPU_CAPABILITY"] == "avx512"
