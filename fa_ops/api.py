"""The typed doors: read the arguments, then call the operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import dense, merge, varlen
from fa_ops.types import Spec, keywords


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, kv_lens: Tensor | None = None,
    key_ranges: Tensor | None = None, return_lse: bool = False, deterministic: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Fused attention."""
    spec = _spec(query, attn_mask, dropout_p, is_causal, scale, window, softcap, alibi_slopes, sinks, kv_lens, key_ranges, deterministic, backend)  # fmt: skip
    operator = dense.WITH_LSE if return_lse else dense.ATTENTION
    return operator(query, key, value, attn_mask, dropout_p, is_causal, **keywords(spec))


def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    window: tuple[int | None, int | None] | None = None, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, kv_lens: Tensor | None = None, return_lse: bool = False, deterministic: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Fused attention over packed sequences."""
    spec = _spec(query, None, dropout_p, is_causal, scale, window, softcap, alibi_slopes, sinks, kv_lens, None, deterministic, backend)  # fmt: skip
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = varlen.VARLEN(query, key, value, *packing, dropout_p, is_causal, **keywords(spec))
    return (out, lse) if return_lse else out


def merge_states(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets."""
    outs = outs if isinstance(outs, Tensor) else torch.stack(list(outs))
    lses = lses if isinstance(lses, Tensor) else torch.stack(list(lses))
    return merge.MERGE(outs, lses)


def _spec(query, attn_mask, dropout_p, is_causal, scale, window, softcap, alibi_slopes, sinks, kv_lens, key_ranges, deterministic, backend):  # fmt: skip
    left, right = (-1, -1) if window is None else (-1 if side is None else side for side in window)
    seed = torch.randint(2**63 - 1, (1,), device=query.device) if dropout_p > 0 else None
    backend = dispatch.default if backend is None else backend
    return Spec(
        attn_mask, dropout_p, is_causal, scale, left, right, softcap, alibi_slopes, sinks, kv_lens, key_ranges, seed,
        deterministic, backend,
    )  # fmt: skip
