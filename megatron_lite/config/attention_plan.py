"""What the attention of newer families is, resolved from its flags: windows, latents, YaRN.

A window belongs to layers; a sink is one more logit per head in the softmax's denominator.
YaRN slows channels down that turn rarely, for longer texts than a model was trained on.
Source: Peng et al. 2023; numbers as Megatron-LM forms them.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass

from megatron_lite.config.layer_pattern import expand_pattern
from megatron_lite.config.schema import Config

# --softmax-type -> what joins the denominator
SINKS = {"vanilla": "none", "off-by-one": "zero", "learnable": "learned"}


@dataclass(frozen=True)
class WindowShape:
    """Sliding windows.

    Attributes:
        left: keys before itself that a query sees.
        layers: global numbers of the layers that have it, ascending; the others see all.
    """

    left: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class YarnShape:
    """YaRN's scaling of rotary positions.

    Attributes:
        factor: how much longer texts get; >= 1.
        original_positions: length of the texts before.
        beta_fast: channels that turn more often over the original positions are kept.
        beta_slow: channels that turn less often are slowed down by the factor.
        mscale, mscale_all_dim: see `magnitude` and `score_factor`.
        whole_channels: the border between the two is rounded to channels.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    whole_channels: bool

    def _growth(self, share: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * share * math.log(self.factor) + 1.0

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine."""
        return self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """Factor of the scores of multi-latent attention."""
        return self._growth(self.mscale_all_dim) ** 2

    def slowed_range(self, dim: int, base: float) -> tuple[float, float]:
        """First pair of channels that is slowed down a little, and the first slowed down fully.

        Args:
            dim: rotated channels.
            base: of the frequencies.
        """

        def pair(turns: float) -> float:
            length = self.original_positions / (turns * 2 * math.pi)
            return dim * math.log(length) / (2 * math.log(base))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.whole_channels:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 if low == high else high


@dataclass(frozen=True)
class LatentShape:
    """Multi-latent attention.

    Attributes:
        q_lora_rank: width of the queries' latent; 0: queries come from the hidden states.
        kv_lora_rank: width of the latent of keys and values.
        qk_head_dim: channels per head of queries and keys without position.
        qk_pos_emb_head_dim: with position; all heads share those of the keys.
        v_head_dim: channels per head of values.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


def plan_latent(config: Config) -> LatentShape | None:
    """Resolve the flags of multi-latent attention; None without it."""
    if not config.multi_latent_attention:
        return None
    return LatentShape(
        config.q_lora_rank or 0,
        config.kv_lora_rank,
        config.qk_head_dim,
        config.qk_pos_emb_head_dim,
        config.v_head_dim,
    )


def uses_yarn(config: Config) -> bool:
    """Whether YaRN scales the positions; multi-latent attention takes it for `rope`, too."""
    kind = config.position_embedding_type
    latent = config.multi_latent_attention and config.rotary_scaling_factor != 1.0
    rope = kind == "rope" or config.use_rotary_position_embeddings
    return kind == "yarn" or (latent and rope)


def plan_yarn(config: Config) -> YarnShape | None:
    """Resolve the flags of YaRN; None where positions are not scaled by it."""
    if not uses_yarn(config):
        return None
    return YarnShape(
        factor=config.rotary_scaling_factor,
        original_positions=config.yarn_original_max_position_embeddings or 4096,
        beta_fast=32.0 if config.yarn_beta_fast is None else config.yarn_beta_fast,
        beta_slow=1.0 if config.yarn_beta_slow is None else config.yarn_beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        whole_channels=config.yarn_correction_range_round_to_int,
    )


def parse_window(text: str) -> int:
    """Return how many earlier keys a query sees, from `left,right` with or without brackets.

    Raises:
        ValueError: it is no pair, or no window of causal attention.
    """
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no pair of whole numbers like 127,0") from error
    if not (isinstance(found, tuple) and len(found) == 2 and all(type(n) is int for n in found)):
        raise ValueError(f"{text!r} is no pair of whole numbers like 127,0")
    left, right = found
    if left < 0:
        raise ValueError(f"{text!r} is no window: leave it out to see all earlier tokens")
    if right not in (0, -1):
        raise ValueError(f"{text!r} looks {right} tokens ahead, but attention is causal: give 0")
    return int(left)


def windowed_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers with a window by `--window-attn-skip-freq`.

    A number n leaves every n-th layer without; a list has 1 for a window.

    Raises:
        ValueError: the pattern is not one, or has another length than the model.
    """
    text = config.window_attn_skip_freq
    if text is None:
        return tuple(range(num_layers))
    if text.strip().isdecimal():
        every = int(text)
        if every < 1:
            raise ValueError(f"{text!r}: every n-th layer needs n >= 1")
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every != 0)
    flags = expand_pattern(text, num_layers)
    return tuple(layer for layer, has_window in enumerate(flags) if has_window)


def plan_window(config: Config, num_layers: int) -> WindowShape | None:
    """Resolve the flags of sliding windows; None where every layer sees all."""
    if config.window_size is None:
        return None
    layers = windowed_layers(config, num_layers)
    return WindowShape(parse_window(config.window_size), layers) if layers else None
