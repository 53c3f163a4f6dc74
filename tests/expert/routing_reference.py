"""A router token by token, expert by expert: what the real one is compared with.

Scores and losses are tensors of float64 under autograd; everything else is plain Python.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lite.config.expert_plan import ExpertShape


def score_list(logits: Tensor, shape: ExpertShape) -> list[Tensor]:
    """Scores of one token, one 0-dim tensor per expert."""
    if shape.score_function == "sigmoid":
        return [1 / (1 + torch.exp(-logit)) for logit in logits]
    if shape.score_function == "sqrtsoftplus":
        return [torch.sqrt(torch.log(1 + torch.exp(logit))) for logit in logits]
    if shape.pre_softmax:
        total = sum(torch.exp(logit) for logit in logits)
        return [torch.exp(logit) / total for logit in logits]
    return list(logits)


def choose(values: list[float], shape: ExpertShape) -> list[int]:
    """Experts of one token, largest first, the lower number first where equal."""
    allowed = range(shape.num_experts)
    if shape.num_groups > 1:
        size = shape.num_experts // shape.num_groups
        counted = shape.topk // shape.group_topk
        totals = []
        for group in range(shape.num_groups):
            members = values[group * size : (group + 1) * size]
            totals.append(sum(sorted(members, reverse=True)[:counted]))
        groups = sorted(range(shape.num_groups), key=lambda g: (-totals[g], g))
        allowed = [e for g in groups[: shape.group_topk] for e in range(g * size, (g + 1) * size)]
    return sorted(allowed, key=lambda e: (-values[e], e))[: shape.topk]


def weights_of(scores: list[Tensor], chosen: list[int], shape: ExpertShape) -> list[Tensor]:
    """What the chosen experts of one token count."""
    picked = [scores[e] for e in chosen]
    if shape.score_function == "softmax" and not shape.pre_softmax:
        picked = [torch.exp(score) for score in picked]
        total = sum(picked)
        picked = [score / total for score in picked]
    elif shape.score_function != "softmax" and shape.topk > 1:
        total = sum(picked)
        picked = [score / total for score in picked]
    return [score * shape.scaling_factor for score in picked]


def mixture_of(logits: Tensor, scores: list[Tensor], shape: ExpertShape) -> list[Tensor]:
    """Scores of one token that sum to 1."""
    if shape.score_function == "softmax":
        scores = [torch.exp(logit) for logit in logits]
    total = sum(scores)
    return [score / total for score in scores]


def route(
    logits: Tensor, shape: ExpertShape, samples: int, bias: Tensor | None, counts: Tensor | None
) -> tuple[list[list[int]], Tensor, dict[str, Tensor]]:
    """Route a whole microbatch without capacity.

    Args:
        logits: [t, E], tokens in (s, b) order.
        bias: of the choice.
        counts: of the step before.

    Returns:
        experts per token, weights [t, k], losses.
    """
    ids, weights, mixtures = [], [], []
    for token in logits:
        scores = score_list(token, shape)
        values = [score.item() for score in scores]
        if bias is not None:
            values = [value + float(b) for value, b in zip(values, bias, strict=True)]
        ids.append(choose(values, shape))
        weights.append(torch.stack(weights_of(scores, ids[-1], shape)))
        mixtures.append(mixture_of(token, scores, shape))
    losses = {}
    for kind, weight in shape.balancing:
        losses[kind] = weight * balance(kind, shape, samples, ids, mixtures, counts)
    if shape.z_loss_coeff:
        logsumexps = [torch.log(sum(torch.exp(logit) for logit in token)) for token in logits]
        losses["z_loss"] = shape.z_loss_coeff * sum(z * z for z in logsumexps) / len(logsumexps)
    return ids, torch.stack(weights), losses


def balance(kind, shape, samples, ids, mixtures, counts):  # type: ignore[no-untyped-def]
    """One balance loss without its coefficient."""
    if kind == "seq_aux_loss":
        parts = [
            switch_loss(shape, ids[sample::samples], mixtures[sample::samples])
            for sample in range(samples)
        ]
        return sum(parts) / samples
    shares = None
    if kind == "global_aux_loss":
        shares = [float(count) / float(counts.sum()) for count in counts]
    return switch_loss(shape, ids, mixtures, shares)


def switch_loss(shape, ids, mixtures, shares=None):  # type: ignore[no-untyped-def]
    """E * sum_e f_e P_e of some tokens."""
    total = 0
    for expert in range(shape.num_experts):
        chosen = sum(token.count(expert) for token in ids)
        share = chosen / (len(ids) * shape.topk) if shares is None else shares[expert]
        total = total + share * sum(mixture[expert] for mixture in mixtures) / len(mixtures)
    return shape.num_experts * total


def keep(ids, weights, shape):  # type: ignore[no-untyped-def]
    """Which choices of a microbatch find room; [t][k] bool."""
    room = shape.capacity_factor * len(ids) * shape.topk / shape.num_experts
    capacity = math.ceil(round(room, 9))
    kept = [[False] * shape.topk for _ in ids]
    for expert in range(shape.num_experts):
        takers = [
            (token, slot)
            for token, row in enumerate(ids)
            for slot, chosen in enumerate(row)
            if chosen == expert
        ]
        if shape.drop_policy == "probs":
            takers.sort(key=lambda place: (-weights[place[0]][place[1]].item(), place[0]))
        for token, slot in takers[:capacity]:
            kept[token][slot] = True
    return kept


def place(wanted, weights, num_experts, k, capacity, policy):  # type: ignore[no-untyped-def]
    """Experts of all choices, -1 where one has none; [t][k].

    Args:
        wanted: [t][k + n], the chosen experts and the next best, -1: no more.
        weights: [t][k + n].
    """
    room = [capacity] * num_experts
    placed = [[-1] * k for _ in wanted]

    def first_come(asks):  # type: ignore[no-untyped-def]
        """Let (weight, token, slot, expert) in, one after the other."""
        if policy == "probs":
            asks = sorted(asks, key=lambda ask: -ask[0])
        for _, token, slot, expert in asks:
            if room[expert] > 0:
                room[expert] -= 1
                placed[token][slot] = expert

    tokens = range(len(wanted))
    first_come([(weights[t][j], t, j, wanted[t][j]) for t in tokens for j in range(k)])
    for column in range(k, len(wanted[0])):
        asks = []
        for t in tokens:
            if -1 in placed[t] and wanted[t][column] >= 0:
                asks.append((weights[t][column], t, placed[t].index(-1), wanted[t][column]))
        first_come(asks)
    return placed
