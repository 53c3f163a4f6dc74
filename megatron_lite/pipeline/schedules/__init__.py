"""Schedule generators by name: pure functions that return a `Schedule`.

Adding a schedule is one file and one line here; the verifier, the simulator and the
runner need nothing new.
"""

from collections.abc import Callable, Mapping

from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.schedules.single import single

# name -> (pipeline ranks, stages per rank, microbatches) -> table
SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = {"single": single}
