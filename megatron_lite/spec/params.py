"""The logical parameters of a model: the one table everything else derives from.

A `ParamSpec` says of a parameter its logical (unsharded, unpadded, unfused) shape,
how it is cut over an axis, where it is used, over which axes its gradient is partial, its
initial law and its weight decay. Initial values, gradient reductions, the norm, ownership,
checkpoints, resharding, conversion and the memory ledger read this table; no code path
knows a parameter by its name. Names are Megatron-core's with unfused sub-blocks and stay
for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class InitLaw:
    """How the initial values are drawn; `std` only counts for "normal"."""

    kind: str  # "normal" | "zeros" | "ones"
    std: float = 0.0


@dataclass(frozen=True)
class Cut:
    """A dim that is cut into equal pieces over an axis.

    Attributes:
        dim: which dim.
        axis: the axis of the parameter's grid.
        parts: distinct pieces. Fewer than the axis is long: each piece is held by axis/parts
            consecutive ranks (KV heads fewer than TP).
    """

    dim: int
    axis: str
    parts: int


@dataclass(frozen=True)
class ParamSpec:
    """One logical parameter.

    Attributes:
        name: logical name; {i} in layer names is the global layer index.
        shape: logical shape, without vocabulary padding.
        grid: "dense" or "expert", the rank grid its axes belong to.
        cuts: what every rank holds a piece of; none where it holds all. At most one over
            the grid's tensor axis and one over "ep".
        padded: length of dim 0 including padding rows (vocabulary), else None.
        partial_axes: groups over which the gradient is a partial sum, besides the data and
            context axes: "tp" (each rank sees part of the tokens or heads) or
            "kv_replica" (the ranks that share KV heads see different queries), "tied_ends"
            (one rank uses a tied embedding as embedding, the other as output layer).
        uses: forward use-sites; each writes one gradient contribution per microbatch.
        deferrable: whether its weight gradient can be computed apart from the input's.
        decay: whether weight decay applies.
        init: law of the initial values.
        trained: a gradient changes it. Else it is state that a rule of the step changes, held
            in the accumulation dtype (the router's balancing bias).
        matrix: shape of the matrix that a matrix optimizer acts on, None for vectors. Of a
            stack [n, rows, columns] it acts on each of n.
        holders: pipeline ranks that hold copies, where several do; else empty.
    """

    name: str
    shape: tuple[int, ...]
    grid: str = "dense"
    cuts: tuple[Cut, ...] = ()
    padded: int | None = None
    partial_axes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    deferrable: bool = False
    decay: bool = True
    init: InitLaw = InitLaw("zeros")
    matrix: tuple[int, int] | None = None
    holders: tuple[int, ...] = ()
    trained: bool = True

    @property
    def elements(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def is_stack(self) -> bool:
        """Whether dim 0 counts experts, each with a parameter of its own."""
        return any(cut.axis == "ep" for cut in self.cuts)

    @property
    def tensor_cut(self) -> Cut | None:
        """The cut that divides its matrices: over "tp", of experts over "etp"."""
        return next((cut for cut in self.cuts if cut.axis in ("tp", "etp")), None)

    @property
    def tensor_parts(self) -> int:
        """Distinct pieces over the tensor axis."""
        return 1 if self.tensor_cut is None else self.tensor_cut.parts
