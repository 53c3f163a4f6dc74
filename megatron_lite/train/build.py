"""The only place where everything meets: from a checked config to a run that can step.

config -> tokenizer -> plan -> ranks and groups -> specs -> stage -> flat buffers ->
optimizer -> initial values or checkpoint -> data -> telemetry. Order matters in two places:
the tokenizer is opened before the ranks meet, so that its errors come early and the true
vocabulary is known; and the data starts at the cursor, which the checkpoint knows.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_lite import __version__
from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.config.plan import Plan, build_plan
from megatron_lite.config.resolve import resolved_values
from megatron_lite.config.schema import Config
from megatron_lite.data.build import Datasets, build_datasets
from megatron_lite.data.loader import Batch, iterate_microbatches
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.mesh.collectives import all_gather_json
from megatron_lite.mesh.grid import Grids, build_grids
from megatron_lite.mesh.groups import Groups, build_groups, world_group
from megatron_lite.mesh.lane import Lane
from megatron_lite.mesh.launch import (
    RunStatus,
    WorldInfo,
    finish_distributed,
    init_distributed,
)
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.model.gpt import GPTStage, StageOptions
from megatron_lite.model.init import initial_value
from megatron_lite.native.load import load_native, require_native
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.optim.recipe import build_recipe
from megatron_lite.optim.schedule import build_schedule, samples_after
from megatron_lite.optim.state_home import build_home
from megatron_lite.pipeline.partition import StagePart
from megatron_lite.pipeline.runner import Runner
from megatron_lite.resilience.signals import StopDecision, StopSignals
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.stages import specs_on_rank
from megatron_lite.telemetry.facade import Telemetry
from megatron_lite.telemetry.flops import MachinePeak
from megatron_lite.telemetry.meters import measure_matmul_peak
from megatron_lite.telemetry.timers import STEP_TIMERS, Timers
from megatron_lite.train.agreement import check_agreement
from megatron_lite.train.canary import check_canary
from megatron_lite.train.data_axis import build_data_axis
from megatron_lite.train.dump import DebugDump
from megatron_lite.train.parts import Core, Parts
from megatron_lite.train.pipeline import build_pipeline
from megatron_lite.train.record import describe_code, describe_facts
from megatron_lite.train.restore import Restored, load_run
from megatron_lite.train.save_directory import check_save_directory, join_save_directory
from megatron_lite.train.saving import Saver
from megatron_lite.train.state import TrainState
from megatron_lite.train.summary import announce
from megatron_lite.train.weights_hash import hash_weights


@contextmanager
def build_run(
    config: Config, info: WorldInfo, status: RunStatus, recorder: Recorder | None = None
) -> Iterator[tuple[Parts, TrainState]]:
    """Build the run of this rank, and take it down at the end of the block.

    Args:
        config: accepted by the rules.
        info: this rank's place.
        status: told where the run is.
        recorder: collects the collectives, where somebody wants to see them.

    Yields:
        The parts, and the counters to start from.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        device = pick_device(config)
        if config.deterministic_mode and device == "cuda":  # the CPU's are repeatable anyway
            torch.use_deterministic_algorithms(True)
        tokenizer = build_tokenizer(config)
        plan = build_plan(config, info.world_size, tokenizer.vocab_size)
        set_threads(info)
        init_distributed(
            info, device, timeout_minutes=config.distributed_timeout_minutes, status=status
        )
        world = world_group(info.rank, info.world_size)
        check_agreement("the flags", flags_and_versions(config, info.world_size), world)
        datasets = open_data(config, plan, tokenizer, is_builder=info.rank == 0)
        facts = describe_facts(config, plan, datasets, tokenizer)
        check_agreement("the data", {"data": facts["data_path"], **facts}, world)
        grids = build_grids(plan.parallel)
        # On CUDA both lanes would wait on one stream, and ranks for each other.
        lane = Lane() if plan.pipeline.paired and device == "cpu" else None
        if lane is not None:
            stack.callback(lane.close)
        groups = build_groups(
            grids,
            info.rank,
            plan.model.num_query_groups,
            instances=plan.sharding.instances,
            recorder=recorder,
            timeout=timedelta(minutes=config.distributed_timeout_minutes),
            lane=lane,
        )
        core = build_core(config, plan, grids, groups, info, device, datasets)
        core.facts = facts
        # One look at the source tree, not one per rank.
        core.code = all_gather_json(describe_code() if info.rank == 0 else {}, world)[0]
        joined = stack.enter_context(join_save_directory(core))
        restored = start_state(core)
        check_save_directory(core, restored)
        saver = Saver(core, joined, restored.state.iteration)
        stack.callback(saver.close)
        parts = build_parts(core, restored.state, info, signals, saver, stack)
        status.where = _place_of(parts)
        announce(parts, tokenizer, restored)
        for note in joined.notes:
            parts.telemetry.say(note)
        told = check_canary(parts, restored.saved)
        if told is not None:
            parts.telemetry.say(told)
        if config.check_weights_hash:
            parts.telemetry.say(f"logical hash of the weights: {hash_weights(core)}")
        yield parts, restored.state
        status.phase = "shutdown"
        finish_distributed()


