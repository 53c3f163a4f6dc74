"""State of the optimizers beyond moments: saved, resumed in other layouts, evaluated, frozen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.model.init import initial_value
from megatron_lite.spec.shards import Box
from megatron_lite.train.parts import Parts
from megatron_lite.train.report import measure_params_norm
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from megatron_lite.train.summary import estimate_ledger
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN, build_and, rows, save_now, train_rank

BASE = [*LLAMA, *RUN, "--fp64", "--eval-iters", "0", "--lr-decay-iters", "10"]
SHARDED = "--ddp-bucket-size 1500 --data-parallel-sharding-strategy"
LAYOUTS: dict[str, tuple[int, str]] = {
    "one": (1, ""),
    "dp2-optim": (2, f"{SHARDED} optim"),
    "dp2-params": (2, f"{SHARDED} optim_grads_params"),
    "tp2-sp-dp2-grads": (
        4,
        f"--tensor-model-parallel-size 2 --sequence-parallel {SHARDED} optim_grads",
    ),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}
KINDS = {
    "muon": "--optimizer muon --weight-ema-decay 0.75",
    "adafactor": "--optimizer adafactor --adafactor-beta1 0.5 --freeze *.layers.1.* embedding.*",
    "groups": (
        "--decoupled-lr 0.02 --decoupled-min-lr 0.002 --weight-ema-decay 0.5 "
        "--param-group *.mlp.*:lr_mult=0.5 *.linear_[qkv].*:lr_mult=2,wd_mult=0"
    ),
}
HOPS = [("one", "tp2-sp-dp2-grads"), ("dp2-params", "pp2"), ("tp2-sp-dp2-grads", "dp2-optim")]
# Stacks of experts, and state of the routers that no gradient changes.
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 0.01 --micro-batch-size 1"
)
MIXTURES = {
    "experts-muon": f"{EXPERTS} --optimizer muon",
    "experts-adafactor": f"{EXPERTS} --optimizer adafactor --adafactor-beta1 0.5",
}
EP2 = "--expert-model-parallel-size 2"
MIXED: dict[str, tuple[int, str]] = {
    "ep2-dp4-params": (4, f"{EP2} {SHARDED} optim_grads_params"),
    "tp2-ep2-etp2-optim": (
        4,
        f"--tensor-model-parallel-size 2 --sequence-parallel {EP2} {SHARDED} optim",
    ),
}
MIXED_HOPS = [("one", "ep2-dp4-params"), ("ep2-dp4-params", "tp2-ep2-etp2-optim")]
MOVES = [
    *((kind, *hop) for kind in KINDS for hop in HOPS),
    *((kind, *hop) for kind in MIXTURES for hop in MIXED_HOPS),
]


def layout_of(name: str) -> tuple[int, str]:
    return {**LAYOUTS, **MIXED}[name]


def argv_of(kind: str, layout: str, *more: str) -> list[str]:
    return [*BASE, *{**KINDS, **MIXTURES}[kind].split(), *layout_of(layout)[1].split(), *more]


def resave(argv: Sequence[str], rank: int, world_size: int) -> None:
    """Load and save again."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> None:
        save_now(parts, state)

    build_and(use, argv, rank, world_size)


@pytest.mark.parametrize(("kind", "first", "second"), MOVES)
def test_state_moves_between_layouts_with_its_bits_and_the_run_goes_on(
    rank_pool: RankPool, tmp_path: Path, kind: str, first: str, second: str
) -> None:
    whole, parts, again = (str(tmp_path / name) for name in ("whole", "parts", "again"))
    every = ("--save-interval", "2")
    ranks = layout_of(first)[0]
    run = [*argv_of(kind, first, "--save", whole, *every), "--exit-interval", "4"]
    rank_pool.run(ranks, train_rank, argv=run)
    loading = ("--load", whole, "--ckpt-step", "2", "--save-interval", "2")
    ranks = layout_of(second)[0]
    rank_pool.run(ranks, resave, argv=argv_of(kind, second, *loading, "--save", again))
    saved, moved = open_checkpoint(whole, 2), open_checkpoint(again, 2)
    assert saved.names == moved.names
    for name in saved.names:
        assert torch.equal(saved.read(name), moved.read(name)), name
    run = [*argv_of(kind, second, *loading, "--save", parts), "--exit-interval", "4"]
    rank_pool.run(ranks, train_rank, argv=run)
    expected, found = open_checkpoint(whole, 4), open_checkpoint(parts, 4)
    for name in expected.names:
        torch.testing.assert_close(
            found.read(name), expected.read(name), rtol=1e-9, atol=1e-10, msg=name
        )


