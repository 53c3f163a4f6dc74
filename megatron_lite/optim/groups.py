"""Optimizer groups: which parameters share a learning rate and a weight decay.

The spec says whether a parameter decays (Megatron's rule: vectors and biases do not).
Flat buffers keep the members of a group side by side (shard/flat.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.spec.physical import PhysicalParam


@dataclass(frozen=True)
class ParamGroup:
    """Multipliers of the scheduled rates for the parameters of one group."""

    name: str
    lr_mult: float = 1.0
    wd_mult: float = 1.0


DECAYED = ParamGroup("decayed")
NOT_DECAYED = ParamGroup("not_decayed", wd_mult=0.0)


def param_group(physical: PhysicalParam) -> ParamGroup:
    """The group of a stored parameter; its logical members must agree."""
    decays = {view.spec.decay for view in physical.views}
    if len(decays) != 1:
        raise ValueError(f"{physical.name} stores parameters with and without weight decay")
    return DECAYED if decays.pop() else NOT_DECAYED
