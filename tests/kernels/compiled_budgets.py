"""Budgets of the machine code of every kernel: one table, source -> rows.

A kernel's plain name (no namespaces, no parameters) fits exactly one row of its source, and
each row fits a kernel. Registers are those of nvcc 13.0 for sm_80 and sm_90, rounded up to the
8 in which they are handed out: within a row occupancy cannot drop. Least counts follow from the
design (tensors read and written, times what a thread keeps in registers), not from how far the
compiler unrolls; attention's are those of its fully unrolled tiles.
"""

from tests.kernels.compiled_code import Budget

T16 = "(__half|__nv_bfloat16)"
ANY = f"({T16}|float)"


def wide(loads: int, stores: int = 0) -> dict[str, int]:
    """At least so many 128-bit accesses of global memory."""
    counts = {"LDG.128": loads, "STG.128": stores}
    return {name: count for name, count in counts.items() if count}


def tiles(hmma: int, ldsm: int, copies: int, stores: int) -> dict[str, int]:
    """Tensor-core products, ldmatrix, 16-byte cp.async, 128-bit stores."""
    return {"HMMA": hmma, "LDSM": ldsm, "LDGSTS.128": copies, "STG.128": stores}


ATTENTION = {
    "csrc/attention/delta.cu": (Budget(f"attention_delta<{T16}>", (48, 48), wide(2)),),
    "csrc/attention/forward.cu": (
        Budget(f"attention_forward<{T16}, 256, .*>", (255, 255), tiles(128, 80, 24, 1)),
        Budget(f"attention_forward<{T16}, 192, .*>", (184, 192), tiles(80, 52, 24, 1)),
        Budget(f"attention_forward<{T16}, 128, .*>", (255, 255), tiles(128, 48, 24, 1)),
        Budget(f"attention_forward<{T16}, 96, .*>", (232, 232), tiles(96, 36, 24, 1)),
        Budget(f"attention_forward<{T16}, 64, 64, false>", (240, 248), tiles(128, 40, 24, 1)),
        # A cap or dropout: half the queries.
        Budget(f"attention_forward<{T16}, 64, 64, true>", (168, 168), tiles(64, 36, 24, 1)),
        Budget(f"attention_forward<{T16}, 32, .*>", (192, 192), tiles(64, 20, 24, 1)),
    ),
    "csrc/attention/backward_query.cu": (
        Budget(f"attention_backward_query<{T16}, 256, .*>", (248, 248), tiles(192, 128, 34, 1)),
        Budget(f"attention_backward_query<{T16}, 192, .*>", (255, 255), tiles(128, 84, 34, 1)),
        Budget(f"attention_backward_query<{T16}, 128, .*>", (200, 208), tiles(96, 64, 34, 1)),
        Budget(f"attention_backward_query<{T16}, 96, .*>", (200, 200), tiles(72, 48, 34, 1)),
        Budget(f"attention_backward_query<{T16}, 64, .*>", (224, 224), tiles(96, 56, 34, 1)),
        Budget(f"attention_backward_query<{T16}, 32, .*>", (176, 160), tiles(48, 28, 34, 1)),
    ),
    # Above d 128 gradients of keys and of values are two launches (the two flags).
    "csrc/attention/backward_key.cu": tuple(
        Budget(f"attention_backward_key<{T16}, {dims}>", registers, least)
        for dims, registers, least in (
            ("256, 256, false, true, .*", (248, 248), tiles(128, 80, 34, 1)),
            ("256, 256, true, false, .*", (248, 255), tiles(192, 128, 34, 1)),
            ("192, 128, false, true, .*", (200, 200), tiles(80, 52, 34, 1)),
            ("192, 128, true, false, .*", (248, 248), tiles(128, 84, 34, 1)),
            ("128, 128, true, true, .*", (248, 255), tiles(128, 80, 34, 2)),
            ("96, 96, true, true, .*", (248, 248), tiles(96, 60, 34, 2)),
            ("64, 64, true, true, .*", (240, 240), tiles(128, 72, 34, 2)),
            ("32, 32, true, true, .*", (160, 160), tiles(32, 20, 34, 2)),
        )
    ),
}

FP8 = {
    "csrc/fp8/quantize.cu": (
        # 1-byte outputs: codes element by element where rows are no multiples of 16 bytes.
        Budget(f"quantize<{T16}, [012]>", (96, 96), wide(8, 8), 8, "tail of codes"),
        Budget("quantize<float, [012]>", (120, 120), wide(16, 8), 8, "tail of codes"),
        Budget(f"quantize<{T16}, 3>", (96, 96), wide(8, 8), 16, "tail of codes, E8M0"),
        Budget("quantize<float, 3>", (120, 120), wide(16, 8), 16, "tail of codes, E8M0"),
    ),
    "csrc/fp8/dequantize.cu": (
        Budget("dequantize<.*, true>", (32, 32), wide(0, 1)),
        Budget("dequantize<.*, false>", (16, 16)),
    ),
    "csrc/fp8/scaling.cu": (
        Budget("amax_partial<.*, [48]>", (32, 32), wide(1)),
        Budget("amax_partial<.*, 1>", (32, 32)),
        Budget("amax_finish", (32, 32)),
        Budget("scales_from_amax|delayed_update", (24, 32)),
    ),
}

