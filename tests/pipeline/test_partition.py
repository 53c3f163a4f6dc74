"""The cut in depth: every layer once, in order, or a message with the numbers."""

from collections.abc import Sequence

import pytest

from megatron_lite.errors import UserError
from megatron_lite.pipeline.partition import (
    Split,
    StagePart,
    check_parts,
    parse_layout,
    split_layers,
)
from megatron_lite.pipeline.placement import looping, v_shape


def layers_of_rank(
    parts: Sequence[StagePart], placement: Sequence[int], rank: int
) -> tuple[int, ...]:
    held = [part.layers for part in parts if placement[part.stage] == rank]
    return tuple(layer for layers in held for layer in layers)


def counts(parts: tuple[StagePart, ...]) -> list[int]:
    return [len(part.layers) for part in parts]


def test_c031_interleaved_ranks_hold_the_layers_of_their_stages() -> None:
    placement = looping(2, 2)
    parts = split_layers(8, placement)
    assert layers_of_rank(parts, placement, 0) == (0, 1, 4, 5)
    assert layers_of_rank(parts, placement, 1) == (2, 3, 6, 7)
    v_parts = split_layers(8, v_shape(2))
    assert layers_of_rank(v_parts, v_shape(2), 0) == (0, 1, 6, 7)


def test_c031_unequal_ranks_keep_the_global_order() -> None:
    parts = split_layers(8, looping(2, 1), Split(first=3, last=5))
    assert [part.layers for part in parts] == [(0, 1, 2), (3, 4, 5, 6, 7)]
    parts = split_layers(8, looping(2, 1), Split(first=1))
    assert [part.layers for part in parts] == [(0,), (1, 2, 3, 4, 5, 6, 7)]
    placement = looping(2, 2)
    parts = split_layers(8, placement, Split(first=2))
    assert layers_of_rank(parts, placement, 0) == (0, 4)
    assert layers_of_rank(parts, placement, 1) == (1, 2, 3, 5, 6, 7)


def test_c032_layers_that_virtual_stages_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"rank 0 gets 5 layers, which its 2 .* e\.g\. 4 or 6"):
        split_layers(10, looping(2, 2))
    assert sum(counts(split_layers(8, looping(2, 2)))) == 8


@pytest.mark.parametrize(
    ("layers", "ranks", "split", "told"),
    [
        (10, 4, Split(), "10 is not a multiple of --pipeline-model-parallel-size 4; nearest "
         "legal --num-layers: 8 or 12"),
        (8, 4, Split(with_embedding=True), "8 + 1 for the embedding = 9 is not .*: 7 or 11"),
        (8, 4, Split(first=3), "leave 5 layers, which the other 3 .*: 6 or 9"),
        (8, 2, Split(first=3, last=4), "leave 1 layers for the other 0"),
        (8, 4, Split(first=7), "leave 1 layers for the other 3"),
        (8, 4, Split(first=0), "each rank needs a layer"),
        (8, 1, Split(first=8), "need --pipeline-model-parallel-size above 1"),
        (8, 4, Split(first=2, with_loss=True), "give one kind"),
        (8, 4, Split(last=2, with_mtp=True), "give one kind"),
    ],
)  # fmt: skip
def test_impossible_splits_are_refused_with_legal_values(
    layers: int, ranks: int, split: Split, told: str
) -> None:
    with pytest.raises(UserError, match=told.replace("+", r"\+")):
        split_layers(layers, looping(ranks, 1), split)


def test_embedding_and_loss_count_as_layers() -> None:
    split = Split(with_embedding=True, with_loss=True)
    assert counts(split_layers(14, looping(4, 1), split)) == [3, 4, 4, 3]
    assert counts(split_layers(14, looping(2, 2), split)) == [3, 4, 4, 3]
    assert counts(split_layers(15, looping(4, 1), Split(with_loss=True))) == [4, 4, 4, 3]
    # A stage of the embedding alone is legal.
    assert counts(split_layers(2, looping(4, 1), split)) == [0, 1, 1, 0]


