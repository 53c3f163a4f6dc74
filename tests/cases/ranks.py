"""What a rank does in the case tests; every function runs inside a rank process."""

import hashlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from megatron_lite.expert import router
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.train.evaluate import evaluate
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import StepReport, TrainStep
from megatron_lite.train.weights_hash import hash_weights
from tests.train.program import build_and, save_now
from tests.train.test_step import masked_batches

# name -> (logical shape, [(offset, values) that this rank owns])
Pieces = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], np.ndarray[Any, Any]]]]]


def program(argv: Sequence[str]) -> int:
    """The main program in this process."""
    sys.argv[1:] = argv
    code: int = importlib.import_module("pretrain").main()
    return code


def masked_steps(
    argv: Sequence[str], valid: Sequence[Sequence[int]], micro: int, rank: int, world_size: int
) -> tuple[list[dict[str, Any]], Pieces]:
    """Steps on fixed samples of which the first so many targets count.

    Args:
        argv: flags without batch sizes.
        valid: per step, the valid tokens of every sample of the global batch.
        micro: micro-batch size.

    Returns:
        Per step the report and how far the weights moved; the gradients of the last step.
    """

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        dp = parts.groups.dp
        parts.train_loader = iter([masked_batches(v, micro, dp.rank, dp.size) for v in valid])
        told = []
        for _ in valid:
            before = [p.tensor.clone() for p in parts.optimizer.weight_pieces()]
            report: StepReport = TrainStep(parts, state).run()
            after = [p.tensor for p in parts.optimizer.weight_pieces()]
            moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
            told.append({**vars(report), "moved": moved})
        gradients: Pieces = {}
        for piece in parts.buffers.gradient_pieces():
            if piece.owned:
                _, held = gradients.setdefault(piece.spec.name, (piece.spec.shape, []))
                held.append((piece.box.offset, piece.tensor.double().numpy().copy()))
        return told, gradients

    sizes = ["--micro-batch-size", str(micro), "--global-batch-size", str(len(valid[0]))]
    found: tuple[list[dict[str, Any]], Pieces] = build_and(use, [*argv, *sizes], rank, world_size)
    return found


def gathered(parts: Sequence[Pieces]) -> dict[str, np.ndarray[Any, Any]]:
    """Logical tensors from the pieces that the ranks own; what nobody owns is NaN."""
    whole: dict[str, np.ndarray[Any, Any]] = {}
    for pieces in parts:
        for name, (shape, held) in pieces.items():
            tensor = whole.setdefault(name, np.full(shape, np.nan))
            for offset, values in held:
                region = tuple(
                    slice(low, low + n) for low, n in zip(offset, values.shape, strict=True)
                )
                tensor[region] = values
    return whole


def residual_hashes(
    argv: Sequence[str], rank: int, world_size: int, after: int = 0
) -> tuple[list[str], float]:
    """Hashes of the residual stream after every layer of one step, and the step's loss.

    Args:
        after: number of steps that are made before.
    """
    hashes: list[str] = []

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        for _ in range(after):
            TrainStep(parts, state).run()
        with _watched_layers(parts, lambda layer, x, out: hashes.append(_digest(out))):
            return hashes, TrainStep(parts, state).run().lm_loss

    found: tuple[list[str], float] = build_and(use, argv, rank, world_size)
    return found


def noise_hashes(argv: Sequence[str], rank: int, world_size: int, after: int = 0) -> list[str]:
    """Hashes of the random words of every router's noise in one step.

    Args:
        after: number of steps that are made before.
    """
    hashes: list[str] = []
    original = router.flat_words

    def watched(*args: Any) -> Tensor:
        words = original(*args)
        hashes.append(_digest(words))
        return words

    def use(parts: Parts, state: TrainState, status: RunStatus) -> list[str]:
        for _ in range(after):
            TrainStep(parts, state).run()
        with patch.object(router, "flat_words", watched):
            TrainStep(parts, state).run()
        return hashes

    found: list[str] = build_and(use, argv, rank, world_size)
    return found


