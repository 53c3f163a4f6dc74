"""What a pipeline rank holds: every parameter where it is used, a tied one at both ends."""

from __future__ import annotations

import pytest

from megatron_lite.pipeline.partition import StagePart
from megatron_lite.pipeline.placement import looping, v_shape
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.physical import physical_params
from megatron_lite.spec.shards import is_owner
from megatron_lite.spec.stages import specs_on_rank
from tests.model.builders import FAMILIES, GPT2, LLAMA
from tests.spec.test_spec import parallel_of

WORDS = "embedding.word_embeddings.weight"


def cut(num_layers: int, stages: int) -> tuple[StagePart, ...]:
    """Layers dealt evenly; the first stages may have none."""
    ends = [num_layers * stage // stages for stage in range(stages + 1)]
    return tuple(
        StagePart(
            stage,
            tuple(range(ends[stage], ends[stage + 1])),
            embedding=stage == 0,
            head=stage == stages - 1,
        )
        for stage in range(stages)
    )


def on_ranks(family: object, placement: tuple[int, ...]) -> list[dict[str, ParamSpec]]:
    specs = model_spec(family, parallel_of(1))  # type: ignore[arg-type]
    parts = cut(family.num_layers, len(placement))  # type: ignore[attr-defined]
    return [
        {spec.name: spec for spec in specs_on_rank(specs, parts, placement, rank)}
        for rank in range(max(placement) + 1)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "placement",
    [(0,), (0, 1), looping(2, 2), v_shape(2), (0, 1, 2, 3), looping(4, 2), v_shape(4)],
    ids=str,
)
def test_every_use_of_every_parameter_is_on_exactly_one_rank(
    family: str, placement: tuple[int, ...]
) -> None:
    whole = model_spec(FAMILIES[family], parallel_of(1))
    ranks = on_ranks(FAMILIES[family], placement)
    for spec in whole:
        held = [rank[spec.name].uses for rank in ranks if spec.name in rank]
        assert sorted(use for uses in held for use in uses) == sorted(spec.uses), spec.name
        assert all(held), spec.name
    order = [spec.name for spec in whole]
    for rank in ranks:
        assert [name for name in order if name in rank] == list(rank)


def test_tied_ends_on_two_ranks_are_copies_with_a_partial_gradient() -> None:
    for placement in ((0, 1), (0, 1, 2, 3), looping(2, 2)):
        ranks = on_ranks(GPT2, placement)
        first, last = ranks[0][WORDS], ranks[-1][WORDS]
        assert (first.uses, last.uses) == (("embedding",), ("head",))
        for spec in (first, last):
            assert spec.holders == (0, len(ranks) - 1)
            assert spec.partial_axes == ("tied_ends",)
        assert all(WORDS not in rank for rank in ranks[1:-1])
        parallel = parallel_of(1)
        coordinates = [{"tp": 0, "dp": 0, "cp": 0, "pp": rank} for rank in range(len(ranks))]
        owners = [
            is_owner(rank[WORDS], coordinate, parallel)
            for rank, coordinate in zip(ranks, coordinates, strict=True)
            if WORDS in rank
        ]
        assert owners == [True, False]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tied_ends_on_one_rank_are_one_parameter_used_twice(ranks: int) -> None:
    found = on_ranks(GPT2, v_shape(ranks))
    spec = found[0][WORDS]
    assert set(spec.uses) == {"embedding", "head"}
    assert (spec.holders, spec.partial_axes) == ((), ())
    assert all(WORDS not in rank for rank in found[1:])
    physical = {p.name: p for p in physical_params(tuple(found[0].values()))}
    assert len(physical[WORDS].uses) == 2  # so its bucket waits for both stages


def test_untied_ends_are_two_parameters_without_copies() -> None:
    first, last = on_ranks(LLAMA, (0, 1))
    assert WORDS in first and WORDS not in last
    assert "output_layer.weight" in last and "output_layer.weight" not in first
    assert "decoder.final_layernorm.weight" in last
    assert not any(spec.holders for rank in (first, last) for spec in rank.values())
