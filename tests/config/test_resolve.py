"""The printed configuration describes the same run."""

import dataclasses

import pytest
import yaml

from megatron_lite.config.flags import parse_config
from megatron_lite.config.plan import build_plan
from megatron_lite.config.resolve import resolved_yaml
from megatron_lite.config.rules import check_config
from tests.config.lines import line

LINES = [
    "",
    "--swiglu --position-embedding-type rope --bf16 --tensor-model-parallel-size 2 "
    "--sequence-parallel --global-batch-size 8 --lr 1e-5 --adam-eps 1e-8",
    "--use-rotary-position-embeddings --group-query-attention --num-query-groups 2 "
    "--rampup-batch-size 4 4 16 --global-batch-size 16 --recompute-activations",
    "--no-position-embedding --legacy-loss-normalization --step-batch-size-schedule 0:4 1K:8",
    "--no-mmap-bin-files --disable-bias-linear --save out --save-interval 5 --ckpt-allow a b",
]


@pytest.mark.parametrize("text", LINES)
def test_printed_config_gives_the_same_run(tmp_path, text):
    config = parse_config(line(text), {})
    check_config(config, 2)
    printed = resolved_yaml(config, 2)
    path = tmp_path / "resolved.yaml"
    path.write_text(printed)
    again = parse_config(["--config-file", str(path)], {})
    check_config(again, 2)
    assert build_plan(again, 2, 512) == build_plan(config, 2, 512)
    assert resolved_yaml(again, 2) == printed


def test_printed_config_holds_resolved_values():
    values = yaml.safe_load(resolved_yaml(parse_config(line("--swiglu --hidden-size 192"), {}), 4))
    assert values["ffn_hidden_size"] == 512
    assert values["kv_channels"] == 48
    assert values["global_batch_size"] == 8
    assert values["lr_decay_iters"] == 10
    assert values["lr"] == 1e-3


def test_config_cannot_be_changed():
    config = parse_config(line(), {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 5  # type: ignore[misc]


def test_unchecked_nan_stays_unchecked():
    off = parse_config(line("--no-check-for-nan-in-loss-and-grad"), {})
    assert yaml.safe_load(resolved_yaml(off, 1))["nan_policy"] is None
    assert yaml.safe_load(resolved_yaml(parse_config(line(), {}), 1))["nan_policy"] == "stop"