def norms(argv: Sequence[str], rank: int, world_size: int) -> tuple[float, float, float]:
    """Norm that is logged after a step, of what is trained, and of everything."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> tuple[float, float, float]:
        TrainStep(parts, state).run()
        params = [*parts.stage.parameters()]
        everything, trained = (
            sum(float(p.double().square().sum()) for p in chosen) ** 0.5
            for chosen in (params, [p for p in params if p.requires_grad])
        )
        return measure_params_norm(parts), trained, everything

    found: tuple[float, float, float] = build_and(use, argv, rank, world_size)
    return found


def test_state_of_routers_is_no_part_of_the_norm_of_the_parameters(rank_pool: RankPool) -> None:
    ((logged, trained, everything),) = rank_pool.run(1, norms, argv=argv_of("experts-muon", "one"))
    assert logged == pytest.approx(trained, rel=1e-12)
    assert everything > 1.5 * trained  # counts of tokens are among it


def test_each_group_has_the_state_of_its_rule_and_nothing_else(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    found = {}
    for kind in KINDS:
        save = ("--save", str(tmp_path / kind), "--save-interval", "1", "--exit-interval", "1")
        rank_pool.run(1, train_rank, argv=argv_of(kind, "one", *save))
        found[kind] = open_checkpoint(tmp_path / kind)
    kinds: dict[str, dict[str, set[str]]] = {kind: {} for kind in KINDS}
    for kind, checkpoint in found.items():
        for name in checkpoint.names:
            *path, weight = name.split("/")
            kinds[kind].setdefault(weight, set()).update(path[1:])
    matrix, norm = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"
    table, frozen = "embedding.word_embeddings.weight", "decoder.layers.1.mlp.linear_fc2.weight"
    assert kinds["muon"][matrix] == {"muon_momentum", "ema"}
    assert kinds["muon"][table] == kinds["muon"][norm] == {"exp_avg", "exp_avg_sq", "ema"}
    assert kinds["adafactor"][matrix] == {"exp_avg", "exp_avg_sq_row", "exp_avg_sq_column"}
    assert kinds["adafactor"][norm] == {"exp_avg", "exp_avg_sq"}
    assert kinds["adafactor"][frozen] == kinds["adafactor"][table] == set()
    assert found["adafactor"].shape(f"optim/exp_avg_sq_row/{matrix}") == (32,)
    assert found["adafactor"].shape(f"optim/exp_avg_sq_column/{matrix}") == (48,)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_parameters_stay_as_they_were_drawn(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2")
    rank_pool.run(LAYOUTS[layout][0], train_rank, argv=argv_of("adafactor", layout, *save))
    checkpoint = open_checkpoint(tmp_path)
    specs = rank_pool.run(1, specs_of, argv=argv_of("adafactor", "one"))[0]
    frozen = 0
    for spec in specs:
        whole = Box((0,) * len(spec.shape), spec.shape)
        drawn = initial_value(spec, whole, 1234, torch.float64)
        is_frozen = ".layers.1." in spec.name or spec.name.startswith("embedding.")
        frozen += is_frozen
        assert torch.equal(checkpoint.read(spec.name), drawn) == is_frozen, spec.name
    assert frozen > 5


def specs_of(argv: Sequence[str], rank: int, world_size: int) -> Any:
    return build_and(lambda parts, *_: parts.specs, argv, rank, world_size)


def averaged(argv: Sequence[str], rank: int, world_size: int) -> tuple[float, float, bool]:
    """After two steps: largest difference of the average from its definition, of the weights
    evaluated in its place from it, and whether the weights come back with their bits."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> tuple[float, float, bool]:
        optimizer, wide = parts.optimizer, torch.float64

        def values(kind: str) -> dict[Any, torch.Tensor]:
            pieces = optimizer.state_pieces()
            return {
                (p.spec.name, p.box): p.tensor.to(wide, copy=True) for p in pieces if p.kind == kind
            }

        owned = {(p.spec.name, p.box): p.tensor.to(wide) for p in optimizer.weight_pieces()}
        expected = {key: value.clone() for key, value in owned.items()}
        for _ in range(2):
            TrainStep(parts, state).run()
            for piece in optimizer.weight_pieces():
                key = (piece.spec.name, piece.box)
                expected[key] = 0.75 * expected[key] + 0.25 * piece.tensor
        average = values("ema")
        assert average.keys() == expected.keys()
        first = max(float((average[key] - expected[key]).abs().max()) for key in average)
        before = values("param")
        with optimizer.averaged_weights():
            pieces = list(optimizer.buffers.value_pieces())
            held = {(p.spec.name, p.box): p.tensor.to(wide, copy=True) for p in pieces}
            same = [k for k in held if k in average]
            second = max((float((held[k] - average[k]).abs().max()) for k in same), default=0.0)
            assert all(not torch.equal(held[key], before[key]) for key in held)
        after = values("param")
        return first, second, all(torch.equal(after[key], before[key]) for key in before)

    found: tuple[float, float, bool] = build_and(use, argv, rank, world_size)
    return found


