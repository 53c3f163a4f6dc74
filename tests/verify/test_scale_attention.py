"""Scaled-down windows and latents keep their kind, and are legal."""

from pathlib import Path

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import check_config
from megatron_lite.verify.scale import scale_down
from tests.verify.test_scale_experts import USER

DENSE = USER.replace("--num-experts 64", "--position-embedding-type rope --hidden-dropout 0")
MLA = "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --rotary-scaling-factor 40"
LATENTS = "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4"


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--window-size 127,0 --window-attn-skip-freq 2", "--window-attn-skip-freq [1,0]"),
        ("--window-size 127,0 --window-attn-skip-freq [0]*4+[1]*8", "--window-size 5,0"),
        ("--window-size 2,0 --softmax-type learnable", "--window-size 2,0"),
        (MLA, f"--q-lora-rank 12 {LATENTS} --v-head-dim 8"),
        (f"{MLA} --v-head-dim 192", f"{LATENTS} --v-head-dim 12"),
        (f"{MLA} --v-head-dim 64", f"{LATENTS} --v-head-dim 6"),
        (
            "--multi-latent-attention --kv-channels 64 --tensor-model-parallel-size 4 "
            "--sequence-parallel --pipeline-model-parallel-size 2",
            LATENTS,
        ),
    ],
)
def test_the_kind_is_kept_and_every_layout_is_legal(tmp_path: Path, flags: str, kept: str) -> None:
    config = parse_config([*DENSE.split(), *flags.split()], {})
    check_config(config, 64)
    case = scale_down(config, 64, tmp_path, steps=1, precision="fp64").case
    for axes in ((), case.axes):
        layout = case.layout(axes)
        words = [*case.flags, *layout.flags]
        assert kept in " ".join(words)
        assert "--kv-channels" not in words or not config.multi_latent_attention
        check_config(parse_config(words, {}), layout.ranks)
