"""Turn what a user can be told into one line and an exit code, for the data tools."""

import errno
import sys
from collections.abc import Callable

from megatron_lite.errors import DamagedError, UserError

INTERRUPTED = 130


def run_tool(work: Callable[[], int]) -> int:
    """Run a tool's work.

    Args:
        work: returns the exit code of success.

    Returns:
        That code, or the code of the error after printing its message on stderr.
    """
    try:
        return work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (such as `head`); nothing is wrong with the work.
        sys.stderr.close()
        return 0
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror}{where}", file=sys.stderr)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return DamagedError.exit_code if full else UserError.exit_code


def check_output_prefix(prefix: str) -> None:
    """Refuse an empty prefix, such as an unset variable of a script.

    Raises:
        UserError: nothing but blanks.
    """
    if not prefix.strip():
        raise UserError("--output-prefix is empty: give a path without suffix")
