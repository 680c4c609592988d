"""Device functions that multiply tiles.

Operands are tuples: of one tensor three times, or of three bfloat16 tensors whose sum is a float32
one. PRECISION says how: "ieee" and "tf32" as in tl.dot; "split" in such parts, by tensor cores,
exact to float32's rounding; "loaded" likewise, from float32 in memory, divided as it is loaded;
"joined" as float32 from parts in memory.

float32 tensors are divided into three bfloat16 tensors, whose products tensor cores compute. A
float32 has 24 significant bits, a bfloat16 8: x is the sum of the nearest bfloat16, of the one
nearest to the rest, and of the rest of that. Six of the nine products of parts give float32's. A
kernel divides the tensors of a call once where many programs load each tile; with few, the forward
kernel divides what it loads.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton import configs
from fa_ops.backends.triton.launch import (
    INTERPRETED,
    Launch,
    Layout,
    address,
    architecture,
    bind,
    empty,
    padded,
    precision,
    widths,
)
from fa_ops.backends.triton.primitives import INLINE, load_rows, multiplies_parts
from fa_ops.call.options import ALIGNMENT, Options


@triton.jit
def load_parts(
    at, part, stride, first, last, width, ROWS: tl.constexpr, COLS: tl.constexpr,
    EDGE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An operand of `product` from rows that `load_rows` loads; `part` elements between parts,
    whose columns are COLS."""
    if PRECISION == "split" or PRECISION == "joined":
        x = load_rows(at, stride, first, last, COLS, ROWS, COLS, EDGE, True)
        y = load_rows(at + part, stride, first, last, COLS, ROWS, COLS, EDGE, True)
        z = load_rows(at + 2 * part, stride, first, last, COLS, ROWS, COLS, EDGE, True)
        return operand(x, y, z, PRECISION)
    else:
        x = load_rows(at, stride, first, last, width, ROWS, COLS, EDGE, EXACT)
        return parts(x, x, PRECISION)


@triton.constexpr_function
def exact_precision(precision):
    """The precision of rows that are recomputed: NaN and Inf have no parts."""
    return {"split": "joined", "loaded": "ieee"}.get(precision, precision)


@triton.jit
def rounded(x):
    """float32 rounded to the nearest bfloat16, to even."""
    if INLINE:
        return x.to(tl.bfloat16)
    else:  # the interpreter multiplies no bfloat16
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def parts(x, like, PRECISION: tl.constexpr):
    """An operand of `product` from a tile that was computed, in float32 or the dtype of `like`."""
    if multiplies_parts(PRECISION):
        high = rounded(x)
        rest = x - high.to(tl.float32)
        middle = rounded(rest)
        return high, middle, rounded(rest - middle.to(tl.float32))
    else:
        x = x.to(like.dtype)
        return x, x, x


@triton.jit
def joined(x, PRECISION: tl.constexpr):
    """The tensor that an operand stands for."""
    if multiplies_parts(PRECISION):
        return x[0].to(tl.float32) + (x[1].to(tl.float32) + x[2].to(tl.float32))
    else:
        return x[0]


@triton.jit
def operand(x, y, z, PRECISION: tl.constexpr):
    """An operand of `product` from three parts in memory."""
    if PRECISION == "joined":
        x = joined((x, y, z), "split")
        return x, x, x
    else:
        return x, y, z


@triton.jit
def transposed(x):
    """An operand of `product`, transposed."""
    return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])


@triton.jit
def divided(x, never):
    """The product x, divided over all warps; `never` is a condition that does not hold.

    Where Triton sees that a product is an operand of another one, it gives each warp 16 rows of its
    own. Of a tile with fewer rows, the other warps would compute the same rows again. Behind a
    branch it does not see that, and divides the columns too.
    """
    if never:
        x = -x
    return x


@triton.jit
def product(x, y, acc, PRECISION: tl.constexpr, never=False):
    """The matrix product of two operands, plus acc unless it is None; `never` as in `divided`.

    Tensor cores truncate sums. So the small terms are added first, of which three, below 2**-26 of
    the product, are left out, and acc is added at last, in float32.
    """
    if multiplies_parts(PRECISION):
        s = divided(tl.dot(x[2], y[0]), never)
        s = divided(tl.dot(x[1], y[1], s), never)
        s = divided(tl.dot(x[1], y[0], s), never)
        s = divided(tl.dot(x[0], y[2], s), never)
        s = divided(tl.dot(x[0], y[1], s), never)
        s = tl.dot(x[0], y[0], s)
        return s if acc is None else acc + s
    elif PRECISION == "joined":
        return tl.dot(x[0], y[0], acc, input_precision="ieee")
    else:
        return tl.dot(x[0], y[0], acc, input_precision=PRECISION)


