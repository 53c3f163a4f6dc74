"""The state of a checkpoint is a closed list: what a run gains must be put on it.

These tests fail when a counter, a flag or a piece of the optimizer is added and nobody has
said what a resume does with it.
"""

import dataclasses
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_lite.checkpoint.resume import (
    ARITHMETIC_FIELDS,
    COVERAGE,
    OTHER_RUN,
    REPLAY,
    UPDATE_FIELDS,
    Change,
    compare_state,
    resume_contract,
    schedule_changes,
)
from megatron_lite.checkpoint.state import (
    COUNTERS,
    FACTS,
    OPTIONAL,
    PARTS,
    RANDOMNESS,
    build_state,
    check_state,
    hash_json,
)
from megatron_lite.config.schema import (
    CheckpointConfig,
    LoggingConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    flag_fields,
)
from megatron_lite.data.blend import BLOCK, BlendIndex, normalize_weights
from megatron_lite.data.native import load_backend
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.ops import random as philox
from megatron_lite.optim.norm import SquaredNorm
from megatron_lite.optim.schedule import _FLAGS
from megatron_lite.train import record
from megatron_lite.train.parts import Parts
from megatron_lite.train.record import describe_state
from megatron_lite.train.state import TrainState
from tests.pool import RankPool
from tests.train.program import LAYOUTS, LLAMA, RUN, build_and

# Flags by what a resume does about a change. A new flag belongs into one of these lists.
BY_FACT = (
    "seq_length eod_mask_loss legacy_loss_normalization calculate_per_token_loss "
    "global_batch_size rampup_batch_size step_batch_size_schedule optimizer seed split "
    "data_path data_args_path train_data_path mock_data mid_level_dataset_surplus "
    "reset_position_ids reset_attention_mask dataloader_type "
    "tokenizer_type tokenizer_model vocab_file merge_file"
)
BY_LENGTH = "train_iters train_samples"  # of the schedules
BY_LAYOUT = "micro_batch_size pipeline_schedule"
# They change no number of a step.
FREE = (
    "eval_iters eval_interval eval_global_batch_size eval_with_ema valid_data_path test_data_path "
    "data_cache_path data_check_interval num_workers create_attention_mask_in_dataloader "
    "mmap_bin_files "
    "skip_bad_records exit_interval exit_duration_in_mins exit_signal_handler manual_gc "
    "manual_gc_interval local_rank config_file print_config dry_run require_native debug_dump "
    "debug_dump_weights debug_dump_activations"
)


OPTIMIZER = (
    "buffers home recipe masters state squared_norm _gathered _frozen _updates _groups _factored "
    "_updaters _average"
)


def test_every_flag_has_its_treatment_on_resume() -> None:
    lists = [
        [
            field.name
            for group in (ModelConfig, MoEConfig, ParallelConfig)
            for field in flag_fields(group)
            if field.name not in ARITHMETIC_FIELDS
        ],
        [f.name for g in (CheckpointConfig, LoggingConfig) for f in flag_fields(g)],
        [
            field.name
            for field in flag_fields(OptimizerConfig)
            if field.name not in (*UPDATE_FIELDS, *ARITHMETIC_FIELDS, "optimizer", "eval_with_ema")
        ],
        UPDATE_FIELDS,
        ARITHMETIC_FIELDS,
        *(words.split() for words in (BY_FACT, BY_LENGTH, BY_LAYOUT, FREE)),
    ]
    listed = [name for names in lists for name in names]
    assert sorted(listed) == sorted(field.name for field in flag_fields())


