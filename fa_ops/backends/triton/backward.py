"""Launches the backward kernels: of queries, then of keys and values, then of a float mask.

The gradient of a float mask has its kernel here, which sums over the dimensions in which the mask
is broadcast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.backward_kernels import (
    ROW_UNIT,
    key_value_grad_kernel,
    load_row_parts,
    query_grad_kernel,
    row_capacity,
    score_gradients,
)
from fa_ops.backends.triton.configs import Tile, backward_tiles, divides, mask_tile
from fa_ops.backends.triton.launch import (
    Class,
    Launch,
    Layout,
    aligned,
    architecture,
    arguments,
    bind,
    needs_copies,
    restored,
    widths,
)
from fa_ops.backends.triton.matrix_products import (
    exact_precision,
    in_parts,
    product,
    products,
    transposed,
)
from fa_ops.backends.triton.primitives import (
    LN2,
    LOG2E,
    has_nonfinite,
    key_bounds,
    load_ranges,
    multiplies_parts,
)
from fa_ops.backends.triton.programs import program_functions
from fa_ops.call.call import Call
from fa_ops.call.options import ALIGNMENT, Gradients, Options
from fa_ops.programs.evaluation import by_diagonal
from fa_ops.programs.expressions import COLUMN, DISTANCE, ROW
from fa_ops.programs.program import padding_of_distances, parse


@triton.jit
def tile_product(
    x, x_part, m0, x_stride, Sq, y, y_part, n0, y_stride, Sk, width: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product of rows m0 ... of x and rows n0 ... of y."""
    xt = load_row_parts(x, x_part, m0, x_stride, 0, Sq, width, BLOCK_M, BLOCK, True, PRECISION)
    yt = load_row_parts(y, y_part, n0, y_stride, 0, Sk, width, BLOCK_N, BLOCK, True, PRECISION)
    s = product(xt, transposed(yt), None, PRECISION)
    if multiplies_parts(PRECISION):  # noqa: SIM102  (a constexpr and a runtime condition)
        if has_nonfinite(s):
            s = tile_product(
                x, x_part, m0, x_stride, Sq, y, y_part, n0, y_stride, Sk, width, BLOCK_M, BLOCK_N,
                BLOCK, exact_precision(PRECISION),
            )  # fmt: skip
    return s


