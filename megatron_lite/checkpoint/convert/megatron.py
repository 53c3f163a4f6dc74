"""Megatron-LM's checkpoints in and out: `read_megatron`, `write_megatron`.

In: `torch` (a file per tensor and pipeline rank, virtual stages too) and `torch_dist`,
weights only. Tensor-parallel pieces are put together again: queries, keys and values lie
group by group, [q..q, k, v] along dim 0; a gated MLP is [gate; up] on each rank; padding
rows of the vocabulary are cut off. Every tensor of the source is used and every tensor of
the model is found, or the reader fails and names them. Memory: one logical tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.convert.bundle import Bundle, check_bundle, logical_specs
from megatron_lite.checkpoint.convert.megatron_args import config_from, true_vocabulary
from megatron_lite.checkpoint.convert.megatron_names import (
    DROPPED,
    core_name,
    fused_name,
    global_layers,
    renumbered,
)
from megatron_lite.checkpoint.convert.megatron_source import (
    NEEDS_TRUST,
    Located,
    RankTensors,
    check_ranks,
    locate,
    unpickle,
)
from megatron_lite.checkpoint.convert.megatron_write import TOKENIZER_DIRECTORY, write_megatron
from megatron_lite.checkpoint.convert.tokenizer_files import find_assets
from megatron_lite.checkpoint.convert.transform import with_precision
from megatron_lite.checkpoint.direct import LogicalTensor
from megatron_lite.checkpoint.shards import ShardTensor
from megatron_lite.checkpoint.tensors import TORCH_DTYPES, tensor_over
from megatron_lite.checkpoint.verify import map_range
from megatron_lite.config.plan import ModelShape
from megatron_lite.config.schema import Config
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.spec.params import ParamSpec

__all__ = ["read_megatron", "write_megatron"]

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
MAX_TOLD = 20
OLDEST_VERSION = 2.0  # before, queries, keys and values lay in other orders


@dataclass(frozen=True)
class Piece:
    """One tensor-parallel rank's piece: where its bytes are, and where they came from."""

    path: Path
    tensor: ShardTensor
    origin: str

    def use(self, take: Callable[[Tensor], bool]) -> None:
        """Hand the mapped tensor to `take`, which must not keep a view of it.

        Raises:
            DamagedError: `take` says no: this is a copy that differs from another rank's.
        """
        with map_range(self.path, self.tensor) as data:
            view = tensor_over(data, self.tensor.dtype, self.tensor.shape)
            agreed = take(view)
            del view  # the mapping cannot be closed while a tensor looks into it
        if not agreed:
            raise DamagedError(f"{self.origin}: differs from the copy on another rank")


# Pieces of each stored tensor, in the order of the tensor-parallel ranks.
Stored = Mapping[str, Sequence[Piece]]


@contextmanager
def read_megatron(
    directory: str | Path,
    *,
    step: int | None = None,
    trust_pickle: bool = False,
    true_vocab_size: int | None = None,
) -> Iterator[Bundle]:
    """Open a checkpoint of Megatron-LM as a bundle; it can be read inside the block.

    Args:
        directory: a SAVE root (its tracker names the iteration), or one iteration's.
        step: this iteration instead.
        trust_pickle: read pickles, in another process; refused without.
        true_vocab_size: rows of the vocabulary without padding, where the arguments of
            the checkpoint do not say or say it wrongly.

    Raises:
        UserError: not allowed, not there, or a model that is not converted.
        DamagedError: files or tensors are missing, unknown, or of the wrong shape.
    """
    located = locate(directory, step)
    if not trust_pickle:
        raise UserError(f"{located.directory}: {NEEDS_TRUST}")
    files: Mapping[tuple[int, int], Path] = located.files or {(0, 0): located.directory}
    with unpickle(located.kind, files) as ranks:
        yield _bundle(located, ranks, true_vocab_size)


def _bundle(
    located: Located, ranks: Mapping[tuple[int, int], RankTensors], asked: int | None
) -> Bundle:
    source = str(located.directory)
    first = ranks[min(ranks)]
    config, notes = config_from(first.args, source)
    for rank in ranks.values():
        if config_from(rank.args, source) != (config, notes):
            raise DamagedError(f"{rank.origin}: its args differ from those of {first.origin}")
    tp = pp = 1
    if located.kind == "torch":
        tp = int(first.args.get("tensor_model_parallel_size") or 1)
        pp = int(first.args.get("pipeline_model_parallel_size") or 1)
        check_ranks(located, tp, pp)
        _check_version(first)
    stored = _gather(ranks, tp, pp, config, source)
    pieces = stored.get(EMBEDDING)
    if not pieces:
        raise DamagedError(f"{source}: missing: {EMBEDDING}")
    padded = sum(piece.tensor.shape[0] for piece in pieces)
    vocab_size = true_vocabulary(first.args, asked, padded, source)
    config = with_precision(config, pieces[0].tensor.dtype)
    assets = located.directory / TOKENIZER_DIRECTORY
    bundle = Bundle(
        config=config,
        vocab_size=vocab_size,
        tensors={},
        source=f"megatron {located.kind} ({located.directory.name}, TP {tp}, PP {pp})",
        assets=find_assets(assets) if assets.is_dir() else {},
        notes=notes,
    )
    bundle = replace(bundle, tensors=_logical(bundle, stored, padded, source))
    check_bundle(bundle)
    return bundle


