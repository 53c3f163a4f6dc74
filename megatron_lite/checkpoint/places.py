"""Where a checkpoint may be saved: not in the folders that another save directory owns.

What lies below attempts/, published/ or epochs/ of a run, or in a view of one of its steps,
is deleted by that run's retention, or taken for a file of its own. Torch-free, so that it is
refused before anything is written or loaded.
"""

from pathlib import Path

from megatron_lite.checkpoint.commit import VIEW_POINTER_FILE
from megatron_lite.checkpoint.fence import EPOCH_FOLDER
from megatron_lite.checkpoint.manifest import ATTEMPT_PATTERN
from megatron_lite.errors import UserError

OWN_FOLDERS = ("attempts", "published", EPOCH_FOLDER)


def check_save_place(root: Path) -> None:
    """Check that `root` can be a directory and lies in no folder of another save directory.

    Raises:
        UserError: naming the file that is in the way, or the folder and whose it is.
    """
    path = root.resolve()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        raise UserError(f"{root}: cannot be a save directory: {there} is a file")
    for folder in (path, *path.parents):
        if folder.parent.name == "attempts" and ATTEMPT_PATTERN.fullmatch(folder.name):
            raise UserError(
                f"{root}: lies inside the checkpoint {folder}, which retention may delete: "
                "save to another directory"
            )
        if (folder / VIEW_POINTER_FILE).is_file():
            raise UserError(
                f"{root}: lies inside {folder}, a view of one checkpoint of {folder.parent}: "
                "save to another directory"
            )
        if folder.name in OWN_FOLDERS and _is_save_directory(folder.parent):
            raise UserError(
                f"{root}: lies inside {folder}, which belongs to the checkpoints of "
                f"{folder.parent}: save to that directory or to another one"
            )


def _is_save_directory(path: Path) -> bool:
    """Whether checkpoints are saved here: one of the names alone says nothing."""
    return sum((path / name).is_dir() for name in OWN_FOLDERS) >= 2
