"""Reported conversion faults: rotary layout, padding, ties, tensors that nobody counted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.convert.bundle import Bundle, logical_specs
from megatron_lite.checkpoint.convert.hf_read import read_hf
from megatron_lite.checkpoint.convert.hf_write import write_hf
from megatron_lite.checkpoint.convert.native import read_native, write_native
from megatron_lite.checkpoint.convert.transform import half_split_rotary
from megatron_lite.checkpoint.direct import LogicalTensor
from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.checkpoint.tensors import read_safetensors, write_safetensors
from megatron_lite.config.schema import Config
from megatron_lite.errors import DamagedError
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.train.loop import train
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from tests.checkpoint.convert.peers import (
    VOCABULARY,
    differing,
    flags,
    our_logits,
    peer_logits,
    prompt,
    save_peer,
    to_native,
    transformers,
    weight_files,
)
from tests.pool import RankPool
from tests.train.program import build_and
from tools.convert_checkpoint import build_parser, main

WEIGHTS = "model.safetensors"
LLAMA = Config(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=2,
    ffn_hidden_size=96,
    max_position_embeddings=64,
    seq_length=64,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biased": {"add_bias_linear": True},
    "qkv biased": {"add_qkv_bias": True},
    "qk norm": {"qk_layernorm": True, "kv_channels": 16},
}


def random_bundle(config: Config, seed: int = 5) -> Bundle:
    """A model of ours with random weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in logical_specs(config, VOCABULARY):
        one = 1.0 if spec.init.kind == "ones" else 0.0
        value = one + 0.15 * torch.randn(spec.shape, generator=generator)
        tensors[spec.name] = LogicalTensor(spec.name, "float32", spec.shape, lambda v=value: v)
    return Bundle(config, VOCABULARY, tensors, "random")


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_c022_logits_agree_whatever_rotary_layout_we_trained_in(
    tmp_path: Path, variant: str, interleaved: bool
) -> None:
    config = replace(LLAMA, rotary_interleaved=interleaved, **VARIANTS[variant])
    native, target = tmp_path / "native", tmp_path / "hf"
    write_native(random_bundle(config), native)
    write_hf(read_native(native), target)
    peer = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    for tokens in (prompt(), prompt(1)):
        wanted = peer_logits(peer, tokens)
        assert wanted.std() > 0.1
        assert ((our_logits(native, tokens) - wanted).abs().amax(-1) < 1e-4).all()
    assert not read_hf(target).config.rotary_interleaved


def test_c022_rows_that_stay_where_they_are_show_at_every_position_but_the_first(
    tmp_path: Path,
) -> None:
    bundle = random_bundle(replace(LLAMA, rotary_interleaved=True))
    write_native(bundle, tmp_path / "native")
    claimed = replace(bundle, config=replace(LLAMA, rotary_interleaved=False))
    write_hf(claimed, tmp_path / "hf")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    error = (our_logits(tmp_path / "native", prompt()) - peer_logits(peer, prompt())).abs().amax(-1)
    assert error[0] < 1e-4 and (error[1:] > 1e-3).all()


def test_c022_the_layout_is_in_the_checkpoint_and_no_option_of_the_tool(tmp_path: Path) -> None:
    write_native(random_bundle(replace(LLAMA, rotary_interleaved=True)), tmp_path)
    state = open_checkpoint(tmp_path).state
    assert state["facts"]["rotary_base"]["interleaved"] is True
    assert "rotary" not in build_parser().format_help()
    assert half_split_rotary(read_native(tmp_path)).config.rotary_interleaved is False


def train_and_look(parts: Parts, state: TrainState, status: RunStatus) -> list[int]:
    """Exit code of the run, and the rows of this rank's embedding and output layer."""
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    return [train(parts, state, status), *(parts.stage.param(name).shape[0] for name in names)]


def rows_rank(argv: list[str], rank: int, world_size: int) -> list[int]:
    found: list[int] = build_and(train_and_look, argv, rank, world_size)
    return found


