"""The layouts in which a reported fault must be impossible; a later axis adds rows here.

Every case that concerns an axis is run from this one table, so that a new axis meets all
old faults. The first row is the reference.
"""

from collections.abc import Mapping

from megatron_lite.verify.session import Layout

_SP = "--sequence-parallel"


def _tensor(size: int, *more: str) -> tuple[str, ...]:
    return ("--tensor-model-parallel-size", str(size), *more)


REFERENCE = "1"
LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(REFERENCE),
        Layout("tp2", 2, _tensor(2)),
        Layout("tp4", 4, _tensor(4)),
        Layout("tp2-sp", 2, _tensor(2, _SP)),
        Layout("tp4-sp", 4, _tensor(4, _SP)),
        Layout("dp2", 2),
        Layout("tp2-sp-dp2", 4, _tensor(2, _SP)),
    )
}
PARALLEL = tuple(name for name in LAYOUTS if name != REFERENCE)
# One layout per kind of cut, where a case is about something else.
FEW = (REFERENCE, "tp2", "dp2", "tp2-sp-dp2")


def data_ranks(name: str) -> int:
    """Data-parallel ranks of a layout of the table."""
    layout = LAYOUTS[name]
    words = layout.flags
    tensor = int(words[words.index("--tensor-model-parallel-size") + 1]) if words else 1
    return layout.ranks // tensor
