"""Read JSON-lines corpora: files to chunks of lines, lines to texts, with exact places.

Only the byte 0x0A ends a line: JSON allows U+2028, U+2029 and U+0085 raw inside strings,
so text-level line splitting would cut records. What is wrong with a record is told with
file, line number and reason.
"""

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.errors import DamagedError, UserError

CHUNK_BYTES = 256 << 10
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """Consecutive lines of one file."""

    path: str
    first_line: int  # counted from 1
    lines: list[bytes]
    partition: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its lines."""
        return sum(map(len, self.lines))


class BadRecordError(UserError):
    """A line that is not a usable record; the message is the reason alone."""

    exit_code = 3


def find_inputs(pattern: str) -> list[str]:
    """Expand a path or glob to files in sorted order.

    Raises:
        UserError: nothing there.
    """
    if Path(pattern).is_file():
        return [pattern]
    found = sorted(path for path in glob.glob(pattern) if Path(path).is_file())
    if not found:
        if Path(pattern).exists():
            raise UserError(f"--input {pattern}: not a regular file (a glob takes several files)")
        raise UserError(f"--input {pattern}: no such file")
    return found


def read_chunks(
    paths: Sequence[str], partitions: int = 1, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Yield all lines of all files in order, `.gz` unpacked, a leading BOM removed.

    Args:
        paths: files.
        partitions: number the chunks 0..partitions-1 by equal shares of the stored bytes,
            so that the partitions in order are the input in order.
        chunk_bytes: lines are collected up to about this size.

    Raises:
        UserError: a file that cannot be read.
        DamagedError: a file that cannot be unpacked.
    """
    sizes = [Path(path).stat().st_size for path in paths]
    total = max(sum(sizes), 1)
    for number, path in enumerate(paths):
        before = sum(sizes[:number])
        try:
            with open(path, "rb") as raw:
                stream: Any = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
                first_line = 1
                partition = min(before * partitions // total, partitions - 1)
                while lines := stream.readlines(chunk_bytes):
                    if first_line == 1:
                        lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
                    yield Chunk(path, first_line, lines, partition)
                    first_line += len(lines)
                    partition = min((before + raw.tell()) * partitions // total, partitions - 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DamagedError(f"cannot read {path}: {error}") from None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error}") from None


def parse_record(line: bytes, keys: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Parse one line.

    Args:
        line: not blank.
        keys: wanted keys.

    Returns:
        The texts of those keys that the record has, and the whole record.

    Raises:
        BadRecordError: not UTF-8, not JSON, not an object, or a wanted value is no text.
    """
    try:
        record = json.loads(line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise BadRecordError(f"not JSON: {error.msg} (column {error.colno})") from None
    except ValueError as error:
        raise BadRecordError(f"not usable JSON: {error}") from None
    except RecursionError:
        raise BadRecordError("not usable JSON: nested too deeply") from None
    if not isinstance(record, dict):
        raise BadRecordError(f"a JSON {type(record).__name__}, not an object")
    texts = {key: record[key] for key in keys if key in record}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise BadRecordError(f"the value of {key!r} is {type(text).__name__}, not text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadRecordError(f"the value of {key!r} has half of a surrogate pair") from None
    return texts, record