def test_c023_padding_is_derived_at_load_and_in_no_file(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    source, back = tmp_path / "hf", tmp_path / "back"
    save_peer(source, "llama")
    places = [to_native(source, tmp_path / "0")]
    for tp, total in ((1, 112), (4, 128), (1, 112)):
        divisor = ("--make-vocab-size-divisible-by", "16")
        save = tmp_path / str(len(places))
        argv = [*flags(places[-1], tmp_path, tp), *divisor, "--save", str(save)]
        argv += ["--save-interval", "1"]
        if len(places) > 1:
            argv.append("--finetune")
        rows = total // tp
        assert rank_pool.run(tp, rows_rank, argv=argv) == [[0, rows, rows]] * tp
        places.append(save)
        checkpoint = open_checkpoint(save)
        assert checkpoint.shape("embedding.word_embeddings.weight") == (VOCABULARY, 64)
        assert checkpoint.state["facts"]["vocab_size"] == VOCABULARY
    write_hf(read_native(places[-1]), back)
    assert weight_files(back)["model.embed_tokens.weight"].shape == (VOCABULARY, 64)
    assert differing(source, back) == []


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, drop: str = "", **add: torch.Tensor) -> None:
    tensors = read_safetensors(directory / WEIGHTS)
    if drop:
        del tensors[drop]
    more = {name.replace("__", "."): tensor for name, tensor in add.items()}
    write_safetensors(directory / WEIGHTS, tensors | more)


@pytest.mark.parametrize("kind", ["llama-tied-biased", "qwen3", "gpt2"])
def test_c025_tied_without_a_head_imports_as_tied(tmp_path: Path, kind: str) -> None:
    source, native, back = (tmp_path / name for name in ("hf", "native", "back"))
    peer = save_peer(source, kind)
    assert "lm_head.weight" not in weight_files(source)
    to_native(source, native)
    assert "output_layer.weight" not in open_checkpoint(native).names
    assert (our_logits(native, prompt()) - peer_logits(peer, prompt())).abs().max() < 1e-4
    write_hf(read_native(native), back)
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in weight_files(back)


@pytest.mark.parametrize("said", [{"tie_word_embeddings": False}, {}])
def test_c025_untied_without_a_head_is_an_error_that_names_it(
    tmp_path: Path, said: dict[str, bool]
) -> None:
    save_peer(tmp_path, "llama")
    edit_weights(tmp_path, drop="lm_head.weight")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    path.write_text(json.dumps(config | said))
    with pytest.raises(DamagedError, match=r"missing: lm_head\.weight"):
        read_hf(tmp_path)


