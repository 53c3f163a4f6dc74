"""Where tokens go (MOE): losses reach the router, capacity, experts and ranks without tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from megatron_lite.expert.layer import moe
from megatron_lite.verify.session import Layout
from tests.cases.expert_ranks import router_slope, starved_steps
from tests.cases.layouts import EXPERT_LAYOUTS, REFERENCE
from tests.cases.ranks import gathered
from tests.expert.routing_parts import PLAIN, Sink, build_parts, context
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN

MIXTURE = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --fp64 --optimizer sgd --sgd-momentum 0 "
    "--hidden-dropout 0 --attention-dropout 0 --weight-decay 0 --lr 0.1 --min-lr 0.1 "
)
FLAGS = [*LLAMA, *RUN, *MIXTURE.split()]


def test_c063_the_program_gives_the_router_the_gradient_of_its_auxiliary_loss(
    rank_pool: RankPool,
) -> None:
    gradients = {}
    for coefficient in (0.0, 0.01, 0.02):
        argv = [*FLAGS, "--lr", "0", "--min-lr", "0", "--moe-aux-loss-coeff", str(coefficient)]
        argv += ["--global-batch-size", "2"]
        ((gradient, slope),) = rank_pool.run(1, router_slope, argv=argv, place=(1, 3), nudge=1e-5)
        gradients[coefficient] = gradient
        assert gradient[1, 3].item() == pytest.approx(slope, rel=1e-4, abs=1e-9)
    small, large = (gradients[c] - gradients[0.0] for c in (0.01, 0.02))
    assert small.norm() > 1e-5
    torch.testing.assert_close(large, 2 * small, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("factor", "policy", "kept"),
    [(5.0, "probs", (0, 1, 2, 3)), (1.0, "probs", (0, 2)), (1.0, "position", (0, 1))],
)
def test_c064_a_dropped_token_leaves_the_layer_with_nothing_added(
    factor: float, policy: str, kept: tuple[int, ...]
) -> None:
    wanted = torch.tensor([0.9, 0.6, 0.8, 0.7], dtype=torch.float64)
    x = torch.stack([wanted.log(), (1 - wanted).log()], dim=1).unsqueeze(1)  # its own logits
    shape = replace(PLAIN, num_experts=2, topk=1, pre_softmax=True, ffn_hidden_size=3)
    shape = replace(shape, capacity_factor=factor, drop_policy=policy)
    parts = build_parts(shape, torch.eye(2, dtype=torch.float64))
    ones = {
        f"experts.{name}.weight": nn.Parameter(torch.ones(2, *size, dtype=torch.float64))
        for name, size in (("linear_gate", (3, 2)), ("linear_up", (3, 2)), ("linear_fc2", (2, 3)))
    }
    parts = replace(parts, params={**parts.params, **ones})
    mb = context(Sink(), torch.arange(4), samples=1)
    out = moe(parts, x, False, mb)
    assert tuple(i for i in range(4) if out[i].any()) == kept
    record = mb.losses.routing[parts.layer]
    assert record.dropped.tolist() == [4 - len(kept), 0]


_WORDS = (
    "--moe-router-topk 1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0"
)
FORCED = _WORDS.split()
PLACES = {
    name: EXPERT_LAYOUTS[name] for name in ("dp2-ep2", "dp2-ep2-optim", "tp2-sp-ep2", "dp4-ep4")
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PLACES)
def test_c065_experts_without_tokens_stay_as_they_are_and_nothing_hangs(
    rank_pool: RankPool, name: str
) -> None:
    argv, layout = [*FLAGS, *FORCED], PLACES[name]
    runs = []
    for place in (Layout(REFERENCE), layout):
        ranks = rank_pool.run(
            place.ranks, starved_steps, argv=[*argv, *place.flags], favoured=0, steps=3
        )
        before, gradients, after = (gathered(parts) for parts in zip(*ranks, strict=True))
        stacks = [tensor for tensor in after if ".mlp.experts." in tensor]
        assert len(stacks) == 4 * 3
        for tensor in stacks:
            assert np.isfinite(after[tensor]).all(), tensor
            assert (after[tensor][1:] == before[tensor][1:]).all(), tensor  # bit by bit
            assert (after[tensor][0] != before[tensor][0]).any(), tensor
            assert not gradients[tensor][1:].any(), tensor
        runs.append(after)
    for tensor, wanted in runs[0].items():
        np.testing.assert_allclose(runs[1][tensor], wanted, rtol=0, atol=1e-12, err_msg=tensor)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["dp2-ep2", "dp4-ep4"])
def test_c065_microbatches_with_other_empty_experts_on_every_rank_train_the_same(
    rank_pool: RankPool, name: str
) -> None:
    # Two tokens per microbatch, one expert each: of four experts two or three are empty.
    argv = [*FLAGS, *FORCED, "--seq-length", "2", "--max-position-embeddings", "2"]
    runs = []
    for place in (Layout(REFERENCE), PLACES[name]):
        ranks = rank_pool.run(
            place.ranks, starved_steps, argv=[*argv, *place.flags], favoured=None, steps=3
        )
        runs.append(gathered([after for *_, after in ranks]))
    for tensor, wanted in runs[0].items():
        assert np.isfinite(wanted).all(), tensor
        np.testing.assert_allclose(runs[1][tensor], wanted, rtol=0, atol=1e-12, err_msg=tensor)


def test_frozen_experts_train_the_rest_the_same_in_every_layout(rank_pool: RankPool) -> None:
    argv = [*FLAGS, *FORCED, "--freeze", "*.experts.linear_gate.weight"]
    runs = []
    for place in (Layout(REFERENCE), PLACES["dp2-ep2-optim"]):
        ranks = rank_pool.run(
            place.ranks, starved_steps, argv=[*argv, *place.flags], favoured=None, steps=2
        )
        before, _, after = (gathered(parts) for parts in zip(*ranks, strict=True))
        for tensor, values in after.items():
            if ".experts." in tensor:
                still = tensor.endswith("linear_gate.weight")
                assert (values == before[tensor]).all() == still, tensor
        runs.append(after)
    for tensor, wanted in runs[0].items():
        np.testing.assert_allclose(runs[1][tensor], wanted, rtol=0, atol=1e-12, err_msg=tensor)
