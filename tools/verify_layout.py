"""Certify that a layout trains the same numbers as one process, on your own flags.

Takes the flags of pretrain.py, scales them down, runs them on CPU processes against one
process, and compares samples, initial weights, activations, loss, every gradient, norm and
updates. When something differs it names the first tensor, the phase and the axis. Exit code
0: equal, 1: differs, 2: refused.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import check_config
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.verify.certify import Certifier, Verdict
from megatron_lite.verify.classes import MATCH32, MATCH64
from megatron_lite.verify.pool import MAX_RANKS, RankError, RankPool
from megatron_lite.verify.scale import Scaled, scale_down


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of this tool; all other flags are pretrain.py's."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] FLAGS of pretrain.py",
        allow_abbrev=False,
    )
    world = parser.add_mutually_exclusive_group()
    world.add_argument("--ranks", type=int, help=f"CPU processes to verify on, 1 to {MAX_RANKS}")
    world.add_argument("--world-size", type=int, help="ranks of the job; scaled down to 8")
    parser.add_argument(
        "--precision", choices=("fp64", "fp32"), default="fp64", help="of both runs (fp64)"
    )
    parser.add_argument("--steps", type=int, default=5, help="training steps of each run (5)")
    parser.add_argument("--keep", metavar="DIR", help="keep all runs' files in this new folder")
    return parser


def choose_world_size(options: argparse.Namespace, config: Config) -> int:
    """Ranks of the job: as given, as the environment says, or two replicas where they fit."""
    if options.ranks is not None:
        if not 1 <= options.ranks <= MAX_RANKS:
            raise UserError(f"--ranks {options.ranks}: 1 to {MAX_RANKS}; see --world-size")
        return int(options.ranks)
    if options.world_size is not None:
        return int(options.world_size)
    if os.environ.get("WORLD_SIZE", "").isdigit():
        return int(os.environ["WORLD_SIZE"])
    model_ranks = (
        config.tensor_model_parallel_size
        * config.pipeline_model_parallel_size
        * config.context_parallel_size
    )
    samples = config.global_batch_size
    two = samples is None or samples % (2 * (config.micro_batch_size or 1)) == 0
    return model_ranks * 2 if two else model_ranks


def certify(options: argparse.Namespace, flags: Sequence[str], directory: Path) -> Verdict:
    """Scale, run and compare."""
    config = parse_config(flags, os.environ)
    world_size = choose_world_size(options, config)
    check_config(config, world_size)
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: at least 1")
    scaled: Scaled = scale_down(
        config, world_size, directory / "data", options.steps, options.precision
    )
    print(f"scaled down from {world_size} ranks:")
    for note in scaled.notes:
        print(f"  {note}")
    limits = MATCH64 if options.precision == "fp64" else MATCH32
    pool = RankPool()
    try:
        certifier = Certifier(
            pool, directory, scaled.case, limits, say=lambda line: print(f"  {line}", flush=True)
        )
        return certifier.certify()
    finally:
        pool.close()


def format_verdict(verdict: Verdict, limits: str) -> str:
    """Return what the tool prints last."""
    if verdict.holds:
        return (
            f"equal: {verdict.layout} on {verdict.ranks} rank(s) and one process, by {limits}; "
            "every rank held and computed its share"
        )
    lines = []
    if verdict.causes:
        lines.append(f"differs: {verdict.layout} on {verdict.ranks} rank(s), by {limits}")
        lines += [f"  {cause}" for cause in verdict.causes]
    else:
        lines.append(f"equal numbers, but not a parallel run: {verdict.layout}")
    return "\n".join([*lines, *(f"  {fault}" for fault in verdict.share_faults)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit code."""
    options, flags = build_parser().parse_known_args(arguments)
    try:
        with ExitStack() as stack:
            if options.keep is None:
                temporary = tempfile.TemporaryDirectory(prefix="verify-layout-")
                directory = Path(stack.enter_context(temporary))
            else:
                directory = Path(options.keep).absolute()
                if directory.exists():
                    raise UserError(f"--keep {options.keep} exists: name a new folder")
                directory.mkdir(parents=True)
            verdict = certify(options, flags, directory)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except RankError as error:
        print(f"the reference run failed:\n{error}", file=sys.stderr)
        return 1
    print(format_verdict(verdict, "MATCH64" if options.precision == "fp64" else "MATCH32"))
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())
