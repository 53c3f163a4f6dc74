"""Scale windows and multi-latent attention down with the rest of a layout.

Kept are which layers have a window, beginning with the user's, whether queries have a latent,
and whether values are as wide as keys; scaled are the widths.
"""

from __future__ import annotations

from typing import Any

from megatron_lite.config.attention_plan import parse_window, windowed_layers
from megatron_lite.config.schema import Config

MOST_LEFT = 5  # earlier tokens in a window, of the two dozen that there are
PLAIN, TURNED = 8, 4  # channels of a head without and with position


def scale_attention(config: Config, num_layers: int) -> dict[str, Any]:
    """Flags of the scaled attention by destination.

    Args:
        config: the user's, accepted by the rules.
        num_layers: of the scaled model.
    """
    flags: dict[str, Any] = {}
    if config.window_size is not None:
        flags["window_size"] = f"{min(parse_window(config.window_size), MOST_LEFT)},0"
        flags["window_attn_skip_freq"] = _scale_layers(config, num_layers)
    if config.multi_latent_attention:
        whole = config.qk_head_dim + config.qk_pos_emb_head_dim
        values = {config.qk_head_dim: PLAIN, whole: PLAIN + TURNED}
        flags |= {
            "kv_channels": None,
            "q_lora_rank": None if config.q_lora_rank is None else 12,
            "kv_lora_rank": 16,
            "qk_head_dim": PLAIN,
            "qk_pos_emb_head_dim": TURNED,
            "v_head_dim": values.get(config.v_head_dim, PLAIN - 2),
        }
    return flags


def _scale_layers(config: Config, num_layers: int) -> str | None:
    """All with a window, or both kinds, beginning with the user's."""
    layers = config.num_layers or 1
    kinds = windowed_layers(config, layers)
    if len(kinds) == layers or num_layers == 1:
        return None
    first = int(0 in kinds)
    return str([first] + [1 - first] * (num_layers - 1)).replace(" ", "")
