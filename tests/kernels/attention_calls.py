"""Call the attention kernels in simulation, and their float64 reference.

A `Case` names sizes, mask, layout and dtype; `inputs` draws its tensors in that layout, and
outputs are NaN until written. `reference` gives values and, elementwise, the sums of absolute
terms from which the error bounds of test_attention.py follow. As a program (`python -m`) it runs
a few small cases and prints a hash of their bits: for sanitizers.
"""

import hashlib
import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
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
    softcap: float = 0.0
    dropout: float = 0.0
    sequence: int = 1 << 12  # keys and queries of the whole sample
    first: tuple[int, int, int] = (0, 0, 0)  # this call's first head, query and key in it
    seed: int = 0x1234567890ABCDEF
    c3: int = 0xDEADBEEF

    @property
    def samples(self) -> Array:
        """Low halves of the samples' indices, one per batch entry."""
        return (np.arange(self.batch) * 7 + 0xFFFFFFF0).astype(np.uint32)

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


@cache
def built() -> build.Kernels:
    """The attention kernels in the mode of this process; skips where they cannot be built."""
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.load(SOURCES, defines=DEFINES)


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
        np.float64(case.softcap),
        np.float64(case.dropout),
        np.array([case.seed, case.c3, case.sequence, *case.first], np.int64),
        build.placed(case.samples),
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


def philox(counter: list[Array], key: tuple[int, int]) -> list[Array]:
    """Ten rounds of Philox4x32 on uint64 arrays of 32-bit words."""
    low = np.uint64(0xFFFFFFFF)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        high = [p >> np.uint64(32) for p in (p0, p1)]
        counter = [
            high[1] ^ counter[1] ^ np.uint64(k0), p1 & low,
            high[0] ^ counter[3] ^ np.uint64(k1), p0 & low,
        ]  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def kept(case: Case, b: int, n: int, qs: slice, ks: slice) -> Array:
    """Factor 0 or 1 / (1 - dropout) of each probability."""
    head, query, key = case.first
    rows = np.arange(case.q_len)[qs, None] + query + (head + n) * case.sequence
    e = (rows * case.sequence + np.arange(case.k_len)[None, ks] + key).astype(np.uint64)
    block = e // np.uint64(4)
    counter = [block & np.uint64(0xFFFFFFFF), block >> np.uint64(32)]
    counter += [np.full_like(e, case.samples[b]), np.full_like(e, case.c3)]
    words = np.stack(philox(counter, (case.seed & 0xFFFFFFFF, case.seed >> 32)), -1)
    word = np.take_along_axis(words, (e % np.uint64(4)).astype(np.int64)[..., None], -1)[..., 0]
    return (word >= int(case.dropout * 2**32)) / (1 - case.dropout)


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
        capped = np.tanh(scores / case.softcap) if case.softcap else np.zeros_like(scores)
        scores = case.softcap * capped if case.softcap else scores
        scores = np.where(visible(case, *scores.shape), scores, -np.inf)
        top = scores.max(axis=1, initial=-np.inf)
        weights = np.exp(scores - np.where(top == -np.inf, 0, top)[:, None])
        with np.errstate(divide="ignore"):
            r["lse"][b, n, qs] = np.where(top == -np.inf, 0, top) + np.log(weights.sum(1))
        used = r["lse"][b, n, qs] if lse is None else lse[b, n, qs].astype(np.float64)
        none = used == -np.inf
        p = np.where(none[:, None], 0, np.exp(scores - np.where(none, 0, used)[:, None]))
        keep = kept(case, b, n, qs, ks)
        r["out"][at_q], r["out_abs"][at_q] = (p * keep) @ v[at_k], (p * keep) @ abs(v[at_k])
        dp = dout[at_q] @ v[at_k].T * keep
        row = (p * dp).sum(1) if delta is None else delta[b, n, qs].astype(np.float64)
        ds = scale * p * (dp - row[:, None]) * (1 - capped**2)
        # The difference in ds cancels: fp32 leaves 2^-19 of its terms there.
        terms = scale * p * (abs(dout[at_q]) @ abs(v[at_k]).T * keep + abs(row)[:, None])
        ds_abs = abs(ds) + terms * 2.0**-19 / ROUNDING[case.dtype]
        r["dq"][at_q], r["dq_abs"][at_q] = ds @ k[at_k], ds_abs @ abs(k[at_k])
        r["dk"][at_k] += ds.T @ q[at_q]
        r["dk_abs"][at_k] += ds_abs.T @ abs(q[at_q])
        r["dv"][at_k] += (p * keep).T @ dout[at_q]
        r["dv_abs"][at_k] += (p * keep).T @ abs(dout[at_q])
    return r


DOCUMENTS = Case(
    heads=2, kv_heads=1, q_len=240, k_len=230, causal=True, layout="fused",
    q_starts=(0, 1, 1, 129, 129, 200, 215), k_starts=(0, 1, 30, 100, 130, 130, 210),
)  # fmt: skip


def check(case: Case, got: dict[str, Array], want: dict[str, Array]) -> None:
    """Every element within the bounds of the module's table; NaN and unwritten never are."""
    u = ROUNDING[case.dtype]
    terms = max(case.k_len, case.q_len * case.heads // case.kv_heads)
    tiny = 2.0**-24 * terms * 4 if case.dtype == "fp16" else 0.0
    for name, value in got.items():
        if name == "lse":
            seen = want["lse"] > -np.inf
            np.testing.assert_array_equal(value[~seen], -np.inf)
            bound = 4e-6 * (1 + abs(want["lse"][seen]))
            assert np.all(abs(value[seen] - want["lse"][seen]) <= bound), name
            continue
        bound = 1.05 * u * (want[f"{name}_abs"] + abs(want[name])) + tiny
        excess = abs(value.astype(np.float64) - want[name]) - bound
        assert np.all(excess <= 0), f"{name} beyond its bound by {np.nanmax(excess)}"


def run(kernels: build.Kernels, case: Case, seed: int = 0) -> dict[str, Array]:
    """Forward, delta and backward, checked; what they gave."""
    given = inputs(case, seed)
    out, lse = forward(kernels, case, given)
    check(case, {"out": out, "lse": lse}, reference(case, given))
    delta = delta_of(kernels, case, out, given["dout"])
    rows = out.astype(np.float64) * given["dout"].astype(np.float64)
    error = abs(delta - rows.sum(-1).transpose(0, 2, 1))
    assert np.all(error <= 2.0**-20 * abs(rows).sum(-1).transpose(0, 2, 1))
    gradients = backward(kernels, case, given, lse, delta)
    check(case, gradients, reference(case, given, lse, delta))
    return {"out": out, "lse": lse, "delta": delta, **gradients}


SMALL = (
    Case(heads=2, kv_heads=1, q_len=70, k_len=70, causal=True, layout="fused"),
    Case(q_len=70, k_len=70, causal=True, softcap=2.0, dropout=0.25),
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
