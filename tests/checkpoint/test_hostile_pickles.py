"""Checkpoints are data, never code: what is pickled is not unpickled, wherever it lies."""

import ast
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_lite.checkpoint
from megatron_lite.checkpoint import open_checkpoint
from megatron_lite.errors import DamagedError
from tests.checkpoint.tiny import save_tiny


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, mark: Path):
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
@pytest.mark.parametrize(
    "file",
    [
        *("manifest.json", "rank00000.receipt.json", "rank00000.safetensors", ".metadata"),
        *(
            "rank00000.safetensors.index.json",
            "common.pt",
            "__0_0.distcp",
            "../../published/1.json",
        ),
    ],
)
def test_row_52ab_a_pickle_in_a_checkpoint_is_never_executed(
    tmp_path: Path, file: str, form: str
) -> None:
    """In place of any of our files, and beside them under the names other programs load."""
    root, mark = tmp_path / "save", tmp_path / "exploded"
    directory = save_tiny(root, 1).directory
    stream = io.BytesIO()
    (pickle.dump if form == "pickle" else torch.save)({"a": Bomb(mark)}, stream)
    pickle.loads(pickle.dumps(Bomb(tmp_path / "armed")))
    assert (tmp_path / "armed").exists()
    existed = (directory / file).exists()
    (directory / file).write_bytes(stream.getvalue())
    if existed:
        with pytest.raises(DamagedError):
            open_checkpoint(root)
    else:
        assert open_checkpoint(root).read("optim/step") == 1
    assert not mark.exists()


FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
}
FORBIDDEN_CALLS = {
    *(("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("yaml", "load")),
    *(("dist", "all_gather_object"), ("dist", "broadcast_object_list"), ("dist", "gather_object")),
}


def faults_of(source: str) -> list[str]:
    """What in a module can execute what it reads."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            faults += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Attribute):
            faults += ["allow_pickle"] if node.attr == "allow_pickle" else []
            if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in FORBIDDEN_CALLS:
                faults.append(f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            faults.append("allow_pickle")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            faults += [node.func.id] if node.func.id in {"eval", "exec", "__import__"} else []
    return faults


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import torch\ntorch.load('x')"),
        *("import torch\nload = torch.load", "np.load('x')", "f(allow_pickle=True)", "eval('1')"),
    ],
)
def test_the_gate_of_the_next_test_sees_what_it_is_for(source: str) -> None:
    assert faults_of(source)


def test_row_52ab_the_package_never_unpickles() -> None:
    """Checkpoints are data, never code: nothing in the package outside of convert/ can."""
    package = Path(str(megatron_lite.checkpoint.__file__)).parent
    sources = [path for path in package.rglob("*.py") if "convert" not in path.parts]
    assert len(sources) > 20
    assert {
        path.name: faults_of(path.read_text()) for path in sources if faults_of(path.read_text())
    } == {}
