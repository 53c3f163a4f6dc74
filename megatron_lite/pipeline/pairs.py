"""How a pair runs: the forward half in the second lane, the backward half here.

Bitwise the same as one after the other, because the halves share nothing that is written:
they are of different microbatches, a parameter's gradient is written by backward passes
only (the output matrix's by the forward of the head only), and no backward in a pair is the
last one of its stage, so that none completes a bucket and starts its reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from megatron_lite.errors import UserError
from megatron_lite.mesh.lane import Lane
from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.runner import Handler

_HALVES = (Kind.F, Kind.B, Kind.I)


class HalfError(RuntimeError):
    """One half of a pair failed; the message names it, the cause is chained."""


def pair_handler(handlers: Mapping[Kind, Handler], lane: Lane | None) -> Handler:
    """Return the handler of pairs.

    Args:
        handlers: of F, B and I.
        lane: where forward halves run; None: before the backward halves, in one thread.

    Raises:
        HalfError: (the handler) a half failed with anything but a message for the user. If
            the backward half failed, the forward half is left to itself.
    """

    # A copy: the handler usually joins `handlers`, and a circle would keep a step's tensors
    # until the garbage collector comes.
    of_halves = {kind: handlers[kind] for kind in _HALVES if kind in handlers}

    def run(action: Action) -> None:
        forward, backward = action.halves
        if lane is None:
            _run_half(of_halves, forward)
            _run_half(of_halves, backward)
            return
        errand = lane.start(partial(_run_half, of_halves, forward))
        _run_half(of_halves, backward)
        errand.wait()

    return run


def _run_half(handlers: Mapping[Kind, Handler], half: Action) -> None:
    try:
        handlers[half.kind](half)
    except UserError:
        raise
    except Exception as error:
        raise HalfError(f"{half}: {error}") from error
