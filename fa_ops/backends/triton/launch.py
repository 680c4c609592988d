"""Launching without Triton's per-call lookup: one compilation per key, then one C call.

Triton's JITFunction.run takes 10 us for 20 arguments, because it inspects every argument of every
call. Here the caller forms a key of everything that a compilation depends on (dtypes, head
dimensions, options, alignment), and calls `bind` for new keys only. Lengths, strides and scales are
plain arguments and never part of a key.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from fa_ops.backends.triton.arguments import Layout
from fa_ops.call.call import Call
from fa_ops.call.options import ALIGNMENT

_log = logging.getLogger("fa_ops.triton")

Grid = tuple[int, int, int]
Launch = Callable[[Grid, Sequence[Any]], None]

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
# The first parameters of the launchers of Triton 3.6 to 3.9. The kernel's metadata, the launch's
# metadata, two hooks and the kernel's parameters follow, constexpr ones included.
_CONVENTION = ("self", "gridX", "gridY", "gridZ", "stream", "function")


VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
INTERPRETED: bool = triton.knobs.runtime.interpret

try:  # three times as fast as torch.empty_strided, and what inductor's code allocates with
    from torch._C import _cuda_getDevice
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:  # a CPU build of torch
    _cuda_getDevice = _empty_strided_cuda = None


def empty(size: tuple, stride: tuple, dtype: torch.dtype, device: int) -> Tensor:
    """A fast torch.empty_strided on the CUDA device of that index, or on the CPU for -1."""
    if device >= 0 and _empty_strided_cuda is not None and device == _cuda_getDevice():
        return _empty_strided_cuda(size, stride, dtype)
    place = torch.device("cpu") if device < 0 else torch.device("cuda", device)
    return torch.empty_strided(size, stride, dtype=dtype, device=place)


# A tensor as a launch argument. Triton accepts addresses too, and queries the driver for none.
address: Callable[[Tensor], Any] = (lambda tensor: tensor) if INTERPRETED else Tensor.data_ptr


def bind(
    fn: Any,
    args: Sequence[Any],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    device: torch.device,
    **specialisation: Any,
) -> Launch:
    """Compile `fn` and return its `launch(grid, args)` on the current stream of `device`.

    args:      the parameters before the constexpr ones: tensors, ints, floats, and None for absent;
               a launch takes a tensor's `address` as well
    constants: the constexpr parameters, which are the last ones of fn, in fn's order
    options:   num_warps, num_stages, maxnreg
    specialisation: see `compile_kernel`
    """
    if not isinstance(fn, JITFunction):  # the interpreter
        return _through_jit(fn, args, constants, {})
    with torch.cuda.device(device):
        target = triton.runtime.driver.active.get_current_target()
        kernel = compile_kernel(fn, args, constants, options, target, **specialisation)
        problem = _convention_error(kernel.run)
    if problem is not None:
        warnings.warn(f"{problem}; launching through the JIT, 10 us slower per call", stacklevel=2)
        return _through_jit(fn, args, constants, options)
    return _direct(kernel, tuple(constants.values()), device.index)


def compile_kernel(
    fn: JITFunction,
    args: Sequence[Any],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    target: GPUTarget,
    *,
    divisors: Mapping[str, int] | None = None,
    fixed: Collection[str] = (),
    wide: bool = False,
) -> CompiledKernel:
    """Compile `fn` for `target`. Needs no GPU; tensors in `args` may be on the meta device.

    divisors: parameters known to be multiples: of bytes for a tensor's address, of units for an int
    fixed:    ints that have this very value in every call of the key
    wide:     ints whose parameter has no annotation have 64 bits instead of 32
    """
    trailing = fn.arg_names[len(args) :]
    if list(trailing) != list(constants):
        raise ValueError(f"{fn.__name__}: constants must be {trailing}, got {list(constants)}")
    signature, values, attributes = {}, {}, {}
    for index, (parameter, arg) in enumerate(zip(fn.params, args, strict=False)):
        name = parameter.name
        if arg is None or name in fixed:
            signature[name], values[name] = "constexpr", arg
            continue
        signature[name] = _type(arg, parameter.annotation_type, wide)
        if divisors and name in divisors:
            attributes[(index,)] = [["tt.divisibility", divisors[name]]]
    signature |= dict.fromkeys(constants, "constexpr")
    source, began = ASTSource(fn, signature, values | dict(constants), attributes), time.time()
    kernel = triton.compile(source, target=target, options=_given(options))
    _log.info(
        "compiled 1 kernel, %s, or found it in Triton's cache, in %.1f s, kept in %s",
        fn.__name__, time.time() - began, triton.knobs.cache.dir,
    )  # fmt: skip
    return kernel


def architecture(device: torch.device) -> int:
    """Compute capability as Triton writes it: 90 for Hopper; 80 for the interpreter."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessors(device: int) -> int:
    """The number of multiprocessors of the CUDA device of that index."""
    if device < 0:
        return 4  # the interpreter: enough to divide work
    return torch.cuda.get_device_properties(device).multi_processor_count


