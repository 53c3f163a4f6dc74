"""Train a SentencePiece model under which every file round-trips.

    tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-prefix tok

Text is not normalised: no whitespace removed, no dummy prefix, digits split, newline its
own symbol, unknown characters as bytes. Writes PREFIX.model and PREFIX.vocab.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.data.exits import run_tool
from megatron_lite.data.train_tokenizer import train_tokenizer


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--input", required=True, help="JSON lines (.gz too), or a glob of such files")
    add("--json-key", default="text", help="key that holds the text")
    add("--vocab-size", type=int, required=True, help="number of ids")
    add("--output-prefix", required=True, help="writes PREFIX.model and PREFIX.vocab")
    add("--model-type", choices=["bpe", "unigram"], default="bpe", help="kind of model")
    add("--max-bytes", type=int, help="train on the first so many bytes of text")
    add("--num-threads", type=int, default=4, help="training threads")
    add("--skip-bad-records", action="store_true", help="leave out malformed lines")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = build_parser().parse_args(argv)

    def work() -> int:
        size = train_tokenizer(
            args.input,
            args.output_prefix,
            args.vocab_size,
            key=args.json_key,
            model_type=args.model_type,
            max_bytes=args.max_bytes,
            num_threads=args.num_threads,
            skip_bad=args.skip_bad_records,
        )
        print(f"{args.output_prefix}.model: {size} ids")
        return 0

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