def _place_of(parts: Parts) -> Callable[[], str]:
    """Where a run is, for who outlives it: process groups must not live until the
    interpreter ends, so nothing may keep the run alive."""
    found = weakref.ref(parts)

    def where() -> str:
        run = found()
        return "" if run is None else run.runner.where()

    return where


def flags_and_versions(config: Config, world_size: int) -> dict[str, Any]:
    """What every rank must have been started with."""
    values = plain_json(resolved_values(config, world_size))
    return values | {"megatron_lite": __version__, "torch": str(torch.__version__)}


def pick_device(config: Config) -> str:
    """Resolve `--device auto`."""
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def set_threads(info: WorldInfo) -> None:
    """Share the cores of this node between its ranks, unless the user has decided."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // info.local_world_size))


def open_data(config: Config, plan: Plan, tokenizer: Tokenizer, *, is_builder: bool) -> Datasets:
    """Open the data parts with as many samples as the whole run takes from each."""
    batch = plan.batch
    round_samples = batch.eval_iters * batch.eval_global_batch_size
    rounds = batch.train_iters // batch.eval_interval + 1 if batch.eval_interval else 1
    return build_datasets(
        config,  # type: ignore[arg-type]  # seq_length is set in a checked config
        train_samples=samples_after(batch, batch.train_iters),
        valid_samples=rounds * round_samples,
        test_samples=round_samples,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.find_special("eod"),
        pad=tokenizer.find_special("pad"),
        is_builder=is_builder,
    )


def build_core(
    config: Config,
    plan: Plan,
    grids: Grids,
    groups: Groups,
    info: WorldInfo,
    device_name: str,
    datasets: Datasets,
) -> Core:
    """Build everything that holds tensors of the model."""
    device = torch.device("cuda", info.local_rank) if device_name == "cuda" else torch.device("cpu")
    coordinates = {
        "dense": grids.dense.coordinate(info.rank),
        "expert": grids.expert.coordinate(info.rank),
    }
    specs = model_spec(plan.model, plan.parallel)
    pipeline = build_pipeline(config, plan, groups, device)
    here = specs_on_rank(specs, plan.pipeline.parts, pipeline.placement, groups.pp.rank)
    stage = build_stage(
        config, plan, here, groups, coordinates["dense"], device, pipeline.local_parts
    )
    recipe = build_recipe(config, specs)
    data_axis = build_data_axis(config, plan, stage, coordinates, groups, pipeline, recipe)
    native, warning = False, ""
    if config.native_ops == "on":
        loaded = load_native()
        native = loaded.serves(device)
        warning = require_native(loaded, device, config.require_native)
    # A run of no iterations only evaluates: its schedules are never asked.
    batch = dataclasses.replace(plan.batch, train_iters=max(plan.batch.train_iters, 1))
    return Core(
        config=config,
        plan=plan,
        groups=groups,
        specs=specs,
        device=device,
        pipeline=pipeline,
        stage=stage,
        buffers=data_axis.buffers,
        gathered=data_axis.gathered,
        gradients=data_axis.gradients,
        optimizer=Optimizer(
            data_axis.buffers,
            recipe,
            native,
            data_axis.gathered,
            place=data_axis.place,
            frozen=data_axis.frozen,
            home=build_home(config, data_axis.buffers),
        ),
        rates=build_schedule(config, batch),
        native=native,
        native_warning=warning,
        datasets=datasets,
        facts={},
        code={},
    )


def build_parts(
    core: Core,
    state: TrainState,
    info: WorldInfo,
    signals: StopSignals,
    saver: Saver,
    stack: ExitStack,
) -> Parts:
    """Add data from the cursor on, reporting and the ways to stop."""
    config, plan, groups = core.config, core.plan, core.groups
    positions = torch.arange(plan.model.seq_length, device=core.device)
    local = positions
    if plan.parallel.sequence_parallel:
        local = positions.chunk(groups.tp.size)[groups.tp.rank]
    telemetry = Telemetry(
        config,
        plan,
        is_speaker=info.rank == info.world_size - 1,
        start_iteration=state.iteration,
        peak=measure_peak(core),
    )
    return Parts(
        **vars(core),
        positions=local,
        full_positions=positions,
        runner=Runner(info.rank, waiting=lambda: core.pipeline.exchange.waiting),
        train_loader=read_training_data(core, state, stack),
        telemetry=stack.enter_context(telemetry),
        timers=build_timers(config, core.device),
        stop=StopDecision(
            signals,
            can_save=config.save is not None,
            exit_interval=config.exit_interval,
            exit_duration_in_mins=config.exit_duration_in_mins,
            news=saver.has_news,
        ),
        saver=saver,
        dump=build_dump(config, plan, groups),
    )


def build_stage(
    config: Config,
    plan: Plan,
    specs: tuple[ParamSpec, ...],
    groups: Groups,
    coordinate: Mapping[str, int],
    device: torch.device,
    parts: Sequence[StagePart] = (),
) -> GPTStage:
    """Build the model of this rank, its parameters still zero.

    Args:
        specs: logical parameters of this rank.
        parts: its stages; the whole model when empty.
    """
    options = StageOptions(
        recompute_method=config.recompute_method or "uniform",
        recompute_layers=config.recompute_num_layers or 1,
        loss_chunks=config.loss_chunks,
        compile_layers=config.compile,
    )
    return GPTStage(plan, specs, groups, coordinate, device, options, parts)


def measure_peak(core: Core) -> MachinePeak | None:
    """What MFU is measured against: only with --log-throughput, it takes a moment.

    Every rank measures at the same time, so that each sees its share of the machine.
    """
    if not core.config.log_throughput:
        return None
    return measure_matmul_peak(core.stage.dtype, core.device)


def build_timers(config: Config, device: torch.device) -> Timers:
    """Timers of this rank; on CUDA they wait for the device only when they are read."""
    wait = device.type == "cuda" and config.timing_log_level > 0
    synchronize = torch.cuda.synchronize if wait else None
    return Timers(STEP_TIMERS, config.timing_log_level, synchronize=synchronize)


def build_dump(config: Config, plan: Plan, groups: Groups) -> DebugDump | None:
    """Prepare `--debug-dump`."""
    if config.debug_dump is None:
        return None
    dtype = "float64" if plan.precision.compute == "float64" else "float32"
    return DebugDump(
        Path(config.debug_dump),
        groups.world,
        dtype,
        weights=config.debug_dump_weights,
        activations=config.debug_dump_activations,
    )


def start_state(core: Core) -> Restored:
    """Continue from a checkpoint, or draw initial values."""
    config = core.config
    if (config.load is None and config.pretrained_checkpoint is None) or config.ckpt_allow:
        draw_initial_values(core)  # with --ckpt-allow what is not loaded keeps them
    restored = load_run(core)
    if restored is None:
        return Restored(TrainState())
    if not restored.loaded:
        draw_initial_values(core)
    return restored


def draw_initial_values(core: Core) -> None:
    """Fill the weights, in the masters' precision; the same bits in every layout."""
    with torch.no_grad():
        for piece in core.optimizer.weight_pieces():
            dtype = piece.tensor.dtype
            piece.tensor.copy_(initial_value(piece.spec, piece.box, core.config.seed, dtype))
    core.optimizer.after_load("master", updates=0)


def read_training_data(core: Core, state: TrainState, stack: ExitStack) -> Iterator[list[Batch]]:
    """Start reading training samples at the cursor."""
    batch, config = core.plan.batch, core.config
    if core.datasets.train is None or state.iteration >= batch.train_iters:
        return iter(())
    return stack.enter_context(
        iterate_microbatches(
            core.datasets.train,
            consumed_samples=state.consumed_samples,
            global_batch_size=batch.global_batch_size_at,
            micro_batch_size=batch.micro_batch_size,
            dp_rank=core.groups.dp.rank,
            dp_size=core.groups.dp.size,
            num_workers=config.num_workers,
            pin=core.device.type == "cuda",
        )
    )
