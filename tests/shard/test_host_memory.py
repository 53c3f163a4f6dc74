"""Freed large blocks leave the process, in a process of their own."""

import os
import subprocess
import sys

import pytest

# Blocks of 28 MiB come and go with a small one kept behind each, as in a backward pass.
PROGRAM = """
import sys
import torch
from megatron_lite.shard.host_memory import return_large_blocks

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

print(int(return_large_blocks()) if sys.argv[1] == "on" else 0)
learn = torch.ones(30 * 2**20, dtype=torch.uint8)
del learn  # glibc now keeps what is smaller
before, kept, wave = resident_mib(), [], []
for _ in range(16):
    wave.append(torch.ones(28 * 2**20, dtype=torch.uint8))
    kept.append(torch.ones(2**16, dtype=torch.uint8))
wave.clear()
print(resident_mib() - before)
"""


def held_mib(word: str, **environ: str) -> tuple[bool, float]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    out = subprocess.check_output(
        [sys.executable, "-c", PROGRAM, word], env={**clean, **environ}, text=True
    )
    in_force, held = out.split()
    return in_force == "1", float(held)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_large_blocks_leave_the_process() -> None:
    in_force, held = held_mib("on")
    assert in_force
    assert held < 16
    _, kept = held_mib("off")
    assert kept > 100  # what it is for


@pytest.mark.parametrize(
    "environ",
    [
        {"MALLOC_MMAP_THRESHOLD_": "1000000"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"},
    ],
    ids=["variable", "tunable"],
)
def test_the_users_threshold_stays(environ: dict[str, str]) -> None:
    in_force, held = held_mib("on", **environ)
    assert not in_force
    assert held < 16
