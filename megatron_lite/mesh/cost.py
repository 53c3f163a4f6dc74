"""What a collective costs: bytes on the wire in closed form, time fitted to measurements.

time = alpha + beta * wire bytes, per operation, group size and number of nodes that the group
spans. `tools/bench/collectives.py` measures, fits and saves; `load_costs` reads the file again
(for estimates of jobs that do not run here). No torch. Invariant: wire bytes are what one rank
sends in a ring, as the docstrings of collectives.py count them.

The file is one JSON object; lists have at least one entry, times are microseconds, numbers finite:

    schema    "collective-costs/1"
    backend   "gloo" or "nccl";  device  name of the processor;  dtype  of the elements
    torch     version;  measured  day, "2026-11-29";  fitted  "median_us" or "least_us"
    rows      [{op, ranks, nodes, message_bytes, wire_bytes, median_us, least_us}]
    fits      [{op, ranks, nodes, alpha_us, beta_us_per_byte, error}]; error is the largest
              |fitted - measured| / measured of the times that were fitted
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lite.errors import UserError
from megatron_lite.mesh.failure_board import write_atomically

SCHEMA = "collective-costs/1"
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send_recv",
)
Key = tuple[str, int, int]  # operation, ranks of the group, nodes that it spans


def wire_bytes(op: str, ranks: int, message_bytes: float) -> float:
    """Bytes that one rank of a group sends.

    Args:
        op: one of OPERATIONS.
        ranks: size of the group.
        message_bytes: of the whole tensor: the larger of input and output for all_gather and
            reduce_scatter, one rank's input for the others.
    """
    others = (ranks - 1) / ranks
    share = {
        "all_reduce": 2 * others,
        "all_gather": others,
        "reduce_scatter": others,
        "all_to_all": others,
        "broadcast": 1.0,
        "send_recv": 1.0,
    }
    if ranks < 2:
        return 0.0
    return share[op] * message_bytes


@dataclass(frozen=True)
class Measurement:
    """Time of one operation on one message size: the slowest rank's, over rounds."""

    op: str
    ranks: int
    nodes: int
    message_bytes: int
    median_us: float
    least_us: float

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends."""
        return wire_bytes(self.op, self.ranks, self.message_bytes)

    @property
    def algorithm_gb_per_s(self) -> float:
        """Message bytes per time: what a caller sees."""
        return self.message_bytes / self.median_us / 1e3

    @property
    def bus_gb_per_s(self) -> float:
        """Wire bytes per time: comparable with the speed of the hardware."""
        return self.wire_bytes / self.median_us / 1e3


@dataclass(frozen=True)
class AlphaBeta:
    """The model alpha + beta * wire bytes, and its largest relative error on what it was fitted."""

    alpha_us: float
    beta_us_per_byte: float
    error: float

    def estimate_us(self, wire: float) -> float:
        """Time of a collective of which one rank sends `wire` bytes."""
        return self.alpha_us + self.beta_us_per_byte * wire


def fit_alpha_beta(points: Iterable[tuple[float, float]]) -> AlphaBeta:
    """Fit wire bytes -> time by least squares of the relative error; neither term is negative.

    Relative, because times span decades: absolute squares would be those of the largest
    message alone, and say nothing of alpha.

    Args:
        points: (wire bytes, microseconds), at least two different sizes, times above 0.
    """
    pairs = list(points)
    if len({wire for wire, _ in pairs}) < 2 or any(us <= 0 for _, us in pairs):
        raise ValueError(f"two sizes and times above 0 are needed, not {pairs}")
    # Minimise sum((alpha * a + beta * b - 1)^2) with a = 1 / us, b = wire / us.
    rows = [(1 / us, wire / us) for wire, us in pairs]
    aa, ab, bb = (
        math.fsum(x * y for x, y in products)
        for products in (
            [(a, a) for a, _ in rows],
            [(a, b) for a, b in rows],
            [(b, b) for _, b in rows],
        )
    )
    a_sum, b_sum = math.fsum(a for a, _ in rows), math.fsum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    alpha = (a_sum * bb - b_sum * ab) / determinant
    beta = (b_sum * aa - a_sum * ab) / determinant
    if alpha < 0:
        alpha, beta = 0.0, b_sum / bb
    elif beta < 0:
        alpha, beta = a_sum / aa, 0.0
    error = max(abs(alpha + beta * wire - us) / us for wire, us in pairs)
    return AlphaBeta(alpha, beta, error)


@dataclass(frozen=True)
class CollectiveCosts:
    """Measurements of one machine and the models fitted to them."""

    backend: str
    device: str
    dtype: str
    torch: str
    measured: str
    fitted: str
    rows: tuple[Measurement, ...]
    fits: Mapping[Key, AlphaBeta]

    def estimate_us(self, op: str, ranks: int, message_bytes: float, nodes: int = 1) -> float:
        """Time of one collective over a group of a size that was measured; 0 for one rank.

        Raises:
            UserError: this operation was not measured on such a group.
        """
        if ranks == 1:
            return 0.0
        fit = self.fits.get((op, ranks, nodes))
        if fit is None:
            known = ", ".join(f"{o} {r} ranks {n} node(s)" for o, r, n in sorted(self.fits))
            raise UserError(
                f"{op} over {ranks} ranks on {nodes} node(s) was not measured; measured: {known}"
            )
        return fit.estimate_us(wire_bytes(op, ranks, message_bytes))


def fit_all(rows: Sequence[Measurement], fitted: str) -> dict[Key, AlphaBeta]:
    """One model per operation, group size and node count, of the "median_us" or "least_us"."""
    points: dict[Key, list[tuple[float, float]]] = {}
    for row in rows:
        key = (row.op, row.ranks, row.nodes)
        points.setdefault(key, []).append((row.wire_bytes, getattr(row, fitted)))
    return {key: fit_alpha_beta(pairs) for key, pairs in points.items()}


# ---- the file --------------------------------------------------------------------------------
def save_costs(costs: CollectiveCosts, path: Path) -> None:
    """Write the file that `load_costs` reads."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        **{name: getattr(costs, name) for name in _TEXTS},
        "rows": [{**asdict(row), "wire_bytes": row.wire_bytes} for row in costs.rows],
        "fits": [
            {"op": op, "ranks": ranks, "nodes": nodes, **asdict(fit)}
            for (op, ranks, nodes), fit in costs.fits.items()
        ],
    }
    write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def load_costs(path: Path) -> CollectiveCosts:
    """Read a file of `tools/bench/collectives.py`.

    Raises:
        UserError: no such file, or not of this schema; names the entry and what is wrong.
    """
    try:
        document = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: no file of collective costs: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UserError(f'{path}: "schema" is not "{SCHEMA}" (tools/bench/collectives.py --out)')
    try:
        rows = tuple(
            Measurement(*_key(row), _count(row, "message_bytes"), *_numbers(row, _TIMES, 0.0))
            for row in _entries(document, "rows")
        )
        fits: dict[Key, AlphaBeta] = {}
        for entry in _entries(document, "fits"):
            key = _key(entry)
            if key in fits:
                raise ValueError(f'"fits" has {key} twice')
            fits[key] = AlphaBeta(*_numbers(entry, _MODEL))
        texts = {name: _text(document, name) for name in _TEXTS}
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return CollectiveCosts(**texts, rows=rows, fits=fits)


