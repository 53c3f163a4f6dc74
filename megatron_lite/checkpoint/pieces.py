"""From one piece of a shard to one box in memory: read, verified, copied.

Where the box is one run of bytes in the piece and in memory, it is read into its place.
Elsewhere whole rows pass through a small buffer. A piece that is not verified yet is read
and hashed to its end whatever is wanted of it; of a verified one only what is needed is read.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron_lite.checkpoint.boxes import Dims, Region, contiguous_range, relative_slices
from megatron_lite.checkpoint.ranges import CHUNK_BYTES, Fetch, RangeReader, open_range
from megatron_lite.checkpoint.shards import DTYPES, ShardTensor
from megatron_lite.checkpoint.tensors import tensor_bytes, tensor_over


@dataclass(frozen=True, eq=False)
class PieceWork:
    """One piece of which `part` goes to `out`; `sha256` is None when it is verified already."""

    path: Path
    key: str
    tensor: ShardTensor
    sha256: str | None
    part: Region
    out: Tensor
    identity: tuple[str, Dims]

    @property
    def num_bytes(self) -> int:
        """Bytes that are read from the file."""
        return math.prod(self._block()[1]) * DTYPES[self.tensor.dtype].itemsize

    def run(self, fetch: Fetch) -> None:
        """Read, verify and copy.

        Raises:
            DamagedError: the bytes differ from the sha256; `out` is worthless then.
        """
        skipped, shape, part = self._block()
        begin = self.tensor.begin + skipped
        fetch(self.path, begin, begin + self.num_bytes)
        with open_range(self.path, begin, begin + self.num_bytes) as reader:
            copy_block(reader, self.tensor.dtype, shape, part, self.out)
            if self.sha256 is not None:
                reader.finish(self.sha256, f"{self.path}: {self.key}")

    def _block(self) -> tuple[int, Dims, Region]:
        """The rows to read: bytes before them, their shape, and the wanted part of them."""
        shape, (offset, extent) = self.tensor.shape, self.part
        if self.sha256 is not None or not shape:
            return 0, shape, self.part
        row_bytes = math.prod(shape[1:]) * DTYPES[self.tensor.dtype].itemsize
        rows = (extent[0], *shape[1:])
        return offset[0] * row_bytes, rows, ((0, *offset[1:]), extent)


def copy_block(reader: RangeReader, dtype: str, shape: Dims, part: Region, out: Tensor) -> None:
    """Read a block of `shape` to its end and put `part` of it into `out`.

    Args:
        reader: at the first byte of the block.
        out: of the shape of `part`, any strides.
    """
    item = DTYPES[dtype].itemsize
    end = reader.rest - math.prod(shape) * item
    run = contiguous_range(part, shape)
    if run is not None and out.is_contiguous():
        reader.skip(run[0] * item)
        reader.read_into(tensor_bytes(out))
        reader.skip(reader.rest - end)
        return
    offset, extent = part
    row_bytes = math.prod(shape[1:]) * item
    if row_bytes > CHUNK_BYTES and len(shape) > 1:
        reader.skip(offset[0] * row_bytes)
        for index in range(extent[0]):
            copy_block(reader, dtype, shape[1:], (offset[1:], extent[1:]), out[index])
        reader.skip(reader.rest - end)
        return
    step = max(1, CHUNK_BYTES // row_bytes)
    buffer = memoryview(bytearray(min(step, extent[0]) * row_bytes))
    inner = relative_slices((offset[1:], extent[1:]), (0,) * (len(shape) - 1))
    reader.skip(offset[0] * row_bytes)
    for first in range(0, extent[0], step):
        count = min(step, extent[0] - first)
        data = buffer[: count * row_bytes]
        reader.read_into(data)
        rows = tensor_over(data, dtype, (count, *shape[1:]))
        out[first : first + count].copy_(rows[(slice(None), *inner)])
    reader.skip(reader.rest - end)
