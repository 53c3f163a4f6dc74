"""Every collective of the project: the only door to torch.distributed.

Each function takes its `Group` last, is the identity on a group of one (and then not
recorded), and records itself once where the group carries a recorder. Names of
torch.distributed that changed between torch 2.11 and 2.15 are settled here. Tensors must
be contiguous; ranks of a group call the same functions in the same order.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.errors import UserError
from megatron_lite.mesh.groups import Group

# The newer names differ only in not warning of deprecation.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class Work(Protocol):
    """Handle of a collective in flight; the tensors are not to be touched before `wait`."""

    def wait(self) -> object:
        """Return when the result may be used (on CUDA: by the current stream)."""
        ...


class CompletedWork:
    """The handle of an asynchronous collective over a group of one."""

    def wait(self) -> object:
        """Return at once."""
        return None


class _ExchangeThenSum:
    """A reduce-scatter over gloo: every rank receives its slices, then adds them up.

    Gloo's own sends as many bytes as an all-reduce and takes about three times as long.
    Slices are added in rank order, in fp32 for narrower dtypes; the buffer is as large as `t`.
    """

    def __init__(self, out: Tensor, t: Tensor, group: Group):
        self._out = out
        self._t = t  # in use until the exchange is over
        self._received = torch.empty_like(t)
        self._parts = self._received.view(group.size, *out.shape)
        self._work: Work | None = dist.all_to_all_single(
            self._received, t, group=group.communicator, async_op=True
        )

    def wait(self) -> None:
        """Finish the exchange and add."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        if len(self._parts) == 2:
            torch.add(self._parts[0], self._parts[1], out=self._out)
        else:
            torch.sum(self._parts, 0, out=self._out)


