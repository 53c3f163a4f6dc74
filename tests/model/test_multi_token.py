"""Multi-token prediction against plain autograd, and its targets."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from megatron_lite.model.multi_token import further_weights, shift
from tests.model.builders import (
    LLAMA,
    PlainSink,
    build_context,
    build_plan_of,
    build_stage,
    logical_pieces,
    sample_batch,
)
from tests.model.reference import reference_further_logits, reference_logits

ORIGIN = {"tp": 0, "cp": 0, "dp": 0, "pp": 0}
FACTOR, DEPTHS = 0.3, 2


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_equal_plain_autograd(tied: bool) -> None:
    model = replace(LLAMA, mtp_depths=DEPTHS, mtp_loss_factor=FACTOR, tied=tied)
    plan = build_plan_of(model)
    stage, _ = build_stage(plan)
    tokens, labels, mask = sample_batch(model)
    sink = PlainSink(stage)
    mb = build_context(plan, sink, mask)
    counts = [further_weights(mask, depth).sum() for depth in range(DEPTHS)]
    names = {f"mtp_{depth + 1}": count for depth, count in enumerate(counts)}
    mb = replace(mb, denominators={**mb.denominators, **names})
    loss = stage(tokens, labels, mb)
    loss.backward()
    weights = {
        spec.name: piece.detach().clone().requires_grad_()
        for spec, piece in logical_pieces(stage, ORIGIN, lambda p: p.data)
    }
    stream = torch.cat((tokens, labels[-1:]))

    def mean(logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        found = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (found.view_as(counted) * counted).sum() / counted.sum()

    expected = mean(reference_logits(model, weights, tokens), labels, mask)
    for depth, logits in enumerate(reference_further_logits(model, weights, stream)):
        counted = torch.stack(
            [mask[i : i + depth + 2].prod(0) for i in range(len(logits))]
        )  # all targets from its own first to this one count
        term = mean(logits, stream[depth + 2 :], counted)
        expected = expected + FACTOR / DEPTHS * term
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-12)
    grads = {spec.name: grad for spec, grad in logical_pieces(stage, ORIGIN, sink.main_grad)}
    assert grads.keys() == weights.keys()
    for name, grad in grads.items():
        assert torch.allclose(grad, weights[name].grad, rtol=1e-9, atol=1e-13), name


def test_no_target_lies_past_the_sequence_nor_behind_a_masked_end() -> None:
    mask = torch.tensor([1.0, 1, 1, 0, 1, 1]).unsqueeze(1)  # the fourth target ends a document
    assert further_weights(mask, 0).flatten().tolist() == [1, 1, 0, 0, 1, 0]
    assert further_weights(mask, 1).flatten().tolist() == [1, 0, 0, 0, 0, 0]
    assert further_weights(mask, 9).sum() == 0


def test_tokens_past_the_end_are_0() -> None:
    tokens = torch.arange(1, 5).unsqueeze(1)
    assert shift(tokens, 1).flatten().tolist() == [2, 3, 4, 0]
    assert shift(tokens, 7).flatten().tolist() == [0, 0, 0, 0]
