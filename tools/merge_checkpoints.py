"""Merge checkpoints: weighted averages, task vectors, and a search for the best weights.

    merge_checkpoints.py A B C --save OUT                         the mean of three
    merge_checkpoints.py A B --weights 0.7 0.3 --save OUT         a weighted average
    merge_checkpoints.py A B --base P --weights 0.5 -0.2 --save OUT    P + sum w (theta - P)
    merge_checkpoints.py A B --base P --search --eval-iters 20 --save OUT

Inputs are SAVE roots (their newest checkpoint) or single checkpoint directories, saved in
any layout. The result is a checkpoint of step 0 with weights only, a valid --load. Sums are
in fp64 and, where every input has them, of fp32 masters. The search tries the base, the
mean, then each weight in turn by golden sections, always over the same validation samples;
without --base the first input is the base. One process.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

import torch
from torch import Tensor

from megatron_lite.checkpoint.catalog import Found, find_checkpoint
from megatron_lite.checkpoint.convert.bundle import Bundle, state_names
from megatron_lite.checkpoint.convert.native import read_native, write_native
from megatron_lite.checkpoint.convert.transform import HALF, WEIGHT_DTYPES, with_precision
from megatron_lite.checkpoint.direct import LogicalTensor
from megatron_lite.checkpoint.merge import (
    Point,
    average_coefficients,
    best_trial,
    combine,
    ema_weights,
    load_finite,
    offset_coefficients,
    search_weights,
)
from megatron_lite.checkpoint.places import check_save_place
from megatron_lite.checkpoint.resume import Change, state_differences
from megatron_lite.checkpoint.stores import directory_only
from megatron_lite.config.architecture import EXPERT_FIELDS, architecture_facts
from megatron_lite.config.schema import Config, DataConfig, flag_fields
from megatron_lite.data.exits import run_tool
from megatron_lite.errors import UserError

WIDE = ("float32", "float64")


@dataclass(frozen=True)
class Model:
    """One input: its weights, as trained and as exact as they are there, and its state."""

    place: str
    weights: Bundle
    masters: Bundle
    found: Found

    @property
    def facts(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = self.found.manifest.state["facts"]
        return facts

    @property
    def config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self.found.manifest.state["config"]
        return config


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    text = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(description=text, allow_abbrev=False)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="DIR", help="SAVE root or one checkpoint directory")
    add("--save", required=True, help="directory of the result")
    add("--base", help="combine differences from this checkpoint")
    add("--weights", type=float, nargs="+", help="one for each input; unset: all equal")
    add("--ema-decay", type=float, help="weights of a moving average, oldest input first")
    add("--normalize", action="store_true", help="divide the weights of an average by their sum")
    add("--dtype", choices=WEIGHT_DTYPES, help="dtype of the result; unset: the inputs'")
    add("--overwrite", action="store_true", help="replace a merged checkpoint in --save")
    search = parser.add_argument_group("search on a validation set")
    add = search.add_argument
    add("--search", action="store_true", help="find the weights with the lowest lm loss")
    add("--search-steps", type=int, default=8, help="evaluations per weight and round")
    add("--search-rounds", type=int, default=1, help="times that all weights are gone through")
    add("--search-range", type=float, nargs=2, default=(0.0, 1.0), metavar=("LOW", "HIGH"))
    add("--eval-iters", type=int, default=10, help="global batches per evaluation")
    add("--global-batch-size", type=int, default=8, help="samples of one of them")
    add("--micro-batch-size", type=int, default=1, help="samples per forward pass")
    add("--data-path", nargs="*", help="data, cut by --split; unset: the checkpoint's own")
    add("--valid-data-path", nargs="*", help="validation data, used whole")
    add("--split", help="shares of train, validation and test; unset: the checkpoint's")
    add("--mock-data", action="store_true", help="counting sequences instead of data")
    add("--data-cache-path", help="directory of the index cache")
    add("--tokenizer-model", help="where the tokenizer's file is now")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def open_model(place: str) -> Model:
    """Open one input."""
    found = find_checkpoint(place, verify="structure")
    return Model(place, read_native(place), read_native(place, masters=True), found)


def check_alike(models: Sequence[Model]) -> None:
    """Refuse inputs that are not the same kind of model.

    Raises:
        UserError: naming the first input that differs, the fields and both values.
    """
    first = models[0]
    for other in models[1:]:
        ours, theirs = (_facts_of(model) for model in (first, other))
        both = [name for name in ours if name in theirs]
        changes = state_differences({n: ours[n] for n in both}, {n: theirs[n] for n in both})
        if changes:
            lines = [f"\n  {_told(change)}" for change in changes]
            raise UserError(f"{first.place} and {other.place} differ in{''.join(lines)}")


def _told(change: Change) -> str:
    """A difference by the name of its configuration field, in one short line."""
    field, _, inner = change.path.partition(".")
    if field == "num_experts" and inner:
        return f"{EXPERT_FIELDS[inner]}: {_short(change.saved)}, {_short(change.current)}"
    return f"{change.path}: {_short(change.saved)}, {_short(change.current)}"


def _short(value: Any) -> str:
    """A value for a person; of what only one of the models has, no more than that it has it."""
    if isinstance(value, Mapping):
        return repr(value["num_experts"]) if "num_experts" in value else "set"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _facts_of(model: Model) -> dict[str, Any]:
    """Architecture, what positions it has, and the tokenizer where the checkpoint knows it."""
    facts = architecture_facts(model.weights.model)
    facts["max_position_embeddings"] = model.weights.model.max_position_embeddings
    if "tokenizer_type" in model.facts:
        facts["tokenizer_type"] = model.facts["tokenizer_type"]
    return facts


def choose_sources(models: Sequence[Model]) -> list[Bundle]:
    """Take the masters of all inputs, or the weights of all."""
    masters = [model.masters for model in models]
    wide = all(t.dtype in WIDE for bundle in masters for t in bundle.tensors.values())
    return masters if wide else [model.weights for model in models]


def output_dtype(models: Sequence[Model], wanted: str | None) -> str:
    """Return the dtype of the result: the inputs' own, which must agree, or the wanted one."""
    found = sorted(
        {
            tensor.dtype
            for model in models
            for name, tensor in model.weights.tensors.items()
            if name not in state_names(model.weights)
        }
    )
    if wanted is None and len(found) > 1:
        raise UserError(f"the inputs' weights are {' and '.join(found)}: give --dtype")
    return wanted or found[0]


