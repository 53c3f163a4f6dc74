"""Certify a layout: the same numbers as one process, and if not, why not.

The reference runs in one process with everything switched off that the case has as an
axis. When the full layout differs, layouts with one axis at a time are run, then pairs and
so on: the smallest that differ name the axis, their first difference the phase and tensor.
A reference whose routers choose by less than the class allows to differ is none: it runs
again with another seed, so that no verdict is luck.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.config.flags import parse_config
from megatron_lite.config.plan import build_plan
from megatron_lite.errors import UserError
from megatron_lite.spec.model import model_spec
from megatron_lite.verify.axes import Axis, Case, independent_names, subsets_by_depth
from megatron_lite.verify.classes import Tolerances
from megatron_lite.verify.compare import Difference, compare_runs
from megatron_lite.verify.dumps import RunRecord
from megatron_lite.verify.pool import RankError
from megatron_lite.verify.session import Pool, RankShare, run_layout
from megatron_lite.verify.share import find_share_faults

SEEDS = 60  # that are tried


@dataclass(frozen=True)
class Cause:
    """A smallest set of axes that makes the numbers differ.

    Attributes:
        axes: names; one that only serves another is left out ("sp" stands for tp and sp).
        first: the difference next to the cause.
        others: how many more tensors and figures differ.
    """

    axes: tuple[str, ...]
    first: Difference
    others: int

    def __str__(self) -> str:
        """One line for a person."""
        more = f" (and {self.others} more)" if self.others else ""
        return f"axis {' x '.join(self.axes)}: {self.first}{more}"


@dataclass(frozen=True)
class Verdict:
    """What a certification found.

    Attributes:
        layout: name of the full layout.
        ranks: of the full layout.
        causes: empty when the numbers are equal.
        share_faults: sentences; empty when every rank had exactly its share.
    """

    layout: str
    ranks: int
    causes: tuple[Cause, ...]
    share_faults: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether the layout is certified."""
        return not self.causes and not self.share_faults


