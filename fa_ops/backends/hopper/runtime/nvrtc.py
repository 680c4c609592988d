"""Compiles the kernels at run time with NVRTC, through ctypes.

Each entry point is a program of its own, with the headers in `cuda/` and generated ones passed in
memory. All programs that a plan needs are compiled in parallel threads, as NVRTC releases Python's
lock.

Cubins are cached on disk (`cubin_cache`). The name of a file is the hash of the program, its
headers, the flags and NVRTC's version, so that it is never stale. The optional package
fa-ops-cubins brings those of common calls (`packaged_cubins`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from fa_ops.backends.hopper import backward_programs, programs
from fa_ops.backends.hopper.runtime import cubin_cache, structs

ARCH = "sm_90a"
_log = logging.getLogger("fa_ops.hopper")
FLAGS = (f"--gpu-architecture={ARCH}", "-std=c++17", "--use_fast_math", "-default-device")
_MIN_VERSION = (12, 1)  # 12.0 refuses kernels of the backward pass
_INCLUDE = re.compile(r'^#include "(\w+\.cuh?)"', re.M)
_GENERATED = "wgmma.cuh", "score_program.cuh"
_PARAMS = re.compile(r"^struct (\w+Params) \{", re.M)


class CompileError(RuntimeError):
    """NVRTC is missing, or refuses a source; the message holds its log."""


class Program(NamedTuple):
    """A translation unit: its source, and the headers that it includes as (name, text)."""

    source: str
    headers: tuple[tuple[str, str], ...] = ()


# The file of each entry point that is not in KIND.cu.
_ENTRY_FILES = {
    ("backward", "preprocess"): "backward_preprocess.cu",
    ("backward", "clip_ranges"): "backward_preprocess.cu",
    ("backward", "backward_queries"): "backward_queries.cu",
    ("backward", "distance_gradient"): "backward_distances.cu",
    ("backward", "wide_keys"): "backward_wide.cu",
    ("backward", "wide_queries"): "backward_wide.cu",
    ("backward", "postprocess"): "backward_postprocess.cu",
    ("mask_gradient", "mask_gradient"): "backward_mask.cu",
    ("packed", "packed_ranges"): "packed_ranges.cu",
    ("scaled", "scaled"): "prepare_e4m3.cu",
    ("scaled_packed", "scaled_packed"): "prepare_e4m3.cu",
}


def program(kind: str, entry: str, defines: dict[str, int | str]) -> Program:
    """The translation unit of one entry point of a kind of kernel.

    Its source defines the configuration's macros and `ENTRY_<entry>`, includes one file, and
    asserts the layouts that calls pack. HAS_PROGRAM is the text of a program of scores and masks.
    """
    text = defines.get("HAS_PROGRAM")
    name = _ENTRY_FILES.get((kind, entry), f"{kind}.cu")
    if (kind, entry) == ("backward", "backward") and defines["IS_WIDE"]:
        name = "backward_keys.cu"
    if (kind, entry) == ("backward", "backward") and defines["IS_PAIRED"]:
        name = "backward_pair.cu"
    macros = sorted({**defines, "HAS_PROGRAM": int(bool(text)), f"ENTRY_{entry}": 1}.items())
    source = "".join(f"#define {macro} {value}\n" for macro, value in macros)
    headers = {header: _read_source(header) for header in _included(name)}
    if "wgmma.cuh" in headers:
        headers["wgmma.cuh"] = wgmma_header(name, defines)
    if text:
        of = programs.header if kind == "forward" else backward_programs.header
        headers["score_program.cuh"] = of(text)
    layouts = "".join(_layout_assertions(header) for header in headers)
    return Program(f'{source}#include "{name}"\n{layouts}', tuple(headers.items()))


@functools.cache
def _layout_assertions(header: str) -> str:
    names = _PARAMS.findall(_read_source(header))
    return "".join(structs.struct_layout(header, x).assertions(x) for x in names)


@functools.cache
def _included(name: str) -> tuple[str, ...]:
    """A source file and all that it includes, directly or not."""
    found = {name: None}
    for header in _INCLUDE.findall(_read_source(name)):
        found |= dict.fromkeys(_included(header))
    return tuple(found)


@functools.cache
def _read_source(name: str) -> str:
    return "" if name in _GENERATED else (structs.SOURCES / name).read_text()


def _chosen_library() -> str | None:
    return os.environ.get("FA_OPS_NVRTC")


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """Load the NVRTC of torch's CUDA build, or the one that FA_OPS_NVRTC names.

    Raises:
        CompileError: none was found that is new enough.
    """
    chosen = _chosen_library()
    names = (
        [chosen] if chosen else ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", *_installed()]
    )
    reasons = []
    for name in names:
        try:
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
                ctypes.CDLL(str(builtins))  # NVRTC loads it by its bare name
            lib = ctypes.CDLL(name)
            found = version(lib)
        except (OSError, AttributeError) as error:
            reasons.append(str(error))
            continue
        if found >= _MIN_VERSION:
            return lib
        reasons.append(f"{name} is {found[0]}.{found[1]}")
    package = "nvidia-cuda-nvrtc"
    if (torch.version.cuda or "").startswith("12."):
        package += "-cu12"  # the driver may be too old for what a newer one compiles
    oldest = f"{_MIN_VERSION[0]}.{_MIN_VERSION[1]}"
    raise CompileError(
        f"NVRTC {oldest} or newer was not found: {'; '.join(reasons)}; pip install {package}"
    )


def version(lib: ctypes.CDLL) -> tuple[int, int]:
    """(major, minor) of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _installed() -> list[str]:
    """Paths of NVRTC in the nvidia-cuda-nvrtc package, for a torch that has not loaded it."""
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    return [
        str(path)
        for folder in folders or ()
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))
    ]


