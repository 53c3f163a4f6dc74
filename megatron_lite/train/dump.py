"""`--debug-dump`: every step's logical tensors, as files that compare across layouts.

Each rank collects the pieces it owns and writes them as one fragment file; after a barrier
rank 0 puts the logical tensors together and removes the fragments. The names, shapes and
dtype of the result depend on the model alone, so two runs in different layouts are compared
file by file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from megatron_lite.checkpoint.files import FileSystem, storage_error
from megatron_lite.checkpoint.shards import ShardItem, read_header, write_shard
from megatron_lite.mesh.collectives import all_gather_json, barrier
from megatron_lite.mesh.groups import Group
from megatron_lite.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from megatron_lite.train.step import TrainStep


@dataclass(frozen=True, eq=False)
class Fragment:
    """One owned region of a logical tensor, copied when it was collected."""

    name: str
    logical_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray[Any, Any]


class DebugDump:
    """Collects one step's fragments and writes `step_{k:07d}.safetensors` and `.json`."""

    def __init__(
        self, directory: Path, world_group: Group, dtype: str, *, weights: bool, activations: bool
    ) -> None:
        """Prepare the directory.

        Args:
            directory: created when missing; files of equal steps are replaced.
            world_group: all ranks.
            dtype: of the dumped tensors, "float32" or "float64".
            weights: also the weights after the update.
            activations: also the residual stream of every layer.
        """
        self.weights = weights
        self.activations = activations
        self._directory = directory
        self._world = world_group
        self._dtype = np.dtype(dtype)
        self._files = FileSystem()
        self._fragments: list[Fragment] = []
        try:
            self._files.ensure_directory(directory)
        except OSError as error:
            raise storage_error(error, directory) from error

    def add(
        self, name: str, piece: Tensor, logical_shape: Sequence[int], offset: Sequence[int]
    ) -> None:
        """Copy a region of a logical tensor that this rank speaks for."""
        values = np.array(piece.detach().cpu().double().numpy(), dtype=self._dtype, order="C")
        self._fragments.append(Fragment(name, tuple(logical_shape), tuple(offset), values))

    def write(self, iteration: int, samples: Sequence[Mapping[str, Any]], figures: Any) -> None:
        """Write what was collected for a step.

        Args:
            iteration: one-based.
            samples: rows of this rank's samples; empty on ranks that repeat another's.
            figures: further keys of the JSON file, equal on all ranks.

        Comm: one gather of the sample rows and one barrier over the world.
        """
        fragments, self._fragments = self._fragments, []
        self._write_fragments(iteration, fragments)
        rows = all_gather_json(list(samples), self._world)
        barrier(self._world)  # rank 0 reads the others' fragments
        if self._world.rank == 0:
            merged = sorted((row for part in rows for row in part), key=_consumed_index)
            self._assemble(iteration)
            record = {"iteration": iteration, "samples": merged, **figures}
            path = self._directory / f"step_{iteration:07d}.json"
            path.write_text(json.dumps(record, indent=1) + "\n")

    def has_step(self, iteration: int) -> bool:
        """Whether the step's tensors are there already, from an earlier part of the run."""
        return self._tensor_path(iteration).exists()

    def _tensor_path(self, iteration: int) -> Path:
        return self._directory / f"step_{iteration:07d}.safetensors"

    def _fragment_path(self, iteration: int, rank: int) -> Path:
        return self._directory / f"step_{iteration:07d}.rank{rank:05d}.part"

    def _write_fragments(self, iteration: int, fragments: Sequence[Fragment]) -> None:
        items, places = [], {}
        for number, fragment in enumerate(fragments):
            values = np.atleast_1d(fragment.values)
            items.append(
                ShardItem(
                    key=str(number),
                    dtype=self._dtype.name,
                    shape=fragment.values.shape,
                    load=lambda values=values: _bytes_of(values),  # type: ignore[misc]
                )
            )
            places[str(number)] = [fragment.name, fragment.logical_shape, fragment.offset]
        self._write(
            self._fragment_path(iteration, self._world.rank), items, {"places": json.dumps(places)}
        )

    def _assemble(self, iteration: int) -> None:
        """Put the logical tensors of all fragments together and write them."""
        whole: dict[str, np.ndarray[Any, Any]] = {}
        filled: dict[str, int] = {}
        for rank in range(self._world.size):
            path = self._fragment_path(iteration, rank)
            header = read_header(path)
            data = np.memmap(path, dtype=np.uint8, mode="r")
            for key, (name, shape, offset) in json.loads(header.metadata["places"]).items():
                tensor = header.tensors[key]
                piece = data[tensor.begin : tensor.end].view(self._dtype).reshape(tensor.shape)
                if name not in whole:
                    whole[name], filled[name] = np.full(shape, np.nan, self._dtype), 0
                region = tuple(
                    slice(low, low + size) for low, size in zip(offset, tensor.shape, strict=True)
                )
                whole[name][region] = piece
                filled[name] += piece.size
            del data
        for name, values in whole.items():
            if filled[name] != math.prod(values.shape):
                raise RuntimeError(
                    f"dump of {name}: the ranks own {filled[name]} of {values.size} elements"
                )
        items = [
            ShardItem(name, self._dtype.name, values.shape, lambda v=values: _bytes_of(v))  # type: ignore[misc]
            for name, values in whole.items()
        ]
        self._write(self._tensor_path(iteration), items, {})
        for rank in range(self._world.size):
            self._files.remove_file(self._fragment_path(iteration, rank))

    def _write(self, path: Path, items: Sequence[ShardItem], metadata: Mapping[str, str]) -> None:
        try:
            self._files.remove_file(path)
            write_shard(self._files, path, items, metadata)
        except OSError as error:
            raise storage_error(error, path) from error


