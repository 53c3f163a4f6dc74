"""Say what is in a checkpoint, whether it is intact, and its logical hash.

Takes a SAVE root (the newest checkpoint that verifies, or `--step`) or one checkpoint
directory. The logical hash is a sha256 over the gathered tensors in name order: equal for
the same training state whatever layout saved it.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.checkpoint.catalog import Found, find_checkpoint
from megatron_lite.errors import DamagedError, UserError


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", help="SAVE root or one checkpoint directory")
    parser.add_argument("--step", type=int, help="this step instead of the newest")
    parser.add_argument("--verify", action="store_true", help="read and hash every byte")
    parser.add_argument(
        "--logical-hash",
        action="store_true",
        help="sha256 over the gathered tensors in name order (verifies what it reads)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def describe(found: Found, *, verified: bool, with_hash: bool) -> dict[str, Any]:
    """Collect what the tool prints; bytes are those of the shards."""
    manifest = found.manifest
    report: dict[str, Any] = {
        "directory": str(found.directory),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "attempt": manifest.attempt,
        "ranks": len(manifest.shards),
        "bytes": manifest.num_bytes,
        "manifest_sha256": found.manifest_sha256,
        "verified": "full" if verified else "structure",
        "passed_over": [{"step": item.step, "reason": item.reason} for item in found.passed_over],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "pieces": len(tensor.pieces),
            }
            for name, tensor in manifest.tensors.items()
        },
        "state": manifest.state,
    }
    if with_hash:
        # Here and not above: listing and verifying work on a login node without torch.
        from megatron_lite.checkpoint.reader import Checkpoint, logical_hash

        report["logical_hash"] = logical_hash(Checkpoint(found))
    return report


def format_report(report: dict[str, Any]) -> str:
    """Return the report for people: one line per tensor."""
    lines = [
        f"{report['directory']}",
        f"step {report['step']}, saved by {report['ranks']} rank(s), {report['bytes']} bytes, "
        f"{len(report['tensors'])} tensors",
    ]
    lines += [f"passed over step {p['step']}: {p['reason']}" for p in report["passed_over"]]
    width = max((len(name) for name in report["tensors"]), default=0)
    for name, tensor in sorted(report["tensors"].items()):
        lines.append(f"  {name:<{width}}  {tensor['dtype']:<9} {tensor['shape']}")
    scope = "every byte" if report["verified"] == "full" else "structure (--verify reads all)"
    lines.append(f"verified: {scope}")
    if "logical_hash" in report:
        lines.append(f"logical hash: {report['logical_hash']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit code: 0 intact, 2 not there, 3 damaged.

    Under a SAVE root, `--verify` is 3 also when an older checkpoint is intact, because a
    newer one was passed over.
    """
    options = build_parser().parse_args(arguments)
    level = "full" if options.verify else "structure"
    try:
        found = find_checkpoint(options.directory, options.step, verify=level)
        report = describe(found, verified=options.verify, with_hash=options.logical_hash)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    text = json.dumps(report, indent=1) if options.json else format_report(report)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader has seen enough (such as `head`); nothing is wrong with the checkpoint.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DamagedError.exit_code if options.verify and found.passed_over else 0


if __name__ == "__main__":
    sys.exit(main())
