"""Loss and every logical gradient of one stage against plain autograd, in fp64."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from megatron_lite.model.gpt import StageOptions
from tests.model.builders import (
    FAMILIES,
    GPT2,
    LLAMA,
    PlainSink,
    build_context,
    build_plan_of,
    build_stage,
    logical_pieces,
    sample_batch,
)
from tests.model.reference import reference_logits

ORIGIN = {"tp": 0, "cp": 0, "dp": 0, "pp": 0}


def run_stage(plan, options=None, deferred=False, frozen="(?!)"):
    stage, _ = build_stage(plan, options=options)
    for name in stage.physical:
        stage.param(name).requires_grad_(not re.match(frozen, name))
    tokens, labels, weights = sample_batch(plan.model)
    sink = PlainSink(stage)
    mb = build_context(plan, sink, weights, deferred=deferred)
    loss = stage(tokens, labels, mb)
    loss.backward()
    assert mb.wgrads is not None
    mb.wgrads.flush()
    grads = {s.name: g for s, g in logical_pieces(stage, ORIGIN, sink.main_grad)}
    return stage, sink, loss.detach(), grads, mb


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_plain_autograd(family):
    plan = build_plan_of(FAMILIES[family])
    stage, _, loss, grads, mb = run_stage(plan)
    weights = {
        spec.name: piece.detach().clone().requires_grad_()
        for spec, piece in logical_pieces(stage, ORIGIN, lambda p: p.data)
    }
    tokens, labels, loss_weights = sample_batch(plan.model)
    logits = reference_logits(plan.model, weights, tokens)
    per_token = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weighted = per_token.view_as(loss_weights) * loss_weights
    expected = weighted.sum() / loss_weights.sum()
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert torch.allclose(mb.losses.per_sample["lm"], weighted.sum(0).detach(), rtol=1e-12)
    assert grads.keys() == weights.keys()
    for name, grad in grads.items():
        wanted = weights[name].grad
        assert (wanted is not None and wanted.norm() > 0) or name.endswith("linear_k.bias"), name
        assert (grad - wanted).norm() <= 1e-11 * max(wanted.norm().item(), 1e-3), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_reports_one_contribution_per_use(family):
    stage, sink, *_ = run_stage(build_plan_of(FAMILIES[family]))
    for name, physical in stage.physical.items():
        assert sink.counts[id(stage.param(name))] == len(physical.uses), name


@pytest.mark.parametrize("model", [LLAMA, replace(GPT2, hidden_dropout=0.1, attention_dropout=0.1)])
@pytest.mark.parametrize(
    ("recompute", "method", "layers"),
    [
        ("selective", "uniform", 1),
        ("full", "uniform", 1),
        ("full", "uniform", 2),
        ("full", "block", 1),
    ],
)
def test_recomputation_changes_no_bit(model, recompute, method, layers):
    _, _, loss, grads, _ = run_stage(build_plan_of(model))
    options = StageOptions(recompute_method=method, recompute_layers=layers)
    _, _, again, grads_again, _ = run_stage(build_plan_of(model, recompute=recompute), options)
    assert torch.equal(loss, again)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_again[name]), name


@pytest.mark.parametrize("model", [LLAMA, GPT2])
def test_deferred_weight_gradients_equal_immediate_ones(model):
    _, _, _, grads, _ = run_stage(build_plan_of(model))
    _, _, _, deferred, _ = run_stage(build_plan_of(model), deferred=True)
    for name, grad in grads.items():
        assert torch.equal(grad, deferred[name]), name


@pytest.mark.parametrize("model", [LLAMA, GPT2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "frozen",
    [
        r"embedding\.|decoder\.layers\.0\.",
        r".*(linear_|layernorm)",
        r"(?!decoder\.layers\.0\.mlp)",
        r"output_layer|embedding\.word",
    ],
)
def test_freezing_leaves_every_other_gradient_as_it_was(model, recompute, frozen):
    plan = build_plan_of(model, recompute=recompute)
    options = StageOptions(recompute_method="uniform", recompute_layers=1)
    _, _, loss, grads, _ = run_stage(plan, options)
    for deferred in (False, True):
        stage, sink, again, some, _ = run_stage(plan, options, deferred, frozen)
        assert torch.equal(loss, again)
        counts = {name: sink.counts[id(stage.param(name))] for name in stage.physical}
        assert 0 in counts.values() and any(counts.values())
        for name, physical in stage.physical.items():
            assert (counts[name] == 0) == bool(re.match(frozen, name))
            for view in physical.views:
                grad = some[view.spec.name]
                expected = grads[view.spec.name] if counts[name] else torch.zeros_like(grad)
                assert torch.equal(grad, expected), view.spec.name


def test_chunks_of_the_loss_change_only_rounding(monkeypatch):
    _, _, loss, grads, _ = run_stage(build_plan_of(LLAMA))
    monkeypatch.setattr("megatron_lite.tensor.cross_entropy._CHUNK_BYTES", 1024)
    _, _, chunked, chunked_grads, _ = run_stage(build_plan_of(LLAMA), StageOptions(loss_chunks=5))
    assert torch.allclose(loss, chunked, rtol=1e-14)
    for name, grad in grads.items():
        assert (grad - chunked_grads[name]).norm() <= 1e-13 * grad.norm(), name


def test_explicit_and_fused_attention_agree():
    _, _, loss, grads, _ = run_stage(build_plan_of(LLAMA))
    _, _, other, other_grads, _ = run_stage(
        build_plan_of(LLAMA), StageOptions(fused_attention=False)
    )
    assert torch.allclose(loss, other, rtol=1e-13)
    for name, grad in grads.items():
        assert (grad - other_grads[name]).norm() <= 1e-12 * grad.norm(), name
