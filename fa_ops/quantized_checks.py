"""What makes a quantised call legal."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import checks
from fa_ops.checks import FP8, need
from fa_ops.types import SCALE_BLOCK, Quantization, Spec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QK_DTYPES = (torch.int8, FP8)


def quantized(
    q: Tensor, k: Tensor, v: Tensor, quantization: Quantization, spec: Spec, real: bool = False
) -> None:
    """Raise ValueError or TypeError unless the arguments make a legal call.

    `real` tensors have memory, whose strides kernels rely on; those of fakes may lie.
    """
    for name, t in (("query", q), ("key", k), ("value", v)):
        need(t.dim() == 4, "{} must have shape (B, H, S, D), got {}", name, t.shape)
        need(t.dtype == q.dtype, "{} is {}, but query is {}", name, t.dtype, q.dtype,
             error=TypeError)  # fmt: skip
        need(t.device == q.device, "{} is on {}, but query is on {}", name, t.device, q.device)
    need(q.dtype == FP8 or q.dtype in DTYPES,
         "query must be float16, bfloat16, float32 or float8_e4m3fn, got {}", q.dtype,
         error=TypeError)  # fmt: skip
    (B, Hq, Sq, D), (Bk, Hkv, Sk, Dk), (Bv, Hv, Sv, Dv) = q.shape, k.shape, v.shape
    need(Bk == B, "key has batch size {}, but query's is {}", Bk, B)
    need(Bv == B, "value has batch size {}, but query's is {}", Bv, B)
    need(Sv == Sk, "value has length {}, but key's is {}", Sv, Sk)
    checks.heads(Hq, Hkv, Hv, D, Dk, Dv)
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
