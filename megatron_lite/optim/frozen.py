"""Frozen parameters: no gradient, no state, no decay; still weights of the model.

They are in no bucket: nothing is reduced, gathered or updated, so every data rank holds them
whole whatever is sharded. They are drawn, loaded, saved, dumped and hashed like the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megatron_lite.optim.groups import is_frozen
from megatron_lite.optim.segments import RankPlace
from megatron_lite.shard.pieces import StatePiece
from megatron_lite.spec.physical import PhysicalParam, logical_piece


@dataclass(frozen=True, eq=False)
class FrozenParameters:
    """The frozen parameters of one rank."""

    physicals: tuple[PhysicalParam, ...]
    params: Mapping[str, nn.Parameter]
    place: RankPlace

    def state_pieces(self) -> Iterator[StatePiece]:
        """Logical weights, kind "param", writable."""
        for physical in self.physicals:
            data = self.params[physical.name].data
            for view in physical.views:
                box, owned, copy = self.place.of(view.spec)
                if box.elements:
                    tensor = logical_piece(data, view, box)
                    yield StatePiece("param", view.spec, tensor, box, owned, copy)


def freeze_parameters(
    physicals: Sequence[PhysicalParam],
    params: Mapping[str, nn.Parameter],
    frozen: frozenset[str],
    place: RankPlace,
) -> FrozenParameters:
    """Take parameters out of training and give them memory of their own.

    Args:
        physicals: stored parameters of this rank.
        params: by physical name.
        frozen: logical names.
        place: of this rank.

    Raises:
        UserError: only some of the parameters that are stored as one are frozen.
    """
    chosen = tuple(physical for physical in physicals if is_frozen(physical, frozen))
    for physical in chosen:
        param = params[physical.name]
        param.requires_grad_(False)
        param.data = param.data.contiguous()  # it had no memory of its own
    return FrozenParameters(chosen, params, place)
