"""Missing or wrong gradient reductions (GSYNC): what is replicated stays replicated.

Five steps of plain SGD on a model in which everything is replicated somewhere, against one
process. A ratio of 0.5 or 2 between the norms of gradients is how these faults look.
"""

import numpy as np
import pytest

from tests.cases.conftest import Replicated
from tests.cases.layouts import EXPERT_LAYOUTS, LAYOUTS, PARALLEL, REFERENCE, axis_sizes, data_ranks
from tests.cases.ranks import input_gradients
from tests.cases.tiny import SGD, flags
from tests.pool import RankPool

LAYERS = 4
NORMS = (
    "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.1.pre_mlp_layernorm.weight",
    "decoder.final_layernorm.weight",
)
ROW_BIASES = ("self_attention.linear_proj.bias", "mlp.linear_fc2.bias")
HEAD_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
KV = tuple(f"self_attention.linear_{x}.{kind}" for x in "kv" for kind in ("weight", "bias"))


def assert_replicated_and_equal(
    replicated: Replicated, layout: str, endings: tuple[str, ...], expected_tensors: int
) -> None:
    """Equal bits on every rank that holds a region; gradients, updates equal one process."""
    run = replicated(layout)
    held = run.bits(*endings)
    assert len({name for name, _ in held}) == expected_tensors
    for place, digests in held.items():
        assert len(set(digests)) == 1, place
    assert run.differing(*endings) == []
    gradients, wanted = run.record.tensors(1, "grad"), run.reference.tensors(1, "grad")
    for name in {name for name, _ in held}:
        norm = np.linalg.norm(wanted[name])
        assert norm > 1e-6, name
        assert np.linalg.norm(gradients[name]) / norm == pytest.approx(1, abs=1e-9), name


@pytest.mark.parametrize("layout", PARALLEL)
def test_c057_norm_weights_and_row_biases_equal_one_process(
    replicated: Replicated, layout: str
) -> None:
    names = ("layernorm.weight", *ROW_BIASES)
    # Per layer two norms, two head norms and two biases, and the final norm.
    assert_replicated_and_equal(replicated, layout, names, LAYERS * 6 + 1)
    held = {name for name, _ in replicated(layout).bits(*names)}
    assert set(NORMS) <= held


@pytest.mark.parametrize("layout", PARALLEL)
def test_c058_query_and_key_norms_equal_one_process(replicated: Replicated, layout: str) -> None:
    assert_replicated_and_equal(replicated, layout, HEAD_NORMS, LAYERS * 2)


@pytest.mark.parametrize("layout", PARALLEL)
def test_c059_the_one_kv_head_equals_one_process(replicated: Replicated, layout: str) -> None:
    assert_replicated_and_equal(replicated, layout, KV, LAYERS * 4)
    run = replicated(layout)
    for digests in run.bits(*KV).values():
        # Every rank of the stage holds the one head, or each its part of the shards' copies.
        sizes = axis_sizes(LAYOUTS[layout])
        assert len(digests) == LAYOUTS[layout].ranks // (sizes["pp"] * sizes["zero"])


@pytest.mark.parametrize("layout", [name for name in PARALLEL if data_ranks(name) == 1])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_c059_gradients_of_the_layer_inputs_equal_one_process(
    rank_pool: RankPool, layout: str, kv_heads: int
) -> None:
    argv = flags(f"{SGD} --num-layers 4 --num-query-groups {kv_heads} --qk-layernorm", steps=1)
    argv += ["--micro-batch-size", "2", "--global-batch-size", "2"]
    (wanted,) = rank_pool.run(1, input_gradients, argv=argv)
    size, words = LAYOUTS[layout].ranks, LAYOUTS[layout].flags
    found = rank_pool.run(size, input_gradients, argv=[*argv, *words])
    assert {layer for rank in found for layer in rank} == set(range(LAYERS))
    for rank in found:
        assert len(rank) == LAYERS // axis_sizes(LAYOUTS[layout])["pp"]
        for layer, (positions, grad) in rank.items():
            expected = wanted[layer][1][positions]
            assert np.abs(grad - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize("layout", [name for name in EXPERT_LAYOUTS if name != REFERENCE])
def test_c056_gradients_of_every_expert_equal_one_process(mixture: Replicated, layout: str) -> None:
    """Raw gradients of one backward at the same global batch; a factor of EP is how it failed."""
    run = mixture(layout)
    gradients, wanted = run.record.tensors(1, "grad"), run.reference.tensors(1, "grad")
    stacks = [name for name in wanted if ".mlp.experts." in name]
    assert len(stacks) == 4 * 3
    for name in stacks:
        assert gradients[name].shape == wanted[name].shape and len(wanted[name]) == 4
        for expert, gradient in enumerate(wanted[name]):
            norm = np.linalg.norm(gradient)
            assert norm > 1e-6, (name, expert)
            difference = np.linalg.norm(gradients[name][expert] - gradient)
            assert difference <= 1e-10 * norm, (name, expert)