def _check_version(rank: RankTensors) -> None:
    version = rank.version if isinstance(rank.version, int | float) else 0
    if version < OLDEST_VERSION:
        raise UserError(
            f"{rank.origin}: checkpoint_version {rank.version}: the order of queries, keys and "
            f"values before {OLDEST_VERSION} is not converted; load and save it with a newer "
            "Megatron-LM first"
        )


def _gather(
    ranks: Mapping[tuple[int, int], RankTensors], tp: int, pp: int, config: Config, source: str
) -> dict[str, list[Piece]]:
    """Collect the pieces of all ranks under the tensors' global names."""
    stages: dict[tuple[int, int], list[dict[str, Piece]]] = {}
    for p in range(pp):
        for t in range(tp):
            rank = ranks[t, p]
            if rank.chunks != ranks[0, p].chunks:
                raise DamagedError(f"{rank.origin}: {rank.chunks} model chunks, others have more")
            for chunk in range(rank.chunks):
                stages.setdefault((chunk, p), []).append(_named(rank, chunk))
    for (chunk, _), tensor_ranks in stages.items():
        _check_same_names(tensor_ranks, chunk)
    names = {key: list(tensor_ranks[0]) for key, tensor_ranks in stages.items()}
    offsets = global_layers(names, source)
    stored: dict[str, list[Piece]] = {}
    for key in sorted(stages):
        for name in names[key]:
            pieces = [tensors[name] for tensors in stages[key]]
            whole = renumbered(name, offsets[key])
            if whole in stored:
                raise DamagedError(f"{pieces[0].origin}: is also {stored[whole][0].origin}")
            stored[whole] = pieces
    total = len({name.split(".")[2] for name in stored if name.startswith("decoder.layers.")})
    if total != config.num_layers:
        raise DamagedError(f"{source}: {total} layers are there, its args say {config.num_layers}")
    return stored


def _named(rank: RankTensors, chunk: int) -> dict[str, Piece]:
    """Tensors of one chunk in the one spelling."""
    found: dict[str, Piece] = {}
    for (number, name), tensor in rank.tensors.items():
        core = core_name(name)
        if number != chunk or core is None:
            continue
        origin = f"{rank.origin}: {name}"
        if core in found:
            raise DamagedError(f"{origin}: is {core}, as is {found[core].origin}")
        found[core] = Piece(rank.path, tensor, origin)
    odd = [name for number, name in rank.others if number == chunk and not DROPPED.fullmatch(name)]
    if odd:
        raise DamagedError(f"{rank.origin}: {odd[0]}: is no tensor, and not known")
    return found


def _check_same_names(tensor_ranks: Sequence[Mapping[str, Piece]], chunk: int) -> None:
    for other in tensor_ranks[1:]:
        for name in sorted(tensor_ranks[0].keys() ^ other.keys()):
            holder = tensor_ranks[0] if name in tensor_ranks[0] else other
            raise DamagedError(
                f"{holder[name].origin}: model{chunk} of another tensor-parallel rank lacks it"
            )


def _logical(bundle: Bundle, stored: Stored, padded: int, source: str) -> dict[str, LogicalTensor]:
    """Return a recipe for each logical tensor; every stored tensor is used by one."""
    model, faults = bundle.model, []
    tensors: dict[str, LogicalTensor] = {}
    left = set(stored)
    for spec in logical_specs(bundle.config, bundle.vocab_size):
        name = spec.name if spec.name in stored else fused_name(spec.name)
        pieces = stored.get(name)
        if pieces is None:
            faults.append(f"missing: {name} (for {spec.name})")
            continue
        left.discard(name)
        fault = _shape_fault(spec, name, pieces, model, padded)
        if fault is not None:
            faults.append(fault)
            continue
        copies = _copies_of_embedding(stored, left, model, pieces) if name == EMBEDDING else []
        load = _recipe(spec, name, pieces, copies, model)
        tensors[spec.name] = LogicalTensor(spec.name, pieces[0].tensor.dtype, spec.shape, load)
    faults += [f"unknown: {stored[name][0].origin}" for name in sorted(left)]
    if faults:
        told = "\n  ".join(faults[:MAX_TOLD])
        raise DamagedError(f"{source}: {len(faults)} faults:\n  {told}")
    return tensors


