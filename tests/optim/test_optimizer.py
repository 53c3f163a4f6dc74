"""Updates on flat buffers against torch's optimizers on whole tensors."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.mesh.collectives import all_reduce
from megatron_lite.native.load import load_native
from megatron_lite.optim.adamw import AdamW
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.optim.recipe import build_rule
from megatron_lite.optim.rules import UpdateRule
from megatron_lite.optim.sgd import SGD
from megatron_lite.shard.buffers import FlatBuffers
from megatron_lite.shard.pieces import StatePiece
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.params import Cut, ParamSpec
from tests.pool import RankPool
from tests.shard.stand import (
    Stand,
    build_buffers,
    build_rank_groups,
    build_stand,
    logical_value,
    model_shape,
    parallel_shape,
    region,
)

ADAMW = AdamW(beta1=0.9, beta2=0.95, eps=1e-8)
both = pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
RATES = ((0.01, 0.1), (0.02, 0.1), (0.005, 0.2))  # (lr, weight decay) of three updates


def build(rule: UpdateRule, native: bool = False, **kwargs: Any) -> tuple[Stand, Optimizer]:
    if native:
        load_native()  # without a library the operations' references run
    stand = build_stand(**kwargs)
    optimizer = Optimizer(stand.buffers, rule, native, stand.weights)
    set_weights(optimizer)
    return stand, optimizer


def set_weights(optimizer: Optimizer) -> None:
    for piece in optimizer.weight_pieces():
        piece.tensor.copy_(region(logical_value(piece.spec, piece.tensor.dtype), piece.box))
    optimizer.after_load("master")


def set_gradients(buffers: FlatBuffers, update: int) -> None:
    for piece in buffers.gradient_pieces():
        whole = logical_value(piece.spec, piece.tensor.dtype, scale=0.1 + update)
        piece.tensor.copy_(region(whole, piece.box))


def whole_weights(rule: UpdateRule, dtype: torch.dtype, clip: float) -> dict[str, Tensor]:
    """The same updates by torch.optim on whole logical tensors."""
    stand = build_stand()
    specs = [piece.spec for piece in stand.buffers.gradient_pieces()]
    weights = {spec.name: logical_value(spec, dtype).requires_grad_() for spec in specs}
    decayed = [weights[spec.name] for spec in specs if spec.decay]
    others = [weights[spec.name] for spec in specs if not spec.decay]
    groups = [{"params": decayed}, {"params": others}]
    reference: torch.optim.Optimizer
    if isinstance(rule, AdamW):
        betas = (rule.beta1, rule.beta2)
        reference = torch.optim.AdamW(groups, betas=betas, eps=rule.eps, foreach=False)
    else:
        assert isinstance(rule, SGD)
        reference = torch.optim.SGD(groups, lr=0.0, momentum=rule.momentum, foreach=False)
    for update, (lr, decay) in enumerate(RATES):
        for spec in specs:
            weights[spec.name].grad = logical_value(spec, dtype, scale=0.1 + update) * clip
        for group, group_decay in zip(reference.param_groups, (decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = lr, group_decay
        reference.step()
    return {name: weight.detach() for name, weight in weights.items()}


def updated(
    rule: UpdateRule, clip: float, rank: int = 0, **kwargs: Any
) -> tuple[Optimizer, list[StatePiece]]:
    stand, optimizer = build(rule, rank=rank, **kwargs)
    for update, (lr, decay) in enumerate(RATES):
        set_gradients(stand.buffers, update)
        optimizer.step(lr, decay, clip)
    return optimizer, list(optimizer.weight_pieces())


@both
@pytest.mark.parametrize("clip", [1.0, 0.25])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 1e-6)]
)
@pytest.mark.parametrize("rule", [ADAMW, SGD(0.9), SGD(0.0)], ids=str)
def test_updates_equal_torchs_optimizers(
    rule: UpdateRule, dtype: str, tolerance: float, clip: float, native: bool
) -> None:
    optimizer, pieces = updated(rule, clip, dtype=dtype, native=native)
    master = getattr(torch, optimizer.buffers.precision.master)
    expected = whole_weights(rule, master, clip)
    assert len(pieces) == len(expected)
    for piece in pieces:
        assert piece.tensor.dtype == master
        torch.testing.assert_close(
            piece.tensor, expected[piece.spec.name], rtol=tolerance, atol=tolerance
        )
    assert optimizer.updates == len(RATES)


@pytest.mark.parametrize("rank", range(4))
def test_a_tensor_rank_updates_its_region_like_the_whole(rank: int) -> None:
    parallel = parallel_shape(tp=4)
    expected = whole_weights(ADAMW, torch.float64, 1.0)
    buffers, _ = build_buffers(model_spec(model_shape(), parallel), parallel, rank)
    optimizer = Optimizer(buffers, ADAMW)
    set_weights(optimizer)
    for update, (lr, decay) in enumerate(RATES):
        set_gradients(buffers, update)
        optimizer.step(lr, decay, 1.0)
    for piece in optimizer.weight_pieces():
        whole = region(expected[piece.spec.name], piece.box)
        torch.testing.assert_close(piece.tensor, whole, rtol=1e-14, atol=1e-14)


@both
def test_parameters_are_the_rounded_masters(native: bool) -> None:
    stand, optimizer = build(ADAMW, native, dtype="bfloat16")
    set_gradients(stand.buffers, 0)
    optimizer.step(0.01, 0.1, torch.tensor(0.5))
    kinds: dict[str, dict[str, Tensor]] = {"param": {}, "master": {}}
    for piece in optimizer.state_pieces():
        if piece.kind in kinds:
            kinds[piece.kind][piece.spec.name] = piece.tensor
    for name, master in kinds["master"].items():
        assert master.dtype == torch.float32
        assert torch.equal(kinds["param"][name], master.bfloat16()), name
    for name, param in stand.params.items():
        assert param.dtype == torch.bfloat16, name


def test_without_masters_the_parameters_are_updated_in_place() -> None:
    _, optimizer = build(ADAMW, dtype="float32")
    assert {piece.kind for piece in optimizer.state_pieces()} == {"param", "exp_avg", "exp_avg_sq"}
    _, optimizer = build(SGD(0.9), dtype="bfloat16")
    assert {piece.kind for piece in optimizer.state_pieces()} == {"param", "master", "momentum"}


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [ADAMW, SGD(0.9)], ids=str)
def test_restored_state_continues_with_equal_bits(
    rule: UpdateRule, dtype: str, native: bool
) -> None:
    stand, optimizer = build(rule, native, dtype=dtype)
    set_gradients(stand.buffers, 0)
    optimizer.step(0.01, 0.1, 1.0)
    saved = [piece.tensor.clone() for piece in optimizer.state_pieces()]
    resumed_stand, resumed = build(rule, native, dtype=dtype)
    for piece, tensor in zip(resumed.state_pieces(), saved, strict=True):
        if piece.kind != "param" or dtype == "float32":  # masters make the parameters
            piece.tensor.copy_(tensor)
    resumed.after_load("master", updates=optimizer.updates)
    for one, other in ((stand, optimizer), (resumed_stand, resumed)):
        set_gradients(one.buffers, 1)
        other.step(0.02, 0.1, 0.5)
    for old, new in zip(optimizer.state_pieces(), resumed.state_pieces(), strict=True):
        assert torch.equal(old.tensor, new.tensor), (old.kind, old.spec.name)


def test_weights_alone_are_widened_into_the_masters() -> None:
    _, optimizer = build(ADAMW, dtype="bfloat16")
    for piece in optimizer.state_pieces():
        if piece.kind == "param":
            piece.tensor.fill_(0.3)
    optimizer.after_load("param")
    for piece in optimizer.weight_pieces():
        assert piece.tensor.unique().tolist() == [torch.tensor(0.3).bfloat16().item()]


@both
def test_vocabulary_padding_and_gaps_stay_zero(native: bool) -> None:
    stand, optimizer = build(ADAMW, native, dtype="float32")
    for update in range(3):
        set_gradients(stand.buffers, update)
        optimizer.step(0.01, 0.1, 1.0)
    held = {key: torch.zeros_like(buffer) for key, buffer in optimizer.weights.items()}
    for piece in stand.buffers.pieces:
        piece.of(held).fill_(1.0)
    for key, buffer in optimizer.weights.items():
        assert buffer[held[key] == 0].count_nonzero() == 0
        assert (held[key] == 0).any()


def test_frozen_parameters_do_not_decay() -> None:
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    stand, optimizer = build(SGD(0.0), frozen=(name,))
    stand.params[name].data.fill_(2.0)
    optimizer.step(0.1, 0.5, 1.0)
    assert stand.params[name].unique().tolist() == [2.0]


def test_the_first_momentum_is_the_gradient() -> None:
    stand, optimizer = build(SGD(0.9))
    set_gradients(stand.buffers, 0)
    optimizer.step(0.01, 0.0, 1.0)
    gradients = {piece.spec.name: piece.tensor for piece in stand.buffers.gradient_pieces()}
    for piece in optimizer.state_pieces():
        if piece.kind == "momentum":
            assert torch.equal(piece.tensor, gradients[piece.spec.name])


class CountOperations(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_operation_is_run_per_parameter(dtype: str, native: bool) -> None:
    counts = []
    for layers in (2, 12):
        model = model_shape(num_layers=layers)
        stand, optimizer = build(ADAMW, native, dtype=dtype, bucket_size=10**9, model=model)
        with CountOperations() as operations:
            stand.sink.start_step(0)
            optimizer.squared_norm()
            optimizer.step(0.01, 0.1, 0.5)
        counts.append(operations.count)
    assert counts[0] == counts[1] < 40


def test_other_optimizers_are_refused_by_name() -> None:
    assert build_rule(Config()) == AdamW(0.9, 0.999, 1e-8)
    assert build_rule(Config(optimizer="sgd", sgd_momentum=0.5)) == SGD(0.5)
    with pytest.raises(UserError, match="--optimizer soap"):
        build_rule(Config(optimizer="soap"))


def norm_parts(rank: int, layout: dict[str, Any], dtype: str) -> tuple[float, float, float]:
    """Gradients that depend on the logical element only; padding poisoned."""
    stand = build_stand(parallel_shape(**layout), rank, dtype=dtype)
    optimizer = Optimizer(stand.buffers, ADAMW)
    for piece in stand.buffers.pieces:
        stand.buffers.gradients[piece.bucket][piece.start : piece.stop] = 7.0
    set_gradients(stand.buffers, 0)
    squares, nonfinite = optimizer.squared_norm()
    assert squares.dtype == torch.float64 and squares.shape == nonfinite.shape == ()
    expected = sum(
        float(logical_value(piece.spec, torch.float64, scale=0.1).square().sum())
        for piece in stand.buffers.gradient_pieces()
    )
    return float(squares), float(nonfinite), expected


@pytest.mark.parametrize(
    "layout",
    [{}, {"dp": 2}, {"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"tp": 2, "dp": 2}],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
def test_c053_the_norm_counts_each_logical_element_once(
    rank_pool: RankPool, layout: dict[str, Any], dtype: str, tolerance: float
) -> None:
    world = parallel_shape(**layout).world_size
    parts = rank_pool.run(world, norm_parts, layout=layout, dtype=dtype)
    # Every rank with a vocabulary region knows the expected value; rank 0 always does.
    assert sum(part[0] for part in parts) == pytest.approx(parts[0][2], rel=tolerance)
    assert sum(part[1] for part in parts) == 0


def unit_norm(rank: int, world_size: int) -> float:
    """One replicated scalar and one cut scalar per rank, all gradients 1."""
    parallel = parallel_shape(tp=world_size)
    groups = build_rank_groups(parallel, rank, kv_heads=world_size)
    cut = ParamSpec("cut", (world_size,), cuts=(Cut(0, "tp", world_size),), uses=("a",))
    specs = (ParamSpec("replicated", (1,), uses=("a",)), cut)
    buffers, _ = build_buffers(specs, parallel, rank, groups, dtype="float32")
    for piece in buffers.gradient_pieces():
        piece.tensor.fill_(1.0)
    squares, _ = Optimizer(buffers, ADAMW).squared_norm()
    all_reduce(squares, groups.world)
    return float(squares.sqrt())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_c053_unit_norm_is_the_root_of_one_plus_tp(rank_pool: RankPool, tp: int) -> None:
    norms = rank_pool.run(tp, unit_norm)
    assert norms == [pytest.approx(math.sqrt(1 + tp), rel=1e-15)] * tp


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_non_finite_gradients_are_counted_and_named(dtype: str, bad: float, native: bool) -> None:
    stand, optimizer = build(ADAMW, native, dtype=dtype)
    set_gradients(stand.buffers, 0)
    name = "decoder.layers.1.mlp.linear_gate.weight"
    (piece,) = (p for p in stand.buffers.gradient_pieces() if p.spec.name == name)
    piece.tensor[0, :2] = bad
    squares, nonfinite = optimizer.squared_norm()
    assert not math.isfinite(squares.item())
    assert nonfinite.item() == (2 if native else 1)  # elements, or blocks that hold them
    assert optimizer.nonfinite_gradients() == {name: 2}


@both
def test_large_finite_gradients_are_not_taken_for_overflow(native: bool) -> None:
    stand, optimizer = build(ADAMW, native, dtype="float32")
    for piece in stand.buffers.gradient_pieces():
        piece.tensor.fill_(1e25)  # its square is beyond fp32
    squares, nonfinite = optimizer.squared_norm()
    elements = sum(piece.tensor.numel() for piece in stand.buffers.gradient_pieces())
    assert squares.item() == pytest.approx(elements * 1e50, rel=1e-6)
    assert nonfinite.item() == 0


@both
def test_groups_follow_the_specs_decay(native: bool) -> None:
    stand, optimizer = build(SGD(0.0), native)
    before = {piece.spec.name: piece.tensor.clone() for piece in optimizer.weight_pieces()}
    for buffer in stand.buffers.gradients.values():
        buffer.zero_()
    optimizer.step(0.5, 0.5, 1.0)
    decays = itertools.groupby(optimizer.weight_pieces(), key=lambda piece: piece.spec.decay)
    for decay, pieces in decays:
        for piece in pieces:
            expected = before[piece.spec.name] * (0.75 if decay else 1.0)
            assert torch.equal(piece.tensor, expected), piece.spec.name