MOE = {
    "csrc/moe/routing.cu": (
        Budget("walk_chunks<.*>", (32, 40)),
        Budget("split_sizes|mark_padding|scan_experts|scan_chunks", (32, 32)),
    ),
    "csrc/moe/pack.cu": (
        Budget("gather_rows<uint4>", (32, 32), wide(1, 2)),  # copies, padding
        Budget("gather_rows<unsigned int>", (32, 32)),
        Budget("gather_rows<unsigned char>", (32, 32), {}, 34, "rows of any number of bytes"),
        Budget("scatter_probs", (16, 16)),
    ),
    "csrc/moe/combine.cu": (
        Budget(f"combine<{ANY}, true>", (40, 40), wide(1, 1)),
        Budget(f"combine<{ANY}, false>", (32, 32)),
        Budget(f"combine_backward<{ANY}, true>", (40, 40), wide(9, 8)),  # 8 slots
        Budget(f"combine_backward<{ANY}, false>", (64, 64)),
        Budget(f"clear_padding<{ANY}, true>", (32, 32), wide(0, 1)),
        Budget(f"clear_padding<{ANY}, false>", (16, 16)),
    ),
}

NORM = {
    # A thread keeps 4 vectors of a row (fp32: 6); read are x, residual and weight (and bias).
    "csrc/norm/norm_forward.cu": (
        Budget(f"norm_forward<{T16}, false>", (80, 80), wide(12, 8)),
        Budget(f"norm_forward<{T16}, true>", (96, 96), wide(16, 8)),
        Budget("norm_forward<float, false>", (88, 88), wide(18, 12)),
        Budget("norm_forward<float, true>", (104, 104), wide(24, 12)),
        Budget(f"norm_forward_scalar<{ANY}, .*>", (32, 32)),
    ),
    # 512 threads of a block: never above 128.
    "csrc/norm/norm_backward.cu": (
        Budget(f"norm_backward<{T16}, false>", (128, 128), wide(20, 12)),
        Budget(f"norm_backward<{T16}, true>", (128, 128), wide(15, 15)),
        Budget("norm_backward<float, false>", (96, 96), wide(20, 6)),
        Budget("norm_backward<float, true>", (120, 120), wide(20, 8)),
        Budget(f"norm_backward_scalar<{ANY}, .*>", (32, 32)),
        Budget("sum_parts", (32, 32)),
    ),
}

OPTIMIZER = {
    "csrc/optimizer/adamw.cu": (
        Budget(f"adamw<{T16}, true>", (40, 40), wide(4, 3)),
        Budget(f"adamw<{T16}, false>", (32, 40)),
    ),
    "csrc/optimizer/sgd.cu": (
        Budget(f"sgd<{T16}, true>", (32, 32), wide(3, 2)),
        Budget(f"sgd<{T16}, false>", (32, 24)),
    ),
    "csrc/optimizer/squared_norm.cu": (
        Budget(f"square_blocks<{ANY}, true>", (40, 40), wide(1)),
        Budget(f"square_blocks<{ANY}, false>", (32, 32)),
        Budget("add_blocks", (32, 32)),
    ),
}

BUDGETS: dict[str, tuple[Budget, ...]] = {
    **ATTENTION,
    **FP8,
    **MOE,
    **NORM,
    **OPTIMIZER,
    "csrc/activation/activation.cu": (
        Budget(f"activate<{ANY}, false, [48]>", (32, 32), wide(1, 1)),
        Budget(f"activate<{ANY}, true, [48]>", (32, 32), wide(2, 1)),
        Budget(f"activate<{ANY}, .*, 1>", (32, 32)),
        Budget(f"activate_backward<{ANY}, false, [48]>", (48, 48), wide(2, 1)),
        # Gate and up are kept beside their clamped values: six vectors, 16-bit ones of 8.
        Budget(f"activate_backward<{T16}, true, 8>", (56, 64), wide(3, 2)),
        Budget("activate_backward<float, true, 4>", (40, 40), wide(3, 2)),
        Budget(f"activate_backward<{ANY}, .*, 1>", (32, 32)),
    ),
    "csrc/cross_entropy/cross_entropy.cu": (
        Budget(f"loss_and_gradient<{ANY}>", (40, 32), wide(1, 1)),
        Budget(f"shard_statistics<{ANY}, .*>", (32, 32), wide(1)),
        Budget("losses", (24, 24)),
    ),
    "csrc/dropout/dropout.cu": (
        Budget(f"bias_dropout_residual<{ANY}, [48]>", (64, 64), wide(3, 1)),
        Budget(f"bias_dropout_residual<{ANY}, 1>", (32, 32)),
        Budget("philox_words", (24, 24), wide(0, 1)),
        Budget("sum_parts", (32, 32)),
    ),
    # With the tables' pairs interleaved (true) or in halves.
    "csrc/rotary/rotary.cu": (
        Budget(f"rotary<{T16}, .*, 8>", (40, 40), wide(4, 2)),
        Budget("rotary<float, .*, 4>", (48, 56), wide(2, 2)),
        Budget(f"rotary<{ANY}, .*, 1>", (40, 40)),
    ),
    # A thread keeps 4 vectors of a row (fp32: 6); the backward reads output and gradient.
    "csrc/softmax/softmax.cu": (
        Budget(f"masked_softmax<{T16}>", (96, 96), wide(4, 4)),
        Budget("masked_softmax<float>", (72, 72), wide(6, 6)),
        Budget(f"masked_softmax_backward<{T16}>", (96, 96), wide(8, 4)),
        Budget("masked_softmax_backward<float>", (88, 96), wide(12, 6)),
        Budget(f"masked_softmax(_backward)?_scalar<{ANY}>", (32, 32)),
    ),
}
