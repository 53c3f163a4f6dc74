"""Rules of the depth axis: which schedule runs which stages, layers and microbatches.

Each rule looks at one thing and leaves alone what another one refuses already, so that a
command with one fault is told one message.
"""

from __future__ import annotations

from megatron_lite.config.batch_plan import build_ramp
from megatron_lite.config.batch_rules import ramp_fault, schedule_fault
from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.layout_rules import (
    PER_RANK,
    PER_STAGE,
    PP,
    layers_broken,
    virtual_broken,
    virtual_flag,
)
from megatron_lite.config.legal import nearest_multiples
from megatron_lite.config.pipeline_plan import (
    AUTO,
    FILE,
    INTERLEAVED,
    SCHEDULE_NAMES,
    asked_chunks,
    cut_model,
    place_stages,
    read_schedule_file,
)
from megatron_lite.errors import UserError
from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.partition import LAYOUT
from megatron_lite.pipeline.schedules import FIXED_CHUNKS, Options

NAME = "--pipeline-schedule"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
ACCOUNTS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_mtp_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
NEED_PIPELINE = (
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
    *ENDS,
)


def spelled(field: str) -> str:
    """The flag of a field."""
    if field == "microbatch_group_size_per_vp_stage":
        return GROUP
    return f"--{field.replace('_', '-')}"


def given(f: Facts, fields: tuple[str, ...]) -> str:
    """Name the set ones of these fields, with their values."""
    words = []
    for field in fields:
        value = getattr(f.config, field)
        if value not in (None, False):
            words.append(spelled(field) + ("" if value is True else f" {value}"))
    return ", ".join(words)


def needs_pipeline(f: Facts) -> str:
    """Flags that mean nothing without a pipeline."""
    return given(f, NEED_PIPELINE)


def schedule_unknown(f: Facts) -> bool:
    """A schedule is one of the names or a file."""
    name = f.config.pipeline_schedule
    return name is not None and name not in SCHEDULE_NAMES and not name.startswith(FILE)


def file_table(f: Facts) -> Schedule | None:
    """The table of file:PATH, where there is one that can be read."""
    name = f.config.pipeline_schedule or ""
    if f.pp == 1 or not name.startswith(FILE):
        return None
    try:
        return read_schedule_file(name)
    except UserError:
        return None


def file_fault(f: Facts) -> str:
    """Say why the file is no table for these ranks, or ''."""
    name = f.config.pipeline_schedule or ""
    if f.pp == 1 or not name.startswith(FILE):
        return ""
    try:
        table = read_schedule_file(name)
    except UserError as error:
        return f"{NAME} {name}: {error}"
    if table.forward_only:
        return f"{NAME} {name}: the table is forward only, it trains nothing"
    ranks = len(table.ranks)
    if ranks != f.pp:
        return f"{NAME} {name}: a table of {ranks} ranks; nearest legal: {PP} {ranks}"
    if table.num_stages % ranks:
        return (
            f"{NAME} {name}: {table.num_stages} stages on {ranks} ranks; every rank must hold "
            "equally many"
        )
    return ""


def chunks_of(f: Facts) -> int | None:
    """Stages per rank that virtual-stage flags or the layout ask for; None: nothing legal."""
    if f.has("num_layers_per_virtual_pipeline_stage") and virtual_broken(f):
        return None
    try:
        return asked_chunks(f.config)
    except (UserError, ZeroDivisionError):
        return None


def known_chunks(f: Facts) -> tuple[str, int] | None:
    """The schedule's name and the only number of stages per rank that it knows."""
    if f.pp == 1 or schedule_unknown(f) or file_fault(f):
        return None
    name = schedule_name_of(f)
    table = file_table(f)
    if table is not None:
        return name, table.num_stages // len(table.ranks)
    return (name, FIXED_CHUNKS[name]) if name in FIXED_CHUNKS else None


def schedule_name_of(f: Facts) -> str:
    """The schedule of a config in which a layout may be broken."""
    return f.config.pipeline_schedule or ("interleaved" if (chunks_of(f) or 1) > 1 else "1f1b")


def chunks_broken(f: Facts) -> bool:
    """Virtual stages that the schedule does not know."""
    known, asked = known_chunks(f), chunks_of(f)
    return known is not None and asked is not None and asked != known[1]


def chunks_message(f: Facts) -> str:
    """Tell the schedule's own number and the schedules for the one that was asked for."""
    known = known_chunks(f)
    assert known is not None
    name, legal = known
    asked = chunks_of(f) or 1
    source = LAYOUT
    if f.config.pipeline_model_parallel_layout is None:
        source = "{} {}".format(*virtual_flag(f))
    fits = [other for other in SCHEDULE_NAMES if FIXED_CHUNKS.get(other, asked) == asked]
    alone = "leave out the virtual stages" if legal == 1 else f"{PER_RANK} {legal}"
    return (
        f"{NAME} {name} runs {legal} stage{'s' if legal > 1 else ''} per pipeline rank, {source} "
        f"means {asked}; nearest legal: {alone}, or {NAME} {' or '.join(fits)}"
    )


def layout_conflicts(f: Facts) -> str:
    """Flags that say otherwise what the layout says already."""
    if f.config.pipeline_model_parallel_layout is None:
        return ""
    return given(f, ("num_layers_per_virtual_pipeline_stage", *ENDS, *ACCOUNTS))


def uneven_virtual(f: Facts) -> bool:
    """Layers per virtual stage mean equal stages."""
    return f.config.num_layers_per_virtual_pipeline_stage is not None and bool(given(f, ENDS))