def test_c025_tied_with_another_head_is_an_error_that_names_both(tmp_path: Path) -> None:
    save_peer(tmp_path, "llama")
    edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(DamagedError) as caught:
        read_hf(tmp_path)
    told = str(caught.value)
    assert "lm_head.weight" in told and "model.embed_tokens.weight" in told
    same = read_safetensors(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    edit_weights(tmp_path, lm_head__weight=same)
    assert read_hf(tmp_path).model.tied


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_c026_a_tensor_too_few_or_too_many_fails_and_writes_nothing(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "hf", tmp_path / "native"
    save_peer(source, kind)
    words = ["--from", "hf", "--to", "native", "--load-dir", str(source)]
    words += ["--save-dir", str(target)]
    whole = (source / WEIGHTS).read_bytes()
    for name in sorted(weight_files(source)):
        (source / WEIGHTS).write_bytes(whole)
        edit_weights(source, drop=name)
        assert main(words) == 3
        assert f"missing: {name}" in capsys.readouterr().err
    (source / WEIGHTS).write_bytes(whole)
    edit_weights(source, model__layers__9__mystery=torch.ones(2))
    assert main(words) == 3
    assert "unexpected: " in capsys.readouterr().err
    assert not target.exists()
    assert main([*words, "--allow-unused"]) == 0
    assert "left out on demand: " in capsys.readouterr().err


def test_c026_a_tensor_of_another_shape_fails(tmp_path: Path) -> None:
    save_peer(tmp_path, "llama")
    edit_weights(tmp_path, model__norm__weight=torch.ones(63))
    with pytest.raises(DamagedError, match=r"model\.norm\.weight is \[63\], .* wants \[64\]"):
        read_hf(tmp_path)


def test_c026_every_expert_is_converted_or_named(tmp_path: Path) -> None:
    source, back = tmp_path / "hf", tmp_path / "back"
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=96,
        num_local_experts=4,
        sliding_window=None,
        max_position_embeddings=64,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
    to_native(source, tmp_path / "native")
    write_hf(read_native(tmp_path / "native"), back)
    assert differing(source, back) == []
    (lost,) = [n for n in weight_files(source) if "experts.2" in n and "w2" in n]
    edit_weights(source, drop=lost)
    with pytest.raises(DamagedError, match=f"missing: {lost}"):
        read_hf(source)


def save_with_depth(directory: Path) -> dict[str, torch.Tensor]:
    """A DeepSeek-V3 with a depth of multi-token prediction, in the names of its own files."""
    save_peer(directory, "deepseek-v3")
    tensors = weight_files(directory)
    hidden = tensors["model.norm.weight"].shape[0]
    last, behind = "model.layers.2.", "model.layers.3."
    depth = {
        name.replace(last, behind): tensor + 1
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    depth |= {f"{behind}{name}.weight": torch.rand(hidden) for name in ("enorm", "hnorm")}
    depth[f"{behind}eh_proj.weight"] = torch.rand(hidden, 2 * hidden)
    depth[f"{behind}shared_head.norm.weight"] = torch.rand(hidden)
    depth[f"{behind}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    depth[f"{behind}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    whole = {**tensors, **depth}
    write_safetensors(directory / WEIGHTS, whole)
    return whole


def test_a_depth_of_multi_token_prediction_comes_back_to_the_bit(tmp_path: Path) -> None:
    source, back = tmp_path / "hf", tmp_path / "back"
    save_with_depth(source)
    to_native(source, tmp_path / "native")
    bundle = read_native(tmp_path / "native")
    assert bundle.config.mtp_num_layers == 1
    assert "mtp.0.transformer_layer.mlp.experts.linear_fc2.weight" in bundle.tensors
    write_hf(bundle, back)
    assert differing(source, back) == []


def test_a_depth_with_another_embedding_is_refused(tmp_path: Path) -> None:
    tensors = save_with_depth(tmp_path)
    name = "model.layers.3.embed_tokens.weight"
    write_safetensors(tmp_path / WEIGHTS, {**tensors, name: tensors[name] + 1})
    loaded = read_hf(tmp_path).tensors["embedding.word_embeddings.weight"]
    with pytest.raises(DamagedError, match=r"layers\.3\.embed_tokens\.weight differs"):
        loaded.load()


def test_depths_without_tensors_are_left_out_and_told(tmp_path: Path) -> None:
    save_peer(tmp_path, "deepseek-v3")  # its config.json tells of one, as transformers writes it
    bundle = read_hf(tmp_path)
    assert not bundle.config.mtp_num_layers
    assert any("read without multi-token prediction" in note for note in bundle.notes)
    tensors = weight_files(tmp_path)
    ahead = {"model.layers.3.enorm.weight": torch.ones(64)}
    write_safetensors(tmp_path / WEIGHTS, {**tensors, **ahead})
    with pytest.raises(DamagedError, match=r"missing: model\.layers\.3\.hnorm"):
        read_hf(tmp_path)
    write_safetensors(
        tmp_path / WEIGHTS, {**tensors, "model.layers.4.enorm.weight": torch.ones(64)}
    )
    with pytest.raises(DamagedError, match=r"unexpected: model\.layers\.4\.enorm"):
        read_hf(tmp_path)
