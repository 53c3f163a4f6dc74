"""Who may join: the token decides, and one message tells who did not have it."""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.errors import UserError
from megatron_lite.mesh.admission import TOKEN_VARIABLE, check_admission, run_token
from megatron_lite.mesh.launch import WorldInfo, finish_distributed, init_distributed
from tests.mesh.rank_program import main
from tests.pool import REPOSITORY, fork_ranks

TOKEN, OTHER = "0123456789abcdef-ours", "0123456789abcdef-theirs"


def with_token(tokens: Sequence[str | None]) -> int:
    """One rank of a run, with its own token in the environment."""
    token = tokens[int(os.environ["RANK"])]
    if token is not None:
        os.environ[TOKEN_VARIABLE] = token
    return main("none", None)


@pytest.mark.parametrize(
    "tokens",
    [(TOKEN, TOKEN, OTHER), (TOKEN, TOKEN, None), (None, None, TOKEN)],
    ids=["another", "none", "unexpected"],
)
def test_row_52f_a_rank_without_the_runs_token_is_refused_with_one_message(
    tokens: tuple[str | None, ...],
) -> None:
    exits = fork_ranks(3, with_token, tokens)
    assert [found.code for found in exits] == [2, 2, 2], exits
    told = "".join(found.stdout + found.stderr for found in exits)
    assert told.count("rank 2 of 3 does not have the MLITE_RUN_TOKEN of rank 0") == 1, told
    assert "ours" not in told
    assert "theirs" not in told


def test_row_52f_ranks_with_one_token_run(tmp_path: Path) -> None:
    exits = fork_ranks(3, with_token, (TOKEN,) * 3)
    assert [found.code for found in exits] == [0, 0, 0], exits


def test_row_52f_a_store_of_strangers_is_refused_by_the_rank() -> None:
    """Rank 0 of another run, or whoever holds the port, admits everybody."""
    with pytest.raises(UserError, match="rank 1 of 2 does not have"):
        check_admission(Held({"nonce": "0" * 32, "verdict": "admitted none"}), TOKEN, 1, 2)
    with pytest.raises(UserError, match="rank 1 of 2 does not have"):
        check_admission(Held({"nonce": "0" * 32, "verdict": "\xff"}), TOKEN, 1, 2)


def test_row_52f_a_proof_holds_for_one_rank_of_one_run_only() -> None:
    first, second = Held(), Held()
    for store in (first, second):
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(check_admission, store, TOKEN, r, 2) for r in range(2)]
            assert [call.result(20) for call in calls] == [None, None]
    assert first.values["rank-1"] != second.values["rank-1"]
    assert TOKEN not in "".join(first.values.values())
    replayed = Held({"rank-1": first.values["rank-1"]})
    with pytest.raises(UserError, match="rank 1 of 2"):
        check_admission(replayed, TOKEN, 0, 2)


def test_row_52f_a_token_that_can_be_guessed_is_refused() -> None:
    assert run_token({}) is None
    with pytest.raises(UserError, match="has 5 characters, at least 16"):
        run_token({TOKEN_VARIABLE: "hello"})


class Held:
    """A store that other threads fill; `get` waits."""

    def __init__(self, values: dict[str, str] | None = None) -> None:
        self.values = values or {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        while key not in self.values:
            pass
        return self.values[key].encode("latin-1")


def meet_on_loopback(port: int) -> int:
    """Meet at the loopback address; print on which addresses this process listens."""
    rank = int(os.environ["RANK"])
    info = WorldInfo(rank, 2, rank, 2, f"tcp://127.0.0.1:{port}")
    init_distributed(info, "cpu", timeout_minutes=1)
    print(*listening(), sep="\n")
    finish_distributed()
    return 0


def listening() -> list[str]:
    """Addresses at which this process accepts connections."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(entry))
    found = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for fields in (line.split() for line in lines):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_row_52f_ranks_of_one_node_listen_on_loopback_alone() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    exits = fork_ranks(2, meet_on_loopback, port)
    assert [found.code for found in exits] == [0, 0], exits
    addresses = [line for found in exits for line in found.stdout.split()]
    assert addresses
    assert set(addresses) == {"0100007F"}  # 127.0.0.1, in the kernel's byte order


def test_row_52f_no_collective_of_the_package_pickles() -> None:
    words: list[Any] = ["all_gather_object", "broadcast_object_list", "gather_object"]
    words += ["scatter_object_list", "send_object_list", "recv_object_list"]
    for path in (REPOSITORY / "megatron_lite").rglob("*.py"):
        text = path.read_text()
        assert not [word for word in words if word in text], path


def test_the_roll_call_waits_no_longer_than_the_ranks_may_take() -> None:
    """A rank that never comes ends the meeting as it did before there was a roll call."""
    import torch.distributed as dist

    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError):
        check_admission(store, TOKEN, 0, 2)