def interpreter_error(q: Tensor) -> str | None:
    """Why Triton's interpreter cannot multiply such numbers, or None."""
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return "has no bfloat16 in Triton's interpreter, which multiplies its bits; use float16"
    return None


def _type(arg: Any, annotation: str, wide: bool) -> str:
    if isinstance(arg, Tensor):
        return _POINTERS[arg.dtype]
    if annotation:
        return annotation
    if isinstance(arg, float):
        return "fp32"
    return "i64" if wide else "i32"


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    # the default of Triton to 3.9, which warns that it will change
    given = {name: value for name, value in options.items() if value is not None}
    return given | {"enable_fp_fusion": True}


def _convention_error(run: Any) -> str | None:
    parameters = _parameters(run)
    if parameters[: len(_CONVENTION)] == _CONVENTION:
        return None
    return f"the launcher of Triton {triton.__version__} takes other parameters: {parameters}"


def _parameters(run: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(type(run).__call__).parameters)


def _direct(kernel: CompiledKernel, constants: tuple, index: int) -> Launch:
    run, meta = kernel.run, kernel.metadata
    stream = triton.runtime.driver.active.get_current_stream
    current = _cuda_getDevice or torch.cuda.current_device
    call, head = run, (kernel.function, kernel.packed_metadata, None, None, None)
    if _parameters(run) == (*_CONVENTION, "args") and not meta.global_scratch_size:
        # Triton 3.6: calling the C function that `run` wraps saves 1 us
        modes = (run.launch_cooperative_grid, run.launch_pdl)
        call, head = run.launch, (head[0], *modes, None, None, *head[1:])

    def launch(grid: Grid, args: Sequence[Any]) -> None:
        if current() == index:
            call(*grid, stream(index), *head, *args, *constants)
        else:
            with torch.cuda.device(index):
                call(*grid, stream(index), *head, *args, *constants)

    return launch


class _Address:
    """A stand-in for a tensor of which only the address is known, for JITFunction."""

    def __init__(self, value: int, dtype: torch.dtype) -> None:
        self.value, self.dtype = value, dtype

    def data_ptr(self) -> int:
        return self.value


def _through_jit(
    fn: Any, sample: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> Launch:
    options = _given(options)
    dtypes = [a.dtype if isinstance(a, Tensor) else None for a in sample]
    index = next(a.get_device() for a in sample if isinstance(a, Tensor))  # -1 for the CPU

    def launch(grid: Grid, args: Sequence[Any]) -> None:
        args = [
            _Address(a, dtype) if dtype is not None and isinstance(a, int) else a
            for a, dtype in zip(args, dtypes, strict=True)
        ]
        with torch.cuda.device(index):
            fn[grid](*args, **constants, **options)

    return launch


# Alignment of rows of 16-bit numbers to 16 bytes, by copies where needed.
#
# Aligned rows are prefetched to shared memory in 16-byte copies. Others would take a load per
# number; worse, K and V then share one buffer, and ptxas 12.8 may form the wgmma descriptor of one
# of them from a register that it never wrote (fp16, D = 37, Dv = 16 on sm_90: wrong outputs or an
# illegal address); `tests/compile_only` looks for registers that are read before they are written.

UNITS = ALIGNMENT // 2  # numbers of 2 bytes


def needs_copies(layout: Layout, dtype: torch.dtype, D: int, Dv: int) -> bool:
    """Whether the kernels need copies of q, k and v."""
    return dtype.itemsize == 2 and (not layout.aligned or (D | Dv) % UNITS != 0)


def aligned(call: Call) -> Call:
    """The call with rows padded with zeros to multiples of 16 bytes, by copies where needed."""
    (q, k, v), saved = map(aligned_rows, call[:3]), call.saved
    if saved is not None:
        saved = saved._replace(grad_out=aligned_rows(saved.grad_out), out=aligned_rows(saved.out))
    return call.changed(query=q, key=k, value=v, saved=saved, scale=call.scale)


def aligned_rows(x: Tensor) -> Tensor:
    """x with rows padded with zeros to a multiple of 16 bytes, and aligned to one."""
    extra = -x.shape[-1] % UNITS
    if extra:
        return F.pad(x, (0, extra))
    if x.data_ptr() % ALIGNMENT == 0 and all(s % UNITS == 0 for s in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def narrowed(x: Tensor, width: int) -> Tensor:
    """The first `width` columns of x, dense and in its order of dimensions."""
    return x if x.shape[-1] == width else x[..., :width].clone()


def restored(x: Tensor, like: Tensor) -> Tensor:
    """The first columns of x, with the shape and strides of torch.empty_like(like)."""
    return torch.empty_like(like).copy_(x[..., : like.shape[-1]])
