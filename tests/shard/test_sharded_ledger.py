"""What is sent and kept equals the closed forms, for every strategy and mode.

Odd sizes: no parameter count divides by two or three ranks, and every bucket is padded.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.tiny import flags
from tests.pool import RankPool
from tests.shard.ledger_ranks import two_steps

ODD = (
    "--hidden-size 60 --num-attention-heads 6 --num-query-groups 2 --ffn-hidden-size 102 "
    "--make-vocab-size-divisible-by 1 --ddp-bucket-size 9000 --optimizer adam --lr 0.001"
)
STRATEGY = "--data-parallel-sharding-strategy"
UNSHARDED = "--gradient-accumulation unsharded"
MODES = {
    "no_shard": "",
    "optim": f"{STRATEGY} optim",
    "optim-overlap": f"{STRATEGY} optim --overlap-param-gather",
    "grads": f"{STRATEGY} optim_grads",
    "grads-unsharded": f"{STRATEGY} optim_grads {UNSHARDED} --overlap-param-gather",
    "params": f"{STRATEGY} optim_grads_params --overlap-param-gather",
    "params-unsharded": f"{STRATEGY} optim_grads_params {UNSHARDED}",
    "params-backward": f"{STRATEGY} optim_grads_params --reshard-after backward",
    "params-step": f"{STRATEGY} optim_grads_params --reshard-after step --overlap-param-gather",
}
HYBRID = "--num-distributed-optimizer-instances 2"


def argv(mode: str, ranks: int, more: str = "") -> list[str]:
    """Two microbatches of one sample on every data rank; beside other axes a tied model."""
    words = flags(f"{ODD} {MODES[mode]} {more} --global-batch-size {2 * ranks}", vocabulary=251)
    if more:
        words.remove("--untie-embeddings-and-output-weights")
    return words


def check(told: dict[str, Any]) -> None:
    """Every message and every byte of state."""
    assert told["found"] == told["formula"]
    ledger = told["ledger"]
    assert told["held"] == {name: ledger[name] for name in told["held"]}
    assert told["most"] == {name: ledger[name] for name in told["most"]}
    # Data, rotary tables and what a collective still holds are in the process, too.
    assert told["resident"] <= told["live"] <= 1.05 * told["resident"] + 200_000


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_messages_and_bytes_equal_the_closed_forms(
    rank_pool: RankPool, mode: str, ranks: int
) -> None:
    expected = {"grads": 3, "params-step": 3}  # m + 1, and m reductions with one gather
    for told in rank_pool.run(ranks, two_steps, argv=argv(mode, ranks)):
        check(told)
        assert told["buckets"] > 4
        if not mode.startswith("params") or mode in expected:
            psis = sum(told["sent"].values()) / (told["psi"] * (ranks - 1) / ranks)
            assert psis == pytest.approx(expected.get(mode, 2))


@pytest.mark.parametrize("mode", ["no_shard", "optim", "grads", "grads-unsharded", "params"])
def test_each_level_of_hybrid_sharding_equals_its_closed_form(
    rank_pool: RankPool, mode: str
) -> None:
    for told in rank_pool.run(4, two_steps, argv=argv(mode, 4, HYBRID)):
        check(told)
        assert told["sent"]["dp_replicate"] == pytest.approx(told["psi"] / 2)  # a shard, once
        if mode != "params":
            crossings = 3 if mode == "grads" else 2
            assert told["sent"]["dp_shard"] == pytest.approx(crossings * told["psi"] / 2)


# The balancing biases are no parameters: fp32 in every run, whole on every rank.
MIXTURE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 50 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"


@pytest.mark.parametrize(
    ("mode", "more", "ranks"),
    [
        ("params", RECOMPUTE, 2),
        ("params-unsharded", "--tensor-model-parallel-size 2 --sequence-parallel", 4),
        ("optim-overlap", "--bf16", 2),
        ("params", "--bf16 --optimizer sgd", 3),
        ("grads", f"--bf16 {MIXTURE} --freeze *.linear_proj.*", 2),
        ("params", f"{MIXTURE} --expert-model-parallel-size 2", 4),
    ],
    ids=["recompute", "tp2-sp", "bf16", "bf16-sgd", "frozen", "experts"],
)
def test_the_closed_forms_hold_beside_other_axes(
    rank_pool: RankPool, mode: str, more: str, ranks: int
) -> None:
    for told in rank_pool.run(ranks, two_steps, argv=argv(mode, ranks, more)):
        check(told)


@pytest.mark.parametrize(
    ("mode", "schedule"), [("params", "1f1b"), ("grads", "zbv"), ("grads-unsharded", "zb-h1")]
)
def test_messages_and_resident_bytes_of_a_pipeline_equal_the_closed_forms(
    rank_pool: RankPool, mode: str, schedule: str
) -> None:
    more = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule}"
    for told in rank_pool.run(4, two_steps, argv=argv(mode, 2, more)):
        assert told["found"] == told["formula"]
        assert told["held"] == {name: told["ledger"][name] for name in told["held"]}
