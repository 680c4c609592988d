"""Source assembly and run-time compilation: CUDA C++ without headers, NVRTC through ctypes.

Each entry point is a program of its own: those that a call needs are compiled side by side, in
threads, as NVRTC gives Python's lock back.

Cubins are kept on disk (`cubin_cache`). An entry's name is the hash of its whole source, the flags
and NVRTC's version, so it is never stale.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fa_ops.backends.hopper import cubin_cache

ARCH = "sm_90a"
FLAGS = (f"--gpu-architecture={ARCH}", "-std=c++17", "--use_fast_math", "-default-device")
_SOURCES = Path(__file__).parent / "cuda"
_OLDEST = (12, 1)  # 12.0 refuses kernels of the backward pass
_ENTRY = re.compile(r'extern "C" (__global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\()')


class CompileError(RuntimeError):
    """NVRTC is missing or refused the source; the message is its log."""


def wgmma(name: str, n: int, dtype: str, a: str, b: str, steps: Sequence[tuple[int, int]]) -> str:
    """wgmma wrappers: a 64 x n accumulator, `len(steps)` times 16 of the inner dimension; `name`
    adds to a sum, `name_start` begins one.

    a: "registers", those of one step after those of another; or in shared memory, "rows" (the inner
    dimension contiguous) or "columns". b: "rows" or "columns". steps: how many bytes behind the
    bases of a and b each begins. They are one statement, as NVRTC takes an eighth longer over one
    each.
    """
    count, words = n // 2, 4 * len(steps) if a == "registers" else 0
    acc = ", ".join(f"%{i}" for i in range(count))
    op = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype}"
    flip = {"rows": 0, "columns": 1}
    bases = count + words  # the operands after the accumulator and the registers
    at_b, high = (bases, bases + 1) if words else (bases + 1, bases + 2)

    def place(descriptor: str, base: int, offset: int) -> str:
        return f"add.u32 x, %{base}, {offset // 16}; mov.b64 {descriptor}, {{x, %{high}}};"

    def step(i: int, starts: bool) -> str:
        keep = f"setp.ne.b32 p, {int(not (starts and i == 0))}, 0;"
        if words:
            own = "{" + ", ".join(f"%{count + 4 * i + k}" for k in range(4)) + "}"
            flips = f"{flip[b]}"
        else:
            own, flips = "a", f"{flip[a]}, {flip[b]}"
            keep += place("a", bases, steps[i][0])
        return (
            f'  "{keep} {place("b", at_b, steps[i][1])} "\n'
            f'  "{op} {{{acc}}}, {own}, b, p, 1, 1, {flips}; "\n'
        )

    def function(suffix: str, starts: bool) -> str:
        text = "".join(step(i, starts) for i in range(len(steps)))
        outputs = ", ".join(f'"{"=" if starts else "+"}f"(d[{i}])' for i in range(count))
        given = ", ".join(f'"r"(a[{i}])' for i in range(words)) or '"r"(a)'
        first = f"const u32 (&a)[{words}]" if words else "u32 a"
        return (
            f"DEVICE void {name}{suffix}(float (&d)[{count}], {first}, u32 b) {{\n"
            f'  asm volatile("{{ .reg .pred p; .reg .b32 x; .reg .b64 a, b; "\n{text}  "}}"\n'
            f'  : {outputs} : {given}, "r"(b), "n"(DESCRIPTOR_HIGH));\n}}\n'
        )

    return function("_start", True) + function("", False)


def program(kind: str, entry: str, defines: dict[str, int]) -> str:
    """The source of one entry point of a kind of kernel."""
    return only(entry, assemble(kind, defines))


def only(entry: str, source: str) -> str:
    """A source with one of its entry points: others become templates that nobody instantiates."""

    def kept(found: re.Match) -> str:
        return found[0] if found[2] == entry else f"template <int> {found[1]}"

    return _ENTRY.sub(kept, source)


def assemble(kind: str, defines: dict[str, int]) -> str:
    """The source of a kind of kernel, with all of its entry points."""
    products = ""
    dtype = "bf16" if defines.get("IS_BF16") else "f16"
    if kind == "forward":
        products = _forward(defines, dtype)
        parts = ("dropout.cuh", "scheduler.cuh", "softmax.cuh", "exact_row.cuh", "forward.cu")
        parts = ("elements.cuh", *(["bias.cuh"] if defines.get("BIAS_BITS") else []), *parts)
    elif kind == "backward":
        products, parts = _backward(defines, dtype)
    elif kind == "mask_gradient":
        products, parts = _backward(defines | {"ADDS_DQ": 0}, dtype)
        parts = (*parts[:-3], "backward_queries.cu", "backward_mask.cu")
    elif kind == "decode":
        parts = ("elements.cuh", "softmax.cuh", "exact_row.cuh")
        parts = (*parts, "stretches.cuh", "merge.cuh", "decode.cu")
    elif kind == "mla":
        products = _mla(defines, dtype)
        parts = ("elements.cuh", "softmax.cuh", "exact_row.cuh")
        parts = (*parts, "stretches.cuh", "merge.cuh", "mla.cu")
    else:  # what other kernels need, written before they run
        parts = {
            "dropout": ("dropout.cuh", "sequences.cuh", "dropout.cu"),
            "mask": ("mask.cu",),
            "packed": ("sequences.cuh", "packed.cu"),
        }[kind]
    header = "".join(f"#define {name} {value}\n" for name, value in sorted(defines.items()))
    ptx, *rest = ((_SOURCES / part).read_text() for part in ("ptx.cuh", *parts))
    return "\n".join((header, ptx, products, *rest))


def _features(count: int, a_rows: int, b_rows: int) -> list[tuple[int, int]]:
    """Steps over features, in columns of 64 of so many rows."""
    places = [(d // 4 * 64 * 128, d % 4 * 32) for d in range(count // 16)]
    return [(column * a_rows // 64 + at, column * b_rows // 64 + at) for column, at in places]


def _rows(count: int, a_step: int = 0) -> list[tuple[int, int]]:
    """Steps over rows of 64 features, which operand b has as columns."""
    return [(a_step * j, 2048 * j) for j in range(count // 16)]


def _forward(defines: dict[str, int], dtype: str) -> str:
    """Products of all features, and of all keys, of a block."""
    D, N = defines["HEAD_DIM"], defines["BLOCK_N"]
    return wgmma("wgmma_scores", N, dtype, "rows", "rows", _features(D, 64, N)) + wgmma(
        "wgmma_output", defines["VALUE_DIM"], dtype, "registers", "columns", _rows(N)
    )


def _mla(defines: dict[str, int], dtype: str) -> str:
    """Products of a column of 64 features, and of all keys of a tile with half of the values."""
    half, N = defines["VALUE_DIM"] // 2, defines["BLOCK_N"]
    return (
        wgmma("wgmma_scores", N, dtype, "rows", "rows", _features(64, 64, N))
        + wgmma("wgmma_output", half, dtype, "registers", "columns", _rows(N))
        + wgmma("wgmma_other", half, dtype, "rows", "columns", _rows(N, a_step=32))
    )


def _backward(defines: dict[str, int], dtype: str) -> tuple[str, tuple[str, ...]]:
    """Products and sources of a backward pass in one kernel, or with a second for dQ."""
    D, Dv, M, N = (defines[name] for name in ("HEAD_DIM", "VALUE_DIM", "BLOCK_M", "BLOCK_N"))
    products = wgmma("wgmma_scores", M, dtype, "rows", "rows", _features(D, N, M))
    products += wgmma("wgmma_value_scores", M, dtype, "rows", "rows", _features(Dv, N, M))
    products += wgmma("wgmma_grads", D, dtype, "registers", "columns", _rows(M))
    if defines["IS_WIDE"]:
        products += wgmma("wgmma_value_grads", Dv, dtype, "registers", "columns", _rows(M))
    else:
        # of 64 queries a consumer has half the columns, of 128 half the queries
        steps = _rows(N, a_step=2048)
        products += wgmma("wgmma_queries", D * M // 128, dtype, "columns", "columns", steps)
    own = "backward_keys.cu" if defines["IS_WIDE"] else "backward.cu"
    parts = ("elements.cuh", "dropout.cuh", "bias.cuh", "backward.cuh", own)
    if defines["ADDS_DQ"]:
        return products, (*parts, "backward_finish.cu")
    N = defines["QUERY_BLOCK_N"]
    for name, features in (("wgmma_row_scores", D), ("wgmma_row_value_scores", Dv)):
        products += wgmma(name, N, dtype, "rows", "rows", _features(features, 64, N))
    products += wgmma("wgmma_query_grads", D, dtype, "registers", "columns", _rows(N))
    return products, (*parts, "backward_queries.cu", "backward_finish.cu")


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """The NVRTC that torch's CUDA build brought, or the one FA_OPS_NVRTC names.

    Raises:
        CompileError: there is none, or only older ones than the kernels need.
    """
    chosen = os.environ.get("FA_OPS_NVRTC")
    names = (
        [chosen] if chosen else ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", *_installed()]
    )
    reasons = []
    for name in names:
        try:
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
                ctypes.CDLL(str(builtins))  # NVRTC looks for it by bare name
            lib = ctypes.CDLL(name)
            found = version(lib)
        except (OSError, AttributeError) as error:
            reasons.append(str(error))
            continue
        if found >= _OLDEST:
            return lib
        reasons.append(f"{name} is {found[0]}.{found[1]}")
    package = "nvidia-cuda-nvrtc"
    if (torch.version.cuda or "").startswith("12."):
        package += "-cu12"  # the driver may be too old for what a newer one compiles
    oldest = f"{_OLDEST[0]}.{_OLDEST[1]}"
    raise CompileError(
        f"NVRTC {oldest} or newer was not found: {'; '.join(reasons)}; pip install {package}"
    )


def version(lib: ctypes.CDLL) -> tuple[int, int]:
    """NVRTC's version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _installed() -> list[str]:
    """NVRTC from the nvidia-cuda-nvrtc package, for machines whose torch did not load it."""
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    return [
        str(path)
        for folder in folders or ()
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))
    ]


