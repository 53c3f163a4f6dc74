"""`--use-checkpoint-args` and `--use-mp-args-from-checkpoint-args`: flags from a checkpoint.

The configuration in the manifest acts like a configuration file below the user's own flags
and file. What makes the model (or the layout) may not be contradicted: such a run could not
load. Lengths, dropout and paths may: the user's value wins, and a resume judges it later.
Runs before the rules and before torch is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lite.checkpoint.catalog import Found, NoCheckpoint, find_checkpoint
from megatron_lite.checkpoint.state import check_state
from megatron_lite.config.flags import Arguments, convert_file_value, parse_file, parse_words
from megatron_lite.config.options import Option, build_options
from megatron_lite.config.plan import key_value_heads, position_kind
from megatron_lite.config.schema import Config, ModelConfig, MoEConfig, flag_fields
from megatron_lite.errors import DamagedError, UserError

# Taken where the user says nothing; the user's value wins.
FREE_FIELDS = (
    *("seq_length", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("hidden_dropout", "attention_dropout", "init_method_std"),
    *("tokenizer_model", "vocab_file", "merge_file"),
)
EXPERT_FLAGS = tuple(f.name for f in flag_fields(MoEConfig))
ARCHITECTURE_FLAGS = (
    *(
        f.name
        for g in (ModelConfig, MoEConfig)
        for f in flag_fields(g)
        if f.name not in FREE_FIELDS
    ),
    "tokenizer_type",
)
LAYOUT_FLAGS = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_tp_pp_dp_mapping",
)
# Several spellings of one thing: the resolved value decides.
_POSITION = (
    "position_embedding_type",
    "use_rotary_position_embeddings",
    "add_position_embedding",
)
_HEADS = ("group_query_attention", "num_query_groups")


def complete_config(config: Config, argv: Sequence[str], world_size: int) -> Config:
    """Fill a parsed config from the checkpoint that it is going to load.

    Args:
        config: of `parse_config(argv)`, not yet checked.
        argv: the command line, which tells what was given.
        world_size: number of ranks, which the layout must fit.

    Returns:
        The config itself where no flag asks for it, or nothing is there to load yet.

    Raises:
        UserError: a flag contradicts the checkpoint, or its layout does not fit.
        DamagedError: there are checkpoints, but none verifies.
    """
    wanted: tuple[str, ...] = ()
    if config.use_checkpoint_args:
        wanted += ARCHITECTURE_FLAGS + FREE_FIELDS
        if config.moe_use_upcycling:  # a dense model's checkpoint says nothing about experts
            wanted = tuple(name for name in wanted if name not in EXPERT_FLAGS)
    if config.use_mp_args_from_checkpoint_args:
        wanted += LAYOUT_FLAGS
    found = _find(config) if wanted else None
    if found is None:
        return config
    options = build_options()
    given = _given(argv, options)
    check_state(found.manifest.state, found.directory)
    stored = _stored_values(found, wanted, options)
    taken = {name: value for name, value in stored.items() if name not in given.values}
    completed = dataclasses.replace(config, **taken)
    _check_given(completed, given, stored, found)
    if config.use_mp_args_from_checkpoint_args:
        _check_fit(completed, world_size, found)
    return completed


def _find(config: Config) -> Found | None:
    """The checkpoint that the run will load; None where it starts without one."""
    places = ((config.load, config.ckpt_step), (config.pretrained_checkpoint, None))
    for place, step in places:
        if place is None:
            continue
        try:
            return find_checkpoint(place, step, verify="structure")
        except NoCheckpoint:
            continue  # loading decides later whether that is a fresh start or a fault
    return None


def _given(argv: Sequence[str], options: Mapping[str, Option]) -> Arguments:
    """What command line and configuration file say."""
    command = parse_words(argv, options)
    path = command.values.get("config_file")
    given = parse_file(path, options) if path is not None else Arguments()
    given.values.update(command.values)
    given.texts.update(command.texts)
    return given


def _stored_values(
    found: Found, wanted: Sequence[str], options: Mapping[str, Option]
) -> dict[str, Any]:
    """Values of the checkpoint's configuration; what it leaves open is left out."""
    config = found.manifest.state["config"]
    values = {}
    for name in wanted:
        if config.get(name) is None:
            continue
        try:
            values[name] = convert_file_value(options[name], config[name])
        except ValueError as fault:
            raise DamagedError(f"{found.directory}: its configuration: {name}: {fault}") from None
    return values


def _check_given(config: Config, given: Arguments, stored: Mapping[str, Any], found: Found) -> None:
    """Refuse flags that contradict the checkpoint, all in one message."""
    lines = [
        f"\n  {given.texts[name]}: the checkpoint has {stored[name]!r}"
        for name in stored
        if name in given.values
        and name not in FREE_FIELDS
        and not _agrees(name, config, given, stored)
    ]
    if lines:
        raise UserError(
            f"--use-checkpoint-args, --use-mp-args-from-checkpoint-args: flags contradict "
            f"{found.directory}, leave them out:{''.join(lines)}"
        )


def _agrees(name: str, config: Config, given: Arguments, stored: Mapping[str, Any]) -> bool:
    if name in _POSITION:
        return position_kind(config) == stored.get("position_embedding_type")
    if name in _HEADS and config.num_attention_heads is not None:
        return key_value_heads(config) == stored.get("num_query_groups")
    return bool(given.values[name] == stored[name])


def _check_fit(config: Config, world_size: int, found: Found) -> None:
    sizes = {
        "TP": config.tensor_model_parallel_size,
        "CP": config.context_parallel_size,
        "PP": config.pipeline_model_parallel_size,
    }
    needed = 1
    for size in sizes.values():
        needed *= max(size, 1)
    if world_size % needed:
        layout = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UserError(
            f"--use-mp-args-from-checkpoint-args: the layout of {found.directory}, {layout}, "
            f"needs a multiple of {needed} ranks and this run has {world_size}: start a multiple "
            "of it, or give the layout by flags (any layout can load any checkpoint)"
        )