class Certifier:
    """Runs layouts of one case and compares them with its reference, which runs once."""

    def __init__(
        self,
        pool: Pool,
        directory: Path,
        case: Case,
        limits: Tolerances,
        *,
        say: Callable[[str], None] = lambda line: None,
        timeout_s: float = 120.0,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            pool: ranks.
            directory: for the runs; created.
            case: flags, batch and axes.
            limits: the equality class.
            say: told of every run.
            timeout_s: of each run.
        """
        self.pool = pool
        self.directory = directory
        self.case = case
        self.limits = limits
        self._say = say
        self._timeout_s = timeout_s
        self._reference: RunRecord | None = None
        self._runs = 0
        config = parse_config([*case.flags, *case.layout().flags], {})
        self._seed = config.seed
        plan = build_plan(config, 1, config.vocab_size or 1)
        self.order = [spec.name for spec in model_spec(plan.model, plan.parallel)]

    @property
    def reference(self) -> RunRecord:
        """The reference run; clips at half of its first gradient norm.

        Raises:
            UserError: whatever the seed, some choice of a router hangs on rounding.
        """
        if self._reference is None:
            self._reference = self._find_reference()
        return self._reference

    def _find_reference(self) -> RunRecord:
        """Run the reference with the case's seed, or the next one that decides clearly."""
        given, closest = self.case, 0.0
        # The difference of two scores may be off by twice what an activation may.
        needed = 2 * self.limits.activation
        for seed in range(self._seed, self._seed + SEEDS):
            flags = given.flags if seed == self._seed else (*given.flags, "--seed", str(seed))
            self.case = dataclasses.replace(given, flags=flags)
            first, (share,) = self._run((), ("--train-iters", "1", "--clip-grad", "0"), watch=True)
            if share.closest_choice >= needed:
                clip = first.train_rows[0]["grad_norm"] / 2
                clipped = (*flags, "--clip-grad", repr(clip))
                self.case = dataclasses.replace(given, flags=clipped)
                record, (share,) = self._run((), watch=True)
                if share.closest_choice >= needed:
                    return record
            closest = max(closest, share.closest_choice)
            self._say(
                f"seed {seed}: a router chooses by {share.closest_choice:.2g} of its scores' "
                f"range, less than {needed:.2g}; another seed"
            )
        raise UserError(
            f"no --seed from {self._seed} to {seed} makes a reference whose routers all choose by "
            f"{needed:.2g} of their scores' range, below which rounding may choose otherwise (at "
            f"best by {closest:.2g}): fewer steps, or fp64, which needs less"
            f"{_why_equal(given.flags)}"
        )

    def compare(
        self, axes: Sequence[Axis], *, fault: str | None = None, measure: bool = False
    ) -> tuple[list[Difference], list[RankShare]]:
        """Run one layout and list its differences, the one next to the cause first."""
        reference = self.reference
        try:
            record, shares = self._run(axes, fault=fault, measure=measure)
        except RankError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            failed = Difference("run", f"the run failed: {lines[-1]}", 0, math.inf, 0.0)
            return [failed], []
        found = compare_runs(reference, record, self.limits, self.order)
        return found + find_split_replicas(shares, record.steps), shares

    def certify(
        self,
        axes: Sequence[Axis] | None = None,
        *,
        fault: str | None = None,
        measure: bool = True,
    ) -> Verdict:
        """Run the layout of all axes; where it differs, find those that cause it.

        Args:
            axes: of the layout; None: all of the case.
            fault: planted bug, for tests of this very thing.
            measure: also demand that every rank holds and computes its share.
        """
        axes = self.case.axes if axes is None else tuple(axes)
        layout = self.case.layout(axes)
        differences, shares = self.compare(axes, fault=fault, measure=measure)
        faults = self.share_faults(axes, shares)
        causes = self._find_causes(axes, differences, fault) if differences else ()
        return Verdict(layout.name, layout.ranks, causes, faults)

    def run(
        self, axes: Sequence[Axis], *, measure: bool = False, dump: bool = True
    ) -> tuple[RunRecord, list[RankShare]]:
        """Run one layout, clipping as the reference does; see `session.run_layout`."""
        _ = self.reference
        return self._run(axes, measure=measure, dump=dump)

    def share_faults(self, axes: Sequence[Axis], shares: Sequence[RankShare]) -> tuple[str, ...]:
        """Where a rank did not hold or compute its share; FLOPs only if they were counted."""
        layout = self.case.layout(axes)
        return find_share_faults((*self.case.flags, *layout.flags), layout.ranks, shares)

    def _find_causes(
        self, axes: Sequence[Axis], differences: list[Difference], fault: str | None
    ) -> tuple[Cause, ...]:
        """The smallest sets of `axes` that differ; `differences` are those of all of them."""
        causes: list[Cause] = []
        for candidates in subsets_by_depth(axes):
            guilty: list[set[str]] = []
            for chosen in candidates:
                names = {axis.name for axis in chosen}
                if any(known <= names for known in guilty):
                    continue
                whole = len(chosen) == len(axes)
                found = differences if whole else self.compare(chosen, fault=fault)[0]
                if found:
                    guilty.append(names)
                    causes.append(Cause(independent_names(chosen), found[0], len(found) - 1))
            if causes:
                break
        return tuple(causes)

    def _run(
        self,
        axes: Sequence[Axis],
        extra: tuple[str, ...] = (),
        fault: str | None = None,
        measure: bool = False,
        dump: bool = True,
        watch: bool = False,
    ) -> tuple[RunRecord, list[RankShare]]:
        layout = self.case.layout(axes)
        self._runs += 1
        self._say(f"run {self._runs}: {layout.name}, {layout.ranks} rank(s)")
        return run_layout(
            self.pool,
            self.directory / f"{self._runs:02d}-{layout.name}",
            self.case.flags,
            dataclasses.replace(layout, flags=(*layout.flags, *extra)),
            fault=fault,
            measure=measure,
            dump=dump,
            watch=watch,
            timeout_s=self._timeout_s,
        )


def _why_equal(flags: Sequence[str]) -> str:
    """Name the usual cause of scores that are equal whatever the seed; '' if it is not there."""
    config = parse_config(flags, {})
    if config.moe_expert_capacity_factor is None or config.moe_token_drop_policy != "probs":
        return ""
    return (
        "; equal tokens at the start of a sample tie where an expert is full: leave out "
        "--moe-expert-capacity-factor, or verify with --moe-token-drop-policy position"
    )


def find_split_replicas(shares: Sequence[RankShare], step: int) -> list[Difference]:
    """Regions of weights of which two ranks hold different bits."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    found = []
    for rank, share in enumerate(shares):
        for name, offset, digest in share.weights:
            owner, wanted = first.setdefault((name, offset), (rank, digest))
            if digest != wanted:
                told = f"{name} on ranks {owner} and {rank}"
                found.append(Difference("replica", told, step, math.inf, 0.0))
    return found