@pytest.mark.parametrize("layout", ["one", "dp2-optim", "dp2-params", "pp2"])
def test_the_average_follows_the_weights_and_can_stand_in_for_them(
    rank_pool: RankPool, layout: str
) -> None:
    ranks = LAYOUTS[layout][0]
    for first, second, restored in rank_pool.run(ranks, averaged, argv=argv_of("muon", layout)):
        assert first < 1e-15 and second == 0.0 and restored


def test_evaluation_with_the_average_tells_its_loss(rank_pool: RankPool, tmp_path: Path) -> None:
    """With decay 0 the average is the weights; with a long memory it is the start's."""
    losses = {}
    evaluation = ("--eval-iters", "1", "--eval-interval", "2", "--exit-interval", "2")
    for decay, switch in (("0", ()), ("0", ("--eval-with-ema",)), ("0.99", ("--eval-with-ema",))):
        for layout in ("one", "dp2-params"):
            path = tmp_path / f"{decay}-{len(switch)}-{layout}.jsonl"
            argv = [*BASE, "--weight-ema-decay", decay, *LAYOUTS[layout][1].split()]
            argv += [*evaluation, *switch, "--metrics-jsonl", str(path)]
            rank_pool.run(LAYOUTS[layout][0], train_rank, argv=argv)
            losses[decay, len(switch), layout] = rows(path, "valid")[0]["lm_loss"]
    for layout in ("one", "dp2-params"):
        assert losses["0", 0, layout] == losses["0", 1, layout] != losses["0.99", 1, layout]
    assert losses["0.99", 1, "one"] == pytest.approx(losses["0.99", 1, "dp2-params"], rel=1e-10)


