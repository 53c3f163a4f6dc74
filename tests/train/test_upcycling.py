"""Upcycling: a dense checkpoint becomes a mixture of experts that computes the same at first."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import violations
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from tests.pool import RankError, RankPool
from tests.train.program import LLAMA_WORDS, RUN, build_and, save_now, train_rank

Dense = dict[str, tuple[Path, float, Tensor]]
QUIET = [*RUN, "--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0"]
QUIET += ["--save-interval", "100"]
GELU = LLAMA_WORDS.replace("--swiglu", "").replace("--disable-bias-linear", "")
MODELS = {
    "swiglu": LLAMA_WORDS.split(),
    "gelu": [*GELU.split(), "--disable-bias-linear"],
    "gelu-biases": GELU.split(),
    "squared-relu-biases": [*GELU.split(), "--squared-relu"],
    "clamped-biases": [
        *GELU.split(),
        *("--quick-geglu", "--activation-func-clamp-value", "0.05", "--glu-linear-offset", "1.0"),
    ],
}
SIGMOID = "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5"
# Mixtures whose weights sum to a constant, whatever the router says.
MIXTURES = {
    "copies": "--num-experts 4",
    "slices": "--num-experts 8 --moe-ffn-hidden-size 24 --moe-upcycling-granularity 2",
    "slices-sigmoid": (
        f"--num-experts 8 --moe-ffn-hidden-size 12 --moe-upcycling-granularity 4 "
        f"--moe-router-topk 8 {SIGMOID}"
    ),
    "groups": (
        "--num-experts 8 --moe-ffn-hidden-size 24 --moe-upcycling-granularity 2 "
        "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
        "--moe-layer-freq 2"
    ),
}
# Mixtures whose weights sum to a constant only where the router knows nothing: it is drawn 0.
UNDECIDED = {
    "pre-softmax": "--num-experts 4 --moe-router-pre-softmax",
    "pre-softmax-scaled": (
        "--num-experts 4 --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5"
    ),
    "top-1-pre-softmax": "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax",
    "top-1-sigmoid": "--num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid",
    "top-1-sqrtsoftplus": (
        "--num-experts 4 --moe-router-topk 1 --moe-router-score-function sqrtsoftplus"
    ),
    "sinkhorn": "--num-experts 4 --moe-router-load-balancing-type sinkhorn",
    "top-1-sinkhorn": (
        "--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn"
    ),
    "slices-pre-softmax": (
        "--num-experts 8 --moe-ffn-hidden-size 24 --moe-upcycling-granularity 2 "
        "--moe-router-topk 4 --moe-router-pre-softmax"
    ),
}
LAYOUTS = {
    "1": (1, ""),
    "tp2-sp-ep2": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
    ),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "dp2-params": (
        2,
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params "
        "--ddp-bucket-size 1000",
    ),
}


def first_numbers(argv: Sequence[str], rank: int, world_size: int) -> tuple[float, Tensor | None]:
    """Save what was loaded, where there is `--save`; the loss of the first step, and logits.

    There are logits, [s, b, v], where the weights are whole without anyone bringing them.
    """

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        if parts.config.save is not None:
            save_now(parts, state)
        assert state.iteration == 0
        logits = first_logits(parts) if parts.weight_source is None else None
        return TrainStep(parts, state).run().lm_loss, logits

    found: tuple[float, Tensor | None] = build_and(use, argv, rank, world_size)
    return found


def first_logits(parts: Parts) -> Tensor:
    """Of two samples, as for sampling: no gradients, not training."""
    model = parts.plan.model
    size = (model.seq_length, 2)
    tokens = torch.randint(model.vocab_size, size, generator=torch.Generator().manual_seed(3))
    context = MicrobatchContext(
        step=0,
        microbatch=0,
        stage=0,
        training=False,
        seed=parts.config.seed,
        sample_ids=torch.arange(2),
        positions=parts.positions,
        full_positions=parts.full_positions,
        loss_weights=None,
        denominators={},
        wgrads=None,
        native=parts.native,
    )
    return parts.stage.logits(tokens, context, None)


def first_step(argv: Sequence[str], rank: int, world_size: int) -> float:
    """The loss alone."""
    return first_numbers(argv, rank, world_size)[0]


@pytest.fixture(scope="module")
def dense(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, float, Tensor]]:
    """Dense checkpoints after two steps in fp64; loss and logits of the run that starts there."""
    found = {}
    for name, words in MODELS.items():
        root = tmp_path_factory.mktemp("dense") / name
        argv = [*words, *QUIET, "--fp64", "--save", str(root), "--exit-interval", "2"]
        rank_pool.run(1, train_rank, argv=argv)
        argv = [*words, *QUIET, "--fp64", "--load", str(root), "--finetune"]
        ((loss, logits),) = rank_pool.run(1, first_numbers, argv=argv)
        found[name] = root, loss, logits
    return found


CASES = [
    *((model, mixture, "1") for model in MODELS for mixture in MIXTURES),
    *(("swiglu", "slices", layout) for layout in LAYOUTS if layout != "1"),
    ("gelu-biases", "copies", "tp2"),
]


def check_equal(
    rank_pool: RankPool, found: tuple[Path, float, Tensor], ranks: int, argv: Sequence[str]
) -> None:
    """Loss in training and logits in evaluation are those of the dense model."""
    root, loss, logits = found
    argv = [*argv, *QUIET, "--fp64", "--moe-use-upcycling", "--load", str(root)]
    for its_loss, its_logits in rank_pool.run(ranks, first_numbers, argv=argv):
        assert its_loss == pytest.approx(loss, rel=1e-12)
        if its_logits is not None:
            torch.testing.assert_close(its_logits, logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("model", "mixture", "layout"), CASES)
def test_the_mixture_computes_what_the_dense_model_did(
    rank_pool: RankPool, dense: Dense, model: str, mixture: str, layout: str
) -> None:
    size, words = LAYOUTS[layout]
    argv = [*MODELS[model], *MIXTURES[mixture].split(), *words.split()]
    check_equal(rank_pool, dense[model], size, argv)


UNDECIDED_CASES = [
    *((model, mixture, "1") for model in ("swiglu", "gelu-biases") for mixture in UNDECIDED),
    *(("swiglu", mixture, "tp2-sp-ep2") for mixture in ("sinkhorn", "slices-pre-softmax")),
]


@pytest.mark.parametrize(("model", "mixture", "layout"), UNDECIDED_CASES)
def test_an_undecided_router_computes_what_the_dense_model_did(
    rank_pool: RankPool, dense: Dense, model: str, mixture: str, layout: str
) -> None:
    size, words = LAYOUTS[layout]
    argv = [*MODELS[model], *UNDECIDED[mixture].split(), *words.split()]
    check_equal(rank_pool, dense[model], size, [*argv, "--init-method-std", "0"])


def test_a_drawn_router_is_near_where_its_weights_vary(rank_pool: RankPool, dense: Dense) -> None:
    root, loss, _ = dense["swiglu"]
    argv = [*MODELS["swiglu"], *QUIET, "--fp64", *UNDECIDED["pre-softmax"].split()]
    argv += ["--moe-use-upcycling", "--load", str(root)]
    (its_loss,) = rank_pool.run(1, first_step, argv=argv)
    assert its_loss == pytest.approx(loss, rel=0.01)
    assert its_loss != pytest.approx(loss, rel=1e-9)


def test_the_architecture_may_come_from_the_dense_checkpoint(
    rank_pool: RankPool, dense: Dense
) -> None:
    root, wanted, _ = dense["swiglu"]
    argv = [*QUIET, "--fp64", "--vocab-size", "90", "--use-checkpoint-args", "--load", str(root)]
    argv += ["--moe-use-upcycling", *MIXTURES["copies"].split()]
    (loss,) = rank_pool.run(1, first_step, argv=argv)
    assert loss == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_copies_and_routers_are_drawn_the_same_in_every_layout(
    rank_pool: RankPool, tmp_path: Path, dense: Dense, layout: str
) -> None:
    root, *_ = dense["swiglu"]
    size, words = LAYOUTS[layout]
    argv = [*MODELS["swiglu"], *QUIET, "--fp64", *MIXTURES["copies"].split(), *words.split()]
    argv += ["--moe-use-upcycling", "--load", str(root), "--save", str(tmp_path / "a")]
    rank_pool.run(size, first_step, argv=argv)
    before, after = open_checkpoint(root), open_checkpoint(tmp_path / "a")
    assert after.step == 0
    for linear in ("linear_gate", "linear_up", "linear_fc2"):
        name = f"decoder.layers.3.mlp.experts.{linear}.weight"
        copy = before.read(name.replace("experts.", ""))
        assert torch.equal(after.read(name), copy.expand(4, *copy.shape))
    router = after.read("decoder.layers.3.mlp.router.weight")
    argv = [*MODELS["swiglu"], *QUIET, "--fp64", *MIXTURES["copies"].split()]
    rank_pool.run(1, first_step, argv=[*argv, "--save", str(tmp_path / "drawn")])
    drawn = open_checkpoint(tmp_path / "drawn").read("decoder.layers.3.mlp.router.weight")
    assert torch.equal(router, drawn)


def test_slices_of_a_copy_share_the_routers_first_row(
    rank_pool: RankPool, tmp_path: Path, dense: Dense
) -> None:
    root, *_ = dense["swiglu"]
    argv = [*MODELS["swiglu"], *QUIET, "--fp64", *MIXTURES["slices"].split()]
    argv += ["--moe-use-upcycling", "--load", str(root), "--save", str(tmp_path)]
    argv += ["--expert-model-parallel-size", "2"]
    rank_pool.run(2, first_step, argv=argv)
    after, before = open_checkpoint(tmp_path), open_checkpoint(root)
    router = after.read("decoder.layers.0.mlp.router.weight")
    assert torch.equal(router[::2], router[1::2])
    assert len({row.numpy().tobytes() for row in router}) == 4
    gate = after.read("decoder.layers.0.mlp.experts.linear_gate.weight")
    whole = before.read("decoder.layers.0.mlp.linear_gate.weight")
    for expert in range(8):  # the activation is applied to the gate, which keeps its bits
        assert torch.equal(gate[expert], whole.chunk(2)[expert % 2])


@pytest.mark.parametrize("layout", ["1", "dp2-params"])
def test_bf16_keeps_what_a_wider_dense_checkpoint_has(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    size, words = LAYOUTS[layout]
    model = [*MODELS["swiglu"], *QUIET]
    saving = ["--save", str(tmp_path / "dense"), "--exit-interval", "1"]
    rank_pool.run(1, train_rank, argv=[*model, *saving])
    argv = [*model, *MIXTURES["copies"].split(), *words.split(), "--bf16", "--moe-use-upcycling"]
    argv += ["--load", str(tmp_path / "dense"), "--save", str(tmp_path / "a")]
    rank_pool.run(size, first_step, argv=argv)
    before, after = open_checkpoint(tmp_path / "dense"), open_checkpoint(tmp_path / "a")
    name = "decoder.layers.1.mlp.experts.linear_up.weight"
    copy = before.read(name.replace("experts.", ""))
    assert copy.dtype == torch.float32
    assert torch.equal(after.read(f"optim/master/{name}"), copy.expand(4, *copy.shape))
    assert after.dtype(name) == torch.bfloat16


def test_the_same_command_goes_on_from_its_own_checkpoints(
    rank_pool: RankPool, tmp_path: Path, dense: Dense
) -> None:
    root, *_ = dense["swiglu"]
    argv = [*MODELS["swiglu"], *QUIET, "--fp64", *MIXTURES["copies"].split()]
    argv += ["--moe-use-upcycling", "--pretrained-checkpoint", str(root), "--save-interval", "2"]
    for name, stops in (("whole", (4,)), ("parts", (2, 4))):
        place = ["--load", str(tmp_path / name), "--save", str(tmp_path / name)]
        for stop in stops:
            rank_pool.run(1, train_rank, argv=[*argv, *place, "--exit-interval", str(stop)])
    whole, parts = open_checkpoint(tmp_path / "whole"), open_checkpoint(tmp_path / "parts")
    assert whole.step == parts.step == 4
    assert whole.names == parts.names
    for name in whole.names:
        assert torch.equal(whole.read(name), parts.read(name)), name
    again = [*argv[:-4], "--pretrained-checkpoint", str(tmp_path / "whole")]
    with pytest.raises(RankError, match="is a mixture of experts already; leave the flag out"):
        rank_pool.run(1, first_step, argv=again)


REFUSED = {
    "--moe-upcycling-granularity 2 --num-experts 4": "needs --moe-use-upcycling",
    "--moe-use-upcycling": "needs --num-experts",
    "--moe-use-upcycling --num-experts 4 --load": "needs a checkpoint: give --load",
    "--moe-use-upcycling --num-experts 4 --moe-ffn-hidden-size 24": (
        "--moe-ffn-hidden-size 24 is not the dense --ffn-hidden-size 48 / 1; leave it out"
    ),
    "--moe-use-upcycling --num-experts 4 --moe-upcycling-granularity 2": "legal: 24",
    "--moe-use-upcycling --num-experts 5 --moe-upcycling-granularity 2": (
        "--num-experts 5 must be a multiple of it"
    ),
    (
        "--moe-use-upcycling --num-experts 8 --moe-router-topk 3 --moe-upcycling-granularity 2"
    ): "--moe-router-topk 3 must be a multiple of it",
    (
        "--moe-use-upcycling --num-experts 4 --moe-router-topk 1"
    ): "its score is always 1 and the router gets no gradient",
    (
        "--moe-use-upcycling --num-experts 4 --moe-shared-expert-intermediate-size 16"
    ): "no weights for a shared expert",
    (
        "--moe-use-upcycling --num-experts 4 --moe-upcycling-granularity 2 "
        "--moe-ffn-hidden-size 24 --moe-router-load-balancing-type sinkhorn"
    ): "would scatter the slices; legal: 1",
    (
        "--moe-use-upcycling --num-experts 8 --moe-upcycling-granularity 2 --moe-router-topk 4 "
        "--moe-ffn-hidden-size 24 --moe-router-num-groups 8 --moe-router-group-topk 4"
    ): "experts of a group and experts of a token per group must be multiples of 2",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_makes_no_sense_is_refused(words: str) -> None:
    load = [] if words.endswith("--load") else ["--load", "somewhere"]
    argv = [*LLAMA_WORDS.split(), *RUN, *words.removesuffix("--load").split(), *load]
    told = [message for _, message in violations(parse_config(argv, {}), 1)]
    assert len(told) == 1
    assert REFUSED[words] in told[0]