def test_flags_of_checkpoints_and_logging_are_known() -> None:
    """A flag of these groups that did change a step would slip through by its group."""
    known = (
        "allow_missing_checkpoint allow_resume_change async_save check_weights_hash ckpt_allow "
        "ckpt_allow_unsafe_publish ckpt_staging_dir "
        "ckpt_fully_parallel_save ckpt_step exit_on_missing_checkpoint finetune keep_last load "
        "max_failed_saves mean_time_between_failures moe_upcycling_granularity moe_use_upcycling "
        "no_load_optim no_save_optim overwrite_save "
        "pretrained_checkpoint save save_failure_policy save_interval save_retain_interval "
        "use_checkpoint_args use_mp_args_from_checkpoint_args verify_resume"
    )
    assert {field.name for field in flag_fields(CheckpointConfig)} <= set(known.split())
    named = ("log", "timing", "tensorboard", "wandb", "metrics", "flops_convention")
    assert all(field.name.startswith(named) for field in flag_fields(LoggingConfig))


def test_counters_are_those_of_the_run() -> None:
    assert tuple(field.name for field in dataclasses.fields(TrainState)) == COUNTERS


def examine(argv: Sequence[str], rank: int, world_size: int) -> dict[str, Any]:
    """What one rank's run is made of, and what would be saved of it."""

    def use(parts: Parts, state: TrainState, status: object) -> dict[str, Any]:
        optimizer = parts.optimizer
        kept = {piece.tensor.untyped_storage().data_ptr() for piece in optimizer.state_pieces()}
        lost = [
            name
            for name, tensor in _tensors(vars(optimizer), "")
            if tensor.untyped_storage().data_ptr() not in kept
        ]
        return {
            "attributes": sorted(vars(optimizer)),
            "lost": sorted(lost),
            "schedule": sorted(vars(parts.rates)),
            "rates": parts.rates.state_dict(),
            "state": describe_state(parts, state),
            "updates": optimizer.updates,
        }

    found: dict[str, Any] = build_and(use, argv, rank, world_size)
    return found


