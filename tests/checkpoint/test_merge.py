"""Merging: known answers, exact ends, inputs of any layout, and a search that finds."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint.convert.bundle import logical_specs
from megatron_lite.checkpoint.merge import (
    average_coefficients,
    best_trial,
    combine,
    ema_weights,
    offset_coefficients,
    search_weights,
)
from megatron_lite.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.checkpoint.state import converted_state
from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.checkpoint.tensors import StateEntry
from megatron_lite.config.flags import parse_config
from megatron_lite.config.plan import build_model
from megatron_lite.config.resolve import resolved_values
from megatron_lite.errors import UserError
from megatron_lite.mesh.groups import local_group
from tests.checkpoint.tiny import same_bits
from tests.train.program import LLAMA, RUN, build_and
from tools.merge_checkpoints import main

VOCABULARY = 90


def random_weights(seed: int, scale: float = 0.02, words: Sequence[str] = ()) -> dict[str, Tensor]:
    """Weights of the tiny model; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for spec in logical_specs(parse_config([*LLAMA, *RUN, *words], {}), VOCABULARY):
        offset = 1.0 if "norm" in spec.name else 0.0
        noise = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        weights[spec.name] = (offset + scale * noise).float()
    return weights


def save_model(
    root: Path, weights: dict[str, Tensor], *words: str, pieces: int = 1, masters: bool = False,
    facts: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """Save a model, each tensor in so many pieces; with masters the weights are bfloat16."""
    config = parse_config([*LLAMA, *RUN, *words], {})
    model = build_model(config, VOCABULARY)
    state = converted_state(plain_json(resolved_values(config, 1)), model, "a test")
    state["facts"] |= facts or {}
    stored = dict(weights)
    if masters:
        stored = {name: tensor.bfloat16() for name, tensor in weights.items()}
        stored |= {f"optim/master/{name}": tensor for name, tensor in weights.items()}
    entries = []
    for name, tensor in stored.items():
        start = 0
        for part in tensor.chunk(pieces):
            offset = (start, *(0,) * (tensor.dim() - 1))
            entries.append(StateEntry(name, part, tuple(tensor.shape), offset, True))
            start += part.shape[0]
    save_checkpoint(root, 7, entries, plain_json(state), local_group("world"))
    return str(root)


def merged(out: Path, *words: str) -> Checkpoint:
    """Run the tool and open what it has written."""
    assert main([*words, "--save", str(out)]) == 0
    return open_checkpoint(out)


def test_an_average_is_that_of_fp64_rounded_once(tmp_path: Path) -> None:
    models = [random_weights(seed) for seed in range(3)]
    places = [save_model(tmp_path / str(i), m) for i, m in enumerate(models)]
    found = merged(tmp_path / "out", *places, "--weights", "0.625", "0.25", "0.125")
    for name in found.names:
        a, b, c = (model[name].double() for model in models)
        assert same_bits(found.read(name), (0.625 * a + 0.25 * b + 0.125 * c).float()), name
    source = "merge of 0.625 x 0 (step 7), 0.25 x 1 (step 7), 0.125 x 2 (step 7)"
    assert (found.step, found.state["origin"]) == (0, {"kind": "converted", "source": source})


def test_masters_are_merged_where_every_input_has_them(tmp_path: Path) -> None:
    models = [random_weights(seed) for seed in range(2)]
    with_masters = [
        save_model(tmp_path / str(i), m, "--bf16", masters=True) for i, m in enumerate(models)
    ]
    halves = {name: tensor.bfloat16() for name, tensor in models[1].items()}
    without = save_model(tmp_path / "2", halves, "--bf16")
    exact = merged(tmp_path / "exact", *with_masters)
    rounded = merged(tmp_path / "rounded", with_masters[0], without)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    a, b = (model[name].double() for model in models)
    assert same_bits(exact.read(name), ((a + b) / 2).bfloat16())
    mean = (a.bfloat16().double() + b.bfloat16().double()) / 2
    assert same_bits(rounded.read(name), mean.bfloat16())
    wide = merged(tmp_path / "wide", *with_masters, "--dtype", "float32")
    assert same_bits(wide.read(name), ((a + b) / 2).float())


EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "8", "--moe-router-enable-expert-bias"),
    *("--moe-router-score-function", "sigmoid", "--moe-aux-loss-coeff", "0.01"),
    *("--moe-router-load-balancing-type", "global_aux_loss"),
)
STATES = (".router.expert_bias", ".router.expert_counts")


