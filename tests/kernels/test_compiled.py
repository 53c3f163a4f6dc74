"""nvcc compiles every kernel for sm_80 and sm_90, and the machine code is what was designed.

The budgets are in compiled_budgets.py: registers, no spills and no local memory, tensor-core
instructions, 128-bit accesses, no byte stores but those of 1-byte outputs. Without nvcc these
tests skip; with MLITE_REQUIRE_NVCC=1, as in continuous integration, that is a failure.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.kernels.compiled_budgets import BUDGETS
from tests.kernels.compiled_code import Budget, Code, compiled, violations
from tests.sim import build, nvcc

WITHIN = (255, 255)
# Kernels that the lint must find fault with, and what it must say: their names are the faults.
FAULTY = """
#include <cuda_bf16.h>
#include <cstring>
__global__ void byte_stores(__nv_bfloat16* out, const unsigned* in) {
  const unsigned pair = in[threadIdx.x];
  memcpy(out + 2 * threadIdx.x, &pair, 4);
}
__global__ void shared_byte_stores(unsigned* out, const unsigned char* in) {
  __shared__ unsigned char bytes[256];
  bytes[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = reinterpret_cast<unsigned*>(bytes)[threadIdx.x / 4];
}
__global__ void indexed_array(float* out, const float* in, const int* at) {
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = in[32 * i + threadIdx.x];
  for (int i = 0; i < 16; ++i) values[at[i] & 15] *= 2.0f;
  out[threadIdx.x] = values[at[16] & 15];
}
__global__ void narrow_loads(float4* out, const float* in) {
  const float* from = in + 4 * threadIdx.x;
  out[threadIdx.x] = make_float4(from[0], from[1], from[2], from[3]);
}
__global__ void sound(float4* out, const float4* in) { out[threadIdx.x] = in[threadIdx.x]; }
"""
SAID = {
    "byte_stores": "4 byte stores, at most 0",
    "shared_byte_stores": "1 byte stores, at most 0",
    "indexed_array": "accesses of local memory",
    "narrow_loads": "0 LDG.128, at least 1",
}


# ---- every kernel ----------------------------------------------------------------------------
@pytest.mark.parametrize("arch", nvcc.ARCHITECTURES)
@pytest.mark.parametrize("source", BUDGETS)
def test_machine_code_keeps_its_budget(source: str, arch: str) -> None:
    nvcc.need_nvcc()
    found = violations(compiled(source, arch), BUDGETS[source], arch)
    assert not found, "\n".join([source, *found])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", nvcc.ARCHITECTURES)
@pytest.mark.parametrize("source", [name for name in BUDGETS if "/attention/" in name])
def test_no_instance_of_attention_spills(source: str, arch: str) -> None:
    nvcc.need_nvcc()
    for name, used in nvcc.resources(nvcc.compile_for_gpu(source, arch)).items():
        assert 0 < used["registers"] <= 255, name
        assert used["spill_bytes"] == used["stack_bytes"] == 0, name


def test_every_cuda_source_has_budgets() -> None:
    sources = {str(path.relative_to(build.ROOT)) for path in build.CSRC.glob("**/*.cu")}
    assert sources == BUDGETS.keys()


def test_byte_stores_are_allowed_only_where_an_output_has_bytes() -> None:
    allowed = {
        (source, budget.pattern): budget.why
        for source, budgets in BUDGETS.items()
        for budget in budgets
        if budget.byte_stores
    }
    assert {source for source, _ in allowed} == {"csrc/fp8/quantize.cu", "csrc/moe/pack.cu"}
    assert all(allowed.values())


# ---- the lint itself -------------------------------------------------------------------------
@pytest.mark.parametrize("arch", nvcc.ARCHITECTURES)
def test_faulty_kernels_are_found(arch: str, tmp_path: Path) -> None:
    nvcc.need_nvcc()
    path = tmp_path / "faulty.cu"
    path.write_text(FAULTY)
    codes = compiled(path, arch)
    wide = {"LDG.128": 1, "STG.128": 1}
    budgets = [Budget(name, WITHIN) for name in SAID if name != "narrow_loads"]
    budgets += [Budget("narrow_loads", WITHIN, wide), Budget("sound", WITHIN, wide)]
    found = violations(codes, budgets, arch)
    for name, said in SAID.items():
        assert any(line.startswith(f"{name}: ") and said in line for line in found), found
    assert {line.split(":")[0] for line in found} == SAID.keys()


def code(name: str, registers: int = 32, spilled: int = 0) -> Code:
    resources = {"registers": registers, "spill_bytes": spilled, "stack_bytes": 0}
    return Code(name, resources, Counter({"LDG.E.128.CONSTANT": 1, "LDG.E.64": 3}))


def test_registers_and_spills_are_bounded_for_each_architecture() -> None:
    budgets = [Budget("copy", (32, 40), {"LDG.128": 1})]
    assert violations([code("copy", 40)], budgets, "sm_90") == []
    assert violations([code("copy", 40)], budgets, "sm_80") == ["copy: 40 registers, at most 32"]
    assert violations([code("copy", 0)], budgets, "sm_80") == ["copy: 0 registers, at most 32"]
    assert violations([code("copy", spilled=8)], budgets, "sm_80") == ["copy: 8 spill bytes"]


def test_kernel_without_a_row_and_row_without_a_kernel_are_found() -> None:
    codes = [code("twice<1>")]
    assert violations(codes, [Budget("twice<1>", WITHIN)], "sm_90") == []
    assert violations(codes, [Budget("twice<2>", WITHIN)], "sm_90") == [
        "twice<1>: 0 budgets fit, not one",
        "no kernel is twice<2>",
    ]
    both = [Budget("twice<.>", WITHIN), Budget("twice<1>", WITHIN)]
    assert "twice<1>: 2 budgets fit, not one" in violations(codes, both, "sm_90")


def test_compiled_once_until_an_input_changes(tmp_path: Path) -> None:
    nvcc.need_nvcc()
    header, path = tmp_path / "factor.h", tmp_path / "scale.cu"
    header.write_text("#define FACTOR 2.0f\n")
    path.write_text('#include "factor.h"\n__global__ void scale(float* x) { *x *= FACTOR; }\n')
    first = nvcc.compile_for_gpu(path, "sm_90")
    made = first.stat().st_mtime_ns
    assert nvcc.compile_for_gpu(path, "sm_90") == first
    assert first.stat().st_mtime_ns == made
    header.write_text("#define FACTOR 3.0f\n")
    assert nvcc.compile_for_gpu(path, "sm_90") != first


def test_listing_is_read_with_predicates_and_modifiers() -> None:
    listing = (
        ".text._Z4copyPf:\n"
        "        /*0000*/                   LDC R1, c[0x0][0x28] ;\n"
        "        /*0010*/              @!P2 STG.E.U8 desc[UR4][R2.64], R5 ;\n"
        "        /*10020*/             @UP0 UMOV UR4, 0x0 ;\n"
        ".L_x_0:\n"
        "        /*10030*/              @P0 STG.E.U8 desc[UR4][R2.64+0x1], R5 ;\n"
    )
    want = Counter({"STG.E.U8": 2, "LDC": 1, "UMOV": 1})
    assert nvcc.parse_instructions(listing) == {"_Z4copyPf": want}


# ---- without nvcc ----------------------------------------------------------------------------
@pytest.mark.parametrize(("value", "outcome"), [("", "skip"), ("0", "skip"), ("1", "fail")])
def test_missing_tool_skips_or_fails_as_demanded(
    value: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvcc, "why_not_nvcc", lambda: "no nvcc on this machine")
    monkeypatch.setenv(nvcc.REQUIRED, value)
    raised = {"skip": pytest.skip.Exception, "fail": pytest.fail.Exception}[outcome]
    with pytest.raises(raised, match="no nvcc on this machine"):
        nvcc.need_nvcc()


def test_continuous_integration_demands_nvcc() -> None:
    lines = (build.ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("export ") and f"{nvcc.REQUIRED}=1" in line for line in lines)
