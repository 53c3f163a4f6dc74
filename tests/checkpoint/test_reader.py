"""Reading: exact for any box and dtype, as few bytes as the box needs, verified as a whole."""

import math
import random
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint import StateEntry, open_checkpoint, save_checkpoint
from megatron_lite.checkpoint import pieces as pieces_module
from megatron_lite.checkpoint import ranges as ranges_module
from megatron_lite.checkpoint.boxes import contiguous_range
from megatron_lite.checkpoint.catalog import find_checkpoint
from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import attempt_directory, attempt_name
from megatron_lite.checkpoint.reader import Checkpoint
from megatron_lite.checkpoint.save import SaveRequest, publish_attempt, write_rank
from megatron_lite.checkpoint.tensors import TORCH_DTYPES, take_snapshot
from megatron_lite.errors import DamagedError
from megatron_lite.mesh.groups import local_group
from tests.checkpoint.tiny import NONCE, same_bits


def save_whole(root: Path, tensors: dict[str, Tensor]) -> None:
    """One rank, whole tensors."""
    entries = [
        StateEntry(name, t, tuple(t.shape), (0,) * t.dim(), True) for name, t in tensors.items()
    ]
    save_checkpoint(root, 1, entries, {}, local_group("world"))


def save_by_rows(root: Path, name: str, tensor: Tensor, size: int) -> None:
    """`size` ranks, each with its share of the rows."""
    attempt = attempt_name(1, 0, NONCE)
    files = FileSystem()
    files.ensure_directory(attempt_directory(root, attempt))
    plan = CommitPlan(attempt, 1, 0, size, {})
    rows = tensor.shape[0] // size
    for rank in range(size):
        piece = tensor[rank * rows : (rank + 1) * rows]
        offset = (rank * rows,) + (0,) * (tensor.dim() - 1)
        entry = StateEntry(name, piece, tuple(tensor.shape), offset, True)
        write_rank(SaveRequest(root, plan, rank, False, ()), take_snapshot([entry]), files)
    publish_attempt(SaveRequest(root, plan, 0, False, ()), files)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits of a dtype, NaNs and all."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    return (
        torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .view(shape)
    )


