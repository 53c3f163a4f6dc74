"""What the attention of newer families is, resolved from its flags: windows and sinks.

A window belongs to layers; a sink is one more logit per head in the softmax's denominator.
"""

from __future__ import annotations

import ast
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
