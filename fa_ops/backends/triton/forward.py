"""The forward kernel and its launch: attention of dense and of packed tensors."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.configs import Tile, forward_tile
from fa_ops.backends.triton.decode import Memory, decode
from fa_ops.backends.triton.launch import (
    Class,
    Launch,
    Layout,
    address,
    aligned,
    architecture,
    arguments,
    bind,
    empty,
    narrowed,
    needs_copies,
    precision,
    widths,
)
from fa_ops.backends.triton.masks import block_of_step, walk_keys
from fa_ops.backends.triton.matrix_products import (
    exact_precision,
    in_parts,
    load_parts,
    parts,
    product,
    products,
    transposed,
)
from fa_ops.backends.triton.primitives import (
    LARGEST,
    LN2,
    LOG2E,
    attended,
    attends_some,
    dropout_keep,
    dropout_rows,
    find_sequence,
    first_row,
    has_nonfinite,
    is_masked,
    key_bounds,
    load_keys,
    load_ranges,
    may_redo,
    natural,
    opaque,
    page_of,
    positions,
    replace_nonfinite,
    scores,
    softmax_step,
    store_tile,
    with_mask,
    with_sink,
)
from fa_ops.backends.triton.programs import program_functions
from fa_ops.call.call import Call, is_decoding

_launches: dict[tuple, tuple[Launch, int]] = {}


def forward(call: Call) -> tuple[Tensor, ...]:
    """Dense attention: out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq).

    And the largest scores like lse, where they are asked for.
    """
    q, k, v = call[:3]
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    if is_decoding(call) and not call.is_programmed:
        return decode(call)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    layout = Layout.of(q, k, v, strides)
    if needs_copies(layout, q.dtype, D, Dv):
        out, *others = forward(aligned(call))
        return narrowed(out, Dv), *others
    mode = products(q, B * Hq * Sq * Sk, Sq * Hq // Hkv, (D, Dv), call.options, False)
    if mode == "split":
        q, k, v = in_parts(q, k, v)
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        layout = Layout(aligned=True, wide=False)
    return _attend(q, k, v, (B, Hq, Hkv, Sq, Sk), (D, Dv), strides, layout, call, mode)


def paged_forward(call: Call) -> tuple[Tensor, Tensor]:
    """The same of a cache that consists of pages, whose rows must be aligned."""
    q, m = call.query, Memory.of(call)
    strides = (*q.stride()[:3], *m.strides)
    layout = Layout.of(q, m.key, m.value, strides)
    (B, Hq, Sq, D), Dv = q.shape, m.value.shape[3]
    return _attend(
        q, m.key, m.value, (B, Hq, m.Hkv, Sq, m.capacity), (D, Dv), strides, layout, call,
        precision(q.dtype), m.table, m.page,
    )  # fmt: skip


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...], dims: tuple[int, int],
    strides: tuple[int, ...], layout: Layout, call: Call, mode: str, table: Tensor | None = None,
    page: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    (B, Hq, Hkv, Sq, Sk), Dv, device = sizes, dims[1], q.get_device()
    row, dtype = Hq * Dv, torch.float32 if mode == "split" else q.dtype
    out = empty((B, Hq, Sq, Dv), (Sq * row, Dv, row, 1), dtype, device)
    lse = empty((B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32, device)
    highest = None
    if call.options.max_scores:
        highest = empty((B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32, device)
    values, kind = arguments(call, B, Hq, Sq, Sk)
    pages = (None, 0, 0) if table is None else (table, table.stride(0), k.shape[0])
    rest = (*strides, B, Hq, Hq // Hkv, Sq, Sk, *values, None, None, *pages)
    tensors = q, k, v, out, lse, highest
    launch, block_m = _find(tensors, rest, layout, kind, dims, mode, False, page)
    launch((-(-Sq // block_m) * Hq * B, 1, 1), (*_addresses(tensors), *rest))
    return (out, lse) if highest is None else (out, lse, highest)


def _addresses(tensors: tuple[Tensor | None, ...]) -> list:
    return [None if t is None else address(t) for t in tensors]


def varlen_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Packed attention: out (Tq, Hq, Dv) and lse (Hq, Tq)."""
    (q, k, v), cu_q, cu_k = call[:3], call.operands.cu_seqlens_q, call.operands.cu_seqlens_k
    Tq, Hq, D = q.shape
    Tk, Hkv, Dv = v.shape
    strides = _packed_strides(q, k, v)
    layout = Layout.of(q, k, v, strides)
    if needs_copies(layout, q.dtype, D, Dv):
        out, lse = varlen_forward(aligned(call))
        return narrowed(out, Dv), lse
    cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
    B = cu_q.numel() - 1
    device, dtype = q.get_device(), q.dtype
    scores, rows = Hq * Tq * Tk // max(B, 1), Tq // max(B, 1) * Hq // Hkv
    mode = products(q, scores, rows, (D, Dv), call.options, False)
    if mode == "split":
        q, k, v = in_parts(q, k, v)
        strides, layout = _packed_strides(q, k, v), Layout(aligned=True, wide=False)
    out = empty((Tq, Hq, Dv), (Hq * Dv, Dv, 1), dtype, device)
    lse = empty((Hq, Tq), (Tq, 1), torch.float32, device)
    values, kind = arguments(call, B, Hq, Tq, Tk)
    rest = (*strides, B, Hq, Hq // Hkv, Tq, Tk, *values, cu_q, cu_k, None, 0, 0)
    tensors = q, k, v, out, lse, None
    launch, block_m = _find(tensors, rest, layout, kind, (D, Dv), mode, True)
    launch(((Tq // block_m + B + 2) * Hq, 1, 1), (*_addresses(tensors), *rest))
    return out, lse


def _packed_strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    (qs, qh, _), (ks, kh, _), (vs, vh, _) = q.stride(), k.stride(), v.stride()
    return (0, qh, qs, 0, kh, ks, 0, vh, vs)


def _find(
    tensors: tuple, rest: tuple, layout: Layout, kind: Class, dims: tuple[int, int], mode: str,
    packed: bool, page: int = 0,
) -> tuple[Launch, int]:  # fmt: skip
    """The launch for these arguments (compiled on first use) and its number of rows per block."""
    q = tensors[0]
    dtype = q.dtype
    key = (dtype, dims, packed, page, layout, kind, mode, q.get_device(), tensors[-1] is None)
    found = _launches.get(key)
    if found is None:
        tile = forward_tile(architecture(q.device), dtype, max(dims), kind, mode, page)
        launch = bind(
            forward_kernel, (*tensors, *rest), constants(tile, dims, kind, mode, page),
            tile.options(), device=q.device, fixed=kind.fixed(), wide=layout.wide,
            divisors=layout.divisors("qkv", dtype) | kind.divisors(),
        )  # fmt: skip
        found = _launches[key] = launch, tile.block_m
    return found


def constants(
    tile: Tile, dims: tuple[int, int], kind: Class, mode: str, page: int = 0
) -> dict[str, Any]:
    """The kernel's constexpr parameters."""
    blocks = widths(dims)
    if mode == "loaded" and blocks["BLOCK_D"] == 64:
        # ptxas 12.8 makes wrong sums of this tile's weights and narrower values
        blocks["BLOCK_DV"] = max(blocks["BLOCK_DV"], 64)
    return {
        **blocks,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "FOLD": kind.fold,
        "EXTREME": kind.extreme,
        "PRECISION": mode,
        "PAGE": page,
        "GATHERED": page % tile.block_n != 0,
        "PROGRAM": None if kind.program is None else program_functions(kind.program).apply,
    }


# The forward kernel, after FlashAttention-2 (Dao, arXiv:2307.08691).
#
# One program per block of query rows of a head loops over the keys that they attend. Blocks with a
# row that the loop cannot compute are recomputed exactly: rows with a NaN or Inf in a masked value
# (0 * NaN), with scores so large that their product with the scale must not be rounded, and rows of
# a float mask without a score that float32 can hold.

EXACT_ROWS, EXACT_KEYS = tl.constexpr(16), tl.constexpr(16)


@triton.jit
def locate(pid, batch, Hq, Sq, Sk, cu_seqlens_q, cu_seqlens_k, BLOCK: tl.constexpr):
    """A program's work: (b, h, block of rows, first token and number of tokens, the same of keys).

    First tokens are 0 unless tensors are packed. A block beyond the last one is no work.
    """
    if cu_seqlens_q is not None:
        programs = Sq // BLOCK + batch + 2
        h = pid // programs
        b, block, q_start, rows, k_start, keys = find_sequence(
            cu_seqlens_q, cu_seqlens_k, batch, Sq, Sk, pid % programs, BLOCK
        )
    else:
        blocks = tl.cdiv(Sq, BLOCK)
        block = pid % blocks
        h = pid // blocks % Hq
        b = pid // blocks // Hq
        q_start, rows, k_start, keys = 0, Sq, 0, Sk
    return b, h, block, q_start, rows, k_start, keys


@triton.jit
def attend_block(
    q, k, v, out, lse, maxima,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h,
    v_stride_s, batch, Hq, group, b, h, m0, q_start, Sq, k_start, Sk,
    tokens, scale, cap, mask, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, blocks,
    blocks_stride_b, blocks_stride_h, blocks_rows, blocks_columns, slopes, slopes_stride_b, sinks,
    kv_lens, ranges, ranges_stride_b, ranges_stride_h, ranges_stride_q, seed, threshold, keep_scale,
    window_left, window_right, term_values, term_indices, table, table_stride, pages,
    PACKED: tl.constexpr, D: tl.constexpr,
    Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, FOLD: tl.constexpr, EXTREME: tl.constexpr, PRECISION: tl.constexpr,
    PAGE: tl.constexpr, GATHERED: tl.constexpr, PROGRAM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attention of rows m0 ... m0 + BLOCK_M - 1 of a head; `tokens` is the row length of lse.

    Largest scores are stored like lse in `maxima`, where that is given.

    EXACT: scores are natural ones, or with FOLD the products, until the maximum is subtracted, and
    a NaN or Inf in a value makes NaN of the rows that attend it and changes no other. Otherwise
    returns whether any row has to be recomputed so.

    With `blocks` the loop is over the tiles that they list, instead of all keys of the rows.

    Blocks at an edge of the mask are a branch in the same loop: after a separate loop, ptxas takes
    the accumulator for one that is in flight and serialises every product (C7515).
    """
    if PACKED:
        inside = (b >= 0) & (b < batch)
        q += q_start * q_stride_s.to(tl.int64)
        k += k_start * k_stride_s.to(tl.int64)
        v += k_start * v_stride_s.to(tl.int64)
    else:
        inside = True
        q += b * q_stride_b
        if PAGE == 0:
            k += b * k_stride_b
            v += b * v_stride_b
    q += h * q_stride_h
    k += h // group * k_stride_h
    v += h // group * v_stride_h
    limit = Sk
    if kv_lens is not None:
        limit = tl.minimum(tl.maximum(tl.load(kv_lens + b, mask=inside, other=0), 0), Sk)
    shift = limit - Sq
    slope, sink, terms = None, None, None
    if PROGRAM is not None:
        terms = (term_values, term_indices, b, h, batch, Hq, Sq, Sk)
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_stride_b + h, mask=inside, other=0.0)
    if mask is not None:
        mask += b * mask_stride_b + h * mask_stride_h
    if blocks is not None:
        blocks += b * blocks_stride_b + h * blocks_stride_h
    if ranges is not None:
        ranges += b * ranges_stride_b + h * ranges_stride_h
    if sinks is not None:
        sink = tl.where(inside, tl.load(sinks + h).to(tl.float32), float("-inf"))
    rows_m = m0 + positions(BLOCK_M, EXACT)
    i = rows_m[:, None]
    first, last, low, rows = None, None, None, None
    if ranges is not None:
        first, last = load_ranges(ranges, ranges_stride_q, i, Sq)
        low = tl.maximum(tl.min(tl.where(first < last, first, 2147483647)), 0)
    if seed is not None:
        rows = dropout_rows(seed, b * Hq + h, i, Sq)
    lo, full_lo, full_hi, hi = key_bounds(
        m0, Sq, shift, limit, window_left, window_right, first, last, BLOCK_M, BLOCK_N
    )
    unit = scale if FOLD else LOG2E  # of the differences from the maximum
    if EXACT:
        poisoned = tl.zeros([BLOCK_M], tl.int32)
        if cap is not None:
            cap *= LN2
        elif not FOLD:
            scale *= LN2
    elif slope is not None:
        slope *= LOG2E
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    q_part = Hq * q_stride_h if PACKED else batch * q_stride_b
    k_part = Hq // group * k_stride_h if PACKED else batch * k_stride_b
    v_part = Hq // group * v_stride_h if PACKED else batch * v_stride_b
    qt = load_parts(
        q + tl.cast(m0, tl.int64) * q_stride_s, q_part, q_stride_s, -m0, Sq - m0, D, BLOCK_M,
        BLOCK_D, True, D == BLOCK_D, PRECISION,
    )  # fmt: skip
    STEP: tl.constexpr = BLOCK_N if blocks is None else 1
    begin, end = lo, hi
    if blocks is not None:
        IS_BOUNDED: tl.constexpr = is_masked(window_left, window_right, kv_lens, ranges)
        tiles, listed, last_tile, begin, end = walk_keys(
            blocks, blocks_rows, blocks_columns, m0, Sk, lo, hi, IS_BOUNDED, BLOCK_N
        )
    elif PAGE == 0:
        k += tl.cast(lo, tl.int64) * k_stride_s
        v += tl.cast(lo, tl.int64) * v_stride_s
    # page numbers are loaded one block ahead, so that keys do not wait for them
    if PAGE > 0:
        table += b * table_stride
        steps = tl.arange(0, BLOCK_N) if GATHERED else 0
        page = page_of(table, lo + steps, hi, PAGE)
    k_step = tl.cast(k_stride_s * BLOCK_N, tl.int64)
    v_step = tl.cast(v_stride_s * BLOCK_N, tl.int64)
    for n0 in tl.range(begin, end, STEP, num_stages=1 if EXACT else None):
        k_at, v_at, is_mixed, keys_end = k, v, True, hi
        if blocks is not None:
            n0, is_mixed = block_of_step(tiles, listed, last_tile, n0, BLOCK_N)
            k_at += tl.cast(n0, tl.int64) * k_stride_s
            v_at += tl.cast(n0, tl.int64) * v_stride_s
        n0 = tl.multiple_of(n0, BLOCK_N)
        j = n0 + positions(BLOCK_N, EXACT)[None, :]
        above = low
        if low is not None:
            above = low - n0
        if PAGE > 0:
            exists = (page >= 0) & (page < pages)
            slot = ((n0 + steps) % PAGE).to(tl.int64)
            k_at = k + page.to(tl.int64) * k_stride_b + slot * k_stride_s
            v_at = v + page.to(tl.int64) * v_stride_b + slot * v_stride_s
            page = page_of(table, n0 + BLOCK_N + steps, hi, PAGE)
            if not GATHERED:
                keys_end = tl.where(exists, hi, n0)
        if GATHERED:
            gathered = load_keys(k_at, exists, tl.arange(0, BLOCK_D), D, 1, BLOCK_D)
            kt = (gathered, gathered, gathered)
        else:
            kt = load_parts(
                k_at, k_part, k_stride_s, above, keys_end - n0, D, BLOCK_N, BLOCK_D, True,
                D == BLOCK_D, PRECISION,
            )  # fmt: skip
        s = product(qt, transposed(kt), None, PRECISION)
        if not FOLD:
            s, _ = scores(
                s, i, j, Sq, shift, limit, scale, cap, slope, None, 0, 0, None, None, None, None,
                False, EXTREME, EXACT, 1.0 if EXACT else LOG2E, True, PROGRAM, terms,
            )  # fmt: skip
        if mask is not None:  # noqa: SIM102  (a constexpr and perhaps a runtime condition)
            if is_mixed:
                s = with_mask(
                    s, i, j, Sq, limit, mask, mask_stride_q, mask_stride_k, True, EXACT,
                    1.0 if EXACT else LOG2E,
                )  # fmt: skip
        is_edge = (n0 < full_lo) | (n0 >= full_hi)
        if PAGE > 0 and not GATHERED:
            is_edge = is_edge | (keys_end == n0)
        if is_edge:
            keep = attended(i, j, shift, limit, window_left, window_right, first, last)
            if PAGE > 0 and not GATHERED:
                keep = keep & exists
            s = tl.where(keep, s, float("-inf"))
        if GATHERED:
            s = tl.where(exists[None, :], s, float("-inf"))
        p, alpha, m, den = softmax_step(s, m, den, scale, unit, FOLD, EXACT)
        if rows is not None:
            p = tl.where(dropout_keep(rows, j, threshold), p, 0.0)
        acc = acc * alpha[:, None]
        if GATHERED:
            gathered = load_keys(v_at, exists, tl.arange(0, BLOCK_DV), Dv, 1, BLOCK_DV)
            vt = (gathered, gathered, gathered)
        else:
            vt = load_parts(
                v_at, v_part, v_stride_s, above, keys_end - n0, Dv, BLOCK_N, BLOCK_DV, True,
                Dv == BLOCK_DV, PRECISION,
            )  # fmt: skip
        if EXACT:
            finite, nonfinite = replace_nonfinite(vt[0])
            vt = (finite, finite, finite)
            found = (p != 0.0) & nonfinite[None, :]
            poisoned = tl.maximum(poisoned, tl.max(found.to(tl.int32), 1))
        acc = product(parts(p, vt[0], PRECISION), vt, acc, PRECISION)
        if blocks is None and PAGE == 0:
            k += k_step
            v += v_step
    if EXACT:
        acc = tl.where(poisoned[:, None] > 0, float("nan"), acc)
        if FOLD:
            m *= scale * LN2
    highest = m  # of the keys: below a sink, too, it is one of which weights may be infinite
    if sink is not None:
        m, den, alpha = with_sink(m, den, sink, EXACT)
    if PACKED:
        first_row_stored = h.to(tl.int64) * tokens + q_start
        out += q_start.to(tl.int64) * Hq * Dv
    else:
        first_row_stored = (b * Hq + h).to(tl.int64) * Sq
        out += b.to(tl.int64) * Sq * Hq * Dv
    out += h * Dv
    lse += first_row_stored
    tl.store(lse + rows_m, natural(m, den, sink, EXACT), mask=rows_m < Sq)
    if maxima is not None:
        of_row = highest if EXACT else highest * LN2
        tl.store(maxima + first_row_stored + rows_m, of_row, mask=rows_m < Sq)
    weight = tl.where(den == 0.0, 0.0, 1.0 / den)
    if sink is not None:
        weight *= alpha
    if keep_scale is not None:
        weight *= keep_scale
    acc *= weight[:, None]
    store_tile(out, m0, Hq * Dv, Sq, Dv, acc, Dv == BLOCK_DV)
    # beyond 2**22 a product that is not rounded is too far from a maximum that is
    redo = tl.abs(highest) > (4194304.0 if FOLD else LARGEST)
    if mask is None or mask.dtype.element_ty == tl.int1:
        redo = redo & (highest != float("-inf"))
    else:
        # a low finite fill may have become -inf, but rows that attend no position have no scores;
        # with natural ones, weights would fit those of the backward pass less well
        first, last = None, None
        if ranges is not None:
            first, last = load_ranges(ranges, ranges_stride_q, rows_m, Sq)
        redo = redo & attends_some(rows_m, shift, limit, window_left, window_right, first, last)
    redo = tl.max((redo & (rows_m < Sq)).to(tl.int32), 0) > 0
    if PROGRAM is not None or may_redo(window_left, window_right, mask, ranges, PRECISION):
        redo = redo | has_nonfinite(acc)
    return redo


@triton.jit(do_not_specialize=["Sq", "Sk", "batch", "threshold", "window_left", "window_right"])
def forward_kernel(
    q, k, v, out, lse, maxima,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32,
    scale: tl.float32, cap,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q: tl.int64,
    mask_stride_k: tl.int64,
    blocks, blocks_stride_b: tl.int64, blocks_stride_h: tl.int64, blocks_rows: tl.int32,
    blocks_columns: tl.int32,
    slopes, slopes_stride_b: tl.int32, sinks, kv_lens,
    ranges, ranges_stride_b: tl.int64, ranges_stride_h: tl.int64, ranges_stride_q: tl.int64,
    seed, threshold, keep_scale,
    window_left, window_right, term_values, term_indices, cu_seqlens_q, cu_seqlens_k,
    table, table_stride: tl.int64, pages: tl.int32,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr, EXTREME: tl.constexpr,
    PRECISION: tl.constexpr, PAGE: tl.constexpr, GATHERED: tl.constexpr, PROGRAM: tl.constexpr,
):  # fmt: skip
    """Attention of one block of rows of a head.

    q (B, Hq, Sq, D), k and v (B, Hq / group, Sk, ...) by strides; out (B, Sq, Hq, Dv), lse, and
    maxima, the largest scores, or None.

    With cu_seqlens, q is (Sq, Hq, D), k (Sk, Hkv, D), out (Sq, Hq, Dv), lse (Hq, Sq), Sq and Sk are
    numbers of tokens, and the grid is Hq * (Sq // BLOCK_M + batch + 2) instead of
    batch * Hq * cdiv(Sq, BLOCK_M). scale, cap, slopes and masks as in `primitives.scores`, except
    that slopes and sinks are the caller's. FOLD: scores are products times a positive scale.

    With PAGE, k is (pages, PAGE, Hkv, D) by strides, v likewise, and row b of `table` lists the
    pages of a sequence of up to Sk keys. Keys of a page outside [0, pages) are not attended.
    GATHERED: a block of keys may have several pages.
    """
    pid = tl.program_id(0)
    PACKED: tl.constexpr = cu_seqlens_q is not None
    b, h, block, q_start, rows, k_start, keys = locate(
        pid, batch, Hq, Sq, Sk, cu_seqlens_q, cu_seqlens_k, BLOCK_M
    )
    if PACKED:  # noqa: SIM102  (a constexpr and a runtime condition)
        if block >= tl.cdiv(rows, BLOCK_M):
            return
    m0 = first_row(block, rows, window_right, BLOCK_M)
    redo = attend_block(
        q, k, v, out, lse, maxima,
        q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
        v_stride_b, v_stride_h, v_stride_s, batch, Hq, group, b, h, m0, q_start, rows, k_start,
        keys, Sq, scale, cap, mask, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
        blocks, blocks_stride_b, blocks_stride_h, blocks_rows, blocks_columns, slopes,
        slopes_stride_b, sinks, kv_lens, ranges, ranges_stride_b, ranges_stride_h, ranges_stride_q,
        seed, threshold, keep_scale, window_left, window_right, term_values, term_indices, table,
        table_stride, pages, PACKED, D, Dv, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, FOLD, EXTREME,
        PRECISION, PAGE, GATHERED, PROGRAM, False,
    )  # fmt: skip
    if redo:
        # small tiles, and recomputed indices, take no registers from the loop above
        b, h, block, q_start, rows, k_start, keys = locate(
            opaque(pid), batch, Hq, Sq, Sk, cu_seqlens_q, cu_seqlens_k, BLOCK_M
        )
        m0 = first_row(block, rows, window_right, BLOCK_M)
        for more in tl.range(0, tl.minimum(rows - m0, BLOCK_M), EXACT_ROWS, num_stages=1):
            attend_block(
                q, k, v, out, lse, maxima,
                q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b,
                v_stride_h, v_stride_s, batch, Hq, group, b, h, m0 + more,
                q_start, rows, k_start, keys, Sq, scale, cap, mask, mask_stride_b, mask_stride_h,
                mask_stride_q, mask_stride_k, blocks, blocks_stride_b, blocks_stride_h, blocks_rows,
                blocks_columns, slopes, slopes_stride_b, sinks, kv_lens, ranges, ranges_stride_b,
                ranges_stride_h, ranges_stride_q, seed, threshold, keep_scale, window_left,
                window_right, term_values, term_indices, table, table_stride, pages, PACKED, D, Dv,
                BLOCK_D, BLOCK_DV, EXACT_ROWS, EXACT_KEYS, FOLD, EXTREME,
                exact_precision(PRECISION), PAGE, GATHERED, PROGRAM, True,
            )  # fmt: skip
