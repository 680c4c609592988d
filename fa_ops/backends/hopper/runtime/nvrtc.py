"""Compiles the kernels at run time with NVRTC, through ctypes.

Each entry point is a program of its own, with the headers in `cuda/` passed in memory. All programs
that a plan needs are compiled in parallel threads, as NVRTC releases Python's lock.

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
from fa_ops.backends.hopper.runtime import cubin_cache, structs, wgmma

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
        headers["wgmma.cuh"] = wgmma.header(name, defines)
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
