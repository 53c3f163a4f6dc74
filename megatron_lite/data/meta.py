"""What is recorded beside an indexed dataset, in PREFIX.meta.json.

It ties the ids to the tokenizer that made them: a model of a smaller vocabulary is
refused at start-up instead of at the first rare token. Datasets of other tools have no
such file; they are accepted and every token is checked when it is read.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from megatron_lite.errors import DamagedError


@dataclass(frozen=True)
class DatasetMeta:
    """Facts about one dataset; None means not known."""

    tokenizer_type: str
    tokenizer_sha256: str | None
    vocab_size: int
    eod: int | None
    max_token_id: int
    documents: int
    tokens: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    bin_sha256: str | None = None


def meta_path(prefix: str | Path) -> Path:
    """Return the path of the record of a prefix."""
    return Path(f"{prefix}.meta.json")


def load_meta(prefix: str | Path) -> DatasetMeta | None:
    """Read the record of a dataset; None where there is none.

    Raises:
        DamagedError: the file is there but is not such a record.
    """
    path = meta_path(prefix)
    if not path.exists():
        return None
    known = {f.name for f in fields(DatasetMeta)}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        meta = DatasetMeta(**{k: v for k, v in content.items() if k in known})
        _check_types(meta)
    except (IsADirectoryError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{path}: not a dataset record ({error}); delete it to do without"
        ) from None
    return meta


def _check_types(meta: DatasetMeta) -> None:
    """Refuse a record whose numbers are none: they are compared with the run's.

    Raises:
        ValueError: naming the first wrong field.
    """
    for name in ("vocab_size", "max_token_id", "documents", "tokens", "eod"):
        value = getattr(meta, name)
        if not (isinstance(value, int) or (name == "eod" and value is None)):
            raise ValueError(f"{name} is {value!r}, not an integer")
    if meta.vocab_size < 1:
        raise ValueError(f"vocab_size is {meta.vocab_size}, not a positive number")
    if not isinstance(meta.skipped, dict):
        raise ValueError(f"skipped is {meta.skipped!r}, not a mapping of counts")


def save_meta(prefix: str | Path, meta: DatasetMeta) -> None:
    """Write the record under its final name in one step."""
    path = meta_path(prefix)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(asdict(meta), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
