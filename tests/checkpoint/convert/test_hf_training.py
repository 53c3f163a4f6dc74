"""A converted model trains on: the loss of the first step is transformers' own."""

from pathlib import Path

import pytest
from torch.nn import functional

from tests.checkpoint.convert.peers import flags, peer_logits, prompt, save_peer, to_native
from tests.pool import RankPool
from tests.train.program import rows, train_rank


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3", "gpt2"])
def test_the_first_step_has_the_loss_of_transformers_at_tp_1_and_2(
    tmp_path: Path, rank_pool: RankPool, kind: str
) -> None:
    peer = save_peer(tmp_path / "hf", kind)
    native = to_native(tmp_path / "hf", tmp_path / "native")
    tokens = prompt()
    labels = tokens.roll(-1, 1)
    wanted = functional.cross_entropy(peer_logits(peer, tokens), labels[0]).item()
    for tp in (1, 2):
        metrics = tmp_path / f"metrics-{tp}.jsonl"
        argv = [*flags(native, tmp_path, tp), "--metrics-jsonl", str(metrics)]
        assert set(rank_pool.run(tp, train_rank, argv=argv)) == {0}
        (row,) = rows(metrics)
        assert row["lm_loss"] == pytest.approx(wanted, rel=1e-5)
