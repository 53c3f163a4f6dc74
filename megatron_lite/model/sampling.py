"""Sampling from a stage: prompt in, continuation out, keys and values cached.

All tp ranks of the last stage hold the same full logits and draw the same word, because the
draw is a function of (seed, position): a continuation can be repeated in any layout. In a
pipeline every token passes through the stages, one after the other, and the last stage's
choice goes to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.errors import UserError
from megatron_lite.mesh.collectives import broadcast
from megatron_lite.mesh.groups import Group, local_groups
from megatron_lite.mesh.p2p import Link, open_links, receive_into, send
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.attention import KeyValueCache
from megatron_lite.model.gpt import GPTStage
from megatron_lite.ops.random import flat_words, stream_counter
from megatron_lite.pipeline.channels import list_channels


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen.

    Attributes:
        greedy: take the most probable token.
        temperature: logits are divided by it, > 0.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens that together reach this probability.
        seed: of the draws.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UserError(f"--temperature {self.temperature}: must be greater than 0")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k}: must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}: must be in (0, 1]")


def choose_token(logits: Tensor, position: int, options: SamplingOptions) -> int:
    """Choose the token at `position` from its logits [v]."""
    if options.greedy:
        return int(logits.argmax())
    scaled = logits.double() / options.temperature
    if options.top_k:
        kept = scaled.topk(min(options.top_k, scaled.numel())).values[-1]
        scaled = scaled.masked_fill(scaled < kept, float("-inf"))
    probs, order = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
    before = probs.cumsum(0) - probs
    probs = probs * (before < options.top_p)
    c2, c3 = stream_counter("sampling")
    word = flat_words(torch.tensor([position]), 1, 0, 1, c2, c3, options.seed)
    drawn = (word.double() + 0.5) / 2.0**32 * probs.sum()
    return int(order[torch.searchsorted(probs.cumsum(0), drawn).clamp(max=order.numel() - 1)])


@dataclass(frozen=True, eq=False)
class StageChain:
    """The way of a token through the stages of a pipeline, one per rank.

    Attributes:
        pp: this rank's pipeline group.
        incoming: from the stage before; None on the first.
        outgoing: to the stage behind; None on the last.
    """

    pp: Group
    incoming: Link | None = None
    outgoing: Link | None = None

    def run(
        self, stage: GPTStage, tokens: Tensor, mb: MicrobatchContext, cache: KeyValueCache
    ) -> Tensor | None:
        """Pass new tokens through; their logits [s, b, v] on the last stage, else None.

        Comm: one message of s*b*h elements between neighbouring stages.
        """
        (part,) = stage.stage_parts.values()
        source = tokens
        if self.incoming is not None:
            shape = (*tokens.shape, stage.plan.model.hidden_size)
            source = torch.empty(shape, dtype=stage.dtype, device=tokens.device)
            receive_into(source, self.incoming).wait()
        with torch.no_grad():
            output = stage.run_logits(part, source, mb, cache)
        if self.outgoing is None:
            return output
        send(output.contiguous(), self.outgoing).wait()
        return None

    def share(self, token: int | None, device: torch.device) -> int:
        """Give the last stage's choice to all stages.

        Comm: broadcast of one element over pp.
        """
        chosen = torch.tensor([-1 if token is None else token], device=device)
        broadcast(chosen, self.pp, self.pp.size - 1)
        return int(chosen)


def open_chain(placement: Sequence[int], pp: Group) -> StageChain:
    """Open the channels between neighbouring stages; every rank of the world calls it."""
    if pp.size == 1:
        return StageChain(pp)
    links = open_links([found for found in list_channels(placement) if found[2] == "F"], pp)
    return StageChain(
        pp,
        incoming=links.get((pp.rank - 1, pp.rank, "F")),
        outgoing=links.get((pp.rank, pp.rank + 1, "F")),
    )


def _context(first: int, count: int, device: torch.device) -> MicrobatchContext:
    positions = torch.arange(first, first + count, device=device)
    return MicrobatchContext(
        step=0,
        microbatch=0,
        stage=0,
        training=False,
        seed=0,
        sample_ids=torch.zeros(1, dtype=torch.int64, device=device),
        positions=positions,
        full_positions=positions,
        loss_weights=None,
        denominators={},
        wgrads=None,
    )


def sample_tokens(
    stage: GPTStage,
    prompt: Sequence[int],
    count: int,
    options: SamplingOptions,
    eod: int | None,
    chain: StageChain | None = None,
) -> Iterator[int]:
    """Continue a prompt, one token at a time.

    Args:
        stage: built without sequence parallelism (one new token cannot be cut).
        prompt: at least one token id inside the vocabulary.
        count: most tokens to produce; fewer when `eod` comes or positions run out.
        options: how tokens are chosen.
        eod: id that ends the continuation, or None.
        chain: the other stages, where this one is not the whole model.

    Yields:
        Token ids, `eod` not included.

    Raises:
        UserError: empty prompt, id outside the vocabulary, or prompt longer than the
            model's positions.
    """
    model = stage.plan.model
    if not prompt:
        raise UserError("the prompt has no tokens; give at least one")
    outside = [token for token in prompt if not 0 <= token < model.vocab_size]
    if outside:
        raise UserError(f"token id {outside[0]} of the prompt is outside the vocabulary "
                        f"[0, {model.vocab_size})")  # fmt: skip
    limit = model.max_position_embeddings
    if len(prompt) > limit:
        raise UserError(f"the prompt has {len(prompt)} tokens, the model has {limit} positions")
    device = next(stage.parameters()).device
    chain = chain or StageChain(local_groups().pp)
    cache, first, new = KeyValueCache(), 0, list(prompt)
    for _ in range(count):
        tokens = torch.tensor(new, dtype=torch.int64, device=device).unsqueeze(1)
        logits = chain.run(stage, tokens, _context(first, len(new), device), cache)
        first += len(new)
        choice = None if logits is None else choose_token(logits[-1, 0], first, options)
        token = chain.share(choice, device)
        if token == eod:
            return
        yield token
        if first >= limit:
            return
        new = [token]
