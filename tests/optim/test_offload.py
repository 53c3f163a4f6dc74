"""State elsewhere than beside the parameters: the same bits, bounded memory, clear faults."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.config.flags import parse_config
from megatron_lite.config.state_plan import offloaded_buckets
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.native.load import load_native
from megatron_lite.optim.adamw import AdamW
from megatron_lite.optim.chunked import CHUNK
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.optim.rules import UpdateRule
from megatron_lite.optim.sgd import SGD
from megatron_lite.optim.state_home import MappedHome, StateHome, build_home
from megatron_lite.shard.buffers import FlatBuffers
from tests.pool import RankPool
from tests.shard.stand import build_stand, logical_value, parallel_shape, region

CPU = torch.device("cpu")
ADAMW = AdamW(beta1=0.9, beta2=0.95, eps=1e-8)
RATES = ((0.01, 0.1), (0.02, 0.1), (0.005, 0.2))  # (lr, weight decay) of three updates
both = pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])


def make_home(kind: str, buckets: int, directory: Path, chunk: int | None = 192) -> StateHome:
    chosen = range(buckets)
    if kind == "some":  # every other bucket stays
        home = StateHome(CPU, chosen[::2])
    elif kind == "cpu":
        home = StateHome(CPU, chosen)
    else:
        home = MappedHome(CPU, chosen, str(directory))
    home.chunk_elements = chunk
    return home


def run_updates(optimizer: Optimizer, buffers: FlatBuffers, clip: float) -> None:
    for piece in optimizer.weight_pieces():
        piece.tensor.copy_(region(logical_value(piece.spec, piece.tensor.dtype), piece.box))
    optimizer.after_load("master")
    for update, (lr, decay) in enumerate(RATES):
        for piece in buffers.gradient_pieces():
            whole = logical_value(piece.spec, piece.tensor.dtype, scale=0.1 + update)
            piece.tensor.copy_(region(whole, piece.box))
        optimizer.step(lr, decay, clip)


def all_state(optimizer: Optimizer) -> dict[tuple[str, str, tuple[int, ...]], Tensor]:
    return {
        (piece.kind, piece.spec.name, piece.box.offset): piece.tensor.clone()
        for piece in optimizer.state_pieces()
    }


def updated(
    kind: str, directory: Path, rule: UpdateRule, native: bool, clip: float, **options: Any
) -> dict[Any, Tensor]:
    if native:
        load_native()
    stand = build_stand(**options)
    home = None
    if kind != "none":
        home = make_home(kind, len(stand.buffers.layout.buckets), directory)
    optimizer = Optimizer(stand.buffers, rule, native, stand.weights, home=home)
    run_updates(optimizer, stand.buffers, clip)
    return all_state(optimizer)


@both
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("rule", [ADAMW, SGD(0.9), SGD(0.0)], ids=str)
@pytest.mark.parametrize("kind", ["cpu", "disk", "some"])
def test_offloaded_state_gives_the_same_bits(
    tmp_path: Path, kind: str, rule: UpdateRule, dtype: str, native: bool
) -> None:
    expected = updated("none", tmp_path, rule, native, 0.25, dtype=dtype)
    found = updated(kind, tmp_path, rule, native, 0.25, dtype=dtype)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


def stages_agree(rank: int, stage: int, directory: str) -> None:
    for dtype in ("float32", "bfloat16"):
        options = {"parallel": parallel_shape(dp=2), "rank": rank, "stage": stage, "dtype": dtype}
        expected = updated("none", Path(directory), ADAMW, False, 1.0, **options)
        for kind in ("cpu", "disk"):
            found = updated(kind, Path(directory), ADAMW, False, 1.0, **options)
            assert found.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items()), kind


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_of_every_stage_are_offloaded_with_the_same_bits(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    rank_pool.run(2, stages_agree, stage=stage, directory=str(tmp_path))


def test_nothing_of_the_state_stays_in_ordinary_memory(tmp_path: Path) -> None:
    stand = build_stand(dtype="bfloat16")
    home = make_home("disk", len(stand.buffers.layout.buckets), tmp_path)
    assert isinstance(home, MappedHome)
    optimizer = Optimizer(stand.buffers, ADAMW, False, stand.weights, home=home)
    elements = sum(bucket.elements for bucket in stand.buffers.layout.buckets)
    tensors = [*optimizer.masters.values()]
    tensors += [t for kind in optimizer.state.values() for t in kind.tensors.values()]
    assert sum(tensor.nbytes for tensor in tensors) == 12 * elements
    assert all(home.scratch(tensor, tensor.dtype) is not None for tensor in tensors)
    assert 12 * elements <= home.num_bytes


class Watched(MappedHome):
    """Notes what is read ahead and let go, in elements of the whole chunk."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ahead = self.most = 0

    def expect(self, tensors: Any) -> None:
        tensors = list(tensors)
        self.ahead += sum(tensor.nbytes for tensor in tensors)
        self.most = max(self.most, self.ahead)
        super().expect(tensors)

    def leave(self, tensors: Any) -> None:
        tensors = list(tensors)
        self.ahead -= sum(tensor.nbytes for tensor in tensors)
        super().leave(tensors)