_launches: dict[tuple, Launch] = {}
# the interpreter multiplies no bfloat16
_PART = torch.float32 if INTERPRETED else torch.bfloat16
_WIDEST = 128  # heads whose parts fit shared memory
_SMALL_SOFTCAP = 0.5  # errors of scores are divided by it


def products(
    q: Tensor, scores: int, rows: int, dims: tuple[int, int], options: Options, backward: bool
) -> str:
    """How the kernels multiply: the PRECISION of `product`.

    `rows` as in `configs.float32_products`. Tensor cores are six
    times as fast with bfloat16 as the ordinary units with float32, and more, on GPUs of data
    centres only. There, float32 is divided unless torch allows tf32, heads are wide, the call is
    too small for it, or a small softcap magnifies the errors of scores.
    """
    mode = precision(q.dtype)
    if q.dtype != torch.float32 or mode == "tf32" or max(dims) > _WIDEST:
        return mode
    arch = architecture(q.device)
    if 0.0 < options.softcap < _SMALL_SOFTCAP or not has_fast_parts(arch):
        return mode
    return configs.float32_products(arch, scores, rows, max(dims), options.is_causal, backward)


def has_fast_parts(arch: int) -> bool:
    """Whether products of bfloat16 take less than a sixth of float32's time."""
    return arch in (80, 90, 100, 103)


def in_parts(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None = None) -> tuple:
    """The parts of each tensor (B, H, S, D), packed (T, H, D), from one launch.

    Parts are (3 B, H, S, padded(D)), packed (T, 3 H, padded(D)), in which rows of a head are
    adjacent: the first part of all batches, packed of all heads, then the second and the third.
    """
    given, device = (q, k, v) if grad_out is None else (q, k, v, grad_out), q.get_device()
    plan = _plan(tuple(x.shape for x in given), tuple(x.stride() for x in given))
    results = tuple(empty(*layout, _PART, device) for layout in plan.layouts)
    absent = (None,) * (4 - len(given))
    addresses = (*map(address, given), *absent, *map(address, results), *absent)
    aligned = plan.aligned and not any(x.data_ptr() % ALIGNMENT for x in given)
    key = (plan.dims, len(given), aligned, device)
    launch = _launches.get(key)
    if launch is None:
        args = (*given, *absent, *results, *absent, *plan.numbers)
        launch = _launches[key] = _bind(args, *plan.dims, aligned, q.device)
    launch((plan.programs, 1, 1), (*addresses, *plan.numbers))
    return results


class _Plan(NamedTuple):
    """What follows from the shapes and strides of a call's tensors."""

    dims: tuple[int, int]  # D, Dv
    aligned: bool  # strides are multiples of 16 bytes
    layouts: tuple[tuple, ...]  # size and stride of the parts of each tensor
    numbers: tuple[int, ...]  # the kernel's: strides, B, Hq, Hkv, Sq, Sk
    programs: int