def test_depths_of_multi_token_prediction_count_as_layers_of_the_last_stage() -> None:
    parts = split_layers(7, looping(4, 1), Split(with_mtp=True), num_mtp=1)
    assert counts(parts) == [2, 2, 2, 1]
    assert [part.mtp for part in parts] == [(), (), (), (0,)]
    # DeepSeek-V3: 61 layers, a depth, embedding and loss are 64 for 16 ranks.
    whole = Split(with_embedding=True, with_loss=True, with_mtp=True)
    assert counts(split_layers(61, looping(16, 1), whole, num_mtp=1)) == [3, *[4] * 14, 2]
    assert counts(split_layers(61, looping(16, 2), whole, num_mtp=1)) == [1, *[2] * 30, 0]
    assert counts(split_layers(8, looping(4, 1), Split(with_mtp=True))) == [2, 2, 2, 2]


def test_ends_of_a_v_are_on_rank_0() -> None:
    parts = split_layers(8, v_shape(2))
    assert parts[0].embedding and parts[3].head
    assert not any(part.embedding for part in parts[1:])


@pytest.mark.parametrize(
    ("text", "layers", "ranks", "mtp", "wanted"),
    [
        ("Et|t|t|tL", 4, 2, 0, [1, 1, 1, 1]),
        ("Et*3|(tt|)*29,m|L", 61, 16, 1, [3, *[2] * 29, 0, 0]),
        ("Ett|(t|)*2tL", 5, 2, 0, [2, 1, 1, 1]),
        ("E|t*4|t*4|L", 8, 4, 0, [0, 4, 4, 0]),
        ("E t , t | t t L", 4, 2, 0, [2, 2]),
        ("E|((t|)*2)*2L", 4, 6, 0, [0, 1, 1, 1, 1, 0]),
    ],
)
def test_layout_strings_of_megatron(
    text: str, layers: int, ranks: int, mtp: int, wanted: list[int]
) -> None:
    parts = parse_layout(text, layers, ranks, num_mtp=mtp)
    assert counts(parts) == wanted
    assert [layer for part in parts for layer in part.layers] == list(range(layers))
    assert parts[0].embedding and parts[-1].head
    assert sum(len(part.mtp) for part in parts) == mtp


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Et|t|t", "3 stages for .* 2; legal: a multiple of 2"),
        ("Et|ttL", "3 decoder layers"),
        ("Ett|tt", "0 losses"),
        ("EEtt|ttL", "2 embeddings"),
        ("Ett|mttL", "1 MTP depths"),
        ("tEt|ttL", "E first"),
        ("E|ttttL|", "3 stages"),
        ("Ett|ttLx", "x is not part of a layout"),
        ("E(tt|ttL", "repetitions are"),
        ("Et*|ttt*L", "repetitions are"),
        ("Ett|tt*99999999L", "more than 1048576 layers"),
        ("E(t*1000000)*1000000|L", "more than 1048576 layers"),
        ("E((((((t*999)*999)*999)*999)*999)*999)|L", "more than 1048576 layers"),
        ("", "1 stages"),
    ],
)
def test_wrong_layout_strings_are_one_message(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_layout(text, 4, 2)


def test_layout_must_have_the_stages_of_the_other_flag() -> None:
    with pytest.raises(UserError, match=r"4 stages for .*legal: 2"):
        parse_layout("Et|t|t|tL", 4, 2, chunks=1)


def test_damaged_parts_are_named() -> None:
    good = list(split_layers(6, looping(3, 1)))
    with pytest.raises(UserError, match="on no stage: layers 2-3"):
        check_parts([good[0], StagePart(1, ()), good[2]], 6)
    with pytest.raises(UserError, match="on several stages: layers 1"):
        check_parts([good[0], StagePart(1, (1, 2, 3)), good[2]], 6)
    with pytest.raises(UserError, match="not among the 5 layers: 5"):
        check_parts(good, 5)
    with pytest.raises(UserError, match="not in the order"):
        check_parts([good[0], StagePart(1, (3, 2)), good[2]], 6)
    with pytest.raises(UserError, match="embedding belongs on the first"):
        check_parts([StagePart(0, (0, 1)), *good[1:]], 6)
    with pytest.raises(UserError, match="loss belongs on the last"):
        check_parts([*good[:2], StagePart(2, (4, 5))], 6)
