"""Adafactor's updates on boxes of logical tensors against the same on whole ones."""

import pytest
import torch
from torch import Tensor

from megatron_lite.mesh.groups import local_group
from megatron_lite.optim.adafactor import Adafactor, AdafactorUpdates, OwnedPart
from megatron_lite.optim.factored import Spread, is_factored
from megatron_lite.optim.groups import ParamGroup
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box, local_box
from tests.optim.test_whole_matrices import halves, specs_of
from tests.pool import RankPool
from tests.shard.stand import build_rank_groups, logical_value, parallel_shape, region

GROUP = ParamGroup("all")
RULES = [Adafactor(0.8), Adafactor(0.5, 0.9, 1e-8, 0.5), Adafactor(0.8, 0.0, 1e-30, 0.0)]


def gradient(spec: ParamSpec, update: int) -> Tensor:
    """Tensors of very different sizes, so that a threshold acts on some."""
    scale = 1e-3 * (update + 1) if "proj" in spec.name else 10.0**update
    return logical_value(spec, torch.float64, scale)


def whole_weights(rule: Adafactor, spec: ParamSpec, updates: int) -> Tensor:
    """The paper's Algorithm 4 with a given learning rate, on one tensor."""
    weight = logical_value(spec, torch.float64)
    shape = spec.shape
    row = torch.zeros(shape[0], dtype=torch.float64)
    column = torch.zeros(shape[-1], dtype=torch.float64)
    second, first = torch.zeros_like(weight), torch.zeros_like(weight)
    for update in range(1, updates + 1):
        beta = 1 - update**-rule.beta2_decay
        squares = gradient(spec, update).square() + rule.eps
        if len(shape) == 2:
            row = beta * row + (1 - beta) * squares.sum(1)
            column = beta * column + (1 - beta) * squares.sum(0)
            second = row[:, None] * column[None, :] / row.sum()
        else:
            second = beta * second + (1 - beta) * squares
        change = gradient(spec, update) / second.sqrt()
        if rule.clip_threshold:
            change /= max(1.0, float(change.square().mean().sqrt()) / rule.clip_threshold)
        if rule.beta1:
            first = rule.beta1 * first + (1 - rule.beta1) * change
            change = first
        weight = weight - 0.01 * 0.1 * weight - 0.01 * change
    return weight


def stepped(rank: int, tp: int, dp: int, number: int) -> float:
    """Largest difference of this rank's boxes after three updates."""
    rule, parallel = RULES[number], parallel_shape(tp=tp, dp=dp)
    groups = build_rank_groups(parallel, rank, 2)
    specs = specs_of(tp)
    held = [(spec, local_box(spec, {"tp": groups.tp.rank}, parallel)) for spec in specs]
    parts = []
    for spec, box in held:
        share, count = groups.dp_cp.rank, groups.dp_cp.size
        boxes = halves(box, share, count) if is_factored(spec) else [box] * (share == 0)
        for owned in filter(lambda box: box.elements, boxes):
            weight = region(logical_value(spec, torch.float64), owned).clone()
            parts.append(
                OwnedPart(
                    spec, owned, GROUP, weight, torch.empty_like(weight),
                    torch.zeros_like(weight) if rule.beta1 else None,
                    None if is_factored(spec) else torch.zeros_like(weight),
                )
            )  # fmt: skip
    spread = Spread(groups.dp_cp, groups.tp, torch.float64, torch.device("cpu"))
    updates = AdafactorUpdates(rule, held, parts, spread)
    for update in range(1, 4):
        for part in parts:
            part.gradient.copy_(region(gradient(part.spec, update), part.box))
        updates.step(update, lambda group: (0.01, 0.1))
    worst = [
        float((p.weight - region(whole_weights(rule, p.spec, 3), p.box)).abs().max()) for p in parts
    ]
    return max(worst)


@pytest.mark.parametrize("number", range(len(RULES)))
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 3), (2, 1), (4, 1), (2, 2)])
def test_updates_are_those_of_the_logical_tensors(
    rank_pool: RankPool, tp: int, dp: int, number: int
) -> None:
    assert max(rank_pool.run(tp * dp, stepped, tp=tp, dp=dp, number=number)) < 1e-13


def test_the_first_update_has_no_past_and_a_rank_one_square_is_exact() -> None:
    """Where g^2 is an outer product, its factors are all there is to know of it."""
    value = torch.outer(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.5])).double()
    spec, box = ParamSpec("w", (3, 2), uses=("a",), matrix=(3, 2)), Box((0, 0), (3, 2))
    part = OwnedPart(spec, box, GROUP, torch.zeros(3, 2).double(), value.clone())
    alone = Spread(local_group("shard"), local_group("tp"), torch.float64, torch.device("cpu"))
    updates = AdafactorUpdates(Adafactor(0.8), [(spec, box)], [part], alone)
    updates.step(1, lambda group: (1.0, 0.0))
    torch.testing.assert_close(part.weight, -torch.ones(3, 2).double(), rtol=1e-14, atol=0)
    kinds = {kind: tensor for kind, _, tensor in updates.moments.statistics()}
    assert sum(tensor.numel() for tensor in kinds.values()) == 3 + 2
