"""All ranks run the same thing: flags, data, tokenizer and versions are compared once.

Nodes are started by hand-edited scripts, with other copies of the data or of the package.
Unnoticed, such a run ends in a collective that waits for minutes, or trains a model that
no command line describes. Invariant: nothing is reduced before the ranks have agreed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_lite.errors import UserError
from megatron_lite.mesh.collectives import all_gather_json
from megatron_lite.mesh.groups import Group

# Where things lie on a node may differ: that their content agrees is compared separately.
LOCAL_FIELDS = (
    *("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path"),
    *("data_cache_path", "tokenizer_model", "vocab_file", "merge_file"),
    *("metrics_jsonl", "tensorboard_dir", "wandb_save_dir"),
)
SHOWN_LENGTH = 120


def check_agreement(what: str, values: Mapping[str, Any], world: Group) -> None:
    """Compare values with those of all ranks.

    Args:
        what: begins the message ("the flags", "the data").
        values: JSON-able, by the name that the message uses; fields of `LOCAL_FIELDS` are
            left out.
        world: all ranks.

    Comm: one exchange of a hash per rank; of all values where they differ.

    Raises:
        UserError: on every rank with the same message, naming the first rank that differs
            from rank 0, and each value on both.
    """
    compared = {name: value for name, value in values.items() if name not in LOCAL_FIELDS}
    text = json.dumps(compared, sort_keys=True)
    digests = all_gather_json(hashlib.sha256(text.encode()).hexdigest(), world)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    gathered = all_gather_json(compared, world)
    first, second = gathered[0], gathered[other]
    names = sorted(name for name in first.keys() | second.keys() if _differ(name, first, second))
    lines = [
        f"\n  {name}: {_show(first.get(name))} on rank 0, {_show(second.get(name))} on rank {other}"
        for name in names
    ]
    raise UserError(f"{what} of rank {other} differ from those of rank 0:{''.join(lines)}")


def _differ(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return bool(first.get(name) != second.get(name))


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]}..."
