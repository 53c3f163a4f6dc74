"""The converter's command line: what it takes, tells, refuses, and leaves behind."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.convert.bundle import Bundle, logical_specs
from megatron_lite.checkpoint.convert.hf_write import write_hf
from megatron_lite.checkpoint.convert.native import read_native
from megatron_lite.checkpoint.direct import LogicalTensor, write_directly
from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.checkpoint.state import converted_state
from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.config.resolve import resolved_values
from tests.checkpoint.convert.peers import (
    VOCABULARY,
    build_peer,
    differing,
    save_peer,
    weight_files,
)
from tests.checkpoint.convert.test_hf_cases import LLAMA, random_bundle
from tests.checkpoint.tiny import same_bits
from tests.pool import REPOSITORY
from tools.convert_checkpoint import main, parse_size
from tools.generate import main as generate
from tools.inspect_checkpoint import main as inspect


def words(source: str, target: str, load: Path, save: Path, *more: str) -> list[str]:
    head = ["--from", source, "--to", target]
    return [*head, "--load-dir", str(load), "--save-dir", str(save), *more]


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A Llama of transformers, and names for what is made of it."""
    save_peer(tmp_path / "hf", "llama")
    return tmp_path / "hf", tmp_path / "native", tmp_path / "back"


def test_both_ways_with_one_logical_hash(
    places: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, native, back = places
    assert main(words("hf", "native", source, native)) == 0
    first = capsys.readouterr().out
    assert "21 tensors, 281856 bytes, read back and equal, logical hash " in first
    assert main(words("native", "hf", native, back, "--max-shard-size", "100KB")) == 0
    second = capsys.readouterr().out
    shown = [text.split("logical hash ")[1][:64] for text in (first, second)]
    assert shown[0] == shown[1]
    assert differing(source, back) == []
    assert inspect([str(native), "--verify", "--logical-hash"]) == 0
    assert f"logical hash: {shown[0]}" in capsys.readouterr().out


def test_megatron_words_are_understood(places: tuple[Path, Path, Path]) -> None:
    source, native, _ = places
    line = f"--model-type GPT --loader llama_mistral --saver native --load-dir {source}"
    assert main([*line.split(), "--save-dir", str(native)]) == 0
    assert open_checkpoint(native).step == 0


def test_weights_that_are_no_numbers_are_refused_unless_they_are_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, bad = random_bundle(LLAMA), "decoder.layers.1.mlp.linear_up.weight"
    weight = bundle.tensors[bad].load().clone()
    weight[0, 0], weight[-1, 2] = float("nan"), float("-inf")
    tensors = {**bundle.tensors, bad: replace(bundle.tensors[bad], load=lambda: weight)}
    write_hf(replace(bundle, tensors=tensors), tmp_path / "hf")
    line = words("hf", "native", tmp_path / "hf", tmp_path / "native")
    assert main(line) == 2
    assert f"{bad}: 2 of {weight.numel()} values are NaN or infinite" in capsys.readouterr().err
    assert not (tmp_path / "native" / "published").exists()
    assert main([*line, "--allow-nonfinite"]) == 0
    told = capsys.readouterr()
    assert f"warning: {bad}: 2 values are NaN or infinite" in told.err
    assert "read back and equal" in told.out


def test_through_megatron_and_back_to_the_bit(places: tuple[Path, Path, Path]) -> None:
    source, native, back = places
    layout = ("--target-tensor-parallel-size", "2", "--no-checking")
    assert main(words("hf", "megatron", source, native, *layout)) == 0
    assert main(words("megatron", "hf", native, back)) == 2
    assert main(words("megatron", "hf", native, back, "--trust-pickle")) == 0
    assert differing(source, back) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--to native", "--from is required"),
        ("--from hf", "--to is required"),
        ("--from hf --loader mcore --to native", "--from hf and --loader mcore differ"),
        ("--from hf --to native --model-type BERT", "--model-type BERT is not supported"),
        ("--from hf --to native --max-shard-size 5XB", "--max-shard-size '5XB'"),
        ("--from hf --to native --step 3", "--step has no meaning here"),
        ("--from hf --to native --hf-architecture LlamaForCausalLM", "belongs to --to hf"),
        ("--from hf --to native --target-tensor-parallel-size 2", "belongs to --to megatron"),
        ("--from hf --to native --tokenizer-dir nowhere", "holds no tokenizer files"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused(
    places: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    source, native, _ = places
    code = main([*line.split(), "--load-dir", str(source), "--save-dir", str(native)])
    assert code == 2
    assert told in capsys.readouterr().err
    assert not native.exists()


def test_a_target_in_use_and_a_source_that_is_none_are_refused(
    places: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, native, back = places
    assert main(words("hf", "native", source / "none", native)) == 2
    assert main(words("native", "hf", source, native)) == 2
    line = ["--from", "hf", "--to", "native", "--load-dir", str(source), "--save-dir"]
    assert main([*line, "s3://KEY@bucket/run"]) == 2
    assert "--save-dir s3://...@bucket/run: must be a directory" in capsys.readouterr().err
    assert main(words("hf", "hf", source, source, "--overwrite")) == 2
    assert "must lie outside" in capsys.readouterr().err
    for target in ("native", "hf"):
        assert main(words("hf", target, source, back)) == 0
        capsys.readouterr()
        assert main(words("hf", target, source, back)) == 2
        assert "is not empty; --overwrite" in capsys.readouterr().err
        assert main(words("hf", target, source, back, "--overwrite")) == 0
        back = back.with_name("other")


def test_the_checkpoints_of_a_run_are_not_mixed_with_a_converted_one(
    places: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, native, _ = places
    bundle = random_bundle(LLAMA)
    config = replace(bundle.config, micro_batch_size=1, train_iters=1)
    state = plain_json(converted_state(plain_json(resolved_values(config, 1)), bundle.model, "x"))
    write_directly(native, 7, bundle.tensors.values(), state)
    assert main(words("hf", "native", source, native, "--overwrite")) == 2
    assert "holds checkpoints of a run (step 7)" in capsys.readouterr().err
    assert open_checkpoint(native).step == 7


def test_dtype_converts_and_float32_takes_the_masters(tmp_path: Path) -> None:
    config = replace(LLAMA, bf16=True, micro_batch_size=1, train_iters=1)
    masters = random_bundle(config).tensors
    tensors = []
    for name, tensor in masters.items():
        half = lambda t=tensor: t.load().bfloat16()  # noqa: E731
        tensors.append(LogicalTensor(name, "bfloat16", tensor.shape, half))
        tensors.append(replace(tensor, name=f"optim/master/{name}"))
    bundle = random_bundle(config)
    state = plain_json(converted_state(plain_json(resolved_values(config, 1)), bundle.model, "x"))
    write_directly(tmp_path / "native", 3, tensors, state)
    for dtype, wanted in (("", "bfloat16"), ("float32", "float32"), ("float16", "float16")):
        target = tmp_path / f"hf-{dtype}"
        more = ("--dtype", dtype) if dtype else ()
        assert main(words("native", "hf", tmp_path / "native", target, *more)) == 0
        found = weight_files(target)["model.embed_tokens.weight"]
        exact = masters["embedding.word_embeddings.weight"].load()
        if dtype != "float32":
            exact = exact.bfloat16()
        assert same_bits(found, exact.to(getattr(torch, wanted)))


def test_values_that_a_dtype_cannot_hold_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_lite.checkpoint.convert.native import write_native

    bundle = random_bundle(LLAMA)
    name = "decoder.layers.1.mlp.linear_up.weight"
    large = replace(bundle.tensors[name], load=lambda: torch.full((96, 64), 1e5))
    write_native(replace(bundle, tensors={**bundle.tensors, name: large}), tmp_path / "n")
    line = words("native", "hf", tmp_path / "n", tmp_path / "out", "--dtype")
    assert main([*line, "float16"]) == 2
    assert f"{name}: has values beyond 65504" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n"]
    assert main([*line, "bfloat16"]) == 0


def test_norms_stored_minus_one_are_completed_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_lite.checkpoint.convert.native import write_native
    from megatron_lite.checkpoint.convert.transform import to_dtype

    bundle = random_bundle(replace(LLAMA, layernorm_zero_centered_gamma=True))
    write_native(bundle, tmp_path / "single")
    write_native(to_dtype(bundle, "bfloat16"), tmp_path / "half")
    assert main(words("native", "hf", tmp_path / "half", tmp_path / "a")) == 2
    assert "give --dtype float32" in capsys.readouterr().err
    assert main(words("native", "hf", tmp_path / "single", tmp_path / "b")) == 0
    stored = bundle.tensors["decoder.final_layernorm.weight"].load()
    assert same_bits(weight_files(tmp_path / "b")["model.norm.weight"], stored + 1)


def test_memory_is_that_of_the_largest_tensors_not_of_the_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "ffn_hidden_size": 8192, "num_layers": 2}
    config = replace(LLAMA, **sizes)
    largest = 512 * 8192 * 4
    tensors = {
        spec.name: LogicalTensor(
            spec.name, "float32", spec.shape, lambda shape=spec.shape: torch.zeros(shape)
        )
        for spec in logical_specs(config, VOCABULARY)
    }
    write_hf(Bundle(config, VOCABULARY, tensors, "zeros"), tmp_path / "hf")
    code = (
        "import resource, sys\n"
        "from tools.convert_checkpoint import main\n"
        "import torch; torch.zeros(2**20).sum()\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak(); code = main(sys.argv[1:]); print(peak() - before); sys.exit(code)\n"
    )
    for source, target, load, save in (("hf", "native", "hf", "n"), ("native", "hf", "n", "out")):
        line = words(source, target, tmp_path / load, tmp_path / save)
        run = [sys.executable, "-c", code, *line]
        done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr
        # A mapping of the source and a copy; the model has six such tensors and more.
        assert int(done.stdout.split()[-1]) < 3 * largest


def test_an_architecture_can_be_asked_for(places: tuple[Path, Path, Path]) -> None:
    source, _, back = places
    line = words("hf", "hf", source, back, "--hf-architecture", "MistralForCausalLM")
    assert main(line) == 0
    config = json.loads((back / "config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"] and config["sliding_window"] is None
    assert main([*line[:-1], "GPT2LMHeadModel", "--overwrite"]) == 2


def test_weights_that_were_changed_on_the_way_fail_the_conversion(
    places: tuple[Path, Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_lite.checkpoint.convert import hf_write

    source, native, back = places
    assert main(words("hf", "native", source, native)) == 0
    real = hf_write.tensor_bytes
    monkeypatch.setattr(hf_write, "tensor_bytes", lambda tensor: real(tensor * 2))
    assert main(words("native", "hf", native, back)) == 3
    assert "tensors were not written right" in capsys.readouterr().err


def test_a_converted_checkpoint_generates_like_transformers(
    places: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, native, _ = places
    assert main(words("hf", "native", source, native)) == 0
    capsys.readouterr()
    line = f"--load {native} --greedy --max-new-tokens 6 --device cpu --prompt"
    assert generate([*line.split(), "5 17 3"]) == 0
    produced = [int(word) for word in capsys.readouterr().out.split()]
    peer = build_peer("llama")
    tokens = [5, 17, 3]
    while len(tokens) < len(produced):
        with torch.no_grad():
            tokens.append(int(peer(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert len(produced) > 3 and produced == tokens


def test_sizes_are_decimal_or_binary() -> None:
    found = [parse_size(text) for text in ("5GB", "500 MB", "2GiB", "17", "1.5kb")]
    assert found == [5 * 10**9, 5 * 10**8, 2**31, 17, 1500]


def test_a_native_checkpoint_reads_as_what_was_written(tmp_path: Path) -> None:
    from megatron_lite.checkpoint.convert.native import write_native

    bundle = random_bundle(LLAMA)
    write_native(bundle, tmp_path)
    found = read_native(tmp_path)
    assert found.source == "random" and found.model == bundle.model
    for name, tensor in bundle.tensors.items():
        assert same_bits(found.tensors[name].load(), tensor.load())
