"""What a compiled kernel's assembly says: its main loop, instruction counts, and whether waits are long enough."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# Passes of four cycles that an fp8 matrix product occupies the matrix unit: CDNA4 ISA guide, and 2048 flop a cycle and
# SIMD of the published peak.
MFMA_PASSES = {
    "v_mfma_f32_16x16x32_fp8_fp8": 4,
    "v_mfma_f32_32x32x16_fp8_fp8": 8,
    "v_mfma_scale_f32_16x16x128_f8f6f4": 8,
    "v_mfma_scale_f32_32x32x64_f8f6f4": 16,
}
CYCLES_PER_PASS = 4
WAIT_BEFORE_SWAP = 2  # from a vector instruction to a permlane swap of its result
WAIT_BEFORE_MEMORY = 5  # from a vector instruction that writes a scalar register to a memory access that reads it
_MEMORY = ("buffer_", "global_", "flat_", "scratch_", "ds_", "s_load", "s_buffer_load")


def wait_states_after(mfma: str) -> int:
    """Instructions that must lie between an MFMA and a vector instruction that reads its result.

    LLVM's hazard recogniser for gfx950: passes + 4, and the same as it inserts; the hardware does not wait by itself.
    """
    return MFMA_PASSES[mfma] + 4


@dataclass(frozen=True, slots=True)
class Instruction:
    """Name without _e32 or _e64, operands as text, and the label in front of it."""

    name: str
    operands: tuple[str, ...]
    label: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """Instruction counts of one run through a loop."""

    instructions: int
    mfma: int
    mfma_cycles: int
    valu: int
    memory: int
    scalar: int


def parse(text: str) -> list[Instruction]:
    """The instructions of an assembly listing, in order."""
    found = []
    label = ""
    for raw in text.splitlines():
        line = raw.split(";")[0].strip()
        if match := re.match(r"(\.?[A-Za-z_$][\w$.]*):$", line):
            label = label if match.group(1).startswith(".Ltmp") else match.group(1)  # those are for debuggers
        elif match := re.match(r"([a-z][a-z0-9_]+)(?:\s+(.*))?$", line):
            name = match.group(1).removesuffix("_e32").removesuffix("_e64")
            operands = re.split(r",\s*(?![^\[]*\])", match.group(2) or "")
            found.append(Instruction(name, tuple(operands), label))
            label = ""
    return found


def loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """(first, last) of each loop: from a label to a branch back to it."""
    at = {instruction.label: i for i, instruction in enumerate(code) if instruction.label}
    found = []
    for i, instruction in enumerate(code):
        target = instruction.operands[0].split()[0] if instruction.operands[0] else ""
        if instruction.name.startswith(("s_branch", "s_cbranch")) and at.get(target, i + 1) <= i:
            found.append((at[target], i))
    return found


def main_loop(code: list[Instruction]) -> tuple[int, int]:
    """The innermost loop with the most matrix products; ValueError where there is none."""
    with_mfma = [
        (sum(x.name.startswith("v_mfma") for x in code[first : last + 1]), first - last, (first, last))
        for first, last in loops(code)
    ]
    best = max(with_mfma, default=(0, 0, (0, 0)))
    if best[0] == 0:
        raise ValueError("no loop with a matrix product")
    return best[2]


def waits_for_all_loads(code: Iterable[Instruction]) -> int:
    """Waits for every load and store under way: in a main loop each one costs the latency of memory on every turn."""
    return sum(instruction.name == "s_waitcnt" and "vmcnt(0)" in " ".join(instruction.operands) for instruction in code)


def count(code: Iterable[Instruction]) -> Loop:
    """Instructions by kind. VALU is every vector instruction that is no matrix product and no memory access."""
    names = Counter(instruction.name for instruction in code)
    mfma = {name: number for name, number in names.items() if name.startswith("v_mfma")}
    memory = sum(number for name, number in names.items() if name.startswith(_MEMORY))
    return Loop(
        instructions=names.total(),
        mfma=sum(mfma.values()),
        mfma_cycles=sum(MFMA_PASSES[name] * CYCLES_PER_PASS * number for name, number in mfma.items()),
        valu=sum(number for name, number in names.items() if name.startswith("v_")) - sum(mfma.values()),
        memory=memory,
        scalar=sum(n for name, n in names.items() if name.startswith("s_") and not name.startswith(_MEMORY)),
    )


def registers(operand: str) -> set[str]:
    """The scalar, vector and accumulator registers that an operand names, such as {"v4", "v5"} for "v[4:5]"."""
    found = {kind + number for kind, number in re.findall(r"\b([sva])(\d+)\b", operand)}
    for kind, first, last in re.findall(r"\b([sva])\[(\d+):(\d+)\]", operand):
        found |= {f"{kind}{i}" for i in range(int(first), int(last) + 1)}
    return found


def short_waits(code: list[Instruction]) -> list[str]:
    """Readers that come too soon after a writer, each as a sentence; none in correct code.

    The compiler places these waits itself, except where one end is inline assembly. Checked are the three kinds that
    the kernel's inline assembly could meet: a matrix product and its reader; a vector instruction and a permlane swap
    of its result; a vector instruction that writes a scalar register and a memory access that reads it. Follows the
    listing in order, and once more around every loop.
    """
    problems = _short_waits(code)
    for first, last in loops(code):
        problems += _short_waits(code[first : last + 1] * 2)
    return list(dict.fromkeys(problems))


def _short_waits(code: list[Instruction]) -> list[str]:
    problems = []
    products: dict[str, tuple[str, int]] = {}  # register -> the product that writes it, and when it was issued
    vectors: dict[str, tuple[str, int]] = {}  # the same of other vector instructions
    now = 0

    def check(reader: str, read: set[str], writers: dict[str, tuple[str, int]], needed: int | None) -> None:
        for register in sorted(read & writers.keys()):
            writer, issued = writers[register]
            wanted = wait_states_after(writer) if needed is None else needed
            if now - issued < wanted:
                problems.append(
                    f"{reader} reads {register} {now - issued} wait states after {writer}, which needs {wanted}"
                )

    for instruction in code:
        name, operands = instruction.name, instruction.operands
        if name == "s_nop":
            now += int(operands[0], 0) + 1
            continue
        if name.startswith("v_mfma"):
            # Reads by another product have shorter waits, which the compiler knows: both ends are its own.
            products |= dict.fromkeys(registers(operands[0]), (name, now + 1))
        elif name.startswith("v_"):
            written = registers(operands[0])
            read = set().union(*(registers(operand) for operand in operands[1:]))
            if name.startswith("v_permlane"):
                written |= registers(operands[1])
                check(name, written, vectors, WAIT_BEFORE_SWAP)
            if name.startswith(("v_fmac", "v_permlane")):
                read |= written
            check(name, read, products, None)
            for register in written:
                products.pop(register, None)
                vectors[register] = (name, now + 1)
        elif name.startswith(_MEMORY):
            read = set().union(*(registers(operand) for operand in operands))
            if "_store" in name or name.startswith("ds_write"):
                check(name, read, products, None)
            if not name.startswith("s_"):
                check(name, {r for r in read if r[0] == "s"}, vectors, WAIT_BEFORE_MEMORY)
        elif name.startswith("s_") and operands[0]:
            for register in registers(operands[0]):
                vectors.pop(register, None)  # a scalar instruction's own result: the hardware waits for it
        now += 1
    return problems
