"""Our own checkpoints as a side of a conversion: weights in and out, without a run.

Reading takes the weights of any checkpoint, or its fp32 masters; writing makes a
checkpoint that `--load` accepts: weights and the facts of the architecture, at step 0.
Tokenizer files lie in SAVE/tokenizer/, outside of the transaction and written before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.convert.bundle import Bundle, check_bundle
from megatron_lite.checkpoint.convert.sentencepiece_file import read_sentencepiece
from megatron_lite.checkpoint.convert.tokenizer_files import (
    CONFIG_FILE,
    SENTENCEPIECE_FILE,
    asset_bytes,
    find_assets,
    sentencepiece_assets,
)
from megatron_lite.checkpoint.direct import LogicalTensor, write_directly
from megatron_lite.checkpoint.files import FileSystem, storage_error
from megatron_lite.checkpoint.places import check_save_place
from megatron_lite.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_lite.checkpoint.save import SaveResult
from megatron_lite.checkpoint.state import check_state, converted_state, is_converted
from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.checkpoint.tensors import DTYPE_NAMES
from megatron_lite.config.resolve import resolved_values
from megatron_lite.config.schema import Config, ModelConfig, MoEConfig, flag_fields
from megatron_lite.data.tokenizer import SENTENCEPIECE_NAMES
from megatron_lite.errors import DamagedError, UserError

TOKENIZER_DIRECTORY = "tokenizer"
MASTER = "optim/master/"
# What of a run's configuration describes its model; the rest is how it was trained.
KEPT_FIELDS = (
    *(field.name for group in (ModelConfig, MoEConfig) for field in flag_fields(group)),
    *("seq_length", "bf16", "fp16", "fp64", "tokenizer_type", "tokenizer_model"),
)


def read_native(directory: str | Path, step: int | None = None, *, masters: bool = False) -> Bundle:
    """Read the weights of a checkpoint of ours, whatever layout saved it.

    Args:
        directory: a SAVE root or one checkpoint directory.
        step: this step instead of the newest that verifies.
        masters: take the fp32 masters where the checkpoint has them.

    Raises:
        UserError: nothing is there. DamagedError: nothing there verifies.
    """
    checkpoint = open_checkpoint(directory, step, verify="structure")
    state = checkpoint.state
    check_state(state, checkpoint.directory)
    weights = [name for name in checkpoint.names if not name.startswith("optim/")]
    stored = {name: name for name in weights}
    if masters:
        have = set(checkpoint.names)
        stored = {n: MASTER + n if MASTER + n in have else n for n in weights}
    config = _model_config(state["config"])
    vocab_size = state["facts"]["vocab_size"]
    assets, notes = _tokenizer_assets(checkpoint, config, vocab_size)
    passed_over = checkpoint.found.passed_over
    notes += [f"warning: step {item.step} passed over: {item.reason}" for item in passed_over]
    bundle = Bundle(
        config=config,
        vocab_size=vocab_size,
        tensors={name: _tensor(checkpoint, name, stored[name]) for name in weights},
        source=state["origin"]["source"] if is_converted(state) else f"step {checkpoint.step}",
        assets=assets,
        notes=tuple(notes),
    )
    check_bundle(bundle)
    return bundle


def _tensor(checkpoint: Checkpoint, name: str, stored: str) -> LogicalTensor:
    def load() -> Tensor:
        return checkpoint.read(stored)

    dtype = DTYPE_NAMES[checkpoint.dtype(stored)]
    return LogicalTensor(name, dtype, checkpoint.shape(stored), load)


def _model_config(saved: Mapping[str, Any]) -> Config:
    names = {field.name for field in fields(Config)}.intersection(KEPT_FIELDS)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in saved.items()
        if name in names
    }
    try:
        return Config(**values)
    except TypeError as error:
        raise DamagedError(f"the configuration of the checkpoint is not usable: {error}") from None


def _tokenizer_assets(
    checkpoint: Checkpoint, config: Config, vocab_size: int
) -> tuple[dict[str, Path | bytes], list[str]]:
    """Find the tokenizer: beside the checkpoint, or where the run had it."""
    folder = checkpoint.directory.parent.parent / TOKENIZER_DIRECTORY
    if checkpoint.directory.parent.name == "attempts" and folder.is_dir():
        found = find_assets(folder)
        if found:
            return found, []
    if config.tokenizer_type not in SENTENCEPIECE_NAMES or not config.tokenizer_model:
        return {}, [
            f"note: no files of the tokenizer {config.tokenizer_type} go along; --tokenizer-dir "
            "names a directory with some"
        ]
    model = Path(config.tokenizer_model)
    if not model.is_file():
        return {}, [
            f"note: the tokenizer {model} is not there; --tokenizer-dir names its directory"
        ]
    trained_with = checkpoint.state["facts"].get("tokenizer_type")
    if isinstance(trained_with, Mapping):
        wanted = trained_with.get("model_sha256")
        if wanted not in (None, hashlib.sha256(model.read_bytes()).hexdigest()):
            return {}, [
                f"warning: {model} is not the tokenizer of the run (its sha256 differs) and does "
                "not go along; --tokenizer-dir names the right one"
            ]
    if (model.parent / CONFIG_FILE).is_file():
        return find_assets(model.parent), []
    return own_tokenizer(model, config.tokenizer_type or "", vocab_size)


def own_tokenizer(
    model: Path, tokenizer_type: str, vocab_size: int
) -> tuple[dict[str, Path | bytes], list[str]]:
    """Return the files of a SentencePiece model, and a note when it has another vocabulary."""
    size = len(read_sentencepiece(model).pieces)
    notes = []
    if size != vocab_size:
        notes = [f"warning: {model} has {size} pieces, the model {vocab_size}"]
    return sentencepiece_assets(model, tokenizer_type), notes


def write_native(bundle: Bundle, directory: str | Path, *, overwrite: bool = False) -> SaveResult:
    """Write a bundle as a checkpoint of step 0 that a run can start from.

    Args:
        bundle: checked.
        directory: the SAVE root.
        overwrite: replace a converted checkpoint that is there.

    Raises:
        UserError, DamagedError: nothing was published.
    """
    root, files = Path(directory), FileSystem()
    check_save_place(root)
    others = [step for step in published_steps(root) if step != 0]
    if others:
        raise UserError(
            f"{root}: holds checkpoints of a run (step {others[0]}), which would be preferred to "
            "the converted one: convert into another directory"
        )
    folder = root / TOKENIZER_DIRECTORY
    config = _state_config(bundle, folder)
    state = converted_state(plain_json(resolved_values(config, 1)), bundle.model, bundle.source)
    written: list[Path] = []
    try:
        _write_assets(bundle, folder, files, overwrite, written)
        tensors = list(bundle.tensors.values())
        return write_directly(root, 0, tensors, plain_json(state), overwrite=overwrite, files=files)
    except BaseException as error:
        _remove(written, folder, files)
        if isinstance(error, OSError):
            raise storage_error(error, root) from error
        raise


def _state_config(bundle: Bundle, folder: Path) -> Config:
    """The configuration of the state: the model, and a tokenizer that exists."""
    config = replace(bundle.config, micro_batch_size=1, train_iters=1)
    if config.seq_length is None:
        config = replace(config, seq_length=config.max_position_embeddings)
    if config.tokenizer_type is not None:
        return config
    model = bundle.assets.get(SENTENCEPIECE_FILE)
    if isinstance(model, Path) and len(read_sentencepiece(model).pieces) == bundle.vocab_size:
        place = str(folder / SENTENCEPIECE_FILE)
        # Without a leading BOS, which a command can still ask for by another tokenizer type.
        return replace(config, tokenizer_type=SENTENCEPIECE_NAMES[0], tokenizer_model=place)
    return replace(config, tokenizer_type="NullTokenizer", vocab_size=bundle.vocab_size)


def _write_assets(
    bundle: Bundle, folder: Path, files: FileSystem, overwrite: bool, written: list[Path]
) -> None:
    if not bundle.assets:
        return
    files.ensure_directory(folder)
    for name, asset in bundle.assets.items():
        path = folder / name
        if overwrite:
            files.remove_file(path)
        files.write_file(path, asset_bytes(asset))
        written.append(path)
    files.sync_directory(folder)


def _remove(written: list[Path], folder: Path, files: FileSystem) -> None:
    """Take back the assets of a conversion that failed; best effort."""
    cleaner: Callable[[Path], None] = files.remove_file
    try:
        for path in written:
            cleaner(path)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    except OSError:
        return