def _tensors(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if isinstance(value, dict):
        return [found for k, v in value.items() for found in _tensors(v, f"{name}.{k}")]
    if isinstance(value, (list, tuple)):
        return [found for v in value for found in _tensors(v, name)]
    if type(value).__module__.startswith("megatron_lite.optim"):
        inner = {key: v for key, v in vars(value).items() if "gradient" not in key}
        return _tensors(inner, name) if not isinstance(value, SquaredNorm) else []
    return []


@pytest.mark.parametrize(
    "extra",
    [
        ["--bf16"],
        ["--optimizer", "sgd"],
        ["--optimizer", "muon", "--bf16", "--weight-ema-decay", "0.9"],
        ["--optimizer", "adafactor", "--adafactor-beta1", "0.5", "--freeze", "*.layers.0.*"],
    ],
    ids=["adam", "sgd", "muon", "adafactor"],
)
def test_everything_the_optimizer_and_the_schedules_remember_is_saved(
    rank_pool: RankPool, extra: list[str]
) -> None:
    (found,) = rank_pool.run(1, examine, argv=[*LLAMA, *RUN, *extra])
    assert found["attributes"] == sorted(OPTIMIZER.split())
    # The count of updates, a counter, and what the shapes of parameters say; params are frozen.
    known = ("._step", "._sizes", "._copies")
    assert not [name for name in found["lost"] if not name.endswith(known)], found["lost"]
    assert found["schedule"] == ["num_steps", "settings"]
    assert set(found["rates"]) == {*_FLAGS, "num_steps"}


@pytest.mark.parametrize("layout", ["1", "tp2-sp"])
def test_the_state_of_a_run_has_every_part_and_is_equal_on_all_ranks(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    size, flags = LAYOUTS[layout]
    found = rank_pool.run(size, examine, argv=[*LLAMA, *RUN, *flags])
    state = found[0]["state"]
    assert all(other["state"] == state for other in found)
    check_state(state, tmp_path)
    assert set(state["facts"]) == set(FACTS)
    assert state["facts"]["vocab_size"] == 90  # the true one, not the padded 92
    assert state["facts"]["rotary_base"]["interleaved"] is False
    assert state["facts"]["tokenizer_type"]["type"] == "NullTokenizer"
    assert state["batch"] == {"dp_size": 1, "micro_batch_size": 1, "ramp": [[0, 4]]}
    assert state["cursor"]["blend"] == [0]
    assert state["cursor"]["corpus_sha256"] == hash_json(state["facts"]["data_path"])
    assert state["loss"] == {"normalization": "valid_tokens"}
    assert [state[part] for part in OPTIONAL] == [None, None, None]
    assert state["versions"]["torch"] == torch.__version__
    assert state["layout"]["tp"] == size
    assert state["config_sha256"] == hash_json(state["config"])


def test_the_name_of_the_generator_is_that_of_the_code() -> None:
    name, _, version = RANDOMNESS.partition("/")
    assert name == "philox4x32-10" and version == "1"
    assert "Philox4x32-10" in str(philox.__doc__)


def full_state() -> dict[str, Any]:
    parts = {part: dict.fromkeys(keys or ("made",), 1) for part, keys in PARTS.items()}
    for part in (*OPTIONAL, "origin", "config_sha256"):
        del parts[part]
    return build_state(**parts)


@pytest.mark.parametrize("part", [part for part in PARTS if part not in OPTIONAL])
def test_a_state_without_a_part_is_refused(part: str) -> None:
    state = full_state()
    check_state(state, Path("here"))
    del state[part]
    with pytest.raises(UserError, match=f"here: written by .*differ in {part}") as refused:
        check_state(state, Path("here"))
    assert refused.value.exit_code == 2  # nothing is damaged: no older one is taken instead


@pytest.mark.parametrize("part", [part for part, keys in PARTS.items() if keys])
def test_a_part_with_a_key_too_many_or_too_few_is_refused(part: str) -> None:
    keys = PARTS[part]
    assert keys
    state = full_state()
    state[part]["new"] = 1
    with pytest.raises(UserError, match=rf"{part}\.new"):
        check_state(state, Path("here"))
    state = full_state()
    del state[part][keys[0]]
    with pytest.raises(UserError, match=rf"{part}\.{keys[0]}"):
        check_state(state, Path("here"))
    with pytest.raises(ValueError, match="closed list"):
        build_state(**{**full_state(), part: {}})


def test_an_unknown_part_an_odd_origin_and_a_wrong_hash_are_refused() -> None:
    with pytest.raises(UserError, match="differ in more"):
        check_state(full_state() | {"more": 1}, Path("here"))
    for change in ({"origin": {"kind": "other"}}, {"config_sha256": "0" * 64}):
        with pytest.raises(DamagedError):
            check_state(full_state() | change, Path("here"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], REPLAY),
        ([Change("config.log_interval", 1, 2)], REPLAY),
        ([Change("layout.tp", 2, 1)], COVERAGE.format("tp 2 -> 1")),
        (
            [Change("batch.micro_batch_size", 1, 2), Change("config.adam_eps", 1, 2)],
            OTHER_RUN.format("adam_eps"),
        ),
        ([Change("batch.micro_batch_size", 1, 2)], COVERAGE.format("micro_batch_size 1 -> 2")),
        ([Change("facts.seed", 1, 2), Change("layout.tp", 2, 1)], OTHER_RUN.format("seed")),
        ([Change("schedule.max_lr", 1, 2)], OTHER_RUN.format("max_lr")),
        (
            [Change("versions.torch", 1, 2)],
            f"{REPLAY} if it computes alike in spite of versions.torch",
        ),
        (
            [Change("config.native_ops", "on", "off")],
            f"{REPLAY} if it computes alike in spite of config.native_ops",
        ),
    ],
)
def test_the_contract_of_a_resume_follows_from_what_changed(
    changes: list[Change], told: str
) -> None:
    assert resume_contract(changes) == told


def test_schedules_in_force_are_compared_without_their_progress() -> None:
    saved, now = {"max_lr": 1.0, "num_steps": 8}, {"max_lr": 2.0, "num_steps": 0}
    assert schedule_changes(saved, now) == [Change("schedule.max_lr", 1.0, 2.0)]
    assert schedule_changes(saved, saved | {"num_steps": 3}) == []


