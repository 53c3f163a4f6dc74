"""Change of layout (RESHARD): a checkpoint means the same in every layout, bit for bit."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.errors import UserError
from megatron_lite.verify.classes import MATCH64
from megatron_lite.verify.session import Layout
from tests.cases.hops import (
    ARGV,
    PRECISION,
    hash_of,
    hop_in_new_processes,
    hop_in_pool,
    train_and_save,
)
from tests.cases.layouts import EXPERT_LAYOUTS, LAYOUTS, REFERENCE, with_axes
from tests.cases.next_steps import Stored, next_steps, train_and_hold
from tests.cases.ranks import held_experts, save_constant_experts
from tests.pool import RankPool

NEAR_BF16 = (2e-2, 5e-2)  # of loss and gradient norm, against another layout's step
MOE = ("--num-experts", "4", "--moe-ffn-hidden-size", "24", "--global-batch-size", "4")
Saved = Callable[[str, str], tuple[Path, str]]


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`saved(precision, layout)`: a checkpoint after two steps, and its logical hash."""
    made: dict[tuple[str, str], tuple[Path, str]] = {}

    def find(precision: str, layout: str) -> tuple[Path, str]:
        key = precision, layout
        if key not in made:
            root = tmp_path_factory.mktemp(f"{precision}-{layout}") / "save"
            more = PRECISION[precision]
            made[key] = root, train_and_save(rank_pool, root, layout, 2, *more)
        return made[key]

    return find


TINY = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 128 --bf16"


@pytest.mark.parametrize("repetition", range(5))
def test_c027_hops_over_tensor_parallel_sizes_come_home_unchanged(
    rank_pool: RankPool, tmp_path: Path, repetition: int
) -> None:
    flags = TINY.split()
    wanted = train_and_save(rank_pool, tmp_path / "0", "tp2", 4, *flags)
    at_home = hop_in_pool(rank_pool, tmp_path / "0", tmp_path / "home", "tp2", *flags)
    for number, layout in enumerate((REFERENCE, "tp4", "tp2"), 1):
        source, target = tmp_path / str(number - 1), tmp_path / str(number)
        figures = hop_in_new_processes(source, target, layout, *flags)
        assert hash_of(target) == wanted, layout
        for found, expected, limit in zip(figures, at_home, NEAR_BF16, strict=True):
            assert found == pytest.approx(expected, rel=limit), layout
    assert figures == at_home  # the same layout: step 5 has the same bits


CHAINS = (
    ("tp2", "dp2", "tp2"),
    ("tp2-sp-dp2", "pp4", "tp4-sp", "zbv", "dp2", "pp2-tp2-sp", "pp2-v2", "tp2-sp-dp2"),
    (
        *("dp2-optim", "zbv-dp2-params", "tp2-sp-dp2-optim", "dp3-params", "1", "dp4-hybrid"),
        *("pp2-dp2-grads", "dp2-params", "tp4", "dp2-grads", "dp2-optim"),
    ),
)


@pytest.mark.parametrize("chain", CHAINS, ids="->".join)
def test_row_45_hops_over_all_axes_come_home_unchanged(
    rank_pool: RankPool, tmp_path: Path, saved: Saved, chain: tuple[str, ...]
) -> None:
    flags = PRECISION["bf16"]
    root, wanted = saved("bf16", chain[0])
    at_home = hop_in_pool(rank_pool, root, tmp_path / "home", chain[0], *flags)
    for number, layout in enumerate(chain[1:], 1):
        target = tmp_path / str(number)
        figures = hop_in_pool(rank_pool, root, target, layout, *flags)
        assert hash_of(target) == wanted, layout
        root = target
    assert figures == at_home  # the layout it began in: the next step has the same bits


def test_a_hash_notices_one_changed_bit(rank_pool: RankPool, tmp_path: Path, saved: Saved) -> None:
    root, wanted = saved("bf16", REFERENCE)
    flags = (*PRECISION["bf16"], "--no-load-optim")
    hop_in_pool(rank_pool, root, tmp_path / "there", "tp2", *flags)
    assert hash_of(tmp_path / "there") != wanted


ODD = "--hidden-size 27 --kv-channels 6 --ffn-hidden-size 46 --ddp-bucket-size 1000"