def cache_dir() -> Path:
    """Where cubins are kept: FA_OPS_CACHE_DIR, or the user's cache folder."""
    return cubin_cache.folder()


def cubins(kind: str, entries: Sequence[str], defines: dict[str, int]) -> list[bytes]:
    """The machine code of each entry point with these defines, as `compiled` has it."""
    return compiled([program(kind, entry, defines) for entry in entries])


def compiled(sources: Sequence[str]) -> list[bytes]:
    """The machine code of each, from the cache or made now.

    Raises:
        CompileError: NVRTC is missing, or its log says what it refused.
    """
    found = {source: cubin_cache.load(_path(source)) for source in sources}
    missing = [source for source, code in found.items() if code is None]
    if len(missing) == 1:
        found[missing[0]] = _compiled(missing[0])
    elif missing:
        with ThreadPoolExecutor(len(missing)) as threads:
            found |= zip(missing, threads.map(_compiled, missing))
    return [found[source] for source in sources]


def uncached(kind: str, entries: Sequence[str], defines: dict[str, int]) -> list[str]:
    """The entry points that `cubins` would compile."""
    programs = {entry: program(kind, entry, defines) for entry in entries}
    return [entry for entry, source in programs.items() if cubin_cache.load(_path(source)) is None]


def _compiled(source: str) -> bytes:
    path = _path(source)
    code = cubin_cache.unsaved.get(path) or compile_source(source)[0]
    cubin_cache.store(path, code)
    return code


def recompiled(source: str) -> bytes:
    """The machine code, made now in place of what is stored, which the driver refuses."""
    code, _ = compile_source(source)
    cubin_cache.store(_path(source), code)
    return code


def _path(source: str) -> Path:
    major, minor = version(nvrtc())
    key = "\0".join((source, *FLAGS, f"{major}.{minor}"))
    return cache_dir() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.{ARCH}.cubin"


def compile_source(source: str, *extra: str) -> tuple[bytes, str]:
    """(cubin, log) of a translation unit; `extra` are more NVRTC options."""
    lib, program = nvrtc(), ctypes.c_void_p()
    options = (*FLAGS, *extra)
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    _check(
        lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fa_ops.cu", 0, None, None)
    )
    try:
        status = lib.nvrtcCompileProgram(program, len(options), array)
        log = (
            _read(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program)
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        if status:
            raise CompileError(f"NVRTC could not compile a kernel for {ARCH}:\n{log}")
        return _read(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, program), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of, read, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        raise CompileError(f"an NVRTC call failed with status {status}")
