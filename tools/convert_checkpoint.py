"""Convert a model between Hugging Face, Megatron-LM and this project's checkpoints.

    tools/convert_checkpoint.py --from hf --to native --load-dir llama --save-dir run
    tools/convert_checkpoint.py --from native --to hf --load-dir run --save-dir out

Streams tensor by tensor; every source tensor is consumed and every target tensor written,
or nothing is: exit code 2 for what cannot be converted, 3 for damaged data.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.checkpoint.convert.bundle import Bundle, check_bundle
from megatron_lite.checkpoint.convert.hf_read import read_hf
from megatron_lite.checkpoint.convert.hf_registry import FAMILIES
from megatron_lite.checkpoint.convert.hf_write import write_hf
from megatron_lite.checkpoint.convert.native import own_tokenizer, read_native, write_native
from megatron_lite.checkpoint.convert.tally import Tally, check_written
from megatron_lite.checkpoint.convert.tokenizer_files import SENTENCEPIECE_FILE, find_assets
from megatron_lite.checkpoint.convert.transform import (
    WEIGHT_DTYPES,
    half_split_rotary,
    plain_norms,
    to_dtype,
)
from megatron_lite.checkpoint.places import check_save_place
from megatron_lite.checkpoint.stores import directory_only
from megatron_lite.data.exits import run_tool
from megatron_lite.errors import UserError

FORMATS = ("hf", "megatron", "native")
# Names of Megatron-LM's loaders and savers, by the format they stand for.
MEGATRON_PLUGINS: Mapping[str, str] = {
    "megatron": "megatron",
    "mcore": "megatron",
    "core": "megatron",
    "legacy": "megatron",
    "llama_mistral": "hf",
    "hf": "hf",
    "native": "native",
}
SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20}
SIZE_UNITS |= {"GIB": 2**30}


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    text = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(description=text, allow_abbrev=False)
    add = parser.add_argument
    add("--from", dest="source", choices=FORMATS, help="format of --load-dir")
    add("--to", dest="target", choices=FORMATS, help="format of --save-dir")
    add("--loader", choices=sorted(MEGATRON_PLUGINS), help="Megatron's word for --from")
    add("--saver", choices=sorted(MEGATRON_PLUGINS), help="Megatron's word for --to")
    add("--model-type", default="GPT", help="Megatron's; only GPT")
    add("--load-dir", required=True, help="directory to read")
    add("--save-dir", required=True, help="directory to write")
    add("--step", type=int, help="this step of the source instead of the newest")
    add("--dtype", choices=WEIGHT_DTYPES, help="dtype to write; unset: as the source has it")
    add("--max-shard-size", default="5GB", help="largest weight file of hf, as 500MB or 5GB")
    add("--hf-architecture", choices=sorted(FAMILIES), help="hf family; unset: one that fits")
    add("--tokenizer-dir", help="directory whose tokenizer files go along, not the source's")
    add("--target-tensor-parallel-size", type=int, default=1, help="TP of a megatron target")
    add("--target-pipeline-parallel-size", type=int, default=1, help="PP of a megatron target")
    add("--true-vocab-size", type=int, help="vocabulary of a megatron source without padding")
    add("--trust-pickle", action="store_true", help="load pickles, in a process of their own")
    add("--allow-unused", action="store_true", help="leave out unknown source tensors, with a note")
    add("--allow-nonfinite", action="store_true", help="write values that are NaN or infinite")
    add("--no-checking", action="store_true", help="do not read the result back and compare")
    add("--overwrite", action="store_true", help="replace a model that is in --save-dir")
    return parser


def choose_format(flag: str, value: str | None, plugin_flag: str, plugin: str | None) -> str:
    """Return a format from its flag or Megatron's.

    Raises:
        UserError: neither is given, or they differ.
    """
    translated = MEGATRON_PLUGINS[plugin] if plugin is not None else None
    if value is not None and translated is not None and value != translated:
        raise UserError(f"{flag} {value} and {plugin_flag} {plugin} differ: give one of them")
    chosen = value or translated
    if chosen is None:
        raise UserError(f"{flag} is required: one of {', '.join(FORMATS)}")
    return chosen


def check_options(args: argparse.Namespace, source: str, target: str) -> None:
    """Refuse options that mean nothing for these formats.

    Raises:
        UserError: naming the option and the format that it belongs to.
    """
    belongs = (
        ("--step", args.step is not None, source != "hf", "--from native or megatron"),
        ("--allow-unused", args.allow_unused, source == "hf", "--from hf"),
        ("--hf-architecture", args.hf_architecture is not None, target == "hf", "--to hf"),
        (
            "--target-tensor-parallel-size and --target-pipeline-parallel-size",
            (args.target_tensor_parallel_size, args.target_pipeline_parallel_size) != (1, 1),
            target == "megatron",
            "--to megatron",
        ),
    )
    for option, is_given, fits, where in belongs:
        if is_given and not fits:
            raise UserError(f"{option} has no meaning here: it belongs to {where}")


def parse_size(text: str) -> int:
    """Return bytes of a size such as 5GB (decimal), 500MiB (binary) or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise UserError(f"--max-shard-size {text!r}: a size such as 500MB, 5GB or 4GiB")
    return int(float(match[1]) * unit)


