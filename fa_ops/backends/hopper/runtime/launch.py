"""The CUDA driver through ctypes: modules, tensor maps and launches on the current stream."""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.backends.hopper.runtime.structs import ParamsLayout

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAP_DTYPE = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLE = {64: 2, 128: 3}  # by the bytes of a row
PROMOTE_128B, PROMOTE_256B = 2, 3  # bytes that the L2 fetches at once
_MAX_CACHED_MAPS = _MAX_CONFIGS = 256


# The raw handle costs a tenth of a torch.cuda.Stream; Triton uses it too.
current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)


# Does not initialise CUDA, which exists where a CUDA tensor does.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

try:  # empty(size, stride, dtype), on the current device: a third of torch.empty_strided's time
    from torch._C._dynamo.guards import _empty_strided_cuda as empty
except ImportError:

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor on the current device."""
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def on_device(index: int) -> AbstractContextManager:
    """Make the device current; free where it already is."""
    return _SAME if current_device() == index else torch.cuda.device(index)


_SAME = nullcontext()


def processors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class DriverError(RuntimeError):
    """A CUDA driver call failed, with this status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@functools.cache
def driver() -> ctypes.CDLL:
    """Load the CUDA driver."""
    lib = ctypes.CDLL("libcuda.so.1")
    # other functions have no argtypes: converting by them takes 1 to 2 us
    lib.cuMemsetD32Async.argtypes = [
        ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
    ]  # fmt: skip
    return lib


def check(status: int, what: str) -> None:
    """Raise DriverError for a status other than success."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DriverError(f"{what} failed: {reason} ({status})", status)


_NO_CONTEXT = 101, 201  # CUDA_ERROR_INVALID_DEVICE, as tensor maps say it, and _INVALID_CONTEXT


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    """The context that the CUDA runtime uses."""
    context = ctypes.c_void_p()
    check(
        driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        "cuDevicePrimaryCtxRetain",
    )
    return context


def call(name: str, *args) -> None:
    """Call a driver function on torch's current device."""
    status = getattr(driver(), name)(*args)
    if status:
        _after_failure(status, name, *args)


def _after_failure(status: int, name: str, *args) -> None:
    """Set the context and call again if there was none, else raise.

    A thread in which the CUDA runtime has not run yet, such as one of autograd's, has no context.
    """
    if status in _NO_CONTEXT:
        check(driver().cuCtxSetCurrent(_context(current_device())), "cuCtxSetCurrent")
        status = getattr(driver(), name)(*args)
    check(status, name)


class Entry(NamedTuple):
    """An entry point with its block size, its shared memory, and macros of its own."""

    name: str
    threads: int
    shared: int = 0
    defines: tuple[tuple[str, int], ...] = ()


_loaded: dict[tuple, Kernel] = {}
_thread = threading.local()  # `asked`: the kernels that `together` will load


def kernels(
    source: str, device: int, entries: Sequence[Entry], defines: tuple[tuple[str, int], ...] = ()
) -> tuple[Kernel, ...]:
    """Entry points, loaded on one device; those that no cache has are compiled in parallel.

    Inside a function of `together` they are still being compiled when this returns.
    """
    missing = [entry for entry in entries if (source, device, entry, defines) not in _loaded]
    if missing:
        macros = [dict(defines) | dict(entry.defines) for entry in missing]
        programs = [nvrtc.program(source, e.name, d) for e, d in zip(missing, macros)]
        for entry, program, code in zip(missing, programs, nvrtc.begin(programs)):
            _loaded[source, device, entry, defines] = CompiledLater(entry, device, program, code)
    found = tuple(_loaded[source, device, entry, defines] for entry in entries)
    asked = getattr(_thread, "asked", None)
    if asked is None:
        _load_all(found)
    else:
        asked.extend(found)
    return found


def together(prepare: Callable) -> Callable:
    """`prepare` of a plan, with all kernels that it asks for compiled in parallel."""

    def prepared(call):
        if getattr(_thread, "asked", None) is not None:
            return prepare(call)
        _thread.asked = []
        try:
            run = prepare(call)
            _load_all(_thread.asked)
        finally:
            _thread.asked = None
        return run

    return prepared