@pytest.mark.parametrize("chunk", [8, 64, 2**20])
@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=list(TORCH_DTYPES))
def test_any_box_of_any_dtype_comes_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small chunks take the paths of large tensors."""
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(ranges_module, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(ranges_module, "INLINE_BYTES", 0)
    shapes = [(), (0,), (3, 0), (7,), (6, 5), (4, 3, 5), (1, 4, 6), (2, 1, 3, 4)]
    tensors = {f"t{i}": random_bytes(shape, dtype, i) for i, shape in enumerate(shapes)}
    save_whole(tmp_path, tensors)
    generator = random.Random(0)
    for verified in (False, True):
        checkpoint = open_checkpoint(tmp_path)
        if verified:
            checkpoint.read_many([(name, None, None) for name in tensors])
        for _ in range(40):
            requests, expected = [], []
            for name, tensor in tensors.items():
                low = tuple(generator.randrange(n + 1) for n in tensor.shape)
                extent = tuple(
                    generator.randrange(n - a + 1) for n, a in zip(tensor.shape, low, strict=True)
                )
                requests.append((name, low, extent))
                slices = tuple(slice(a, a + n) for a, n in zip(low, extent, strict=True))
                expected.append(tensor[slices].clone())
            for found, right in zip(checkpoint.read_many(requests), expected, strict=True):
                assert same_bits(found, right)


@pytest.mark.parametrize(
    ("offset", "extent", "run"),
    [
        ((0, 0), (4, 6), (0, 24)),
        ((1, 0), (2, 6), (6, 18)),
        ((2, 3), (1, 2), (15, 17)),
        ((0, 1), (2, 2), None),
        ((0, 0), (2, 5), None),
        ((3, 5), (1, 1), (23, 24)),
    ],
)
def test_which_boxes_are_one_run_of_elements(
    offset: tuple[int, ...], extent: tuple[int, ...], run: tuple[int, int] | None
) -> None:
    assert contiguous_range((offset, extent), (4, 6)) == run
    if run is not None:
        flat = torch.arange(24)
        box = flat.view(4, 6)[offset[0] : offset[0] + extent[0], offset[1] : offset[1] + extent[1]]
        assert torch.equal(box.reshape(-1), flat[slice(*run)])


def test_a_rank_reads_only_the_pieces_that_its_box_touches(tmp_path: Path) -> None:
    """Rows saved by four ranks, wanted by two: each reads half of the bytes."""
    tensor = random_bytes((64, 32), torch.float32, 0)
    save_by_rows(tmp_path, "w", tensor, 4)
    for rank in range(2):
        checkpoint = Checkpoint(find_checkpoint(tmp_path, verify="structure"))
        half = checkpoint.read("w", (32 * rank, 0), (32, 32))
        assert same_bits(half, tensor[32 * rank : 32 * (rank + 1)])
        assert checkpoint.bytes_read == tensor.nbytes // 2


def test_a_piece_is_hashed_whole_at_first_and_read_in_part_afterwards(tmp_path: Path) -> None:
    """One rank's file read by two ranks: a part costs the whole piece once, then the part."""
    tensor = random_bytes((64, 32), torch.float32, 0)
    save_whole(tmp_path, {"w": tensor})
    checkpoint = Checkpoint(find_checkpoint(tmp_path, verify="structure"))
    checkpoint.read("w", (0, 0), (32, 32))
    assert checkpoint.bytes_read == tensor.nbytes
    checkpoint.read("w", (32, 0), (32, 32))
    assert checkpoint.bytes_read == tensor.nbytes * 3 // 2
    checkpoint.read("w", (16, 5), (8, 20))  # columns: whole rows are read
    assert checkpoint.bytes_read == tensor.nbytes * 3 // 2 + 8 * 32 * 4


@pytest.mark.parametrize("wanted", [((0, 0), (1, 1)), ((0, 0), (64, 32)), ((5, 3), (20, 7))])
@pytest.mark.parametrize("position", [0, 4000, 8191])
def test_damage_outside_of_the_box_is_damage_of_its_piece(
    tmp_path: Path, wanted: tuple[tuple[int, ...], tuple[int, ...]], position: int
) -> None:
    save_whole(tmp_path, {"w": random_bytes((64, 32), torch.float32, 0)})
    found = find_checkpoint(tmp_path, verify="structure")
    path = found.directory / "rank00000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) - 8192 + position] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="w is damaged"):
        Checkpoint(found).read("w", *wanted)


def test_one_damaged_piece_of_many_fails_the_whole_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All or nothing, with the first damaged piece in the order of the requests."""
    monkeypatch.setattr(ranges_module, "INLINE_BYTES", 0)
    save_whole(tmp_path, {f"t{i}": random_bytes((100,), torch.uint8, i) for i in range(20)})
    found = find_checkpoint(tmp_path, verify="structure")
    path = found.directory / "rank00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    checkpoint = Checkpoint(found)
    requests = [(name, None, None) for name in checkpoint.names]
    with pytest.raises(DamagedError, match="t9 is damaged"):
        checkpoint.read_many(requests)
    with pytest.raises(DamagedError, match="t9 is damaged"):  # nothing counts as verified
        checkpoint.read("t9", (0,), (1,))


@pytest.mark.parametrize("box", [None, ((0, 0), (1024, 512))], ids=["rows", "columns"])
def test_memory_is_the_result_and_a_bounded_buffer(
    tmp_path: Path, box: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> None:
    """Buffers are Python's; the result is torch's and not counted here."""
    save_whole(tmp_path, {"w": torch.zeros(8192, 1024)})
    checkpoint = Checkpoint(find_checkpoint(tmp_path, verify="structure"))
    tracemalloc.start()
    checkpoint.read("w", *(box or (None, None)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * ranges_module.CHUNK_BYTES