def resolved(f: Facts) -> tuple[str, int] | None:
    """Schedule and stages per rank of a config that the rules above accept."""
    if f.pp == 1 or f.dp == 0 or schedule_unknown(f) or file_fault(f) or chunks_broken(f):
        return None
    known = known_chunks(f)
    chunks = known[1] if known is not None else chunks_of(f) or 1
    # More stages than the layers and both ends could fill: told as a cut that is wrong.
    if not f.has("num_layers") or chunks > f.number("num_layers") + 2:
        return None
    return schedule_name_of(f), chunks


def cut_fault(f: Facts) -> str:
    """Say why the layers cannot be dealt out to the stages, or ''."""
    told = layers_broken(f) or virtual_broken(f) or layout_conflicts(f) or uneven_virtual(f)
    if f.pp == 1 or not f.has("num_layers") or told:
        return ""
    found = resolved(f)
    if found is None:
        chunks = chunks_of(f) or 1
        if chunks > f.number("num_layers") + 2:
            return f"{PP} {f.pp} x {chunks} stages per rank: more than the layers can fill"
        layout = f.config.pipeline_model_parallel_layout
        if layout is None or f.dp == 0:
            return ""
        found = ("1f1b", 1)
    name, chunks = found
    try:
        placement = place_stages(name, f.pp, chunks, 1, Options())
        parts = cut_model(f.config, placement)
    except UserError as error:
        return str(error)
    idle = [
        rank
        for rank in range(f.pp)
        if not any(parts[stage].uses for stage in range(len(parts)) if placement[stage] == rank)
    ]
    if idle:
        return f"pipeline rank {idle[0]} would hold no layer; give each rank at least one"
    return ""


def microbatch_counts(f: Facts) -> tuple[int, ...]:
    """Microbatches per step along the run, where the batch sizes are legal."""
    if not f.batch_unit or f.dp == 0 or not f.has("seq_length"):
        return ()
    if ramp_fault(f) or schedule_fault(f):
        return ()
    sizes = {size for _, size in build_ramp(f.config, f.dp)}
    return tuple(sorted(size // f.batch_unit for size in sizes if size % f.batch_unit == 0))


def group_fault(f: Facts) -> str:
    """Say why the group size fits no schedule, or ''."""
    size, found = f.config.microbatch_group_size_per_vp_stage, resolved(f)
    if size is None or found is None:
        return ""
    name, chunks = found
    if name not in (*INTERLEAVED, AUTO) or chunks == 1:
        return (
            f"{GROUP} {size} belongs to virtual stages, {NAME} is {name} with {chunks} stages per "
            f"rank; nearest legal: {PER_RANK} 2 with {NAME} {' or '.join(INTERLEAVED)}, or leave "
            "it out"
        )
    if size < f.pp:
        return (
            f"{GROUP} {size} is smaller than {PP} {f.pp}, which the first of a group must pass "
            f"before the next stage; nearest legal: {f.pp}"
        )
    return ""


def microbatches_fault(f: Facts) -> str:
    """Say which number of microbatches the schedule cannot run, or ''."""
    found = resolved(f)
    if found is None:
        return ""
    name, table = found[0], file_table(f)
    if name != AUTO and table is None:
        return ""  # all others run any number
    counts = microbatch_counts(f)
    if not counts:
        return ""
    if table is not None and set(counts) != {table.num_microbatches}:
        legal = table.num_microbatches * f.batch_unit
        return (
            f"{NAME} {name}: a table of {table.num_microbatches} microbatches, the global batch "
            f"has {' and '.join(map(str, counts))}; nearest legal: --global-batch-size {legal}"
        )
    if name == AUTO and len(counts) > 1:
        return (
            f"{NAME} {AUTO} places the stages by the number of microbatches, which the growing "
            f"batch changes ({counts[0]} to {counts[-1]}); nearest legal: a constant "
            f"--global-batch-size {nearest_multiples(f.batch_unit, counts[-1] * f.batch_unit)}, "
            f"or {NAME} 1f1b"
        )
    return ""


PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        "schedule-name",
        schedule_unknown,
        lambda f: (
            f"{NAME} {f.config.pipeline_schedule} is unknown; legal: "
            f"{', '.join(SCHEDULE_NAMES)}, file:PATH"
        ),
    ),
    Rule(
        "flags-need-pipeline",
        lambda f: f.pp == 1 and bool(needs_pipeline(f)),
        lambda f: (
            f"{needs_pipeline(f)} needs a pipeline, but {PP} is {f.pp}; nearest legal: {PP} 2, or "
            "leave it out"
        ),
    ),
    Rule("schedule-file", lambda f: bool(file_fault(f)), file_fault),
    Rule("schedule-chunks", chunks_broken, chunks_message),
    Rule(
        "layout-exclusive",
        lambda f: bool(layout_conflicts(f)),
        lambda f: (
            f"{LAYOUT} says where every layer is, {layout_conflicts(f)} says it otherwise: give "
            "one of them"
        ),
    ),
    Rule(
        "uneven-virtual",
        uneven_virtual,
        lambda f: (
            f"{PER_STAGE} {f.config.num_layers_per_virtual_pipeline_stage} wants equal stages, "
            f"{given(f, ENDS)} unequal ones; nearest legal: {PER_RANK} instead of {PER_STAGE}"
        ),
    ),
    Rule("pipeline-cut", lambda f: bool(cut_fault(f)), cut_fault),
    Rule("schedule-group", lambda f: bool(group_fault(f)), group_fault),
    Rule("schedule-microbatches", lambda f: bool(microbatches_fault(f)), microbatches_fault),
)
