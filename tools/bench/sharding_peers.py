"""Other ways to divide a model over two gloo ranks, on the plain Llama of `peers.py`.

`torch-ddp` replicates, `torch-zero1` adds torch's ZeroRedundancyOptimizer, `torch-fsdp2` is
`fully_shard` on every block and the root, `deepspeed-1` to `-3` are DeepSpeed's stages; each
as its documentation shows it, with the fastest AdamW that it takes.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tools.bench.peers import PlainModel, Size

Step = Callable[[], object]
RATES: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


@contextmanager
def peer_step(case: str, size: Size, batch: int) -> Iterator[Step]:
    """One step: forward, loss, backward, clip, AdamW.

    Args:
        case: "plain-2threads", or a peer on ranks that a launcher's environment names.
        size: of the model.
        batch: samples of all ranks.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    stream = torch.randint(0, size.v, (batch, size.s + 1)).chunk(ranks)[rank]
    if case.startswith("deepspeed"):
        yield _deepspeed_step(int(case[-1]), size, stream)
        return
    if ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=os.environ["MLITE_RENDEZVOUS"], rank=rank, world_size=ranks
        )
    yield _torch_step(case, PlainModel(size, llama=True), stream)


def _torch_step(case: str, plain: PlainModel, stream: Tensor) -> Step:
    model: nn.Module = plain
    optimizer: torch.optim.Optimizer
    if case == "torch-fsdp2":
        _fully_shard(plain)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True, **RATES)
    elif case == "torch-zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            fused=True,
            **RATES,
        )
    else:
        if case == "torch-ddp":
            model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **RATES)

    def step() -> None:
        model(stream[:, :-1], stream[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _fully_shard(model: PlainModel) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _deepspeed_step(stage: int, size: Size, stream: Tensor) -> Step:
    import deepspeed

    deepspeed.init_distributed(
        "gloo",
        init_method=os.environ["MLITE_RENDEZVOUS"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        auto_mpi_discovery=False,
    )
    model = PlainModel(size, llama=True)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        # Its own CPU Adam has to be compiled first; torch's fused one is what the others have.
        optimizer=torch.optim.AdamW(model.parameters(), fused=stage < 3, **RATES),
        config={
            "train_micro_batch_size_per_gpu": len(stream),
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step() -> None:
        engine.backward(engine(stream[:, :-1], stream[:, 1:]))
        engine.step()

    return step


def forget_peak() -> None:
    """Let the peak of the resident size begin here (Linux)."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
        control.write("5")


def resident_mib() -> float:
    """Peak of the resident size since it was last forgotten."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
