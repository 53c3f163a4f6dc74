"""Logical parameters: names, cuts, owners, and that the pieces tile every tensor once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from megatron_lite.config.plan import ParallelShape
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.physical import physical_name, physical_params
from megatron_lite.spec.shards import copies, is_owner, local_box, local_shape
from tests.model.builders import FAMILIES, GPT2, LLAMA


def parallel_of(tp: int, dp: int = 1, sp: bool = False) -> ParallelShape:
    return ParallelShape(tp * dp, tp, 1, 1, tp, dp, dp, 1, 1, sp, "tp-cp-ep-dp-pp")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_owned_boxes_tile_every_logical_tensor_exactly_once(family, tp, dp):
    parallel = parallel_of(tp, dp)
    for spec in model_spec(FAMILIES[family], parallel):
        seen = np.zeros(spec.shape, dtype=int)
        held = np.zeros(spec.shape, dtype=int)
        for tp_rank, dp_rank in itertools.product(range(tp), range(dp)):
            coordinate = {"tp": tp_rank, "dp": dp_rank, "cp": 0, "pp": 0}
            box = local_box(spec, coordinate, parallel)
            region = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            held[region] += 1
            if is_owner(spec, coordinate, parallel):
                seen[region] += 1
        assert (seen == 1).all(), spec.name
        assert (held == dp * copies(spec, parallel)).all(), spec.name


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_change_no_name_shape_or_law(family):
    def facts(parallel):
        specs = model_spec(FAMILIES[family], parallel)
        return [(s.name, s.shape, s.init, s.decay, s.uses) for s in specs]

    assert facts(parallel_of(1)) == facts(parallel_of(4, 2, sp=True))


def test_a_kv_head_is_shared_by_consecutive_ranks_and_partial_over_them():
    parallel = parallel_of(4)
    specs = {s.name: s for s in model_spec(LLAMA, parallel)}
    k = specs["decoder.layers.0.self_attention.linear_k.weight"]
    assert (k.tensor_parts, k.partial_axes) == (2, ("kv_replica",))
    offsets = [local_box(k, {"tp": r}, parallel).offset[0] for r in range(4)]
    assert offsets == [0, 0, 8, 8]
    q = specs["decoder.layers.0.self_attention.linear_q.weight"]
    assert (q.tensor_parts, q.partial_axes) == (4, ())


def test_norms_and_row_biases_are_partial_over_tp_only_under_sequence_parallelism():
    with_sp = {s.name: s.partial_axes for s in model_spec(GPT2, parallel_of(2, sp=True))}
    without = {s.name: s.partial_axes for s in model_spec(GPT2, parallel_of(2))}
    for name in (
        "decoder.final_layernorm.bias",
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc2.bias",
        "decoder.layers.0.self_attention.linear_proj.bias",
        "embedding.position_embeddings.weight",
    ):
        assert (with_sp[name], without[name]) == (("tp",), ()), name
    assert with_sp["decoder.layers.0.mlp.linear_fc1.bias"] == ()


def test_head_norms_are_partial_over_tp_with_and_without_sequence_parallelism():
    model = replace(LLAMA, qk_norm=True)
    for sp in (False, True):
        specs = {s.name: s for s in model_spec(model, parallel_of(2, sp=sp))}
        assert specs["decoder.layers.0.self_attention.q_layernorm.weight"].partial_axes == ("tp",)


def test_vocabulary_padding_is_stored_and_belongs_to_nobody():
    parallel = parallel_of(4)
    table = model_spec(replace(LLAMA, vocab_size=5, vocab_multiple=1), parallel)[0]
    assert table.padded == 8 and local_shape(table) == (2, 32)
    boxes = [local_box(table, {"tp": r}, parallel) for r in range(4)]
    assert [b.shape[0] for b in boxes] == [2, 2, 1, 0]


def test_fused_tensors_hold_their_logical_pieces_in_order():
    stored = {p.name: p for p in physical_params(model_spec(LLAMA, parallel_of(2)))}
    qkv = stored["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert [(v.spec.name.rsplit(".", 2)[1], v.start, v.rows) for v in qkv.views] == [
        ("linear_q", 0, 16),
        ("linear_k", 16, 8),
        ("linear_v", 24, 8),
    ]
    assert qkv.shape == (32, 32)
    up = "decoder.layers.3.mlp.linear_up.bias"
    assert physical_name(up) == "decoder.layers.3.mlp.linear_fc1.bias"


def test_only_matrices_decay_and_outputs_start_smaller():
    for spec in model_spec(GPT2, parallel_of(1)):
        assert spec.decay == (len(spec.shape) > 1), spec.name
        if spec.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            assert spec.init.std == pytest.approx(0.2 / 2)
