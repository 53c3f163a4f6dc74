"""The proof is proven: every planted bug is caught, and its axis, phase and tensor named."""

import re
from typing import NamedTuple

import pytest

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    pipeline_axis,
    recompute_axis,
    sequence_axis,
    tensor_axis,
)
from tests.parity import faults, multi_token_faults, pipeline_faults
from tests.parity.conftest import Certifiers

TP2, SP, DP2, MBS2 = tensor_axis(2), sequence_axis(), data_axis(2), microbatch_axis(2)
ALL = (TP2, SP, DP2, MBS2)
NO_SP = (TP2, DP2, MBS2)
PP2, ZB2 = pipeline_axis(2), pipeline_axis(2, "zb-h1")
REPLICATED_KV = (tensor_axis(4), MBS2)
DEPTH = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
MODULES = (pipeline_faults, multi_token_faults, faults)

pytestmark = pytest.mark.parity


class Planted(NamedTuple):
    """A bug of one of the fault files, the layout that meets it, and what it must be called."""

    name: str
    model: str
    layout: tuple[Axis, ...]
    axes: tuple[str, ...]
    phase: str
    tensor: str  # regular expression
    extra: str = ""


PLANTED = (
    Planted("sp_norm_reduction_dropped", "llama", ALL, ("sp",), "gradient", r".*layernorm\.weight"),
    Planted(
        "sp_row_bias_reduction_dropped", "gpt2", ALL, ("sp",), "gradient", r".*(fc2|proj)\.bias"
    ),
    Planted("position_rows_by_local_index", "gpt2", ALL, ("sp",), "activation", "embedding"),
    Planted("dropout_by_local_position", "gpt2", ALL, ("sp",), "activation", "embedding"),
    Planted("attention_mask_by_local_head", "gpt2", ALL, ("tp",), "activation", r"layers\.0"),
    Planted("denominator_per_rank", "llama", ALL, ("dp",), "gradient", r".*\.weight"),
    Planted(
        "kv_gradient_doubled", "llama", REPLICATED_KV, ("tp",), "gradient", r".*linear_[kv]\.weight"
    ),
    Planted(
        "kv_gradient_not_reduced",
        "qwen2",
        REPLICATED_KV,
        ("tp",),
        "gradient",
        r".*linear_[kv]\.(weight|bias)",
    ),
    Planted(
        "head_norm_not_reduced", "qwen3", NO_SP, ("tp",), "gradient", r".*[qk]_layernorm\.weight"
    ),
    Planted(
        "norm_reduced_where_replicated", "qwen3", NO_SP, ("tp",), "gradient", r".*layernorm\.weight"
    ),
    Planted("clip_per_rank", "llama", ALL, ("tp",), "update", r".*"),
    Planted("replicated_counted_on_every_rank", "gpt2", ALL, ("tp",), "norm", "grad_norm"),
    Planted(
        "bucket_sent_before_accumulation_ended",
        "llama",
        ALL,
        ("dp", "micro-batch"),
        "gradient",
        r".*",
    ),
    Planted("first_bucket_never_reduced", "llama", ALL, ("dp",), "gradient", r"output_layer.*"),
    Planted("mean_over_data_ranks", "llama", ALL, ("dp",), "gradient", r"output_layer.*"),
    Planted(
        "column_input_gradient_not_reduced",
        "llama",
        NO_SP,
        ("tp",),
        "gradient",
        r"decoder\.layers\.1\.pre_mlp_layernorm\.weight",
    ),
    Planted("foreign_embedding_rows_not_zeroed", "llama", ALL, ("tp",), "activation", "embedding"),
    Planted(
        "padding_columns_in_softmax",
        "llama",
        ALL,
        ("tp",),
        "loss",
        "lm_loss",
        "--make-vocab-size-divisible-by 1",
    ),
    Planted("loss_peak_not_reduced", "llama", ALL, ("tp",), "loss", "lm_loss"),
    Planted("loss_sum_not_reduced", "llama", ALL, ("tp",), "loss", "lm_loss"),
    Planted("initial_values_seeded_per_rank", "llama", ALL, ("tp",), "init", r".*weight"),
    Planted(
        "dropout_differs_when_recomputed",
        "gpt2",
        (TP2, recompute_axis("selective")),
        ("recompute",),
        "gradient",
        r"decoder\.layers\.1\..*linear_[qkv]\.(weight|bias)",
    ),
    Planted("samples_ordered_by_rank", "llama", (DP2, MBS2), ("dp",), "data", "the samples.*"),
    Planted(
        "last_microbatch_overwrites",
        "llama",
        ALL,
        ("micro-batch",),
        "gradient",
        r"decoder\.layers\.1\.mlp\.linear_fc2\.weight",
    ),
    Planted("update_skipped_on_one_rank", "llama", ALL, ("tp",), "update", r".*weight"),
    Planted(
        "message_of_the_microbatch_before",
        "llama",
        (PP2, MBS2),
        ("pp", "micro-batch"),
        "activation",
        r"layers\.1",
    ),
    Planted(
        "gradient_message_of_the_microbatch_before",
        "llama",
        (PP2, TP2, MBS2),
        ("pp", "micro-batch"),
        "gradient",
        r"decoder\.layers\.0\.mlp\..*",
    ),
    Planted(
        "tied_gradient_not_reduced",
        "gpt2",
        (PP2, DP2),
        ("pp",),
        "gradient",
        r"embedding\.word_embeddings\.weight",
    ),
    Planted("tied_weight_counted_twice", "gpt2", (PP2, MBS2), ("pp",), "norm", "grad_norm"),
    Planted("norm_of_one_stage_missing", "llama", (PP2, MBS2), ("pp",), "norm", "grad_norm"),
    Planted(
        "microbatch_dropped",
        "llama",
        (ZB2, MBS2),
        ("pp", "micro-batch"),
        "gradient",
        r"decoder\.layers\.1\.mlp\..*",
    ),
    Planted(
        "weight_gradients_never_run",
        "llama",
        (ZB2, MBS2),
        ("pp", "micro-batch"),
        "run",
        r".*gradient contributions arrived",
    ),
    Planted(
        "embedding_copy_not_reduced",
        "llama",
        (PP2, DP2),
        ("pp",),
        "gradient",
        r"embedding\.word_embeddings\.weight",
        DEPTH,
    ),
    Planted(
        "embedding_copy_counted_twice", "llama", (PP2, MBS2), ("pp",), "norm", "grad_norm", DEPTH
    ),
    Planted(
        "depth_divided_by_the_main_denominator",
        "llama",
        ALL,
        ("tp",),
        "gradient",
        r"mtp\.0\..*",
        DEPTH,
    ),
    Planted(
        "depth_denominator_per_rank", "llama", (DP2, MBS2), ("dp",), "loss", "mtp_1_loss", DEPTH
    ),
    Planted(
        "target_across_a_document_border", "llama", (TP2,), ("tp",), "loss", "mtp_1_loss", DEPTH
    ),
    Planted("target_of_the_next_sample", "llama", (TP2,), ("tp",), "loss", "mtp_1_loss", DEPTH),
    Planted("rank_fails", "llama", (TP2,), ("tp",), "run", ".*planted failure"),
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_planted_fault_is_caught_and_named(certifier_of: Certifiers, planted: Planted) -> None:
    certifier = certifier_of(planted.model, extra=planted.extra, steps=2)
    module = next(module for module in MODULES if hasattr(module, planted.name))
    fault = f"{module.__name__}:{planted.name}"
    verdict = certifier.certify(planted.layout, fault=fault, measure=False)
    assert not verdict.holds
    found = next(
        (cause for cause in verdict.causes if cause.axes == planted.axes), verdict.causes[0]
    )
    assert found.axes == planted.axes, str(found)
    assert found.first.phase == planted.phase, str(found)
    assert re.match(planted.tensor, found.first.name), str(found)


def test_work_done_twice_is_not_a_parallel_run(certifier_of: Certifiers) -> None:
    certifier = certifier_of("llama", steps=2)
    verdict = certifier.certify((TP2,), fault="tests.parity.faults:every_rank_holds_everything")
    assert not verdict.causes
    assert "FLOPs, its share" in verdict.share_faults[0]
    assert not verdict.holds


@pytest.mark.parametrize("model", ["gpt2", "llama", "qwen2", "qwen3"])
def test_correct_code_is_certified(certifier_of: Certifiers, model: str) -> None:
    verdict = certifier_of(model, steps=2).certify((TP2, SP, DP2, MBS2, recompute_axis("full")))
    assert verdict.holds, [*map(str, verdict.causes), *verdict.share_faults]
    assert verdict.ranks == 4
