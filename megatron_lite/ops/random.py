"""Stateless randomness: Philox4x32-10, a function of key and counter.

The key is the run's seed, the counter says which decision is meant: logical element, sample,
purpose. So every layout draws the same initial weights and the same dropout masks, a
recomputed region repeats its mask, and a resumed run needs no saved generator state.

Word e mod 4 of the block with counter element e div 4 belongs to decision e. Source of the
generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Cost: 10 rounds of two 32x32 multiplications per block of four words, about 18 ns a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

PURPOSES = {
    "embedding_dropout": "after the sum of word and position embeddings",
    "attention_dropout": "on the attention probabilities",
    "attention_output_dropout": "after the bias of the attention projection",
    "mlp_output_dropout": "after the bias of the second MLP linear",
    "router_jitter": "noise of a router's input",
}


def philox4x32(
    counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run ten rounds of Philox4x32.

    Args:
        counter: four 32-bit words as int64 tensors (or ints), broadcast together.
        key: two 32-bit words.

    Returns:
        Four tensors of 32-bit words in int64.
    """
    c0, c1, c2, c3 = (torch.as_tensor(word) for word in counter)
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2^64, so both halves of the 64-bit product survive.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (p0 >> 32) & _MASK, (p1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & _MASK, high0 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def seed_key(seed: int) -> tuple[int, int]:
    """Key words of a seed (0 <= seed < 2^64)."""
    return seed & _MASK, (seed >> 32) & _MASK


def stream_counter(label: str) -> tuple[int, int]:
    """Counter words (c2, c3) of a named stream: the first 64 bits of its sha256."""
    digest = hashlib.sha256(label.encode()).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")


def decision_counter(purpose: str, layer: int, step: int) -> int:
    """Counter word c3 of a dropout or noise decision.

    Raises:
        KeyError: the purpose is not in the table.
    """
    if purpose not in PURPOSES:
        raise KeyError(f"{purpose!r} is not a purpose of ops/random.py: {sorted(PURPOSES)}")
    digest = hashlib.sha256(f"{purpose}/{layer}/{step}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def flat_words(
    rows: Tensor, row_stride: int, start: int, length: int, c2: Tensor | int, c3: int, seed: int
) -> Tensor:
    """Words of the decisions e = rows * row_stride + start + [0, length).

    Args:
        rows: int64, any shape.
        row_stride: decisions per row of the logical tensor.
        start: first decision inside a row.
        length: how many consecutive decisions.
        c2: int, or int64 that broadcasts against `rows`.
        c3: fourth counter word.
        seed: the run's seed.

    Returns:
        [*rows.shape, length] int64 words.
    """
    key = seed_key(seed)
    base = rows * row_stride + start
    device = rows.device
    if row_stride % 4 == 0 and start % 4 == 0:
        # Whole blocks: each computed once, its four words are neighbours.
        blocks = torch.arange((length + 3) // 4, device=device)
        counter = (base // 4).unsqueeze(-1) + blocks
    else:
        counter = (base.unsqueeze(-1) + torch.arange(length, device=device)) // 4
    c2 = c2.unsqueeze(-1) if isinstance(c2, Tensor) else c2
    words = philox4x32((counter & _MASK, counter >> 32, c2, c3), key)
    stacked = torch.stack(torch.broadcast_tensors(*words), dim=-1)
    if row_stride % 4 == 0 and start % 4 == 0:
        return stacked.flatten(-2)[..., :length]
    which = (base.unsqueeze(-1) + torch.arange(length, device=device)) % 4
    return stacked.gather(-1, which.unsqueeze(-1)).squeeze(-1)


def keep_mask(words: Tensor, probability: float) -> Tensor:
    """Bool mask of kept elements: word >= floor(p * 2^32)."""
    return words >= int(probability * 2**32)


def normal_values(
    name: str, logical_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int], seed: int
) -> Tensor:
    """Standard normals of one region of a logical tensor, in fp64.

    Args:
        name: logical parameter name; its stream is "init/" + name.
        logical_shape: shape of the whole tensor; the element is its flat index.
        offset: first element of the region per dim.
        shape: the region.
        seed: the run's seed.

    Returns:
        `shape`, fp64: ndtri((word + 0.5) / 2^32).
    """
    out = torch.empty(tuple(shape), dtype=torch.float64)
    if out.numel() == 0:
        return out
    c2, c3 = stream_counter(f"init/{name}")
    columns, width, start = logical_shape[-1], shape[-1], offset[-1]
    rows = torch.zeros(tuple(shape[:-1]), dtype=torch.int64)
    for dim in range(len(shape) - 1):
        index = torch.arange(offset[dim], offset[dim] + shape[dim])
        rows = rows * logical_shape[dim] + index.view(-1, *[1] * (len(shape) - 2 - dim))
    rows, flat = rows.reshape(-1), out.view(-1, width)
    step = max(1, 2**18 // width)  # bounds the int64 temporaries to a few tens of MiB
    for first in range(0, rows.numel(), step):
        words = flat_words(rows[first : first + step], columns, start, width, c2, c3, seed)
        flat[first : first + step] = torch.special.ndtri((words.double() + 0.5) / 2.0**32)
    return out
