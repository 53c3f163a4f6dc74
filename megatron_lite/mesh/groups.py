"""Process groups as frozen values that are passed explicitly.

A `Group` is what one rank sees of one process group; `Groups` holds every group a rank
belongs to. Invariant: all ranks create their groups in the order of `_GROUP_AXES`, and the
groups of one entry are disjoint, so creation cannot deadlock. Groups of one rank exist
without torch.distributed. Where a second lane works beside the main thread, the groups that
stages talk over have a communicator for each.
"""

from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from megatron_lite.mesh.grid import Grids, kv_replica_ranks
from megatron_lite.mesh.lane import Lane
from megatron_lite.mesh.recorder import Recorder

# name, grid, axes; the order in which every rank creates them.
_GROUP_AXES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("tp", "dense", ("tp",)),
    ("cp", "dense", ("cp",)),
    ("dp", "dense", ("dp",)),
    ("dp_cp", "dense", ("cp", "dp")),
    ("pp", "dense", ("pp",)),
    ("tp_pp", "dense", ("tp", "pp")),
    ("etp", "expert", ("etp",)),
    ("ep", "expert", ("ep",)),
    ("edp", "expert", ("edp",)),
    ("expert_block", "expert", ("etp", "ep")),
    ("tp_cp", "dense", ("tp", "cp")),
    ("stage", "dense", ("tp", "cp", "dp")),
)

# What the passes of a stage talk over, forward or backward.
_STAGE_GROUPS = ("tp", "cp", "tp_cp", "etp", "ep", "expert_block")
_EXPERT_GROUPS = ("etp", "ep", "edp", "edp_shard", "edp_replicate", "expert_block")


@dataclass(frozen=True, eq=False)
class Group:
    """One process group as seen from this rank.

    `ranks` are global ranks, ascending; `rank` is this rank's index inside them. A group
    of one has no process group, and collectives over it are the identity. `twin` is the
    process group of `lane`, where the group is used in one.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None
    recorder: Recorder | None = field(default=None, repr=False)
    lane: Lane | None = field(default=None, repr=False)
    twin: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def communicator(self) -> dist.ProcessGroup | None:
        """The process group of the lane that the caller runs in; see `lane.py`."""
        in_lane = self.lane is not None and self.lane.is_here()
        return self.twin if in_lane else self.process_group

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of one rank, one per axis or set of axes that something is reduced over.

    `dp_shard` is the part of `dp_cp` that shards model state, consecutive ranks of it, and
    `dp_replicate` the ranks with the same shard; `edp_shard` and `edp_replicate` likewise.
    `tp_pp` is Megatron's model-parallel group; `kv_replica` the part of `tp` that holds
    the same KV heads; `tied_ends` the first and the last rank of `pp` (its other ranks have
    a group of their own, which nothing uses); `etp`, `ep` and `edp` live on the expert grid,
    and so does `expert_block`: ranks that together hold all experts once, in whose midst
    tokens travel. `tp_cp` holds the parts of one microbatch, `stage` all ranks of a stage.
    """

    world: Group
    tp: Group
    cp: Group
    dp: Group
    dp_cp: Group
    dp_shard: Group
    dp_replicate: Group
    pp: Group
    tp_pp: Group
    kv_replica: Group
    tied_ends: Group
    etp: Group
    ep: Group
    edp: Group
    edp_shard: Group
    edp_replicate: Group
    expert_block: Group
    tp_cp: Group
    stage: Group


def local_group(name: str, recorder: Recorder | None = None) -> Group:
    """A group of one rank: one process without torch.distributed, and tests."""
    return Group(name, (0,), 0, None, recorder)


def local_groups(recorder: Recorder | None = None) -> Groups:
    """The groups of a run of one process."""
    names = ["world", "kv_replica", "tied_ends", *(name for name, _, _ in _GROUP_AXES)]
    names += [f"{data}_{part}" for data in ("dp", "edp") for part in ("shard", "replicate")]
    return Groups(**{name: local_group(name, recorder) for name in names})


