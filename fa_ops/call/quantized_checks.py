"""Checks of quantised calls, of a batch or of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import cache_checks, checks
from fa_ops.call.checks import FP8, need
from fa_ops.call.options import SCALE_BLOCK, Operands, Packing, Quantization, Spec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QK_DTYPES = (torch.int8, FP8)


def quantized(
    q: Tensor, k: Tensor, v: Tensor, quantization: Quantization, spec: Spec, real: bool = False
) -> None:
    """Raise ValueError or TypeError unless the arguments make a legal call.

    `real` tensors have memory, whose strides kernels rely on; those of fakes may lie.
    """
    checks.given(query=q, key=k, value=v)
    for name, t in (("query", q), ("key", k), ("value", v)):
        need(t.dim() == 4, "{} must have shape (B, H, S, D), got {}", name, t.shape)
        need(t.dtype == q.dtype, "{} is {}, but query is {}", name, t.dtype, q.dtype,
             error=TypeError)  # fmt: skip
        need(t.device == q.device, "{} is on {}, but query is on {}", name, t.device, q.device)
    need(q.dtype == FP8 or q.dtype in DTYPES,
         "query must be float16, bfloat16, float32 or float8_e4m3fn, got {}", q.dtype,
         error=TypeError)  # fmt: skip
    (B, Hq, Sq, D), (Bk, Hkv, Sk, Dk), (Bv, Hv, Sv, _) = q.shape, k.shape, v.shape
    need(Bk == B, "key has batch size {}, but query's is {}", Bk, B)
    need(Bv == B, "value has batch size {}, but query's is {}", Bv, B)
    need(Sv == Sk, "value has length {}, but key's is {}", Sv, Sk)
    checks.heads(Hq, Hkv, Hv, D, Dk)
    _scales(q, k, v, quantization)
    dtype = quantization.qk_dtype
    need(dtype is None or dtype in QK_DTYPES, "qk_dtype must be int8 or float8_e4m3fn, got {}",
         dtype, error=TypeError)  # fmt: skip
    checks.options(q, spec, B, Hq)
    need(spec.sinks is None or spec.sinks.dtype.itemsize > 1, "sinks must be float32, got {}", FP8,
         error=TypeError)  # fmt: skip
    if spec.key_ranges is not None:
        checks.key_ranges(q, spec.key_ranges, B, Hq, Sq)
    if real:
        checks.contiguous_rows(query=q, key=k, value=v)


def packed(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, table: Tensor | None,
    quantization: Quantization, spec: Spec,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError unless the arguments make a legal call of packed e4m3 tensors.

    With a page `table`, key and value are pages.
    """
    cu_seqlens_q, cu_seqlens_k, *longest = packing
    keys = "(T, H, D)" if table is None else "(pages, page_size, H, D)"
    for name, t, layout in (("query", q, "(T, H, D)"), ("key", k, keys), ("value", v, keys)):
        need(
            t.dim() == layout.count(",") + 1, "{} must have shape {}, got {}", name, layout, t.shape
        )
        need(t.dtype == FP8, "{} must be float8_e4m3fn with q_scale, got {}", name, t.dtype,
             error=TypeError)  # fmt: skip
        need(t.device == q.device, "{} is on {}, but query is on {}", name, t.device, q.device)
    need(v.shape[:-2] == k.shape[:-2], "value has shape {}, but key has {}", v.shape, k.shape)
    (_, Hq, D), (*_, Hkv, Dk), (*_, Hv, _) = q.shape, k.shape, v.shape
    checks.heads(Hq, Hkv, Hv, D, Dk)
    _borders(q, "cu_seqlens_q", cu_seqlens_q)
    B = cu_seqlens_q.shape[0] - 1
    if table is None:
        _borders(q, "cu_seqlens_k", cu_seqlens_k)
        checks.has_shape("cu_seqlens_k", cu_seqlens_k, (B + 1,))
    else:
        checks.integers(q, "page_table", table)
        need(table.dim() == 2 and table.shape[0] == B,
             "page_table must have shape ({}, max_pages), got {}", B, table.shape)  # fmt: skip
        need(k.shape[1] > 0, "page_size must be positive, got {}", k.shape[1])
    for name, most in zip(("max_seqlen_q", "max_seqlen_k"), longest):
        need(most is None or most >= 0, "{} must not be negative, got {}", name, most)
    for name, t, H in zip(quantization._fields, quantization[:3], (Hq, Hkv, Hkv)):
        checks.same_device(q, name, t)
        need(t.dtype == torch.float32, "{} must be float32, got {}", name, t.dtype, error=TypeError)
        need(t.shape == (B, H) or (t.dim() < 2 and t.numel() == 1),
             "{} must have one element, or shape (B, H) with {} sequences and {} heads, got {}",
             name, B, H, t.shape)  # fmt: skip
    checks.options(q, spec, B, Hq)
    checks.contiguous_rows(query=q, key=k, value=v)


def _borders(q: Tensor, name: str, ends: Tensor) -> None:
    checks.integers(q, name, ends)
    need(ends.dim() == 1 and ends.shape[0] >= 1, "{} must have shape (B + 1,), got {}", name,
         ends.shape)  # fmt: skip


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


def _scales(q: Tensor, k: Tensor, v: Tensor, quantization: Quantization) -> None:
    """Present exactly where the tensors are 8-bit, in one of their shapes."""
    is_eight_bit, Dv = q.dtype == FP8, v.shape[3]
    for name, t, of in zip(quantization._fields, quantization[:3], (q, k, v)):
        if t is None:
            need(not is_eight_bit, "query is float8_e4m3fn, which needs {}", name)
            continue
        need(is_eight_bit, "{} is for tensors in float8_e4m3fn, but query is {}", name, q.dtype)
        checks.same_device(q, name, t)
        need(t.dtype == torch.float32, "{} must be float32, got {}", name, t.dtype, error=TypeError)
        B, H, S, _ = of.shape
        if t.dim() < 2:
            need(t.numel() == 1, "{} must have one element, or shape (B, H, ...), got {}", name,
                 t.shape)  # fmt: skip
        elif t.dim() == 2:
            checks.has_shape(name, t, (B, H))
        elif name == "v_scale":
            checks.has_shape(name, t, (B, H, Dv))
        else:
            blocks = (S + SCALE_BLOCK - 1) // SCALE_BLOCK
            checks.has_shape(name, t, (B, H, S if t.shape[2] == S else blocks))