def merged_tensors(
    sources: Sequence[Bundle], coefficients: Point, dtype: str
) -> dict[str, LogicalTensor]:
    """Return the recipes of the merged model."""
    tensors = {}
    kept = state_names(sources[0]) if dtype in HALF else frozenset()
    for name, tensor in sources[0].tensors.items():
        loads = [source.tensors[name].load for source in sources]
        own = tensor.dtype if name in kept else dtype
        load = partial(combine, loads, coefficients, getattr(torch, own))
        tensors[name] = LogicalTensor(name, own, tensor.shape, load)
    return tensors


def evaluation_config(args: argparse.Namespace, base: Model) -> Config:
    """Return the base's model with data to evaluate on, as one process has it."""
    fields = {field.name for field in flag_fields(DataConfig)} | {"seed"}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in base.config.items()
        if name in fields
    }
    given = {name: getattr(args, name) for name in ("data_path", "valid_data_path")}
    if args.mock_data or any(value is not None for value in given.values()):
        values |= dict.fromkeys(
            name for name in fields if name.endswith(("data_path", "_args_path"))
        )
        values |= {name: tuple(value) for name, value in given.items() if value is not None}
        values |= {"mock_data": args.mock_data}
        values |= {"split": None} if args.valid_data_path is not None else {}
    for name in ("split", "data_cache_path", "tokenizer_model"):
        if getattr(args, name) is not None:
            values[name] = getattr(args, name)
    values |= {
        "train_iters": 1,
        "lr": 1.0,  # a checked configuration has one
        "eval_iters": args.eval_iters,
        "global_batch_size": args.global_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "device": args.device,
    }
    return replace(base.weights.config, **values)


