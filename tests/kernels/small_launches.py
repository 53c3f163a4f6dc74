"""One small checked launch of every kernel and path, for a process under a sanitizer.

`python -m tests.kernels.small_launches NAME...` runs `small` of tests.kernels.test_NAME and
prints a line before each, so that a report can be told from the next one's.
"""

from __future__ import annotations

import importlib
import sys

from tests.kernels.elements import load


def main(names: list[str]) -> None:
    """Run the named families, all in one library: one pool of stacks."""
    modules = [importlib.import_module(f"tests.kernels.test_{name}") for name in names]
    sources = [getattr(module, "SOURCES", None) or (module.SOURCE,) for module in modules]
    kernels = load(*(source for family in sources for source in family))
    for name, module in zip(names, modules, strict=True):
        print(f"== {name}", flush=True)
        module.small(kernels)
        sys.stderr.flush()
    print("== done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
