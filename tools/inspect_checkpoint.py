"""Say what is in a checkpoint, whether it is intact, and how it differs from another.

    inspect_checkpoint.py SAVE                      the newest checkpoint that verifies
    inspect_checkpoint.py SAVE --list               every step, and what was not published
    inspect_checkpoint.py SAVE --verify             read and hash every byte
    inspect_checkpoint.py SAVE --logical-hash       equal for the same state in any layout
    inspect_checkpoint.py A --diff B                tensor by tensor; exit code 1 if they differ

Takes a SAVE root (the newest checkpoint that verifies, or `--step`), one checkpoint
directory, or the URL of one. The logical hash is a sha256 over the gathered tensors in name
order.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.checkpoint.catalog import Found, find_checkpoint
from megatron_lite.checkpoint.listing import describe_layout, describe_origin, list_directory
from megatron_lite.errors import DamagedError, UserError

PARTS = ("weights", "masters", "moments", "state")
DIFFERENT = 1


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", help="SAVE root, one checkpoint directory, or a URL")
    parser.add_argument("--step", type=int, help="this step instead of the newest")
    parser.add_argument("--list", action="store_true", help="all steps of a SAVE root")
    parser.add_argument("--verify", action="store_true", help="read and hash every byte")
    parser.add_argument(
        "--logical-hash",
        action="store_true",
        help="sha256 over the gathered tensors in name order (verifies what it reads)",
    )
    parser.add_argument("--diff", metavar="OTHER", help="compare with this checkpoint")
    parser.add_argument("--diff-step", type=int, help="step of --diff instead of its newest")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="parts that --diff compares"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def describe(found: Found, *, verified: bool, with_hash: bool) -> dict[str, Any]:
    """Collect what the tool prints; bytes are those of the shards."""
    manifest = found.manifest
    report: dict[str, Any] = {
        "directory": found.place,
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
        from megatron_lite.checkpoint.compare import hash_groups
        from megatron_lite.checkpoint.reader import Checkpoint

        report["group_hashes"], report["logical_hash"] = hash_groups(Checkpoint(found))
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
    lines += [f"hash of the {g}: {h}" for g, h in report.get("group_hashes", {}).items()]
    if "logical_hash" in report:
        lines.append(f"logical hash: {report['logical_hash']}")
    return "\n".join(lines)


def describe_list(directory: str, verify: str) -> dict[str, Any]:
    """Collect every published step and what was not published."""
    steps, attempts = list_directory(directory, verify)
    listed: list[dict[str, Any]] = []
    for item in steps:
        entry: dict[str, Any] = {"step": item.step, "published": item.published}
        if item.found is None:
            entry["fault"] = item.fault
        else:
            manifest = item.found.manifest
            entry |= {
                "attempt": manifest.attempt,
                "bytes": manifest.num_bytes,
                "ranks": len(manifest.shards),
                "tensors": len(manifest.tensors),
                "layout": describe_layout(manifest.state),
                "origin": describe_origin(manifest.state),
            }
        listed.append(entry)
    return {
        "directory": directory,
        "steps": listed,
        "unpublished": [asdict(item) for item in attempts],
    }


def format_list(report: dict[str, Any]) -> str:
    """Return the list for people, newest step first."""
    lines = []
    for entry in report["steps"]:
        head = f"step {entry['step']:>8}  {entry['published'] or ''}"
        if "fault" in entry:
            lines.append(f"{head}  damaged: {entry['fault']}")
            continue
        words = [f"{entry['bytes'] / 1e6:.1f} MB by {entry['ranks']} rank(s)", entry["layout"]]
        lines.append(f"{head}  {', '.join(w for w in (*words, entry['origin']) if w)}")
    for item in report["unpublished"]:
        lines.append(
            f"step {item['step']:>8}  not published: attempts/{item['name']}, {item['files']} "
            f"files, {item['bytes'] / 1e6:.1f} MB, changed {item['changed']}"
        )
    return "\n".join(lines)


def describe_difference(here: Found, there: Found, parts: Sequence[str]) -> dict[str, Any]:
    """Compare two checkpoints; `equal` says whether the compared parts agree.

    Raises:
        UserError: neither has any of the parts.
    """
    from megatron_lite.checkpoint.compare import GROUPS, compare_tensors, names_of
    from megatron_lite.checkpoint.reader import Checkpoint
    from megatron_lite.checkpoint.resume import state_differences

    pair = Checkpoint(here), Checkpoint(there)
    absent = [p for p in parts if p in GROUPS and not any(names_of(c, [p]) for c in pair)]
    compared = [part for part in parts if part not in absent]
    if not compared:
        raise UserError(
            f"{here.place} and {there.place}: neither has {' or '.join(absent)}, so there is "
            "nothing to compare"
        )
    groups = [part for part in compared if part in GROUPS]
    tensors = [asdict(d) for d in compare_tensors(*pair, groups)]
    for tensor in tensors:  # JSON has no infinity
        for name in ("max_abs", "max_relative"):
            tensor[name] = tensor[name] if math.isfinite(tensor[name]) else None
    state = []
    if "state" in parts:
        changes = state_differences(here.manifest.state, there.manifest.state)
        state = [{"path": c.path, "here": c.saved, "there": c.current} for c in changes]
    return {
        "here": {"directory": here.place, "step": here.step},
        "there": {"directory": there.place, "step": there.step},
        "compared": compared,
        "absent": absent,
        "tensors": tensors,
        "state": state,
        "equal": not tensors and not state,
    }


def format_difference(report: dict[str, Any]) -> str:
    """Return the comparison for people: one line per difference."""
    lines = [f"{side}: {report[side]['directory']} (step {report[side]['step']})"
             for side in ("here", "there")]  # fmt: skip
    for t in report["tensors"]:
        if t["kind"] in ("only_here", "only_there"):
            lines.append(f"  {t['name']}: {t['kind'].replace('_', ' ')}, {t['here'] or t['there']}")
            continue
        line = f"  {t['name']}: "
        if t["here"] != t["there"]:
            line += f"{t['here']} here, {t['there']} there; "
        if t["kind"] != "shape":
            absolute, relative = (
                "inf" if value is None else f"{value:.3e}"
                for value in (t["max_abs"], t["max_relative"])
            )
            line += f"{t['differing']} of {t['elements']} elements, "
            line += f"max abs {absolute}, max relative {relative}"
        lines.append(line.removesuffix("; "))
    lines += [f"  state {s['path']}: {s['here']!r} here, {s['there']!r} there"
              for s in report["state"]]  # fmt: skip
    told = f"{len(report['tensors'])} tensors and {len(report['state'])} values of the state differ"
    if report["absent"]:
        lines.append(f"neither has {' or '.join(report['absent'])}")
    lines.append(f"equal in {', '.join(report['compared'])}" if report["equal"] else told)
    return "\n".join(lines)


def inspect(options: argparse.Namespace) -> tuple[str, int]:
    """Do what the command line asks; return the text to print and the exit code.

    Raises:
        UserError: nothing is there. DamagedError: nothing there verifies.
    """
    level = "full" if options.verify else "structure"
    if options.list:
        report = describe_list(options.directory, level)
        broken = any("fault" in entry for entry in report["steps"])
        text = json.dumps(report, indent=1) if options.json else format_list(report)
        return text, DamagedError.exit_code if broken else 0
    found = find_checkpoint(options.directory, options.step, verify=level)
    if options.diff is not None:
        other = find_checkpoint(options.diff, options.diff_step, verify=level)
        report = describe_difference(found, other, options.only)
        text = json.dumps(report, indent=1) if options.json else format_difference(report)
        return text, 0 if report["equal"] else DIFFERENT
    report = describe(found, verified=options.verify, with_hash=options.logical_hash)
    text = json.dumps(report, indent=1) if options.json else format_report(report)
    return text, DamagedError.exit_code if options.verify and found.passed_over else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit code.

    0 intact (or equal), 1 different, 2 not there, 3 damaged. Under a SAVE root, `--verify`
    is 3 also when an older checkpoint is intact, because a newer one was passed over.
    """
    options = build_parser().parse_args(arguments)
    try:
        text, code = inspect(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader has seen enough (such as `head`); nothing is wrong with the checkpoint.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
