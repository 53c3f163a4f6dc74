"""tools/convert_checkpoint.py between our checkpoints and Megatron-LM's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.compare import hash_groups
from megatron_lite.checkpoint.convert import megatron_source, megatron_unpickle
from megatron_lite.checkpoint.convert.megatron import read_megatron, write_megatron
from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.train.loop import train
from tests.checkpoint.convert.megatron_files import GPT2, LLAMA, QWEN, logical_weights, write_torch
from tests.checkpoint.tiny import same_bits
from tests.train.program import RUN, build_and
from tools.convert_checkpoint import main


@pytest.fixture(autouse=True)
def reader_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(request: dict[str, Any], out: Path) -> Any:
        return megatron_unpickle.run(request)["reports"]

    monkeypatch.setattr(megatron_source, "run_reader", run)


def convert(source: str, target: str, load: Path, save: Path, *words: str) -> int:
    """Run the tool."""
    places = ["--load-dir", str(load), "--save-dir", str(save)]
    return main(["--from", source, "--to", target, *places, *words])


@pytest.mark.parametrize("model", [GPT2, LLAMA, QWEN], ids=["gpt2", "llama", "qwen"])
def test_there_and_back_over_tp2_pp2_keeps_the_logical_hash(tmp_path: Path, model: Any) -> None:
    weights = logical_weights(model)
    write_torch(tmp_path / "a", model, weights, tp=1, pp=1)
    assert convert("megatron", "native", tmp_path / "a", tmp_path / "b", "--trust-pickle") == 0
    layout = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]
    assert convert("native", "megatron", tmp_path / "b", tmp_path / "c", *layout) == 0
    assert convert("megatron", "native", tmp_path / "c", tmp_path / "d", "--trust-pickle") == 0
    first, second = (open_checkpoint(tmp_path / name) for name in "bd")
    assert hash_groups(first) == hash_groups(second)
    assert first.state["facts"] == second.state["facts"]
    assert all(same_bits(first.read(name), weights[name]) for name in first.names)


def test_without_trust_the_tool_refuses_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_torch(tmp_path / "a", GPT2, logical_weights(GPT2), tp=1, pp=1)
    assert convert("megatron", "native", tmp_path / "a", tmp_path / "b") == 2
    assert "--trust-pickle" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_c026_a_deleted_or_an_unknown_tensor_fails_the_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_torch(tmp_path / "a", LLAMA, logical_weights(LLAMA), tp=1, pp=1)
    path = directory / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    tensor = content["model"].pop(name)
    torch.save(content, path)
    words = (tmp_path / "a", tmp_path / "b", "--trust-pickle")
    assert convert("megatron", "native", *words) == 3
    assert f"missing: {name}" in capsys.readouterr().err
    content["model"] |= {name: tensor, "decoder.layers.3.mlp.odd.weight": tensor}
    torch.save(content, path)
    assert convert("megatron", "native", *words) == 3
    assert "layers.3.mlp.odd.weight" in capsys.readouterr().err
    assert not (tmp_path / "b" / "published").exists()


def test_the_true_vocabulary_and_overwriting_reach_the_converter(tmp_path: Path) -> None:
    write_torch(tmp_path / "a", LLAMA, logical_weights(LLAMA), tp=1, pp=1, vocab_size=None)
    words = ("--trust-pickle", "--true-vocab-size", "100")
    for more in ((), ("--overwrite",)):
        assert convert("megatron", "megatron", tmp_path / "a", tmp_path / "b", *words, *more) == 0
    assert convert("megatron", "megatron", tmp_path / "a", tmp_path / "b", *words) == 2
    with read_megatron(tmp_path / "b", trust_pickle=True) as bundle:
        assert bundle.vocab_size == 100


def test_tokenizer_files_go_along(tmp_path: Path) -> None:
    write_torch(tmp_path / "a", GPT2, logical_weights(GPT2), tp=1, pp=1)
    with read_megatron(tmp_path / "a", trust_pickle=True) as bundle:
        with_files = replace(bundle, assets={"tokenizer.json": b"{}"})
        write_megatron(with_files, tmp_path / "b", tp=1, pp=1)
    with read_megatron(tmp_path / "b", trust_pickle=True) as again:
        assert list(again.assets) == ["tokenizer.json"]


def test_a_run_starts_from_a_converted_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = logical_weights(LLAMA)
    changes = {"position_embedding_type": "rope", "add_position_embedding": False}
    write_torch(tmp_path / "a", LLAMA, weights, tp=2, pp=2, **changes)
    assert convert("megatron", "native", tmp_path / "a", tmp_path / "b", "--trust-pickle") == 0
    words = (
        "--num-layers 4 --hidden-size 24 --num-attention-heads 6 --group-query-attention "
        "--num-query-groups 2 --kv-channels 4 --ffn-hidden-size 20 --swiglu "
        "--disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 "
        "--position-embedding-type rope --untie-embeddings-and-output-weights "
        f"--vocab-size 100 --train-iters 1 --load {tmp_path / 'b'}"
    )
    assert build_and(train, [*RUN, *words.split()], 0, 1) == 0
    out = capsys.readouterr().out
    assert "converted from megatron torch (iter_0000005, TP 2, PP 2)" in out
