"""Mixtures of experts: what is refused, in which words; what the flags mean."""

import pytest

from megatron_lite.config.expert_plan import plan_experts
from megatron_lite.config.flags import parse_config
from megatron_lite.config.notices import notices
from megatron_lite.config.rules import violations
from megatron_lite.errors import UserError
from tests.config.lines import line

MIXTURE = "--num-experts 8"
BAD = {
    "topk-fits-experts": ("--moe-router-topk 9", ["--moe-router-topk 9", "1..--num-experts 8"]),
    "top-1-needs-pre-softmax": ("--moe-router-topk 1", ["no gradient", "--moe-router-pre-softmax"]),
    "router-groups": (
        "--moe-router-num-groups 3 --moe-router-group-topk 1",
        ["--moe-router-num-groups 3 must divide --num-experts 8", "2 or 4"],
    ),
    "groups-alone": (
        "--moe-router-num-groups 4",
        ["--moe-router-num-groups needs --moe-router-group-topk"],
    ),
    "groups-too-small": (
        "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 1",
        ["4 experts do not fit", "at most 2"],
    ),
    "groups-uneven": (
        "--moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2",
        ["must be a multiple of --moe-router-group-topk 2"],
    ),
    "balancing-coefficients": (
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1 2 3",
        ["has 3 values for 2 kinds", "give one, or one for each"],
    ),
    "kinds-twice": (
        "--moe-router-load-balancing-type aux_loss aux_loss",
        ["a kind is named twice"],
    ),
    "sinkhorn-and-losses": (
        "--moe-router-load-balancing-type sinkhorn aux_loss",
        ["none and sinkhorn stand alone"],
    ),
    "sinkhorn-and-groups": (
        "--moe-router-load-balancing-type sinkhorn --moe-router-num-groups 2 "
        "--moe-router-group-topk 1",
        ["--moe-router-num-groups has no effect beside", "sinkhorn"],
    ),
    "sinkhorn-and-scores": (
        "--moe-router-load-balancing-type sinkhorn --moe-router-score-function sigmoid",
        ["--moe-router-score-function sigmoid has no effect beside"],
    ),
    "sinkhorn-and-bias": (
        "--moe-router-load-balancing-type sinkhorn --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias",
        ["--moe-router-enable-expert-bias has no effect beside"],
    ),
    "expert-bias-needs-sigmoid": (
        "--moe-router-enable-expert-bias",
        ["needs --moe-router-score-function sigmoid"],
    ),
    "scaling-factor-positive": (
        "--moe-router-topk-scaling-factor 0",
        ["--moe-router-topk-scaling-factor 0.0 must be greater than 0"],
    ),
    "capacity-positive": (
        "--moe-expert-capacity-factor 0",
        ["--moe-expert-capacity-factor 0.0 must be greater than 0"],
    ),
    "padding-needs-capacity": (
        "--moe-pad-expert-input-to-capacity",
        ["needs --moe-expert-capacity-factor"],
    ),
    "rerouting-needs-capacity": (
        "--moe-reroute-candidates 1",
        ["--moe-reroute-candidates 1 needs --moe-expert-capacity-factor"],
    ),
    "rerouting-has-candidates": (
        "--moe-expert-capacity-factor 1 --moe-reroute-candidates 7",
        ["--moe-reroute-candidates 7 must lie in 0..6", "(8 less --moe-router-topk 2)"],
    ),
    "rerouting-inside-groups": (
        "--moe-expert-capacity-factor 1 --moe-reroute-candidates 3 --moe-router-num-groups 4 "
        "--moe-router-group-topk 2",
        ["--moe-reroute-candidates 3 must lie in 0..2"],
    ),
    "running-form": (
        "--moe-global-aux-loss-form running",
        ["needs --moe-router-load-balancing-type global_aux_loss"],
    ),
    "shared-gate": (
        "--moe-shared-expert-gate",
        ["needs --moe-shared-expert-intermediate-size"],
    ),
    "negative-weights": ("--moe-aux-loss-coeff -1", ["must not be negative"]),
    "jitter": ("--moe-input-jitter-eps 1", ["--moe-input-jitter-eps 1.0 must be below 1"]),
    "layer-pattern": ("--moe-layer-freq ([0]*2)", ["--moe-layer-freq ([0]*2)"]),
}


def faults(text: str) -> list[str]:
    return [message for _, message in violations(parse_config(line(text), {}), 1)]


@pytest.mark.parametrize("name", BAD)
def test_one_message_says_what_is_wrong_and_what_is_legal(name: str) -> None:
    flags, parts = BAD[name]
    (message,) = faults(f"{MIXTURE} {flags}")
    assert all(part in message for part in parts), message


def test_stages_hold_whole_expert_blocks() -> None:
    text = (
        f"{MIXTURE} --use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 2"
    )
    found = [message for _, message in violations(parse_config(line(text), {}), 4)]
    assert any("one pipeline stage for dense and expert layers" in text for text in found)
    without = text.replace("--use-tp-pp-dp-mapping ", "")
    assert violations(parse_config(line(without), {}), 4) == []


