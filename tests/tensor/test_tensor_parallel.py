"""Tensor parallelism: the same loss and gradients, and nothing extra on the wire."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_lite.spec.model import model_spec
from megatron_lite.spec.shards import local_box, local_shape
from tests.model.builders import FAMILIES, LLAMA, build_plan_of
from tests.tensor.ranks import logits, loss_and_gradients

LAYOUTS = [(2, False), (2, True), (4, False), (4, True)]


@pytest.fixture(scope="module")
def reference():
    cache = {}

    def of(family, dropout=0.0):
        key = (family, dropout)
        if key not in cache:
            cache[key] = loss_and_gradients(family, False, dropout, "none", 0, 1)
        return cache[key]

    return of


def assert_same_gradients(model, tp, sp, results, wanted):
    parallel = build_plan_of(model, tp, sp).parallel
    for result in results:
        assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
    for spec in model_spec(model, parallel):
        whole = wanted["pieces"][spec.name]
        floor = 1e-3
        for rank, result in enumerate(results):
            box = local_box(spec, {"tp": rank}, parallel)
            region = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            difference = (result["pieces"][spec.name] - whole[region]).norm()
            assert difference <= 1e-11 * max(whole.norm().item(), floor), (spec.name, rank)


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_match_one_process(rank_pool, reference, family, tp, sp):
    results = rank_pool.run(
        tp, loss_and_gradients, family=family, sp=sp, dropout=0.0, recompute="none"
    )
    assert_same_gradients(FAMILIES[family], tp, sp, results, reference(family))


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_masks_do_not_depend_on_the_layout(rank_pool, reference, recompute, tp, sp):
    results = rank_pool.run(
        tp, loss_and_gradients, family="gpt2", sp=sp, dropout=0.2, recompute=recompute
    )
    assert_same_gradients(FAMILIES["gpt2"], tp, sp, results, reference("gpt2", 0.2))
    assert reference("gpt2", 0.2)["loss"] != reference("gpt2")["loss"]


def expected_records(model, b, sp):
    """Collectives of one microbatch: (phase, op, elements) -> count, one chunk of loss."""
    t, h, layers = model.seq_length * b, model.hidden_size, model.num_layers
    wire = t * h
    counts = Counter({("forward", "all_reduce.max", t): 1, ("forward", "all_reduce.sum", 2 * t): 1})
    if not sp:
        counts["forward", "all_reduce.sum", wire] = 1 + 2 * layers + 1  # embedding, layers, head
        counts["backward", "all_reduce.sum", wire] = 2 * layers
        return counts
    counts["forward", "reduce_scatter.sum", wire] = 1 + 2 * layers + 1
    counts["forward", "all_gather", wire] = 2 * layers + 1
    counts["backward", "reduce_scatter.sum", wire] = 2 * layers
    # Per layer 2 entries of row-parallel gradients and 2 re-gathers; 1 for the embedding.
    counts["backward", "all_gather", wire] = 4 * layers + 1
    return counts


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
def test_collectives_equal_the_closed_formula(rank_pool, tp, sp):
    for result in rank_pool.run(
        tp, loss_and_gradients, family="llama", sp=sp, dropout=0.0, recompute="none"
    ):
        assert {group for _, _, group, _ in result["records"]} == {"tp"}
        counts = Counter((phase, op, n) for phase, op, _, n in result["records"])
        assert counts == expected_records(LLAMA, 3, sp)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_elements_per_rank_equal_the_specs_share(rank_pool, tp):
    specs = model_spec(LLAMA, build_plan_of(LLAMA, tp).parallel)
    share = sum(torch.Size(local_shape(spec)).numel() for spec in specs)
    for result in rank_pool.run(
        tp, loss_and_gradients, family="llama", sp=False, dropout=0.0, recompute="none"
    ):
        assert result["elements"] == share


@pytest.mark.parametrize(("tp", "sp"), [(2, False), (2, True)])
def test_logits_are_gathered_without_padding(rank_pool, tp, sp):
    wanted = logits("llama", False, 0, 1)
    assert wanted.shape == (12, 3, 101)
    for got in rank_pool.run(tp, logits, family="llama", sp=sp):
        assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-12)
