"""The generator's known answers, and that a decision depends on its logical place only."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_lite.ops.attention import attention_mask
from megatron_lite.ops.dropout import hidden_mask
from megatron_lite.ops.random import (
    decision_counter,
    flat_words,
    keep_mask,
    normal_values,
    philox4x32,
    stream_counter,
)
from tests.model.builders import LLAMA, build_context, build_plan_of

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers_of_random123(counter, key, words):
    out = philox4x32(tuple(torch.tensor(c) for c in counter), key)
    assert tuple(int(w) for w in out) == words


def test_words_are_numbered_by_decision_not_by_call():
    whole = flat_words(torch.arange(6), 10, 0, 10, 3, 4, 99)
    assert torch.equal(whole[2:5, 3:8], flat_words(torch.arange(2, 5), 10, 3, 5, 3, 4, 99))
    aligned = flat_words(torch.arange(6), 12, 0, 12, 3, 4, 99)
    assert torch.equal(aligned.flatten()[:60], whole.flatten())
    assert torch.equal(aligned[:, 4:11], flat_words(torch.arange(6), 12, 4, 7, 3, 4, 99))


def test_word_of_a_decision_is_word_e_mod_4_of_block_e_div_4():
    decision = 2**34 + 7
    c2, c3 = stream_counter("init/x")
    block = decision // 4
    counter = (torch.tensor(block & ONES), torch.tensor(block >> 32), c2, c3)
    expected = philox4x32(counter, (5, 0))[decision % 4]
    got = flat_words(torch.tensor([0]), 1, decision, 1, c2, c3, 5)
    assert int(got) == int(expected)


def test_normals_of_a_region_are_the_region_of_the_normals():
    whole = normal_values("w", (7, 9), (0, 0), (7, 9), 1)
    assert torch.equal(normal_values("w", (7, 9), (2, 3), (4, 5), 1), whole[2:6, 3:8])
    assert torch.equal(normal_values("w", (63,), (20,), (30,), 1), whole.flatten()[20:50])
    assert not torch.equal(normal_values("v", (7, 9), (0, 0), (7, 9), 1), whole)
    assert not torch.equal(normal_values("w", (7, 9), (0, 0), (7, 9), 2), whole)


def test_normals_have_the_moments_of_the_law():
    values = normal_values("w", (400, 500), (0, 0), (400, 500), 3)
    n = values.numel()
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / n)


def test_keep_rate_is_exact_in_the_words():
    words = torch.tensor([0, int(0.1 * 2**32) - 1, int(0.1 * 2**32), ONES])
    assert keep_mask(words, 0.1).tolist() == [False, False, True, True]


def test_unknown_purpose_is_refused():
    with pytest.raises(KeyError, match="embedding_dropout"):
        decision_counter("typo_dropout", 0, 0)


def _context(samples, positions):
    mb = build_context(build_plan_of(LLAMA), None, torch.ones(12, len(samples)))
    return replace(mb, sample_ids=torch.tensor(samples), positions=positions)


def test_hidden_masks_of_slices_and_microbatches_are_parts_of_one_mask():
    everything = _context([5, 6, 7, 8], torch.arange(12))
    whole = hidden_mask(everything.positions, 32, 0.3, "mlp_output_dropout", 1, everything)
    part = _context([6, 7], torch.arange(6, 12))
    got = hidden_mask(part.positions, 32, 0.3, "mlp_output_dropout", 1, part)
    assert torch.equal(got, whole[6:12, 1:3])
    other_step = replace(everything, step=everything.step + 1)
    again = hidden_mask(everything.positions, 32, 0.3, "mlp_output_dropout", 1, other_step)
    assert not torch.equal(again, whole)
    assert abs(whole.double().mean() - 0.7) < 0.05


def test_attention_masks_are_keyed_by_logical_head():
    mb = _context([5, 6], torch.arange(12))
    whole = attention_mask(0, 4, 12, 0.3, 0, mb)
    assert torch.equal(attention_mask(2, 2, 12, 0.3, 0, mb), whole[:, 2:4])
    assert not torch.equal(whole[:, 0], whole[:, 1])
