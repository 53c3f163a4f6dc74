"""The JSON object of a checkpoint: a closed list of everything that changes the next step.

Beside the tensors, a run is a function of this object: what is not in it cannot matter, and
a part that this program does not know is refused. `facts` holds, by configuration field,
what must not change unnoticed (`FACTS` at least: among them tokenizer fingerprint, true
vocabulary, rotary layout, corpus and global batch). A converted checkpoint has weights,
configuration and facts of the architecture only: a run starts from it at step 0 with a
fresh optimizer, its other parts are empty. Torch-free.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite import __version__
from megatron_lite.checkpoint.strict_json import encode_json, plain_json
from megatron_lite.config.architecture import ARCHITECTURE_FIELDS, architecture_facts
from megatron_lite.config.plan import ModelShape, ParallelShape
from megatron_lite.errors import DamagedError, UserError

COUNTERS = (
    "iteration",
    "consumed_samples",
    "consumed_valid_samples",
    "updates",
    "skipped_iterations",
    "nan_iterations",
)
FACTS = (
    *ARCHITECTURE_FIELDS,
    "seq_length",
    "hidden_dropout",
    "attention_dropout",
    "seed",
    "global_batch_size",
    "optimizer",
    "legacy_loss_normalization",
    "eod_mask_loss",
    "tokenizer_type",
    "split",
    "data_path",
)
# Part -> its keys; None where the part has an owner of its own who checks it on loading.
PARTS: Mapping[str, tuple[str, ...] | None] = {
    "arithmetic": ("compute", "device", "machine", "master", "native", "threads"),
    "batch": ("dp_size", "micro_batch_size", "ramp"),
    "canary": None,  # train/canary.py; null without --verify-resume
    "code": ("commit", "dirty"),
    "config": None,
    "config_sha256": None,
    "counters": COUNTERS,
    "cursor": ("blend", "corpus_sha256", "evaluation"),
    "facts": FACTS,
    "fp8": None,  # amax histories and scales; null without fp8
    "layout": tuple(field.name for field in dataclasses.fields(ParallelShape)),
    "loss": ("normalization",),
    "origin": None,
    "randomness": ("scheme", "seed"),
    "scaler": None,  # of the loss, with fp16; null without
    "schedule": None,  # optim/schedule.py
    "versions": ("megatron_lite", "numpy", "python", "torch"),
}
STATE_KEYS = tuple(PARTS)
RUN_ORIGIN: Mapping[str, str] = {"kind": "run"}
# Generator and version of the scheme that makes initial weights, masks and noise.
RANDOMNESS = "philox4x32-10/1"
OPTIONAL = ("canary", "fp8", "scaler")


def hash_json(value: Any) -> str:
    """Return the sha256 of the canonical JSON of a value."""
    return hashlib.sha256(encode_json(plain_json(value))).hexdigest()


def build_state(**parts: Any) -> dict[str, Any]:
    """Return the state of a run from its parts, JSON-able.

    Raises:
        ValueError: a part or a key of a part is missing or not in the list: our defect.
    """
    given: dict[str, Any] = dict.fromkeys(OPTIONAL) | parts
    given |= {"origin": dict(RUN_ORIGIN), "config_sha256": hash_json(given["config"])}
    state: dict[str, Any] = plain_json(given)
    odd = _odd_keys(state)
    if odd:
        raise ValueError(f"not the closed list of a checkpoint's state: {', '.join(odd)}")
    return state


def check_state(state: Mapping[str, Any], directory: Path) -> None:
    """Raise unless the state of a checkpoint has exactly the parts and keys of the list.

    Raises:
        UserError: another version of this program wrote it; nothing is damaged, and an older
            checkpoint would not be better.
        DamagedError: a value that no version writes.
    """
    odd = sorted(set(state) ^ set(STATE_KEYS))
    if odd:
        raise _other_version(state, directory, odd)
    origin = state["origin"]
    if not isinstance(origin, dict) or origin.get("kind") not in ("run", "converted"):
        raise DamagedError(f"{directory}: its origin is {origin!r}, neither a run nor converted")
    if is_converted(state):
        return
    odd = _odd_keys(state)
    if odd:
        raise _other_version(state, directory, odd)
    if state["config_sha256"] != hash_json(state["config"]):
        raise DamagedError(f"{directory}: its configuration does not match its hash")


def _other_version(state: Mapping[str, Any], directory: Path, odd: list[str]) -> UserError:
    versions = state.get("versions")
    writer = versions.get("megatron_lite") if isinstance(versions, Mapping) else None
    return UserError(
        f"{directory}: written by megatron_lite {writer or 'of an unknown version'}, this is "
        f"{__version__}: its state and this program's differ in {', '.join(odd)}"
    )


def _odd_keys(state: Mapping[str, Any]) -> list[str]:
    """Parts and keys, as PART.KEY, that are missing or not in the list."""
    odd = sorted(set(state) ^ set(PARTS))
    for part, keys in PARTS.items():
        if keys is None or part not in state:
            continue
        found = state[part]
        odd += [part] if not isinstance(found, Mapping) else []
        if isinstance(found, Mapping):
            odd += [f"{part}.{key}" for key in sorted(set(found) ^ set(keys))]
    return odd


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
    empty: dict[str, Any] = {key: {} for key in STATE_KEYS} | dict.fromkeys(OPTIONAL)
    return empty | {
        "config": dict(config),
        "config_sha256": hash_json(config),
        "facts": architecture_facts(model),
        "origin": {"kind": "converted", "source": source},
        "versions": {"megatron_lite": __version__},
    }
