"""Join indexed datasets, document boundaries kept.

    tools/merge_datasets.py --input DIR --output-prefix merged
    tools/merge_datasets.py --input a_text_document b_text_document --output-prefix merged

A folder contributes its prefixes in sorted order.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.data.exits import check_output_prefix, run_tool
from megatron_lite.data.writer import merge_datasets
from megatron_lite.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="one folder of datasets, or prefixes")
    add("--output-prefix", required=True, help="path of the result without suffix")
    add("--multimodal", action="store_true", help="not supported")
    return parser


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """Expand folders to the prefixes in them; other words are prefixes.

    Raises:
        UserError: a folder without datasets, or one half of a pair is missing.
    """
    prefixes = []
    for word in inputs:
        if not Path(word).is_dir():
            prefixes.append(word)
            continue
        stems = {
            suffix: {str(path)[:-4] for path in Path(word).glob(f"*{suffix}")}
            for suffix in (".bin", ".idx")
        }
        single = stems[".bin"] ^ stems[".idx"]
        if single:
            raise UserError(f"{min(single)} has no .bin and .idx pair")
        if not stems[".bin"]:
            raise UserError(f"--input {word}: no dataset in this folder")
        prefixes += sorted(stems[".bin"])
    return prefixes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = build_parser().parse_args(argv)

    def work() -> int:
        if args.multimodal:
            raise UserError("--multimodal is not supported: only token datasets are merged")
        check_output_prefix(args.output_prefix)
        prefixes = find_prefixes(args.input)
        # Compared as files: ./x and x are one dataset, which would be replaced by the result.
        if os.path.realpath(args.output_prefix) in map(os.path.realpath, prefixes):
            raise UserError("--output-prefix is also an input")
        meta = merge_datasets(prefixes, args.output_prefix)
        print(f"{args.output_prefix}: {len(prefixes)} datasets merged")
        if meta is None:
            print("note: an input has no .meta.json, so the result has none")
        return 0

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
