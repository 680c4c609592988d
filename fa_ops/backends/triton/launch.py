"""Arguments of kernels, and launches without Triton's per-call lookup.

There is one compilation per key, then one C call.

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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from fa_ops.backends import dropout
from fa_ops.backends.mask_blocks import EMPTY, MIXED, lists_of_states
from fa_ops.call.call import Call
from fa_ops.call.options import ALIGNMENT, MASK_BLOCK, MAX_LENGTH, mask_tiles
from fa_ops.programs.tiles import states_of_runs

# Arguments of the forward and backward kernels, and their compilation class, of a call.

LOG2E = 1.4426950408889634
_MAX_WINDOW = 2 * MAX_LENGTH  # longer than every sequence, and small enough to add to a position
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38  # normal numbers of float32
_NEGLIGIBLE = 1e-15  # scores no larger than this do not change a float32 result

# The kernels' parameters whose values `arguments` returns, in this order. An absent option is None
# and its strides are 0. scale and cap are those of `primitives.scores`; slopes and sinks are the
# caller's; threshold and keep_scale belong to dropout.
NAMES = (
    "scale", "cap", "mask", "mask_stride_b", "mask_stride_h", "mask_stride_q", "mask_stride_k",
    "blocks", "blocks_stride_b", "blocks_stride_h", "blocks_rows", "blocks_columns", "slopes",
    "slopes_stride_b", "sinks", "kv_lens", "ranges", "ranges_stride_b", "ranges_stride_h",
    "ranges_stride_q", "seed", "threshold", "keep_scale", "window_left", "window_right",
    "term_values", "term_indices",
)  # fmt: skip


class Class(NamedTuple):
    """The properties of a call that kernels are compiled for; part of every kernel's key."""

    fold: bool = True  # scores are products times a positive scale
    extreme: bool = False  # a scale or softcap that `primitives.scores` has to handle exactly
    left: bool = False
    right: bool = False  # a window to the right, or causal
    softcap: bool = False
    mask: tuple[torch.dtype, bool, bool] | None = None  # dtype, 16-byte rows, contiguous in k
    blocks: bool = False
    slopes: bool = False
    sinks: torch.dtype | None = None
    kv_lens: bool = False
    ranges: bool = False
    dropout: torch.dtype | None = None  # of the seed, or of a word for each row
    program: str | None = None

    def divisors(self) -> dict[str, int]:
        """Divisors of the mask's address and strides, for `bind`."""
        if self.mask is None or not self.mask[1]:
            return {}
        units = ALIGNMENT // self.mask[0].itemsize
        return {"mask": ALIGNMENT, **{f"mask_stride_{d}": units for d in "bhq"}}

    def fixed(self) -> tuple[str, ...]:
        """Arguments that are the same in every call of the class, for `bind`."""
        return ("mask_stride_k",) if self.mask is not None and self.mask[2] else ()


_NO_STRIDES = (0, 0, 0, 0)
# calls without options: the values after the scale, and the classes
_FULL = (
    None, None, *_NO_STRIDES, None, *_NO_STRIDES, None, 0, None, None, None, 0, 0, 0, None, None,
    None, None, None, None, None,
)  # fmt: skip
_CAUSAL = (*_FULL[:-3], 0, None, None)
_CLASSES = (Class(), Class(right=True))


def arguments(call: Call, B: int, Hq: int, Sq: int, Sk: int) -> tuple[tuple, Class]:
    """(values of NAMES, class) of a call. Sq and Sk matter only with a mask or a range."""
    mask, slopes, sinks, kv_lens, ranges, seed, mask_blocks, *_ = call.operands
    causal, p, _, left, right, softcap, *_ = call.options
    scale = call.scale
    left = None if left < 0 else min(left, _MAX_WINDOW)
    right = 0 if causal else None if right < 0 else min(right, _MAX_WINDOW)
    if (
        mask is slopes is sinks is kv_lens is ranges is left is None
        and p == softcap == 0.0
        and not call.is_programmed
        and 1e-30 < scale < 1e30
        and (right is None or causal)
    ):
        return (scale * LOG2E, *(_CAUSAL if causal else _FULL)), _CLASSES[causal]

    capped = 0.0 < softcap <= 1e30  # a larger one changes no float32 score
    if capped:
        # Smaller softcaps would make `factor` infinite or `cap` 0; their product is a derivative.
        softcap = max(softcap, _SMALLEST, min(abs(scale) / _LARGEST, _NEGLIGIBLE))
    factor = scale / softcap if capped else scale * LOG2E
    values = (_single(factor), _single(softcap * LOG2E) if capped else None)
    values += _mask(mask, B, Hq, Sq, Sk)
    runs = call.operands.tile_runs
    if runs is None:
        values += _blocks(mask_blocks, mask, B, Hq)
    else:
        values += _blocks_of_runs(runs, B, Hq, Sq, Sk)
    if slopes is not None:
        slopes = slopes.contiguous()
    values += (slopes, 0 if slopes is None or slopes.dim() == 1 else Hq)
    values += (_contiguous(sinks), _contiguous(kv_lens))
    values += _ranges(ranges, B, Hq, Sq)
    if p > 0.0:
        bits = dropout.threshold(p)
        signed = bits - (1 << 32) if bits >= 1 << 31 else bits
        values += (seed.contiguous(), signed, 1.0 / max(1.0 - p, 2.0**-32))
    else:
        values += (None, None, None)
    is_added = mask is not None and mask.dtype != torch.bool
    text = call.options.program
    return (*values, left, right, *_terms(call)), Class(
        fold=not capped and slopes is None and not is_added and scale > 1e-30 and text is None,
        extreme=abs(scale) > 1e30 or (capped and softcap > 64.0),
        left=left is not None,
        right=right is not None,
        softcap=capped,
        mask=None if mask is None else _mask_class(values[2], values[3:7]),
        blocks=mask_blocks is not None or runs is not None,
        slopes=slopes is not None,
        sinks=None if sinks is None else sinks.dtype,
        kv_lens=kv_lens is not None,
        ranges=ranges is not None,
        dropout=seed.dtype if p > 0.0 else None,
        program=text,
    )


