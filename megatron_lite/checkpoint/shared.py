"""Is the save directory one directory for all ranks? Found out before the first step.

On nodes with disks of their own every rank would write its shard to another place under the
same name, and the first save would fail after hours. Rank 0 leaves a marker, all look for it.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.together import every_rank, first_rank
from megatron_lite.errors import UserError
from megatron_lite.mesh.groups import Group


def check_shared(root: Path, group: Group, files: FileSystem | None = None) -> None:
    """Raise on all ranks unless every rank sees a file that rank 0 makes.

    Comm: two exchanges of a few hundred bytes per rank over `group`; none for one rank.
    """
    if group.size == 1:
        return
    files = files or FileSystem()
    folder = root / "attempts"

    def mark() -> str:
        files.ensure_directory(folder)
        path = folder / f".shared-{secrets.token_hex(8)}"
        files.create(path).close()
        return path.name

    name = first_rank(mark, group, root)

    def look() -> None:
        if not (folder / name).exists():
            raise UserError(
                f"save directory is not shared: rank {group.rank} does not see {folder / name}, "
                "which rank 0 has made; --save must name a directory that all nodes share"
            )

    try:
        every_rank(look, group, root)
    finally:
        if group.rank == 0:
            files.remove_file(folder / name)