def moved(argv: Sequence[str], rank: int, world_size: int) -> dict[str, float]:
    """Change of every weight in the first SGD step over its gradient."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> dict[str, float]:
        before = [p.tensor.clone() for p in parts.optimizer.weight_pieces()]
        step = TrainStep(parts, state)
        step.run()
        gradients = parts.buffers.gradient_pieces()
        pieces = zip(parts.optimizer.weight_pieces(), before, gradients, strict=True)
        return {
            weight.spec.name: float((old - weight.tensor).norm() / gradient.tensor.norm())
            for weight, old, gradient in pieces
        }

    found: dict[str, float] = build_and(use, argv, rank, world_size)
    return found


@pytest.mark.parametrize("layout", ["one", "dp2-optim", "pp2"])
def test_every_group_moves_at_its_own_rate(rank_pool: RankPool, layout: str) -> None:
    argv = [*BASE, "--optimizer", "sgd", "--sgd-momentum", "0", "--weight-decay", "0"]
    argv += ["--clip-grad", "0", "--lr-decay-style", "constant", "--native-ops", "off"]
    argv += ["--decoupled-lr", "0.03", "--param-group", "*.mlp.*:lr_mult=0.5", "output*:lr_mult=2"]
    argv += LAYOUTS[layout][1].split()
    seen: dict[str, float] = {}
    for found in rank_pool.run(LAYOUTS[layout][0], moved, argv=argv):
        seen |= found
    assert len(seen) > 20
    for name, rate in seen.items():
        expected = 0.01
        if ".mlp." in name:
            expected = 0.005
        elif name.startswith("output"):
            expected = 0.06
        elif name.startswith("embedding"):
            expected = 0.03
        assert rate == pytest.approx(expected, rel=1e-9), name


def state_bytes(argv: Sequence[str], rank: int, world_size: int) -> dict[str, int]:
    """Bytes of state and of parameters on this rank, as held and as the ledger has them."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> dict[str, int]:
        found: dict[str, set[int]] = {"param": set(), "moment": set()}
        sizes: dict[int, int] = {}
        for piece in parts.optimizer.state_pieces():
            if piece.kind != "master":
                storage = piece.tensor.untyped_storage()
                found["param" if piece.kind == "param" else "moment"].add(storage.data_ptr())
                sizes[storage.data_ptr()] = storage.nbytes()
        # Also where a rank owns nothing but padding, of which no piece tells.
        for values in parts.buffers.owned_values.values():
            storage = values.untyped_storage()
            found["param"].add(storage.data_ptr())
            sizes[storage.data_ptr()] = storage.nbytes()
        ledger = estimate_ledger(parts, parts.groups.pp.rank).state
        return {
            "parameters": sum(sizes[address] for address in found["param"]),
            "ledger parameters": ledger.parameters,
            "moments": sum(sizes[address] for address in found["moment"]),
            "ledger moments": ledger.moments,
        }

    found: dict[str, int] = build_and(use, argv, rank, world_size)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ledger_knows_the_state_of_every_kind(
    rank_pool: RankPool, kind: str, layout: str
) -> None:
    ranks = rank_pool.run(LAYOUTS[layout][0], state_bytes, argv=argv_of(kind, layout))
    for found in ranks:
        assert found["parameters"] == found["ledger parameters"]
    held = sum(found["moments"] for found in ranks)
    told = sum(found["ledger moments"] for found in ranks)
    # Which rank of a shard group has which group's state differs; what they have does not.
    assert held == pytest.approx(told, rel=0.01)
    if layout in ("one", "pp2"):
        for found in ranks:
            # Row statistics leave padding rows of the vocabulary out: two of fp64 here.
            over = found["ledger moments"] - found["moments"]
            assert 0 <= over <= (16 if kind == "adafactor" else 0)


def sent(argv: Sequence[str], rank: int, world_size: int) -> list[tuple[str, str, int]]:
    """Collectives of the update of the second step."""
    recorder = Recorder()

    def use(parts: Parts, state: TrainState, status: RunStatus) -> list[tuple[str, str, int]]:
        TrainStep(parts, state).run()
        recorder.clear()
        parts.optimizer.step(0.01, 0.0, 1.0)
        parts.gathered.settle()
        gathers = [(r.op, r.group, r.elements) for r in recorder.records]
        buckets = [bucket.elements for bucket in parts.buffers.layout.buckets]
        return [*gathers, *(("bucket", "", elements) for elements in buckets)]

    found: list[tuple[str, str, int]] = build_and(use, argv, rank, world_size, recorder)
    return found


def test_muon_gathers_each_bucket_with_matrices_once(rank_pool: RankPool) -> None:
    whole = rank_pool.run(2, sent, argv=argv_of("muon", "dp2-optim"))
    for found in whole:
        buckets = [n for op, _, n in found if op == "bucket"]
        gathered = [n for op, group, n in found if op == "all_gather"]
        updates, parameters = gathered[: -len(buckets)], gathered[-len(buckets) :]
        assert sorted(parameters) == sorted(buckets)
        assert 0 < len(updates) <= len(buckets) and set(updates) <= set(buckets)
    alone = rank_pool.run(1, sent, argv=argv_of("muon", "one"))[0]
    assert {op for op, _, _ in alone} == {"bucket"}
