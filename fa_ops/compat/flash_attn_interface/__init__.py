"""The module `flash_attn_interface` (FlashAttention 3), on the operators of fa_ops:

    from fa_ops.compat.flash_attn_interface import flash_attn_func

After `fa_ops.compat.install("flash_attn_interface")`, `import flash_attn_interface` finds it, and
so does `from flash_attn_3.flash_attn_interface import ...`.

Arguments, their order and defaults, layouts and results are those of FlashAttention 3. The
functions run on every device and in every dtype that fa_ops supports, fp8 among them.
`attention_chunk` has a backward pass here, `qv` has none. What only steers FlashAttention 3's
kernels (`pack_gqa`, `sm_margin`, `scheduler_metadata`) is ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_ops.call.python_types import checked_packing, need_tensor
from fa_ops.compat.flash import (
    DENSE,
    PACKED,
    buffers,
    flag,
    heads_first,
    of_sequences,
    scalar,
    score_options,
    shape,
    unit_stride,
)
from fa_ops.compat.flash_attn.attention import keywords_of
from fa_ops.compat.flash_attn_interface import attention, kvcache
from fa_ops.compat.flash_attn_interface.attention import (
    check_unused,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from fa_ops.compat.flash_attn_interface.kvcache import flash_attn_with_kvcache
from fa_ops.ops import dense as dense_operators
from fa_ops.ops import varlen as varlen_operators

__version__ = "3.0.0"
__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    """What flash_attn_with_kvcache takes as ``scheduler_metadata``; its kernels here need none.

    Args:
        batch_size: the number of rows of queries.
        max_seqlen_q: their longest length.
        max_seqlen_k: the longest length of a row of the cache.
        num_heads_q: ``Hq``.
        num_heads_kv: ``Hkv``.
        headdim: ``D``.
        cache_seqlens: int32 ``(B,)``; its device is that of the result.
        args: ignored, as ``options`` and all arguments but ``cache_seqlens``.
        options: see ``args``.

    Returns:
        An int32 tensor without elements.
    """
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


# The private functions of FlashAttention 3, which ring attention is built of.


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 1, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, and the results of splits, which are empty) of the function that the call is of.

    Packed keys make it flash_attn_varlen_func; rows of queries, keys and values of equal length
    without anything of a cache flash_attn_func; everything else is flash_attn_with_kvcache.
    """
    need_tensor("q", q), need_tensor("v", v)
    check_unused(num_splits, pack_gqa, sm_margin)
    buffers(out_=(out_, (*q.shape[:-1], v.shape[-1])))
    of_cache = {"k_new": k_new, "v_new": v_new, "cu_seqlens_k_new": cu_seqlens_k_new,
                "page_table": page_table, "kv_batch_idx": kv_batch_idx, "leftpad_k": leftpad_k,
                "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}  # fmt: skip
    if cu_seqlens_k is None:
        _refuse("without cu_seqlens_k", seqused_q=seqused_q)
    else:
        _refuse("with cu_seqlens_k", **of_cache)
    descales, window = (q_descale, k_descale, v_descale), (window_size_left, window_size_right)
    if cu_seqlens_k is not None:
        result = attention.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            softmax_scale, causal, qv, *descales, window, attention_chunk, softcap,
            return_attn_probs=True,
        )  # fmt: skip
    elif all(given is None for given in (seqused_k, cu_seqlens_q, *of_cache.values())):
        result = attention.flash_attn_func(
            q, k, v, softmax_scale, causal, qv, *descales, window, attention_chunk, softcap,
            return_attn_probs=True,
        )  # fmt: skip
    else:
        if k_new is None:  # nothing is written to k and v
            k, v = unit_stride(need_tensor("k", k)), unit_stride(v)
        result = kvcache.flash_attn_with_kvcache(
            q, k, v, k_new, v_new, qv, rotary_cos, rotary_sin, seqused_k, kv_batch_idx, leftpad_k,
            page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, seqlens_rotary, *descales,
            softmax_scale, causal, window, attention_chunk, softcap, rotary_interleaved,
            num_splits=num_splits, return_softmax_lse=True,
        )  # fmt: skip
    out, lse, nothing = *result[:2], q.new_empty(0, dtype=torch.float32)
    out = out if out_ is None else out_.copy_(out)
    return out, lse, nothing, nothing.clone()


@torch.no_grad()
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Write the gradients into dq, dk and dv; returns the row sums of ``dout * out``."""
    shape(DENSE if cu_seqlens_q is None else PACKED, dout=dout, q=q, k=k, v=v, out=out)
    buffers(dq=(dq, q.shape), dk=(dk, k.shape), dv=(dv, v.shape))
    need_tensor("softmax_lse", softmax_lse)
    check_unused(1, None, sm_margin)
    window = window_size_left, window_size_right
    options = score_options(softmax_scale, flag("is_causal", is_causal), window, softcap)
    causal = options["is_causal"]
    options |= {"alibi_slopes": None, "deterministic": flag("deterministic", deterministic)}
    inputs, sums = (dout, q, k, v, out), (dout.float() * out.float()).sum(-1)
    if cu_seqlens_q is None:
        _refuse("without cu_seqlens_q", cu_seqlens_k=cu_seqlens_k, sequed_q=sequed_q)
        of_sequences("sequed_k", sequed_k, q.shape[0])
        grad_out, *saved = map(heads_first, inputs)
        grads = dense_operators.BACKWARD(
            grad_out, None, *saved, softmax_lse, None, 0.0, causal, kv_lens=sequed_k,
            **keywords_of(options, None),
        )  # fmt: skip
        grads, sums = [grad.transpose(1, 2) for grad in grads[:3]], sums.transpose(1, 2)
    else:
        given = cu_seqlens_q, cu_seqlens_k, scalar(max_seqlen_q), scalar(max_seqlen_k)
        packing, kv_lens = attention.packed(given, sequed_q, sequed_k, 0, (q.shape[0], k.shape[0]))
        grad_out, *saved = map(unit_stride, inputs)
        grads = varlen_operators.BACKWARD(
            grad_out, None, *saved, softmax_lse, *checked_packing(*packing), 0.0, causal,
            kv_lens=kv_lens, **keywords_of(options, None),
        )  # fmt: skip
        sums = sums.T
    for buffer, grad in zip((dq, dk, dv), grads):
        if buffer is not None:
            buffer.copy_(grad)
    return sums.contiguous()


def _refuse(why: str, **arguments: Tensor | None) -> None:
    """Raise NotImplementedError for arguments that the call would ignore."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None {why}, got {type(value).__name__}")