def cache_dir() -> Path:
    """The folder of cubins: FA_OPS_CACHE_DIR, or the user's cache folder."""
    return cubin_cache.folder()


def cubins(kind: str, entries: Sequence[str], defines: dict[str, int]) -> list[bytes]:
    """The machine code of each entry point with these macros, as `compiled` returns it."""
    return compiled([program(kind, entry, defines) for entry in entries])


def compiled(programs: Sequence[Program]) -> list[bytes]:
    """The machine code of each program: packaged, from the cache or compiled now.

    Raises:
        CompileError: NVRTC is missing, or refuses the source; the message is its log.
    """
    return [code() for code in begin(programs)]


def begin(programs: Sequence[Program]) -> list[Callable[[], bytes]]:
    """Start a thread for each program that has to be compiled.

    Returns:
        for each program what waits for its machine code and returns it, or raises as `compiled`
        does.
    """
    codes = {program: _found(program) for program in programs}
    missing = [program for program, code in codes.items() if code is None]
    results = {program: functools.partial(bytes, code or b"") for program, code in codes.items()}
    if missing:
        threads, together = ThreadPoolExecutor(len(missing)), _Compilation(len(missing))
        results |= {
            program: threads.submit(_compiled, program, together).result for program in missing
        }
        threads.shutdown(wait=False)
    return [results[program] for program in programs]


def uncached(kind: str, entries: Sequence[str], defines: dict[str, int]) -> list[str]:
    """The entry points that `cubins` would compile."""
    programs = {entry: program(kind, entry, defines) for entry in entries}
    return [entry for entry, unit in programs.items() if _found(unit) is None]


class _Compilation:
    """Kernels that are compiled at the same time, and are one line of the log."""

    def __init__(self, count: int) -> None:
        self.left, self.stored, self.began = count, 0, time.perf_counter()
        self.lock = threading.Lock()

    def ended(self, path: Path | None) -> None:
        """Log how many there were when the last one has ended; `path` None: it failed."""
        with self.lock:
            self.left -= 1
            self.stored += path is not None
            if self.left or not self.stored or path is None:
                return
        kept = "for this process alone" if path in cubin_cache.unsaved else f"in {path.parent}"
        seconds = time.perf_counter() - self.began
        _log.info("compiled %d kernels in %.1f s, kept %s", self.stored, seconds, kept)


