"""Counting and hashing what a conversion writes, and comparing it with what is read back.

A tensor is hashed when its recipe runs. The target is then opened as a source and every
tensor hashed again: a conversion that lost, doubled or changed one does not succeed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from megatron_lite.checkpoint.convert.bundle import Bundle
from megatron_lite.checkpoint.direct import LogicalTensor
from megatron_lite.checkpoint.strict_json import encode_json
from megatron_lite.checkpoint.tensors import tensor_bytes
from megatron_lite.errors import DamagedError, UserError

PROGRESS_BYTES = 10**9


class Tally:
    """Hashes of tensors by name, and their bytes, as their recipes run.

    Args:
        bundle: what is converted.
        say: takes a progress line, about every gigabyte.
        allow_nonfinite: write NaN and infinities too; without it they end the conversion.

    Attributes:
        nonfinite: values that are no finite numbers, by tensor, where there are some.
    """

    def __init__(self, bundle: Bundle, say: Callable[[str], None], allow_nonfinite: bool = False):
        self.hashes: dict[str, str] = {}
        self.nonfinite: dict[str, int] = {}
        self._allow_nonfinite = allow_nonfinite
        self.num_bytes = 0
        self.bundle = replace(
            bundle, tensors={n: self._watch(t) for n, t in bundle.tensors.items()}
        )
        self._say = say
        self._told = 0

    def _watch(self, tensor: LogicalTensor) -> LogicalTensor:
        def load() -> Tensor:
            value = tensor.load()
            if tensor.name not in self.hashes:
                self._check_finite(tensor.name, value)
                self.hashes[tensor.name] = hashlib.sha256(tensor_bytes(value)).hexdigest()
                self._advance(value.nbytes)
            return value

        return replace(tensor, load=load)

    def _check_finite(self, name: str, value: Tensor) -> None:
        """Count what is no finite number; weights that have some train and answer nothing."""
        wide = value.float() if value.is_floating_point() and value.itemsize == 1 else value
        count = value.numel() - int(wide.isfinite().sum())
        if not count:
            return
        self.nonfinite[name] = count
        if not self._allow_nonfinite:
            raise UserError(
                f"{name}: {count} of {value.numel()} values are NaN or infinite as {value.dtype}: "
                f"the source is damaged, or its values do not fit; --allow-nonfinite writes them"
            )

    def _advance(self, size: int) -> None:
        self.num_bytes += size
        if self.num_bytes - self._told >= PROGRESS_BYTES:
            self._told = self.num_bytes
            total = len(self.bundle.tensors)
            self._say(f"  {len(self.hashes)} of {total} tensors, {self.num_bytes / 1e9:.1f} GB")


def check_written(written: Mapping[str, str], target: Bundle) -> str:
    """Compare the target, read back, with what was computed for it.

    Args:
        written: hashes by logical name.
        target: the target, opened as a source.

    Returns:
        The logical hash of the target, as `tools/inspect_checkpoint.py` computes it.

    Raises:
        DamagedError: naming the tensors that differ.
    """
    digest = hashlib.sha256()
    wrong = sorted(written.keys() ^ target.tensors.keys())
    for name, tensor in sorted(target.tensors.items()):
        data = tensor_bytes(tensor.load())
        digest.update(encode_json([name, tensor.dtype, list(tensor.shape)]))
        digest.update(data)
        if written.get(name) != hashlib.sha256(data).hexdigest():
            wrong.append(name)
        del data  # before the next tensor is read
    if wrong:
        told = ", ".join(wrong[:5])
        raise DamagedError(
            f"{target.source}: {len(wrong)} tensors were not written right, the result must not be "
            f"used: {told}"
        )
    return digest.hexdigest()