def search(
    args: argparse.Namespace, models: Sequence[Model], sources: Sequence[Bundle], dtype: str
) -> Point:
    """Try weights on the validation set, print each with its loss, return the best."""
    from megatron_lite.train.candidates import open_bench

    low, high = args.search_range
    if not -math.inf < low < high < math.inf or args.search_steps < 2 or args.search_rounds < 1:
        raise UserError("--search-range LOW < HIGH, --search-steps at least 2, --search-rounds 1")
    config = with_precision(evaluation_config(args, models[0]), dtype)
    count = len(models) - 1
    print("  ".join([*(f"{f'w{i + 1}':>9}" for i in range(count)), f"{'lm loss':>12}"]))
    with open_bench(config, models[0].found) as loss_of:

        def evaluate(weights: Point) -> float:
            tensors = merged_tensors(sources, offset_coefficients(weights), dtype)
            read: Callable[[str], Tensor] = lambda name: tensors[name].load()  # noqa: E731
            loss = loss_of(read)
            print("  ".join([*(f"{w:9.5f}" for w in weights), f"{loss:12.8f}"]), flush=True)
            return loss

        trials = search_weights(
            evaluate, count, low=low, high=high, steps=args.search_steps, rounds=args.search_rounds
        )
    best = best_trial(trials)
    told = " ".join(f"{weight:.5f}" for weight in best.weights)
    print(f"best of {len(trials)}: w = {told}, lm loss {best.loss:.8f}")
    return best.weights


def choose_coefficients(args: argparse.Namespace, count: int) -> Point:
    """Return what the flags without a search say, base first where there is one.

    Raises:
        UserError: flags that contradict each other or the number of inputs.
    """
    if args.ema_decay is not None and (args.weights is not None or args.base is not None):
        raise UserError("--ema-decay makes an average: not together with --weights or --base")
    if args.ema_decay is not None:
        return ema_weights(count, args.ema_decay)
    weights = args.weights if args.weights is not None else [1 / count] * count
    if len(weights) != count:
        raise UserError(f"--weights: {len(weights)} numbers for {count} inputs")
    if args.base is None:
        return average_coefficients(weights, normalize=args.normalize)
    if args.normalize:
        raise UserError("--normalize belongs to an average, not to --base")
    return offset_coefficients(weights)


def _recipe(coefficients: Point, models: Sequence[Model]) -> str:
    """What is remembered of the inputs: names and steps, no paths of this machine."""
    names = (f"{Path(model.place).name} (step {model.found.step})" for model in models)
    return ", ".join(f"{c:g} x {name}" for c, name in zip(coefficients, names, strict=True))


def merge(args: argparse.Namespace) -> int:
    """Merge; returns the exit code of success."""
    if args.search and (args.weights is not None or args.ema_decay is not None or args.normalize):
        raise UserError("--search finds the weights: not together with --weights, --ema-decay or "
                        "--normalize")  # fmt: skip
    if args.search and args.base is None and len(args.inputs) < 2:
        raise UserError("--search needs --base and an input, or two inputs")
    coefficients = None if args.search else choose_coefficients(args, len(args.inputs))
    args.save = directory_only("--save", args.save)
    check_save_place(args.save)
    places = [*([] if args.base is None else [args.base]), *args.inputs]
    models = [open_model(place) for place in places]
    check_alike(models)
    dtype = output_dtype(models, args.dtype)
    sources = choose_sources(models)
    exact = sources[0].tensors is models[0].masters.tensors
    print(f"merging {len(places)} checkpoints in fp64, {'masters' if exact else 'weights'}, "
          f"to {dtype}", flush=True)  # fmt: skip
    if coefficients is None:
        coefficients = offset_coefficients(search(args, models, sources, dtype))
    told = ", ".join(f"{c:g} x {p}" for c, p in zip(coefficients, places, strict=True))
    merged = merged_tensors(sources, coefficients, dtype)
    bundle = replace(
        models[0].weights,
        config=with_precision(models[0].weights.config, dtype),
        tensors={
            name: replace(tensor, load=partial(load_finite, name, tensor.load))
            for name, tensor in merged.items()
        },
        source=f"merge of {_recipe(coefficients, models)}",
    )
    result = write_native(bundle, args.save, overwrite=args.overwrite)
    print(f"written: {told} to {result.directory}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = build_parser().parse_args(argv)
    return run_tool(lambda: merge(args))


if __name__ == "__main__":
    sys.exit(main())
