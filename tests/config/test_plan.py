"""Derived values: Megatron's arithmetic, computed once."""

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.plan import build_plan, padded_vocab_size
from megatron_lite.config.ramp import count_train_iters, linear_ramp, parse_batch_schedule
from megatron_lite.config.rules import check_config
from tests.config.lines import line


def plan_of(text="", world=1, vocab=512, drop=""):
    config = parse_config(line(text, drop=drop), {})
    check_config(config, world)
    return build_plan(config, world, vocab)


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [(50257, 1, 50304), (50257, 2, 50432), (50257, 8, 51200), (32000, 3, 32256), (512, 4, 512)],
)
def test_padded_vocabulary(vocab, tp, padded):
    assert padded_vocab_size(vocab, 128, tp) == padded
    assert plan_of(vocab=vocab).model.padded_vocab_size(tp) == padded


def test_gpt2_defaults():
    model = plan_of().model
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (256, 16, 4)
    assert (model.position, model.rotary, model.activation) == ("learned_absolute", None, "gelu")
    assert model.linear_bias and model.qkv_bias and model.tied and not model.gated
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)


def test_llama_shape():
    model = plan_of(
        "--swiglu --hidden-size 192 --normalization RMSNorm --position-embedding-type rope "
        "--rotary-base 500000 --use-rope-scaling --group-query-attention --num-query-groups 2 "
        "--disable-bias-linear --untie-embeddings-and-output-weights --add-qkv-bias"
    ).model
    assert model.ffn_hidden_size == 512
    assert (model.gated, model.activation, model.num_query_groups) == (True, "silu", 2)
    assert not model.linear_bias and model.qkv_bias and not model.tied
    assert model.rotary is not None
    assert (model.rotary.base, model.rotary.dim, model.rotary.llama3_factor) == (500000.0, 48, 8.0)


def test_query_groups_need_their_gate():
    assert plan_of("--num-query-groups 2").model.num_query_groups == 4
    assert plan_of("--group-query-attention").model.num_query_groups == 1


def test_rotary_percent_and_interpolation():
    rotary = plan_of(
        "--use-rotary-position-embeddings --rotary-percent 0.5 --rotary-interleaved "
        "--rotary-seq-len-interpolation-factor 4"
    ).model.rotary
    assert rotary is not None
    assert (rotary.dim, rotary.interleaved, rotary.interpolation_factor) == (8, True, 4.0)
    assert rotary.llama3_factor is None


def test_layout_sizes():
    parallel = plan_of("--tensor-model-parallel-size 2 --sequence-parallel", world=8).parallel
    assert (parallel.tp, parallel.dp, parallel.edp, parallel.etp) == (2, 4, 4, 2)
    assert parallel.sequence_parallel and parallel.order == "tp-cp-ep-dp-pp"


def test_sequence_parallel_is_off_at_one_rank():
    assert not plan_of("--sequence-parallel").parallel.sequence_parallel


@pytest.mark.parametrize(
    ("flags", "dtypes"),
    [
        ("", ("float32", "float32", "float32")),
        ("--bf16", ("bfloat16", "float32", "float32")),
        ("--fp64", ("float64", "float64", "float64")),
    ],
)
def test_precision(flags, dtypes):
    precision = plan_of(flags).precision
    assert (precision.compute, precision.master, precision.main_grad) == dtypes


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", "none"),
        ("--recompute-activations", "selective"),
        ("--recompute-granularity selective", "selective"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "full",
        ),
    ],
)
def test_recompute_kind(flags, kind):
    assert plan_of(flags).recompute == kind


def test_global_batch_defaults_to_one_microbatch_per_rank():
    batch = plan_of(world=4).batch
    assert (batch.global_batch_size_at(0), batch.num_microbatches_at(0)) == (8, 1)
    assert batch.eval_global_batch_size == 8


def test_batch_size_ramp_grows_by_consumed_samples():
    batch = plan_of("--rampup-batch-size 2 2 12 --global-batch-size 8").batch
    # Three increments over 12 samples: one every 4.
    assert [batch.global_batch_size_at(n) for n in (0, 3, 4, 7, 8, 11, 12, 100)] == [
        2, 2, 4, 4, 6, 6, 8, 8,
    ]  # fmt: skip
    assert batch.num_microbatches_at(8) == 3


def test_ramp_that_starts_at_its_end_is_constant():
    assert linear_ramp(8, 2, 100, 8) == ((0, 8),)


def test_token_schedule_counts_whole_samples():
    batch = plan_of("--step-batch-size-schedule 0:4,1K:8").batch
    assert batch.ramp == ((0, 4), (32, 8))  # 1000 tokens / 32 per sample = 31.25
    assert parse_batch_schedule("0:768 250B:1536") == ((0, 768), (250 * 10**9, 1536))


@pytest.mark.parametrize("text", ["", "1:4", "0:4 0:8", "0:4 5", "0:0", "0:4 1Q:8"])
def test_bad_token_schedules_are_refused(text):
    with pytest.raises(ValueError, match=r"\w+"):
        parse_batch_schedule(text)


def test_samples_become_whole_steps():
    batch = plan_of(
        "--train-samples 41 --global-batch-size 8 --rampup-batch-size 2 2 12", drop="--train-iters"
    ).batch
    consumed = steps = 0
    while consumed + batch.global_batch_size_at(consumed) <= 41:
        consumed += batch.global_batch_size_at(consumed)
        steps += 1
    assert batch.train_iters == steps == 7


@pytest.mark.parametrize("samples", [1, 7, 8, 30, 39, 40, 41, 200])
def test_step_count_equals_stepping(samples):
    ramp = ((0, 2), (5, 4), (10, 8), (11, 6), (50, 10))
    consumed = steps = 0
    while True:
        size = [b for first, b in ramp if consumed >= first][-1]
        if consumed + size > samples:
            break
        consumed += size
        steps += 1
    assert count_train_iters(ramp, samples) == steps


def test_evaluation_without_interval_is_only_at_the_end():
    assert plan_of().batch.eval_interval == 0
    assert plan_of("--eval-interval 5").batch.eval_interval == 5