def _load_all(found: Sequence[Kernel]) -> None:
    for one in found:
        if type(one) is CompiledLater:
            one.load()


# Status of a module that is damaged, or compiled for another GPU or a newer driver:
# invalid value, image, PTX or source, no binary for this GPU, unsupported, symbol not found.
_REFUSED = 1, 200, 209, 218, 222, 223, 300, 302, 303, 500


def _load_or_replace(code: bytes, program: str, entry: Entry) -> Kernel:
    """Load an entry point, or what replaces code that the driver refuses."""
    for one in itertools.chain([code], nvrtc.replacements(program, code)):
        try:
            return _load(one, entry)
        except DriverError as error:
            if error.status not in _REFUSED:
                raise
            refused = error
    major, minor = nvrtc.version(nvrtc.nvrtc())
    raise DriverError(
        f"{refused}, of a kernel that NVRTC {major}.{minor} has just compiled: a driver older "
        "than that cannot load it; FA_OPS_NVRTC names the library to compile with",
        refused.status,
    ) from None


def _load(code: bytes, entry: Entry) -> Kernel:
    name, threads, shared, _ = entry
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), code)
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    if shared:
        call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
    return Kernel(function, threads, shared)


@functools.cache
def kernel(
    source: str, name: str, device: int, threads: int, shared: int = 0,
    defines: tuple[tuple[str, int], ...] = (),
) -> Kernel:  # fmt: skip
    """One entry point, loaded on a device."""
    return kernels(source, device, [Entry(name, threads, shared)], defines)[0]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


# CUlaunchAttribute: PROGRAMMATIC_STREAM_SERIALIZATION, allowed; 72 bytes
_PROGRAMMATIC = (ctypes.c_uint32 * 18)(6, 0, 1)


class Kernel:
    """A loaded entry point with its block size and shared memory."""

    def __init__(self, function: ctypes.c_void_p, threads: int, shared: int):
        self._function, self._threads, self._shared = function, threads, shared
        self._configs: dict[tuple, tuple[object, ctypes.c_void_p]] = {}

    def launch(
        self, grid: tuple[int, int], stream: int, pointers: ctypes.Array, dependent: bool = False
    ) -> None:
        """`pointers` to the kernel's parameters; the driver copies them before this returns.

        A `dependent` launch is a programmatic one: CTAs may start before the kernel before has
        ended. The kernel waits for that itself before it accesses memory.
        """
        try:
            config = self._configs[grid, stream, dependent]
        except KeyError:
            config = self.config(grid, stream, dependent)
        status = driver().cuLaunchKernelEx(*config, pointers, None)
        if status:
            _after_failure(status, "cuLaunchKernelEx", *config, pointers, None)

    def config(
        self, grid: tuple[int, int], stream: int, dependent: bool
    ) -> tuple[object, ctypes.c_void_p]:
        """The first arguments of cuLaunchKernelEx, kept because they take 2 us to make."""
        config = _Config((*grid, 1), (self._threads, 1, 1), self._shared, stream)
        if dependent:
            config.attributes, config.count = ctypes.addressof(_PROGRAMMATIC), 1
        if len(self._configs) >= _MAX_CONFIGS:
            self._configs.clear()
        found = ctypes.byref(config), self._function
        self._configs[grid, stream, dependent] = found
        return found


