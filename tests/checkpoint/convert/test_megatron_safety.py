"""Pickles run no code, and what is missing, odd or too much in a checkpoint is named."""

import enum
import io
import os
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint.convert import megatron_source, megatron_unpickle
from megatron_lite.checkpoint.convert.megatron import read_megatron, write_megatron
from megatron_lite.errors import DamagedError, UserError
from tests.checkpoint.convert.megatron_files import (
    GPT2,
    LLAMA,
    logical_weights,
    write_torch,
    write_torch_dist,
)
from tests.checkpoint.tiny import same_bits


class Bomb:
    """Unpickled by an ordinary reader, this makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (str(self.path),))


class Builtin(Bomb):
    """The same through a name that looks harmless."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (exec, (f"import os; os.mkdir({str(self.path)!r})",))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read pickles that this test made without the cost of another process."""

    def run(request: dict[str, Any], out: Path) -> Any:
        try:
            return megatron_unpickle.run(request)["reports"]
        except megatron_unpickle.Refused as error:
            raise DamagedError(str(error)) from error

    monkeypatch.setattr(megatron_source, "run_reader", run)


def open_bundle(directory: Path, **options: Any) -> None:
    with read_megatron(directory, trust_pickle=True, **options):
        pass


def change_rank(directory: Path, rank: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Load one rank's file, change it, write it back."""
    path = directory / rank / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_without_the_flag_nothing_is_opened(tmp_path: Path) -> None:
    directory = tmp_path / "iter_0000005" / "mp_rank_00"
    directory.mkdir(parents=True)
    trap = tmp_path / "trap"
    (directory / "model_optim_rng.pt").write_bytes(pickle.dumps(Bomb(trap)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(UserError, match="--trust-pickle") as failure, read_megatron(tmp_path):
        pass
    assert failure.value.exit_code == 2 and not trap.exists()


def test_row_52a_code_in_a_rank_file_does_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    write_torch(tmp_path, GPT2, logical_weights(GPT2), tp=1, pp=1, more={"bomb": Bomb(trap)})
    with pytest.raises(DamagedError, match=r"names code that no checkpoint needs: posix\.mkdir"):
        open_bundle(tmp_path)
    assert not trap.exists()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("place", ["more", "args"])
def test_row_52b_code_in_any_other_value_does_not_run(tmp_path: Path, place: str) -> None:
    trap = tmp_path / "trap"
    bomb = {"more": {"bomb": Builtin(trap)}} if place == "more" else {"lr": Builtin(trap)}
    write_torch(tmp_path, GPT2, logical_weights(GPT2), tp=1, pp=1, **bomb)
    with pytest.raises(DamagedError, match=r"names code that no checkpoint needs: .*exec"):
        open_bundle(tmp_path)
    assert not trap.exists()


def test_row_52a_code_in_distributed_metadata_does_not_run(tmp_path: Path) -> None:
    directory = write_torch_dist(tmp_path, GPT2, logical_weights(GPT2), stacked=True)
    trap = tmp_path / "trap"
    (directory / ".metadata").write_bytes(pickle.dumps(Bomb(trap)))
    with pytest.raises(DamagedError, match=r"\.metadata: names code .* posix\.mkdir"):
        open_bundle(tmp_path)
    assert not trap.exists()


def test_row_52c_a_data_file_elsewhere_is_refused(tmp_path: Path, in_this_process: None) -> None:
    directory = write_torch_dist(tmp_path, GPT2, logical_weights(GPT2), stacked=False)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match=r"\.\./__0_0\.distcp"):
        open_bundle(tmp_path)


def test_the_reading_process_sees_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    seen = tmp_path / "seen"
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, pathlib\n"
        "seen = json.dumps([dict(os.environ), sys.flags.isolated])\n"
        f"pathlib.Path({str(seen)!r}).write_text(seen)\n"
        "out = json.loads(sys.stdin.read())['out']\n"
        "pathlib.Path(out, 'result.json').write_text('{\"reports\": []}')\n"
    )
    monkeypatch.setattr(megatron_unpickle, "__file__", str(script))
    assert megatron_source.run_reader({"out": str(tmp_path), "sources": []}, tmp_path) == []
    assert "SECRET_TOKEN" not in seen.read_text() and seen.read_text().endswith("1]")


def test_foreign_classes_in_arguments_and_random_states_are_no_obstacle(tmp_path: Path) -> None:
    module = types.ModuleType("megatron")
    backend = enum.Enum("AttnBackend", ["auto"], module="megatron")
    module.AttnBackend = backend  # type: ignore[attr-defined]
    sys.modules["megatron"] = module
    weights = logical_weights(LLAMA)
    more = {
        "rng_state": [{"np_rng_state": np.random.get_state(), "cuda": torch.zeros(3)}],
        "scaling": io.BytesIO(b"x"),
    }
    try:
        write_torch(tmp_path, LLAMA, weights, tp=1, pp=1, more=more, attention_backend=backend.auto)
    finally:
        del sys.modules["megatron"]
    with read_megatron(tmp_path, trust_pickle=True) as bundle:
        assert all(same_bits(t.load(), weights[n]) for n, t in bundle.tensors.items())


def test_a_failing_process_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no more memory')")
    monkeypatch.setattr(megatron_unpickle, "__file__", str(script))
    with pytest.raises(DamagedError, match=r"a\.pt: .* code 1: no more memory"):
        megatron_source.run_reader({"out": str(tmp_path), "sources": ["a.pt"]}, tmp_path)


@pytest.mark.usefixtures("in_this_process")
class TestWhatIsWrongIsNamed:
    """Faults of a checkpoint at TP 2, PP 2."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return write_torch(tmp_path, LLAMA, logical_weights(LLAMA), tp=2, pp=2)

    def test_a_missing_rank_file(self, directory: Path) -> None:
        (directory / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
        with pytest.raises(DamagedError, match=r"mp_rank_01_001/model_optim_rng\.pt"):
            open_bundle(directory)

    def test_a_missing_rank_directory(self, directory: Path) -> None:
        shutil.rmtree(directory / "mp_rank_01_000")
        with pytest.raises(DamagedError, match=r"missing: .*mp_rank_01_000/model_optim_rng\.pt"):
            open_bundle(directory)

    def test_more_ranks_than_the_layout_has(self, directory: Path) -> None:
        shutil.copytree(directory / "mp_rank_01_001", directory / "mp_rank_02_001")
        with pytest.raises(DamagedError, match=r"tensor parallel 2.*mp_rank_02_001"):
            open_bundle(directory)

    def test_an_unknown_tensor(self, directory: Path) -> None:
        for rank in ("mp_rank_00_000", "mp_rank_01_000"):
            name = "decoder.layers.1.mlp.router.weight"
            change_rank(directory, rank, lambda c: c["model"].update({name: torch.ones(2)}))  # noqa: B023
        with pytest.raises(DamagedError, match=r"unknown: .*mp_rank_00_000.*mlp\.router\.weight"):
            open_bundle(directory)

    def test_a_missing_tensor_of_all_ranks(self, directory: Path) -> None:
        for rank in ("mp_rank_00_001", "mp_rank_01_001"):
            name = "decoder.layers.0.self_attention.linear_qkv.weight"
            change_rank(directory, rank, lambda c: c["model"].pop(name))  # noqa: B023
        missing = r"missing: decoder\.layers\.2\.self_attention\.linear_qkv\.weight"
        with pytest.raises(DamagedError, match=missing):
            open_bundle(directory)

    def test_a_missing_tensor_of_one_rank(self, directory: Path) -> None:
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        change_rank(directory, "mp_rank_01_000", lambda c: c["model"].pop(name))
        with pytest.raises(DamagedError, match=r"layers\.0\.mlp\.linear_fc1\.weight.* lacks it"):
            open_bundle(directory)

    def test_a_missing_layer(self, directory: Path) -> None:
        def drop(content: dict[str, Any]) -> None:
            for name in [n for n in content["model"] if n.startswith("decoder.layers.1.")]:
                del content["model"][name]

        for rank in ("mp_rank_00_000", "mp_rank_01_000"):
            change_rank(directory, rank, drop)
        with pytest.raises(DamagedError, match="3 layers are there, its args say 4"):
            open_bundle(directory)

    def test_a_wrong_shape(self, directory: Path) -> None:
        name = "decoder.layers.0.mlp.linear_fc2.weight"

        def shorten(content: dict[str, Any]) -> None:
            content["model"][name] = content["model"][name][:, :-1].clone()

        change_rank(directory, "mp_rank_01_000", shorten)
        with pytest.raises(DamagedError, match=r"shape: .*mp_rank_01_000.*linear_fc2\.weight"):
            open_bundle(directory)

    def test_replicas_that_differ(self, directory: Path) -> None:
        name = "decoder.final_layernorm.weight"
        change_rank(directory, "mp_rank_01_001", lambda c: c["model"][name].add_(1))
        with read_megatron(directory, trust_pickle=True) as bundle:
            with pytest.raises(DamagedError, match=r"mp_rank_01_001.*final_layernorm.*differs"):
                bundle.tensors[name].load()
            bundle.tensors["decoder.layers.0.input_layernorm.weight"].load()

    def test_another_model_on_one_rank(self, directory: Path) -> None:
        change_rank(directory, "mp_rank_01_001", lambda c: setattr(c["args"], "rotary_base", 500))
        with pytest.raises(DamagedError, match=r"mp_rank_01_001.*args differ"):
            open_bundle(directory)

    def test_an_oldest_checkpoint(self, directory: Path) -> None:
        for path in sorted(directory.glob("*")):
            change_rank(directory, path.name, lambda c: c.update(checkpoint_version=1.0))
        with pytest.raises(UserError, match=r"checkpoint_version 1\.0"):
            open_bundle(directory)

    def test_a_checkpoint_without_arguments(self, directory: Path) -> None:
        change_rank(directory, "mp_rank_00_000", lambda c: c.pop("args"))
        with pytest.raises(DamagedError, match=r"mp_rank_00_000.*no `args`"):
            open_bundle(directory)


@pytest.mark.usefixtures("in_this_process")
def test_a_copy_of_the_embedding_that_differs_is_refused(tmp_path: Path) -> None:
    directory = write_torch(tmp_path, GPT2, logical_weights(GPT2), tp=1, pp=2)
    name = "output_layer.weight"
    change_rank(directory, "mp_rank_00_001", lambda c: c["model"][name][3].add_(1))
    with (
        read_megatron(directory, trust_pickle=True) as bundle,
        pytest.raises(DamagedError, match=r"mp_rank_00_001.*output_layer\.weight: differs"),
    ):
        bundle.tensors["embedding.word_embeddings.weight"].load()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_experts", 8),
        ("multi_latent_attention", True),
        ("window_size", (128, 0)),
        ("position_embedding_type", "yarn"),
        ("no_rope_freq", 4),
    ],
)
def test_a_part_that_is_not_converted_is_refused_by_name(
    tmp_path: Path, name: str, value: Any
) -> None:
    write_torch(tmp_path, LLAMA, logical_weights(LLAMA), tp=1, pp=1, **{name: value})
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}"):
        open_bundle(tmp_path)


@pytest.mark.usefixtures("in_this_process")
def test_a_distributed_checkpoint_with_a_hole_is_refused(tmp_path: Path) -> None:
    directory = write_torch_dist(tmp_path, LLAMA, logical_weights(LLAMA), stacked=True)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    name = "decoder.layers.self_attention.linear_proj.weight"
    record = metadata.state_dict_metadata[name]
    record.chunks[0].sizes = torch.Size((3, *record.chunks[0].sizes[1:]))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match=r"linear_proj\.weight: its pieces hold 0 of"):
        open_bundle(directory)


@pytest.mark.usefixtures("in_this_process")
def test_nothing_is_left_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_torch(tmp_path / "a", LLAMA, logical_weights(LLAMA), tp=1, pp=1)
    with read_megatron(tmp_path / "a", trust_pickle=True) as bundle:
        with pytest.raises(UserError, match=r"KV heads 2 is not a multiple .* 4"):
            write_megatron(bundle, tmp_path / "b", tp=4, pp=1)
        write_megatron(bundle, tmp_path / "b", tp=1, pp=1)
        with pytest.raises(UserError, match="--overwrite"):
            write_megatron(bundle, tmp_path / "b", tp=2, pp=1)

        def fail(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(DamagedError, match="no space left"):
            write_megatron(bundle, tmp_path / "b", tp=2, pp=1, overwrite=True)
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert names == ["latest_checkpointed_iteration.txt", "release"]
    assert [path.name for path in (tmp_path / "b" / "release").iterdir()] == ["mp_rank_00"]
    mode = (tmp_path / "b" / "release" / "mp_rank_00" / "model_optim_rng.pt").stat().st_mode
    assert mode & 0o007 == 0
