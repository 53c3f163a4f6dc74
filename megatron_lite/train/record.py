"""What a checkpoint says about its run: facts, arithmetic, code, cursor, and the whole state.

`checkpoint/state.py` holds the closed list; here it is filled from a built run. The same
object describes the run that saves and the one that loads, so the two are compared part by
part (`checkpoint/resume.py`). Equal on all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

import megatron_lite
from megatron_lite.checkpoint.state import RANDOMNESS, build_state, hash_json
from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.config.architecture import architecture_facts
from megatron_lite.config.plan import Plan
from megatron_lite.config.resolve import resolved_values
from megatron_lite.config.schema import Config
from megatron_lite.data.build import Datasets, TrainableDataset
from megatron_lite.data.gpt_dataset import BlendedDataset
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.errors import UserError
from megatron_lite.native.load import load_native
from megatron_lite.train.parts import Core
from megatron_lite.train.state import TrainState

# What identifies a data file, of all that `Datasets.fingerprint` tells.
IDENTITY = ("idx_sha256", "bin_bytes", "bin_sampled_sha256", "mock", "vocab_size", "eod", "weight")
GIT_SECONDS = 10.0


def describe_facts(
    config: Config, plan: Plan, datasets: Datasets, tokenizer: Tokenizer
) -> dict[str, Any]:
    """What must not change unnoticed between a checkpoint and its continuation.

    Keys are the configuration fields that decide a value, the words of
    `--allow-resume-change`.
    """
    model, data = plan.model, datasets.fingerprint()
    # Checked as fields of their own, or evaluation data, which changes no step.
    elsewhere = ("seed", "sequence_length", "split", "valid", "test")
    facts = {
        **architecture_facts(model),
        "seq_length": model.seq_length,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "seed": config.seed,
        "global_batch_size": plan.batch.ramp,
        "optimizer": config.optimizer,
        "legacy_loss_normalization": config.legacy_loss_normalization,
        "eod_mask_loss": config.eod_mask_loss,
        "tokenizer_type": tokenizer.fingerprint(),
        "split": data["split"],
        "data_path": {key: data[key] for key in data if key not in elsewhere},
    }
    plain: dict[str, Any] = plain_json(facts)
    return plain


@functools.cache
def describe_code() -> Mapping[str, Any]:
    """Commit of the source tree and whether it was changed; nulls where there is no git."""
    root = Path(megatron_lite.__file__).parent.parent
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}

    def git(*words: str) -> str:
        # Without the lock: other processes of the user may be working in this tree.
        environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        command = ["git", "-C", str(root), *words]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "megatron_lite")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def describe_versions() -> dict[str, str]:
    """Versions of what computes."""
    return {
        "megatron_lite": megatron_lite.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def describe_arithmetic(core: Core) -> dict[str, Any]:
    """What decides the bits of a result, apart from the layout."""
    precision, device = core.plan.precision, core.device
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = torch.backends.cpu.get_cpu_capability()
    return {
        "compute": precision.compute,
        "master": precision.master,
        "device": device.type,
        "machine": machine,
        "native": native_version() if core.native else None,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }


@functools.cache
def native_version() -> str | None:
    """The key of the native library's sources and toolchain; None where none is loaded."""
    library = load_native().library
    if library is None:
        return None
    key = library.with_name(f"{library.name}.key")
    return key.read_text().strip() if key.is_file() else megatron_lite.__version__


def describe_state(
    core: Core, state: TrainState, canary: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON object of a checkpoint of this moment.

    Args:
        core: the built run.
        state: its counters.
        canary: of `train/canary.py`, with `--verify-resume`.
    """
    config, plan = core.config, core.plan
    legacy = config.legacy_loss_normalization
    return build_state(
        arithmetic=describe_arithmetic(core),
        batch={
            "dp_size": plan.batch.dp_size,
            "micro_batch_size": plan.batch.micro_batch_size,
            "ramp": plan.batch.ramp,
        },
        canary=canary,
        code=core.code,
        config=resolved_values(config, plan.parallel.world_size),
        counters=state.to_dict(),
        cursor={
            "blend": blend_counters(core.datasets.train, state.consumed_samples),
            "corpus_sha256": hash_json(core.facts["data_path"]),
            "evaluation": evaluation_identity(core.datasets),
        },
        facts=core.facts,
        layout=dataclasses.asdict(plan.parallel),
        loss={"normalization": "microbatch_means" if legacy else "valid_tokens"},
        randomness={"scheme": RANDOMNESS, "seed": config.seed},
        schedule=core.rates.state_dict(),
        versions=describe_versions(),
    )


def blend_counters(dataset: TrainableDataset | None, consumed: int) -> list[int] | None:
    """Samples that each dataset of the blend has given among the first `consumed`."""
    if dataset is None:
        return None
    if isinstance(dataset, BlendedDataset):
        return dataset.index.counts_after(min(consumed, len(dataset)))
    return [min(consumed, len(dataset))]


def evaluation_identity(datasets: Datasets) -> dict[str, list[dict[str, Any]]]:
    """Identity of the validation and test data, which change no step but what is reported."""
    found = datasets.fingerprint()
    return {
        part: [{key: fact[key] for key in IDENTITY if key in fact} for fact in found.get(part, [])]
        for part in ("valid", "test")
    }


def name_files(core: Core) -> dict[str, str]:
    """Path of a fingerprint in the state -> the data set that it is of, for messages."""
    train = core.datasets.train
    if train is None:
        return {}
    parts = train.datasets if isinstance(train, BlendedDataset) else [train]
    return {f"facts.data_path.train.{i}": part.source.name for i, part in enumerate(parts)}


def check_cursor(core: Core, saved: Mapping[str, Any], state: TrainState) -> None:
    """Compare the blend's counters at the cursor with those that were saved.

    Raises:
        UserError: this run would take its next samples from other places.
    """
    stored = saved["cursor"]["blend"]
    found = blend_counters(core.datasets.train, state.consumed_samples)
    if None in (stored, found) or stored == found:
        return
    raise UserError(
        f"after {state.consumed_samples} samples the blend had taken {stored} from its datasets, "
        f"by this run's data flags it would be {found} (--data-path; "
        "--allow-resume-change data_path accepts it)"
    )