def _terms(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The terms of a program, and something in place of those that it does not have."""
    if not call.is_programmed:
        return None, None
    t, nothing = call.operands, call.query.new_empty(1, dtype=torch.int32)
    values = nothing if t.term_values is None else t.term_values
    return values, nothing if t.term_indices is None else t.term_indices


def _single(x: float) -> float:
    """x clamped to the normal numbers of float32, or 0."""
    return 0.0 if abs(x) < _SMALLEST else max(-_LARGEST, min(x, _LARGEST))


def size_error(queries: int, keys: int) -> str | None:
    """Return why the kernels cannot index so many queries (or tokens) and keys, or None."""
    if queries <= MAX_LENGTH and keys <= MAX_LENGTH:
        return None
    return f"takes up to {MAX_LENGTH} queries and keys, got {queries} and {keys}"


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _mask(mask: Tensor | None, B: int, Hq: int, Sq: int, Sk: int) -> tuple:
    if mask is None:
        return (None, *_NO_STRIDES)
    mask = mask.expand(B, Hq, Sq, Sk)
    return (mask, *mask.stride())


def _blocks(blocks: Tensor | None, mask: Tensor | None, B: int, Hq: int) -> tuple:
    if blocks is None:
        return (None, *_NO_STRIDES)
    blocks = blocks.expand(B, Hq, blocks.shape[2])
    return (blocks, *blocks.stride()[:2], *mask_tiles(mask)[2:])


def _blocks_of_runs(runs: Tensor, B: int, Hq: int, Sq: int, Sk: int) -> tuple:
    """The lists of the tiles in runs, in all of which masks, and a bias, are read."""
    m, n = (-(-size // MASK_BLOCK) for size in (Sq, Sk))
    kept = states_of_runs(runs, m, n) != EMPTY
    blocks = lists_of_states(torch.where(kept, MIXED, EMPTY)).expand(B, Hq, -1)
    return (blocks, *blocks.stride()[:2], m, n)


def _mask_class(mask: Tensor, strides: tuple) -> tuple[torch.dtype, bool, bool]:
    b, h, q, k = strides
    units = ALIGNMENT // mask.dtype.itemsize
    aligned = (b | h | q) % units == 0 and mask.data_ptr() % ALIGNMENT == 0
    return mask.dtype, aligned, k == 1


def _ranges(ranges: Tensor | None, B: int, Hq: int, Sq: int) -> tuple:
    if ranges is None:
        return (None, 0, 0, 0)
    if ranges.stride(-1) != 1:
        ranges = ranges.contiguous()
    ranges = ranges.expand(B, Hq, Sq, 2)
    return (ranges, *ranges.stride()[:3])


class Layout(NamedTuple):
    """The properties of addresses and strides of q, k and v that kernels are compiled for."""

    aligned: bool  # every row starts at a multiple of 16 bytes
    wide: bool  # a row's stride is so large that a tile's offsets need 64 bits

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, strides: tuple[int, ...]) -> Layout:
        """`strides`: batch, head and sequence strides of one tensor after the other."""
        qb, qh, qs, kb, kh, ks, vb, vh, vs = strides
        elements = qb | qh | qs | kb | kh | ks | vb | vh | vs
        bits = elements * q.element_size() | q.data_ptr() | k.data_ptr() | v.data_ptr()
        return _LAYOUTS[bits % ALIGNMENT == 0][(qs | ks | vs) >= 1 << 23]

    def divisors(self, names: Sequence[str], dtype: torch.dtype) -> dict[str, int]:
        """For `bind`, of parameters x, x_stride_b, x_stride_h, x_stride_s for x in names."""
        if not self.aligned:
            return {}
        units = ALIGNMENT // dtype.itemsize
        strides = {f"{name}_stride_{d}": units for name in names for d in "bhs"}
        return strides | dict.fromkeys(names, ALIGNMENT)


_LAYOUTS = [[Layout(aligned, wide) for wide in (False, True)] for aligned in (False, True)]


def padded(head_dim: int) -> int:
    """The width of a head's tile: a power of two, at least the 16 of tensor cores."""
    return max(16, 1 << (head_dim - 1).bit_length())


def widths(dims: tuple[int, int]) -> dict[str, int]:
    """The constexpr parameters of kernels for heads of D and Dv features."""
    return dict(zip(("D", "Dv", "BLOCK_D", "BLOCK_DV"), (*dims, *map(padded, dims))))


def precision(dtype: torch.dtype) -> str:
    """Precision of fp32 products, according to torch's setting.

    `fp32_precision` follows the older `allow_tf32`, which raises once the newer one was used.
    """
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


# Launches.

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