class CompiledLater(Kernel):
    """A kernel whose machine code may still be compiled; an ordinary one once it is loaded."""

    def __init__(
        self, entry: Entry, device: int, program: nvrtc.Program, code: Callable[[], bytes]
    ) -> None:
        super().__init__(ctypes.c_void_p(), entry.threads, entry.shared)
        self._entry, self._device, self._program, self._code = entry, device, program, code
        self._loading = threading.Lock()

    def load(self) -> None:
        """Wait for the machine code, and load it. After an error the next call tries again."""
        with self._loading:
            if type(self) is not CompiledLater:  # another thread has loaded it meanwhile
                return
            try:
                code = self._code()
                with on_device(self._device):
                    loaded = _load_or_replace(code, self._program, self._entry)
            except BaseException:
                self._code = lambda: nvrtc.compiled([self._program])[0]
                raise
            super().__init__(loaded._function, loaded._threads, loaded._shared)
            self._program = self._code = None  # the texts of many headers, and machine code
            self.__class__ = Kernel

    def config(
        self, grid: tuple[int, int], stream: int, dependent: bool
    ) -> tuple[object, ctypes.c_void_p]:
        """As of a loaded kernel."""
        self.load()
        return Kernel.config(self, grid, stream, dependent)


def launch_dependent(
    kernels: tuple[Kernel, ...], grid: tuple[int, int], stream: int, pointers: ctypes.Array
) -> None:
    """Launch kernels with the same grid and parameters, by programmatic dependent launches."""
    start = driver().cuLaunchKernelEx
    for config in _configs(kernels, grid, stream):
        status = start(*config, pointers, None)
        if status:
            _after_failure(status, "cuLaunchKernelEx", *config, pointers, None)


@functools.lru_cache(maxsize=_MAX_CONFIGS)
def _configs(kernels: tuple[Kernel, ...], grid: tuple[int, int], stream: int) -> list[tuple]:
    return [one.config(grid, stream, True) for one in kernels]


def pointers_to(*params: ctypes._CData) -> ctypes.Array:
    """Pointers to parameters, which they keep alive."""
    pointers = (ctypes.c_void_p * len(params))(*(ctypes.addressof(p) for p in params))
    pointers.keep = params
    return pointers


# A pointer to a kernel's only parameter, a struct.
one_parameter: type[ctypes.Array] = ctypes.c_char_p * 1


class Params:
    """A kernel's parameters in one buffer: each call fills in the head, all calls share the tail.

    Each parameter is at its offset. Buffers are reused, as allocating takes longer than filling.
    """

    def __init__(
        self, head: struct.Struct, tail: bytes = b"", offsets: Sequence[int] = (0,)
    ) -> None:
        self._pack, self._tail, self._offsets = head.pack_into, bytes(head.size) + tail, offsets
        self._free: list[tuple[ctypes.Array, ctypes.Array]] = []

    @classmethod
    def of(cls, layout: ParamsLayout, first_shared: str, shared: Sequence[float]) -> Params:
        """Parameters by their layout: calls share those from `first_shared` on."""
        names = list(layout.fields)
        last = names[names.index(first_shared) - 1]
        head, tail = layout.packer(names[0], last), layout.packer(first_shared)
        return cls(head, tail.pack(*shared), layout.offsets())

    def take(self, *head: int | bytes) -> tuple[ctypes.Array, ctypes.Array]:
        """A buffer for one call, and the pointers that `Kernel.launch` takes."""
        try:
            params = self._free.pop()  # atomic, as append is
        except IndexError:
            memory = ctypes.create_string_buffer(self._tail, len(self._tail))
            at = ctypes.addressof(memory)
            params = (
                memory,
                (ctypes.c_void_p * len(self._offsets))(*[at + o for o in self._offsets]),
            )
        self._pack(params[0], 0, *head)
        return params

    def give_back(self, params: tuple[ctypes.Array, ctypes.Array]) -> None:
        """Return parameters that a call has launched from."""
        self._free.append(params)


class PreparedLaunch:
    """A launch that writes one tensor; calls of one geometry differ in addresses only.

    The kernel's first parameters are the addresses of its inputs, then that of the result. `layout`
    is the result's shape, strides and dtype.
    """

    def __init__(
        self, entry: Kernel, grid: tuple[int, int], params: Params,
        layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype],
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._params, self.layout = entry, grid, params, layout

    def run(self, stream: int, *inputs: int) -> Tensor:
        """Launch on the current device; `inputs` are addresses."""
        result = empty(*self.layout)
        params = self._params.take(*inputs, result.data_ptr())
        self._kernel.launch(self._grid, stream, params[1])
        self._params.give_back(params)
        return result