def _compiled(program: Program, together: _Compilation) -> bytes:
    stored = None
    try:
        path = _path(program)
        code = cubin_cache.unsaved.get(path) or compile_source(program)[0]
        cubin_cache.store(path, code)
        stored = path
        return code
    finally:
        together.ended(stored)


def replacements(program: Program, refused: bytes) -> Iterator[bytes]:
    """Machine code in place of what the driver refuses: the cached one, then one compiled now."""
    stored = cubin_cache.load(_path(program))
    if stored is not None and stored != refused:
        yield stored
    code, _ = compile_source(program)
    cubin_cache.store(_path(program), code)
    yield code


def _found(program: Program) -> bytes | None:
    if cubin_cache.packaged_folder() and not _chosen_library():
        code = cubin_cache.load_packaged(file_name(program))
        if code is not None:
            return code
    return cubin_cache.load(_path(program))


def _path(program: Program) -> Path:
    major, minor = version(nvrtc())
    return cache_dir() / file_name(program, f"{major}.{minor}")


def file_name(program: Program, *compiler: str) -> str:
    """The name of a program's machine code, by all that it depends on."""
    texts = program.source, *itertools.chain(*program.headers), *FLAGS, *compiler
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return f"{key[:32]}.{ARCH}.cubin"


def compile_source(program: Program, *extra: str) -> tuple[bytes, str]:
    """(cubin, log) of a program; `extra` are more NVRTC options."""
    lib, handle = nvrtc(), ctypes.c_void_p()
    names = _strings(name for name, _ in program.headers)
    texts = _strings(text for _, text in program.headers)
    source = program.source.encode(), b"fa_ops.cu", len(names)
    _check(lib.nvrtcCreateProgram(ctypes.byref(handle), *source, texts, names))
    try:
        options = _strings((*FLAGS, *extra))
        status = lib.nvrtcCompileProgram(handle, len(options), options)
        log = _read(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, handle)
        text = log.rstrip(b"\0").decode(errors="replace")
        if status:
            raise CompileError(f"NVRTC could not compile a kernel for {ARCH}:\n{text}")
        return _read(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, handle), text
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(handle))


