"""Reading a Hugging Face directory as a bundle: everything is consumed, or it fails.

The tensors that the family's table places must be there, no other tensor may be, except
buffers that are computed from the configuration. Tied embeddings are what config.json says
and what the files hold, never a guess.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path

import torch

from megatron_lite.checkpoint.convert.bundle import Bundle, check_bundle, logical_specs
from megatron_lite.checkpoint.convert.hf_config import Architecture, parse_config
from megatron_lite.checkpoint.convert.hf_families import Family
from megatron_lite.checkpoint.convert.hf_source import (
    CONFIG_FILE,
    HFSource,
    SourceTensor,
    open_source,
    read_json,
)
from megatron_lite.checkpoint.convert.hf_tensors import Stored, import_tensors, stored_tensors
from megatron_lite.checkpoint.convert.tokenizer_files import find_assets
from megatron_lite.checkpoint.convert.transform import WEIGHT_DTYPES, with_precision
from megatron_lite.errors import DamagedError, UserError

MAX_TOLD = 20


def read_hf(
    directory: str | Path, *, scratch: Path | None = None, allow_unused: bool = False
) -> Bundle:
    """Read a Hugging Face directory; tensors are read when the bundle's recipes run.

    Args:
        directory: config.json, safetensors (one file, or sharded with an index), and
            tokenizer files.
        scratch: directory for safetensors made of `.bin` pickles, to be kept until the
            bundle is written; None refuses pickles.
        allow_unused: leave out tensors that the architecture does not know, with a note.

    Raises:
        UserError: an architecture or a field that does not convert, or no weights.
        DamagedError: missing, unexpected or misshapen tensors, or damaged files.
    """
    place = Path(directory)
    if not place.is_dir():
        raise UserError(f"{place}: is not a directory")
    found = parse_config(read_json(place, CONFIG_FILE), str(place / CONFIG_FILE))
    source = _named(open_source(place, scratch), found.family, place)
    found = _without_absent_depths(found, source, place)
    stored = stored_tensors(
        found.family, logical_specs(found.config, found.vocab_size), found.config.num_layers or 0
    )
    notes = [*found.notes, *source.notes]
    notes += _account(found, stored, source, place, allow_unused)
    dtypes = {item.name: source.tensors[item.name].record.dtype for item in stored}
    odd = sorted(f"{name} {dtype}" for name, dtype in dtypes.items() if dtype not in WEIGHT_DTYPES)
    if odd:
        raise UserError(f"{place}: weights of other formats do not convert: {', '.join(odd[:5])}")
    tensors = import_tensors(stored, dtypes, source.read)
    bundle = Bundle(
        config=with_precision(found.config, dtypes[stored[0].name]),
        vocab_size=found.vocab_size,
        tensors=tensors,
        source=f"hf {found.family.architecture}",
        assets=find_assets(place),
        notes=tuple(notes),
    )
    check_bundle(bundle)
    return bundle


def _named(source: HFSource, family: Family, place: Path) -> HFSource:
    """Give the tensors of a bare body, saved without its prefix, their full names."""
    names = source.tensors.keys()
    if any(name.startswith(family.prefix) for name in names):
        return source
    full: dict[str, SourceTensor] = {}
    short: dict[str, str] = {}
    for name, tensor in source.tensors.items():
        whole = name if name == family.head else family.prefix + name
        full[whole], short[whole] = tensor, name
    note = f"note: {place} holds a bare body: names are read with the prefix {family.prefix!r}"
    return HFSource(full, (*source.notes, note))


def _without_absent_depths(found: Architecture, source: HFSource, place: Path) -> Architecture:
    """Multi-token prediction that config.json tells of and no file has: transformers saves so."""
    depths, layers = found.config.mtp_num_layers or 0, found.config.num_layers
    prefix = f"{found.family.prefix}layers.{layers}."
    if not depths or any(name.startswith(prefix) for name in source.tensors):
        return found
    note = (
        f"note: {place}: num_nextn_predict_layers is {depths}, but no file has layer {layers}: "
        "read without multi-token prediction"
    )
    config = dataclasses.replace(found.config, mtp_num_layers=None)
    return dataclasses.replace(found, config=config, notes=(*found.notes, note))


def _account(
    found: Architecture,
    stored: Collection[Stored],
    source: HFSource,
    place: Path,
    allow_unused: bool,
) -> list[str]:
    """Compare what the files hold with what the model needs; return notes."""
    wanted = {item.name: item.shape for item in stored}
    shapes = {name: tensor.record.shape for name, tensor in source.tensors.items()}
    derived = [re.compile(pattern) for pattern in found.family.derived]
    extra = {n for n in shapes.keys() - wanted.keys() if not any(d.fullmatch(n) for d in derived)}
    notes: list[str] = []
    if found.tied and found.family.head in extra:
        extra.discard(found.family.head)
        _check_tied_head(found, stored, source, place)
    lines = [_missing(found, name, place) for name in sorted(wanted.keys() - shapes.keys())]
    if extra and allow_unused:
        notes.append(f"note: {place}: tensors left out on demand: {', '.join(sorted(extra))}")
    else:
        lines += [f"unexpected: {name} {list(shapes[name])}" for name in sorted(extra)]
    lines += [
        f"shape: {name} is {list(shapes[name])}, config.json wants {list(shape)}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    if lines:
        told = "\n  ".join(lines[:MAX_TOLD])
        more = f"\n  and {len(lines) - MAX_TOLD} more" if len(lines) > MAX_TOLD else ""
        raise DamagedError(f"{place}: {len(lines)} faults:\n  {told}{more}")
    return notes


def _missing(found: Architecture, name: str, place: Path) -> str:
    if name == found.family.head:
        return (
            f"missing: {name}, although {place / CONFIG_FILE} says tie_word_embeddings false "
            "(or says nothing, which means false for this family)"
        )
    return f"missing: {name}"


def _check_tied_head(
    found: Architecture, stored: Collection[Stored], source: HFSource, place: Path
) -> None:
    """A head beside tied embeddings must be the embedding, bit for bit."""
    head = found.family.head
    embedding = next(item.name for item in stored if _is_embedding(item))
    pair = [source.tensors[name].record for name in (head, embedding)]
    same = (pair[0].dtype, pair[0].shape) == (pair[1].dtype, pair[1].shape)
    if same:
        left, right = (source.read(name, lambda view: view) for name in (head, embedding))
        same = torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    if not same:
        raise DamagedError(
            f"{place}: config.json says tie_word_embeddings true, but {head} differs from "
            f"{embedding}: set it to false to use both, or remove {head}"
        )


def _is_embedding(item: Stored) -> bool:
    return item.parts[0].name == "embedding.word_embeddings.weight"
