"""Token ids outside the vocabulary (TOK): the same refusal in every layout, never a zero row.

Ids are checked where samples are read, before any rank looks one up: a rank of a
vocabulary-parallel embedding cannot tell a wrong id from one that another rank holds.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.meta import DatasetMeta
from megatron_lite.data.writer import DatasetWriter
from tests.cases.layouts import FEW, LAYOUTS
from tests.cases.ranks import program
from tests.pool import RankExit, fork_ranks
from tests.train.program import LLAMA, RUN

# The model's vocabulary is 90; with padding there are rows for 92 and more.
WORDS = [word for word in [*LLAMA, *RUN] if word != "--mock-data"]


def write_corpus(prefix: Path, bad: int) -> None:
    with DatasetWriter(prefix, np.uint16) as writer:
        for document in range(4):
            tokens = np.arange(50) % 90
            # Not at a sample's border: exactly one sample has it.
            tokens[7] = bad if document == 3 else 7
            writer.add_document(tokens)
        writer.finalize()


def train(tmp_path: Path, layout: str) -> list[RankExit]:
    argv = [*WORDS, "--data-path", str(tmp_path / "corpus"), "--split", "100,0,0"]
    argv += ["--data-cache-path", str(tmp_path / "cache"), "--train-iters", "3"]
    return fork_ranks(LAYOUTS[layout].ranks, program, [*argv, *LAYOUTS[layout].flags])


def the_message(exits: list[RankExit], code: int) -> str:
    """The one message of all ranks, without the place that says who met it."""
    assert {found.code for found in exits} == {code}, exits
    told = "".join(found.stderr for found in exits)
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if "vocabulary of" in line]
    return re.sub(r"^rank \d+, step \d+, \w+: ", "", line)


@pytest.mark.parametrize("bad", [300, 90, 65535])
def test_c011_a_bad_token_is_told_in_the_same_words_by_every_layout(
    tmp_path: Path, bad: int
) -> None:
    write_corpus(tmp_path / "corpus", bad)
    layouts = FEW if bad == 300 else ("1", "tp2")
    messages = {the_message(train(tmp_path, layout), 3) for layout in layouts}
    assert len(messages) == 1, messages
    (message,) = messages
    assert f"token id {bad} is outside the model's vocabulary of 90" in message
    assert str(tmp_path / "corpus") in message
    assert re.search(r"sample \d+", message)


@pytest.mark.parametrize("layout", ["1", "tp2-sp-dp2"])
def test_c011_a_larger_recorded_vocabulary_is_refused_before_the_first_step(
    tmp_path: Path, layout: str
) -> None:
    write_corpus(tmp_path / "corpus", 7)
    record = DatasetMeta("NullTokenizer", None, 1000, 999, 89, 1, 200)
    with DatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document(np.arange(200) % 90)
        writer.finalize(record)
    exits = train(tmp_path, layout)
    message = the_message(exits, 2)
    assert "vocabulary of 1000" in message and "90" in message
    assert not any("iteration        1/" in found.stdout for found in exits)
