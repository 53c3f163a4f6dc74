"""Mixtures of experts (MOE): balance means the same in every layout, and moves once per step.

C062 asks for context parallelism, too: its layouts join by `with_axes({"cp"})`, which finds
none before that axis exists. Accumulation varies through DP, from 4 to 1: what is balanced is a
microbatch, so its size is fixed.
"""

import numpy as np
import pytest

from megatron_lite.verify.session import Layout
from tests.cases.layouts import LAYOUTS, REFERENCE, with_axes
from tests.cases.moe_ranks import biases_by_step, notes_of_frozen_routers
from tests.cases.ranks import gathered, masked_steps
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN

EXPERTS = 8
MIXTURE = (
    f"--num-experts {EXPERTS} --moe-ffn-hidden-size 16 --moe-router-topk 2 "
    "--fp64 --optimizer sgd --sgd-momentum 0 --hidden-dropout 0 --attention-dropout 0"
).split()
LOSSES = ["--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001"]
RATE = 0.001
BIAS = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    f"--moe-router-bias-update-rate {RATE} --moe-per-layer-logging"
).split()
FULL = [
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
]
EP2 = Layout("ep2", 2, ("--expert-model-parallel-size", "2"))
PLACES = {
    **{
        name: LAYOUTS[name]
        for name in ("tp2", "tp2-sp", "dp2", "pp2", "tp2-sp-dp2", *with_axes({"cp"}))
    },
    **{name: LAYOUTS[name] for name in with_axes({"ep"})},
    EP2.name: EP2,
    "dp4": Layout("dp4", 4),  # one microbatch per rank
}
VALID = [[16, 3, 0, 9]]  # tokens that count in each sample: the losses of routers count all


def router_run(
    rank_pool: RankPool, layout: Layout, words: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Gradients of the routers and the losses that one step logs."""
    argv = [*LLAMA, *RUN, *MIXTURE, *layout.flags, *words]
    results = rank_pool.run(layout.ranks, masked_steps, argv=argv, valid=VALID, micro=1)
    reports, _ = zip(*results, strict=True)
    figures = [report[0]["figures"] for report in reports]
    assert all(found == figures[0] for found in figures)
    gradients = gathered([pieces for _, pieces in results])
    return {name: g for name, g in gradients.items() if "router.weight" in name}, figures[0]


@pytest.mark.parametrize("mode", ["global-mean", "mean-of-means"])
def test_c062_router_gradients_and_losses_do_not_depend_on_the_layout(
    rank_pool: RankPool, mode: str
) -> None:
    words = [*LOSSES, *(["--legacy-loss-normalization"] if mode == "mean-of-means" else [])]
    wanted, logged = router_run(rank_pool, LAYOUTS[REFERENCE], words)
    assert len(wanted) == 4
    plain, _ = router_run(rank_pool, LAYOUTS[REFERENCE], words[len(LOSSES) :])
    for name, gradient in wanted.items():  # the losses are a part of it that can be told
        assert np.linalg.norm(gradient - plain[name]) > 1e-3 * np.linalg.norm(gradient)
    for layout in PLACES.values():
        gradients, figures = router_run(rank_pool, layout, words)
        assert gradients.keys() == wanted.keys(), layout.name
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, wanted[name], rtol=1e-9, atol=1e-13)
        for term in ("moe_aux_loss", "moe_z_loss"):
            assert figures[term] == pytest.approx(logged[term], rel=1e-11), layout.name


SETTINGS = {
    "1": (LAYOUTS[REFERENCE], [], True),
    "recompute": (LAYOUTS[REFERENCE], FULL, False),
    "dp2": (LAYOUTS["dp2"], [], True),
    "dp2-recompute": (LAYOUTS["dp2"], FULL, True),
    "tp2-sp-dp2": (LAYOUTS["tp2-sp-dp2"], [], False),
    "pp2": (LAYOUTS["pp2"], FULL, True),
    "ep2": (EP2, FULL, True),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_c066_bias_moves_by_the_counts_of_the_global_batch_once_per_step(
    rank_pool: RankPool, setting: str
) -> None:
    layout, words, evaluates = SETTINGS[setting]
    argv = [*LLAMA, *RUN, *MIXTURE, *BIAS, *layout.flags, *words, "--global-batch-size", "8"]
    results = rank_pool.run(layout.ranks, biases_by_step, argv=argv, steps=3, evaluates=evaluates)
    argv = [*LLAMA, *RUN, *MIXTURE, *BIAS, "--global-batch-size", "8"]
    (reference,) = rank_pool.run(1, biases_by_step, argv=argv, steps=3, evaluates=False)
    bias = {layer: [0.0] * EXPERTS for layer in range(4)}
    for step, told in enumerate(reference):
        for layer, values in bias.items():
            for expert in range(EXPERTS):
                share = told["figures"][f"moe/load_expert_{expert}_layer_{layer}"]
                values[expert] += RATE * np.sign(1 / EXPERTS - share)
            np.testing.assert_allclose(told["bias"][layer], values, rtol=0, atol=1e-15)
        seen = set()
        for result in results:
            seen |= result[step]["bias"].keys()
            for layer, values in result[step]["bias"].items():
                assert values == told["bias"][layer], (setting, layer)
        assert seen == bias.keys()
    assert any(any(values) for values in bias.values())


@pytest.mark.parametrize("layout", [LAYOUTS[REFERENCE], LAYOUTS["pp2"], EP2], ids=lambda p: p.name)
@pytest.mark.parametrize("pattern", ["*.layers.1.mlp.router.*", "*.layers.1.*"])
def test_a_frozen_router_keeps_its_bias_in_every_layout(
    rank_pool: RankPool, layout: Layout, pattern: str
) -> None:
    argv = [*LLAMA, *RUN, *MIXTURE, *BIAS, *layout.flags, "--freeze", pattern]
    results = rank_pool.run(layout.ranks, biases_by_step, argv=argv, steps=2, evaluates=False)
    moved = {layer: any(b) for result in results for layer, b in result[-1]["bias"].items()}
    assert moved == {0: True, 1: False, 2: True, 3: True}


@pytest.mark.parametrize("layout", [LAYOUTS[REFERENCE], LAYOUTS["pp2"]], ids=lambda p: p.name)
def test_the_start_tells_how_many_routers_are_frozen(rank_pool: RankPool, layout: Layout) -> None:
    argv = [*LLAMA, *RUN, *MIXTURE, *BIAS, *layout.flags, "--freeze"]
    told = "--freeze: 2 of 4 routers are frozen, and their expert_bias with them"
    for pattern in ("*.layers.[13].*", "*.layers.[13].mlp.router.weight"):
        results = rank_pool.run(layout.ranks, notes_of_frozen_routers, argv=[*argv, pattern])
        assert [len(notes) for notes in results] == [1] * layout.ranks
        assert all(note.startswith(told) for (note,) in results)
    for notes in rank_pool.run(
        layout.ranks, notes_of_frozen_routers, argv=[*argv, "*.linear_fc2.weight"]
    ):
        assert not notes
