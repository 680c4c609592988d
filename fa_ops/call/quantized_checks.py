"""Checks of quantised calls, of a batch or of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import cache_checks, checks
from fa_ops.call.call import Call
from fa_ops.call.checks import FP8, need
from fa_ops.call.options import SCALE_BLOCK, Operands

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QK_DTYPES = (torch.int8, FP8)


def quantized(call: Call, real: bool = False) -> None:
    """Raise ValueError or TypeError unless a call with 8-bit products is legal.

    `real` tensors have memory, whose strides kernels rely on; those of fakes may lie.
    """
    (q, k, v), tensors, dtype = call[:3], call.operands, call.options.qk_dtype
    checks.given(query=q, key=k, value=v)
    for name, t in (("query", q), ("key", k), ("value", v)):
        checks.rank(name, t, checks.LAYOUT)
        checks.same_dtype(q, name, t)
        checks.same_device(q, name, t)
    need(q.dtype == FP8 or q.dtype in DTYPES,
         "query must be float16, bfloat16, float32 or float8_e4m3fn, got {}: cast query, key and "
         "value, as by query.float()", q.dtype, error=TypeError)  # fmt: skip
    (B, Hq, Sq, D), (Bk, Hkv, Sk, Dk), (Bv, Hv, Sv, _) = q.shape, k.shape, v.shape
    checks.batches_and_lengths(B, (Bk, Sk), (Bv, Sv))
    checks.heads(Hq, Hkv, Hv, D, Dk)
    _scales(q, k, v, tensors)
    need(dtype is None or dtype in QK_DTYPES, "qk_dtype must be int8 or float8_e4m3fn, got {}",
         dtype, error=TypeError)  # fmt: skip
    checks.options(call, B)
    sinks, ranges = tensors.sinks, tensors.key_ranges
    if sinks is not None and sinks.dtype.itemsize == 1:
        checks.has_dtype("sinks", sinks, torch.float32)
    if ranges is not None:
        checks.key_ranges(q, ranges, B, Hq, Sq)
    if real:
        checks.contiguous_rows(query=q, key=k, value=v)


def packed(call: Call) -> None:
    """Raise ValueError or TypeError unless a call of packed e4m3 tensors, or of pages, is legal."""
    (q, k, v), tensors, table = call[:3], call.operands, call.operands.page_table
    cu_seqlens_q, cu_seqlens_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    longest = call.options.max_seqlen_q, call.options.max_seqlen_k
    keys = checks.PACKED_LAYOUT if table is None else checks.PAGES_LAYOUT
    for name, t, layout in (
        ("query", q, checks.PACKED_LAYOUT),
        ("key", k, keys),
        ("value", v, keys),
    ):
        checks.rank(name, t, layout)
        need(t.dtype == FP8, "{0} must be float8_e4m3fn with q_scale, got {1}: pass {0} divided by "
             "its scale, as float8_e4m3fn, or no scales", name, t.dtype,
             error=TypeError)  # fmt: skip
        checks.same_device(q, name, t)
    need(v.shape[:-2] == k.shape[:-2], "value has shape {}, but key has {}: both are {}", v.shape,
         k.shape, keys)  # fmt: skip
    (_, Hq, D), (*_, Hkv, Dk), (*_, Hv, _) = q.shape, k.shape, v.shape
    checks.heads(Hq, Hkv, Hv, D, Dk, layout=keys)
    _borders(q, "cu_seqlens_q", cu_seqlens_q)
    B = cu_seqlens_q.shape[0] - 1
    if table is None:
        _borders(q, "cu_seqlens_k", cu_seqlens_k)
        both = "both cu_seqlens are of the same sequences"
        checks.has_shape("cu_seqlens_k", cu_seqlens_k, (B + 1,), both)
    else:
        checks.integers(q, "page_table", table)
        need(table.dim() == 2 and table.shape[0] == B,
             "page_table must have shape ({}, max_pages), got {}: it has a row of pages for each "
             "sequence", B, table.shape)  # fmt: skip
        need(k.shape[1] > 0, "page_size must be positive, got {}: key is {}", k.shape[1], keys)
    for name, most in zip(("max_seqlen_q", "max_seqlen_k"), longest):
        checks.bound(name, most)
    for name, H in (("q_scale", Hq), ("k_scale", Hkv), ("v_scale", Hkv)):
        t = getattr(tensors, name)
        checks.same_device(q, name, t)
        checks.has_dtype(name, t, torch.float32)
        need(t.shape == (B, H) or (t.dim() < 2 and t.numel() == 1),
             "{} must have one element, or shape (B, H) with {} sequences and {} heads, got {}: "
             "pass a factor for each, or one in all", name, B, H, t.shape)  # fmt: skip
    checks.options(call, B)
    checks.contiguous_rows(query=q, key=k, value=v)


def _borders(q: Tensor, name: str, ends: Tensor) -> None:
    checks.integers(q, name, ends)
    checks.borders(name, ends)


def values(
    q: Tensor, k: Tensor, v: Tensor, tensors: Operands,
    longest: tuple[int | None, int | None],
) -> None:  # fmt: skip
    """Raise ValueError unless every sequence lies among the tokens and pages, and is at most as
    long as `longest` says. Reads boundaries, lengths and pages on the host."""
    if tensors.page_table is None:
        checks.values(q, k, v, tensors, longest)
    else:
        checks.cu_seqlens("cu_seqlens_q", tensors.cu_seqlens_q, q.shape[0])
        checks.max_seqlen("max_seqlen_q", longest[0], tensors.cu_seqlens_q.diff(), "queries")
        checks.max_seqlen("max_seqlen_k", longest[1], tensors.kv_lens, "keys")
        cache_checks.values(q, k, v, tensors, "key")


def _scales(q: Tensor, k: Tensor, v: Tensor, tensors: Operands) -> None:
    """Present exactly where the tensors are 8-bit, in one of their shapes."""
    is_eight_bit, Dv = q.dtype == FP8, v.shape[3]
    for name, of in (("q_scale", q), ("k_scale", k), ("v_scale", v)):
        t = getattr(tensors, name)
        if t is None:
            need(not is_eight_bit, "query is float8_e4m3fn, which needs {}, got None: pass "
                 "torch.ones(1) for numbers without a scale", name)  # fmt: skip
            continue
        need(is_eight_bit, "{0} is for tensors in float8_e4m3fn, but query is {1}: pass {0}=None",
             name, q.dtype)  # fmt: skip
        checks.same_device(q, name, t)
        checks.has_dtype(name, t, torch.float32)
        B, H, S, _ = of.shape
        each = "pass a factor for each row and head, or one in all"
        if t.dim() < 2:
            need(t.numel() == 1, "{} must have one element, or shape (B, H, ...), got {}: {}", name,
                 t.shape, each)  # fmt: skip
        elif t.dim() == 2:
            checks.has_shape(name, t, (B, H), each)
        elif name == "v_scale":
            of = "pass a factor for each row, head and feature"
            checks.has_shape(name, t, (B, H, Dv), of)
        else:
            blocks = (S + SCALE_BLOCK - 1) // SCALE_BLOCK
            of = f"pass a factor for each token, or for each {SCALE_BLOCK} tokens"
            checks.has_shape(name, t, (B, H, S if t.shape[2] == S else blocks), of)
