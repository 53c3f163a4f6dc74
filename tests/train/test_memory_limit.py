"""A run whose optimizer state does not fit into memory trains with the state in a file."""

import json
from pathlib import Path

import pytest

from megatron_lite.verify.tiny_data import write_tiny_dataset
from tests.pool import RankExit, fork_ranks
from tests.train.limited import limited_rank
from tests.train.program import OWN_DATA

# 12.7 million parameters: 76 MB of masters and moments per rank, with 25 of parameters, 51 of
# gradients and as much of a message. The limit lies between what the run needs with the
# state and without it.
MORE_BYTES = 310 * 2**20
VOCABULARY = 65000
MODEL = (
    "--num-layers 1 --hidden-size 192 --num-attention-heads 4 --ffn-hidden-size 512 "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 --bf16 --optimizer adam "
    "--use-distributed-optimizer --split 1,0,0 --global-batch-size 2 --train-iters 2 "
    "--eval-iters 0"
)


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    prefix = tmp_path / "tiny"
    write_tiny_dataset(prefix, VOCABULARY, 16, 64)
    return [*OWN_DATA, *MODEL.split(), "--data-path", str(prefix)]


def trained(argv: list[str], limit: int, rows: Path) -> tuple[list[RankExit], list[list[float]]]:
    exits = fork_ranks(2, limited_rank, [*argv, "--metrics-jsonl", str(rows)], limit, timeout=200.0)
    lines = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    steps = [line for line in lines if line["kind"] == "train"]
    return exits, [[line["lm_loss"], line["grad_norm"]] for line in steps]


def test_state_that_exceeds_the_memory_trains_from_a_file_with_the_same_numbers(
    tmp_path: Path, argv: list[str]
) -> None:
    exits, expected = trained(argv, 0, tmp_path / "unlimited")
    assert [exit.code for exit in exits] == [0, 0]
    assert len(expected) == 2

    exits, rows = trained(argv, MORE_BYTES, tmp_path / "resident")
    assert len(rows) < 2
    assert all(exit.code in (1, 2) for exit in exits)
    told = "".join(exit.stderr for exit in exits)
    assert "no memory on cpu" in told or "not enough memory" in told
    assert "Traceback" not in told

    away = ["--optimizer-offload", "disk", "--offload-dir", str(tmp_path)]
    exits, rows = trained([*argv, *away], MORE_BYTES, tmp_path / "offloaded")
    assert [exit.code for exit in exits] == [0, 0], exits
    assert rows == expected
