"""Who may join a run: each rank proves that it knows the run's token, before any group exists.

The rendezvous store asks nobody who he is: whoever reaches its port can present himself as
a rank, by intent or because two jobs share an address. With `MLITE_RUN_TOKEN` in the
environment of all ranks, rank 0 sets a nonce, each rank leaves an HMAC of it and of its own
number, and rank 0 proves itself by the verdict. Invariant: the token is never sent, logged
or stored. It keeps strangers from becoming ranks; it does not encrypt what the ranks send,
and who can write to the store can still end the run.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Protocol

from megatron_lite.errors import UserError

TOKEN_VARIABLE = "MLITE_RUN_TOKEN"
SHORTEST_TOKEN = 16
_NONCE, _VERDICT = "nonce", "verdict"
_NO_TOKEN = "none"


class AdmissionStore(Protocol):
    """The part of torch.distributed.Store that the roll call needs."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


def run_token(environ: Mapping[str, str]) -> str | None:
    """The run's token; None where the launcher gives none.

    Raises:
        UserError: it is so short that it could be guessed.
    """
    token = environ.get(TOKEN_VARIABLE)
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise UserError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, at least {SHORTEST_TOKEN} are "
            "needed: give all ranks the same random text"
        )
    return token


def check_admission(store: AdmissionStore, token: str | None, rank: int, world_size: int) -> None:
    """Let this rank in, or end every rank with the same message.

    Args:
        store: of this purpose alone; `get` waits for the key.
        token: of `run_token`.
        rank: this process's.
        world_size: how many have to present themselves.

    Comm: three small requests per rank, world_size more by rank 0.

    Raises:
        UserError: on every rank, naming the first one that does not know rank 0's token.
    """
    if rank == 0:
        nonce = secrets.token_hex(16)
        store.set(_NONCE, nonce)
        others = range(1, world_size)
        wrong = [r for r in others if not _admits(store, token, nonce, r, world_size)]
        verdict = f"refused {wrong[0]} {len(wrong)}" if wrong else "admitted"
        store.set(_VERDICT, f"{verdict} {_proof(token, nonce, verdict)}")
    else:
        nonce = store.get(_NONCE).decode("ascii", "replace")
        store.set(f"rank-{rank}", _proof(token, nonce, f"rank {rank} of {world_size}"))
    word, _, proof = store.get(_VERDICT).decode("ascii", "replace").rpartition(" ")
    refused = re.fullmatch(r"refused (\d{1,9}) (\d{1,9})", word)
    if refused:
        raise UserError(_refusal(refused[1], refused[2], world_size))
    if not hmac.compare_digest(proof.encode(), _proof(token, nonce, word).encode()):
        raise UserError(_refusal(str(rank), "1", world_size))


def _admits(
    store: AdmissionStore, token: str | None, nonce: str, rank: int, world_size: int
) -> bool:
    wanted = _proof(token, nonce, f"rank {rank} of {world_size}")
    return hmac.compare_digest(store.get(f"rank-{rank}"), wanted.encode())


def _proof(token: str | None, nonce: str, text: str) -> str:
    if token is None:
        return _NO_TOKEN
    return hmac.new(token.encode(), f"{nonce} {text}".encode(), hashlib.sha256).hexdigest()


def _refusal(first: str, count: str, world_size: int) -> str:
    others = f" (and {int(count) - 1} more)" if count != "1" else ""
    return (
        f"rank {first}{others} of {world_size} does not have the {TOKEN_VARIABLE} of rank 0: "
        "give all ranks of a run the same one, or none; without it the rank may belong to "
        "another run that meets at the same address"
    )