@pytest.mark.parametrize(
    ("expert_ranks", "copies", "legal"), [(4, 2, "1"), (2, 4, "2"), (1, 3, "2 or 4")]
)
def test_copies_of_sharded_state_divide_the_ranks_of_an_expert(
    expert_ranks: int, copies: int, legal: str
) -> None:
    text = (
        f"{MIXTURE} --use-distributed-optimizer --expert-model-parallel-size {expert_ranks} "
        f"--num-distributed-optimizer-instances {copies}"
    )
    (message,) = [found for _, found in violations(parse_config(line(text), {}), 4)]
    assert f"{copies} must divide the 4 data-parallel ranks" in message
    assert f"the {4 // expert_ranks} of each expert" in message
    assert message.endswith(f"nearest legal: {legal}")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--moe-router-topk 1 --moe-router-pre-softmax",
        "--moe-router-topk 1 --moe-router-score-function sigmoid",
        "--moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
        "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2",
        "--moe-expert-capacity-factor 100 --moe-pad-expert-input-to-capacity",
        "--moe-expert-capacity-factor 1 --moe-reroute-candidates 6",
        "--moe-router-load-balancing-type global_aux_loss --moe-global-aux-loss-form running",
        "--moe-router-topk 8 --moe-per-layer-logging",
    ],
)
def test_legal_mixtures_pass(flags: str) -> None:
    assert faults(f"{MIXTURE} {flags}") == []


def test_flags_of_routers_wait_for_experts() -> None:
    assert faults("--moe-router-topk 1 --moe-layer-freq 9") == []
    config = parse_config(line(""), {})
    assert plan_experts(config, 4, 16) is None


def test_one_coefficient_serves_all_kinds_and_zero_switches_off() -> None:
    def balancing(flags: str) -> tuple[tuple[str, float], ...]:
        shape = plan_experts(parse_config(line(f"{MIXTURE} {flags}"), {}), 4, 16)
        assert shape is not None
        return shape.balancing

    kinds = "--moe-router-load-balancing-type aux_loss seq_aux_loss"
    assert balancing(f"{kinds} --moe-aux-loss-coeff 0.1") == (
        ("aux_loss", 0.1),
        ("seq_aux_loss", 0.1),
    )
    assert balancing(f"{kinds} --moe-aux-loss-coeff 0.1 0") == (("aux_loss", 0.1),)
    assert balancing(kinds) == ()
    assert balancing("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1") == ()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", True),
        ("--moe-aux-loss-coeff 0.01", False),
        ("--moe-router-score-function sigmoid --moe-router-enable-expert-bias", False),
        ("--moe-router-load-balancing-type sinkhorn", False),
    ],
)
def test_a_load_that_nothing_balances_is_told(flags: str, told: bool) -> None:
    found = notices(parse_config(line(f"{MIXTURE} {flags}"), {}), 1)
    assert any("expert load is not balanced" in text for text in found) == told


HOT = "--moe-replicated-experts"
EP2 = "--expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (f"{HOT} 1", ["there are no experts", "--num-experts"]),
        (f"{MIXTURE} {HOT} -1", ["-1 must lie in 0..7"]),
        (f"{MIXTURE} {HOT} 8 {EP2}", ["8 must lie in 0..7", "--expert-model-parallel-size 1"]),
        (f"{MIXTURE} {HOT} 2 {EP2}", ["needs --moe-token-dispatcher-type alltoall, not allgather"]),
        (
            f"{MIXTURE} {HOT} 2 {EP2} --moe-token-dispatcher-type alltoall "
            "--overlap-moe-expert-parallel-comm --untie-embeddings-and-output-weights",
            ["--overlap-moe-expert-parallel-comm", "leave one of the two out"],
        ),
    ],
)
def test_experts_that_cannot_be_replicated_are_one_message(flags: str, told: list[str]) -> None:
    ((rule, message),) = violations(parse_config(line(flags), {}), 2)
    assert rule == "replicated-experts"
    assert message.startswith(HOT)
    assert all(words in message for words in told), message


def test_replicated_experts_wait_for_expert_ranks() -> None:
    for flags in ("", f"{EP2} --moe-token-dispatcher-type alltoall"):
        config = parse_config(line(f"{MIXTURE} {HOT} 7 {flags}"), {})
        assert violations(config, 2) == []
        shape = plan_experts(config, 4, 16)
        assert shape is not None
        assert shape.replicated == 7


def test_c064_an_unknown_drop_policy_is_an_argument_error() -> None:
    words = [*line(MIXTURE), "--moe-expert-capacity-factor", "1", "--moe-token-drop-policy"]
    with pytest.raises(UserError, match=r"--moe-token-drop-policy.*least.*probs.*position"):
        parse_config([*words, "least"], {})
    for policy in ("probs", "position"):
        shape = plan_experts(parse_config([*words, policy], {}), 4, 16)
        assert shape is not None and shape.drop_policy == policy
