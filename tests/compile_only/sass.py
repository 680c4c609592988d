"""Reading machine code, with the tools in Triton's wheel."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}  # KB that one block may have
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z]\S*)\s+(.*?);", re.M)
_UNIFORM = re.compile(r"(?<![\w\[])-?\|?UR(\d+)\b")


def assert_fits(kernel: CompiledKernel, arch: int, folder: Path, spills: int = 0) -> None:
    """Shared memory, registers but for `spills` bytes of stack, and what ptxas 12.8 gets wrong."""
    cubin = kernel.asm["cubin"]
    assert stack_bytes(cubin, folder) <= spills
    assert kernel.metadata.shared <= SHARED[arch] * 1024
    if arch == 90:
        sass = disassembled(cubin, folder)
        assert not unwritten_uniform_registers(sass)
        assert not merges_of_constants(sass)
        assert not early_reads(kernel.asm["ptx"])


@functools.lru_cache(maxsize=4)  # it takes half a second, and several checks read one program
def disassembled(cubin: bytes, folder: Path) -> str:
    return _tool("cuobjdump", cubin, folder, "--dump-sass")


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """What a thread spills, and keeps in memory for other reasons."""
    return _usage("STACK", cubin, folder)


def registers(cubin: bytes, folder: Path) -> int:
    """What a thread is given: those that it uses, in units of eight."""
    return -(-_usage("REG", cubin, folder) // 8) * 8


def _usage(what: str, cubin: bytes, folder: Path) -> int:
    text = _tool("cuobjdump", cubin, folder, "--dump-resource-usage")
    return int(re.search(rf"{what}:(\d+)", text).group(1))


def _tool(name: str, cubin: bytes, folder: Path, *options: str) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [_TOOLS / name, *options, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


_WHOLE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\w+ )?\s*[A-Z].*?)\s*;", re.M)
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z]\S*)\s*(.*?);", re.M)


def instructions(sass: str) -> list[str]:
    """Each as a line, with its predicate and operands, without its address."""
    return [" ".join(line.split()) for line in _WHOLE.findall(sass)]


PRODUCTS = ("HMMA", "HGMMA", "IGMMA", "QGMMA")  # of tensor cores: of a warp, or a warpgroup


def innermost_loop(sass: str) -> list[str]:
    """Names of the instructions of the shortest loop with products of tensor cores.

    A loop is what a branch back spans. Raises ValueError if there is none.
    """
    return min(_loops(sass), key=len)


def main_loop(sass: str) -> list[str]:
    """Names of the instructions of the shortest of the loops with the most products of warpgroups,
    or of warps where there are none."""
    kind = "GMMA" if "GMMA" in sass else "MMA"
    return max(_loops(sass), key=lambda loop: (sum(kind in name for name in loop), -len(loop)))


def _loops(sass: str) -> list[list[str]]:
    lines = [(int(at, 16), name, operands) for at, name, operands in _LINE.findall(sass)]
    loops = []
    for at, name, operands in lines:
        target = re.search(r"0x([0-9a-f]+)", operands)
        if name.startswith("BRA") and target and int(target.group(1), 16) < at:
            body = [n for a, n, _ in lines if int(target.group(1), 16) <= a <= at]
            if any(n.startswith(PRODUCTS) for n in body):
                loops.append(body)
    return loops


_ANY = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z]\S*)\s*(.*?);", re.M)


def shortest_turn(sass: str, products: int) -> list[str]:
    """Names of the instructions of the shortest way once around a loop with so many products.

    Branches are taken or not as it takes the fewest instructions: waits succeed at once, and no
    block is at an edge. Of several loops the shortest way. Raises ValueError if there is none.
    """
    lines = [(int(at, 16), bool(guard), *rest) for at, guard, *rest in _ANY.findall(sass)]
    number = {line[0]: i for i, line in enumerate(lines)}
    successors: list[list[int]] = []
    for i, (_, is_guarded, name, operands) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        is_branch = is_guarded or "DIV" in name or re.match(r"!?U?P\d", operands)
        ends = name.startswith(("BRA", "EXIT", "RET")) and not is_branch
        following = [] if ends or i + 1 == len(lines) else [i + 1]
        if target and int(target[1], 16) in number:
            following.append(number[int(target[1], 16)])
        successors.append(following)
    ways = []
    for tail, following in enumerate(successors):
        head = min(following, default=tail + 1)
        if head <= tail and any("GMMA" in line[2] for line in lines[head : tail + 1]):
            way = _shortest_way(successors, head, tail)
            names = [lines[i][2] for i in way]
            if sum("GMMA" in name for name in names) >= products:
                ways.append(names)
    return min(ways, key=len)


def _shortest_way(successors: list[list[int]], head: int, tail: int) -> list[int]:
    """Of instructions, none if there is no way."""
    before, reached = {head: head}, [head]
    for at in reached:  # in the order of their distance
        if at == tail:
            break
        for following in successors[at]:
            if following not in before:
                before[following] = at
                reached.append(following)
    way = [tail] if tail in before else []
    while way and way[-1] != head:
        way.append(before[way[-1]])
    return way


def unwritten_uniform_registers(sass: str) -> list[str]:
    """Instructions that read a uniform register which no instruction above them has written.

    ptxas 12.8 can leave a wgmma descriptor's base unwritten, which shows as nothing else: the
    kernel reads shared memory from anywhere. Descriptors themselves (desc[..], gdesc[..]) are
    skipped, for they name only the first of the registers they read, and so are moves whose result
    is overwritten before anything can read it: ptxas moves pairs of which it then replaces a half.
    """
    written: set[int] = set()
    found = []
    lines = _INSTRUCTION.findall(sass)
    for at, (name, operands) in enumerate(lines):
        parts = operands.split(",")
        if "SETP" not in name and "PLOP" not in name:  # what else it writes, and where it says so
            while re.fullmatch(r"\s*U?P\w", parts[0]):
                parts.pop(0)
        registers = [[int(n) for n in _UNIFORM.findall(part)] for part in parts]
        writes = name.startswith(("U", "R2UR", "S2UR", "VOTEU", "LDCU", "REDUX", "CREDUX", "ELECT"))
        sources = registers[1:] if writes else registers
        unwritten = any(n not in written for part in sources for n in part)
        if unwritten and not (name == "UMOV" and _is_overwritten(registers[0][0], lines[at + 1 :])):
            found.append(f"{name} {operands}")
        if writes and registers[0]:
            wide = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            written |= set(range(registers[0][0], registers[0][0] + wide))
    return found


_REGISTER = re.compile(r"%r\d+\b")


def merges_of_constants(sass: str) -> list[str]:
    """Conversions of one number to two of e4m3 beside two others.

    ptxas makes one of two conversions of equal constants, and merges it with a register that is
    not written before.
    """
    return re.findall(r"F2FP\S*\.PACK_AB_MERGE_C R\d+, (R\d+), \1, R\d+ ;", sass)


def early_reads(ptx: str) -> list[str]:
    """Instructions of PTX that read a wgmma's sum in its basic block without a wait between."""
    groups, current, early = [], set(), []
    for line in ptx.splitlines():
        if line.startswith("$L__BB"):
            groups, current = [], set()
        elif "wgmma.mma_async" in line:
            current.update(_REGISTER.findall(line.split("}")[0]))
        elif "wgmma.commit_group" in line:
            groups, current = [*groups, current], set()
        elif "wgmma.wait_group" in line:
            pending = int(line.rstrip(" ;").split()[-1])
            groups = groups[len(groups) - pending :] if pending else []
        elif not line.lstrip().startswith(("//", ".")) and "wgmma" not in line:
            in_flight = current.union(*groups)
            if in_flight and in_flight.intersection(_REGISTER.findall(line)):
                early.append(line.strip())
    return early


def _is_overwritten(register: int, lines: list[tuple[str, str]]) -> bool:
    """Whether a uniform register is written before an instruction that might read it."""
    for name, operands in lines:
        if not re.match(
            r"U(IADD3|MOV|LEA|LOP3|SEL|SHF|IMAD|LDC)|IMAD|IADD3|VIADD|MOV|R2UR|ULDC", name
        ):
            return False
        first, *others = [[int(n) for n in _UNIFORM.findall(part)] for part in operands.split(",")]
        if any(register in part for part in others):
            return False
        if register in first:
            return True
    return False
