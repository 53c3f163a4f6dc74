"""What a run remembers between steps, apart from tensors: a closed list of counters.

The cursor is consumed samples: it advances with every attempted step, whatever became of
the update; the schedules' position (optim/schedule.py) only with a successful update. Together
with the tensors of a checkpoint these numbers decide the rest of a run; there is no random
state, since randomness is a function of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lite.errors import DamagedError


@dataclass
class TrainState:
    """Counters of a run; all start at 0.

    Attributes:
        iteration: attempted steps.
        consumed_samples: training samples that attempted steps took.
        consumed_valid_samples: validation samples taken.
        updates: successful optimizer updates, Adam's step count.
        skipped_iterations: attempted steps without an update.
        nan_iterations: attempted steps with non-finite losses or gradients.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    updates: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counters for a checkpoint's JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> TrainState:
        """Read counters from a checkpoint.

        Raises:
            DamagedError: a counter is missing, unknown, negative or not an integer.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if set(stored) != names:
            odd = sorted(set(stored) ^ names)
            raise DamagedError(f"the checkpoint's counters differ from this program's: {odd}")
        for name, value in stored.items():
            if type(value) is not int or value < 0:
                raise DamagedError(f"the checkpoint's counter {name} is {value!r}")
        return cls(**stored)
