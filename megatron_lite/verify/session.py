"""Run the real program on a pool of ranks and keep what it leaves behind.

A rank of the pool does exactly what `pretrain.py` does with the same flags: parse, check,
build, train. Its metrics and dump land in a directory per run; its share of the elements
and its collectives come back to the caller.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_lite.verify.dumps import RunRecord

if TYPE_CHECKING:
    from torch import Tensor


class Pool(Protocol):
    """Resident ranks (`verify.pool.RankPool`)."""

    def run(self, n: int, target: Any, *, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call `target` on n ranks and return the results in rank order."""
        ...


@dataclass(frozen=True)
class Layout:
    """Where a run differs from the reference: ranks, and the flags that say so."""

    name: str
    ranks: int = 1
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankShare:
    """What one rank of a finished run held and sent.

    Attributes:
        elements: stored parameter elements, padding included.
        gemm_flops: counted by torch over the whole run; 0 when not asked for.
        collectives: (op, group, elements) in order; empty when not asked for.
        weights: (name, offset of the held region, sha256 of its bits) after the last step.
        closest_choice: smallest gap that decided between experts (`verify/choices.py`);
            infinite when not watched.
    """

    elements: int
    gemm_flops: int
    collectives: tuple[tuple[str, str, int], ...]
    weights: tuple[tuple[str, tuple[int, ...], str], ...]
    closest_choice: float = math.inf


def run_layout(
    pool: Pool,
    directory: Path,
    flags: Sequence[str],
    layout: Layout,
    *,
    fault: str | None = None,
    measure: bool = False,
    dump: bool = True,
    watch: bool = False,
    timeout_s: float = 120.0,
) -> tuple[RunRecord, list[RankShare]]:
    """Train with `flags` plus the layout's.

    Args:
        pool: at least `layout.ranks` ranks.
        directory: of this run; must not exist.
        flags: of the program, without layout and dump.
        layout: ranks and their flags.
        fault: "module:function" of a context manager that plants a bug on every rank.
        measure: count FLOPs and collectives (slower).
        dump: write every step's tensors, which takes collectives of its own.
        watch: measure how close the choices of routers are.
        timeout_s: of the run.

    Returns:
        The record, and each rank's share.
    """
    directory.mkdir(parents=True)
    argv = [
        *flags, *layout.flags, "--device", "cpu", "--log-interval", "1000000",
        "--metrics-jsonl", str(directory / "metrics.jsonl"),
    ]  # fmt: skip
    if dump:
        argv += ["--debug-dump", str(directory / "dump")]
        argv += ["--debug-dump-weights", "--debug-dump-activations"]
    shares = pool.run(
        layout.ranks,
        "megatron_lite.verify.session:run_rank",
        timeout_s=timeout_s,
        argv=argv,
        fault=fault,
        measure=measure,
        watch=watch,
    )
    return RunRecord(directory), shares


def run_rank(
    argv: Sequence[str], fault: str | None, measure: bool, watch: bool, rank: int, world_size: int
) -> RankShare:
    """One rank's part of `run_layout`; runs inside the pool."""
    from megatron_lite.config.flags import parse_config
    from megatron_lite.config.rules import check_config
    from megatron_lite.mesh.launch import RunStatus, WorldInfo
    from megatron_lite.mesh.recorder import Recorder
    from megatron_lite.train.build import build_run
    from megatron_lite.train.loop import train
    from megatron_lite.verify.choices import watched_choices
    from megatron_lite.verify.flop_counter import build_flop_counter

    config = parse_config(argv, os.environ)
    check_config(config, world_size)
    info = WorldInfo(rank, world_size, rank, world_size, launcher="pool")
    watching: AbstractContextManager[list[float]] = nullcontext([])
    if watch:
        watching = watched_choices()
    recorder = Recorder() if measure else None
    counter = build_flop_counter() if measure else None
    with (
        contextlib.redirect_stdout(io.StringIO()),
        _planted(fault),
        watching as gaps,
        build_run(config, info, RunStatus(), recorder) as (parts, state),
    ):
        if recorder is not None:
            recorder.clear()
        with counter or nullcontext():
            train(parts, state, RunStatus())
        elements = sum(param.numel() for param in parts.stage.parameters())
        weights = tuple(
            (piece.spec.name, piece.box.offset, _digest(piece.tensor))
            for piece in parts.optimizer.weight_pieces()
        )
    sent = () if recorder is None else tuple((r.op, r.group, r.elements) for r in recorder.records)
    flops = counter.get_total_flops() if counter else 0
    return RankShare(elements, flops, sent, weights, min(gaps, default=math.inf))


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().cpu().numpy().tobytes()).hexdigest()


def _planted(fault: str | None) -> AbstractContextManager[Any]:
    if fault is None:
        return nullcontext()
    module, _, name = fault.partition(":")
    manager: AbstractContextManager[Any] = getattr(import_module(module), name)()
    return manager