def all_reduce(t: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Work | None:
    """Reduce `t` over the group in place; every rank then holds the same bits.

    Args:
        t: any shape, partial over the group; the sum is formed in t's dtype.
        op: "sum", "max" or "min".
        async_op: return a handle instead of waiting.

    Comm: one all-reduce of t.numel() elements; a ring sends 2 (n-1)/n of them per rank.
    """
    if group.size == 1:
        return _completed(async_op)
    _record(group, f"all_reduce.{op}", t.numel(), t)
    return dist.all_reduce(t, _REDUCE_OPS[op], group=group.communicator, async_op=async_op)


def all_gather_into(out: Tensor, t: Tensor, group: Group, async_op: bool = False) -> Work | None:
    """Concatenate the ranks' `t` along dim 0 into `out`, in the group's rank order.

    Args:
        out: [size * t.shape[0], ...], overwritten, replicated afterwards.
        t: [m, ...], shard(0) over the group, same dtype; may be this rank's slice of `out`.

    Comm: one all-gather of out.numel() elements; (n-1)/n of them sent per rank.
    """
    _check_stacked("all_gather_into", whole=out, part=t, group=group)
    if group.size == 1:
        _copy_unless_same(out, t)
        return _completed(async_op)
    _record(group, "all_gather", out.numel(), t)
    return _all_gather(out, t, group=group.communicator, async_op=async_op)


def reduce_scatter_into(
    out: Tensor, t: Tensor, group: Group, op: str = "sum", async_op: bool = False
) -> Work | None:
    """Reduce `t` over the group and leave each rank its slice of dim 0.

    Args:
        out: [m, ...], overwritten, shard(0) over the group afterwards.
        t: [size * m, ...], partial over the group, same dtype; contents undefined afterwards.

    Comm: one reduce-scatter of t.numel() elements; (n-1)/n of them sent per rank.
    """
    _check_stacked("reduce_scatter_into", whole=t, part=out, group=group)
    if group.size == 1:
        _copy_unless_same(out, t)
        return _completed(async_op)
    _record(group, f"reduce_scatter.{op}", t.numel(), t)
    if op == "sum" and dist.get_backend(group.communicator) == "gloo":
        exchange = _ExchangeThenSum(out, t, group)
        if async_op:
            return exchange
        exchange.wait()
        return None
    return _reduce_scatter(out, t, op=_REDUCE_OPS[op], group=group.communicator, async_op=async_op)


def broadcast(t: Tensor, group: Group, src_index: int = 0, async_op: bool = False) -> Work | None:
    """Overwrite `t` with the value of the group's rank number `src_index`.

    Comm: one broadcast of t.numel() elements.
    """
    if group.size == 1:
        return _completed(async_op)
    _record(group, "broadcast", t.numel(), t)
    # Global rank: the group-relative argument is newer than the oldest torch supported.
    src = group.ranks[src_index]
    return dist.broadcast(t, src, group=group.communicator, async_op=async_op)


def all_to_all_single(
    out: Tensor,
    inp: Tensor,
    out_splits: Sequence[int] | None,
    in_splits: Sequence[int] | None,
    group: Group,
    async_op: bool = False,
) -> Work | None:
    """Send slice j of `inp` (dim 0) to rank j and stack what arrives in rank order.

    Args:
        out: [sum(out_splits), ...], overwritten; None splits means equal slices.
        inp: [sum(in_splits), ...], same dtype.

    Comm: one all-to-all; inp.numel() elements leave this rank, its own slice included.
    """
    if group.size == 1:
        _copy_unless_same(out, inp)
        return _completed(async_op)
    _record(group, "all_to_all", inp.numel(), inp)
    return dist.all_to_all_single(
        out,
        inp,
        None if out_splits is None else list(out_splits),
        None if in_splits is None else list(in_splits),
        group=group.communicator,
        async_op=async_op,
    )


def barrier(group: Group) -> None:
    """Return when every rank of the group has called it.

    Comm: one barrier, recorded with 0 elements.
    """
    if group.size == 1:
        return
    if group.recorder is not None:
        group.recorder.record("barrier", group.name, 0, "none")
    device = group_device(group)
    device_ids = [device.index] if device.type == "cuda" else None
    dist.barrier(group=group.communicator, device_ids=device_ids)


def gather_bytes(value: bytes, group: Group) -> list[bytes]:
    """Give every rank the bytes of all ranks, in the group's rank order.

    Comm: two all-gathers: the lengths (n int64), then n slots of the longest (uint8).
    """
    if group.size == 1:
        return [value]
    device = group_device(group)
    lengths = torch.zeros(group.size, dtype=torch.int64, device=device)
    all_gather_into(lengths, torch.tensor([len(value)], device=device), group)
    sizes: list[int] = lengths.tolist()
    # At least one element: backends differ on empty messages.
    slot = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=device)
    if value:
        slot[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(device)
    slots = torch.zeros(group.size * slot.numel(), dtype=torch.uint8, device=device)
    all_gather_into(slots, slot, group)
    rows = slots.view(group.size, slot.numel()).cpu().numpy()
    return [rows[index, :size].tobytes() for index, size in enumerate(sizes)]


def all_gather_json(obj: Any, group: Group) -> list[Any]:
    """Give every rank the JSON-able objects of all ranks, in the group's rank order.

    JSON and not pickle: what arrives from another rank is data, never code. A group of
    one returns the object after the same round trip (tuples become lists).

    Comm: as `gather_bytes`.
    """
    message = json.dumps(obj, separators=(",", ":")).encode()
    return [json.loads(part) for part in gather_bytes(message, group)]


def agree(value: bytes | str, group: Group, what: str = "a value") -> None:
    """Check that every rank of the group holds the same `value`.

    Comm: as `gather_bytes`.

    Raises:
        UserError: on every rank with the same message, naming `what`, a rank that
            differs from the first rank, and both values.
    """
    message = value.encode() if isinstance(value, str) else value
    gathered = gather_bytes(message, group)
    for index, other in enumerate(gathered):
        if other != gathered[0]:
            raise UserError(
                f"{what} differs between ranks: {_shown(gathered[0])} on rank {group.ranks[0]}, "
                f"{_shown(other)} on rank {group.ranks[index]}"
            )


def group_device(group: Group) -> torch.device:
    """Device on which the group's backend wants its tensors."""
    if group.communicator is not None and dist.get_backend(group.communicator) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _record(group: Group, op: str, elements: int, t: Tensor) -> None:
    if group.recorder is not None:
        group.recorder.record(op, group.name, elements, str(t.dtype).removeprefix("torch."))


def _completed(async_op: bool) -> Work | None:
    return CompletedWork() if async_op else None


def _copy_unless_same(out: Tensor, t: Tensor) -> None:
    if out.data_ptr() != t.data_ptr():
        out.copy_(t)


def _check_stacked(name: str, whole: Tensor, part: Tensor, group: Group) -> None:
    """Backends accept any shapes of the right element count, and mix rows silently."""
    expected = (part.shape[0] * group.size, *part.shape[1:])
    if tuple(whole.shape) != expected or whole.dtype != part.dtype:
        raise ValueError(
            f"{name} over {group.name} of {group.size}: {list(part.shape)} {part.dtype} per "
            f"rank makes {list(expected)}, not {list(whole.shape)} {whole.dtype}"
        )


def _shown(value: bytes) -> str:
    text = value.decode(errors="replace")
    return repr(text if len(text) <= 200 else text[:200] + "...")
