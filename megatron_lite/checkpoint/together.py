"""Success or failure of a step of save or load is one fact for all ranks.

A rank that raised alone would leave the others in their next collective. So every step
ends with an exchange of outcomes, and an error on one rank is raised on all, with that
rank's message and its exit code.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.catalog import NoCheckpoint
from megatron_lite.checkpoint.files import storage_error
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.mesh.collectives import all_gather_json
from megatron_lite.mesh.groups import Group

_ERRORS = {"UserError": UserError, "DamagedError": DamagedError, "NoCheckpoint": NoCheckpoint}


def every_rank(work: Callable[[], Any], group: Group, place: Path) -> list[Any]:
    """Do `work` on every rank and return all results (JSON-able), or raise on all ranks.

    Args:
        place: named in the message where an operating system error names no file.

    Comm: `all_gather_json` of the results and a few bytes more.
    """
    value, failure = _outcome(work, place)
    reports = all_gather_json(_report(value, failure), group)
    if failure is not None and not isinstance(failure, UserError):
        raise failure  # a defect keeps its traceback on its own rank
    for rank, report in enumerate(reports):
        if report["kind"] is not None:
            prefix = f"rank {rank}: " if group.size > 1 else ""
            raise _error(report, prefix) from failure
    return [report["value"] for report in reports]


def first_rank(work: Callable[[], Any], group: Group, place: Path) -> Any:
    """Do `work` on rank 0 and return its result (JSON-able) on all, or raise on all ranks.

    Comm: as `every_rank`.
    """
    value, failure = _outcome(work, place) if group.rank == 0 else (None, None)
    report = all_gather_json(_report(value, failure), group)[0]
    if failure is not None and not isinstance(failure, UserError):
        raise failure
    if report["kind"] is not None:
        raise _error(report, "") from failure
    return report["value"]


def _outcome(work: Callable[[], Any], place: Path) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except OSError as error:
        return None, storage_error(error, place)
    except Exception as error:
        return None, error


def _report(value: Any, failure: Exception | None) -> dict[str, Any]:
    if failure is None:
        return {"value": value, "kind": None, "message": ""}
    return {"value": None, "kind": type(failure).__name__, "message": str(failure)}


def _error(report: dict[str, Any], prefix: str) -> Exception:
    kind = _ERRORS.get(report["kind"])
    if kind is None:
        return RuntimeError(f"{prefix}{report['kind']}: {report['message']}")
    return kind(f"{prefix}{report['message']}")
