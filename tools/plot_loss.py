"""Draw the loss of one or more runs from their metrics files: a picture and a text curve.

Reads the JSON lines of `--metrics-jsonl` (kinds `train` and `valid`); an iteration that
appears twice, as after a resume, counts once, the last time. With `--dataset` it also says
how far the validation loss lies below the unigram entropy of that corpus, the loss of a
model that knows nothing but how frequent each token is.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import UserError

CURVE_COLUMNS = 64
CURVE_ROWS = 10


@dataclass(frozen=True)
class RunCurve:
    """Losses of one run by iteration, in nat per token, iterations ascending."""

    name: str
    train: dict[int, float]
    valid: dict[int, float]


def read_curve(path: Path) -> RunCurve:
    """Collect the finite losses of a metrics file.

    Raises:
        UserError: the file is missing, is not JSON lines or holds no loss.
    """
    losses: dict[str, dict[int, float]] = {"train": {}, "valid": {}}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            row = json.loads(line)
            kept = losses.get(row.get("kind"))
            is_other_split = row.get("split", "valid") not in ("valid", "validation")
            if kept is not None and row.get("lm_loss") is not None and not is_other_split:
                kept[int(row["iteration"])] = float(row["lm_loss"])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} is not a metrics file: {error}") from error
    if not losses["train"]:
        raise UserError(f"{path} holds no training loss yet")
    return RunCurve(
        name=path.parent.name or path.stem,
        train=dict(sorted(losses["train"].items())),
        valid=dict(sorted(losses["valid"].items())),
    )


def measure_unigram_entropy(prefix: str) -> float:
    """Entropy in nat of the token frequencies of a whole indexed dataset."""
    counts: Counter[int] = Counter()
    for block in IndexedDataset(prefix).blocks():
        tokens, repeats = np.unique(block, return_counts=True)
        counts.update(dict(zip(tokens.tolist(), repeats.tolist(), strict=True)))
    if not counts:
        raise UserError(f"the dataset {prefix} holds no token")
    frequencies = np.array(list(counts.values())) / counts.total()
    return float(-np.sum(frequencies * np.log(frequencies)))


def format_curve(losses: dict[int, float]) -> str:
    """Draw losses as rows of characters, the mean of each column's iterations."""
    values = np.array(list(losses.values()))
    columns = min(CURVE_COLUMNS, len(values))
    means = np.array([part.mean() for part in np.array_split(values, columns)])
    low, high = float(means.min()), float(means.max())
    span = max(high - low, 1e-12)
    heights = np.rint((means - low) / span * (CURVE_ROWS - 1)).astype(int)
    rows = []
    for level in range(CURVE_ROWS - 1, -1, -1):
        marks = "".join("o" if height == level else " " for height in heights)
        rows.append(f"{low + span * level / (CURVE_ROWS - 1):8.3f} |{marks}".rstrip())
    first, last = next(iter(losses)), next(reversed(losses))
    rows.append(f"{'':8} +{'-' * columns}")
    rows.append(f"{'':9}{first} to {last} iterations, loss in nat per token")
    return "\n".join(rows)


def draw_picture(curves: Sequence[RunCurve], entropy: float | None, output: Path) -> None:
    """Write the picture; needs matplotlib, which the training extras bring."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for curve in curves:
        (line,) = axes.plot(
            list(curve.train), list(curve.train.values()), linewidth=1, label=f"{curve.name}: train"
        )
        if curve.valid:
            axes.plot(
                list(curve.valid),
                list(curve.valid.values()),
                "o",
                color=line.get_color(),
                markeredgecolor="black",
                label=f"{curve.name}: validation",
            )
    if entropy is not None:
        axes.axhline(entropy, color="gray", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nat per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=150)
    pyplot.close(figure)


def format_comparison(curve: RunCurve, entropy: float) -> str:
    """Say where the last validation loss lies relative to the unigram entropy."""
    lines = [f"unigram entropy of the corpus: {entropy:.3f} nat per token"]
    if curve.valid:
        iteration, loss = next(reversed(curve.valid.items()))
        side = "below" if loss <= entropy else "above"
        lines.append(
            f"validation loss, iteration {iteration}:  {loss:.3f} nat per token, "
            f"{abs(entropy - loss):.3f} {side} it"
        )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Draw loss curves from metrics files.")
    parser.add_argument("metrics", nargs="+", type=Path, help="file of --metrics-jsonl")
    parser.add_argument("--output", type=Path, help="picture to write (.png, .svg, .pdf)")
    parser.add_argument(
        "--dataset", help="indexed dataset (prefix) whose unigram entropy to compare"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(argv)
    try:
        curves = [read_curve(path) for path in args.metrics]
        entropy = measure_unigram_entropy(args.dataset) if args.dataset else None
        for curve in curves:
            print(format_curve(curve.train))
            if entropy is not None:
                print(format_comparison(curve, entropy))
        if args.output is not None:
            try:
                draw_picture(curves, entropy, args.output)
            except ImportError:
                print(f"no {args.output}: pictures need matplotlib (pip install matplotlib)")
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
