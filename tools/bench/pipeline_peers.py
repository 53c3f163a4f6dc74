"""torch.distributed.pipelining on two ranks, on the plain model of `peers.py`.

The same cut, sizes, clipping and fused AdamW as our cases of `pipeline.py`; the schedules are
torch's own, with torch's stages and its generic split of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import functional

from tools.bench.peers import PlainModel, Size

# name -> (class, stages per rank, whether the second half of the stages runs backwards)
SCHEDULES: dict[str, tuple[str, int, bool]] = {
    "gpipe": ("ScheduleGPipe", 1, False),
    "1f1b": ("Schedule1F1B", 1, False),
    "interleaved": ("ScheduleInterleaved1F1B", 2, False),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", 2, False),
    "zbv": ("ScheduleZBVZeroBubble", 2, True),
    "dualpipev": ("ScheduleDualPipeV", 2, True),
}


class PlainStage(nn.Module):
    """Some layers of the plain GPT; the first stage embeds, the last returns logits."""

    def __init__(self, model: PlainModel, stage: int, num_stages: int) -> None:
        super().__init__()
        share = len(model.layers) // num_stages
        self.layers = model.layers[stage * share : (stage + 1) * share]
        first, last = stage == 0, stage == num_stages - 1
        self.words = model.words if first else None
        self.places = model.places if first else None
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, s] or hidden states [b, s, h] in, hidden states or logits out."""
        if self.words is not None and self.places is not None:
            x = self.words(x) + self.places.weight
        for layer in self.layers:
            x = layer(x, None)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean token loss of a microbatch."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def untied_model(size: Size) -> PlainModel:
    """The plain GPT with a head of its own, which torch's pipelines need."""
    model = PlainModel(size, llama=False)
    model.head = nn.Linear(size.h, size.v, bias=False)
    nn.init.normal_(model.head.weight, std=0.02)
    return model


@contextmanager
def torch_step(
    name: str, size: Size, batch: int, micro: int, rank: int
) -> Iterator[Callable[[], object]]:
    """One step of a schedule: forward, loss, backward, clip over both ranks, AdamW."""
    torch.manual_seed(0)
    class_name, chunks, is_v = SCHEDULES[name]
    total = 2 * chunks
    mine = [rank, total - 1 - rank if is_v else rank + 2][:chunks]
    model = untied_model(size)
    modules = [PlainStage(model, stage, total) for stage in mine]
    device = torch.device("cpu")
    stages = [
        PipelineStage(module, stage, total, device)
        for module, stage in zip(modules, mine, strict=True)
    ]
    make: Any = getattr(torch_schedules, class_name)
    whole = stages if chunks > 1 else stages[0]
    schedule = make(whole, n_microbatches=batch // micro, loss_fn=token_loss)
    params = [param for module in modules for param in module.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)
    stream = torch.randint(0, size.v, (batch, size.s + 1))
    inputs = (stream[:, :-1],) if 0 in mine else ()
    targets = {"target": stream[:, 1:], "losses": []} if total - 1 in mine else {}

    def step() -> None:
        schedule.step(*inputs, **targets, return_outputs=False)
        clip_over_ranks(params)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    yield step


@contextmanager
def plain_step(size: Size, batch: int, micro: int) -> Iterator[Callable[[], object]]:
    """The same step in one process, by gradient accumulation."""
    torch.manual_seed(0)
    model = untied_model(size)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)
    stream = torch.randint(0, size.v, (batch, size.s + 1))

    def step() -> None:
        for part in stream.split(micro):
            (model(part[:, :-1], part[:, 1:]) * (micro / batch)).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    yield step


def clip_over_ranks(params: list[nn.Parameter]) -> None:
    """Scale the gradients so that their norm over all stages is at most 1."""
    grads = [param.grad for param in params if param.grad is not None]
    square = torch.nn.utils.get_total_norm(grads).square()
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(params, 1.0, square.sqrt())