def open_bundle(args: argparse.Namespace, source: str, stack: ExitStack) -> Bundle:
    """Read what the source declares; its tensors are read when they are written."""
    place: Path = args.load_dir
    if source == "native":
        return read_native(place, args.step, masters=args.dtype in ("float32", "float64"))
    if source == "hf":
        scratch = None
        if args.trust_pickle:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unpickled-")))
        return read_hf(place, scratch=scratch, allow_unused=args.allow_unused)
    from megatron_lite.checkpoint.convert.megatron import read_megatron

    reading = read_megatron(
        place,
        step=args.step,
        trust_pickle=args.trust_pickle,
        true_vocab_size=args.true_vocab_size,
    )
    return stack.enter_context(reading)


def with_tokenizer(bundle: Bundle, directory: str | None) -> Bundle:
    """Return the bundle with the tokenizer files of a directory."""
    if directory is None:
        return bundle
    place = Path(directory)
    assets = find_assets(place) if place.is_dir() else {}
    if not assets:
        raise UserError(f"--tokenizer-dir {directory}: holds no tokenizer files")
    notes = bundle.notes
    if set(assets) == {SENTENCEPIECE_FILE}:
        kind = bundle.config.tokenizer_type or ""
        assets, more = own_tokenizer(place / SENTENCEPIECE_FILE, kind, bundle.vocab_size)
        notes += tuple(more)
    return replace(bundle, assets=assets, notes=notes)


def check_places(load: Path, save: Path, overwrite: bool) -> None:
    """Refuse a target that is in use, or that is the source.

    Raises:
        UserError: saying which.
    """
    check_save_place(save)
    if not load.exists():
        raise UserError(f"--load-dir {load}: does not exist")
    real_load, real_save = (Path(os.path.realpath(path)) for path in (load, save))
    if real_save == real_load or real_load in real_save.parents or real_save in real_load.parents:
        raise UserError(f"--save-dir {save}: must lie outside of --load-dir {load}")
    if save.exists() and not save.is_dir():
        raise UserError(f"--save-dir {save}: is not a directory")
    # The empty folders that a failed conversion leaves are no model.
    if save.is_dir() and any(not path.is_dir() for path in save.rglob("*")) and not overwrite:
        raise UserError(f"--save-dir {save}: is not empty; --overwrite replaces a model in it")


def write_bundle(args: argparse.Namespace, target: str, bundle: Bundle) -> str:
    """Write the target; return what it is, in words."""
    place: Path = args.save_dir
    if target == "native":
        result = write_native(bundle, place, overwrite=args.overwrite)
        return f"checkpoint of step 0 in {result.directory}"
    if target == "hf":
        written = write_hf(
            bundle,
            place,
            max_shard_bytes=parse_size(args.max_shard_size),
            architecture=args.hf_architecture,
            overwrite=args.overwrite,
        )
        return f"{written.architecture} in {len(written.weight_files)} weight file(s) in {place}"
    from megatron_lite.checkpoint.convert.megatron import write_megatron

    tp, pp = args.target_tensor_parallel_size, args.target_pipeline_parallel_size
    write_megatron(bundle, place, tp=tp, pp=pp, overwrite=args.overwrite)
    return f"megatron, TP {tp}, PP {pp}, in {place}"


def read_back(args: argparse.Namespace, target: str, stack: ExitStack) -> Bundle:
    """Open the target as a source."""
    own = argparse.Namespace(
        load_dir=args.save_dir,
        step=None,
        dtype=None,
        trust_pickle=True,
        true_vocab_size=None,
        allow_unused=False,
    )
    return open_bundle(own, target, stack)


def convert(args: argparse.Namespace) -> int:
    """Convert; returns the exit code of success."""
    source = choose_format("--from", args.source, "--loader", args.loader)
    target = choose_format("--to", args.target, "--saver", args.saver)
    if args.model_type != "GPT":
        raise UserError(f"--model-type {args.model_type} is not supported; legal: GPT")
    check_options(args, source, target)
    parse_size(args.max_shard_size)
    args.load_dir = directory_only("--load-dir", args.load_dir)
    args.save_dir = directory_only("--save-dir", args.save_dir)
    check_places(args.load_dir, args.save_dir, args.overwrite)
    started = time.monotonic()
    with ExitStack() as stack:
        bundle = with_tokenizer(open_bundle(args, source, stack), args.tokenizer_dir)
        if args.dtype is not None:
            bundle = to_dtype(bundle, args.dtype)
        if target == "hf":
            bundle = plain_norms(half_split_rotary(bundle))
        check_bundle(bundle)
        for note in bundle.notes:
            print(note, file=sys.stderr)
        print(f"converting {bundle.source}: {len(bundle.tensors)} tensors", flush=True)
        tally = Tally(bundle, lambda line: print(line, flush=True), args.allow_nonfinite)
        told = write_bundle(args, target, tally.bundle)
        print(f"written: {told}")
        for name, count in tally.nonfinite.items():
            print(f"warning: {name}: {count} values are NaN or infinite", file=sys.stderr)
        lines = [f"{len(tally.hashes)} tensors, {tally.num_bytes} bytes"]
        if not args.no_checking:
            lines += ["read back and equal"]
            lines += [f"logical hash {check_written(tally.hashes, read_back(args, target, stack))}"]
    print(f"{', '.join(lines)}, {time.monotonic() - started:.1f} s")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = build_parser().parse_args(argv)
    return run_tool(lambda: convert(args))


if __name__ == "__main__":
    sys.exit(main())