def test_another_generator_is_always_refused() -> None:
    saved = {"randomness": {"scheme": "other/1", "seed": 1}}
    current = {"randomness": {"scheme": RANDOMNESS, "seed": 1}}
    with pytest.raises(UserError, match="another generator"):
        compare_state(saved, current, ["scheme", "randomness", "seed"])


def test_weights_alone_are_judged_by_the_architecture_only() -> None:
    saved = {"facts": {"rotary_base": {"base": 1e4}, "seed": 1, "seq_length": 8}}
    current = {"facts": {"rotary_base": {"base": 1e6}, "seed": 2, "seq_length": 16}}
    with pytest.raises(UserError, match=r"--allow-resume-change rotary_base") as refused:
        compare_state(saved, current, weights_only=True)
    assert "seed" not in str(refused.value)
    changes = compare_state(saved, current, ["--rotary-base"], weights_only=True)
    assert {change.path for change in changes} == {
        "facts.rotary_base.base",
        "facts.seed",
        "facts.seq_length",
    }


def test_a_changed_fact_is_told_once_and_names_its_file() -> None:
    saved = {"facts": {"data_path": {"train": [{"bin": "a"}, {"bin": "b"}]}},
             "config": {"data_path": ["x"]}}  # fmt: skip
    current = {"facts": {"data_path": {"train": [{"bin": "a"}, {"bin": "c"}]}},
               "config": {"data_path": ["y"]}}  # fmt: skip
    names = {"facts.data_path.train.1": "/corpus/books"}
    with pytest.raises(UserError, match=r"/corpus/books: data_path\.train\.1\.bin: 'b' in the"):
        compare_state(saved, current, names=names)
    (change,) = compare_state(saved, current, ["data_path"], names=names)
    assert change.path == "facts.data_path.train.1.bin"


@pytest.mark.parametrize("capacity", [None, [6000, 3000, 3000]])
def test_counters_of_a_blend_are_those_of_walking_it(capacity: list[int] | None) -> None:
    import numpy as np

    weights = normalize_weights([0.5, 0.3, 0.2])
    limits = None if capacity is None else np.array(capacity, dtype=np.int64)
    index = BlendIndex(weights, 2 * BLOCK + 77, load_backend(False, print), limits)
    walked = [0, 0, 0]
    for sample in range(len(index) + 1):
        if sample in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, len(index)):
            assert index.counts_after(sample) == walked, sample
        if sample < len(index):
            walked[index.locate(sample)[0]] += 1
    assert walked == index.counts.tolist()
    with pytest.raises(IndexError):
        index.counts_after(len(index) + 1)


def test_a_blend_that_stands_elsewhere_is_refused_with_both_counters() -> None:
    train = SimpleNamespace(__len__=lambda: 100)
    core: Any = SimpleNamespace(datasets=SimpleNamespace(train=train))
    state = TrainState(consumed_samples=8)
    with patch.object(record, "blend_counters", lambda dataset, consumed: [5, consumed - 5]):
        record.check_cursor(core, {"cursor": {"blend": [5, 3]}}, state)
        record.check_cursor(core, {"cursor": {"blend": None}}, state)
        with pytest.raises(UserError, match=r"had taken \[6, 2\].* it would be \[5, 3\]"):
            record.check_cursor(core, {"cursor": {"blend": [6, 2]}}, state)


def test_the_commit_and_changes_of_the_source_tree_are_told(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    package = tmp_path / "megatron_lite"
    package.mkdir()
    (package / "__init__.py").write_text("")
    with patch.object(record.megatron_lite, "__file__", str(package / "__init__.py")):
        assert record.describe_code.__wrapped__() == {"commit": None, "dirty": None}
        git("init", "-q")
        git("add", ".")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one")
        clean = record.describe_code.__wrapped__()
        assert len(clean["commit"]) == 40 and clean["dirty"] is False
        (package / "__init__.py").write_text("changed = True\n")
        assert record.describe_code.__wrapped__() == {**clean, "dirty": True}
