"""What routers did, in rows and in the log line of a whole run, the same in a pipeline."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cases.ranks import program
from tests.pool import fork_ranks
from tests.train.program import LLAMA, RUN, rows

EXPERTS = 4
MIXTURE = (
    f"--num-experts {EXPERTS} --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.001 --moe-layer-freq 2 --moe-expert-capacity-factor 1.0 "
    "--moe-pad-expert-input-to-capacity --train-iters 2 --eval-iters 0 --fp64 "
    "--hidden-dropout 0 --attention-dropout 0"
).split()
LOSSES = ("moe_aux_loss", "moe_z_loss")
SHARES = (
    "moe/dropped_share",
    "moe/padded_share",
    "moe/dispatch_bytes",
    "moe/entropy",
    "moe/busiest_over_mean",
)


def run(path: Path, ranks: int, words: str) -> tuple[list[dict[str, Any]], str]:
    argv = [*LLAMA, *RUN, *MIXTURE, *words.split(), "--metrics-jsonl", str(path)]
    exits = fork_ranks(ranks, program, argv)
    assert {found.code for found in exits} == {0}, exits
    return rows(path), "".join(found.stdout for found in exits)


def test_rows_and_log_line_tell_what_the_routers_did(tmp_path: Path) -> None:
    whole, printed = run(tmp_path / "one.jsonl", 1, "--moe-per-layer-logging")
    piped, _ = run(
        tmp_path / "two.jsonl", 2, "--moe-per-layer-logging --pipeline-model-parallel-size 2"
    )
    for row, other in zip(whole, piped, strict=True):
        told = {key: value for key, value in row.items() if key.startswith("moe")}
        assert told == pytest.approx({k: other[k] for k in other if k.startswith("moe")}, rel=1e-9)
        assert [key for key in told if "_layer_" not in key] == [*LOSSES, *SHARES]
        for name in LOSSES:
            by_layer = [row[f"moe/{name.removeprefix('moe_')}_layer_{layer}"] for layer in (0, 2)]
            assert row[name] == pytest.approx(sum(by_layer), rel=1e-12)
        for layer in (0, 2):
            loads = [row[f"moe/load_expert_{e}_layer_{layer}"] for e in range(EXPERTS)]
            assert sum(loads) == pytest.approx(1)
            most = row[f"moe/busiest_over_mean_layer_{layer}"]
            assert most == pytest.approx(max(loads) * EXPERTS)
        # Capacity for exactly all choices: what is dropped leaves as much padding.
        assert 0 < row["moe/dropped_share"] == pytest.approx(row["moe/padded_share"])
    shown = [
        tuple(map(float, found))
        for found in re.findall(
            r"\| moe_aux_loss: (\S+) \| moe_z_loss: (\S+) \| loss scale", printed
        )
    ]
    assert shown == [pytest.approx(tuple(row[name] for name in LOSSES), rel=1e-6) for row in whole]


def test_the_start_tells_how_many_parameters_a_token_meets(tmp_path: Path) -> None:
    _, printed = run(tmp_path / "one.jsonl", 1, "")
    total, active = re.findall(
        r"([\d,]+) in total, ([\d,]+) of them active for one token", printed
    )[0]
    unused = 2 * 2 * 3 * 32 * 16  # layers, experts not chosen, matrices of h x f
    assert int(total.replace(",", "")) - int(active.replace(",", "")) == unused


def test_layers_keep_to_themselves_unless_asked(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "one.jsonl", 1, "")
    assert not [key for row in whole for key in row if "_layer_" in key]


def test_dispatched_bytes_and_the_time_of_the_exchanges_are_told(tmp_path: Path) -> None:
    words = (
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type {} --moe-reroute-candidates 1 "
        "--timing-log-level 2"
    )
    exchanged, printed = run(tmp_path / "a.jsonl", 2, words.format("alltoall"))
    gathered, _ = run(tmp_path / "b.jsonl", 2, words.format("allgather"))
    assert re.search(r"moe-dispatch \.+: \(\d", printed)
    for row, other in zip(exchanged, gathered, strict=True):
        # Every token goes to the other rank.
        whole = 2 * 4 * 16 * 32 * 8  # layers, samples, positions, channels, bytes of fp64
        assert other["moe/dispatch_bytes"] == whole
        # top-2 of 4 experts in two halves: each token's choices less what is dropped.
        assert 0 < row["moe/dispatch_bytes"] <= 2 * whole
        assert 0 < row["moe/rerouted_share"] < 1
