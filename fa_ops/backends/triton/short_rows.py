"""Attention of short rows with a bias, such as windows of an image, whose batch is large.

A program owns a block of queries of a head, holds the bias of all keys in registers if the batch
shares it, and loops over the batch. A row of scores fits a tile, so that nothing is accumulated
over keys. In the backward pass a program has all queries and keys of a head: one pass computes the
gradients of query, key and value, and the gradient of the bias is added in registers; each program
stores one partial sum.

Rows that the loop cannot compute, see `forward_kernel`, are found in the stored results behind it,
and recomputed exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.backward import (
    laid_out_as,
    layout_of,
    restored_gradients,
    rows_contiguous,
    strides_of,
    written_like,
)
from fa_ops.backends.triton.backward_kernels import (
    ROW_UNIT,
    exact_size,
    key_value_grad_block,
    query_grad_block,
    row_capacity,
)
from fa_ops.backends.triton.configs import ShortTile, short_backward_tile, short_forward_tile
from fa_ops.backends.triton.forward import EXACT_KEYS, EXACT_ROWS, attend_block
from fa_ops.backends.triton.launch import (
    Class,
    Launch,
    Layout,
    aligned,
    arguments,
    bind,
    empty,
    multiprocessors,
    narrowed,
    needs_copies,
    padded,
)
from fa_ops.backends.triton.primitives import (
    LN2,
    LOG2E,
    has_nonfinite,
    load_rows,
    natural,
    store_tile,
)
from fa_ops.call.call import Call, Run, general
from fa_ops.call.options import ALIGNMENT, MAX_SHORT_ROWS, Gradients, Operands


@triton.jit
def load_bias(
    bias, i, Sq, Sk, stride_q, stride_k, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The bias of rows i (M, 1) in units of log2: -inf beyond Sk, 0 beyond Sq."""
    j = tl.arange(0, BLOCK_N)[None, :]
    x = tl.load(bias + i * stride_q + j * stride_k, mask=(i < Sq) & (j < Sk), other=0.0)
    return tl.where(j < Sk, x.to(tl.float32) * LOG2E, float("-inf"))


