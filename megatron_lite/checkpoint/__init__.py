"""Checkpoints as transactions over logical tensors, the same in any layout.

    save_checkpoint(root, step, entries, state, group, ...)     all ranks together
    find_checkpoint(path, step=None) -> Found                   newest that verifies
    open_checkpoint(path, step=None) -> Checkpoint              .state .names .read(box)
    load_newest(path, group, load, step=None) -> Loaded         all ranks, with fallback
    compare_state(saved, current, allow) -> lines to log        before resuming
    read_safetensors(path), write_safetensors(path, tensors)    plain files (debug dumps)

A run's directory: attempts/STEP-EPOCH-NONCE/{rankNNNNN.safetensors, rankNNNNN.receipt.json,
manifest.json} and published/STEP.json, whose creation commits (`commit.py`). Views for
people: iter_XXXXXXX, latest_checkpointed_iteration.txt. The modules without tensors
(manifest, verify, commit, catalog, retention) need no torch; therefore the names above
are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lite.checkpoint.catalog import Found, NoCheckpoint, PassedOver, find_checkpoint
    from megatron_lite.checkpoint.load import Loaded, load_newest
    from megatron_lite.checkpoint.reader import Checkpoint, NameCheck, logical_hash, open_checkpoint
    from megatron_lite.checkpoint.resume import compare_state
    from megatron_lite.checkpoint.save import SaveResult, save_checkpoint
    from megatron_lite.checkpoint.tensors import (
        StateEntry,
        read_safetensors,
        read_safetensors_metadata,
        write_safetensors,
    )

_MODULES = {
    "Checkpoint": "reader",
    "Found": "catalog",
    "Loaded": "load",
    "NameCheck": "reader",
    "NoCheckpoint": "catalog",
    "PassedOver": "catalog",
    "SaveResult": "save",
    "StateEntry": "tensors",
    "compare_state": "resume",
    "find_checkpoint": "catalog",
    "load_newest": "load",
    "logical_hash": "reader",
    "open_checkpoint": "reader",
    "read_safetensors": "tensors",
    "read_safetensors_metadata": "tensors",
    "save_checkpoint": "save",
    "write_safetensors": "tensors",
}
__all__ = [
    "Checkpoint",
    "Found",
    "Loaded",
    "NameCheck",
    "NoCheckpoint",
    "PassedOver",
    "SaveResult",
    "StateEntry",
    "compare_state",
    "find_checkpoint",
    "load_newest",
    "logical_hash",
    "open_checkpoint",
    "read_safetensors",
    "read_safetensors_metadata",
    "save_checkpoint",
    "write_safetensors",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
