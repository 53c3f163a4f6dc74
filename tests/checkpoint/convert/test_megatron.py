"""Megatron-LM's files are read to the bit, whatever layout and spelling they are in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint.convert import megatron_source, megatron_unpickle
from megatron_lite.checkpoint.convert.bundle import Bundle
from megatron_lite.checkpoint.convert.megatron import read_megatron, write_megatron
from megatron_lite.errors import UserError
from tests.checkpoint.convert.megatron_files import (
    GPT2,
    LLAMA,
    QWEN,
    Model,
    logical_weights,
    write_torch,
    write_torch_dist,
)
from tests.checkpoint.tiny import same_bits

MODELS = {"gpt2": GPT2, "llama": LLAMA, "qwen": QWEN}


@pytest.fixture(autouse=True)
def reader_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests made the pickles; test_megatron_safety.py has the process of its own."""

    def run(request: dict[str, Any], out: Path) -> Any:
        return megatron_unpickle.run(request)["reports"]

    monkeypatch.setattr(megatron_source, "run_reader", run)


def differing(bundle: Bundle, weights: dict[str, Tensor]) -> list[str]:
    """Names that are not, bit for bit, what was written."""
    odd = sorted(bundle.tensors.keys() ^ weights.keys())
    return odd + [n for n, t in bundle.tensors.items() if not same_bits(t.load(), weights[n])]


LAYOUTS = [
    ("gpt2", "older", 1, 1, 1),
    ("gpt2", "older", 2, 2, 1),
    ("gpt2", "core", 2, 1, 1),
    ("gpt2", "te", 1, 2, 2),
    ("llama", "te", 1, 1, 1),
    ("llama", "te", 2, 1, 1),
    ("llama", "older", 1, 2, 1),
    ("llama", "te", 2, 2, 2),
    ("qwen", "core", 2, 2, 1),
]


@pytest.mark.parametrize(("kind", "spelling", "tp", "pp", "vp"), LAYOUTS)
def test_rank_files_are_read_to_the_bit(
    tmp_path: Path, kind: str, spelling: str, tp: int, pp: int, vp: int
) -> None:
    model = MODELS[kind]
    weights = logical_weights(model)
    write_torch(tmp_path, model, weights, tp=tp, pp=pp, vp=vp, spelling=spelling)
    with read_megatron(tmp_path, trust_pickle=True) as bundle:
        assert differing(bundle, weights) == []
        assert bundle.vocab_size == 100
        shape = bundle.model
    assert (shape.num_attention_heads, shape.num_query_groups) == (model.heads, model.groups)
    assert (shape.tied, shape.gated, shape.qk_norm) == (model.tied, model.gated, model.qk_norm)
    assert shape.position == ("rope" if model.rope else "learned_absolute")
    assert shape.norm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("pp", "vp", "split"), [(2, 2, None), (2, 1, (3, 5)), (2, 1, (1, 7)), (4, 1, (1, 3, 3, 1))]
)
def test_c031_layers_of_any_division_come_in_order(
    tmp_path: Path, pp: int, vp: int, split: tuple[int, ...] | None
) -> None:
    model = replace(LLAMA, layers=8)
    weights = logical_weights(model)
    for layer in range(8):
        weights[f"decoder.layers.{layer}.input_layernorm.weight"].fill_(layer)
    write_torch(tmp_path, model, weights, tp=1, pp=pp, vp=vp, split=split)
    with read_megatron(tmp_path, trust_pickle=True) as bundle:
        found = [
            bundle.tensors[f"decoder.layers.{layer}.input_layernorm.weight"].load()[0].item()
            for layer in range(8)
        ]
    assert found == list(range(8))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen"])
def test_distributed_checkpoints_are_read_to_the_bit(
    tmp_path: Path, kind: str, stacked: bool
) -> None:
    weights = logical_weights(MODELS[kind])
    write_torch_dist(tmp_path, MODELS[kind], weights, stacked=stacked)
    with read_megatron(tmp_path, trust_pickle=True) as bundle:
        assert differing(bundle, weights) == []


@pytest.mark.parametrize(("kind", "tp", "pp"), [("gpt2", 2, 2), ("llama", 2, 2), ("qwen", 1, 4)])
def test_writing_in_a_layout_and_reading_again_is_bitwise(
    tmp_path: Path, kind: str, tp: int, pp: int
) -> None:
    weights = logical_weights(MODELS[kind])
    write_torch(tmp_path / "a", MODELS[kind], weights, tp=1, pp=1)
    with read_megatron(tmp_path / "a", trust_pickle=True) as bundle:
        write_megatron(bundle, tmp_path / "b", tp=tp, pp=pp)
        shape = bundle.model
    with read_megatron(tmp_path / "b", trust_pickle=True) as again:
        assert differing(again, weights) == []
        assert again.model == shape
        assert again.source.startswith("megatron torch (release")


