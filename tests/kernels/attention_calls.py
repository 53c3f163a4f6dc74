"""Call the attention kernels in simulation, and their float64 reference.

A `Case` names sizes, mask, layout and dtype; `inputs` draws its tensors in that layout, and
outputs are NaN until written. `reference` gives values and, elementwise, the sums of absolute
terms from which the error bounds of test_attention.py follow. As a program (`python -m`) it runs
a few small cases and prints a hash of their bits: for sanitizers.
"""

import hashlib
import itertools
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.sim import build

Array = NDArray[Any]
SOURCES = tuple(
    f"csrc/attention/{name}.cu" for name in ("forward", "delta", "backward_query", "backward_key")
)
DTYPES: dict[str, Any] = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half a step, relative
DEFINES = ("MLITE_ATTENTION_TEST_DIMS",)


@dataclass(frozen=True)
class Case:
    """Sizes of one call. Layouts: bsnd, sbnd, fused (rows of a wider tensor, [s, b, ...])."""

    heads: int = 1
    kv_heads: int = 1
    q_len: int = 64
    k_len: int = 64
    dim: int = 64
    value_dim: int = 64
    batch: int = 1
    causal: bool = False
    offset: int = 0
    window: int = -1
    dtype: str = "bf16"
    layout: str = "bsnd"
    q_starts: tuple[int, ...] | None = None
    k_starts: tuple[int, ...] | None = None
    scale: float | None = None

    @property
    def softmax_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    def pieces(self) -> list[tuple[int, slice, slice]]:
        """(batch, query rows, key rows) of every document; rows behind the last see nothing."""
        if self.q_starts is None or self.k_starts is None:
            every = (slice(0, self.q_len), slice(0, self.k_len))
            return [(b, *every) for b in range(self.batch)]
        rows = [
            [slice(a, b) for a, b in itertools.pairwise(starts)]
            for starts in (self.q_starts, self.k_starts)
        ]
        documents = [(0, q, k) for q, k in zip(*rows, strict=True)]
        behind = slice(self.q_starts[-1], self.q_len), slice(self.k_starts[-1], self.k_len)
        empty = slice(0, 0)
        return [*documents, (0, behind[0], empty), (0, empty, behind[1])]


def laid_out(values: Array, layout: str) -> Array:
    """Values [b, s, n, d] in memory as the layout says, seen as [b, s, n, d]."""
    b, s, n, d = values.shape
    if layout == "bsnd":
        memory = build.poisoned((b, s, n, d), values.dtype)
    elif layout == "sbnd":
        memory = build.poisoned((s, b, n, d), values.dtype).transpose(1, 0, 2, 3)
    else:  # heads of a wider row, after 8 and before 16 other elements each
        wide = build.poisoned((s, b, n, d + 24), values.dtype)
        memory = wide[..., 8 : 8 + d].transpose(1, 0, 2, 3)
    memory[...] = values
    return memory


def unwritten(case: Case, s: int, n: int, d: int) -> Array:
    """An output of 0xff bytes in the layout of the case."""
    empty = np.full((case.batch, s, n, d), -1, np.int16).view(DTYPES[case.dtype])
    out = laid_out(empty, case.layout)
    out.view(np.int16)[...] = -1
    return out


def inputs(case: Case, seed: int = 0) -> dict[str, Array]:
    """q, k, v, dout in the layout of the case, normal values."""
    rng = np.random.default_rng(seed)
    b, dtype = case.batch, DTYPES[case.dtype]
    shapes = {
        "q": (b, case.q_len, case.heads, case.dim),
        "k": (b, case.k_len, case.kv_heads, case.dim),
        "v": (b, case.k_len, case.kv_heads, case.value_dim),
        "dout": (b, case.q_len, case.heads, case.value_dim),
    }
    return {
        name: laid_out(rng.standard_normal(shape).astype(dtype), case.layout)
        for name, shape in shapes.items()
    }


