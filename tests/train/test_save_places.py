"""Places of checkpoints as users spell them, in whole runs."""

from pathlib import Path

import pytest

from megatron_lite.checkpoint.catalog import published_steps
from tests.cases.ranks import program
from tests.pool import fork_ranks
from tests.train.program import LLAMA, RUN

WORDS = [*LLAMA, *RUN, "--eval-iters", "0", "--train-iters", "2", "--save-interval", "1"]


def run(save: str, load: str, *words: str) -> tuple[int, str]:
    (done,) = fork_ranks(1, program, [*WORDS, "--save", save, "--load", load, *words])
    return done.code, done.stderr


def test_a_file_url_is_its_path_and_spellings_are_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save = tmp_path / "save"
    code, told = run(f"file://{save}", f"{save}/", "--exit-interval", "1")
    assert code == 0, told
    assert published_steps(save) == [1] and not (tmp_path / "file:").exists()
    code, told = run("save", f"file://{save}")
    assert code == 0, told
    assert published_steps(save) == [2, 1]


def test_saving_into_a_checkpoint_is_refused(tmp_path: Path) -> None:
    save = tmp_path / "save"
    assert run(str(save), str(save))[0] == 0
    for inside in (save / "iter_0000002", save / "iter_0000002" / "more"):
        code, told = run(str(inside), str(save), "--finetune")
        assert code == 2
        assert f"{inside}: lies inside the checkpoint {save}/attempts/2-1-" in told
        assert not list(inside.glob("attempts")) and not list(inside.glob("epochs"))
