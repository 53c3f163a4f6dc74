"""A tiny training state, cut for any number of ranks, and ways to save it.

`save_tiny` is the ordinary save of one process. `save_cut` plays all ranks of a larger run
one after the other in this process: the same steps, without process groups.
"""

from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import attempt_directory, attempt_name
from megatron_lite.checkpoint.reader import Checkpoint
from megatron_lite.checkpoint.save import (
    SaveRequest,
    SaveResult,
    publish_attempt,
    save_checkpoint,
    write_rank,
)
from megatron_lite.checkpoint.tensors import StateEntry, take_snapshot
from megatron_lite.mesh.groups import local_group

NONCE = "0123456789abcdef"


def tiny_tensors(step: int) -> dict[str, Tensor]:
    """Logical tensors that differ in every element from those of another step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(4, 6, generator=generator)
    return {
        "decoder.layers.0.mlp.linear_fc1.weight": weight.bfloat16(),
        "optim/master/decoder.layers.0.mlp.linear_fc1.weight": weight,
        "optim/exp_avg/decoder.layers.0.mlp.linear_fc1.weight": weight.double() / 3,
        "optim/step": torch.tensor(step, dtype=torch.int64),
    }


def cut_entries(tensors: dict[str, Tensor], rank: int, size: int) -> list[StateEntry]:
    """Cut dim 0 (or, for the masters, dim 1) over `size` ranks; rank 0 owns the scalars.

    Every rank also brings a replica of rank 0's first piece that it does not own.
    """
    entries = []
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            entries.append(StateEntry(name, tensor, (), (), rank == 0))
            continue
        dim = 1 if name.startswith("optim/master") else 0
        rows = tensor.shape[dim] // size
        piece = tensor.narrow(dim, rank * rows, rows)
        offset = tuple(rank * rows if d == dim else 0 for d in range(tensor.dim()))
        entries.append(StateEntry(name, piece, tuple(tensor.shape), offset, True))
        replica = tensor.narrow(dim, 0, rows)
        origin = (0,) * tensor.dim()
        if rank:
            entries.append(StateEntry(name, replica, tuple(tensor.shape), origin, False))
    return entries


def tiny_state(step: int) -> dict[str, object]:
    """A state object with the kinds of values that states hold."""
    return {"iteration": step, "lr": 0.1 + step, "ramp": ((0, 8),), "note": "ä", "off": None}


def save_tiny(root: Path, step: int, **options: object) -> SaveResult:
    """Save the tiny state of `step` as one process does."""
    entries = cut_entries(tiny_tensors(step), 0, 1)
    group = local_group("world")
    return save_checkpoint(root, step, entries, tiny_state(step), group, **options)  # type: ignore[arg-type]


def save_cut(root: Path, step: int, size: int, files: FileSystem | None = None) -> Path:
    """Save the tiny state of `step` as `size` ranks; return the attempt directory."""
    files = files or FileSystem()
    attempt = attempt_name(step, 0, NONCE)
    files.ensure_directory(attempt_directory(root, attempt))
    plan = CommitPlan(attempt, step, 0, size, {"iteration": step})
    requests = [SaveRequest(root, plan, rank, False, ()) for rank in range(size)]
    for request in requests:
        entries = cut_entries(tiny_tensors(step), request.rank, size)
        write_rank(request, take_snapshot(entries), files)
    publish_attempt(requests[0], files)
    return attempt_directory(root, attempt)


def holds_step(checkpoint: Checkpoint, step: int) -> bool:
    """Whether every tensor of the checkpoint is, bit for bit, the tiny state of `step`."""
    expected = tiny_tensors(step)
    return (
        checkpoint.step == step
        and checkpoint.state["iteration"] == step
        and set(checkpoint.names) == set(expected)
        and all(same_bits(checkpoint.read(name), expected[name]) for name in expected)
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal dtype, shape and bytes (NaN equals its own bits)."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    flat_a, flat_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(flat_a, flat_b)
