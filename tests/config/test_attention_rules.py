"""Windows, sinks and gates: what the flags mean, and what of them is refused."""

import math

import pytest

from megatron_lite.config.attention_plan import LatentShape, WindowShape, YarnShape, parse_window
from megatron_lite.config.flags import parse_config
from megatron_lite.config.notices import notices
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


YARN = "--position-embedding-type yarn"


def test_yarn_s_defaults_are_the_published_ones() -> None:
    rotary = model(f"{YARN} --rotary-scaling-factor 40").rotary
    assert rotary is not None
    assert rotary.yarn == YarnShape(40.0, 4096, 32.0, 1.0, 1.0, 0.0, True)
    assert rotary.yarn.magnitude == pytest.approx(0.1 * math.log(40) + 1)
    free = model(f"{YARN} --no-yarn-correction-range-round-to-int").rotary
    assert free is not None and free.yarn is not None and not free.yarn.whole_channels
    whole = model(f"{YARN} --yarn-correction-range-round-to-int").rotary
    assert whole is not None and whole.yarn is not None and whole.yarn.whole_channels


LATENT = "--multi-latent-attention --position-embedding-type rope"


def test_latent_attention_s_defaults_are_megatron_s() -> None:
    shape = model(LATENT)
    assert shape.latent == LatentShape(0, 32, 128, 64, 128)
    assert (shape.kv_channels, shape.value_channels, shape.num_query_groups) == (192, 128, 4)
    assert shape.rotary is not None and shape.rotary.dim == 64
    assert shape.rotary.interleaved and shape.rotary.yarn is None
    assert shape.softmax_scale == pytest.approx(192**-0.5)
    assert not shape.qkv_bias and shape.linear_bias


def test_latent_attention_takes_yarn_for_rope_when_positions_are_scaled() -> None:
    shape = model(f"{LATENT} --rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 0.5")
    assert shape.rotary is not None and shape.rotary.yarn is not None
    growth = 0.05 * math.log(40) + 1
    assert shape.softmax_scale == pytest.approx(192**-0.5 * growth**2)
    assert shape.rotary.yarn.magnitude == pytest.approx((0.1 * math.log(40) + 1) / growth)


def test_flags_of_latents_without_them_are_told_not_refused() -> None:
    config = parse_config(line("--kv-lora-rank 512 --q-lora-rank 64"), {})
    assert violations(config, 1) == []
    assert any("no effect without --multi-latent" in text for text in notices(config, 1))
    config = parse_config(line(f"{LATENT} --kv-channels 16"), {})
    assert any("--kv-channels 16 has no effect" in text for text in notices(config, 1))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--multi-latent-attention", "needs rotary positions, not learned_absolute"),
        (f"{LATENT} --group-query-attention", "leave out --group-query-attention"),
        (f"{LATENT} --rotary-interleaved --add-qkv-bias", "--rotary-interleaved, --add-qkv-bias"),
        (f"{LATENT} --qk-pos-emb-head-dim 5", "must be an even number"),
        (f"{LATENT} --v-head-dim 0", "--v-head-dim 0 must be at least 1"),
        (f"{LATENT} --q-lora-rank 0", "--q-lora-rank 0 must be at least 1"),
        (f"{LATENT} --kv-lora-rank 3000000000", "at most"),
        ("--rotary-scaling-factor 4", "--rotary-scaling-factor changes nothing without"),
        ("--mscale-all-dim 1 --yarn-beta-fast 16", "--yarn-beta-fast, --mscale-all-dim changes"),
        (f"{YARN} --rotary-scaling-factor 0.5", "must be at least 1"),
        (f"{YARN} --yarn-beta-fast 1", "--yarn-beta-fast 1.0 must be greater"),
        (f"{YARN} --yarn-beta-slow 0", "and both than 0"),
        (f"{YARN} --mscale -1", "at least 0"),
        (f"{YARN} --rotary-base 1", "--rotary-base 2 or more"),
        (f"{YARN} --use-rope-scaling", "leave out --use-rope-scaling"),
        (f"{YARN} --yarn-original-max-position-embeddings 0", "at least 1"),
        (f"{YARN} --rotary-percent 0.2", "must be an even number"),
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
