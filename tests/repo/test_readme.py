"""README.md does what it says: its commands run, and the paths it names exist.

The commands run in the checkout with the environment of the running tests, with two
substitutions: `runs/` becomes a temporary folder and the quickstart takes 5 steps.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
# Would run this very test.
NOT_EXECUTED = "./scripts/test.sh"


def bash_blocks(text: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def executable_form(block: str, runs: Path) -> str:
    """Shorten a block and move what it writes out of the checkout."""
    block = block.replace("./scripts/quickstart.sh", "./scripts/quickstart.sh --steps 5")
    block = block.replace("source .venv/bin/activate\n", "")
    return block.replace("runs/", f"{runs}/")


def run_block(block: str, runs: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {
        "MLITE_VENV": sys.prefix,
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "QUICKSTART_DIR": str(runs / "quickstart"),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, f"{block}\n---\n{result.stdout[-6000:]}"
    return result.stdout


@pytest.mark.timeout(900)
def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = bash_blocks(README.read_text(encoding="utf-8"))
    assert len(blocks) >= 6
    quickstarts = []
    for block in blocks:
        if block.strip() == NOT_EXECUTED:
            continue
        output = run_block(executable_form(block, tmp_path), tmp_path)
        if "quickstart.sh" in block:
            quickstarts.append(output)

    assert "reused" not in quickstarts[0]
    assert quickstarts[1].count("reused") == 3, "corpus, tokenizer and dataset are made once"
    for output in quickstarts:
        assert "unigram entropy of the corpus" in output and "validation loss" in output
    assert (tmp_path / "quickstart" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "quickstart").glob("steps-5-*"))) == 2, "one folder per layout"

    again = run_block(executable_form("./scripts/quickstart.sh", tmp_path), tmp_path)
    assert again.count("reused") == 4, "a finished training is not repeated"


def test_paths_named_in_the_readme_exist() -> None:
    text = README.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.py)`", text))
    named |= set(re.findall(r"\]\(([^)#:]+)\)", text))
    named = {name for name in named if not name.startswith(("runs/", ".venv"))}
    assert len(named) > 15
    missing = []
    for name in sorted(named):
        is_module_of_package = (ROOT / "megatron_lite" / name).exists()
        if not (ROOT / name).exists() and not is_module_of_package:
            missing.append(name)
    assert not missing
