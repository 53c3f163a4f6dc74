"""The JSON object of a checkpoint: a closed list, for runs and for conversions.

`config` every flag with its value; `facts` what must not change unnoticed, by flag;
`counters` and `schedule` progress; `layout` who wrote it; `versions` of code and
libraries; `origin` a run, or a conversion from another format. A converted checkpoint has
weights and facts of the architecture only: a run starts from it at step 0, with a fresh
optimizer. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite import __version__
from megatron_lite.config.architecture import architecture_facts
from megatron_lite.config.plan import ModelShape
from megatron_lite.errors import DamagedError

STATE_KEYS = ("config", "counters", "facts", "layout", "origin", "schedule", "versions")
RUN_ORIGIN: Mapping[str, str] = {"kind": "run"}


def check_state(state: Mapping[str, Any], directory: Path) -> None:
    """Raise unless the state of a checkpoint has exactly the parts of the list."""
    if set(state) != set(STATE_KEYS):
        odd = sorted(set(state) ^ set(STATE_KEYS))
        raise DamagedError(f"{directory}: its state and this program's differ in {odd}")


def is_converted(state: Mapping[str, Any]) -> bool:
    """Whether the checkpoint comes from another format: weights without a run."""
    return bool(state["origin"]["kind"] == "converted")


def converted_state(config: Mapping[str, Any], model: ModelShape, source: str) -> dict[str, Any]:
    """Return the state of a converted checkpoint.

    Args:
        config: resolved configuration values that build `model`.
        model: the architecture.
        source: what was converted, for people, such as "hf LlamaForCausalLM".
    """
    empty: dict[str, Any] = {key: {} for key in STATE_KEYS}
    return empty | {
        "config": dict(config),
        "facts": architecture_facts(model),
        "origin": {"kind": "converted", "source": source},
        "versions": {"megatron_lite": __version__},
    }
