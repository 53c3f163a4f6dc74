"""Without a GPU (CPU): gloo, no touch of CUDA, one line for what is replaced, equal numbers."""

from pathlib import Path

import pytest

from tests.cases.layouts import LAYOUTS
from tests.cases.ranks import program, program_without_cuda_and_extension
from tests.cases.tiny import SGD, flags
from tests.pool import fork_ranks
from tests.train.program import rows

BARE = "--log-throughput --timing-log-level 2 --log-params-norm"


@pytest.mark.parametrize("layout", ["1", "tp2-sp-dp2"])
def test_c092_training_needs_neither_cuda_nor_the_extension(tmp_path: Path, layout: str) -> None:
    size, words = LAYOUTS[layout].ranks, LAYOUTS[layout].flags
    found = {}
    for name, target in (("with", program), ("without", program_without_cuda_and_extension)):
        metrics = tmp_path / f"{name}.jsonl"
        argv = [*flags(f"{SGD} {BARE} --num-layers 2", steps=2), *words]
        # Nothing of the index may come from the other run.
        argv += ["--data-cache-path", str(tmp_path / name), "--metrics-jsonl", str(metrics)]
        exits = fork_ranks(size, target, argv)
        assert {end.code for end in exits} == {0}, exits
        told = "".join(end.stdout + end.stderr for end in exits)
        assert told.count("the C++ index extension is not built") == (name == "without")
        assert ("gloo" in told) == (size > 1)
        found[name] = [(row["lm_loss"], row["grad_norm"]) for row in rows(metrics)]
    assert found["without"] == found["with"]


def test_c092_the_missing_extension_can_be_made_an_error(tmp_path: Path) -> None:
    argv = [*flags(steps=1), "--require-native", "--data-cache-path", str(tmp_path)]
    exits = fork_ranks(2, program_without_cuda_and_extension, argv)
    assert [end.code for end in exits] == [2, 2]
    told = "".join(end.stderr for end in exits)
    assert told.count("--require-native: the index extension is not built") == 1
    assert "Traceback" not in told
