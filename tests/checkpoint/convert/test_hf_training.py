"""A converted model trains on: the loss of the first step is transformers' own."""

from pathlib import Path

import numpy as np
import pytest
from torch.nn import functional

from megatron_lite.data.writer import DatasetWriter
from tests.checkpoint.convert.peers import peer_logits, prompt, save_peer, to_native
from tests.checkpoint.convert.test_hf_cases import flags
from tests.pool import RankPool
from tests.train.program import rows, train_rank

LENGTH = 16


def write_repeated(prefix: Path, pattern: list[int]) -> None:
    """A data set in which every sample is the same tokens: one document of one period."""
    with DatasetWriter(prefix, np.uint16) as writer:
        writer.add_document(np.array(pattern * 40))
        writer.finalize()


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3", "gpt2"])
def test_the_first_step_has_the_loss_of_transformers_at_tp_1_and_2(
    tmp_path: Path, rank_pool: RankPool, kind: str
) -> None:
    peer = save_peer(tmp_path / "hf", kind)
    native = to_native(tmp_path / "hf", tmp_path / "native")
    tokens = prompt(LENGTH)
    labels = tokens.roll(-1, 1)
    wanted = functional.cross_entropy(peer_logits(peer, tokens), labels[0]).item()
    write_repeated(tmp_path / "data", tokens[0].tolist())
    for tp in (1, 2):
        metrics = tmp_path / f"metrics-{tp}.jsonl"
        argv = flags(native, None, tp, "--data-path", str(tmp_path / "data"))
        argv.remove("--mock-data")
        argv += ["--metrics-jsonl", str(metrics), "--data-cache-path", str(tmp_path / "cache")]
        assert set(rank_pool.run(tp, train_rank, argv=argv)) == {0}
        (row,) = rows(metrics)
        assert row["lm_loss"] == pytest.approx(wanted, rel=1e-5)
