"""Initial weights (INIT): one model for one seed, however it is cut and replicated."""

from collections import defaultdict
from pathlib import Path

import pytest

from tests.cases.layouts import LAYOUTS, REFERENCE, axis_sizes, batch_for
from tests.cases.ranks import initial_weights, program
from tests.cases.tiny import flags
from tests.pool import RankPool, fork_ranks

TEXT = "--num-layers 4 --add-qkv-bias --qk-layernorm"


@pytest.fixture(scope="module")
def reference(rank_pool: RankPool) -> str:
    ((found, _),) = rank_pool.run(1, initial_weights, argv=flags(TEXT))
    return str(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c041_every_layout_starts_from_the_same_bits(
    rank_pool: RankPool, reference: str, layout: str
) -> None:
    argv = [*flags(TEXT), *LAYOUTS[layout].flags]
    argv += ["--global-batch-size", str(batch_for(layout, 8))]
    ranks = rank_pool.run(LAYOUTS[layout].ranks, initial_weights, argv=argv)
    assert {found for found, _ in ranks} == {reference}
    replicas = defaultdict(set)
    shards = defaultdict(set)
    for _, pieces in ranks:
        for name, offset, digest in pieces:
            replicas[name, offset].add(digest)
            shards[name].add((offset, digest))
    assert all(len(digests) == 1 for digests in replicas.values())
    for name, held in shards.items():
        if not name.endswith(("bias", "layernorm.weight")):  # zeros and ones
            assert len({digest for _, digest in held}) == len(held), name
    # Something is cut where there is tensor parallelism, or sharding over the data axis.
    cut = any(len(held) > 1 for held in shards.values())
    sizes = axis_sizes(LAYOUTS[layout])
    assert cut == (sizes["tp"] * sizes["zero"] > 1)


def test_c041_another_seed_is_another_model(rank_pool: RankPool, reference: str) -> None:
    ((found, _),) = rank_pool.run(1, initial_weights, argv=flags(f"{TEXT} --seed 1235"))
    assert found != reference


@pytest.mark.parametrize("layout", [REFERENCE, "tp2-sp-dp2"])
def test_c041_the_check_at_start_prints_one_hash(
    reference: str, tmp_path: Path, layout: str
) -> None:
    argv = [*flags(TEXT, steps=1), *LAYOUTS[layout].flags, "--check-weights-hash"]
    exits = fork_ranks(LAYOUTS[layout].ranks, program, argv)
    assert [found.code for found in exits] == [0] * LAYOUTS[layout].ranks, exits
    printed = "".join(found.stdout for found in exits)
    assert printed.count("logical hash of the weights") == 1
    assert f"logical hash of the weights: {reference}" in printed