def _copies_of_embedding(
    stored: Stored, left: set[str], model: ModelShape, pieces: Sequence[Piece]
) -> Sequence[Piece]:
    """Tied models over several stages store the embedding again at the output."""
    if not model.tied or OUTPUT not in stored:
        return []
    left.discard(OUTPUT)
    copies = stored[OUTPUT]
    for piece, copy in zip(pieces, copies, strict=True):
        if (piece.tensor.dtype, piece.tensor.shape) != (copy.tensor.dtype, copy.tensor.shape):
            raise DamagedError(f"{copy.origin}: is not like the embedding it is tied to")
    return copies


def _is_fused(spec: ParamSpec, stored_name: str) -> bool:
    return spec.name != stored_name


def _shape_fault(
    spec: ParamSpec, name: str, pieces: Sequence[Piece], model: ModelShape, padded: int
) -> str | None:
    """Say what is wrong with the pieces' shapes and dtypes, None if nothing is."""
    shape, tp = list(spec.shape), len(pieces)
    if _is_fused(spec, name):
        rows = 2 * model.ffn_hidden_size
        if ".linear_qkv." in name:
            rows = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
            if model.num_query_groups % tp:
                return (
                    f"{name}: {model.num_query_groups} KV heads on {tp} tensor-parallel ranks "
                    "are not converted"
                )
        shape[0] = rows
    elif name in (EMBEDDING, OUTPUT):
        shape[0] = padded
    if spec.tensor_cut is not None:
        if shape[spec.tensor_cut.dim] % tp:
            return f"{name}: {shape} is not divisible over {tp} tensor-parallel ranks"
        shape[spec.tensor_cut.dim] //= tp
    for piece in pieces:
        if piece.tensor.shape != tuple(shape):
            return f"shape: {piece.origin} is {list(piece.tensor.shape)}, expected {shape}"
        if piece.tensor.dtype != pieces[0].tensor.dtype:
            return f"dtype: {piece.origin} is {piece.tensor.dtype}, {pieces[0].tensor.dtype} before"
    return None


def _recipe(
    spec: ParamSpec,
    name: str,
    pieces: Sequence[Piece],
    copies: Sequence[Piece],
    model: ModelShape,
) -> Callable[[], Tensor]:
    """Return what puts one logical tensor together."""

    def load() -> Tensor:
        out = torch.empty(spec.shape, dtype=TORCH_DTYPES[pieces[0].tensor.dtype])
        if ".linear_qkv." in name:
            _take_heads(spec, pieces, out, model)
        elif _is_fused(spec, name):
            _take_half(pieces, out, second=".linear_up." in spec.name)
        elif spec.tensor_cut is None:
            pieces[0].use(lambda whole: _copy(out, whole))
            for other in pieces[1:]:
                other.use(lambda whole: _is_equal(out, whole))
        else:
            _join(pieces, out, spec.tensor_cut.dim, _copy)
            _join(copies, out, spec.tensor_cut.dim, _is_equal)
        return out

    return load


def _copy(part: Tensor, piece: Tensor) -> bool:
    part.copy_(piece)
    return True


def _is_equal(part: Tensor, piece: Tensor) -> bool:
    flat_a, flat_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (part, piece))
    return torch.equal(flat_a, flat_b)


def _join(
    pieces: Sequence[Piece], out: Tensor, dim: int, act: Callable[[Tensor, Tensor], bool]
) -> None:
    """Meet each piece with its range of `out`; what reaches beyond it is padding."""
    start = 0
    for piece in pieces:
        length = piece.tensor.shape[dim]
        kept = max(0, min(length, out.shape[dim] - start))

        def take(whole: Tensor, start: int = start, kept: int = kept) -> bool:
            return act(out.narrow(dim, start, kept), whole.narrow(dim, 0, kept))

        if kept:
            piece.use(take)
        start += length


def _take_heads(spec: ParamSpec, pieces: Sequence[Piece], out: Tensor, model: ModelShape) -> None:
    """Pick queries, keys or values: each rank has groups of [q..q, k, v]."""
    d, rest = model.kv_channels, out.shape[1:]
    groups = model.num_query_groups // len(pieces)
    queries = model.num_attention_heads // model.num_query_groups
    kind = spec.name.rsplit(".", 2)[1][-1]
    first, heads = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[kind]
    target = out.view(len(pieces), groups, heads, d, *rest)
    for number, piece in enumerate(pieces):

        def take(whole: Tensor, number: int = number) -> bool:
            view = whole.view(groups, queries + 2, d, *rest)
            return _copy(target[number], view.narrow(1, first, heads))

        piece.use(take)


def _take_half(pieces: Sequence[Piece], out: Tensor, *, second: bool) -> None:
    """Pick gate or up: each rank has its share of the one above its share of the other."""
    rows = out.shape[0] // len(pieces)
    for number, piece in enumerate(pieces):

        def take(whole: Tensor, number: int = number) -> bool:
            part = out.narrow(0, number * rows, rows)
            return _copy(part, whole.narrow(0, rows * second, rows))

        piece.use(take)
