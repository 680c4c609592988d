"""Routes calls of attention_varlen with pages or with scales of e4m3 tensors."""

from __future__ import annotations

from torch import Tensor

from fa_ops.call import PackedQuantizedTensors
from fa_ops.varlen import pages, quantized


def attention(
    query: Tensor, key: Tensor, value: Tensor, tensors: PackedQuantizedTensors,
    alibi_slopes: Tensor | None, longest: tuple[int | None, int | None], dropout_p: float,
    deterministic: bool, return_lse: bool, **options,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """out (Tq, Hq, Dv), or out and lse (Hq, Tq); `longest` are upper bounds on sequences."""
    t = tensors
    if t.q_scale is t.k_scale is t.v_scale is None:
        out, lse = pages.attention(*pages.arguments(
            query, key, value, t.cu_seqlens_q, t.cu_seqlens_k, t.kv_lens, t.page_table, *longest,
            dropout_p, deterministic, alibi_slopes=alibi_slopes, sinks=t.sinks, **options,
        ))  # fmt: skip
    else:
        out, lse = quantized.scaled_attention(
            query, key, value, tensors, longest, **options, dropout_p=(dropout_p, 0),
            alibi_slopes=(alibi_slopes, None), deterministic=(deterministic, False),
        )  # fmt: skip
    return (out, lse) if return_lse else out
