"""`python -m ...unpickle SOURCE TARGET`: the tensors of a torch pickle as safetensors.

Run in a process of its own, because a pickle is a program. Only tensors and containers are
let through (torch's weights-only unpickler), and what is shared is written out twice.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from megatron_lite.checkpoint.tensors import write_safetensors


def convert(source: str, target: str) -> None:
    """Load a state dictionary and write its tensors.

    Raises:
        TypeError: something other than tensors by name.
    """
    loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=_is_zip(source))
    if not isinstance(loaded, dict):
        raise TypeError(f"holds a {type(loaded).__name__}, expected tensors by name")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"{name!r} is a {type(value).__name__}, expected a tensor")
    write_safetensors(target, loaded)


def _is_zip(source: str) -> bool:
    with open(source, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


if __name__ == "__main__":
    convert(*sys.argv[1:3])
