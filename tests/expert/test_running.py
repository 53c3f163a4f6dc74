"""Megatron's running form of the global balance: by hand, over ranks, behind a warning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_lite.config.flags import parse_config
from megatron_lite.config.notices import notices
from megatron_lite.expert.router import route_tokens
from megatron_lite.expert.running import RunningCounts
from megatron_lite.mesh.groups import local_group, world_group
from tests.config.lines import line
from tests.expert import routing_reference as reference
from tests.expert.routing_parts import PLAIN, SAMPLES, Sink, build_parts, build_tokens, context

GLOBAL = replace(PLAIN, balancing=(("global_aux_loss", 0.5),), running_global=True)
NUMBER = 3


def run_steps(rank, world_size, twice=False):
    """Losses and gradients of two steps of NUMBER microbatches; rank r has its own tokens.

    `twice`: all forward passes come first, and then each runs again, as in recomputation.
    """
    stage = world_group(rank, world_size) if world_size > 1 else local_group("stage")
    parts = replace(build_parts(GLOBAL), running=RunningCounts(stage))
    found = []
    for step in range(2):
        for index in range(NUMBER if twice else 0):
            x = build_tokens(seed=100 * step + 10 * index + rank)
            route_tokens(parts, x, replace(context(Sink(), step=step), microbatch=index))
        for index in range(NUMBER):
            x = build_tokens(seed=100 * step + 10 * index + rank).requires_grad_()
            mb = replace(context(Sink(), step=step), microbatch=index)
            route_tokens(parts, x, mb).probs.sum().backward()
            found.append((mb.losses.routing[1].losses["global_aux_loss"], x.grad))
    return found


def by_hand(rank, world_size):
    """The same, counting choice by choice."""
    weight = build_parts(GLOBAL).params["router.weight"].detach()
    found = []
    for step in range(2):
        counts = [0] * GLOBAL.num_experts
        for index in range(NUMBER):
            for other in range(world_size):
                x = build_tokens(seed=100 * step + 10 * index + other)
                for row in reference.route(x.flatten(0, 1) @ weight.T, PLAIN, SAMPLES, None, None)[
                    0
                ]:
                    for expert in row:
                        counts[expert] += 1
            x = build_tokens(seed=100 * step + 10 * index + rank).requires_grad_()
            logits = x.flatten(0, 1) @ weight.T
            seen = torch.tensor(counts)
            shape = replace(GLOBAL, running_global=False)
            _, probs, losses = reference.route(logits, shape, SAMPLES, None, seen)
            (probs.sum() + losses["global_aux_loss"] / context(None).denominators["moe"]).backward()
            found.append((losses["global_aux_loss"], x.grad))
    return found


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_microbatch_compares_with_the_step_so_far(rank_pool, ranks, twice):
    results = rank_pool.run(ranks, run_steps, twice=twice)
    for rank, result in enumerate(results):
        for (loss, grad), (wanted, wanted_grad) in zip(result, by_hand(rank, ranks), strict=True):
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
            torch.testing.assert_close(grad, wanted_grad, rtol=1e-10, atol=1e-13)


def test_the_running_form_warns_and_the_other_does_not():
    flags = "--num-experts 8 --moe-router-load-balancing-type global_aux_loss "
    loud = notices(parse_config(line(flags + "--moe-global-aux-loss-form running"), {}), 1)
    assert [text for text in loud if "another layout trains another model" in text]
    quiet = notices(parse_config(line(flags + "--moe-global-aux-loss-form previous-step"), {}), 1)
    assert not [text for text in quiet if "layout" in text]
