"""Runs that several cases look at, each made once per session."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_lite.verify.classes import MATCH64
from megatron_lite.verify.compare import Difference, compare_runs
from megatron_lite.verify.dumps import RunRecord
from megatron_lite.verify.session import RankShare, run_layout
from tests.cases.layouts import EXPERT_LAYOUTS, LAYOUTS, REFERENCE, batch_for
from tests.cases.resumed import Part, run_part
from tests.cases.tiny import SGD, flags
from tests.pool import RankPool

# One KV head, norms on queries and keys, biases everywhere, an odd vocabulary that is padded
# as little as possible, and a clip that always acts: all that is replicated or padded at once.
REPLICATED = (
    f"{SGD} --num-layers 4 --num-query-groups 1 --qk-layernorm --clip-grad 0.05 "
    "--make-vocab-size-divisible-by 1"
)
STEPS = 5


@dataclass(frozen=True)
class Compared:
    """A run in some layout beside the run of one process.

    Attributes:
        record: metrics and dumps of the layout.
        reference: those of one process.
        differences: beyond MATCH64, the one next to the cause first.
        shares: what each rank held at the end.
    """

    record: RunRecord
    reference: RunRecord
    differences: tuple[Difference, ...]
    shares: tuple[RankShare, ...]

    def differing(self, *endings: str) -> list[str]:
        """Differences of the tensors and figures whose names end so."""
        return [str(found) for found in self.differences if found.name.endswith(endings)]

    def bits(self, *endings: str) -> dict[tuple[str, tuple[int, ...]], list[str]]:
        """(name, offset) -> hash of the held bits on every rank that holds this region."""
        found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for share in self.shares:
            for name, offset, digest in share.weights:
                if name.endswith(endings):
                    found.setdefault((name, offset), []).append(digest)
        return found


Replicated = Callable[[str], Compared]


@pytest.fixture(scope="session")
def replicated(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Replicated:
    """`replicated(layout)`: five SGD steps of the model with everything replicated."""
    root: Path = tmp_path_factory.mktemp("replicated")
    runs: dict[tuple[str, int], tuple[RunRecord, list[RankShare]]] = {}

    def run(name: str, batch: int) -> tuple[RunRecord, list[RankShare]]:
        key = name, batch
        if key not in runs:
            text = f"{REPLICATED} --global-batch-size {batch}"
            argv = flags(text, steps=STEPS, vocabulary=101)
            runs[key] = run_layout(rank_pool, root / f"{name}-{batch}", argv, LAYOUTS[name])
        return runs[key]

    def compared(name: str) -> Compared:
        batch = batch_for(name, 4)
        (reference, _), (record, shares) = run(REFERENCE, batch), run(name, batch)
        found = compare_runs(reference, record, MATCH64)
        return Compared(record, reference, tuple(found), tuple(shares))

    return compared


# TINY of the cases with four experts in every layer and their balancing loss.
MIXTURE = (
    f"{SGD} --num-layers 4 --num-experts 4 --moe-ffn-hidden-size 64 --moe-router-topk 2 "
    "--moe-aux-loss-coeff 0.01 --clip-grad 0.05 --disable-bias-linear --global-batch-size 4 "
    "--log-num-zeros-in-grad"
)


@pytest.fixture(scope="session")
def mixture(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Replicated:
    """`mixture(layout)`: two SGD steps of a mixture of experts, beside one process."""
    root: Path = tmp_path_factory.mktemp("mixture")
    runs: dict[str, tuple[RunRecord, list[RankShare]]] = {}

    def run(name: str) -> tuple[RunRecord, list[RankShare]]:
        if name not in runs:
            argv = flags(MIXTURE, steps=2)
            runs[name] = run_layout(rank_pool, root / name, argv, EXPERT_LAYOUTS[name])
        return runs[name]

    def compared(name: str) -> Compared:
        (reference, _), (record, shares) = run(REFERENCE), run(name)
        found = compare_runs(reference, record, MATCH64)
        return Compared(record, reference, tuple(found), tuple(shares))

    return compared


Resumed = Callable[[str], tuple[Part, Part]]


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """`resumed(layout)`: ten iterations at once, and the last five from the checkpoint."""
    runs: dict[str, tuple[Part, Part]] = {}

    def find(layout: str) -> tuple[Part, Part]:
        if layout not in runs:
            root = tmp_path_factory.mktemp("resumed")
            whole = run_part(root / "whole", layout)
            more = ("--load", str(whole.save), "--ckpt-step", "5")
            runs[layout] = whole, run_part(root / "rest", layout, *more)
        return runs[layout]

    return find
