"""Rank <-> coordinate <-> group, as arithmetic on integers.

A grid is a mixed-radix number: the first axis is the fastest digit of the rank. Attention
and dense layers live on the dense grid (tp, cp, dp, pp), experts on a grid of their own
(etp, ep, edp, pp) over the same ranks ("parallel folding"). Invariant: the groups of any
set of axes partition the ranks, and both grids have the same pipeline groups.
No torch: a login node answers for 16,384 ranks in milliseconds.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megatron_lite.config.plan import ParallelShape
from megatron_lite.errors import UserError

RANK_ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")


@dataclass(frozen=True)
class Grid:
    """Named axes, fastest first, and their sizes; ranks are 0 ... world_size - 1."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"axes {self.axes} and sizes {self.sizes} do not pair up")
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"every axis needs at least one rank: {self.axes} {self.sizes}")

    @property
    def world_size(self) -> int:
        """Number of ranks on the grid."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Number of ranks along one axis."""
        return self.sizes[self._index(axis)]

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along one axis."""
        return prod(self.sizes[: self._index(axis)])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis, axes in the grid's order."""
        self._check_rank(rank)
        coordinate: dict[str, int] = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank, coordinate[axis] = divmod(rank, size)
        return coordinate

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate that names every axis of the grid and no other."""
        if set(coordinate) != set(self.axes):
            raise ValueError(f"coordinate {dict(coordinate)} does not name the axes {self.axes}")
        rank, stride = 0, 1
        for axis, size in zip(self.axes, self.sizes, strict=True):
            position = coordinate[axis]
            if not 0 <= position < size:
                raise ValueError(f"{axis}={position} is outside 0..{size - 1}")
            rank += position * stride
            stride *= size
        return rank

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Ranks that share with `rank` all coordinates except those of `axes`, ascending."""
        offsets = self._offsets(axes)
        coordinate = self.coordinate(rank)
        base = rank - sum(coordinate[axis] * self.stride(axis) for axis in axes)
        return tuple(base + offset for offset in offsets)

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups over `axes`, by their first rank; together they are every rank once."""
        offsets = self._offsets(axes)
        others = tuple(axis for axis in self.axes if axis not in axes)
        return tuple(tuple(base + off for off in offsets) for base in self._offsets(others))

    def _offsets(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Rank offsets of one group from its first rank, ascending."""
        if len(set(axes)) != len(axes):
            raise ValueError(f"an axis is named twice in {axes}")
        # Slowest axis first makes the product ascend.
        slowest_first = sorted(axes, key=self._index, reverse=True)
        steps = [
            range(0, self.size(axis) * self.stride(axis), self.stride(axis))
            for axis in slowest_first
        ]
        return tuple(sum(parts) for parts in itertools.product(*steps))

    def _index(self, axis: str) -> int:
        try:
            return self.axes.index(axis)
        except ValueError:
            raise ValueError(f"no axis {axis!r} on a grid with the axes {self.axes}") from None

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")


@dataclass(frozen=True)
class Grids:
    """The two grids over the same ranks: `dense` (tp, cp, dp, pp), `expert` (etp, ep, edp, pp)."""

    dense: Grid
    expert: Grid

    @property
    def world_size(self) -> int:
        """Number of ranks on each of the grids."""
        return self.dense.world_size


def build_grids(parallel: ParallelShape) -> Grids:
    """Lay the axes out in the rank order that `parallel` names.

    Raises:
        UserError: the sizes do not multiply to the world size, the order is unknown, or
            the two grids would put a rank on different pipeline stages.
    """
    if parallel.order not in RANK_ORDERS:
        raise UserError(f"rank order {parallel.order!r} is not one of {', '.join(RANK_ORDERS)}")
    order = parallel.order.split("-")
    dense_sizes = {"tp": parallel.tp, "cp": parallel.cp, "dp": parallel.dp, "pp": parallel.pp}
    expert_names = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
    expert_sizes = {
        "etp": parallel.etp,
        "ep": parallel.ep,
        "edp": parallel.edp,
        "pp": parallel.pp,
    }
    dense_axes = tuple(axis for axis in order if axis in dense_sizes)
    expert_axes = tuple(expert_names[axis] for axis in order if axis in expert_names)
    dense = Grid(dense_axes, tuple(dense_sizes[axis] for axis in dense_axes))
    expert = Grid(expert_axes, tuple(expert_sizes[axis] for axis in expert_axes))
    for grid in (dense, expert):
        if grid.world_size != parallel.world_size:
            product = " x ".join(
                f"{axis}={size}" for axis, size in zip(grid.axes, grid.sizes, strict=True)
            )
            raise UserError(
                f"{product} = {grid.world_size} ranks, but the world has {parallel.world_size}"
            )
    if parallel.pp > 1 and dense.stride("pp") != expert.stride("pp"):
        raise UserError(
            f"rank order {parallel.order} with pp={parallel.pp} needs tp x cp = etp x ep, "
            f"because a rank has one pipeline stage for dense and expert layers; "
            f"here {parallel.tp} x {parallel.cp} and {parallel.etp} x {parallel.ep} "
            f"(rank order {RANK_ORDERS[0]} has no such limit)"
        )
    return Grids(dense, expert)


def kv_replica_count(tp_size: int, kv_heads: int) -> int:
    """Number of consecutive tp ranks that hold the same KV head(s); 1 without replication.

    Raises:
        UserError: neither of tp_size and kv_heads divides the other.
    """
    if kv_heads % tp_size == 0:
        return 1
    if tp_size % kv_heads == 0:
        return tp_size // kv_heads
    raise UserError(
        f"{kv_heads} KV heads cannot be spread over tp={tp_size}: one must divide the other"
    )


def kv_replica_ranks(grid: Grid, rank: int, kv_heads: int) -> tuple[int, ...]:
    """Ranks of `rank`'s tp group that hold the same KV head(s), ascending.

    With g KV heads < tp each head lives on tp/g consecutive tp ranks, and the gradient of
    its k and v rows is partial over them.
    """
    replicas = kv_replica_count(grid.size("tp"), kv_heads)
    tp_ranks = grid.group(rank, ("tp",))
    start = grid.coordinate(rank)["tp"] // replicas * replicas
    return tp_ranks[start : start + replicas]