_TEXTS = ("backend", "device", "dtype", "torch", "measured", "fitted")
_TIMES = ("median_us", "least_us")
_MODEL = ("alpha_us", "beta_us_per_byte", "error")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _entries(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    entries = document.get(name)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f'"{name}" is not a list of at least one entry')
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(f'"{name}" has {entry!r}, which is not an object')
    return entries


def _key(entry: Mapping[str, Any]) -> Key:
    op, ranks, nodes = _text(entry, "op"), _count(entry, "ranks"), _count(entry, "nodes")
    if op not in OPERATIONS:
        raise ValueError(f'"op" {op!r} is not one of {", ".join(OPERATIONS)}')
    if ranks < 2 or nodes > ranks:
        raise ValueError(f"{op}: {ranks} ranks on {nodes} node(s) are no group")
    return op, ranks, nodes


def _text(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise ValueError(f'"{name}" is {value!r}, not a string')
    return value


def _count(entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f'"{name}" is {value!r}, not a whole number above 0')
    return value


def _numbers(
    entry: Mapping[str, Any], names: Sequence[str], above: float | None = None
) -> list[float]:
    """Finite numbers from 0, or above `above`."""
    values = []
    for name in names:
        value = entry.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f'"{name}" is {value!r}, not a number')
        if not 0 <= value < 1e300 or (above is not None and value <= above):
            raise ValueError(f'"{name}" is {value!r}, out of range')
        values.append(float(value))
    return values