@triton.jit(
    do_not_specialize=["Sq", "Sk", "batch", "steps", "threshold", "window_left", "window_right"]
)
def mask_grad_kernel(
    q, k, v, grad_out, row_lse, row_delta, dmask,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    grad_out_stride_b: tl.int64, grad_out_stride_h: tl.int64, grad_out_stride_s,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32, steps: tl.int32,
    scale: tl.float32, cap,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q: tl.int64,
    mask_stride_k: tl.int64,
    blocks, blocks_stride_b: tl.int64, blocks_stride_h: tl.int64, blocks_rows: tl.int32,
    blocks_columns: tl.int32,
    slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    seed, threshold, keep_scale, window_left, window_right, term_values, term_indices,
    cu_seqlens_q, cu_seqlens_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, EXTREME: tl.constexpr,
    PRECISION: tl.constexpr, PROGRAM: tl.constexpr, SLOPE: tl.constexpr,
    ONE_B: tl.constexpr, ONE_H: tl.constexpr, ONE_Q: tl.constexpr, ONE_K: tl.constexpr,
    FACTOR: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """One tile of a float mask's gradient, summed over `steps` of the tiles that share its mask.

    dmask (splits, B or 1, Hq or 1, Sq or 1, Sk or 1): ONE_x is whether a dimension is broadcast and
    so summed here. The grid is the tiles of one split, innermost first, times the splits.

    With FACTOR, the derivative of a program by one of its terms, it is the gradient of that term.
    DIAGONAL: the tiles on a diagonal share one, as distances do; dmask has a tile for each of them.
    """
    m_tiles = tl.cdiv(Sq, BLOCK_M)
    n_tiles = tl.cdiv(Sk, BLOCK_N)
    pid = tl.program_id(0)
    n_own, m_own, h_own, b_own = 0, 0, 0, 0
    size_b, size_h, size_q, size_k = 1, 1, 1, 1
    loop_b, loop_h, loop_q, loop_k = 1, 1, 1, 1
    if DIAGONAL:
        loop_q = m_tiles
        size_q, size_k = (m_tiles + n_tiles - 1) * BLOCK_M, BLOCK_N
        m_own = pid % (m_tiles + n_tiles - 1)
        pid = pid // (m_tiles + n_tiles - 1)
    elif ONE_K:
        loop_k = n_tiles
    else:
        size_k = Sk
        n_own = pid % n_tiles
        pid = pid // n_tiles
    if DIAGONAL:
        n_own = 0
    elif ONE_Q:
        loop_q = m_tiles
    else:
        size_q = Sq
        m_own = pid % m_tiles
        pid = pid // m_tiles
    if ONE_H:
        loop_h = Hq
    else:
        size_h = Hq
        h_own = pid % Hq
        pid = pid // Hq
    if ONE_B:
        loop_b = batch
    else:
        size_b = batch
        b_own = pid % batch
        pid = pid // batch
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    end = tl.minimum((pid + 1) * steps, loop_b * loop_h * loop_q * loop_k)
    for step in range(pid * steps, end):
        n0 = (n_own + step % loop_k) * BLOCK_N
        m0 = (m_own + step // loop_k % loop_q) * BLOCK_M
        if DIAGONAL:
            m0 = step // loop_k % loop_q * BLOCK_M
            n0 = m0 + (m_own - m_tiles + 1) * BLOCK_N
        h = h_own + step // (loop_k * loop_q) % loop_h
        b = b_own + step // (loop_k * loop_q * loop_h)
        i = m0 + tl.arange(0, BLOCK_M)[:, None]
        j = n0 + tl.arange(0, BLOCK_N)[None, :]
        limit = Sk
        if kv_lens is not None:
            limit = tl.minimum(tl.maximum(tl.load(kv_lens + b), 0), Sk)
        shift = limit - Sq
        slope, mask_head, ranges_head, first, last, terms = None, None, None, None, None, None
        if PROGRAM is not None:
            terms = (term_values, term_indices, b, h, batch, Hq, Sq, Sk)
        if mask is not None:
            mask_head = mask + b * mask_stride_b + h * mask_stride_h
        if slopes is not None:
            slope = tl.load(slopes + b * slopes_stride_b + h) * LOG2E
        if ranges is not None:
            ranges_head = ranges + b * ranges_stride_b + h * ranges_stride_h
            first, last = load_ranges(ranges_head, ranges_stride_q, i, Sq)
        lo, full_lo, full_hi, hi = key_bounds(
            m0, Sq, shift, limit, window_left, window_right, first, last, BLOCK_M, BLOCK_N
        )
        if (n0 >= lo) & (n0 < hi):
            hk = h // group
            at = (b * Hq + h) * row_capacity(Sq, batch, False) + i
            q_at, k_at = q + b * q_stride_b + h * q_stride_h, k + b * k_stride_b + hk * k_stride_h
            v_at = v + b * v_stride_b + hk * v_stride_h
            do_at = grad_out + b * grad_out_stride_b + h * grad_out_stride_h
            qk = tile_product(
                q_at, batch * q_stride_b, m0, q_stride_s, Sq, k_at, batch * k_stride_b, n0,
                k_stride_s, limit, D, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
            dp = tile_product(
                do_at, batch * grad_out_stride_b, m0, grad_out_stride_s, Sq, v_at,
                batch * v_stride_b, n0, v_stride_s, limit, Dv, BLOCK_M, BLOCK_N, BLOCK_DV,
                PRECISION,
            )  # fmt: skip
            w, ds, dx = score_gradients(
                qk, dp, tl.load(row_lse + at, mask=i < Sq, other=float("inf")),
                tl.load(row_delta + at, mask=i < Sq, other=0.0), i, j, Sq, shift, limit, scale, cap,
                slope, mask_head, mask_stride_q, mask_stride_k, ranges_head, ranges_stride_q, seed,
                b * Hq + h, threshold, keep_scale, window_left, window_right, True, EXTREME, True,
                True, PROGRAM, SLOPE, terms,
            )  # fmt: skip
            if FACTOR is not None:
                ds *= FACTOR(qk * (scale * LN2), i, j, terms)
                ds = tl.where(w == 0.0, 0.0, ds)
            acc += ds
    base = ((pid * size_b + b_own).to(tl.int64) * size_h + h_own) * size_q * size_k
    m = tl.arange(0, BLOCK_M)[:, None] + m_own * BLOCK_M
    n = tl.arange(0, BLOCK_N)[None, :] + n_own * BLOCK_N
    if DIAGONAL:
        n = tl.arange(0, BLOCK_N)[None, :]
    if ONE_Q:
        acc = tl.sum(acc, 0, keep_dims=True)
        m = tl.zeros([1, 1], tl.int32)
    if ONE_K:
        acc = tl.sum(acc, 1, keep_dims=True)
        n = tl.zeros([1, 1], tl.int32)
    tl.store(
        dmask + base + m.to(tl.int64) * size_k + n,
        acc.to(dmask.dtype.element_ty),
        mask=(m < size_q) & (n < size_k),
    )


_SPLIT_PROGRAMS = 512  # of the mask's gradient: a few for each multiprocessor


class BackwardProblem(NamedTuple):
    """The tensors, sizes and options of one call."""

    inputs: tuple[Tensor, Tensor, Tensor]
    q: Tensor  # these four as the kernels read them, see `in_parts`
    k: Tensor
    v: Tensor
    grad_out: Tensor
    out: Tensor
    sizes: tuple[int, int, int, int, int]  # batch, Hq, group, Sq, Sk; tokens for Sq, Sk if packed
    dims: tuple[int, int]  # D, Dv
    values: tuple  # of arguments.NAMES and cu_seqlens_q, cu_seqlens_k
    kind: Class
    mode: str  # of products

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, out: Tensor, sizes: tuple,
        dims: tuple[int, int], values: tuple, kind: Class, options: Options,
    ) -> BackwardProblem:  # fmt: skip
        """The problem of these tensors."""
        batch, Hq, group, Sq, Sk = sizes
        scores, rows = batch * Hq * Sq * Sk, max(group * Sq, Sk)
        if values[-1] is not None:  # packed sequences are taken for equally long ones
            scores, rows = scores // max(batch, 1) ** 2, rows // max(batch, 1)
        mode = products(q, scores, rows, dims, options, True)
        operands = q, k, v, grad_out
        if mode == "split":
            operands = in_parts(*operands)
        return cls((q, k, v), *operands, out, sizes, dims, values, kind, mode)

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.values[-1] is not None

    @property
    def even(self) -> bool:
        """Whether no block of any kernel crosses the end of the queries or the keys."""
        _, _, _, Sq, Sk = self.sizes
        return not self.packed and not self.kind.kv_lens and (Sq | Sk) % ROW_UNIT.value == 0

    def programs(self, tokens: int, block: int, heads: int) -> int:
        """Number of programs for blocks of `block` of `tokens` tokens per head."""
        batch = self.sizes[0]
        if self.packed:
            return heads * (tokens // block + batch + 2)
        return heads * batch * -(-tokens // block)

    def wave(self, heads: int) -> int:
        """Number of heads in a wave of `schedule`.

        Several if rows differ in length and heads are so short that the last would run alone (3 to
        12 % at 2k tokens on an H200), one if a head fills the GPU and needs all of the L2 cache.
        """
        if self.packed or not self.kind.right or max(self.sizes[3:]) > 2048:
            return 1
        return min(8, self.sizes[0] * heads)


def backward(call: Call) -> Gradients:
    """Gradients of dense attention; always deterministic."""
    (q, k, v), (grad_out, grad_lse, out, lse, mask_grad) = call[:3], call.saved
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    grad_out, out = rows_contiguous(grad_out), rows_contiguous(out)
    named = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out}
    if needs_copies(layout_of(named, strides_of(named), max(Sq, Sk)), q.dtype, D, Dv):
        return restored_gradients(backward(aligned(call)), q, k, v)
    values, kind = arguments(call, B, Hq, Sq, Sk)
    problem = BackwardProblem.of(
        q, k, v, grad_out, out, (B, Hq, Hq // Hkv, Sq, Sk), (D, Dv), (*values, None, None), kind,
        call.options,
    )  # fmt: skip
    *grads, row_lse, row_delta = _query_key_value(problem, grad_lse, lse)
    dmask, dsinks, sinks = None, None, call.operands.sinks
    if mask_grad:
        dmask = _mask_gradient(problem, row_lse, row_delta, call.operands.attn_mask)
    if sinks is not None:
        dsinks = sinks_gradient(row_lse, row_delta, sinks)
    return Gradients(*grads, dmask, dsinks, _term_gradients(problem, row_lse, row_delta, call))


def varlen_backward(call: Call) -> Gradients:
    """Gradients of packed attention; always deterministic."""
    (q, k, v), (grad_out, grad_lse, out, lse, _), t = call[:3], call.saved, call.operands
    Tq, Hq, D = q.shape
    Tk, Hkv, Dv = v.shape
    grad_out, out = rows_contiguous(grad_out), rows_contiguous(out)
    named = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out}
    if needs_copies(layout_of(named, strides_of(named), max(Tq, Tk)), q.dtype, D, Dv):
        return restored_gradients(varlen_backward(aligned(call)), q, k, v)
    cu_q, cu_k = t.cu_seqlens_q.contiguous(), t.cu_seqlens_k.contiguous()
    B = cu_q.numel() - 1
    values, kind = arguments(call, B, Hq, Tq, Tk)
    problem = BackwardProblem.of(
        q, k, v, grad_out, out, (B, Hq, Hq // Hkv, Tq, Tk), (D, Dv), (*values, cu_q, cu_k), kind,
        call.options,
    )  # fmt: skip
    *grads, row_lse, row_delta = _query_key_value(problem, grad_lse, lse)
    dsinks = None if t.sinks is None else sinks_gradient(row_lse, row_delta, t.sinks)
    return Gradients(*grads, None, dsinks)


def restored_gradients(grads: Gradients, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """The gradients of q, k and v from those of their `aligned` copies."""
    query, key, value = (restored(x, like) for x, like in zip(grads, (q, k, v)))
    return grads._replace(query=query, key=key, value=value)


def rows_contiguous(x: Tensor) -> Tensor:
    """x, or a contiguous copy if the elements of a row are not adjacent."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def written_like(x: Tensor) -> Tensor:
    """A tensor for the gradient of x: `torch.empty_like(x)`, or a contiguous one if rows of x
    overlap, because torch gives the former another order of dimensions then."""
    like = torch.empty_like(x)
    return like if rows_contiguous(like) is like else like.contiguous()


def laid_out_as(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient in the memory layout of `torch.empty_like(x)`."""
    if x.stride() == grad.stride() or x.is_contiguous():
        return grad
    like = torch.empty_like(x)
    return grad if like.stride() == grad.stride() else like.copy_(grad)


def _query_key_value(
    problem: BackwardProblem, grad_lse: Tensor | None, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and row_lse and row_delta of `query_grad_kernel`."""
    inputs, q, k, v, grad_out, out, (batch, Hq, group, Sq, Sk) = problem[:7]
    dq, dk, dv = map(written_like, inputs)
    row_lse, row_delta = _row_buffers(problem, q.device)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()

    named = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out, "dq": dq}
    tensors = (q, k, v, grad_out, out, lse.contiguous(), grad_lse, dq, row_lse, row_delta)
    launch, tile, args = _prepare(
        query_grad_kernel, functools.partial(_tile, 0), problem, named, tensors, problem.wave(Hq),
        (grad_lse is None,), {"DIVIDES": divides(problem.mode, max(problem.dims))},
    )  # fmt: skip
    launch((problem.programs(Sq, tile.block_m, Hq), 1, 1), args)

    Hkv = Hq // group
    named = {"q": q, "k": k, "v": v, "grad_out": grad_out, "dk": dk, "dv": dv}
    tensors = (q, k, v, grad_out, row_lse, row_delta, dk, dv)
    for index, parts in enumerate(_launched_parts(problem), 1):
        launch, tile, args = _prepare(
            key_value_grad_kernel, functools.partial(_tile, index), problem, named, tensors,
            problem.wave(Hkv), tuple(parts.values()), parts,
        )  # fmt: skip
        launch((problem.programs(Sk, tile.block_n, Hkv), 1, 1), args)
    dq, dk, dv = (laid_out_as(g, x) for g, x in zip((dq, dk, dv), inputs))
    return dq, dk, dv, row_lse, row_delta


def _launched_parts(problem: BackwardProblem) -> tuple[dict[str, bool], ...]:
    """The parts of the gradient that each launch of `key_value_grad_kernel` computes.

    Registers hold sums of both gradients up to 256 features. Two launches compute the scores twice:
    eight products where one would take seven.
    """
    widest = max(problem.dims)
    if widest <= 256:
        return ({"WITH_DK": True, "WITH_DV": True, "DIVIDES": divides(problem.mode, widest)},)
    return tuple({"WITH_DK": dk, "WITH_DV": not dk, "DIVIDES": True} for dk in (True, False))


def _tile(index: int, problem: BackwardProblem) -> Tile:
    """The tile of the launch with that index: of dq, then of keys and values."""
    arch = architecture(problem.q.device)
    return backward_tiles(arch, problem.out.dtype, max(problem.dims), problem.mode)[index]


def _mask_gradient(
    problem: BackwardProblem, row_lse: Tensor, row_delta: Tensor, mask: Tensor
) -> Tensor:
    """Gradient of a float mask in its own shape.

    If few tiles of the mask are broadcast to many of the scores, the sum is split over several
    programs per tile, whose partial sums are added here, deterministically and without atomics.
    """
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    # a dimension of size 1 that is not broadcast needs no sum, but a sum of one is right too
    once = tuple(size == 1 for size in shape)
    return _summed(problem, row_lse, row_delta, once, mask.dtype).view(mask.shape)


def _summed(
    problem: BackwardProblem, row_lse: Tensor, row_delta: Tensor, once: tuple[bool, ...],
    result: torch.dtype, number: int | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of a mask with size 1 where `once`, or of the term of that number."""
    _, q, k, v, grad_out, out, (batch, Hq, _, Sq, Sk), dims = problem[:8]
    tile, text = mask_tile(out.dtype, max(dims)), problem.kind.program
    factor, is_diagonal = None, False
    if number is not None:
        factor = program_functions(text).factors[number]
        is_diagonal = parse(text).terms[number].domain == DISTANCE
        if is_diagonal:  # whose tiles are square
            block = min(tile.block_m, tile.block_n)
            tile = dataclasses.replace(tile, block_m=block, block_n=block)
    m_tiles, n_tiles = -(-Sq // tile.block_m), -(-Sk // tile.block_n)
    sizes = [1 if one else n for one, n in zip(once, (batch, Hq, Sq, Sk))]
    if is_diagonal:
        sizes[2:] = (m_tiles + n_tiles - 1) * tile.block_m, tile.block_n
    loop = tiles = 1
    for one, count in zip(once, (batch, Hq, m_tiles, n_tiles)):
        loop, tiles = (loop * count, tiles) if one else (loop, tiles * count)
    if is_diagonal:
        loop, tiles = loop * m_tiles, tiles // (m_tiles * n_tiles) * (m_tiles + n_tiles - 1)
    steps = -(-loop // max(1, min(loop, _SPLIT_PROGRAMS // tiles)))
    splits = -(-loop // steps)
    dtype = result if splits == 1 else torch.float32
    partial = torch.empty((splits, *sizes), dtype=dtype, device=q.device)

    named = {"q": q, "k": k, "v": v, "grad_out": grad_out}
    tensors = (q, k, v, grad_out, row_lse, row_delta, partial)
    more = dict(zip(("ONE_B", "ONE_H", "ONE_Q", "ONE_K"), once))
    more |= {"FACTOR": factor, "DIAGONAL": is_diagonal}
    extra = dtype, once, number
    launch, _, args = _prepare(
        mask_grad_kernel, lambda _: tile, problem, named, tensors, steps, extra, more
    )
    launch((splits * tiles, 1, 1), args)
    return partial.sum(0).to(result)


def _term_gradients(
    problem: BackwardProblem, row_lse: Tensor, row_delta: Tensor, call: Call
) -> Tensor | None:
    """The gradients of a program's terms, packed as they are.

    Each term takes a pass that computes the scores and their gradients again, and sums in a fixed
    order. Distances are summed over the tiles of each diagonal, then over the diagonals of a tile.
    """
    values, indices = call.operands.term_values, call.operands.term_indices
    if values is None:
        return None
    program, packed = parse(call.options.program), torch.zeros_like(values)
    batch, Hq, _, Sq, Sk = problem.sizes
    views = program.views(packed, indices, batch, Hq, Sq, Sk)
    for i, (term, view) in enumerate(zip(program.terms, views)):
        if not term.grad:
            continue
        once = not term.by_batch, not term.by_head, term.domain != ROW, term.domain != COLUMN
        once = (*once[:2], False, False) if term.domain == DISTANCE else once
        found = _summed(problem, row_lse, row_delta, once, torch.float32, i)
        if term.domain == DISTANCE:
            _add_diagonals(view, found, Sq, Sk)
        else:
            view[..., : found.shape[2] * found.shape[3]] = found.flatten(2)
    return packed


def _add_diagonals(view: Tensor, tiles: Tensor, Sq: int, Sk: int) -> None:
    """Add tiles (B, H, diagonals * n, n) that belong to distances to the elements of a term."""
    n = tiles.shape[3]
    parts = by_diagonal(tiles.unflatten(2, (-1, n))).flip(2)  # (B, H, diagonals, 2 n - 1)
    lower, upper = parts[..., :n], torch.nn.functional.pad(parts[..., n:], (0, 1))
    sums = torch.nn.functional.pad(lower, (0, 0, 0, 1))
    sums[:, :, 1:] += upper
    sums = sums.flatten(2)[..., :-1]  # distances, from that of the first query and the last key on
    first = padding_of_distances(Sk) - -(-Sk // n) * n + 1
    start, stop = max(first, 0), min(first + sums.shape[2], view.shape[2])
    view[..., start:stop] = sums[..., start - first : stop - first]


def _row_buffers(problem: BackwardProblem, device: torch.device) -> Tensor:
    """row_lse and row_delta, (2, heads of all batches, rows of `row_capacity`).

    Padding is initialised only if torch sums over the rows; otherwise it is never read.
    """
    batch, Hq, _, Sq, _ = problem.sizes
    padding = ROW_UNIT.value
    if problem.packed:
        shape = (2, Hq, (Sq // padding + batch + 2) * padding)
    else:
        shape = (2, batch * Hq, -(-Sq // padding) * padding)
    buffers = torch.empty(shape, dtype=torch.float32, device=device)
    if problem.kind.sinks is not None:
        buffers[0] = float("inf")
        buffers[1] = 0.0
    return buffers


def sinks_gradient(row_lse: Tensor, row_delta: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of sinks: minus the sum over rows of (the sink's weight) * delta."""
    largest = torch.finfo(torch.float32).max  # the lse of a sink of +inf is +inf
    logits = (sinks.float() * LOG2E.value).clamp(max=largest).view(-1, 1)
    row_lse = row_lse.view(-1, len(sinks), row_lse.shape[-1]).clamp(max=largest)
    weight = torch.exp2(logits - row_lse)
    return -(weight * row_delta.view_as(weight)).sum((0, 2)).to(sinks.dtype)


def strides_of(named: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Batch, head and sequence strides of each tensor; 0, head and token strides if packed."""
    found: list[int] = []
    for x in named.values():
        if x.dim() == 4:
            found += x.stride()[:3]
        else:
            found += (0, x.stride(1), x.stride(0))
    return tuple(found)


_launches: dict[tuple, tuple[Launch, Tile]] = {}
_ROW_DIVISORS = {"row_lse": 16, "row_delta": 16}  # allocated here, so aligned


def _prepare(
    kernel: Any, choose_tile: Callable[[BackwardProblem], Tile], problem: BackwardProblem,
    named: Mapping[str, Tensor], tensors: tuple, last_size: int, extra: tuple = (),
    more: Mapping[str, Any] | None = None,
) -> tuple[Launch, Tile, tuple]:  # fmt: skip
    """The launch of a kernel (compiled on first use), its tile, and its arguments.

    named: the tensors whose strides the kernel takes. last_size: the argument after the sizes,
    `wave` or `steps`. extra: what a compilation depends on besides the problem. more: constexpr
    parameters besides `constants`.
    """
    q, kind, dims = problem.q, problem.kind, problem.dims
    strides = strides_of(named)
    args = (*tensors, *strides, *problem.sizes, last_size, *problem.values)
    layout = layout_of(named, strides, max(problem.sizes[3:]))
    key = (
        kernel, q.dtype, dims, problem.packed, problem.even, layout, kind, problem.mode, q.device,
        extra,
    )  # fmt: skip
    found = _launches.get(key)
    if found is None:
        tile = choose_tile(problem)
        constexpr = constants(tile, dims, problem.even, kind, problem.mode) | dict(more or {})
        launch = bind(
            kernel, args, constexpr, tile.options(), device=q.device,
            divisors=layout.divisors(tuple(named), q.dtype) | kind.divisors() | _ROW_DIVISORS,
            fixed=kind.fixed(), wide=layout.wide,
        )  # fmt: skip
        found = _launches[key] = launch, tile
    return *found, args


def layout_of(named: Mapping[str, Tensor], strides: tuple[int, ...], rows: int) -> Layout:
    """Aligned: every row of every tensor; wide: a row's offset within its head needs 64 bits."""
    elements = addresses = 0
    for stride in strides:
        elements |= stride
    for x in named.values():
        addresses |= x.data_ptr()
    bits = elements * next(iter(named.values())).element_size() | addresses
    return Layout(bits % ALIGNMENT == 0, (rows + ROW_UNIT.value) * max(strides[2::3]) >= 1 << 31)


def constants(
    tile: Tile, dims: tuple[int, int], even: bool, kind: Class, mode: str
) -> dict[str, Any]:
    """The constexpr parameters of every backward kernel."""
    functions = None if kind.program is None else program_functions(kind.program)
    return {
        **widths(dims),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "EVEN": even,
        "EXTREME": kind.extreme,
        "PRECISION": mode,
        "PROGRAM": None if functions is None else functions.apply,
        "SLOPE": None if functions is None else functions.slope,
    }
