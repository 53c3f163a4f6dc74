"""Every layout of the table goes on from the checkpoints of others: bits, and the next step.

`RESHARD` of `layouts.py` is the matrix, which a later axis joins. In bf16 there
are masters beside the weights; fp64 shows in the step that follows what rounding would hide.
Unsharded layouts meet all of each other. Of the pairs with a sharded one it is a third, so
that each layout reads many others' checkpoints and is read by many.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_lite.verify.classes import MATCH32_ADAM, MATCH64, Tolerances
from tests.cases.hops import PRECISION, hash_of, train_and_save
from tests.cases.layouts import LAYOUTS, REFERENCE, RESHARD, axis_sizes, with_axes
from tests.cases.next_steps import NextStep, Stored, loads, next_steps
from tests.pool import RankPool

# A layout meets all checkpoints in one test: seconds, minutes where the cores are shared.
pytestmark = pytest.mark.timeout(480)
FIVE = (REFERENCE, "tp2", "tp4-sp", "dp2", "tp2-sp-dp2")
SHARDED = frozenset(with_axes({"zero"}))


@dataclass(frozen=True)
class Matrix:
    """Checkpoints after two steps, one per layout."""

    layouts: tuple[str, ...]
    roots: tuple[Path, ...]
    stored: tuple[Stored, ...]
    hashes: tuple[str, ...]
    made: dict[str, list[NextStep]] = field(default_factory=dict)

    def order(self, target: str) -> list[int]:
        """The checkpoints it meets; its own first, so that each layout saves another one's."""
        first = self.layouts.index(target)
        order = [(first + k) % len(self.layouts) for k in range(len(self.layouts))]
        return [index for index in order if meets(self.layouts[index], target)]

    def steps(self, pool: RankPool, precision: str) -> list[NextStep]:
        """Where one process goes from each."""
        if precision not in self.made:
            save = self.roots[0].with_name("next")
            self.made[precision] = next_steps(
                pool, self.roots, save, REFERENCE, *PRECISION[precision]
            )
        return self.made[precision]


def meets(source: str, target: str) -> bool:
    """Whether the second goes on from the first's checkpoint."""
    pair = (source, target)
    if REFERENCE in pair or not SHARDED.intersection(pair):
        return True
    return sum(map(RESHARD.index, pair)) % 3 == 0


Known = Callable[[str, tuple[str, ...]], Matrix]


@pytest.fixture(scope="module")
def matrix(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Known:
    """`matrix(precision, layouts)`, made once."""
    made: dict[str, Matrix] = {}

    def find(precision: str, layouts: tuple[str, ...]) -> Matrix:
        if precision not in made:
            more, root = PRECISION[precision], tmp_path_factory.mktemp(precision)
            roots = tuple(root / layout for layout in layouts)
            hashes = tuple(
                train_and_save(rank_pool, place, layout, 2, *more)
                for place, layout in zip(roots, layouts, strict=True)
            )
            stored = tuple(Stored(place) for place in roots)
            made[precision] = Matrix(layouts, roots, stored, hashes)
        return made[precision]

    return find


@pytest.mark.parametrize("target", RESHARD)
def test_row_45_every_layout_loads_the_bits_of_other_layouts_checkpoints(
    rank_pool: RankPool, tmp_path: Path, matrix: Known, target: str
) -> None:
    known = matrix("bf16", RESHARD)
    kinds = {name.split("/")[1] for name in known.stored[0].tensors if "/" in name}
    assert kinds == {"exp_avg", "exp_avg_sq", "master"}
    order = known.order(target)
    roots = [known.roots[i] for i in order]
    found = loads(rank_pool, roots, tmp_path / "save", target, *PRECISION["bf16"])
    for i, held in zip(order, found, strict=True):
        assert known.stored[i].wrong(held) == [], known.layouts[i]
    assert hash_of(tmp_path / "save") == known.hashes[order[-1]]


CASES = [
    *(("fp64", RESHARD, target, MATCH64) for target in RESHARD),
    *(("fp32", FIVE, target, MATCH32_ADAM) for target in FIVE),
]


@pytest.mark.parametrize(
    ("precision", "layouts", "target", "limits"),
    CASES,
    ids=[f"{precision}-into-{target}" for precision, _, target, _ in CASES],
)
def test_row_45_every_layout_goes_on_from_other_layouts_checkpoints(
    rank_pool: RankPool,
    tmp_path: Path,
    matrix: Known,
    precision: str,
    layouts: tuple[str, ...],
    target: str,
    limits: Tolerances,
) -> None:
    known = matrix(precision, layouts)
    alone = known.steps(rank_pool, precision)
    order = known.order(target)
    roots = [known.roots[i] for i in order]
    found = next_steps(rank_pool, roots, tmp_path / "save", target, *PRECISION[precision])
    for i, step in zip(order, found, strict=True):
        assert known.stored[i].wrong(step.loaded) == [], layouts[i]
        assert step.differences(alone[i], limits) == [], layouts[i]
    assert hash_of(tmp_path / "save") == known.hashes[order[-1]]


def test_the_layouts_of_the_matrix_reach_the_same_step(rank_pool: RankPool, matrix: Known) -> None:
    known = matrix("fp64", RESHARD)
    alone = known.steps(rank_pool, "fp64")
    for layout, step in zip(known.layouts, alone, strict=True):
        assert step.differences(alone[0], MATCH64) == [], layout


def test_the_matrix_has_a_layout_of_every_axis() -> None:
    def cut(names: tuple[str, ...]) -> set[str]:
        return {a for name in names for a, size in axis_sizes(LAYOUTS[name]).items() if size > 1}

    assert cut(RESHARD) >= {"tp", "sp", "dp", "pp", "vpp", "zero", "offload"}
    assert set(FIVE) < set(RESHARD)


def test_every_layout_reads_others_and_is_read_by_others() -> None:
    plain = set(RESHARD) - SHARDED
    for one in RESHARD:
        read = {other for other in RESHARD if meets(other, one)}
        assert read == {other for other in RESHARD if meets(one, other)}
        assert len(read & SHARDED) >= 2 and len(read & plain) >= 4, one
        assert one in SHARDED or plain <= read
