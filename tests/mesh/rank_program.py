"""A program of a few lines whose ranks fail in the ways that `test_guard.py` names."""

import os
import signal
import sys
import time

from megatron_lite.errors import DamagedError, RunStopped, UserError
from megatron_lite.mesh.launch import (
    RunStatus,
    WorldInfo,
    detect_world,
    finish_distributed,
    init_distributed,
    run_guarded,
)


def run(case: str, info: WorldInfo, status: RunStatus) -> int:
    if case == "refused":
        raise UserError("the flags do not fit")
    if case == "refused-slowly-on-0":
        time.sleep(2 if info.rank == 0 else 0)
        raise UserError("the flags do not fit")
    if case == "alone-before-meeting" and info.rank == 1:
        raise UserError("only this rank lacks its file")
    init_distributed(info, "cpu", timeout_minutes=1, status=status)
    import torch

    from megatron_lite.mesh.collectives import all_reduce
    from megatron_lite.mesh.grid import Grid, Grids
    from megatron_lite.mesh.groups import build_groups

    grids = Grids(
        Grid(("tp", "cp", "dp", "pp"), (1, 1, info.world_size, 1)),
        Grid(("etp", "ep", "edp", "pp"), (1, 1, info.world_size, 1)),
    )
    groups = build_groups(grids, info.rank, kv_heads=1)
    for step in range(1, 4):
        status.step, status.phase = step, "forward"
        if step == 2:
            fail(case, info)
        total = torch.ones(1)
        all_reduce(total, groups.dp)
        assert total.item() == info.world_size
    finish_distributed()
    return 0


def fail(case: str, info: WorldInfo) -> None:
    chosen = info.rank == int(case.rpartition("-")[2]) if case[-1].isdigit() else True
    if not chosen:
        return
    if case.startswith("token"):
        raise DamagedError("token 99 is out of range")
    if case.startswith("bug"):
        raise ZeroDivisionError("a planted defect")
    if case.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "stopped":
        raise RunStopped("stopped on SIGTERM after saving step 2")


def main(case: str, save_dir: str | None) -> int:
    info = detect_world(os.environ)
    status = RunStatus()
    return run_guarded(lambda: run(case, info, status), info, save_dir, status=status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