def _ends(pipeline: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The two ends of a pipeline for its ends, what is between them for the others."""
    ends = (pipeline[0], pipeline[-1])
    return tuple(sorted(set(ends))) if rank in ends else pipeline[1:-1]


def shard_ranks(data: tuple[int, ...], rank: int, instances: int) -> dict[str, tuple[int, ...]]:
    """Cut a data group into equal instances: "shard" ranks in one, "replicate" over all.

    The ranks of an instance are consecutive in the group, so that they fill nodes.
    """
    size, index = len(data) // instances, data.index(rank)
    first = index - index % size
    return {"shard": data[first : first + size], "replicate": data[index % size :: size]}


def world_group(rank: int, world_size: int, recorder: Recorder | None = None) -> Group:
    """All ranks, on the default process group: what can be talked over before the axes."""
    ranks = tuple(range(world_size))
    return Group("world", ranks, rank, dist.group.WORLD if world_size > 1 else None, recorder)


def build_groups(
    grids: Grids,
    rank: int,
    kv_heads: int,
    *,
    instances: int = 1,
    recorder: Recorder | None = None,
    timeout: timedelta | None = None,
    lane: Lane | None = None,
) -> Groups:
    """Create this rank's process groups; every rank of the world calls it once.

    Args:
        grids: the dense and the expert grid; their world size is the default group's.
        rank: this rank.
        kv_heads: number of KV heads, which decides the `kv_replica` groups.
        instances: copies of sharded state; divides the ranks of `dp_cp` and of `edp`.
        recorder: collects the collectives over all returned groups.
        timeout: of each collective; the default group's when None.
        lane: works beside the main thread; None: nothing does.

    Comm: rendezvous through the store only, among the members of each group.
    """
    members = {"world": tuple(range(grids.world_size))}
    for name, grid_name, axes in _GROUP_AXES:
        grid = grids.dense if grid_name == "dense" else grids.expert
        members[name] = grid.group(rank, axes)
    members["kv_replica"] = kv_replica_ranks(grids.dense, rank, kv_heads)
    members["tied_ends"] = _ends(members["pp"], rank)
    for name, data in (("dp", members["dp_cp"]), ("edp", members["edp"])):
        for part, ranks in shard_ranks(data, rank, instances).items():
            members[f"{name}_{part}"] = ranks
    created: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if grids.world_size > 1 and dist.group.WORLD is not None:
        created[members["world"]] = dist.group.WORLD
    groups: dict[str, Group] = {}
    for name, ranks in members.items():
        process_group = None
        # Group names depend on how many groups a rank has made: a lone middle rank of a
        # pipeline makes one when the ends do.
        is_paired = name == "tied_ends" and len(members["pp"]) > 2
        if len(ranks) > 1 or is_paired:
            key = _sharing(name, ranks)
            if key not in created:
                created[key] = _create(name, ranks, timeout)
            process_group = created[key] if len(ranks) > 1 else None
        groups[name] = Group(name, ranks, ranks.index(rank), process_group, recorder)
    if lane is not None:
        groups |= _with_twins(groups, lane, timeout)
    return Groups(**groups)


def _sharing(name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Groups of equal keys share a communicator.

    Only dense groups of equal ranks do: an expert all-to-all must not queue behind the
    gradient buckets that are reduced meanwhile.
    """
    return (-1, *ranks) if name in _EXPERT_GROUPS else ranks


def _create(name: str, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    # Members alone synchronise: the whole world meeting for each group of each axis costs
    # minutes on thousands of ranks.
    new = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc=name)
    assert isinstance(new, dist.ProcessGroup), "this rank is a member"
    return new


def _with_twins(
    groups: dict[str, Group], lane: Lane, timeout: timedelta | None
) -> dict[str, Group]:
    """The groups of the passes, each with a second communicator; in one order on all ranks."""
    created: dict[tuple[int, ...], dist.ProcessGroup] = {}
    found = {}
    for name in _STAGE_GROUPS:
        group = groups[name]
        if group.size > 1:
            key = _sharing(name, group.ranks)
            if key not in created:
                created[key] = _create(f"{name} of the second lane", group.ranks, timeout)
            found[name] = replace(group, lane=lane, twin=created[key])
    return found
