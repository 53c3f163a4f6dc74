"""Read `--data-path` and `--split`: which datasets, which weights, which part of each.

A split is a slice of the sequences in file order (nothing is shuffled before it), with
Megatron-LM's rounding, so the same flags select the same documents as there.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron_lite.errors import UserError

DEFAULT_SPLIT = "969, 30, 1"
SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True)
class BlendPaths:
    """Dataset prefixes and their weights as given; None where none were given."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_data_path(words: Sequence[str], flag: str = "--data-path") -> BlendPaths:
    """Tell prefixes from weight-prefix pairs.

    An even number of words whose first, third, ... are all numbers is pairs; words of
    which none in those places is a number are prefixes.

    Raises:
        UserError: empty, or numbers in some of those places only.
    """
    words = [word.strip() for word in words]
    if not words:
        raise UserError(f"{flag}: no dataset given")
    numbers = [_as_number(word) for word in words[::2]]
    if len(words) % 2 == 1 or all(number is None for number in numbers):
        return BlendPaths(tuple(words), None)
    if any(number is None for number in numbers):
        raise UserError(
            f"{flag} {' '.join(words)}: give either prefixes or weight-prefix pairs, not a mixture"
        )
    return BlendPaths(tuple(words[1::2]), tuple(n for n in numbers if n is not None))


def read_data_args(path: str) -> list[str]:
    """Read the words of a `--data-args-path` file.

    Raises:
        UserError: no such file.
    """
    try:
        return Path(path).read_text(encoding="utf-8").split()
    except OSError as error:
        raise UserError(f"--data-args-path {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--data-args-path {path}: not a text file ({error})") from None


def parse_split(text: str) -> tuple[tuple[float, float], ...]:
    """Turn "98,2,0" into the book-ends of train, valid and test in [0, 1].

    Raises:
        UserError: no positive number, or more than three.
    """
    try:
        shares = [float(number) for number in re.findall(r"[.0-9]+", text)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not 0 < sum(shares) < math.inf or re.search(r"-|[^\W\d]", text):
        raise UserError(f'--split "{text}": give one to three numbers, such as 98,2,0')
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share / total)
    ends[-1] = 1.0
    return tuple(pairwise(ends))


def split_slice(bounds: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """Return the sequences [first, last) of one part, halves rounded to even."""
    low, high = bounds
    return round(low * num_sequences), round(high * num_sequences)