@pytest.mark.parametrize("dtype", [(), ("--dtype", "bfloat16"), ("--dtype", "float32")])
def test_the_state_of_routers_is_merged_and_not_rounded_to_half_precision(
    tmp_path: Path, dtype: tuple[str, ...]
) -> None:
    models = []
    for seed in range(2):
        weights = random_weights(seed, words=EXPERTS)
        models.append({n: w if n.endswith(STATES) else w.bfloat16() for n, w in weights.items()})
    words = ("--bf16", *EXPERTS)
    places = [save_model(tmp_path / str(i), m, *words) for i, m in enumerate(models)]
    found = merged(tmp_path / "out", *places, *dtype)
    states = [name for name in found.names if name.endswith(STATES)]
    assert len(states) == 2 * 4
    for name in found.names:
        a, b = (model[name].double() for model in models)
        wide = name in states or "float32" in dtype
        mean = ((a + b) / 2).to(torch.float32 if wide else torch.bfloat16)
        assert same_bits(found.read(name), mean), name


def test_differences_from_a_base_may_be_weighted_beyond_one(tmp_path: Path) -> None:
    models = [random_weights(seed) for seed in range(3)]
    base, *places = [save_model(tmp_path / str(i), m) for i, m in enumerate(models)]
    words = ("--base", base, "--weights", "1.5", "-0.25")
    found = merged(tmp_path / "out", *places, *words)
    for name in found.names:
        b, x, y = (model[name].double() for model in models)
        expected = b + 1.5 * (x - b) - 0.25 * (y - b)
        assert torch.allclose(found.read(name).double(), expected, rtol=0, atol=1e-7), name


def test_the_ends_of_a_combination_are_the_models_to_the_bit(tmp_path: Path) -> None:
    models = [random_weights(seed) for seed in range(2)]
    models[1]["decoder.final_layernorm.weight"][0] = -0.0
    base, other = (save_model(tmp_path / str(i), m) for i, m in enumerate(models))
    for weight, model in zip(("0", "1"), models, strict=True):
        found = merged(tmp_path / f"w{weight}", other, "--base", base, "--weights", weight)
        assert all(same_bits(found.read(name), model[name]) for name in found.names)


def test_the_layout_of_the_inputs_does_not_matter(tmp_path: Path) -> None:
    models = [random_weights(seed) for seed in range(2)]
    results = []
    for pieces in (1, 2):
        places = [
            save_model(tmp_path / f"{pieces}-{i}", m, pieces=pieces) for i, m in enumerate(models)
        ]
        results.append(merged(tmp_path / f"out{pieces}", *places))
    one, two = results
    assert all(same_bits(one.read(name), two.read(name)) for name in one.names)


@pytest.mark.parametrize("inside", ["published/x", "attempts/ATTEMPT/x", "epochs"])
def test_results_are_not_saved_into_an_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    one = save_model(tmp_path / "one", random_weights(1))
    two = save_model(tmp_path / "two", random_weights(2))
    (attempt,) = (tmp_path / "one" / "attempts").glob("7-*[!k]")
    (tmp_path / "one" / "epochs").mkdir(exist_ok=True)
    place = tmp_path / "one" / inside.replace("ATTEMPT", attempt.name)
    before = sorted((tmp_path / "one").rglob("*"))
    assert main([one, two, "--save", str(place)]) == 2
    assert f"{place}: lies inside " in capsys.readouterr().err
    assert sorted((tmp_path / "one").rglob("*")) == before
    assert open_checkpoint(one).step == 7