@pytest.mark.parametrize(("kind", "tp", "pp"), [("gpt2", 2, 2), ("llama", 2, 2)])
def test_what_is_written_is_what_an_independent_writer_writes(
    tmp_path: Path, kind: str, tp: int, pp: int
) -> None:
    model = MODELS[kind]
    weights = logical_weights(model)
    expected = write_torch(tmp_path / "a", model, weights, tp=tp, pp=pp)
    with read_megatron(tmp_path / "a", trust_pickle=True) as bundle:
        write_megatron(bundle, tmp_path / "b", tp=tp, pp=pp)
    assert (tmp_path / "b" / "latest_checkpointed_iteration.txt").read_text() == "release"
    for path in sorted(expected.rglob("*.pt")):
        mine = torch.load(
            tmp_path / "b" / "release" / path.relative_to(expected), weights_only=False
        )
        theirs = torch.load(path, weights_only=False)
        tensors = {n: t for n, t in mine["model"].items() if t is not None}
        assert tensors.keys() == {n for n, t in theirs["model"].items() if t is not None}
        for name, tensor in tensors.items():
            assert same_bits(_true_rows(name, tensor), _true_rows(name, theirs["model"][name]))
        for name in ("num_query_groups", "padded_vocab_size", "tensor_model_parallel_size"):
            if name != "num_query_groups" or model.groups != model.heads:
                assert getattr(mine["args"], name) == getattr(theirs["args"], name), name
        assert (mine["checkpoint_version"], mine["iteration"]) == (3.0, 0)


def _true_rows(name: str, tensor: Tensor) -> Tensor:
    """Rows of the vocabulary without padding, which each writer fills as it likes."""
    if name not in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return tensor
    filled = (tensor != 777.0).all(dim=1) & (tensor != 0).any(dim=1)
    return tensor[filled]


def test_the_padding_of_the_target_is_that_of_its_tensor_ranks(tmp_path: Path) -> None:
    write_torch(tmp_path / "a", LLAMA, logical_weights(LLAMA), tp=1, pp=1)
    with read_megatron(tmp_path / "a", trust_pickle=True) as bundle:
        narrow = replace(bundle, config=replace(bundle.config, make_vocab_size_divisible_by=16))
        for tp, rows in ((1, 112), (2, 64)):
            write_megatron(narrow, tmp_path / str(tp), tp=tp, pp=1)
            path = tmp_path / str(tp) / "release" / "mp_rank_00" / "model_optim_rng.pt"
            state = torch.load(path, weights_only=False)
            assert state["model"]["output_layer.weight"].shape[0] == rows
            assert state["args"].padded_vocab_size == rows * tp


def test_the_true_vocabulary_comes_from_the_flag_or_the_arguments(tmp_path: Path) -> None:
    weights = logical_weights(LLAMA)
    write_torch(tmp_path, LLAMA, weights, tp=1, pp=1, vocab_size=None)
    with (
        pytest.raises(UserError, match="--true-vocab-size"),
        read_megatron(tmp_path, trust_pickle=True),
    ):
        pass
    with read_megatron(tmp_path, trust_pickle=True, true_vocab_size=100) as bundle:
        assert differing(bundle, weights) == []
    with (
        pytest.raises(UserError, match="129, but 128 rows"),
        read_megatron(tmp_path, trust_pickle=True, true_vocab_size=129),
    ):
        pass


def test_one_iteration_may_be_named_by_directory_or_step(tmp_path: Path) -> None:
    weights = logical_weights(GPT2)
    directory = write_torch(tmp_path, GPT2, weights, tp=1, pp=1)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    for place, step in ((directory, None), (tmp_path, 5)):
        with read_megatron(place, step=step, trust_pickle=True) as bundle:
            assert differing(bundle, weights) == []
    with (
        pytest.raises(UserError, match="iter_0000009"),
        read_megatron(tmp_path, trust_pickle=True),
    ):
        pass


def test_gelu_fused_with_its_bias_is_imported_as_the_tanh_form(tmp_path: Path) -> None:
    changes = {"openai_gelu": False, "bias_gelu_fusion": True}
    write_torch(tmp_path, GPT2, logical_weights(GPT2), tp=1, pp=1, **changes)
    with read_megatron(tmp_path, trust_pickle=True) as bundle:
        assert bundle.model.activation == "gelu_tanh"
        assert any("tanh" in note for note in bundle.notes)


def test_precision_follows_the_weights(tmp_path: Path) -> None:
    model: Model = QWEN
    write_torch(tmp_path, model, logical_weights(model), tp=1, pp=1)
    with read_megatron(tmp_path, trust_pickle=True) as bundle:
        assert bundle.config.bf16 and not bundle.config.fp16
