"""What flows between stages, and the split of a backward pass into I and W."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

from megatron_lite.mesh.groups import Group, local_group, world_group
from megatron_lite.mesh.p2p import open_links
from megatron_lite.microbatch import WeightGradientStore
from megatron_lite.pipeline.actions import parse_action
from megatron_lite.pipeline.channels import list_channels
from megatron_lite.pipeline.exchange import Exchange, MessageShape, leave
from megatron_lite.tensor.linear import column_parallel_linear, row_parallel_linear
from tests.model.builders import (
    FAMILIES,
    PlainSink,
    build_context,
    build_plan_of,
    build_stage,
    sample_batch,
)
from tests.pool import RankPool

CPU = torch.device("cpu")


def exchange_of(placement: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Exchange:
    return Exchange({}, placement, MessageShape(3, 2, dtype, CPU))


def test_a_hop_inside_a_rank_hands_the_tensor_itself_over() -> None:
    exchange = exchange_of((0, 0))
    output, gradient = torch.rand(3, 1, 2), torch.rand(3, 1, 2)
    exchange.put_output((0, 5), output)
    exchange.hand_forward(parse_action("LOCAL_F0.5"))
    assert exchange.take_input((1, 5)) is output
    exchange.put_input_gradient((1, 5), gradient)
    exchange.hand_backward(parse_action("LOCAL_B1.5"))
    assert exchange.take_output_gradient((0, 5)) is gradient
    exchange.finish()


def test_what_nobody_took_is_a_named_defect_and_is_forgotten() -> None:
    exchange = exchange_of((0, 0))
    exchange.put_output((0, 1), torch.zeros(1))
    exchange.put_input_gradient((1, 2), torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"output of \(0, 1\), input gradient of \(1, 2\)"):
        exchange.finish()
    exchange.finish()


def test_a_tensor_is_given_away_once() -> None:
    exchange = exchange_of((0, 0))
    exchange.put_output((0, 0), torch.zeros(1))
    exchange.hand_forward(parse_action("LOCAL_F0.0"))
    exchange.take_input((1, 0))
    with pytest.raises(KeyError):
        exchange.take_input((1, 0))


def both_ends(dtype: str, samples: int, rank: int, world_size: int) -> Any:
    """Rank 0 sends three microbatches forward, rank 1 their gradients back."""
    kind, world = getattr(torch, dtype), world_group(rank, world_size)
    links = open_links(list_channels((0, 1)), Group("pp", world.ranks, rank, world.process_group))
    exchange = Exchange(links, (0, 1), MessageShape(3, 2, kind, CPU))
    got, released = [], []
    for number in range(3):
        if rank == 0:
            output = torch.full((2, samples, 3), float(number + 1), dtype=kind).transpose(0, 2)
            exchange.put_output((0, number), output)
            exchange.send_forward(parse_action(f"SEND_F0.{number}"))
            released.append(weakref.ref(output))
            del output
        else:
            exchange.receive_forward(parse_action(f"RECV_F1.{number}"), samples)
    for number in range(3):
        if rank == 1:
            arrived = exchange.take_input((1, number))
            got.append(arrived.flatten().tolist())
            exchange.put_input_gradient((1, number), -arrived)
            exchange.send_backward(parse_action(f"SEND_B1.{number}"))
        else:
            exchange.receive_backward(parse_action(f"RECV_B0.{number}"), samples)
            got.append(exchange.take_output_gradient((0, number)).flatten().tolist())
    exchange.finish()
    return got, all(reference() is None for reference in released)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("samples", [1, 4])
def test_messages_arrive_in_their_dtype_and_size_and_are_dropped_when_sent(
    rank_pool: RankPool, dtype: str, samples: int
) -> None:
    (back, dropped), (there, _) = rank_pool.run(
        2, both_ends, dtype=dtype, samples=samples, timeout_s=30
    )
    assert there == [[float(number)] * (6 * samples) for number in (1, 2, 3)]
    assert back == [[-float(number)] * (6 * samples) for number in (1, 2, 3)]
    assert dropped


def test_leave_backpropagates_the_gradient_that_arrives_later_and_keeps_no_output() -> None:
    x, wanted = torch.rand(4, 3, requires_grad=True), torch.rand(4, 3)
    arrived: list[Tensor] = []
    output = x * 3.0 + 1.0
    gone = weakref.ref(output)
    handle = leave(output, lambda: arrived.pop())
    assert handle.shape == ()
    del output
    assert gone() is None
    arrived.append(wanted)
    handle.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, wanted * 3.0)  # type: ignore[arg-type]
    assert not arrived


class Sink:
    """Main gradients by parameter."""

    def __init__(self, *params: nn.Parameter) -> None:
        self.grads = {param: torch.zeros_like(param, requires_grad=False) for param in params}

    def main_grad(self, param: nn.Parameter) -> Tensor:
        return self.grads[param]

    def written(self, param: nn.Parameter) -> None:
        pass


def test_input_and_weight_gradients_equal_torchs_generic_split() -> None:
    torch.manual_seed(3)
    up = nn.Parameter(torch.randn(20, 6, dtype=torch.float64))
    down = nn.Parameter(torch.randn(6, 20, dtype=torch.float64))
    x, gradient = torch.randn(7, 2, 6, dtype=torch.float64), torch.randn(7, 2, 6).double()

    theirs = x.clone().requires_grad_()
    out = functional.linear(functional.gelu(functional.linear(theirs, up)), down)
    (wanted,), groups = stage_backward_input([out], [gradient], [theirs], iter([up, down]))
    assert up.grad is None and down.grad is None
    stage_backward_weight(iter([up, down]), groups)

    sink, group = Sink(up, down), local_group("tp")
    plan = build_plan_of(FAMILIES["llama"])
    context = build_context(plan, None, torch.ones(7, 2))
    store = WeightGradientStore(sink, deferred=True)
    mb = type("mb", (), {"wgrads": store, "native": context.native})()
    ours = x.clone().requires_grad_()
    hidden = functional.gelu(column_parallel_linear(ours, up, None, group, False, mb))
    result = row_parallel_linear(hidden, down, group, False, mb)
    leave(result, lambda: gradient).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(ours.grad, wanted)  # type: ignore[arg-type]
    assert not any(grad.any() for grad in sink.grads.values())  # I leaves all of W
    store.flush()
    for param in (up, down):
        torch.testing.assert_close(sink.grads[param], param.grad, rtol=1e-14, atol=1e-13)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_input_then_weight_gradient_leaves_the_bits_of_the_whole_backward(
    family: str, recompute: str
) -> None:
    model = FAMILIES[family]
    plan = build_plan_of(model, recompute=recompute)
    stage, _ = build_stage(plan)
    tokens, labels, weights = sample_batch(model)

    def gradients(*, split: bool) -> tuple[dict[str, Tensor], int]:
        sink = PlainSink(stage)
        contexts = [build_context(plan, sink, weights) for _ in range(2)]
        later = 0
        for context in contexts:
            loss = stage(tokens, labels, context)
            assert context.wgrads is not None
            if split:
                context.wgrads.defer()
            loss.backward()
            later += len(context.wgrads._queue)
        for context in contexts:
            assert context.wgrads is not None
            context.wgrads.flush()
        return {name: sink.main_grad(stage.param(name)) for name in stage.physical}, later

    whole, none_left = gradients(split=False)
    split, left = gradients(split=True)
    assert none_left == 0
    # q, k and v are one product or three; proj and fc2, fc1 or gate and up: all layers, twice.
    assert left >= 4 * model.num_layers * 2
    for name, wanted in whole.items():
        assert torch.equal(split[name], wanted), name
