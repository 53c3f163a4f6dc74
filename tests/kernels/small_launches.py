"""One small checked launch of every kernel and path, for a process under a sanitizer.

`python -m tests.kernels.small_launches NAME...` runs `small` of tests.kernels.test_NAME and
prints a line before each, so that a report can be told from the next one's.
"""

from __future__ import annotations

import importlib
import sys

from tests.kernels.elements import load


def main(names: list[str]) -> None:
    """Run the named families."""
    for name in names:
        print(f"== {name}", flush=True)
        module = importlib.import_module(f"tests.kernels.test_{name}")
        sources = getattr(module, "SOURCES", None) or (module.SOURCE,)
        module.small(load(*sources))
        sys.stderr.flush()
    print("== done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
