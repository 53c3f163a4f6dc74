"""Collect text files into JSON lines: {"text", "path"}, one record per distinct content.

The order is that of the content's sha256: `--split` slices documents unshuffled, so the
parts are random samples, and the same files give the same corpus on every machine.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.errors import DamagedError, UserError

DEFAULT_SUFFIXES = (".py", ".txt", ".rst", ".md")
DEFAULT_EXCLUDES = ("__pycache__", "site-packages", "dist-packages", "node_modules")
MIN_FILE_BYTES = 64
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class CorpusFilter:
    """Which files count."""

    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES
    min_file_bytes: int = MIN_FILE_BYTES
    max_file_bytes: int = MAX_FILE_BYTES
    excludes: tuple[str, ...] = DEFAULT_EXCLUDES  # folder names; hidden folders always


@dataclass
class CorpusReport:
    """What was taken and what was left."""

    documents: int = 0
    text_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Found:
    sha256: str
    root: Path
    path: Path
    size: int


def collect_corpus(
    folders: Sequence[str],
    output: str,
    files: CorpusFilter,
    max_bytes: int | None = None,
) -> CorpusReport:
    """Write the corpus of some folders.

    Args:
        folders: searched in this order; where content repeats, the first file counts.
        output: the JSON-lines file, replaced in one step.
        files: which files count.
        max_bytes: take a file only while the text stays within this; earlier folders first.

    Raises:
        UserError: no such folder, or nothing found.
        DamagedError: a file changed while it was being collected.
    """
    report = CorpusReport()
    taken: dict[str, _Found] = {}
    for folder in folders:
        root = Path(folder)
        if not root.is_dir():
            raise UserError(f"{folder}: no such folder")
        fresh: dict[str, _Found] = {}
        for found in _find_texts(root, files, report.skipped):
            if found.sha256 in taken or found.sha256 in fresh:
                report.skipped["duplicate"] += 1
            else:
                fresh[found.sha256] = found
        _take(fresh, taken, report, max_bytes)
    if not taken:
        raise UserError(
            f"no text found in {', '.join(folders)} (suffixes {', '.join(files.suffixes)}, "
            f"{files.min_file_bytes} to {files.max_file_bytes} bytes)"
        )
    _write(output, (taken[key] for key in sorted(taken)))
    return report


def _take(
    fresh: dict[str, _Found],
    taken: dict[str, _Found],
    report: CorpusReport,
    max_bytes: int | None,
) -> None:
    """Move files into the corpus in hash order until the limit."""
    for key in sorted(fresh):
        if max_bytes is not None and report.text_bytes + fresh[key].size > max_bytes:
            report.skipped["over --max-bytes"] += 1
            continue
        taken[key] = fresh[key]
        report.documents += 1
        report.text_bytes += fresh[key].size


def _find_texts(root: Path, files: CorpusFilter, skipped: Counter[str]) -> Iterator[_Found]:
    """Walk one folder in name order and yield its valid text files."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in files.excludes and not name.startswith(".")
        )
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix not in files.suffixes or not path.is_file():
                continue
            if not files.min_file_bytes <= path.stat().st_size <= files.max_file_bytes:
                skipped["size"] += 1
                continue
            try:
                content = path.read_bytes()
                content.decode("utf-8")
            except OSError:
                skipped["unreadable"] += 1
            except UnicodeDecodeError:
                skipped["not UTF-8"] += 1
            else:
                yield _Found(hashlib.sha256(content).hexdigest(), root, path, len(content))


def _write(output: str, found: Iterator[_Found]) -> None:
    """Read the files again and write their records, so memory stays small."""
    target = Path(output)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for item in found:
                content = item.path.read_bytes()
                if hashlib.sha256(content).hexdigest() != item.sha256:
                    raise DamagedError(f"{item.path} changed while it was collected")
                record = {
                    "text": content.decode("utf-8"),
                    "path": item.path.relative_to(item.root).as_posix(),
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