@pytest.mark.parametrize(
    ("words", "facts", "told"),
    [
        (("--rotary-base", "500"), {}, "rotary_base"),
        ((), {"tokenizer_type": "another"}, "tokenizer_type: 'one', 'another'"),
        (("--max-position-embeddings", "32"), {}, "max_position_embeddings: 16, 32"),
        (("--norm-epsilon", "1e-3"), {}, "layernorm_epsilon"),
    ],
)
def test_unlike_inputs_are_refused_naming_the_difference(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    facts: dict[str, Any],
    told: str,
) -> None:
    weights = random_weights(0)
    one = save_model(tmp_path / "one", weights, facts={"tokenizer_type": "one"})
    two = save_model(tmp_path / "two", weights, *words, facts=facts)
    assert main([one, two, "--save", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert told in message and one in message and two in message
    assert not (tmp_path / "out").exists()


MIXTURE = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01")


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("--num-experts", "8"), ["num_experts: 4, 8"]),
        (("--moe-router-topk", "1", "--moe-router-pre-softmax"),
         ["moe_router_pre_softmax: False, True", "moe_router_topk: 2, 1"]),
        (("--moe-layer-freq", "2"), ["moe_layer_freq: [0, 1, 2, 3], [0, 2]"]),
        (None, ["num_experts: 4, None"]),
    ],
)  # fmt: skip
def test_unlike_mixtures_are_refused_in_one_short_line_each(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...] | None,
    lines: list[str],
) -> None:
    other = () if words is None else (*MIXTURE, *words)
    one = save_model(tmp_path / "one", random_weights(0, words=MIXTURE), *MIXTURE)
    two = save_model(tmp_path / "two", random_weights(0, words=other), *other)
    assert main([one, two, "--save", str(tmp_path / "out")]) == 2
    first, *told = capsys.readouterr().err.splitlines()
    assert first.endswith(f"{one} and {two} differ in")
    assert [line.strip() for line in told] == lines


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--weights", "1", "1"), "their sum is 2"),
        (("--weights", "1"), "1 numbers for 2 inputs"),
        (("--weights", "nan", "1"), "no number"),
        (("--ema-decay", "1"), r"\[0, 1\)"),
        (("--search", "--weights", "1", "0"), "--search finds"),
        (("--weights", "1", "-1", "--normalize"), "sum is 0"),
    ],
)
def test_impossible_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    place = save_model(tmp_path / "one", random_weights(0))
    assert main([place, place, *words, "--save", str(tmp_path / "out")]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_a_moving_average_is_what_its_recursion_gives() -> None:
    values, decay = [3.0, -1.0, 4.0, 2.5], 0.75
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    weights = ema_weights(4, decay)
    assert math.isclose(sum(w * v for w, v in zip(weights, values, strict=True)), average)
    assert math.isclose(sum(weights), 1)


def test_coefficients_always_add_up_to_one() -> None:
    assert average_coefficients([1, 1, 2], normalize=True) == (0.25, 0.25, 0.5)
    assert average_coefficients([0.7, 0.2, 0.1], normalize=False) == (0.7, 0.2, 0.1)
    assert offset_coefficients([0.5, -1.0]) == (1.5, 0.5, -1.0)
    with pytest.raises(UserError, match="--normalize"):
        average_coefficients([0.5, 0.6], normalize=False)


def test_a_model_of_weight_zero_is_not_read() -> None:
    def fail() -> Tensor:
        raise AssertionError("read")

    found = combine([fail, lambda: torch.ones(2)], [0.0, 1.0], torch.float32)
    assert same_bits(found, torch.ones(2))


@pytest.mark.parametrize("target", [(0.3, -0.2), (0.9, 0.6), (0.0, 0.0)])
def test_the_search_finds_the_minimum_of_a_bowl(target: tuple[float, float]) -> None:
    def loss(weights: tuple[float, ...]) -> float:
        return sum((w - t) ** 2 for w, t in zip(weights, target, strict=True))

    trials = search_weights(loss, 2, low=-1.0, high=1.0, steps=16)
    best = best_trial(trials)
    assert all(abs(w - t) < 2e-3 for w, t in zip(best.weights, target, strict=True))
    assert len(trials) <= 2 + 2 * 16


def test_the_search_is_never_worse_than_the_base_and_survives_nan() -> None:
    losses: dict[tuple[float, ...], float] = {(0.0,): 1.0}
    trials = search_weights(lambda w: losses.get(w, math.nan), 1, low=0, high=1, steps=5)
    assert best_trial(trials).weights == (0.0,)


def best_weight(printed: str) -> float:
    """The weight that the tool has told."""
    found = re.search(r"best of \d+: w = (-?[0-9.]+),", printed)
    assert found is not None, printed
    return float(found[1])


SEARCH = ("--search", "--mock-data", "--split", "80,20,0", "--eval-iters", "1", "--device", "cpu",
          "--global-batch-size", "4")  # fmt: skip


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # Noise on top of a model only hurts: the base stays.
        (lambda good, noise: (good, good + noise), 0.0),
        # Two models on opposite sides of a good one: it lies in the middle.
        (lambda good, noise: (good - noise, good + noise), 0.5),
    ],
)
def test_the_search_finds_where_the_validation_loss_is_lowest(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    expected: float,
) -> None:
    # Loud noise: what it gains by chance in its first, linear part is then of no weight.
    good, noise = random_weights(0), random_weights(1, scale=2.0)
    pairs = {name: make(good[name], noise[name] - float("norm" in name)) for name in good}
    base = save_model(tmp_path / "base", {name: pair[0] for name, pair in pairs.items()})
    other = save_model(tmp_path / "other", {name: pair[1] for name, pair in pairs.items()})
    words = (other, "--base", base, *SEARCH, "--data-cache-path", str(tmp_path / "cache"))
    found = merged(tmp_path / "out", *words, "--search-steps", "7")
    printed = capsys.readouterr().out
    weight = best_weight(printed)
    assert abs(weight - expected) < 0.06, printed
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    mixed = torch.lerp(pairs[name][0].double(), pairs[name][1].double(), weight)
    assert torch.allclose(found.read(name).double(), mixed, atol=1e-4)