def set_zero(words: int, count: int, stream: int) -> None:
    """Zero 32-bit words at an address in stream order."""
    call("cuMemsetD32Async", words, 0, count, stream)


def address(t: Tensor | None) -> int:
    """The address of a tensor, or 0."""
    return 0 if t is None else t.data_ptr()


class TensorMap(dict):
    """Tensor maps of (B, H, S, D) tensors that differ only in their address, by that address.

    Coordinates are (feature, token, head, batch), boxes `row_bytes` of features, 128 or 64, by
    `rows` tokens of `heads` heads. Elements outside the tensor read as zero and are not written.
    With `whole_rows` a box has all features of a token, 64 after 64, and coordinates lack the
    first. With `batch_groups` a box has the features of 8 tokens, 64 after 64, and then of the
    next 8; coordinates are (group of 8 tokens, head), and a batch row begins so many groups after
    the last.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        rows: int,
        heads: int = 1,
        promotion: int = PROMOTE_256B,
        whole_rows: bool = False,
        batch_groups: int = 0,
        row_bytes: int = 128,
    ):
        (B, H, S, D), (b, h, s, _), size = shape, strides, dtype.itemsize
        # the stride of a dimension of one element is never used, but must be legal
        s, h, b = s * size if S > 1 else 16, h * size if H > 1 else 16, b * size if B > 1 else 16
        if whole_rows:
            packed = _pack("<5Q", 64, D // 64, S, H, B), _pack("<4Q", 128, s, h, b)
            self._rank, box = 5, _pack("<5I", 64, D // 64, rows, heads, 1)
        elif batch_groups:
            groups = (B - 1) * batch_groups + S // 8
            packed = _pack("<5Q", 64, 8, D // 64, groups, H), _pack("<4Q", s, 128, 8 * s, h)
            self._rank, box = 5, _pack("<5I", 64, 8, D // 64, rows // 8, 1)
        else:
            packed = _pack("<4Q", D, S, H, B), _pack("<3Q", s, h, b)
            self._rank, box = 4, _pack("<4I", row_bytes // size, rows, heads, 1)
        self._shape, self._strides = shape, strides
        self._dtype = _MAP_DTYPE[dtype]
        self._rest = *packed, box, _ONES, 0, _SWIZZLE[row_bytes], promotion, 0

    def __missing__(self, where: int) -> bytes:
        if len(self) >= _MAX_CACHED_MAPS:
            self.clear()
        found = self[where] = self._encode(where)
        return found

    def _encode(self, where: int) -> bytes:
        try:
            memory = _maps.pop()  # atomic, as append is
        except IndexError:
            memory = _map_memory()
        written, begin, to, at = memory
        at.value = where
        arguments = to, self._dtype, self._rank, at, *self._rest
        status = driver().cuTensorMapEncodeTiled(*arguments)
        if status:
            self._after_failure(status, *arguments)
        encoded = written[begin : begin + 128]
        _maps.append(memory)
        return encoded

    def _after_failure(self, status: int, *arguments) -> None:
        try:
            _after_failure(status, "cuTensorMapEncodeTiled", *arguments)
        except DriverError as error:
            about = f"shape {tuple(self._shape)}, strides {self._strides}"
            raise DriverError(f"{error} for {about}", error.status) from None


# Memory that a map is written to, where in it, that as an address, and the address that the map is
# of; a call's alone. A cache that grows has maps of its own in every step.
_maps: list[tuple[ctypes.Array, int, ctypes.c_void_p, ctypes.c_void_p]] = []


def _map_memory() -> tuple[ctypes.Array, int, ctypes.c_void_p, ctypes.c_void_p]:
    memory = (ctypes.c_char * 192)()
    at = ctypes.addressof(memory)
    begin = -at % 64
    return memory, begin, ctypes.c_void_p(at + begin), ctypes.c_void_p()


_pack = struct.pack  # sizes, strides and boxes: the driver is given where the bytes lie
_ONES = _pack("<5I", 1, 1, 1, 1, 1)
