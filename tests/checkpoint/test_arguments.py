"""Flags from a checkpoint: below the user's own, never against them, without torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.arguments import complete_config
from megatron_lite.checkpoint.direct import LogicalTensor, write_directly
from megatron_lite.checkpoint.state import converted_state
from megatron_lite.config.flags import parse_config
from megatron_lite.config.plan import build_model
from megatron_lite.config.resolve import resolved_values
from megatron_lite.config.schema import Config
from megatron_lite.errors import DamagedError, UserError
from tests.train.program import LLAMA, RUN

MODEL = [*LLAMA, "--rotary-base", "5000", "--qk-layernorm"]
SAVED = [*MODEL, *RUN, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
# What a resume has to give itself.
BARE_WORDS = "--micro-batch-size 1 --train-iters 10 --lr 1e-2 --mock-data --device cpu"
BARE = BARE_WORDS.split()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A converted checkpoint with the configuration of a run on two ranks."""
    config = parse_config(SAVED, {})
    values = resolved_values(config, 2)
    state = converted_state(values, build_model(config, 90), "hf Made")
    tensor = LogicalTensor("made.weight", "float32", (2,), lambda: torch.zeros(2))
    write_directly(tmp_path, 0, [tensor], state)
    return tmp_path


def complete(directory: Path, *words: str, world_size: int = 2) -> Config:
    argv = [*BARE, "--load", str(directory), *words]
    return complete_config(parse_config(argv, {}), argv, world_size)


def test_architecture_and_tokenizer_come_from_the_checkpoint(directory: Path) -> None:
    found, saved = complete(directory, "--use-checkpoint-args"), parse_config(SAVED, {})
    assert build_model(found, 90) == build_model(saved, 90)
    assert found.tokenizer_type == "NullTokenizer" and found.vocab_size == 90
    assert found.tensor_model_parallel_size == 1 and not found.sequence_parallel
    assert found.lr == 1e-2 and found.min_lr == 0.0  # of this command line, not the checkpoint


def test_the_layout_comes_from_the_checkpoint(directory: Path) -> None:
    found = complete(directory, "--use-mp-args-from-checkpoint-args")
    assert found.tensor_model_parallel_size == 2 and found.sequence_parallel
    assert found.num_layers is None


def test_without_the_flags_nothing_is_opened(tmp_path: Path) -> None:
    config = parse_config([*BARE, "--load", str(tmp_path / "none")], {})
    assert complete_config(config, [], 1) is config


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hidden-size", "64"], "--hidden-size 64: the checkpoint has 32"),
        (["--num-layers=3"], "--num-layers 3: the checkpoint has 4"),
        (["--num-query-groups", "4"], "--num-query-groups 4: the checkpoint has 2"),
        (["--normalization", "LayerNorm"], "--normalization LayerNorm: the checkpoint has"),
        (["--position-embedding-type", "none"], "none: the checkpoint has 'rope'"),
        (["--rotary-base", "10000"], "--rotary-base 10000: the checkpoint has 5000"),
        (["--vocab-size", "91"], "--vocab-size 91: the checkpoint has 90"),
        (["--tokenizer-type", "ByteLevelTokenizer"], "the checkpoint has 'NullTokenizer'"),
    ],
)
def test_a_flag_against_the_checkpoint_is_refused_with_both_values(
    directory: Path, words: list[str], told: str
) -> None:
    with pytest.raises(UserError, match="flags contradict") as refused:
        complete(directory, "--use-checkpoint-args", *words)
    assert told in str(refused.value)
    assert refused.value.exit_code == 2


def test_all_contradictions_are_told_at_once(directory: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)--num-layers 3.*--ffn-hidden-size 64"):
        complete(directory, "--use-checkpoint-args", "--num-layers", "3", "--ffn-hidden-size", "64")


