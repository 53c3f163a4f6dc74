"""Every operation on a GPU against float64: odd shapes, views, streams, devices, graphs, bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_lite.ops import matrix  # noqa: F401  registers its operation
from tests.gpu.problems import BF16, FAMILIES, FP32, KINDS, LARGE_SUMS, Problem
from tests.gpu.running import (
    assert_near,
    assert_same_bits,
    check,
    outputs,
    placed,
    run,
    spread_out,
    widened,
)

pytestmark = pytest.mark.gpu
# Plain torch on every device, or made of other operations.
WITHOUT_CUDA_KERNEL = {"accumulate_product", "cross_entropy"}
PAUSE_CYCLES = 100_000_000  # of the GPU's clock, some 50 ms


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize(("family", "dtype"), KINDS, ids=str)
def test_operations_match_float64(
    device: torch.device, family: str, dtype: torch.dtype, size: str
) -> None:
    if size == "large" and device.type != "cuda":
        pytest.skip("large problems are for a GPU")
    for problem in FAMILIES[family](dtype, size):
        check(problem, device)


@pytest.mark.parametrize(("family", "dtype"), KINDS, ids=str)
def test_views_are_read_where_they_lie(
    device: torch.device, family: str, dtype: torch.dtype
) -> None:
    problems = [p for p in FAMILIES[family](dtype, "small") if p.views]
    for problem in problems:
        arguments = tuple(
            spread_out(x) if number in problem.views and x is not None else x
            for number, x in enumerate(problem.arguments)
        )
        check(replace(problem, arguments=arguments), device)


@pytest.mark.parametrize(("family", "dtype"), KINDS, ids=str)
def test_two_runs_give_the_same_bits(device: torch.device, family: str, dtype: torch.dtype) -> None:
    size = "large" if device.type == "cuda" else "small"
    for problem in FAMILIES[family](dtype, size):
        first = run(problem, device)
        assert_same_bits(run(problem, device), first, str(problem.operation))


def test_every_operation_has_a_cuda_kernel_and_a_problem(place: str) -> None:
    names = {
        name.removeprefix("megatron_lite::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("megatron_lite::")
    }
    key = "CUDA" if place == "cuda" else "CPU"
    served = {
        name
        for name in names
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"megatron_lite::{name}", key)
    }
    if place != "cpu":
        assert served == names - WITHOUT_CUDA_KERNEL
    problems = [p for family in FAMILIES.values() for p in family(torch.bfloat16, "small")]
    tried = {p.operation.name().removeprefix("megatron_lite::") for p in problems}
    assert tried == names - WITHOUT_CUDA_KERNEL


# ---- what only CUDA has --------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_launches_go_to_the_current_stream(
    only_cuda: None, device: torch.device, family: str
) -> None:
    stream = torch.cuda.Stream()
    for problem in FAMILIES[family](torch.bfloat16, "small"):
        right = [placed(x, device) for x in problem.arguments]
        wanted = run(problem, device)
        poisoned = [placed(x, device) for x in problem.arguments]
        for x in poisoned:
            if isinstance(x, Tensor):
                x.untyped_storage().fill_(0)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(PAUSE_CYCLES // 50)
            for target, source in zip(poisoned, right, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            got = outputs(problem, problem.operation, poisoned)
        stream.synchronize()
        assert_same_bits(got, wanted, str(problem.operation))


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_another_device_are_served_there(only_cuda: None, family: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    other = torch.device("cuda", 1)
    for problem in FAMILIES[family](torch.bfloat16, "small"):
        check(problem, other)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_captured_in_a_graph(
    only_cuda: None, device: torch.device, family: str
) -> None:
    for problem in FAMILIES[family](torch.bfloat16, "small"):
        if problem.written:
            continue  # a replay would write once more
        arguments = [placed(x, device) for x in problem.arguments]
        wanted = outputs(problem, problem.operation, arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = outputs(problem, problem.operation, arguments)
        for x in got:
            x.untyped_storage().fill_(0x55)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, wanted, str(problem.operation))


# ---- gradients -----------------------------------------------------------------------------
# Leading arguments that are differentiated.
LEAVES = {
    "norm_forward": 4,
    "activation_forward": 1,
    "attention_forward": 3,
    "rotary": 1,
    "rotary_pair": 2,
    "moe_gather": 2,
    "moe_combine": 2,
    "bias_dropout_residual": 3,
    "masked_softmax": 1,
}


def gradients(problem: Problem, device: torch.device, leaves: int, wide: bool) -> list[Tensor]:
    """Gradients of a weighted sum of the first result, through autograd."""
    arguments = [placed(x, device) for x in problem.arguments]
    if wide:
        arguments = [widened(x) for x in arguments]
    inputs = [x.requires_grad_() for x in arguments[:leaves] if x is not None]
    result = outputs(problem, problem.reference if wide else problem.operation, arguments)[0]
    weights = torch.linspace(-1, 1, result.numel(), device=device).view(result.shape)
    if not result.requires_grad:  # the reference of an empty problem
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(
        result, inputs, weights.to(BF16).to(result.dtype), allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


@pytest.mark.parametrize(
    "family", ["norm", "activation", "rotary", "dropout", "softmax", "attention", "moe"]
)
def test_gradients_through_autograd_match_float64(device: torch.device, family: str) -> None:
    tried = set()
    for problem in FAMILIES[family](BF16 if family == "attention" else FP32, "small"):
        name = problem.operation.name().removeprefix("megatron_lite::")
        if name in LEAVES:
            tried.add(name)
            found = (gradients(problem, device, LEAVES[name], wide) for wide in (False, True))
            assert_near(replace(problem, slack=LARGE_SUMS * problem.slack), *found)
    assert tried
