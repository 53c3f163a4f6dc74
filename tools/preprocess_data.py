"""Tokenise a JSON-lines corpus into indexed datasets (PREFIX_KEY_document.bin and .idx).

    tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tok.model --workers 4

The flags are Megatron-LM's. Output does not depend on --workers or --partitions.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.data.exits import check_output_prefix, run_tool
from megatron_lite.data.preprocess import (
    PreprocessRequest,
    find_best_workers,
    preprocess,
)
from megatron_lite.data.tokenizer import TOKENIZER_TYPES, build_tokenizer
from megatron_lite.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument_group("input").add_argument
    add("--input", required=True, help="JSON lines, plain or .gz; a glob takes several files")
    add("--json-keys", nargs="+", default=["text"], help="keys to tokenise, one dataset each")
    add("--skip-bad-records", action="store_true", help="count malformed records, do not stop")
    add("--split-sentences", action="store_true", help="not supported")
    add("--keep-newlines", action="store_true", help="only with --split-sentences; ignored")
    add("--lang", default="english", help="only with --split-sentences; ignored")
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer-type", help=f"one of {', '.join(TOKENIZER_TYPES)}")
    add("--tokenizer-model", help="SentencePiece model file")
    add("--vocab-size", type=int, help="ids of NullTokenizer")
    add("--vocab-file", help="of tokenizers that are not supported")
    add("--merge-file", help="of tokenizers that are not supported")
    add("--append-eod", action="store_true", help="end documents with the EOD id")
    add("--eod-id", type=int, help="EOD id of a SentencePiece model without an end token")
    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", required=True, help="path without suffix")
    add = parser.add_argument_group("run").add_argument
    add("--workers", type=int, help="processes; a multiple of --partitions")
    add("--partitions", type=int, default=1, help="also write the input in this many parts")
    add("--keep-sequential-samples", action="store_true", help="always so; accepted")
    add("--log-interval", type=int, default=1000, help="documents between progress lines")
    add(
        "--find-optimal-num-workers", action="store_true", help="time --workers-to-check, no output"
    )
    add("--workers-to-check", type=int, nargs="+", default=[16, 32, 64], help="numbers to time")
    add("--max-documents", type=int, default=100000, help="documents to time with")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = build_parser().parse_args(argv)

    def work() -> int:
        if args.split_sentences:
            raise UserError("--split-sentences is not supported: GPT data is whole documents")
        if args.workers is None and not args.find_optimal_num_workers:
            raise UserError("--workers N is required")
        check_output_prefix(args.output_prefix)
        request = PreprocessRequest(
            input=args.input,
            output_prefix=args.output_prefix,
            json_keys=tuple(dict.fromkeys(args.json_keys)),
            append_eod=args.append_eod,
            workers=1 if args.workers is None else args.workers,
            partitions=args.partitions,
            skip_bad_records=args.skip_bad_records,
            log_interval=args.log_interval,
        )
        tokenizer = build_tokenizer(args, eod=args.eod_id)
        if args.find_optimal_num_workers:
            print(find_best_workers(request, tokenizer, args.workers_to_check, args.max_documents))
            return 0
        print("\n".join(preprocess(request, tokenizer).lines()))
        return 0

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
