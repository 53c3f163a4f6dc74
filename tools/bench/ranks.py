"""The ranks of a benchmark: started here, or by a launcher.

`run` is the whole life of a program that measures between ranks: outside a launcher it starts
itself as so many processes, which meet over a file in a temporary folder; inside one (torchrun,
srun, mpirun) it is a rank. Either way each rank runs guarded: one message, one exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.errors import UserError
from megatron_lite.mesh.launch import (
    RunStatus,
    WorldInfo,
    detect_world,
    finish_distributed,
    init_distributed,
    run_program,
)

if TYPE_CHECKING:
    from megatron_lite.mesh.groups import Group

MAX_STARTED = 64  # on one machine; more need a launcher


def run(
    program: str,
    arguments: Sequence[str],
    ranks: int,
    device: str,
    measure: Callable[[WorldInfo], None],
) -> int:
    """Run `measure` on every rank; return the code to exit with.

    Args:
        program: file of the calling program, started again for each rank.
        arguments: its command line.
        ranks: the ranks that it needs; a launcher may have started more.
        device: "cpu" or "cuda".
        measure: the work of one rank, with the default process group made.
    """
    try:
        info = detect_world(os.environ)
        alone = info.launcher == "python"
        if alone:
            check_ranks(ranks, device)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if alone:
        return _start(program, arguments, ranks)
    return run_program(partial(_rank, ranks, device, measure), os.environ)


def check_ranks(ranks: int, device: str) -> None:
    """Refuse what this machine cannot start."""
    if ranks > MAX_STARTED:
        raise UserError(f"{ranks} ranks are too many for one machine; start them with torchrun")
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < ranks:
            raise UserError(
                f"{ranks} ranks need as many CUDA devices, this machine has "
                f"{torch.cuda.device_count()}: use fewer ranks or --device cpu"
            )


def _rank(
    ranks: int,
    device: str,
    measure: Callable[[WorldInfo], None],
    info: WorldInfo,
    status: RunStatus,
) -> int:
    if info.world_size < ranks:
        raise UserError(f"{ranks} ranks are needed, {info.world_size} were started")
    init_distributed(info, device, status=status)
    measure(info)
    finish_distributed()
    return 0


def _start(program: str, arguments: Sequence[str], ranks: int) -> int:
    """Start the ranks here and wait for them; the first code that is not 0."""
    root = Path(__file__).resolve().parents[2]
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        environ = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.getenv("PYTHONPATH")))),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MLITE_RENDEZVOUS": f"file://{directory}/meet",
        }
        try:
            for rank in range(ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, program, *arguments]
                processes.append(subprocess.Popen(command, env=environ | place))
            codes = [process.wait() for process in processes]
        except KeyboardInterrupt:
            codes = [130]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return next((code for code in codes if code != 0), 0)


def new_group(name: str, ranks: Sequence[int], rank: int) -> Group | None:
    """A process group of the given ranks; None on the others. All ranks of the world call it.

    Comm: rendezvous through the store.
    """
    import torch.distributed as dist

    from megatron_lite.mesh.groups import Group

    created = dist.new_group(list(ranks))
    if rank not in ranks:
        return None
    assert isinstance(created, dist.ProcessGroup)
    return Group(name, tuple(ranks), list(ranks).index(rank), created)


def default_device() -> str:
    """CUDA where torch finds it."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str:
    """The processor that the figures are of."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"


def parse_bytes(text: str) -> int:
    """ "64K" -> 65536; the suffixes are K, M and G."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    if not digits.isdigit() or not int(digits):
        raise UserError(f"size {text!r}: a number above 0, with K, M or G behind it or not")
    return int(digits) * factor


def check_writable(path: str | None) -> None:
    """Refuse an output file before anything is measured for it."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise UserError(f"--out {path}: no file can be written there")