@functools.lru_cache(256)
def _plan(shapes: tuple, strides: tuple) -> _Plan:
    packed = len(shapes[0]) == 3
    if packed:
        shapes = tuple((1, H, T, D) for T, H, D in shapes)
        strides = tuple((0, h, s, d) for s, h, d in strides)
    (B, Hq, Sq, D), _, (_, Hkv, Sk, Dv) = shapes[:3]
    layouts, programs = [], 0
    for _, H, S, width in shapes:
        width = padded(width)
        if packed:
            layouts.append(((S, 3 * H, width), (width, S * width, 1)))
        else:
            layouts.append(((3 * B, H, S, width), (H * S * width, S * width, width, 1)))
        programs += B * H * -(-S // _rows(width))
    numbers = [stride for one in strides for stride in one[:3]]
    aligned = not any(stride % 4 for stride in numbers)
    numbers += [0] * (12 - len(numbers)) + [B, Hq, Hkv, Sq, Sk]
    return _Plan((D, Dv), aligned, tuple(layouts), tuple(numbers), programs)


def _rows(width: int) -> int:
    """Rows of a program: 8 loads of 16 bytes for each thread."""
    return 4096 // width


def _bind(args: tuple, D: int, Dv: int, aligned: bool, device: torch.device) -> Launch:
    divisors = dict.fromkeys(("q_parts", "k_parts", "v_parts", "grad_out_parts"), ALIGNMENT)
    if aligned:
        divisors |= Layout(aligned=True, wide=False).divisors(
            ("q", "k", "v", "grad_out"), torch.float32
        )
    constants = widths((D, Dv))
    constants |= {"ROWS_D": _rows(padded(D)), "ROWS_DV": _rows(padded(Dv))}
    return bind(parts_kernel, args, constants, {"num_warps": 4}, device=device, divisors=divisors)


@triton.jit(do_not_specialize=["B", "Hq", "Hkv", "Sq", "Sk"])
def parts_kernel(
    q, k, v, grad_out, q_parts, k_parts, v_parts, grad_out_parts,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s: tl.int64,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s: tl.int64,
    grad_out_stride_b: tl.int64, grad_out_stride_h: tl.int64, grad_out_stride_s: tl.int64,
    B: tl.int32, Hq: tl.int32, Hkv: tl.int32, Sq: tl.int32, Sk: tl.int32, D: tl.constexpr,
    Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS_D: tl.constexpr,
    ROWS_DV: tl.constexpr,
):  # fmt: skip
    """The parts of q, k, v and grad_out, None for absent: a program for ROWS rows of one head.

    The grid is the sum over the tensors of B * H * cdiv(S, ROWS).
    """
    pid = tl.program_id(0)
    of_q, of_k = B * Hq * tl.cdiv(Sq, ROWS_D), B * Hkv * tl.cdiv(Sk, ROWS_D)
    of_v = B * Hkv * tl.cdiv(Sk, ROWS_DV)
    if pid < of_q:
        store_parts(
            q, q_parts, q_stride_b, q_stride_h, q_stride_s, pid, B, Hq, Sq, D, BLOCK_D, ROWS_D
        )
    elif pid < of_q + of_k:
        store_parts(
            k, k_parts, k_stride_b, k_stride_h, k_stride_s, pid - of_q, B, Hkv, Sk, D, BLOCK_D,
            ROWS_D,
        )  # fmt: skip
    elif pid < of_q + of_k + of_v:
        store_parts(
            v, v_parts, v_stride_b, v_stride_h, v_stride_s, pid - of_q - of_k, B, Hkv, Sk, Dv,
            BLOCK_DV, ROWS_DV,
        )  # fmt: skip
    elif grad_out is not None:
        store_parts(
            grad_out, grad_out_parts, grad_out_stride_b, grad_out_stride_h, grad_out_stride_s,
            pid - of_q - of_k - of_v, B, Hq, Sq, Dv, BLOCK_DV, ROWS_DV,
        )  # fmt: skip


@triton.jit
def store_parts(
    x, to, stride_b, stride_h, stride_s, pid, B, H, S, width: tl.constexpr, COLS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The parts of ROWS rows of x, with zeros beyond `width` columns.

    Beside NaN and Inf the other parts are 0. The largest finite numbers, which would round to Inf,
    are cut.
    """
    blocks = tl.cdiv(S, ROWS)
    rows = pid % blocks * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    head = (pid // blocks).to(tl.int64)
    b, h = head // H, head % H
    at = x + b * stride_b + h * stride_h + rows.to(tl.int64) * stride_s + cols
    keep = rows < S
    if width == COLS:
        numbers = tl.load(at, mask=keep, other=0.0)
    else:
        numbers = tl.load(at, mask=keep & (cols < width), other=0.0)
    high = rounded(numbers).to(tl.float32)
    cut = (numbers.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    high = tl.where(tl.abs(high) == float("inf"), cut, high)
    rest = tl.where(tl.abs(numbers) < float("inf"), numbers - high, 0.0)
    middle = rounded(rest)
    low = rounded(rest - middle.to(tl.float32))
    at = to + (head * S + rows) * COLS + cols
    part = H.to(tl.int64) * B * S * COLS
    tl.store(at, high.to(to.dtype.element_ty), mask=keep)
    tl.store(at + part, middle, mask=keep)
    tl.store(at + 2 * part, low, mask=keep)