def _strings(texts: Iterable[str]) -> ctypes.Array:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _read(size_of, read, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        raise CompileError(f"an NVRTC call failed with status {status}")


# The header wgmma.cuh: the warpgroup matrix products of a kernel, for its tile sizes.
#
# Each product is a pair of functions: `NAME_start` overwrites the accumulator, `NAME` adds to it.
# One whose sums start now and then is a single function, `NAME_if`, which adds unless its last
# argument is 0. The operands' layouts are those of CUTLASS: a K-major operand has the inner
# dimension contiguous, an MN-major one is transposed.

_MAJOR_K, _MAJOR_MN = 0, 1


def wgmma_header(source: str, defines: dict[str, int]) -> str:
    """The products that a source file calls, as C++."""
    if source == "quantized.cu":
        return "".join(wgmma(*product) for product in _eight_bit_products(defines))
    dtype = "bf16" if defines.get("IS_BF16") else "f16"
    return "".join(
        wgmma(name, n, dtype, a, b, *rest)
        for name, n, a, b, *rest in _wgmma_products(source, defines)
    )


def wgmma(
    name: str, n: int, dtype: str, a: str | int, b: int, steps: Sequence[tuple[int, int]],
    b_group: int = 1024, is_conditional: bool = False,
) -> str:  # fmt: skip
    """Wrappers of `wgmma.mma_async` for a 64 x n accumulator.

    Args:
        name: of the wrappers.
        n: columns of the accumulator.
        dtype: PTX type of both operands. 8-bit ones are K-major; those of s8 have sums in s32.
        a: "registers", or the major dimension of an operand in shared memory.
        b: the major dimension of operand b.
        steps: byte offsets of a and b for each 32 bytes of the inner dimension. All steps are one
            statement, because NVRTC takes an eighth longer over one statement each.
        b_group: bytes from 8 rows of b to the next 8; 512: rows are 64 bytes.
        is_conditional: whether to return `NAME_if` alone.
    """
    count, words = n // 2, 4 * len(steps) if a == "registers" else 0
    accumulator = ", ".join(f"%{i}" for i in range(count))
    is_wide, is_integer = dtype in ("bf16", "f16"), dtype == "s8"
    sums, depth = ("s32" if is_integer else "f32"), (16 if is_wide else 32)
    operation = f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{sums}.{dtype}.{dtype}"
    kind, constraint = ("u32", "r") if is_integer else ("float", "f")
    bases = count + words  # the operands after the accumulator and the registers of a
    base_b, high = (bases, bases + 1) if words else (bases + 1, bases + 2)

    def descriptor(to: str, base: int, offset: int, group: int = 1024) -> str:
        swizzle = 1 << 30 if group != 8 * 64 else 1 << 31
        word = f"%{high}" if group == 1024 else f"{swizzle | group >> 4}"
        return f"add.u32 x, %{base}, {offset // 16}; mov.b64 {to}, {{x, {word}}};"

    def step(i: int, starts: bool) -> str:
        adds = f"%{high + 1}" if is_conditional and i == 0 else int(not (starts and i == 0))
        setup = f"setp.ne.b32 p, {adds}, 0;"
        if words:
            operand_a = "{" + ", ".join(f"%{count + 4 * i + k}" for k in range(4)) + "}"
            majors = f"{b}"
        else:
            operand_a, majors = "a", f"{a}, {b}"
            setup += descriptor("a", bases, steps[i][0])
        signs = "" if is_integer else ", 1, 1" + f", {majors}" * is_wide
        return (
            f'  "{setup} {descriptor("b", base_b, steps[i][1], b_group)} "\n'
            f'  "{operation} {{{accumulator}}}, {operand_a}, b, p{signs}; "\n'
        )

    def function(suffix: str, starts: bool) -> str:
        text = "".join(step(i, starts) for i in range(len(steps)))
        outputs = ", ".join(f'"{"=" if starts else "+"}{constraint}"(d[{i}])' for i in range(count))
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(words)) or '"r"(a)'
        first = f"const u32 (&a)[{words}]" if words else "u32 a"
        argument, last = (", u32 adds", ', "r"(adds)') if is_conditional else ("", "")
        return (
            f"DEVICE void {name}{suffix}({kind} (&d)[{count}], {first}, u32 b{argument}) {{\n"
            f'  asm volatile("{{ .reg .pred p; .reg .b32 x; .reg .b64 a, b; "\n{text}  "}}"\n'
            f'  : {outputs} : {inputs}, "r"(b), "n"(DESCRIPTOR_HIGH){last});\n}}\n'
        )

    if is_conditional:
        return function("_if", False)
    return function("_start", True) + function("", False)