@pytest.mark.parametrize("layout", with_axes({"dp"}))
def test_c028_optimizer_state_beyond_the_first_bucket_survives(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    small = tuple(ODD.split())
    held, paddings = train_and_hold(rank_pool, tmp_path / "a", layout, 2, *small)
    assert all(sum(padding > 0 for padding in found) >= 4 for found in paddings)
    assert Stored(tmp_path / "a").wrong(held) == []
    before = open_checkpoint(tmp_path / "a")
    sharded = Layout("dp3-optim", 3, LAYOUTS["dp2-optim"].flags)
    for target in (LAYOUTS[REFERENCE], Layout("dp3", 3), sharded):
        hop_in_pool(rank_pool, tmp_path / "a", tmp_path / target.name, target, *small)
        after = open_checkpoint(tmp_path / target.name)
        assert after.names == before.names
        for name in before.names:
            old, new = before.read(name), after.read(name)
            assert int((old == 0).sum()) == int((new == 0).sum()), name
            assert torch.equal(old, new), name
            with pytest.raises(UserError, match="no box"):
                before.read(name, (old.shape[0], *(0 for _ in old.shape[1:])), old.shape)


PP2 = ("--pipeline-model-parallel-size", "2")
EP2 = Layout("ep2", 2, ("--expert-model-parallel-size", "2"))
TP2_EP2 = EXPERT_LAYOUTS["tp2-ep2"]


def test_c029_a_pipeline_checkpoint_becomes_an_expert_parallel_one(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    chain = (Layout("pp2", 2, PP2), EP2, TP2_EP2, Layout("pp2", 2, PP2))
    more = (*MOE, *PRECISION["fp64"])
    wanted = train_and_save(rank_pool, tmp_path / "0", chain[0], 2, *more)
    (alone,) = next_steps(rank_pool, [tmp_path / "0"], tmp_path / "alone", REFERENCE, *more)
    for number, layout in enumerate(chain[1:]):
        source, target = tmp_path / str(number), tmp_path / str(number + 1)
        (step,) = next_steps(rank_pool, [source], target, layout, *more)
        assert Stored(source).wrong(step.loaded) == [], layout
        assert step.differences(alone, MATCH64) == [], layout
        assert hash_of(target) == wanted, layout


# Biases of experts too: the second one's is the same on all ranks of a tensor group.
BIASED = [word for word in ARGV if word != "--disable-bias-linear"]


@pytest.mark.parametrize("tensor", ["1", "2"])
def test_c030_every_expert_is_in_the_checkpoint_under_its_own_number(
    rank_pool: RankPool, tmp_path: Path, tensor: str
) -> None:
    def argv(experts: int) -> tuple[int, list[str]]:
        sizes = ("--expert-model-parallel-size", str(experts))
        sizes += ("--expert-tensor-parallel-size", tensor)
        return experts * int(tensor), [*BIASED, *MOE, *sizes]

    size, words = argv(2)
    rank_pool.run(size, save_constant_experts, argv=[*words, "--save", str(tmp_path)])
    checkpoint = open_checkpoint(tmp_path)
    stored = {name: t.pieces for name, t in checkpoint.found.manifest.tensors.items()}
    experts = [name for name in stored if ".mlp.experts." in name and "/" not in name]
    assert len(experts) == 4 * 3 * 2  # layers x gate, up, fc2 x weight, bias
    for name, pieces in stored.items():
        elements = sum(torch.Size(piece.shape).numel() for piece in pieces)
        assert elements == torch.Size(checkpoint.shape(name)).numel(), name
    for name in experts:
        # The manifest lists experts 0 to 3, each once (in slices).
        listed = {piece.offset[0] + i for piece in stored[name] for i in range(piece.shape[0])}
        assert listed == {0, 1, 2, 3}
        for expert, values in enumerate(checkpoint.read(name)):
            assert (values == expert + 1).all(), name
    for experts_parallel in (1, 2, 4) if tensor == "1" else (1, 2):
        size, words = argv(experts_parallel)
        ranks = rank_pool.run(size, held_experts, argv=[*words, "--load", str(tmp_path)])
        held = 4 // experts_parallel
        for rank, found in enumerate(ranks):
            first = rank // int(tensor) * held  # expert tensor ranks are neighbours
            assert len(found) == 4 * 3 * 2
            for values in found.values():
                assert values == [{expert + 1.0} for expert in range(first, first + held)]


UNEVEN = tuple(
    Layout(name, 2, (*PP2, *flags))
    for name, flags in (
        ("3-5", ("--decoder-first-pipeline-num-layers", "3")),
        ("1-7", ("--decoder-first-pipeline-num-layers", "1")),
        ("layout", ("--pipeline-model-parallel-layout", "Et|ttt|tt|ttL")),
    )
)


@pytest.mark.parametrize(
    "layout",
    [*(LAYOUTS[name] for name in with_axes({"pp"})), *UNEVEN],
    ids=lambda layout: layout.name,
)
def test_c031_layers_keep_their_numbers_over_stages_and_chunks(
    rank_pool: RankPool, tmp_path: Path, layout: Layout
) -> None:
    deep = ("--num-layers", "8")
    wanted = train_and_save(rank_pool, tmp_path / "a", layout, 1, *deep)
    hop_in_pool(rank_pool, tmp_path / "a", tmp_path / "b", REFERENCE, *deep)
    assert hash_of(tmp_path / "b") == wanted
    # From the same initial values one process makes the same first step in every layer.
    train_and_save(rank_pool, tmp_path / "c", REFERENCE, 1, *deep)
    found, expected = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "c")
    for layer in range(8):
        name = f"decoder.layers.{layer}.mlp.linear_fc2.weight"
        assert torch.allclose(found.read(name), expected.read(name), atol=1e-3), layer


MADE_UP: Mapping[str, Layout] = {
    "1": Layout("1"),
    "pp2": Layout("pp2", 2, ("--pipeline-model-parallel-size", "2")),
    "pp2-vpp2": Layout(
        "pp2-vpp2",
        2,
        ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    ),
    "ep2": Layout("ep2", 2, ("--expert-model-parallel-size", "2")),
    "tp2-ep2": Layout(
        "tp2-ep2",
        4,
        ("--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"),
    ),
    "dp2-zero1": Layout("dp2-zero1", 2, ("--use-distributed-optimizer",)),
}


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        ({"pp"}, ("pp2", "pp2-vpp2")),
        ({"vpp"}, ("pp2-vpp2",)),
        ({"ep"}, ("ep2", "tp2-ep2")),
        ({"tp", "ep"}, ("tp2-ep2",)),
        ({"zero"}, ("dp2-zero1",)),
        ({"dp"}, ("ep2", "tp2-ep2", "dp2-zero1")),
        ({"cp"}, ()),
    ],
)
def test_rows_of_an_axis_are_picked_as_soon_as_the_table_has_them(
    axes: set[str], wanted: tuple[str, ...]
) -> None:
    assert with_axes(axes, MADE_UP) == wanted
