"""URLs as users give them: what is one, no credentials in it, staging that fails, tools."""

import json
import os
from pathlib import Path

import pytest

from megatron_lite.checkpoint import find_checkpoint, load_newest, open_checkpoint
from megatron_lite.checkpoint.remote import Mirror
from megatron_lite.checkpoint.stores import (
    check_url,
    is_url,
    local_path,
    open_store,
    same_place,
    without_secrets,
)
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.mesh.groups import local_group
from tests.checkpoint.tiny import NONCE


def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/run") and is_url("memory://x")
    assert not is_url("/data/run") and not is_url("runs/a:b") and not is_url("file:///data/run")
    assert local_path("file:///data/run") == Path("/data/run") == local_path("/data/run")


def test_a_place_is_the_same_however_it_is_spelled(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    run = str(tmp_path / "run")
    for other in (f"{run}/", f"{tmp_path}/x/../run", f"file://{run}", str(tmp_path / "link")):
        assert same_place(run, other), other
    assert same_place("s3://bucket/run", "s3://bucket/run/")
    assert not same_place(run, f"{run}2") and not same_place("s3://bucket/run", "bucket/run")
    assert not same_place(None, None)


@pytest.mark.parametrize(
    "place", ["s3://KEY:SECRET@bucket/run", "https://host/run?sig=SECRET", "s3://SECRET@bucket"]
)
def test_row_52e_credentials_in_a_url_are_refused_and_not_repeated(place: str) -> None:
    for work in (check_url, find_checkpoint, open_store):
        with pytest.raises(UserError, match="credentials belong in the environment") as caught:
            work(place)
        assert "SECRET" not in str(caught.value)
    assert "SECRET" not in without_secrets(f"GET {place} failed")


@pytest.mark.parametrize("place", ["nosuch://bucket/run", "s3://bucket/run"])
def test_a_store_that_cannot_be_opened_is_one_message(place: str) -> None:
    try:
        import s3fs  # noqa: F401
    except ImportError:
        pass
    else:
        if place.startswith("s3"):
            pytest.skip("the client of s3:// is installed")
    with pytest.raises(UserError, match=place.partition(":")[0]):
        find_checkpoint(place)


def test_a_staging_directory_without_room_is_named(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    mirror = Mirror(open_store(filled), tmp_path / "staging")
    checkpoint = open_checkpoint(filled, verify="structure")
    del checkpoint
    found = find_checkpoint(filled, verify="structure", mirror=mirror)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DamagedError, match="no space left"):
        mirror.fetch(found.directory / "rank00000.safetensors", 0, 8)


def test_a_staging_directory_that_cannot_be_made_is_told(filled: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        load_newest(
            filled, local_group("world"), lambda c: None, staging=str(tmp_path / "file" / "x")
        )


def test_the_inspecting_tool_takes_a_url(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.inspect_checkpoint import main

    assert main([filled, "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["directory"] == f"{filled}/attempts/2-0-{NONCE}"
    assert report["step"] == 2
