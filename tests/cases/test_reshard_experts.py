"""Checkpoints of mixtures of experts: every layout of the experts reads every other's.

One mixture with all that a checkpoint may lose: balancing biases and counts in the
accumulation dtype, a gated shared expert, a dense layer among MoE layers, a further depth of
prediction. In bf16 there are masters beside the weights; fp64 shows in the step that follows
what rounding would hide. A third of the pairs, and each with one process; the others with
MLITE_PARITY_FULL=1.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.verify.classes import MATCH64
from tests.cases.hops import PRECISION, hash_of, train_and_save
from tests.cases.layouts import EXPERT_LAYOUTS, REFERENCE
from tests.cases.next_steps import NextStep, Stored, loads, next_steps
from tests.pool import RankPool

pytestmark = pytest.mark.timeout(240)  # seconds where the cores are not shared
_WORDS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-layer-freq ([0]+[1]*3) "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01 --moe-router-load-balancing-type seq_aux_loss "
    "global_aux_loss --moe-aux-loss-coeff 0.01 0.01 --moe-input-jitter-eps 0.01 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --mtp-num-layers 1 "
    "--global-batch-size 4"
)
MIXTURE = _WORDS.split()
NAMES = tuple(EXPERT_LAYOUTS)
STATES = ("mlp.router.expert_bias", "mlp.router.expert_counts")
Saved = Callable[[str, str], Path]


def meets(source: str, target: str) -> bool:
    """Whether the second goes on from the first's checkpoint."""
    if os.environ.get("MLITE_PARITY_FULL") == "1" or REFERENCE in (source, target):
        return True
    return source == target or (NAMES.index(source) + NAMES.index(target)) % 3 == 0


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`saved(precision, layout)`: checkpoints after two and, in bf16, four steps."""
    made: dict[tuple[str, str], Path] = {}

    def find(precision: str, name: str) -> Path:
        if (precision, name) not in made:
            root = tmp_path_factory.mktemp(precision) / name
            steps = 4 if precision == "bf16" else 2
            more = (*MIXTURE, *PRECISION[precision], "--save-interval", "2")
            train_and_save(rank_pool, root, EXPERT_LAYOUTS[name], steps, *more)
            made[precision, name] = root
        return made[precision, name]

    return find


@pytest.fixture(scope="module")
def alone(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory, saved: Saved
) -> dict[str, NextStep]:
    """Where one process goes from each layout's checkpoint."""
    roots, save = [saved("fp64", name) for name in NAMES], tmp_path_factory.mktemp("alone")
    found = next_steps(rank_pool, roots, save, REFERENCE, *MIXTURE, *PRECISION["fp64"])
    return dict(zip(NAMES, found, strict=True))


@pytest.mark.parametrize("layout", NAMES)
def test_row_45_a_mixture_resumes_bit_by_bit(
    rank_pool: RankPool, tmp_path: Path, saved: Saved, layout: str
) -> None:
    whole, rest = saved("bf16", layout), tmp_path / "rest"
    more = (*MIXTURE, *PRECISION["bf16"], "--load", str(whole), "--ckpt-step", "2")
    hashed = train_and_save(rank_pool, rest, EXPERT_LAYOUTS[layout], 4, *more)
    first, second = open_checkpoint(whole), open_checkpoint(rest)
    assert first.step == second.step == 4
    assert first.names == second.names
    for name in first.names:
        assert torch.equal(first.read(name), second.read(name)), name
    assert hashed == hash_of(whole)


@pytest.mark.parametrize("layout", NAMES)
def test_a_checkpoint_of_a_mixture_has_every_element_once_and_the_routers_state(
    saved: Saved, layout: str
) -> None:
    checkpoint, one = open_checkpoint(saved("bf16", layout)), open_checkpoint(saved("bf16", "1"))
    assert checkpoint.names == one.names
    for name in checkpoint.names:
        record = checkpoint.found.manifest.tensors[name]
        assert record.shape == one.shape(name)
        stored = sum(torch.Size(piece.shape).numel() for piece in record.pieces)
        assert stored == torch.Size(record.shape).numel(), name
    states = [name for name in checkpoint.names if name.endswith(STATES)]
    assert len(states) == 2 * 4  # of three MoE layers and the further depth's
    assert {checkpoint.dtype(name) for name in states} == {torch.float32}
    for kind in STATES:  # a bias may be on its way back through 0
        assert any(checkpoint.read(name).any() for name in states if name.endswith(kind)), kind
    for name in states:
        assert not any(other.endswith(f"/{name}") for other in checkpoint.names), name


@pytest.mark.parametrize("target", NAMES)
def test_row_45_every_layout_of_experts_goes_on_from_others_checkpoints(
    rank_pool: RankPool, tmp_path: Path, saved: Saved, alone: dict[str, NextStep], target: str
) -> None:
    first = NAMES.index(target)
    order = [name for name in (*NAMES[first:], *NAMES[:first]) if meets(name, target)]
    roots, place = [saved("fp64", name) for name in order], EXPERT_LAYOUTS[target]
    more = (*MIXTURE, *PRECISION["fp64"])
    found = next_steps(rank_pool, roots, tmp_path / "save", place, *more)
    for name, root, step in zip(order, roots, found, strict=True):
        assert Stored(root).wrong(step.loaded) == [], name
        assert step.differences(alone[name], MATCH64) == [], name
    assert hash_of(tmp_path / "save") == hash_of(roots[-1])


@pytest.mark.parametrize("target", ["dp4-ep2-etp2", "dp4-ep2-params"])
def test_row_45_masters_and_moments_of_experts_keep_their_bits(
    rank_pool: RankPool, tmp_path: Path, saved: Saved, target: str
) -> None:
    roots = [saved("bf16", name) for name in NAMES]
    place, more = EXPERT_LAYOUTS[target], (*MIXTURE, *PRECISION["bf16"])
    found = loads(rank_pool, roots, tmp_path / "save", place, *more)
    for name, root, held in zip(NAMES, roots, found, strict=True):
        assert Stored(root).wrong(held) == [], name
    assert hash_of(tmp_path / "save") == hash_of(roots[-1])


def test_every_layout_of_experts_reads_others_and_is_read_by_others() -> None:
    for one in NAMES:
        read = {other for other in NAMES if meets(other, one)}
        assert read == {other for other in NAMES if meets(one, other)}
        assert {one, REFERENCE} < read, one
