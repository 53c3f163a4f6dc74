"""Places of checkpoints as users spell them, in whole runs."""

from pathlib import Path

import pytest

from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.places import check_save_place
from megatron_lite.errors import UserError
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
        assert not (inside / "exit_status.json").exists()


@pytest.mark.parametrize("inside", ["attempts", "attempts/x", "published", "epochs/y"])
def test_saving_into_the_folders_of_another_run_is_refused(tmp_path: Path, inside: str) -> None:
    other = tmp_path / "other"
    for name in ("attempts", "published", "epochs"):
        (other / name).mkdir(parents=True)
    place = other / inside
    code, told = run(str(place), str(place))
    assert code == 2
    assert f"{place}: lies inside {other / inside.split('/')[0]}, which belongs to" in told
    assert sorted(path.name for path in other.rglob("*")) == ["attempts", "epochs", "published"]


def test_a_folder_that_only_has_such_a_name_may_be_saved_to(tmp_path: Path) -> None:
    check_save_place(tmp_path / "attempts" / "mine")
    (tmp_path / "attempts").mkdir()
    check_save_place(tmp_path / "attempts" / "mine")
    (tmp_path / "published").mkdir()
    with pytest.raises(UserError, match="belongs to the checkpoints of"):
        check_save_place(tmp_path / "attempts" / "mine")


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "more" / "still"):
        code, told = run(str(place), str(place))
        assert code == 2
        assert f"{place}: cannot be a save directory: {file} is a file" in told
    assert file.read_text() == "mine"


def test_a_view_without_links_is_no_place_either(tmp_path: Path) -> None:
    view = tmp_path / "iter_0000002"
    view.mkdir()
    (view / "attempt.txt").write_text("2-1-0123456789abcdef")
    with pytest.raises(UserError, match="a view of one checkpoint"):
        check_save_place(view / "more")
