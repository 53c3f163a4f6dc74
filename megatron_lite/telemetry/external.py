"""TensorBoard and Weights & Biases: optional packages, opened only on the speaking rank.

Tags are Megatron's. A run has exactly one writer of each, whatever the layout. Secrets
(API keys) are the packages' own business and come from the environment; what is handed
over as configuration is stripped of anything that looks like one.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from megatron_lite.errors import UserError
from megatron_lite.telemetry.lines import perplexity
from megatron_lite.telemetry.options import TelemetryOptions
from megatron_lite.telemetry.records import Rates, TrainRow, ValidRow

SECRET_NAME = re.compile(r"api_?key|secret|password|credential|(auth|access|hub|hf)_token", re.I)


def wanted_packages(options: TelemetryOptions) -> dict[str, str]:
    """Packages that the flags ask for, with the flag and its value."""
    wanted = {}
    if options.tensorboard_dir is not None:
        wanted["tensorboard"] = f"--tensorboard-dir {options.tensorboard_dir}"
    if options.wandb_project:
        wanted["wandb"] = f"--wandb-project {options.wandb_project}"
    return wanted


def missing_packages(options: TelemetryOptions) -> dict[str, str]:
    """Look for the packages that the flags ask for, without importing them.

    They record what the run does and do not change it: without one the run goes on.

    Returns:
        Package -> warning.
    """
    return {
        name: f"{flag}: the package {name} is not installed, nothing is recorded there; "
        f"pip install {name}"
        for name, flag in wanted_packages(options).items()
        if importlib.util.find_spec(name) is None
    }


def import_package(name: str, flag: str) -> Any:
    """Import an installed package; one that does not load is the user's to repair."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{flag}: {name} is installed but does not import: {error}") from error


def public_config(config: Mapping[str, object]) -> dict[str, object]:
    """Drop entries whose name says that they are secret."""
    return {name: value for name, value in config.items() if not SECRET_NAME.search(name)}


def train_scalars(row: TrainRow, rates: Rates, options: TelemetryOptions) -> dict[str, float]:
    """One iteration under Megatron's tags; what was not computed is left out."""
    values: dict[str, float | None] = {
        "learning-rate": row.learning_rate,
        "weight-decay": row.weight_decay,
        "batch-size": row.global_batch_size,
        "lm loss": row.lm_loss,
        **{name.replace("_", " "): loss for name, loss in row.further_losses.items()},
        **row.figures,
        "grad-norm": row.grad_norm,
        "num-zeros": row.num_zeros,
        "params-norm": row.params_norm,
        "iteration-time": row.elapsed_ms * 1e-3,
        "tokens-per-second": rates.tokens_per_s,
        "throughput": rates.model_tflops_per_rank,
        "mfu": rates.mfu,
    }
    if options.log_loss_scale_to_tensorboard:
        values["loss-scale"] = row.loss_scale
    return {tag: value for tag, value in values.items() if value is not None}


def valid_scalars(row: ValidRow, options: TelemetryOptions) -> dict[str, float]:
    """One evaluation under Megatron's tags."""
    scalars: dict[str, float] = {}
    suffix = "validation" if row.split == "valid" else row.split
    for name, loss in {"lm loss": row.lm_loss, **row.further_losses}.items():
        scalars[f"{name} {suffix}"] = loss
        if options.log_validation_ppl_to_tensorboard:
            scalars[f"{name} {suffix} ppl"] = perplexity(loss)
    return scalars


class TensorboardSink:
    """Scalars for TensorBoard in `--tensorboard-dir`."""

    def __init__(self, options: TelemetryOptions) -> None:
        self._options = options
        module = import_package("torch.utils.tensorboard", "--tensorboard-dir")
        self._writer = module.SummaryWriter(
            log_dir=options.tensorboard_dir, max_queue=options.tensorboard_queue_size
        )

    def header(self, record: Mapping[str, object]) -> None:
        """Write the constants as text."""
        lines = (f"    {name}: {value}" for name, value in public_config(record).items())
        self._writer.add_text("header", "\n".join(lines))

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Write any scalars (timers, memory)."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, iteration)

    def train(self, row: TrainRow, rates: Rates) -> None:
        """Write an iteration every `--tensorboard-log-interval`."""
        if row.iteration % self._options.tensorboard_log_interval:
            return
        self.scalars(train_scalars(row, rates, self._options), row.iteration)
        self._writer.add_scalar("lm loss vs samples", row.lm_loss, row.consumed_samples)

    def valid(self, row: ValidRow) -> None:
        """Write an evaluation."""
        self.scalars(valid_scalars(row, self._options), row.iteration)

    def event(self, name: str, iteration: int, details: Mapping[str, object]) -> None:
        """Write an event as text."""
        self._writer.add_text("event", f"{name} {dict(details)}", iteration)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """One wandb run; online, offline or disabled as wandb's own environment says."""

    def __init__(self, options: TelemetryOptions) -> None:
        self._options = options
        self._wandb = import_package("wandb", "--wandb-project")
        self._run: Any = None

    def header(self, record: Mapping[str, object]) -> None:
        """Start the run with the constants as its configuration."""
        options = self._options
        try:
            self._run = self._wandb.init(
                project=options.wandb_project,
                name=options.wandb_exp_name,
                entity=options.wandb_entity,
                dir=options.wandb_save_dir,
                config=public_config(record),
            )
        except Exception as error:
            # Whatever the package raises at start-up is for the user to repair.
            raise UserError(
                f"--wandb-project {options.wandb_project}: wandb.init failed: {error}"
            ) from error

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Log any scalars (timers, memory)."""
        if self._run is not None:
            self._run.log(dict(values), step=iteration)

    def train(self, row: TrainRow, rates: Rates) -> None:
        """Log an iteration every `--tensorboard-log-interval`, as Megatron does."""
        if row.iteration % self._options.tensorboard_log_interval == 0:
            self.scalars(train_scalars(row, rates, self._options), row.iteration)

    def valid(self, row: ValidRow) -> None:
        """Log an evaluation."""
        self.scalars(valid_scalars(row, self._options), row.iteration)

    def event(self, name: str, iteration: int, details: Mapping[str, object]) -> None:
        """Nothing: events are for the file and the console."""

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