def test_a_configuration_file_counts_as_the_users_word(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("hidden_size: 64\n")
    with pytest.raises(UserError, match=r"hidden_size: 64.*: the checkpoint has 32"):
        complete(directory, "--use-checkpoint-args", "--config-file", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    "words",
    [
        ["--hidden-size", "32"],
        ["--use-rotary-position-embeddings"],
        ["--group-query-attention", "--num-query-groups", "2"],
        ["--disable-bias-linear"],
    ],
)
def test_a_flag_that_says_the_same_is_accepted(directory: Path, words: list[str]) -> None:
    found = complete(directory, "--use-checkpoint-args", *words)
    assert build_model(found, 90) == build_model(parse_config(SAVED, {}), 90)


def test_lengths_dropout_and_paths_stay_the_users(directory: Path) -> None:
    words = ["--seq-length", "8", "--hidden-dropout", "0.3", "--tokenizer-model", "there.model"]
    found = complete(directory, "--use-checkpoint-args", *words)
    assert (found.seq_length, found.hidden_dropout) == (8, 0.3)
    assert found.tokenizer_model == "there.model"
    assert found.attention_dropout == 0.1 and found.max_position_embeddings == 16


def test_a_layout_that_does_not_fit_the_ranks_is_refused(directory: Path) -> None:
    with pytest.raises(UserError, match="needs a multiple of 2 ranks and this run has 3"):
        complete(directory, "--use-mp-args-from-checkpoint-args", world_size=3)


def test_a_layout_against_the_checkpoint_is_refused(directory: Path) -> None:
    with pytest.raises(UserError, match="--tensor-model-parallel-size 4: the checkpoint has 2"):
        complete(
            directory,
            *("--use-mp-args-from-checkpoint-args", "--tensor-model-parallel-size", "4"),
            world_size=4,
        )


def test_the_pretrained_checkpoint_gives_them_where_load_is_empty(
    directory: Path, tmp_path: Path
) -> None:
    argv = [*BARE, "--load", str(tmp_path / "new"), "--pretrained-checkpoint", str(directory)]
    argv += ["--use-checkpoint-args"]
    assert complete_config(parse_config(argv, {}), argv, 1).hidden_size == 32


def test_nothing_to_load_yet_is_left_to_loading(tmp_path: Path) -> None:
    config = parse_config([*BARE, "--load", str(tmp_path / "new"), "--use-checkpoint-args"], {})
    assert complete_config(config, [], 1) is config


@pytest.mark.parametrize("value", ["many", [1, 2], True])
def test_a_strange_value_of_the_checkpoint_is_told(tmp_path: Path, value: Any) -> None:
    config = parse_config(SAVED, {})
    values = resolved_values(config, 2) | {"num_layers": value}
    state = converted_state(values, build_model(config, 90), "hf Made")
    tensor = LogicalTensor("made.weight", "float32", (2,), lambda: torch.zeros(2))
    write_directly(tmp_path, 0, [tensor], state)
    with pytest.raises(DamagedError, match="its configuration: num_layers"):
        complete(tmp_path, "--use-checkpoint-args")


def test_flags_are_completed_before_torch_is_imported(directory: Path) -> None:
    code = (
        "import sys\n"
        "from megatron_lite.checkpoint.arguments import complete_config\n"
        "from megatron_lite.config.flags import parse_config\n"
        "argv = sys.argv[1:]\n"
        "print(complete_config(parse_config(argv, {}), argv, 2).hidden_size)\n"
        "assert 'torch' not in sys.modules\n"
    )
    argv = [*BARE, "--load", str(directory), "--use-checkpoint-args"]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "32\n"), done.stderr


def test_the_program_completes_its_flags(directory: Path) -> None:
    argv = [*BARE, "--load", str(directory), "--use-checkpoint-args", "--print-config"]
    done = subprocess.run([sys.executable, "pretrain.py", *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "hidden_size: 32" in done.stdout
    refused = [*argv, "--hidden-size", "64"]
    done = subprocess.run([sys.executable, "pretrain.py", *refused], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--hidden-size 64: the checkpoint has 32" in done.stderr
    assert "Traceback" not in done.stderr
