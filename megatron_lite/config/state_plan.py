"""Where optimizer state lies and in which dtypes it is kept, as the flags say.

State is masters and moments. It lies beside the parameters, in host memory or in a file, as
whole buckets, so that a fraction of it is a number of buckets. Moments may be narrower than
the masters; they are widened to be updated. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.config.schema import Config

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def offload_kind(config: Config) -> str:
    """Where state lies: "none" (beside the parameters), "cpu" or "disk"."""
    if config.optimizer_cpu_offload and config.optimizer_offload == "none":
        return "cpu"
    return config.optimizer_offload


def offload_fraction(config: Config) -> float:
    """Share of the state that does not lie beside the parameters."""
    return 0.0 if offload_kind(config) == "none" else config.optimizer_offload_fraction


def offloaded_buckets(elements: Sequence[int], fraction: float) -> frozenset[int]:
    """The buckets whose state is offloaded, from the first on: the nearest to the fraction.

    Args:
        elements: of every bucket.
        fraction: of all elements, 0 to 1.
    """
    chosen, passed = set[int](), 0
    wanted = fraction * sum(elements)
    for index, size in enumerate(elements):
        if passed + size / 2 <= wanted and fraction > 0:
            chosen.add(index)
        passed += size
    return frozenset(chosen)


def main_grad_dtype(config: Config) -> str:
    """Dtype in which gradients accumulate and are reduced in a run of 16-bit parameters."""
    narrow = config.grad_reduce_in_bf16 or config.main_grads_dtype == "bf16"
    return "bfloat16" if narrow else "float32"


def narrow_moments(config: Config) -> tuple[tuple[str, str], ...]:
    """(kind, dtype) of the state that is not kept in the masters' dtype."""
    given = (("exp_avg", config.exp_avg_dtype), ("exp_avg_sq", config.exp_avg_sq_dtype))
    return tuple((kind, DTYPES[word]) for kind, word in given if word != "fp32" and word in DTYPES)