def _consumed_index(row: Mapping[str, Any]) -> int:
    return int(row["consumed_index"])


def _bytes_of(values: np.ndarray[Any, Any]) -> memoryview:
    if values.size == 0:
        return memoryview(b"")
    return np.ascontiguousarray(values).data.cast("B")


def dump_gradients(dump: DebugDump, step: TrainStep) -> None:
    """Collect the global logical gradients before clipping, and this rank's activations."""
    for piece in step.parts.buffers.gradient_pieces():
        if piece.owned:
            dump.add(f"grad/{piece.spec.name}", piece.tensor, piece.spec.shape, piece.box.offset)
    if not dump.activations or step.parts.groups.tp.rank > 0:
        return
    for (_, number), sink in step.passes.sinks.items():
        slot = int(step.microbatches[number].sample_ids[0]) - step.state.consumed_samples
        for name, values in sink.activations.items():
            s, _, h = values.shape
            dump.add(f"act/{name}", values, (s, step.global_batch_size, h), (0, slot, 0))


def dump_start(dump: DebugDump, optimizer: Optimizer, iteration: int) -> None:
    """Write the weights that the run starts from, as those after `iteration` updates.

    A continued run leaves the file of the step before it alone. All ranks see the same:
    nothing is assembled before they have met in `DebugDump.write`.
    """
    if dump.weights and not dump.has_step(iteration):
        _collect_weights(dump, optimizer)
        dump.write(iteration, [], {})


def _collect_weights(dump: DebugDump, optimizer: Optimizer) -> None:
    for piece in optimizer.weight_pieces():
        if piece.owned:
            name, offset = f"weight/{piece.spec.name}", piece.box.offset
            dump.add(name, piece.tensor, piece.spec.shape, offset)


def write_dump(dump: DebugDump, step: TrainStep) -> None:
    """Add the updated weights where wanted and write the step's files."""
    if dump.weights:
        _collect_weights(dump, step.parts.optimizer)
    figures = {"grad_norm": step.closing.grad_norm, "clip_coefficient": step.coefficient}
    dump.write(step.state.iteration + 1, _sample_rows(step), figures)


def _sample_rows(step: TrainStep) -> list[dict[str, int | float]]:
    """Loss sum and valid tokens of each sample that this rank speaks for."""
    if step.parts.groups.tp.rank > 0:
        return []
    rows: list[dict[str, int | float]] = []
    for (_, number), sink in step.passes.sinks.items():
        if "lm" not in sink.per_sample:
            continue
        microbatch = step.microbatches[number]
        sums = (sink.per_sample["lm"].double() * microbatch.scale).tolist()
        valid = microbatch.valid_per_sample.tolist()
        ids = microbatch.sample_ids.tolist()
        for index, (dataset, row) in enumerate(microbatch.origins):
            rows.append(
                {
                    "consumed_index": ids[index],
                    "dataset": dataset,
                    "dataset_index": row,
                    "loss_sum": sums[index],
                    "valid_tokens": round(valid[index]),
                }
            )
    return rows
