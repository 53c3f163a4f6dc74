"""The storage meter equals what tensors really hold; the peak rate is positive and named."""

from __future__ import annotations

import subprocess
import sys

import torch

from megatron_lite.telemetry.meters import (
    LiveStorageMeter,
    measure_matmul_peak,
    measure_peak_rss_bytes,
)


def test_a_storage_counts_once_however_many_views() -> None:
    with LiveStorageMeter() as meter:
        base = torch.zeros(256)
        views = [base[:10], base.view(16, 16), base.t()]
        assert meter.live_bytes == 1024
        del base
        assert meter.live_bytes == 1024
        del views
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 1024


def test_tensors_saved_for_the_backward_pass_stay_counted_until_it_ran() -> None:
    weight = torch.zeros(64, 64, requires_grad=True)
    with LiveStorageMeter() as meter:
        x = torch.ones(8, 64)
        y = torch.tanh(x @ weight)  # keeps x and its own result
        loss = y.sum()
        del x, y
        assert meter.live_bytes == 2 * 8 * 64 * 4 + 4
        loss.backward()
        del loss
        assert meter.live_bytes == weight.numel() * 4  # the gradient
        weight.grad = None
        assert meter.live_bytes == 0


def test_tracked_and_freed_storages_can_reuse_an_address() -> None:
    with LiveStorageMeter() as meter:
        meter.track([torch.zeros(10)])
        for _ in range(50):
            torch.zeros(1000)
        assert meter.live_bytes == 0
        meter.reset_peak()
        kept = torch.zeros(5)
        assert meter.peak_bytes == kept.numel() * 4


def test_a_resized_storage_is_counted_at_its_new_size() -> None:
    with LiveStorageMeter() as meter:
        x = torch.zeros(100)
        x.resize_(200)
        assert meter.live_bytes == 800


def test_peak_rss_sees_memory_that_was_freed() -> None:
    script = (
        "from megatron_lite.telemetry.meters import measure_peak_rss_bytes as peak\n"
        "before = peak()\n"
        "block = bytearray(b'x') * (64 * 2**20)\n"
        "del block\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) > 48 * 2**20
    assert measure_peak_rss_bytes() > 2**20


def test_the_matmul_peak_states_its_convention() -> None:
    peak = measure_matmul_peak(torch.float32, torch.device("cpu"), size=64, seconds=0.0)
    assert peak.flops_per_s > 1e6
    threads = torch.get_num_threads()
    assert peak.description == (
        f"measured dense float32 matmul 64 x 64 x 64, best of 3, {threads} threads"
    )
