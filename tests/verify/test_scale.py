"""Scaling keeps what decides which code runs, and drops what leaves traces."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import check_config
from megatron_lite.verify.scale import Scaled, scale_axis_sizes, scale_down, scale_heads

LARGE = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --ffn-hidden-size 28672 --seq-length 8192 "
    "--max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 "
    "--rotary-percent 0.5 --use-rope-scaling --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0.05 --micro-batch-size 1 --global-batch-size 1024 --train-iters 1000 "
    "--lr 1e-4 --bf16 --tensor-model-parallel-size 8 --sequence-parallel "
    "--recompute-granularity full --recompute-method block --recompute-num-layers 30 "
    "--data-path /nowhere --tokenizer-type NullTokenizer --vocab-size 128256 --seed 77 "
    "--save /nowhere --save-interval 10 --load /nowhere --log-interval 5"
)


def scaled(flags: str, world_size: int, tmp_path: Path) -> Scaled:
    config = parse_config(flags.split(), {})
    check_config(config, world_size)
    return scale_down(config, world_size, tmp_path, steps=3, precision="fp64")


def test_a_large_job_becomes_a_tiny_one_of_the_same_kind(tmp_path: Path) -> None:
    result = scaled(LARGE, 512, tmp_path)
    case = result.case
    layout = case.layout(case.axes)
    assert layout.ranks == 8
    small = parse_config([*case.flags, *layout.flags], {})
    check_config(small, layout.ranks)
    user = parse_config(LARGE.split(), {})
    kept = (
        "position_embedding_type rotary_base rotary_percent use_rope_scaling normalization swiglu "
        "add_bias_linear untie_embeddings_and_output_weights hidden_dropout attention_dropout "
        "group_query_attention recompute_granularity recompute_method sequence_parallel seed"
    )
    for name in kept.split():
        assert getattr(small, name) == getattr(user, name), name
    assert small.num_attention_heads // small.num_query_groups > 1
    assert small.recompute_num_layers == 1 < small.num_layers  # part of the layers stays part
    assert (small.save, small.load, small.save_interval, small.bf16) == (None, None, None, False)
    assert (small.optimizer, small.sgd_momentum, small.fp64) == ("sgd", 0.0, True)
    assert [axis.name for axis in case.axes] == [
        *("tp", "sp", "dp", "micro-batch", "recompute", "native-on"),
    ]
    assert any("hidden_size: 8192 ->" in note for note in result.notes)


@pytest.mark.parametrize(
    "change",
    [
        "--num-query-groups 1",
        "--num-query-groups 4",
        "--num-query-groups 64",
        "--tensor-model-parallel-size 1",
        "--tensor-model-parallel-size 2 --kv-channels 256",
        "--legacy-loss-normalization",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 80",
        "--global-batch-size 64",
        "--pipeline-model-parallel-size 4 --recompute-num-layers 5",
        "--pipeline-model-parallel-size 4 --pipeline-schedule zbv --recompute-num-layers 5",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 "
        "--recompute-num-layers 5",
        "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved-zb "
        "--num-layers-per-virtual-pipeline-stage 10 --recompute-num-layers 5",
        "--pipeline-model-parallel-size 8 --pipeline-schedule gpipe --global-batch-size 2 "
        "--recompute-num-layers 5",
    ],
)
def test_scaled_flags_are_legal_in_every_layout(tmp_path: Path, change: str) -> None:
    case = scaled(f"{LARGE} {change}", 64, tmp_path).case
    for axes in ((), case.axes):
        layout = case.layout(axes)
        check_config(parse_config([*case.flags, *layout.flags], {}), layout.ranks)


def test_a_pipeline_stays_one_with_its_schedule_and_a_steady_phase(tmp_path: Path) -> None:
    flags = f"{LARGE} --pipeline-model-parallel-size 8 --pipeline-schedule zbv"
    flags += " --recompute-num-layers 4"
    result = scaled(flags, 1024, tmp_path)
    assert [axis.name for axis in result.case.axes][:4] == ["tp", "sp", "pp", "dp"]
    layout = result.case.layout(result.case.axes)
    small = parse_config([*result.case.flags, *layout.flags], {})
    assert (small.pipeline_model_parallel_size, small.pipeline_schedule) == (2, "zbv")
    assert small.num_layers == 2 * 2 * 2  # part of the layers of a stage is recomputed
    microbatches = result.case.global_batch_size // 2 // (small.micro_batch_size or 1)
    assert microbatches == 4
    assert any("pp: 8 -> 2" in note for note in result.notes)


def test_a_loss_of_microbatch_means_keeps_its_microbatches(tmp_path: Path) -> None:
    case = scaled(f"{LARGE} --legacy-loss-normalization", 64, tmp_path).case
    assert case.micro_batch_size == 1
    assert "micro-batch" not in [axis.name for axis in case.axes]


@given(
    user_tp=st.sampled_from([1, 2, 4, 8, 16]),
    groups=st.sampled_from([1, 2, 4, 8, 16]),
    per_group=st.sampled_from([1, 2, 3, 8]),
    share=st.sampled_from([1, 2, 4]),
)
def test_scaled_heads_fit_tp_and_keep_their_relation(
    user_tp: int, groups: int, per_group: int, share: int
) -> None:
    heads, tp = groups * per_group, max(user_tp // share, 1)
    if heads % user_tp or (groups % user_tp and user_tp % groups):
        return
    small_heads, small_groups = scale_heads(heads, groups, user_tp, tp)
    assert small_heads % tp == 0 and small_heads % small_groups == 0
    assert small_groups % tp == 0 or tp % small_groups == 0
    assert (small_heads == small_groups) == (heads == groups)
    if groups < user_tp and tp > 1 and heads > groups:
        assert small_groups < tp  # replicated as the user's are


@given(tp=st.integers(1, 64), pp=st.integers(1, 64), dp=st.integers(1, 512))
def test_scaled_axes_fit_the_pool_and_stay_axes(tp: int, pp: int, dp: int) -> None:
    sizes = scale_axis_sizes({"tp": tp, "pp": pp, "dp": dp})
    assert sizes["tp"] * sizes["pp"] * sizes["dp"] <= 8
    wanted = (tp > 1, pp > 1, dp > 1)
    assert (sizes["tp"] > 1, sizes["pp"] > 1, sizes["dp"] > 1) == wanted


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--use-distributed-optimizer", "optim"),
        (
            "--data-parallel-sharding-strategy optim_grads --gradient-accumulation unsharded "
            "--overlap-param-gather --num-distributed-optimizer-instances 4",
            "optim_grads --num-distributed-optimizer-instances 2 --overlap-param-gather "
            "--gradient-accumulation unsharded",
        ),
        (
            "--use-megatron-fsdp --reshard-after backward",
            "optim_grads_params --gradient-accumulation sharded --reshard-after backward",
        ),
    ],
)
def test_sharding_of_the_data_axis_is_kept(tmp_path: Path, flags: str, kept: str) -> None:
    words = LARGE.replace("--tensor-model-parallel-size 8 --sequence-parallel", "")
    result = scaled(f"{words} {flags}", 64, tmp_path)
    layout = result.case.layout(result.case.axes)
    check_config(parse_config([*result.case.flags, *layout.flags], {}), layout.ranks)
    (axis,) = (axis for axis in result.case.axes if axis.name == "sharding")
    assert " ".join(axis.flags) == f"--data-parallel-sharding-strategy {kept}"


def test_copies_without_ranks_for_them_become_one_and_are_told(tmp_path: Path) -> None:
    flags = f"{LARGE} --use-distributed-optimizer --num-distributed-optimizer-instances 4"
    result = scaled(flags, 64, tmp_path)
    (axis,) = (axis for axis in result.case.axes if axis.name == "sharding")
    assert axis.flags == ("--data-parallel-sharding-strategy", "optim")
    assert "copies of shards: 4 -> 1" in result.notes
