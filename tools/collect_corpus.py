"""Collect folders of text and source files into a JSON-lines corpus.

    tools/collect_corpus.py DIR... --output corpus.jsonl --max-bytes 32000000

Every record is {"text", "path"}; equal contents appear once, in the order of their hash.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.data.corpus import (
    DEFAULT_EXCLUDES,
    DEFAULT_SUFFIXES,
    MAX_FILE_BYTES,
    MIN_FILE_BYTES,
    CorpusFilter,
    collect_corpus,
)
from megatron_lite.data.exits import run_tool


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="folders, searched in this order")
    add("--output", required=True, help="JSON-lines file to write")
    add("--max-bytes", type=int, help="take at most this much text (bytes)")
    add("--suffixes", nargs="+", default=list(DEFAULT_SUFFIXES), help="file suffixes to take")
    add("--exclude", nargs="*", default=list(DEFAULT_EXCLUDES), help="folder names to leave out")
    add("--min-file-bytes", type=int, default=MIN_FILE_BYTES, help="smallest file taken (bytes)")
    add("--max-file-bytes", type=int, default=MAX_FILE_BYTES, help="largest file taken (bytes)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = build_parser().parse_args(argv)
    files = CorpusFilter(
        suffixes=tuple(
            suffix if suffix.startswith(".") else f".{suffix}" for suffix in args.suffixes
        ),
        min_file_bytes=args.min_file_bytes,
        max_file_bytes=args.max_file_bytes,
        excludes=tuple(args.exclude),
    )

    def work() -> int:
        report = collect_corpus(args.folders, args.output, files, args.max_bytes)
        left = ", ".join(f"{reason}: {count}" for reason, count in sorted(report.skipped.items()))
        print(f"{args.output}: {report.documents} documents, {report.text_bytes} bytes of text")
        print(f"left out: {left or 'nothing'}")
        return 0

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