def test_two_chunks_of_a_file_are_needed_at_once_however_long_the_state_is(tmp_path: Path) -> None:
    stand = build_stand(dtype="bfloat16", bucket_size=10**6)
    home = Watched(CPU, range(len(stand.buffers.layout.buckets)), str(tmp_path))
    home.chunk_elements = 128
    optimizer = Optimizer(stand.buffers, ADAMW, False, stand.weights, home=home)
    run_updates(optimizer, stand.buffers, 1.0)
    assert home.ahead == 0
    assert home.most == 2 * 128 * 12


def resident_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssFile:"))


def test_pages_of_a_file_are_resident_only_while_they_are_updated(tmp_path: Path) -> None:
    home = MappedHome(CPU, [0], str(tmp_path))
    before = resident_kib()
    tensor = home.elsewhere(8 * CHUNK, torch.float32)
    tensor.fill_(1.0)
    held = resident_kib() - before
    for part in tensor.split(CHUNK):
        home.leave([part])
    assert held >= 30 * 1024
    assert resident_kib() - before <= 1024
    assert bool((tensor == 1.0).all())  # nothing was lost


def test_the_file_has_no_name_and_goes_with_its_process(tmp_path: Path) -> None:
    home = MappedHome(CPU, [0], str(tmp_path))
    home.elsewhere(1000, torch.float32)
    assert list(tmp_path.iterdir()) == []
    assert home.num_bytes == 4096  # whole pages


def test_a_directory_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(UserError, match=f"--offload-dir {missing}: cannot be written to") as caught:
        MappedHome(CPU, [0], str(missing))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    reserve, granted = os.posix_fallocate, [0]

    def refuse(descriptor: int, start: int, length: int) -> None:
        granted[0] += 1
        if granted[0] > 3:
            raise OSError(fault, os.strerror(fault))
        reserve(descriptor, start, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    stand = build_stand(dtype="bfloat16")
    home = make_home("disk", len(stand.buffers.layout.buckets), tmp_path)
    with pytest.raises(DamagedError, match="no space for the optimizer state") as caught:
        Optimizer(stand.buffers, ADAMW, False, stand.weights, home=home)
    assert str(tmp_path) in str(caught.value) and os.strerror(fault) in str(caught.value)
    assert caught.value.exit_code == 3


def test_too_little_memory_is_told_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"no memory on cpu for .* bytes of optimizer state") as e:
        StateHome(CPU).zeros(0, 2**60, "float32")
    assert "--optimizer-offload disk" in str(e.value)


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [(0.0, ()), (0.1, ()), (0.2, (0,)), (0.5, (0, 1)), (0.8, (0, 1, 2)), (1.0, (0, 1, 2, 3))],
)
def test_a_fraction_is_the_nearest_number_of_buckets(
    fraction: float, chosen: tuple[int, ...]
) -> None:
    assert offloaded_buckets([10, 10, 10, 10], fraction) == frozenset(chosen)


@pytest.mark.parametrize(
    ("flags", "kind", "offloaded"),
    [
        ("", StateHome, 0),
        ("--optimizer-cpu-offload", StateHome, 3),
        ("--optimizer-offload cpu --optimizer-offload-fraction 0", StateHome, 0),
        ("--optimizer-offload disk --offload-dir {}", MappedHome, 3),
    ],
)
def test_flags_choose_the_home(tmp_path: Path, flags: str, kind: type, offloaded: int) -> None:
    config = parse_config(flags.format(tmp_path).split(), {})
    buffers = build_stand(bucket_size=2000).buffers
    buckets = len(buffers.layout.buckets)
    home = build_home(config, buffers)
    assert type(home) is kind
    assert len(home.buckets) == (buckets if offloaded else 0)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[Any, Tensor]]]:
    """Three updates with narrow moments or gradients."""
    from tests.shard import stand as module

    def run(home: str, directory: Path, native: bool, **changes: Any) -> dict[Any, Tensor]:
        precision = replace(module.PRECISIONS["bfloat16"], **changes)
        monkeypatch.setitem(module.PRECISIONS, "bfloat16", precision)
        return updated(home, directory, ADAMW, native, 0.25, dtype="bfloat16")

    yield run


MOMENTS = (("exp_avg", "bfloat16"), ("exp_avg_sq", "bfloat16"))


@both
def test_narrow_moments_are_the_rounded_wide_ones_and_weights_stay_close(
    tmp_path: Path, narrow: Callable[..., dict[Any, Tensor]], native: bool
) -> None:
    wide = narrow("none", tmp_path, native, moments=())
    found = narrow("none", tmp_path, native, moments=MOMENTS)
    change = 0.0
    for (kind, *key), tensor in found.items():
        expected = wide[(kind, *key)]
        if kind in ("exp_avg", "exp_avg_sq"):
            assert tensor.dtype == torch.bfloat16
            # Three roundings of half a unit in the last of 8 bits each.
            torch.testing.assert_close(tensor.float(), expected, rtol=3 * 2**-8, atol=1e-30)
        if kind == "master":
            change = max(change, float((tensor - expected).abs().max()))
    # An update is off by the moments' relative error, each at most lr.
    assert 0.0 < change <= sum(lr for lr, _ in RATES) * 4 * 2**-8


@both
@pytest.mark.parametrize("home", ["cpu", "disk", "some"])
def test_narrow_state_is_offloaded_with_the_same_bits(
    tmp_path: Path, narrow: Callable[..., dict[Any, Tensor]], native: bool, home: str
) -> None:
    changes = {"moments": MOMENTS, "main_grad": "bfloat16"}
    expected = narrow("none", tmp_path, native, **changes)
    found = narrow(home, tmp_path, native, **changes)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
