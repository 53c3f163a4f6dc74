"""Print, verify and compare indexed datasets.

    tools/inspect_dataset.py PREFIX [--verify] [--documents N...] [--compare OTHER]

Opening checks header, sizes and offsets; --verify also reads every token. Exit codes:
0 good (or equal), 1 different, 2 not found, 3 damaged.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.data.exits import run_tool
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.inspection import (
    describe_dataset,
    describe_document,
    first_difference,
    verify_tokens,
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("prefix", help="path without suffix")
    add("--verify", action="store_true", help="read every token, compare with .meta.json")
    add("--vocab-size", type=int, help="with --verify: ids must be below this")
    add("--documents", type=int, nargs="+", default=[], help="print the ids of these documents")
    add("--compare", metavar="OTHER", help="tell the first difference from another dataset")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = build_parser().parse_args(argv)

    def work() -> int:
        dataset = IndexedDataset(args.prefix)
        for line in describe_dataset(dataset):
            print(line)
        for number in args.documents:
            print(describe_document(dataset, number))
        if args.verify:
            print(verify_tokens(dataset, args.vocab_size))
        if args.compare is None:
            return 0
        difference = first_difference(dataset, IndexedDataset(args.compare))
        print(f"compared with {args.compare}: {difference or 'equal'}")
        return 1 if difference else 0

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
