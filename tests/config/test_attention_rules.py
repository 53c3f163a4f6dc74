"""Windows, sinks and gates: what the flags mean, and what of them is refused."""

import math

import pytest

from megatron_lite.config.attention_plan import WindowShape, parse_window
from megatron_lite.config.flags import parse_config
from megatron_lite.config.plan import ModelShape, build_model
from megatron_lite.config.rules import violations
from tests.config.lines import line


def model(text: str) -> ModelShape:
    config = parse_config(line(text), {})
    assert violations(config, 1) == []
    return build_model(config, 512)


def faults(text: str) -> str:
    return "\n".join(message for _, message in violations(parse_config(line(text), {}), 1))


@pytest.mark.parametrize("text", ["128,0", "(128,0)", "(128, 0)", "128,-1", " (128,0) "])
def test_a_window_is_a_pair_in_any_spelling(text: str) -> None:
    assert parse_window(text) == 128


@pytest.mark.parametrize(
    ("skip", "layers"),
    [
        ("", (0, 1, 2, 3)),
        ("--window-attn-skip-freq 2", (0, 2)),
        ("--window-attn-skip-freq 4", (0, 1, 2)),
        ("--window-attn-skip-freq [1,0]*2", (0, 2)),
        ("--window-attn-skip-freq ([0]*3+[1]*1)", (3,)),
    ],
)
def test_every_nth_layer_or_a_list_says_which_layers_have_windows(
    skip: str, layers: tuple[int, ...]
) -> None:
    shape = model(f"--window-size 7,0 {skip}")
    assert shape.window == WindowShape(7, layers)
    assert [shape.window_left(layer) for layer in range(4)] == [
        7 if layer in layers else -1 for layer in range(4)
    ]


def test_defaults_are_full_attention_and_a_plain_gate() -> None:
    shape = model("--swiglu")
    assert (shape.window, shape.sinks, shape.activation_limit) == (None, "none", math.inf)
    assert (shape.activation, shape.gated, shape.linear_offset) == ("silu", True, 0.0)


def test_gpt_oss_s_flags_build_its_gate_and_sinks() -> None:
    shape = model(
        "--quick-geglu --activation-func-clamp-value 7.0 --glu-linear-offset 1.0 "
        "--softmax-type learnable"
    )
    assert (shape.activation, shape.gated, shape.sinks) == ("quick_gelu", True, "learned")
    assert (shape.activation_limit, shape.linear_offset) == (7.0, 1.0)
    assert shape.ffn_hidden_size == 256  # not the 2/3 of --swiglu
    assert model("--softmax-type off-by-one").sinks == "zero"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--window-size 128", "no pair of whole numbers like 127,0"),
        ("--window-size 1,2,3", "no pair"),
        ("--window-size 1.5,0", "no pair"),
        ("--window-size __import__('os')", "no pair"),
        ("--window-size -1,0", "leave it out"),
        ("--window-size 4,4", "looks 4 tokens ahead"),
        ("--window-attn-skip-freq 2", "needs --window-size"),
        ("--window-size 4,0 --window-attn-skip-freq 0", "n >= 1"),
        ("--window-size 4,0 --window-attn-skip-freq [1,0]", "describes 2 layers, the model has 4"),
        ("--window-size 4,0 --window-attn-skip-freq 1", "leaves no layer a window"),
        ("--activation-func-clamp-value 7", "needs a gated activation"),
        ("--glu-linear-offset 1", "needs a gated activation"),
        ("--swiglu --activation-func-clamp-value 0", "must be greater than 0"),
        ("--swiglu --activation-func-clamp-value -7", "must be greater than 0"),
        ("--swiglu --quick-geglu", "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_in_words(text: str, told: str) -> None:
    assert told in faults(text)