def test_checkpoints_of_a_run_are_merged_and_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_lite.train.loop import train

    save = tmp_path / "save"
    argv = [*LLAMA, *RUN, "--bf16", "--train-iters", "2", "--save", str(save)]
    assert build_and(train, [*argv, "--save-interval", "1"], 0, 1) == 0
    capsys.readouterr()
    first, second = (open_checkpoint(save, step) for step in (1, 2))
    places = [str(save / f"iter_000000{step}") for step in (1, 2)]
    found = merged(tmp_path / "out", *places)
    name = "decoder.layers.0.self_attention.linear_k.weight"
    a, b = (c.read(f"optim/master/{name}").double() for c in (first, second))
    assert same_bits(found.read(name), ((a + b) / 2).bfloat16())
    merged(tmp_path / "best", *places, "--search", "--search-steps", "2", "--eval-iters", "1")
    assert "best of" in capsys.readouterr().out
    # The result starts a run.
    argv = [*LLAMA, *RUN, "--bf16", "--train-iters", "1", "--load", str(tmp_path / "best")]
    assert build_and(train, argv, 0, 1) == 0


def test_weights_and_results_beyond_all_numbers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = random_weights(1)
    whole = save_model(tmp_path / "whole", weights)
    name = next(iter(weights))
    spoiled = save_model(tmp_path / "nan", weights | {name: weights[name] * float("nan")})
    out = tmp_path / "out"
    for words, told in (
        ([whole, whole, "--weights", "1e308", "1e308"], "sum is too large"),
        ([whole, spoiled], f"{name}: merged, it has values that are no finite numbers"),
        ([whole, "--base", whole, "--weights", "1e300"], "beyond 3.40282e+38, the largest of"),
        ([spoiled, "--base", whole], f"{name}: merged, it has values that are no finite numbers"),
        ([whole, whole, "--save", "s3://bucket/run"], "--save s3://bucket/run: must be a dir"),
    ):
        assert main(["--save", str(out), *words]) == 2, words
        assert told in capsys.readouterr().err
        assert not list(out.glob("published/*"))
    assert main(["--save", str(out), whole, whole]) == 0
