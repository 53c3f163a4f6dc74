"""What the rules look at: a config, a world size, and the numbers they share.

Sizes that are themselves illegal (below 1) count as 1 here: their own rule reports them
and the others stay computable. `tp x cp x pp x dp` is the world where that is legal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.schema import Config


@dataclass(frozen=True)
class Facts:
    """A config under judgement, in a world of `world_size` ranks."""

    config: Config
    world_size: int

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return max(1, self.config.tensor_model_parallel_size)

    @property
    def pp(self) -> int:
        """Pipeline parallel size."""
        return max(1, self.config.pipeline_model_parallel_size)

    @property
    def cp(self) -> int:
        """Context parallel size."""
        return max(1, self.config.context_parallel_size)

    @property
    def ep(self) -> int:
        """Expert parallel size."""
        return max(1, self.config.expert_model_parallel_size)

    @property
    def etp(self) -> int:
        """Tensor parallel size of the experts."""
        return max(1, self.config.expert_tensor_parallel_size or self.tp)

    @property
    def model_ranks(self) -> int:
        """Ranks of one replica of the dense model."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data parallel size, or 0 where the world does not divide."""
        return 0 if self.world_size % self.model_ranks else self.world_size // self.model_ranks

    @property
    def least_dp(self) -> int:
        """Data parallel size, 1 where the world does not divide: batches must fit any."""
        return max(self.dp, 1)

    @property
    def batch_unit(self) -> int:
        """Samples of one micro-step over all ranks; 0 where unknown."""
        mbs = self.config.micro_batch_size
        return mbs * self.least_dp if mbs is not None and mbs > 0 else 0

    def has(self, *names: str) -> bool:
        """Say whether all of these fields are set to positive numbers."""
        values = [getattr(self.config, name) for name in names]
        return all(isinstance(value, int | float) and value > 0 for value in values)

    def number(self, name: str) -> int:
        """Return a field that `has` confirmed."""
        value: Any = getattr(self.config, name)
        return int(value)


@dataclass(frozen=True)
class Rule:
    """One row: `broken` says whether the config violates it, `message` tells how."""

    id: str
    broken: Callable[[Facts], bool]
    message: Callable[[Facts], str]