def problem(case: Case, tensors: dict[str, Array]) -> Array:
    """The launchers' array of sizes and strides; strides of absent tensors are 0."""
    sizes = [case.batch, case.heads, case.kv_heads, case.q_len, case.k_len, case.dim]
    sizes += [case.value_dim, int(case.causal), case.offset, case.window]
    sizes.append(0 if case.q_starts is None else len(case.q_starts) - 1)
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        strides = tensors[name].strides if name in tensors else (0, 0, 0, 0)
        sizes += [stride // DTYPES[case.dtype].itemsize for stride in strides[:3]]
    return np.array(sizes, np.int64)


def closing(case: Case, tensors: dict[str, Array]) -> tuple[Any, ...]:
    """The last arguments of every launcher with documents and a scale."""
    starts = [
        None if s is None else build.placed(np.array(s, np.int32))
        for s in (case.q_starts, case.k_starts)
    ]
    return (
        *starts,
        problem(case, tensors),
        {"bf16": 1, "fp16": 2}[case.dtype],
        np.float64(case.softmax_scale),
    )


def forward_arguments(case: Case, given: dict[str, Array]) -> tuple[tuple[Any, ...], Array, Array]:
    out = unwritten(case, case.q_len, case.heads, case.value_dim)
    lse = build.poisoned((case.batch, case.heads, case.q_len), np.float32)
    used = {**{name: given[name] for name in "qkv"}, "out": out}
    return (*(used[name] for name in "qkv"), out, lse, *closing(case, used)), out, lse


def forward(kernels: build.Kernels, case: Case, given: dict[str, Array]) -> tuple[Array, Array]:
    """out [b, s, n, d] and lse [b, n, s]."""
    arguments, out, lse = forward_arguments(case, given)
    kernels.call("launch_attention_forward", *arguments)
    return out, lse


def delta_of(
    kernels: build.Kernels, case: Case, out: Array, dout: Array, dlse: Array | None = None
) -> Array:
    delta = build.poisoned((case.batch, case.heads, case.q_len), np.float32)
    sizes = problem(case, {"out": out, "dout": dout})
    dtype = {"bf16": 1, "fp16": 2}[case.dtype]
    kernels.call("launch_attention_delta", out, dout, dlse, delta, sizes, dtype)
    return delta


def backward_arguments(
    case: Case, given: dict[str, Array], lse: Array, delta: Array, which: str
) -> tuple[tuple[Any, ...], dict[str, Array]]:
    """Arguments of launch_attention_backward_{which}, and its outputs by name."""
    if which == "query":
        made = {"dq": unwritten(case, case.q_len, case.heads, case.dim)}
    else:
        made = {"dk": unwritten(case, case.k_len, case.kv_heads, case.dim)}
        made["dv"] = unwritten(case, case.k_len, case.kv_heads, case.value_dim)
    read = [given[name] for name in ("q", "k", "v", "dout")]
    return (*read, lse, delta, *made.values(), *closing(case, given | made)), made


def backward(
    kernels: build.Kernels, case: Case, given: dict[str, Array], lse: Array, delta: Array
) -> dict[str, Array]:
    """dq, dk and dv."""
    gradients: dict[str, Array] = {}
    for which in ("query", "key"):
        arguments, made = backward_arguments(case, given, lse, delta, which)
        kernels.call(f"launch_attention_backward_{which}", *arguments)
        gradients |= made
    return gradients


# ---- float64 -------------------------------------------------------------------------------
def visible(case: Case, q_len: int, k_len: int) -> Array:
    """Bool [q_len, k_len], written from the definition."""
    i, j = np.arange(q_len)[:, None], np.arange(k_len)[None, :]
    shift = k_len - q_len + case.offset
    seen = np.ones((q_len, k_len), bool)
    if case.causal:
        seen &= j <= i + shift
    if case.window >= 0:
        seen &= j >= i + shift - case.window
    return seen


def reference(
    case: Case, given: dict[str, Array], lse: Array | None = None, delta: Array | None = None
) -> dict[str, Array]:
    """Values in float64, and `*_abs`: the same sums of absolute terms.

    With lse and delta given, the gradients are those of a part of a larger softmax.
    """
    q, k, v, dout = (given[name].astype(np.float64) for name in ("q", "k", "v", "dout"))
    r = {name: np.zeros((*q.shape[:3], case.value_dim)) for name in ("out", "out_abs")}
    r["lse"] = np.full((case.batch, case.heads, case.q_len), -np.inf)
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        r[name], r[f"{name}_abs"] = np.zeros(like.shape), np.zeros(like.shape)
    group, scale = case.heads // case.kv_heads, case.softmax_scale
    for (b, qs, ks), n in itertools.product(case.pieces(), range(case.heads)):
        at_q, at_k = (b, qs, n), (b, ks, n // group)
        scores = scale * q[at_q] @ k[at_k].T
        scores = np.where(visible(case, *scores.shape), scores, -np.inf)
        top = scores.max(axis=1, initial=-np.inf)
        weights = np.exp(scores - np.where(top == -np.inf, 0, top)[:, None])
        with np.errstate(divide="ignore"):
            r["lse"][b, n, qs] = np.where(top == -np.inf, 0, top) + np.log(weights.sum(1))
        used = r["lse"][b, n, qs] if lse is None else lse[b, n, qs].astype(np.float64)
        none = used == -np.inf
        p = np.where(none[:, None], 0, np.exp(scores - np.where(none, 0, used)[:, None]))
        r["out"][at_q], r["out_abs"][at_q] = p @ v[at_k], p @ abs(v[at_k])
        dp = dout[at_q] @ v[at_k].T
        row = (p * dp).sum(1) if delta is None else delta[b, n, qs].astype(np.float64)
        ds = scale * p * (dp - row[:, None])
        # The difference in ds cancels: fp32 leaves 2^-19 of its terms there.
        terms = scale * p * (abs(dout[at_q]) @ abs(v[at_k]).T + abs(row)[:, None])
        ds_abs = abs(ds) + terms * 2.0**-19 / ROUNDING[case.dtype]
        r["dq"][at_q], r["dq_abs"][at_q] = ds @ k[at_k], ds_abs @ abs(k[at_k])
        r["dk"][at_k] += ds.T @ q[at_q]
        r["dk_abs"][at_k] += ds_abs.T @ abs(q[at_q])
        r["dv"][at_k] += p.T @ dout[at_q]
        r["dv_abs"][at_k] += p.T @ abs(dout[at_q])
    return r


SMALL = (
    Case(heads=2, kv_heads=1, q_len=70, k_len=70, causal=True, layout="fused"),
    Case(q_len=130, k_len=70, dim=40, value_dim=24, causal=True, window=20, dtype="fp16"),
    Case(q_len=90, k_len=80, q_starts=(0, 30, 30, 80), k_starts=(0, 25, 40, 75), causal=True),
)


def main() -> None:
    kernels = build.load(SOURCES, defines=("MLITE_ATTENTION_ONLY_DIM_64",))
    digest = hashlib.sha256()
    for case in (*SMALL, replace(SMALL[0], q_len=0), replace(SMALL[0], k_len=0)):
        given = inputs(case)
        out, lse = forward(kernels, case, given)
        delta = delta_of(kernels, case, out, given["dout"])
        gradients = backward(kernels, case, given, lse, delta)
        for array in (out, lse, delta, *gradients.values()):
            digest.update(np.ascontiguousarray(array).tobytes())
    print("attention", digest.hexdigest())


if __name__ == "__main__":
    main()