def _wgmma_products(source: str, defines: dict[str, int]) -> list[tuple]:
    """Arguments of `wgmma`, without the dtype, for each product of a source file."""
    D = defines.get("HEAD_FEATURES", defines["HEAD_DIM"])
    Dv = defines.get("VALUE_FEATURES", defines["VALUE_DIM"])
    M, N = defines.get("BLOCK_M", 0), defines["BLOCK_N"]
    scores = _MAJOR_K, _MAJOR_K
    registers = "registers", _MAJOR_MN
    if source == "forward.cu" and defines.get("WHOLE_ROWS"):
        columns = defines["HEAD_DIM"] // 64, defines["VALUE_DIM"] // 64
        return [
            ("wgmma_scores", N, *scores, _features(D, 64, 8), columns[0] * 1024),
            ("wgmma_output", Dv, *registers, _rows(N, b_step=columns[1] * 2048), columns[1] * 1024),
        ]
    if source in ("forward.cu", "tangent.cu"):
        return [
            ("wgmma_scores", N, *scores, _features(D, 64, N)),
            ("wgmma_output", Dv, *registers, _rows(N)),
        ]
    if source in ("mla.cu", "forward_wide.cu"):
        # a column of 64 features; all keys of a tile and half of the values
        return [
            ("wgmma_scores", N, *scores, _features(64, 64, N)),
            ("wgmma_output", Dv // 2, *registers, _rows(N)),
            ("wgmma_other_output", Dv // 2, _MAJOR_K, _MAJOR_MN, _rows(N, a_step=32)),
        ]
    if source in ("backward_queries.cu", "backward_mask.cu"):
        N = defines["QUERY_BLOCK_N"]
        return [
            ("wgmma_row_scores", N, *scores, _features(D, 64, N)),
            ("wgmma_row_value_scores", N, *scores, _features(Dv, 64, N)),
            ("wgmma_query_grads", D, *registers, _rows(N)),
        ]
    if source == "backward_pair.cu":  # a CTA has half the keys, and half the columns of dQ
        keys, half = N // 2, defines["HEAD_DIM"] // 2
        return [
            ("wgmma_scores", M, *scores, _features(D, keys, M)),
            ("wgmma_value_scores", M, *scores, _features(Dv // 2, keys, M)),
            ("wgmma_half_grads", half, *registers, _rows(M)),
            ("wgmma_queries", 64, _MAJOR_MN, _MAJOR_MN, _rows(keys, a_step=2048)),
        ]
    if source == "backward_wide.cu":  # half the features; a quarter of a gradient's columns
        return [
            ("wgmma_first_scores", N, "registers", _MAJOR_K, _features(D // 2, 64, N)),
            ("wgmma_scores", N, *scores, _features(D // 2, 64, N)),
            ("wgmma_grads", D // 4, _MAJOR_K, _MAJOR_MN, _rows(N, a_step=32)),
        ]
    products = [
        ("wgmma_scores", M, *scores, _features(D, N, M)),
        ("wgmma_value_scores", M, *scores, _features(Dv, N, M)),
        ("wgmma_grads", D, *registers, _rows(M)),
    ]
    if source == "backward_keys.cu":
        return [*products, ("wgmma_value_grads", Dv, *registers, _rows(M))]
    # of 128 queries a consumer has half the rows of dQ; of 64 queries half the columns, or every
    # second block
    columns = defines["SUM_FEATURES"]
    columns = columns if defines["ALTERNATES"] else columns * M // 128
    steps = _rows(N, a_step=2048)
    return [*products, ("wgmma_queries", columns, _MAJOR_MN, _MAJOR_MN, steps)]


def _eight_bit_products(defines: dict[str, int]) -> list[tuple]:
    """Arguments of `wgmma` for quantized.cu, whose tiles are columns of 128 bytes."""
    D, Dv, N = defines["HEAD_FEATURES"], defines["VALUE_FEATURES"], defines["BLOCK_N"]
    offsets = [(i // 4 * 128, i % 4 * 32) for i in range(-(-D // 32))]
    features = [(column * 64 + x, column * N + x) for column, x in offsets]
    dtype = "s8" if defines["IS_INT8"] else "e4m3"
    return [
        ("wgmma_scores", N, dtype, _MAJOR_K, _MAJOR_K, features),
        (
            "wgmma_output",
            Dv + 8 * defines["SUMS_BY_PRODUCT"],
            "e4m3",
            "registers",
            _MAJOR_K,
            _keys(N),
            8 * N,
            True,
        ),
    ]


def _keys(count: int) -> list[tuple[int, int]]:
    """Offsets for each 32 keys; the first operand is in registers."""
    return [(0, 32 * i) for i in range(count // 32)]


def _features(count: int, a_rows: int, b_rows: int) -> list[tuple[int, int]]:
    """Steps over features: tiles are columns of 64 features, of `a_rows` and `b_rows` rows.

    The last step may read zeros beyond the features.
    """
    offsets = [(d // 4 * 64 * 128, d % 4 * 32) for d in range(-(-count // 16))]
    return [(column * a_rows // 64 + x, column * b_rows // 64 + x) for column, x in offsets]


def _rows(count: int, a_step: int = 0, b_step: int = 2048) -> list[tuple[int, int]]:
    """Steps over rows of 64 features, for an MN-major operand b."""
    return [(a_step * i, b_step * i) for i in range(count // 16)]
