"""DeepSeek-V3's shape has the parameters and FLOPs that were published for it."""

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.plan import Plan, build_plan
from megatron_lite.spec.model import model_spec
from megatron_lite.telemetry.flops import model_flops_per_token
from megatron_lite.train.summary import active_parameters
from tools.bench.pairs import DEEPSEEK_V3, GPUS, VOCABULARY

LAYOUT = "Etttt|" + "tttt|" * 14 + "t"  # and the end
TOTAL, ACTIVE, FURTHER = 671_026_419_200, 37_552_297_472, 11_610_068_224


def planned(end: str, *more: str) -> Plan:
    argv = [*DEEPSEEK_V3, "--pipeline-model-parallel-layout", LAYOUT + end, *more]
    return build_plan(parse_config(argv, {}), GPUS, VOCABULARY)


def test_deepseek_v3_has_its_published_parameters_in_total_and_per_token() -> None:
    plan = planned("L")
    specs = model_spec(plan.model, plan.parallel)
    assert sum(spec.elements for spec in specs) == TOTAL
    assert active_parameters(specs, plan.model.experts) == ACTIVE
    plan = planned("mL", "--mtp-num-layers", "1")
    assert sum(spec.elements for spec in model_spec(plan.model, plan.parallel)) == TOTAL + FURTHER


def test_flops_are_those_of_the_parameters_that_a_token_meets() -> None:
    # What others report for this model by the same convention, without and with its depth.
    plain = model_flops_per_token(planned("L").model, "causal_half")
    assert plain == pytest.approx(249.7e9, rel=5e-3)
    further = model_flops_per_token(planned("mL", "--mtp-num-layers", "1").model, "causal_half")
    assert further == pytest.approx(260.0e9, rel=5e-3)
