"""JSON as checkpoints use it: canonical when written, strict and bounded when read.

Checkpoint metadata is input from a disk that may be damaged or from somebody else, so
the reader refuses what Python's `json` lets through: NaN and infinities, duplicate keys,
numbers out of range, unknown or missing keys, documents of unlimited size or depth.
Every refusal is a `DamagedError` that names the file and the reason.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_lite.errors import DamagedError

MAX_DEPTH = 32
MAX_INTEGER = 2**64 - 1
MAX_DIMS = 8


def encode_json(value: Any) -> bytes:
    """Return the one canonical encoding: sorted keys, no spaces, ASCII, a final newline."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def plain_json(value: Any, where: str = "state") -> Any:
    """Return `value` with tuples as lists, refusing what would not come back unchanged.

    Raises:
        TypeError, ValueError: a defect of the caller; the message has the path of the value.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"{where}: integer {value} needs more than 64 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a JSON number")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not a string")
        return {key: plain_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise TypeError(f"{where}: {type(value).__name__} is not a JSON value")


def parse_json(data: bytes, source: str, max_bytes: int) -> Any:
    """Parse one JSON document strictly.

    Args:
        data: the document, UTF-8.
        source: file name for the error message.
        max_bytes: size limit; larger documents are refused unread.
    """
    if len(data) > max_bytes:
        raise DamagedError(f"{source}: {len(data)} bytes of JSON, at most {max_bytes} are accepted")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except RecursionError:
        raise DamagedError(f"{source}: JSON nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise DamagedError(f"{source}: not valid JSON ({error})") from None
    _check_depth(value, source)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:32]} is out of range")
    return value


def _bounded_int(text: str) -> int:
    value = int(text) if len(text) <= 21 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise ValueError(f"integer {text[:32]} needs more than 64 bits")
    return value


def _check_depth(value: Any, source: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(v for v in item.values() if isinstance(v, (dict, list)))
            elif isinstance(item, list):
                inner.extend(v for v in item if isinstance(v, (dict, list)))
        if not inner:
            return
        level = inner
    raise DamagedError(f"{source}: JSON nested deeper than {MAX_DEPTH} levels")


def expect_object(value: Any, keys: Iterable[str], source: str) -> dict[str, Any]:
    """Return `value` if it is an object with exactly these keys."""
    if not isinstance(value, dict):
        raise DamagedError(f"{source}: expected an object, found {_brief(value)}")
    wanted = set(keys)
    if value.keys() != wanted:
        missing = ", ".join(sorted(wanted - value.keys())) or "none"
        unknown = ", ".join(sorted(map(_brief, value.keys() - wanted))) or "none"
        raise DamagedError(f"{source}: missing keys: {missing}; unknown keys: {unknown}")
    return value


def expect_list(value: Any, source: str) -> list[Any]:
    """Return `value` if it is an array."""
    if not isinstance(value, list):
        raise DamagedError(f"{source}: expected an array, found {_brief(value)}")
    return value


def expect_int(value: Any, source: str, upper: int = 2**63 - 1) -> int:
    """Return `value` if it is an integer in 0..upper."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= upper:
        raise DamagedError(f"{source}: expected an integer in 0..{upper}, found {_brief(value)}")
    return value


def expect_text(value: Any, pattern: re.Pattern[str], source: str) -> str:
    """Return `value` if it is a string that matches `pattern` completely."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise DamagedError(f"{source}: illegal value {_brief(value)}")
    return value


def expect_dims(value: Any, source: str) -> tuple[int, ...]:
    """Return `value` as a tuple if it is a shape or an offset of at most 8 dims."""
    dims = expect_list(value, source)
    if len(dims) > MAX_DIMS:
        raise DamagedError(f"{source}: {len(dims)} dims, at most {MAX_DIMS} are accepted")
    return tuple(expect_int(dim, source) for dim in dims)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
