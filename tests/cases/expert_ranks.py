"""What a rank does with experts in the case tests; runs inside a rank process."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_lite.mesh.launch import RunStatus
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from tests.cases.ranks import Pieces
from tests.train.program import build_and
from tests.train.test_step import masked_batches


def starved_steps(
    argv: Sequence[str], favoured: int | None, steps: int, rank: int, world_size: int
) -> tuple[Pieces, Pieces, Pieces]:
    """Train with a bias that sends all tokens to one expert.

    Args:
        favoured: the expert; None: the routers choose.

    Returns:
        Weights before, gradients of the last step, weights after: what this rank owns.
    """

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        for part in parts.stage.expert_parts:
            bias = part.state("expert_bias")
            if favoured is not None:
                assert bias is not None
                bias[favoured] = 100.0
        before = _owned(parts.optimizer.weight_pieces())
        for _ in range(steps):
            TrainStep(parts, state).run()
        gradients = _owned(parts.buffers.gradient_pieces())
        return before, gradients, _owned(parts.optimizer.weight_pieces())

    found: tuple[Pieces, Pieces, Pieces] = build_and(use, argv, rank, world_size)
    return found


def router_slope(
    argv: Sequence[str], place: tuple[int, int], nudge: float, rank: int, world_size: int
) -> tuple[torch.Tensor, float]:
    """Gradient of the first router, and what the loss changes by when one weight of it does.

    One global batch of two microbatches, again and again; the learning rate has to be 0.
    """

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        batch = masked_batches([12, 16], 1, 0, 1)
        parts.train_loader = iter([batch] * 3)
        name = "decoder.layers.0.mlp.router.weight"
        losses = []
        for shift in (nudge, -2 * nudge, nudge):
            for piece in parts.optimizer.weight_pieces():
                if piece.spec.name == name:
                    piece.tensor[place] += shift
            report = TrainStep(parts, state).run()
            losses.append(report.lm_loss + report.figures.get("moe_aux_loss", 0.0))
        (gradient,) = (
            piece.tensor.clone()
            for piece in parts.buffers.gradient_pieces()
            if piece.spec.name == name
        )
        return gradient, (losses[0] - losses[1]) / (2 * nudge)

    found: tuple[torch.Tensor, float] = build_and(use, argv, rank, world_size)
    return found


def _owned(pieces: Any) -> Pieces:
    found: Pieces = {}
    for piece in pieces:
        if piece.owned:
            _, held = found.setdefault(piece.spec.name, (piece.spec.shape, []))
            held.append((piece.box.offset, piece.tensor.detach().double().numpy().copy()))
    return found
