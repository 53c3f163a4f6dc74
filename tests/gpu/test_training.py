"""Training on a GPU, one process: native operations on and off agree, and runs repeat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_lite.native.load import Native
from megatron_lite.train import build
from megatron_lite.train.loop import train
from tests.train.program import RUN, build_and, rows

pytestmark = pytest.mark.gpu
# NEAR: bf16 rounds in other places. Relative, of every step.
LOSS_NEAR, GRAD_NORM_NEAR = 2e-2, 1e-1
# Head dim 64, which every kernel of attention serves.
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 2 --group-query-attention "
    "--num-query-groups 1 --vocab-size 90 --make-vocab-size-divisible-by 4 --bf16 "
    "--train-iters 3 --eval-iters 0"
)
LLAMA = (
    "--swiglu --ffn-hidden-size 96 --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)


def trained(
    device: torch.device, native: Native, monkeypatch: pytest.MonkeyPatch,
    path: Path, extra: Sequence[str],
) -> list[tuple[float, float]]:  # fmt: skip
    """Loss and gradient norm of every step."""
    monkeypatch.setattr(build, "load_native", lambda: native)
    argv = [*RUN, *MODEL.split(), *extra, "--metrics-jsonl", str(path)]
    argv[argv.index("--device") + 1] = device.type
    assert build_and(train, argv, 0, 1) == 0
    return [(row["lm_loss"], row["grad_norm"]) for row in rows(path)]


@pytest.mark.parametrize("extra", [LLAMA, ""], ids=["llama", "gpt"])
def test_native_operations_train_as_plain_torch_does(
    device: torch.device, native: Native, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, extra: str,
) -> None:  # fmt: skip
    runs = {
        name: trained(
            device, native, monkeypatch, tmp_path / name, [*extra.split(), "--native-ops", mode]
        )
        for name, mode in (("on", "on"), ("again", "on"), ("off", "off"))
    }
    assert runs["on"] == runs["again"], "two runs differ"
    assert len(runs["on"]) == 3
    for (loss, norm), (plain_loss, plain_norm) in zip(runs["on"], runs["off"], strict=True):
        assert loss == pytest.approx(plain_loss, rel=LOSS_NEAR)
        assert norm == pytest.approx(plain_norm, rel=GRAD_NORM_NEAR)