def evaluate_then_step(argv: Sequence[str], rank: int, world_size: int) -> tuple[float, float]:
    """Evaluation loss on the samples of the next step, and the loss of that step, saved."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        assert parts.datasets.train is not None
        found = evaluate(parts, parts.datasets.train, state.consumed_samples, state.iteration)
        loss = TrainStep(parts, state).run().lm_loss
        save_now(parts, state)
        return found.lm_loss, loss

    both: tuple[float, float] = build_and(use, argv, rank, world_size)
    return both


def weight_decays(argv: Sequence[str], rank: int, world_size: int) -> dict[str, tuple[int, float]]:
    """Logical name -> (dims, weight decay) that this rank's optimizer applies."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        decay = parts.rates.weight_decay
        found = {}
        for piece in parts.optimizer.weight_pieces():
            start = piece.tensor.storage_offset()
            storage = piece.tensor.untyped_storage().data_ptr()
            for tensors in parts.optimizer._groups:
                for weights in tensors.weights:
                    first = weights.storage_offset()
                    if (
                        weights.untyped_storage().data_ptr() == storage
                        and first <= start < first + weights.numel()
                    ):
                        dims = len(piece.spec.shape)
                        found[piece.spec.name] = (dims, decay * tensors.group.wd_mult)
        return found

    found: dict[str, tuple[int, float]] = build_and(use, argv, rank, world_size)
    return found


def input_gradients(argv: Sequence[str], rank: int, world_size: int) -> dict[int, Any]:
    """Layer -> [positions of this rank's slice], gradient of the layer's input [s, b, h].

    One step of one micro-batch.
    """
    gradients: dict[int, Any] = {}

    def watch(layer: int, x: Tensor, out: Tensor) -> None:
        def keep(grad: Tensor) -> None:
            gradients[layer] = grad.numpy().copy()

        x.register_hook(keep)

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        with _watched_layers(parts, watch):
            TrainStep(parts, state).run()
        return {layer: (parts.positions.tolist(), grad) for layer, grad in gradients.items()}

    found: dict[int, Any] = build_and(use, argv, rank, world_size)
    return found


def initial_weights(
    argv: Sequence[str], rank: int, world_size: int
) -> tuple[str, list[tuple[str, tuple[int, ...], str]]]:
    """The logical hash of a run that was only built, and (name, offset, hash) of the pieces."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        pieces = [
            (piece.spec.name, piece.box.offset, _digest(piece.tensor))
            for piece in parts.optimizer.weight_pieces()
        ]
        return hash_weights(parts), pieces

    found: tuple[str, list[tuple[str, tuple[int, ...], str]]] = build_and(
        use, argv, rank, world_size
    )
    return found


def save_constant_experts(argv: Sequence[str], rank: int, world_size: int) -> None:
    """Save a run in which all of expert e is e + 1."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        for piece in parts.optimizer.weight_pieces():
            if ".mlp.experts." in piece.spec.name:
                first = piece.box.offset[0]
                numbers = torch.arange(first, first + piece.box.shape[0]) + 1
                ones = [1] * (len(piece.box.shape) - 1)
                piece.tensor.copy_(numbers.view(-1, *ones).expand(piece.box.shape))
        save_now(parts, state)

    build_and(use, argv, rank, world_size)


def held_experts(argv: Sequence[str], rank: int, world_size: int) -> dict[str, list[set[float]]]:
    """Parameter -> the distinct values of each expert that this rank holds."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        return {
            f"{part.layer}.{name}": [set(expert.flatten().tolist()) for expert in param]
            for part in parts.stage.expert_parts
            for name, param in part.params.items()
            if name.startswith("experts.")
        }

    found: dict[str, list[set[float]]] = build_and(use, argv, rank, world_size)
    return found


def program_without_cuda_and_extension(argv: Sequence[str]) -> int:
    """The main program where touching CUDA is an error and no extension was built."""

    def touched(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("CUDA was touched")

    names = ("_lazy_init", "current_device", "set_device", "synchronize", "current_stream")
    with patch("megatron_lite.data.native.NATIVE_MODULE", "megatron_lite.data._absent"):
        for name in names:
            setattr(torch.cuda, name, touched)
        return program(argv)


def program_that_lost_a_layer(argv: Sequence[str]) -> int:
    """The main program with a model cut that forgets the last layer."""
    build = importlib.import_module("megatron_lite.train.build")
    original = build.model_spec

    def lossy(*args: Any) -> Any:
        return tuple(spec for spec in original(*args) if "layers.1." not in spec.name)

    with patch.object(build, "model_spec", lossy):
        return program(argv)


@contextmanager
def _watched_layers(parts: Parts, watch: Any) -> Iterator[None]:
    original = parts.stage._run_layer

    def watched(layer: Any, x: Tensor, *args: Any) -> Tensor:
        out = original(layer, x, *args)
        watch(layer.index, x, out)
        return out

    with patch.object(parts.stage, "_run_layer", watched):
        yield


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.detach().contiguous().cpu().numpy().tobytes()).hexdigest()