@triton.jit(do_not_specialize=["batch", "Sq", "Sk", "chunks"])
def short_forward_kernel(
    q, k, v, out, lse,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    batch: tl.int32, Hq: tl.int32, group: tl.int32, Sq: tl.int32, Sk: tl.int32, chunks: tl.int32,
    scale: tl.float32,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q, mask_stride_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Attention of one block of rows of a head, for rows chunk, chunk + chunks, ... of the batch.

    Tensors as in `forward_kernel`; a row has at most BLOCK_N keys. KEEPS: the bias stays in
    registers, as mask_stride_b is 0. The grid is cdiv(Sq, BLOCK_M) * Hq * chunks.
    """
    blocks = tl.cdiv(Sq, BLOCK_M)
    m0 = tl.program_id(0) % blocks * BLOCK_M
    h = tl.program_id(0) // blocks % Hq
    chunk = tl.program_id(0) // blocks // Hq
    q_head = q + h * q_stride_h + tl.cast(m0, tl.int64) * q_stride_s
    k_head = k + h // group * k_stride_h
    v_head = v + h // group * v_stride_h
    mask_head = mask + h * mask_stride_h
    rows = m0 + tl.arange(0, BLOCK_M)
    if KEEPS:
        bias = load_bias(mask_head, rows[:, None], Sq, Sk, mask_stride_q, mask_stride_k, BLOCK_N)
    # not 0 where a row must be recomputed
    failed = tl.zeros([BLOCK_M], tl.float32)
    for b in tl.range(chunk, batch, chunks):
        qt = load_rows(
            q_head + b * q_stride_b, q_stride_s, None, Sq - m0, D, BLOCK_M, BLOCK_D, True,
            D == BLOCK_D,
        )  # fmt: skip
        kt = load_rows(
            k_head + b * k_stride_b, k_stride_s, None, Sk, D, BLOCK_N, BLOCK_D, True, D == BLOCK_D
        )
        vt = load_rows(
            v_head + b * v_stride_b, v_stride_s, None, Sk, Dv, BLOCK_N, BLOCK_DV, True,
            Dv == BLOCK_DV,
        )  # fmt: skip
        if not KEEPS:
            bias = load_bias(
                mask_head + b * mask_stride_b, rows[:, None], Sq, Sk, mask_stride_q, mask_stride_k,
                BLOCK_N,
            )  # fmt: skip
        s = tl.dot(qt, tl.trans(kt)) * scale + bias
        m = tl.max(s, 1)
        base = tl.where(m == float("-inf"), 0.0, m)
        p = tl.exp2(s - base[:, None])
        den = tl.sum(p, 1)
        acc = tl.dot(p.to(vt.dtype), vt)
        acc *= tl.where(den == 0.0, 0.0, 1.0 / den)[:, None]
        failed += tl.where((m == float("-inf")) & (rows < Sq), 1.0, 0.0) + tl.sum(acc * 0.0, 1)
        at = tl.cast(b, tl.int64) * Hq
        store_tile(out + at * Sq * Dv + h * Dv, m0, Hq * Dv, Sq, Dv, acc, Dv == BLOCK_DV)
        tl.store(lse + (at + h) * Sq + rows, natural(m, den, None), mask=rows < Sq)
    if tl.sum(tl.where(failed == 0.0, 0, 1), 0) > 0:
        tl.debug_barrier()  # between the stores and the loads
        for b in tl.range(chunk, batch, chunks, num_stages=1):
            b = tl.cast(b, tl.int32)
            at = b.to(tl.int64) * Hq
            m = tl.load(lse + (at + h) * Sq + rows, mask=rows < Sq, other=0.0)
            acc = load_rows(
                out + at * Sq * Dv + h * Dv + tl.cast(m0, tl.int64) * Hq * Dv, Hq * Dv, None,
                Sq - m0, Dv, BLOCK_M, BLOCK_DV, True, Dv == BLOCK_DV,
            )  # fmt: skip
            redo = tl.max((m == float("-inf")).to(tl.int32), 0) > 0
            if redo | has_nonfinite(acc.to(tl.float32)):
                for more in tl.range(0, tl.minimum(Sq - m0, BLOCK_M), EXACT_ROWS, num_stages=1):
                    attend_block(
                        q, k, v, out, lse, None, q_stride_b, q_stride_h, q_stride_s, k_stride_b,
                        k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s, batch, Hq,
                        group, b, h, m0 + more, 0, Sq, 0, Sk, Sq, scale, None, mask, mask_stride_b,
                        mask_stride_h, mask_stride_q, mask_stride_k, None, 0, 0, 0, 0, None, 0,
                        None, None, None, 0, 0, 0, None, None, None, None, None, None, None, None,
                        0, 0, False, D, Dv, BLOCK_D, BLOCK_DV, EXACT_ROWS, EXACT_KEYS, False,
                        False, "ieee", 0, False, None, True,
                    )  # fmt: skip


@triton.jit
def row_statistics(
    lse, grad_lse, o, do, at, rows, Sq
):  # fmt: skip
    """lse in units of log2 and rowsum(dO * O) - dlse of rows, as `query_grad_kernel` has them."""
    m = tl.load(lse + at + rows, mask=rows < Sq, other=float("-inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + at + rows, mask=rows < Sq, other=0.0)
    dead = m == float("-inf")
    m *= LOG2E
    m = tl.where(tl.abs(m) >= 16777216.0, float("inf"), m)
    return m, tl.where(dead, 0.0, delta)


@triton.jit(do_not_specialize=["batch", "Sq", "Sk", "chunks"])
def short_backward_kernel(
    q, k, v, grad_out, out, lse, grad_lse, dq, dk, dv, row_lse, row_delta, dmask,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s,
    grad_out_stride_b: tl.int64, grad_out_stride_h: tl.int64, grad_out_stride_s,
    out_stride_b: tl.int64, out_stride_h: tl.int64, out_stride_s,
    dq_stride_b: tl.int64, dq_stride_h: tl.int64, dq_stride_s,
    dk_stride_b: tl.int64, dk_stride_h: tl.int64, dk_stride_s,
    dv_stride_b: tl.int64, dv_stride_h: tl.int64, dv_stride_s,
    batch: tl.int32, Hq: tl.int32, Sq: tl.int32, Sk: tl.int32, chunks: tl.int32,
    scale: tl.float32,
    mask, mask_stride_b: tl.int64, mask_stride_h: tl.int64, mask_stride_q, mask_stride_k,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEEPS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """All gradients of a head that has at most BLOCK_M queries and BLOCK_N keys, for rows chunk,
    chunk + chunks, ... of the batch. There are as many key heads as query heads.

    dmask: None, or with SUMS (chunks, Hq, Sq, Sk), a sum for each program, otherwise (batch, Hq,
    Sq, Sk). row_lse and row_delta, of `row_capacity` rows for each head, hold what the exact path
    reads. KEEPS: the bias stays in registers, as mask_stride_b is 0. The grid is Hq * chunks.
    """
    h = tl.program_id(0) % Hq
    chunk = tl.program_id(0) // Hq
    q_head, k_head, v_head = q + h * q_stride_h, k + h * k_stride_h, v + h * v_stride_h
    do_head, out_head = grad_out + h * grad_out_stride_h, out + h * out_stride_h
    dq_head, dk_head, dv_head = dq + h * dq_stride_h, dk + h * dk_stride_h, dv + h * dv_stride_h
    mask_head = mask + h * mask_stride_h
    rows = tl.arange(0, BLOCK_M)
    i = rows[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    inside = (i < Sq) & (j < Sk)
    if KEEPS:
        bias = load_bias(mask_head, i, Sq, Sk, mask_stride_q, mask_stride_k, BLOCK_N)
    db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # not 0 where a row, or a key, must be recomputed
    failed_rows = tl.zeros([BLOCK_M], tl.float32)
    failed_keys = tl.zeros([BLOCK_N], tl.float32)
    for b in tl.range(chunk, batch, chunks):
        qt = load_rows(
            q_head + b * q_stride_b, q_stride_s, None, Sq, D, BLOCK_M, BLOCK_D, True, D == BLOCK_D
        )
        kt = load_rows(
            k_head + b * k_stride_b, k_stride_s, None, Sk, D, BLOCK_N, BLOCK_D, True, D == BLOCK_D
        )
        vt = load_rows(
            v_head + b * v_stride_b, v_stride_s, None, Sk, Dv, BLOCK_N, BLOCK_DV, True,
            Dv == BLOCK_DV,
        )  # fmt: skip
        do = load_rows(
            do_head + b * grad_out_stride_b, grad_out_stride_s, None, Sq, Dv, BLOCK_M, BLOCK_DV,
            True, Dv == BLOCK_DV,
        )  # fmt: skip
        o = load_rows(
            out_head + b * out_stride_b, out_stride_s, None, Sq, Dv, BLOCK_M, BLOCK_DV, True,
            Dv == BLOCK_DV,
        )  # fmt: skip
        if not KEEPS:
            bias = load_bias(
                mask_head + b * mask_stride_b, i, Sq, Sk, mask_stride_q, mask_stride_k, BLOCK_N
            )
        head = tl.cast(b, tl.int64) * Hq + h
        m, delta = row_statistics(lse, grad_lse, o, do, head * Sq, rows, Sq)
        s = tl.dot(qt, tl.trans(kt)) * scale + bias
        s = tl.where(bias == float("-inf"), bias, s)  # also beside a NaN or Inf
        p = tl.exp2(s - m[:, None])
        dp = tl.dot(do, tl.trans(vt))
        ds = tl.where(p == 0.0, 0.0, p * (dp - delta[:, None]))
        if dmask is not None:
            if SUMS:
                db += ds
            else:
                at = dmask + head * Sq * Sk + i * Sk + j
                tl.store(at, ds.to(dmask.dtype.element_ty), mask=inside)
        ds = ds.to(qt.dtype)
        dv_sum = tl.dot(tl.trans(p.to(do.dtype)), do)
        dk_sum = tl.dot(tl.trans(ds), qt) * (scale * LN2)
        dq_sum = tl.dot(ds, kt) * (scale * LN2)
        failed_rows += tl.sum(dq_sum * 0.0, 1)
        failed_keys += tl.sum(dk_sum * 0.0, 1) + tl.sum(dv_sum * 0.0, 1)
        store_tile(dv_head + b * dv_stride_b, 0, dv_stride_s, Sk, Dv, dv_sum, Dv == BLOCK_DV)
        store_tile(dk_head + b * dk_stride_b, 0, dk_stride_s, Sk, D, dk_sum, D == BLOCK_D)
        store_tile(dq_head + b * dq_stride_b, 0, dq_stride_s, Sq, D, dq_sum, D == BLOCK_D)
    if dmask is not None:  # noqa: SIM102  (so that SUMS alone is compiled)
        if SUMS:
            at = dmask + (tl.cast(chunk, tl.int64) * Hq + h) * Sq * Sk + i * Sk + j
            tl.store(at, db, mask=inside)
    failed = tl.sum(tl.where(failed_rows == 0.0, 0, 1), 0)
    failed += tl.sum(tl.where(failed_keys == 0.0, 0, 1), 0)
    if failed > 0:
        tl.debug_barrier()  # between the stores and the loads
        for b in tl.range(chunk, batch, chunks, num_stages=1):
            b = tl.cast(b, tl.int32)
            dq_b = load_rows(
                dq_head + b * dq_stride_b, dq_stride_s, None, Sq, D, BLOCK_M, BLOCK_D, True,
                D == BLOCK_D,
            )  # fmt: skip
            dk_b = load_rows(
                dk_head + b * dk_stride_b, dk_stride_s, None, Sk, D, BLOCK_N, BLOCK_D, True,
                D == BLOCK_D,
            )  # fmt: skip
            dv_b = load_rows(
                dv_head + b * dv_stride_b, dv_stride_s, None, Sk, Dv, BLOCK_N, BLOCK_DV, True,
                Dv == BLOCK_DV,
            )  # fmt: skip
            redo = has_nonfinite(dq_b.to(tl.float32)) | has_nonfinite(dk_b.to(tl.float32))
            if redo | has_nonfinite(dv_b.to(tl.float32)):
                do = load_rows(
                    do_head + b * grad_out_stride_b, grad_out_stride_s, None, Sq, Dv, BLOCK_M,
                    BLOCK_DV, True, Dv == BLOCK_DV,
                )  # fmt: skip
                o = load_rows(
                    out_head + b * out_stride_b, out_stride_s, None, Sq, Dv, BLOCK_M, BLOCK_DV,
                    True, Dv == BLOCK_DV,
                )  # fmt: skip
                head = b.to(tl.int64) * Hq + h
                m, delta = row_statistics(lse, grad_lse, o, do, head * Sq, rows, Sq)
                row_at = head * row_capacity(Sq, batch, False) + rows
                tl.store(row_lse + row_at, m)
                tl.store(row_delta + row_at, delta)
                tl.debug_barrier()
                query_grad_block(
                    q, k, v, grad_out, out, lse, grad_lse, dq, row_lse, row_delta, q_stride_b,
                    q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b,
                    v_stride_h, v_stride_s, grad_out_stride_b, grad_out_stride_h,
                    grad_out_stride_s, out_stride_b, out_stride_h, out_stride_s, dq_stride_b,
                    dq_stride_h, dq_stride_s, batch, Hq, 1, b, h, 0, 0, Sq, 0, Sk, Sq, scale, None,
                    mask, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, None, 0, 0,
                    0, 0, None, 0, None, None, 0, 0, 0, None, None, None, None, None, None, None,
                    False, D, Dv, BLOCK_D, BLOCK_DV, BLOCK_M, 2 * exact_size(q.dtype.element_ty),
                    False, False, "ieee", None, None, False, True,
                )  # fmt: skip
                key_value_grad_block(
                    q, k, v, grad_out, row_lse, row_delta, dk, dv, q_stride_b, q_stride_h,
                    q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h,
                    v_stride_s, grad_out_stride_b, grad_out_stride_h, grad_out_stride_s,
                    dk_stride_b, dk_stride_h, dk_stride_s, dv_stride_b, dv_stride_h, dv_stride_s,
                    batch, Hq, 1, b, h, 0, 0, Sq, 0, Sk, Sq, scale, None, mask, mask_stride_b,
                    mask_stride_h, mask_stride_q, mask_stride_k, None, 0, 0, 0, 0, None, 0, None,
                    None, 0, 0, 0, None, None, None, None, None, None, None, False, D, Dv, BLOCK_D,
                    BLOCK_DV, 2 * exact_size(q.dtype.element_ty), BLOCK_N, False, False, "ieee",
                    None, None, True, True, False, True,
                )  # fmt: skip


_launches: dict[tuple, Launch] = {}


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Dense attention of short rows with a bias, and with no other option than a scale.

    Returns out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq).
    """
    if _must_copy(dict(zip("qkv", call[:3]))):
        out, lse = forward(aligned(call))
        return narrowed(out, call.value.shape[3]), lse
    attend, _ = _forward_of(call)
    return attend(*call[:3], call.operands.attn_mask)


def prepare(call: Call) -> Run:
    """What runs forward passes with the geometry of this one."""
    in_general = general("forward of short rows", forward).prepare(call)
    if _must_copy(dict(zip("qkv", call[:3]))):
        return in_general
    attend, has_aligned_mask = _forward_of(call)

    def run(
        q: Tensor, k: Tensor, v: Tensor, operands: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        mask, addresses = operands.attn_mask, q.data_ptr() | k.data_ptr() | v.data_ptr()
        if has_aligned_mask:
            addresses |= mask.data_ptr()
        if addresses % ALIGNMENT:
            return in_general(q, k, v, operands, with_lse)
        return attend(q, k, v, mask)

    return run


def _must_copy(named: Mapping[str, Tensor]) -> bool:
    """Whether the kernels cannot read these tensors; q and v are among them."""
    q, v = named["q"], named["v"]
    rows = max(q.shape[2], v.shape[2])
    return needs_copies(layout_of(named, strides_of(named), rows), q.dtype, q.shape[3], v.shape[3])


def _forward_of(call: Call) -> tuple[Callable, bool]:
    """(q, k, v, mask) -> (out, lse), for aligned tensors of this geometry, and whether the mask
    must be aligned too."""
    q, k, v = call[:3]
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    row, device = Hq * Dv, q.get_device()
    of_out = (B, Hq, Sq, Dv), (Sq * row, Dv, row, 1), q.dtype, device
    of_lse = (B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32, device
    bias, kind, shared = _bias(call, B, Hq, Sq, Sk)
    tile = short_forward_tile(Sq, Sk)
    blocks = Hq * -(-Sq // tile.block_m)
    chunks = tile.chunks(B, blocks, multiprocessors(device))
    tensors, named = (q, k, v, empty(*of_out), empty(*of_lse)), {"q": q, "k": k, "v": v}
    start = _launch_of(
        short_forward_kernel, tile, named, tensors, (B, Hq, Hq // Hkv, Sq, Sk, chunks), bias, kind,
        (D, Dv), blocks, {"KEEPS": shared},
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = empty(*of_out), empty(*of_lse)
        start((q, k, v, out, lse), mask)
        return out, lse

    return run, kind.mask[1]


def backward(call: Call) -> Gradients:
    """The gradients of `forward`, of one key head for each query head; always deterministic."""
    (q, k, v), (grad_out, grad_lse, out, lse, _) = call[:3], call.saved
    grad_out, out = rows_contiguous(grad_out), rows_contiguous(out)
    named = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out}
    if _must_copy(named):
        return restored_gradients(backward(aligned(call)), q, k, v)
    run, _ = _backward_of(named, call)
    return run(grad_out, grad_lse, q, k, v, out, lse, call.operands.attn_mask)


def prepare_backward(call: Call) -> Run:
    """What runs backward passes with the geometry of this one."""
    q, k, v, saved = call.query, call.key, call.value, call.saved
    in_general = general("backward of short rows", backward).prepare(call)
    named = {"q": q, "k": k, "v": v, "grad_out": saved.grad_out, "out": saved.out}
    is_given = rows_contiguous(saved.grad_out) is saved.grad_out
    if not is_given or rows_contiguous(saved.out) is not saved.out or _must_copy(named):
        return in_general
    differentiate, has_aligned_mask = _backward_of(named, call)

    def run(grad_out, grad_lse, q, k, v, out, lse, operands: Operands) -> Gradients:
        mask, addresses = operands.attn_mask, q.data_ptr() | k.data_ptr() | v.data_ptr()
        addresses |= grad_out.data_ptr() | out.data_ptr()
        if has_aligned_mask:
            addresses |= mask.data_ptr()
        if addresses % ALIGNMENT:
            return in_general(grad_out, grad_lse, q, k, v, out, lse, operands)
        return differentiate(grad_out, grad_lse, q, k, v, out, lse, mask)

    return run


def _backward_of(named: Mapping[str, Tensor], call: Call) -> tuple[Callable, bool]:
    """(grad_out, grad_lse, q, k, v, out, lse, mask) -> Gradients, as `_forward_of`."""
    (q, k, v), mask, device = call[:3], call.operands.attn_mask, call.query.get_device()
    grad_lse, mask_grad = call.saved.grad_lse, call.saved.mask_grad
    (B, Hq, Sq, D), (*_, Sk, Dv) = q.shape, v.shape
    bias, kind, shared = _bias(call, B, Hq, Sq, Sk)
    tile = short_backward_tile(Sq, Sk, max(D, Dv), shared)
    chunks = tile.chunks(B, Hq, multiprocessors(device))
    grads = [written_like(x) for x in (q, k, v)]
    of_grads = [(tuple(x.shape), x.stride(), x.dtype, device) for x in grads]
    # rows of inputs overlap: their gradients are copied to the layout of `torch.empty_like`
    copied = any(laid_out_as(grad, x) is not grad for grad, x in zip(grads, (q, k, v)))
    rows = B * Hq, ROW_UNIT.value
    of_rows = rows, (rows[1], 1), torch.float32, device
    shape, of_dmask, sums = (1,) * (4 - mask.dim()) + tuple(mask.shape), None, False
    if mask_grad:
        sums = shape != (B, Hq, Sq, Sk)
        parts = chunks if sums else B
        of_dmask = (
            (parts, Hq, Sq, Sk), (Hq * Sq * Sk, Sq * Sk, Sk, 1),
            torch.float32 if sums else mask.dtype, device,
        )  # fmt: skip
    summed = tuple(at for at, size in enumerate(shape) if size == 1)
    allocated = [of_rows, of_rows, *([] if of_dmask is None else [of_dmask])]
    lse = empty((B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32, device)
    tensors = (*named.values(), lse, grad_lse, *grads, *(empty(*of) for of in allocated))
    start = _launch_of(
        short_backward_kernel, tile, {**named, **dict(zip(("dq", "dk", "dv"), grads))},
        tensors if mask_grad else (*tensors, None), (B, Hq, Sq, Sk, chunks), bias, kind, (D, Dv),
        Hq, {"KEEPS": shared, "SUMS": sums},
    )  # fmt: skip

    def run(
        grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, mask: Tensor,
    ) -> Gradients:  # fmt: skip
        dq, dk, dv = [empty(*of) for of in of_grads]
        dmask = None if of_dmask is None else empty(*of_dmask)
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        start(
            (q, k, v, grad_out, out, lse.contiguous(), grad_lse, dq, dk, dv, empty(*of_rows),
             empty(*of_rows), dmask),
            mask,
        )  # fmt: skip
        if sums:
            dmask = dmask.sum(summed, keepdim=True).to(mask.dtype)
        if dmask is not None and mask.dim() < 4:
            dmask = dmask.view(mask.shape)
        if copied:
            dq, dk, dv = map(laid_out_as, (dq, dk, dv), (q, k, v))
        return Gradients(dq, dk, dv, dmask)

    return run, kind.mask[1]


def _bias(call: Call, B: int, Hq: int, Sq: int, Sk: int) -> tuple[tuple, Class, bool]:
    """(scale in units of log2, the strides of the bias of all scores), the class, and whether the
    batch shares the bias."""
    values, kind = arguments(call, B, Hq, Sq, Sk)
    bias = (values[0], *values[3:7])
    return bias, kind, B == 1 or bias[1] == 0


def _launch_of(
    kernel: Any, tile: ShortTile, named: Mapping[str, Tensor], tensors: tuple, sizes: tuple,
    bias: tuple, kind: Class, dims: tuple[int, int], programs: int, more: Mapping[str, bool],
) -> Callable[[tuple, Tensor], None]:  # fmt: skip
    """(tensors, mask) -> None: launches `programs` programs for each chunk of the batch.

    named: the tensors whose strides the kernel takes. sizes: from the batch on, the chunks last.
    more: other constexpr parameters. A kernel is compiled on first use.
    """
    q, strides = tensors[0], strides_of(named)
    scale, *bias_strides = bias
    aligned_rows, wide = layout_of(named, strides, ROW_UNIT.value)
    # offsets within a head
    wide = wide or MAX_SHORT_ROWS * (bias_strides[-2] + bias_strides[-1]) >= 1 << 31
    layout = Layout(aligned_rows, wide)
    optional = tuple(None if t is None else t.dtype for t in tensors)
    key = (kernel, tile, dims, layout, kind, optional, q.device, *more.values())
    launch, numbers = _launches.get(key), (*strides, *sizes, scale)
    if launch is None:
        D, Dv = dims
        constants = {
            "D": D, "Dv": Dv, "BLOCK_D": padded(D), "BLOCK_DV": padded(Dv),
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, **more,
        }  # fmt: skip
        mask = torch.empty(1, dtype=kind.mask[0], device=q.device)
        launch = _launches[key] = bind(
            kernel, (*tensors, *numbers, mask, *bias_strides), constants, tile.options(),
            device=q.device, divisors=layout.divisors(tuple(named), q.dtype) | kind.divisors(),
            fixed=kind.fixed(), wide=layout.wide,
        )  # fmt: skip
    grid = programs * sizes[-1], 1, 1
    return lambda tensors, mask: launch(grid, (*tensors, *numbers, mask, *bias_strides))
