"""Which layers something applies to: every n-th, or a list that a small expression describes.

`--moe-layer-freq 2` means layers 0, 2, 4, ...; an expression is a list of 0 and 1 in Python's
notation, with `+` and `*`: `([0]*3+[1]*58)`, `[1,0]*12`. Nothing is executed.
"""

from __future__ import annotations

import ast

LARGEST_PATTERN = 100_000


def expand_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return one truth value per layer.

    Args:
        text: a positive whole number or an expression.
        num_layers: of the model.

    Raises:
        ValueError: it is neither, or the list has another length.
    """
    if text.strip().isdecimal():
        every = int(text)
        if every < 1:
            raise ValueError(f"{text!r}: every n-th layer needs n >= 1")
        return tuple(layer % every == 0 for layer in range(num_layers))
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not a list of 0 and 1 like ([0]*3+[1]*5)") from error
    if not isinstance(found, list):
        raise ValueError(f"{text!r} is a number, not a list of 0 and 1")
    if len(found) != num_layers:
        raise ValueError(f"{text!r} describes {len(found)} layers, the model has {num_layers}")
    return tuple(bool(flag) for flag in found)


def _flag(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1):
        return node.value
    raise ValueError("a list holds only 0 and 1")


def _value(node: ast.expr) -> list[int] | int:
    """Value of a list, a whole number, a sum of lists or a repeated list."""
    if isinstance(node, ast.List):
        return [_flag(item) for item in node.elts]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            flags, times = (left, right) if isinstance(left, list) else (right, left)
            assert isinstance(flags, list) and isinstance(times, int)
            if not 0 <= len(flags) * times <= LARGEST_PATTERN:
                raise ValueError(f"a list of {len(flags) * times} layers")
            return flags * times
    raise ValueError("only lists of 0 and 1, + between lists and * by a number are understood")
