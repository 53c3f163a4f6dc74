"""Rules of data, tokenizer, checkpoints, logging and run control."""

from __future__ import annotations

import difflib
import math
import re

from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.legal import nearest_multiples
from megatron_lite.config.model_rules import at_least_rule, fraction_rule
from megatron_lite.config.schema import flag_fields

SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
NEED_MODEL = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
NEED_CHECKPOINT = (
    *("finetune", "use_checkpoint_args", "use_mp_args_from_checkpoint_args"),
    "moe_use_upcycling",
)
CREDENTIALS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:[^/]*@|.*\?)")
# One slash after the protocol, or nothing after two: file:/x, s3://
HALF_URL = re.compile(r"[a-z][a-z0-9+.-]+:(/(?!/)|///*$)", re.IGNORECASE)
NUMBER = re.compile(r"[.0-9]+")


def is_number(word: str) -> bool:
    """Say whether a word reads as a number (a blend's weight)."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def data_sources(f: Facts) -> list[str]:
    """Name the data sources that are given."""
    c = f.config
    sources = ["--mock-data"] if c.mock_data else []
    sources += ["--data-path"] if c.data_path else []
    sources += ["--data-args-path"] if c.data_args_path else []
    per_split = [name for name in SPLIT_PATHS if getattr(c, name)]
    return sources + ([f"--{per_split[0].replace('_', '-')}"] if per_split else [])


def sources_message(f: Facts) -> str:
    """Tell that exactly one source is needed."""
    given = data_sources(f)
    legal = (
        "--data-path, --data-args-path, --train-data-path (with --valid-data-path, "
        "--test-data-path), --mock-data"
    )
    if not given:
        return f"no data: give one of {legal}"
    return f"{' and '.join(given)} are different data: give one of {legal}"


def blend_fault(words: tuple[str, ...]) -> str:
    """Say what is wrong with a list of prefixes or weight-prefix pairs, or ''."""
    numeric = [is_number(word) for word in words]
    if len(words) % 2 or not any(numeric[::2]):
        numbers = [word for word, number in zip(words, numeric, strict=True) if number]
        if numbers and len(words) > 1:
            return f"{', '.join(numbers)}: weights and prefixes alternate, WEIGHT PREFIX ..."
        return ""
    if not all(numeric[::2]):
        return "some prefixes have a weight and some have none: give all or none"
    if not all(0 < float(weight) < math.inf for weight in words[::2]):
        return "every weight must be a finite number greater than 0"
    return ""


def blend_faults(f: Facts) -> list[str]:
    """Collect the faults of all path lists."""
    faults = []
    for name in ("data_path", *SPLIT_PATHS):
        words = getattr(f.config, name)
        fault = blend_fault(words) if words else ""
        if fault:
            faults.append(f"--{name.replace('_', '-')} {' '.join(words)}: {fault}")
    return faults


def urls_with_credentials(f: Facts) -> str:
    """Name the checkpoint flags whose URL holds credentials, without their values."""
    names = ("load", "pretrained_checkpoint", "save")
    flags = [name for name in names if CREDENTIALS.match(getattr(f.config, name) or "")]
    return ", ".join(f"--{name.replace('_', '-')}" for name in flags)


def misspelled_url(f: Facts) -> str:
    """Name the first checkpoint flag whose value is half a URL, and the value, or ''."""
    for name in ("load", "pretrained_checkpoint", "save"):
        text = getattr(f.config, name) or ""
        if HALF_URL.match(text):
            return f"--{name.replace('_', '-')} {text}"
    return ""


def split_fault(f: Facts) -> str:
    """Say what is wrong with --split, or ''."""
    text = f.config.split
    if text is None:
        return ""
    if any(getattr(f.config, name) for name in SPLIT_PATHS):
        return "excluded by --train-data-path and its like, whose files are the split"
    words = NUMBER.findall(text)
    # Letters too: in 1e5,1 an exponent would pass for a share of its own.
    foreign = re.search(r"-|[^\W\d]", text)
    if not 1 <= len(words) <= 3 or not all(map(is_number, words)) or foreign:
        return "expected up to three numbers >= 0 (train, validation, test), as in 98,2,0"
    if not 0 < sum(float(word) for word in words) < math.inf:
        return "the shares sum to 0 or to infinity; for example 98,2,0"
    return ""


def resume_fields(f: Facts) -> str:
    """Say which names of --allow-resume-change are no fields, or ''."""
    names = [field.name for field in flag_fields()]
    faults = []
    for word in f.config.allow_resume_change:
        name = word.removeprefix("--").replace("-", "_")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            faults.append(word + (f" (did you mean {close[0]}?)" if close else ""))
    return ", ".join(faults)


def flag_names(f: Facts, fields: tuple[str, ...]) -> list[str]:
    """Spell those of the fields that are given."""
    return [f"--{name.replace('_', '-')}" for name in fields if getattr(f.config, name)]


def retain_fault(f: Facts) -> bool:
    """Retained steps must be saved ones."""
    if not f.has("save_retain_interval", "save_interval"):
        return False
    return f.number("save_retain_interval") % f.number("save_interval") != 0


def needs_rule(rule_id: str, field: str, needed: str) -> Rule:
    """A flag that makes no sense without another one."""
    name, other = f"--{field.replace('_', '-')}", f"--{needed.replace('_', '-')}"
    return Rule(
        rule_id,
        lambda f: (
            getattr(f.config, field) not in (None, False) and getattr(f.config, needed) is None
        ),
        lambda f: f"{name} needs {other}, which is not given",
    )


RUN_RULES: tuple[Rule, ...] = (
    Rule("one-data-source", lambda f: len(data_sources(f)) != 1, sources_message),
    Rule(
        "train-path",
        lambda f: (
            bool(f.config.valid_data_path or f.config.test_data_path)
            and not f.config.train_data_path
            and f.config.train_iters != 0
        ),
        lambda f: "--valid-data-path and --test-data-path need --train-data-path beside them",
    ),
    Rule("blend", lambda f: bool(blend_faults(f)), lambda f: "; ".join(blend_faults(f))),
    Rule(
        "split",
        lambda f: bool(split_fault(f)),
        lambda f: f"--split {f.config.split}: {split_fault(f)}",
    ),
    Rule(
        "tokenizer-required",
        lambda f: (
            f.config.tokenizer_type is None
            and f.config.vocab_file is None
            and f.config.merge_file is None
        ),
        lambda f: (
            "--tokenizer-type is required: SentencePieceTokenizer with --tokenizer-model, "
            "ByteLevelTokenizer, or NullTokenizer with --vocab-size"
        ),
    ),
    Rule(
        "tokenizer-model",
        lambda f: f.config.tokenizer_type in NEED_MODEL and f.config.tokenizer_model is None,
        lambda f: f"--tokenizer-type {f.config.tokenizer_type} needs --tokenizer-model",
    ),
    Rule(
        "tokenizer-vocabulary",
        lambda f: f.config.tokenizer_type == "NullTokenizer" and f.config.vocab_size is None,
        lambda f: "--tokenizer-type NullTokenizer needs --vocab-size",
    ),
    at_least_rule("num_workers", 0),
    at_least_rule("data_check_interval", 0),
    fraction_rule("mid_level_dataset_surplus"),
    *(
        at_least_rule(field, 1)
        for field in (
            "save_interval",
            "save_retain_interval",
            "keep_last",
            "max_failed_saves",
            "log_interval",
            "tensorboard_log_interval",
            "tensorboard_queue_size",
            "exit_interval",
            "exit_duration_in_mins",
        )
    ),
    at_least_rule("ckpt_step", 0),
    at_least_rule("manual_gc_interval", 0),
    Rule(
        "save-needs-interval",
        lambda f: f.config.save is not None and f.config.save_interval is None,
        lambda f: f"--save {f.config.save} needs --save-interval (steps between saves)",
    ),
    needs_rule("retain-needs-save", "save_retain_interval", "save"),
    needs_rule("async-needs-save", "async_save", "save"),
    Rule(
        "retain-needs-steps",
        lambda f: f.config.save_retain_interval is not None and f.config.save_interval == "auto",
        lambda f: (
            f"--save-retain-interval {f.config.save_retain_interval} needs a number of steps in "
            "--save-interval, which is auto: keep checkpoints with --keep-last"
        ),
    ),
    Rule(
        "mean-time-positive",
        lambda f: (
            f.config.mean_time_between_failures is not None
            and f.config.mean_time_between_failures <= 0
        ),
        lambda f: (
            f"--mean-time-between-failures {f.config.mean_time_between_failures} must be greater "
            "than 0 seconds"
        ),
    ),
    Rule(
        "failures-need-auto",
        lambda f: (
            f.config.mean_time_between_failures is not None and f.config.save_interval != "auto"
        ),
        lambda f: "--mean-time-between-failures needs --save-interval auto",
    ),
    Rule(
        "url-credentials",
        lambda f: bool(urls_with_credentials(f)),
        lambda f: (
            f"{urls_with_credentials(f)}: credentials in a URL would be written into checkpoints "
            "and logs: give PROTOCOL://BUCKET/FOLDER, and them in the environment"
        ),
    ),
    Rule(
        "url-spelling",
        lambda f: bool(misspelled_url(f)),
        lambda f: (
            f"{misspelled_url(f)}: neither a path nor a URL: give /PATH, file:///PATH or "
            "PROTOCOL://BUCKET/FOLDER"
        ),
    ),
    Rule(
        "save-outlives-run",
        lambda f: (f.config.save or "").lower().startswith("memory://"),
        lambda f: (
            f"--save {f.config.save}: lies in the memory of one process, where no other process "
            "sees it and nothing is left of it at the end: save to a directory or a store"
        ),
    ),
    needs_rule("keep-needs-save", "keep_last", "save"),
    needs_rule("overwrite-needs-save", "overwrite_save", "save"),
    needs_rule("step-needs-load", "ckpt_step", "load"),
    Rule(
        "weights-source",
        lambda f: (
            f.config.load is None
            and f.config.pretrained_checkpoint is None
            and any(getattr(f.config, name) for name in NEED_CHECKPOINT)
        ),
        lambda f: (
            f"{', '.join(flag_names(f, NEED_CHECKPOINT))} needs a checkpoint: give --load "
            "or --pretrained-checkpoint"
        ),
    ),
    needs_rule("weights-need-dump", "debug_dump_weights", "debug_dump"),
    needs_rule("activations-need-dump", "debug_dump_activations", "debug_dump"),
    Rule(
        "retain-multiple",
        retain_fault,
        lambda f: (
            f"--save-retain-interval {f.config.save_retain_interval} must be a multiple of "
            f"--save-interval {f.config.save_interval}; nearest legal: "
            f"{nearest_multiples(f.number('save_interval'), f.number('save_retain_interval'))}"
        ),
    ),
    Rule(
        "missing-checkpoint",
        lambda f: f.config.exit_on_missing_checkpoint and f.config.allow_missing_checkpoint,
        lambda f: (
            "--exit-on-missing-checkpoint and --allow-missing-checkpoint contradict each other: "
            "give one"
        ),
    ),
    Rule(
        "resume-fields",
        lambda f: bool(resume_fields(f)),
        lambda f: f"--allow-resume-change: no such field: {resume_fields(f)}",
    ),
)
