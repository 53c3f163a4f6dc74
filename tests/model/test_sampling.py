"""Sampling: the cache changes nothing, choices follow their options, limits are told."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_lite.errors import UserError
from megatron_lite.model.sampling import SamplingOptions, choose_token, sample_tokens
from tests.model.builders import FAMILIES, build_context, build_plan_of, build_stage


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mqa_interleaved"])
def test_cached_greedy_continuation_equals_the_whole_sequence(family):
    stage, _ = build_stage(build_plan_of(FAMILIES[family]))
    prompt = [5, 17, 3]
    produced = list(sample_tokens(stage, prompt, 8, SamplingOptions(greedy=True), None))
    assert len(produced) == 8
    sequence = torch.tensor(prompt + produced).unsqueeze(1)
    mb = build_context(stage.plan, None, torch.ones(len(sequence), 1))
    best = stage.logits(sequence, mb, None)[:, 0].argmax(-1)
    assert best[len(prompt) - 1 : -1].tolist() == produced


def test_continuation_stops_at_the_end_of_document_and_at_the_last_position():
    stage, _ = build_stage(build_plan_of(FAMILIES["gpt2"]))
    greedy = SamplingOptions(greedy=True)
    free = list(sample_tokens(stage, [1], 100, greedy, None))
    assert len(free) == stage.plan.model.max_position_embeddings
    stop = free[4]
    assert list(sample_tokens(stage, [1], 100, greedy, stop)) == free[: free.index(stop)]


def test_draws_follow_the_probabilities_and_repeat_with_the_seed():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    draws = [choose_token(logits, i, SamplingOptions(seed=3)) for i in range(2000)]
    assert draws == [choose_token(logits, i, SamplingOptions(seed=3)) for i in range(2000)]
    share = Counter(draws)
    for token, probability in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(share[token] / 2000 - probability) < 0.04
    assert {choose_token(logits, i, SamplingOptions(top_k=2)) for i in range(300)} == {0, 1}
    assert {choose_token(logits, i, SamplingOptions(top_p=0.6)) for i in range(300)} == {0, 1}


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "no tokens"), ([101], "101"), ([-1], "-1"), ([0] * 17, "17 tokens")]
)
def test_unusable_prompts_are_refused(prompt, words):
    stage, _ = build_stage(build_plan_of(FAMILIES["llama"]))
    with pytest.raises(UserError, match=words):
        list(sample_tokens(stage, prompt, 1, SamplingOptions(), None))


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}])
def test_unusable_options_are_refused(bad):
    with pytest.raises(UserError, match="--"):
        SamplingOptions(**bad)
