"""Check the machine code of kernels against their budgets (compiled_budgets.py).

Of every kernel: registers, no local memory (neither spills nor arrays that are indexed at run
time), no byte stores but those named, and at least as many wide accesses and tensor-core
instructions as its design says. As a program it prints what nvcc makes of sources, for new rows:

    python -m tests.kernels.compiled_code csrc/norm/norm_forward.cu
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kernels.attention_calls import DEFINES as ATTENTION_DEFINES
from tests.sim import nvcc

# Classes of opcodes that a budget counts. LDGSTS is cp.async, LDSM ldmatrix, HMMA mma.sync.
CLASSES = {
    "HMMA": r"HMMA\.",
    "LDSM": r"LDSM\.",
    "LDGSTS.128": r"LDGSTS\..*\b128\b",
    "LDG.128": r"LDG\..*\b128\b",
    "STG.128": r"STG\..*\b128\b",
}
LOCAL = r"(LDL|STL)\b"
BYTE_STORE = r"(STG|STS|ST)\b.*\.[US]8\b"


@dataclass(frozen=True)
class Budget:
    """What the kernels of one source whose plain name matches `pattern` may and must have.

    `registers` are the most on sm_80 and sm_90, `least` the fewest instructions of a class,
    `byte_stores` the most of them; `why` says what they are for.
    """

    pattern: str
    registers: tuple[int, int]
    least: Mapping[str, int] = field(default_factory=dict)
    byte_stores: int = 0
    why: str = ""


@dataclass(frozen=True)
class Code:
    """One compiled kernel: plain name, ptxas's resources, opcodes."""

    name: str
    resources: Mapping[str, int]
    opcodes: Counter[str]

    def count(self, pattern: str) -> int:
        """Number of instructions whose opcode begins as the pattern says."""
        return sum(n for opcode, n in self.opcodes.items() if re.match(pattern, opcode))


def compiled(source: Path | str, arch: str) -> list[Code]:
    """All kernels of a source; of attention the instances that its tests run."""
    # bf16 at every dim, fp16 and what caps or drops at one: the rest differs in nothing here.
    cubin = nvcc.compile_for_gpu(source, arch, ATTENTION_DEFINES)
    resources, opcodes = nvcc.resources(cubin), nvcc.instructions(cubin)
    assert resources.keys() == opcodes.keys(), "ptxas and nvdisasm name different kernels"
    names = nvcc.plain_names(list(resources))
    pairs = zip(names, resources, strict=True)
    return [Code(name, resources[mangled], opcodes[mangled]) for name, mangled in pairs]


def violations(codes: Iterable[Code], budgets: Sequence[Budget], arch: str) -> list[str]:
    """What a source's kernels do against their budgets, and budgets that fit no kernel."""
    found: list[str] = []
    used: set[str] = set()
    for code in codes:
        fitting = [budget for budget in budgets if re.fullmatch(budget.pattern, code.name)]
        if len(fitting) != 1:
            found.append(f"{code.name}: {len(fitting)} budgets fit, not one")
            continue
        used.add(fitting[0].pattern)
        found += [f"{code.name}: {what}" for what in _violations(code, fitting[0], arch)]
    idle = [budget.pattern for budget in budgets if budget.pattern not in used]
    return found + [f"no kernel is {pattern}" for pattern in idle]


def _violations(code: Code, budget: Budget, arch: str) -> Iterable[str]:
    registers = code.resources["registers"]
    most = budget.registers[nvcc.ARCHITECTURES.index(arch)]
    if not 0 < registers <= most:
        yield f"{registers} registers, at most {most}"
    for what in ("spill_bytes", "stack_bytes"):
        if code.resources[what]:
            yield f"{code.resources[what]} {what.replace('_', ' ')}"
    if code.count(LOCAL):
        yield f"{code.count(LOCAL)} accesses of local memory"
    if code.count(BYTE_STORE) > budget.byte_stores:
        yield f"{code.count(BYTE_STORE)} byte stores, at most {budget.byte_stores}"
    for name, least in budget.least.items():
        if code.count(CLASSES[name]) < least:
            yield f"{code.count(CLASSES[name])} {name}, at least {least}"


def main(sources: Sequence[str]) -> None:
    """Print one line per kernel and architecture."""
    for source in sources:
        for arch in nvcc.ARCHITECTURES:
            for code in compiled(source, arch):
                counts = {name: code.count(pattern) for name, pattern in CLASSES.items()}
                counts |= {"byte stores": code.count(BYTE_STORE), "local": code.count(LOCAL)}
                shown = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
                print(f"{arch} {code.name}: {code.resources['registers']} registers, {shown}")


if __name__ == "__main__":
    main(sys.argv[1:])
