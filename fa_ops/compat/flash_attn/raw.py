"""The functions of flash-attn's extension `flash_attn_2_cuda`: no autograd, seeds and buffers.

flash_attn_interface calls it `flash_attn_gpu`. The order of arguments is that of the extension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call.python_types import need_tensor
from fa_ops.compat.flash import (
    DENSE,
    PACKED,
    PAGES,
    buffers,
    count,
    finite_or_empty,
    flag,
    heads_first,
    of_sequences,
    scalar,
    shape,
    signed_weights,
    unit_stride,
)
from fa_ops.compat.flash_attn import attention
from fa_ops.compat.flash_attn.attention import flash_attn_with_kvcache
from fa_ops.functions.attention import dropout_seed
from fa_ops.ops import dense as dense_operators
from fa_ops.ops import varlen as varlen_operators

_MULTIPLE = 128  # of the lengths of softmax_d


@torch.no_grad()
def fwd(
    q, k, v, out, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left,
    window_size_right, softcap, return_softmax, generator=None,
) -> list[Tensor]:  # fmt: skip
    """[out, lse, weights, rng_state] of a batch; the seed is in the state."""
    _refuse_generator(generator)
    shape(DENSE, q=q, k=k, v=v)
    buffers(out=(out, (*q.shape[:-1], v.shape[-1])))
    window = window_size_left, window_size_right
    options = attention.options_of(p_dropout, softmax_scale, is_causal, window, softcap,
                               alibi_slopes, False)  # fmt: skip
    return_softmax = flag("return_softmax", return_softmax)
    seed, state = _seed(q, options["dropout_p"])
    found, lse = attention.seeded(q, k, v, seed, options)
    weights = q.new_empty(0)
    if return_softmax and seed is not None:
        weights = signed_weights(q, k, seed, (q.shape[1], k.shape[1]), options)
    return [_into(out, found), lse, weights, state]


@torch.no_grad()
def varlen_fwd(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
    max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal,
    window_size_left, window_size_right, softcap, return_softmax, generator=None, num_splits=0,
) -> list[Tensor]:  # fmt: skip
    """[out, lse, weights, rng_state] of packed sequences, or of keys in pages."""
    _refuse_generator(generator)
    shape(PACKED, q=q)
    shape(PACKED if block_table is None else PAGES, k=k, v=v)
    of_sequences("seqused_k", seqused_k, need_tensor("cu_seqlens_q", cu_seqlens_q).numel() - 1)
    buffers(out=(out, (*q.shape[:-1], v.shape[-1])))
    if count("num_splits", num_splits) > 1:
        raise NotImplementedError(
            f"num_splits > 1 is not supported for packed sequences, got {num_splits}"
        )
    window = window_size_left, window_size_right
    options = attention.options_of(p_dropout, softmax_scale, is_causal, window, softcap,
                               alibi_slopes, False)  # fmt: skip
    packing = cu_seqlens_q, cu_seqlens_k, scalar(max_seqlen_q), scalar(max_seqlen_k)
    return_softmax = flag("return_softmax", return_softmax)
    seed, state = _seed(q, options["dropout_p"])
    if block_table is not None:
        if leftpad_k is not None:
            raise NotImplementedError("leftpad_k must be None with block_table")
        found, lse = attention.from_pages(q, k, v, packing, options, block_table, seqused_k)
        return [_into(out, found), lse, q.new_empty(0), state]
    if leftpad_k is not None:
        of_sequences("leftpad_k", leftpad_k, cu_seqlens_k.numel() - 1)
        packing, seqused_k = _behind(packing, leftpad_k, seqused_k)
    tensors = map(unit_stride, (q, k, v))
    found, lse = attention.seeded_packed(*tensors, packing, seqused_k, seed, options)
    weights = attention.weights(q, k, packing, seqused_k, seed if return_softmax else None, options)
    return [_into(out, found), lse, weights, state]


@torch.no_grad()
def bwd(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale, is_causal,
    window_size_left, window_size_right, softcap, deterministic, generator=None, rng_state=None,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, softmax_d] of fwd; gradients are written into the buffers that are given."""
    _refuse_generator(generator)
    shape(DENSE, dout=dout, q=q, k=k, v=v, out=out)
    buffers(dq=(dq, q.shape), dk=(dk, k.shape), dv=(dv, v.shape))
    need_tensor("softmax_lse", softmax_lse)
    window = window_size_left, window_size_right
    options = attention.options_of(p_dropout, softmax_scale, is_causal, window, softcap,
                               alibi_slopes, deterministic)  # fmt: skip
    p, causal = options["dropout_p"], options["is_causal"]
    keywords = attention.keywords_of(options, _seed_of(rng_state, p))
    grad_out, *tensors, saved = map(heads_first, (dout, q, k, v, out))
    grads = dense_operators.BACKWARD(
        grad_out, None, *tensors, saved, finite_or_empty(softmax_lse), None, p, causal, **keywords
    )
    softmax_d = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    softmax_d = torch.nn.functional.pad(softmax_d, (0, -q.shape[1] % _MULTIPLE))
    grads = (_into(x, grad.transpose(1, 2)) for x, grad in zip((dq, dk, dv), grads))
    return [*grads, softmax_d]


@torch.no_grad()
def varlen_bwd(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
    max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal,
    window_size_left, window_size_right, softcap, deterministic, generator=None, rng_state=None,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, softmax_d] of varlen_fwd without pages."""
    _refuse_generator(generator)
    shape(PACKED, dout=dout, q=q, k=k, v=v, out=out)
    buffers(dq=(dq, q.shape), dk=(dk, k.shape), dv=(dv, v.shape))
    need_tensor("softmax_lse", softmax_lse)
    window = window_size_left, window_size_right
    options = attention.options_of(p_dropout, softmax_scale, is_causal, window, softcap,
                               alibi_slopes, deterministic)  # fmt: skip
    packing = cu_seqlens_q, cu_seqlens_k, scalar(max_seqlen_q), scalar(max_seqlen_k)
    p, causal = options["dropout_p"], options["is_causal"]
    keywords = attention.keywords_of(options, _seed_of(rng_state, p))
    grads = varlen_operators.BACKWARD(
        unit_stride(dout), None, *map(unit_stride, (q, k, v, out)), finite_or_empty(softmax_lse),
        *packing, p, causal, **keywords,
    )  # fmt: skip
    softmax_d = (dout.float() * out.float()).sum(-1).T
    softmax_d = torch.nn.functional.pad(softmax_d, (0, _MULTIPLE * (len(cu_seqlens_q) - 1)))
    return [*(_into(x, grad) for x, grad in zip((dq, dk, dv), grads)), softmax_d]


@torch.no_grad()
def fwd_kvcache(
    q, k_cache, v_cache, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx, leftpad_k,
    block_table, alibi_slopes, out, softmax_scale, is_causal, window_size_left, window_size_right,
    softcap, rotary_interleaved, num_splits,
) -> list[Tensor]:  # fmt: skip
    """[out, lse] of attention over a cache."""
    buffers(out=(out, (*q.shape[:-1], v_cache.shape[-1])))
    found, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, seqlens_k, cache_batch_idx, leftpad_k,
        block_table, softmax_scale, is_causal, (window_size_left, window_size_right), softcap,
        rotary_interleaved, alibi_slopes, num_splits, True,
    )  # fmt: skip
    return [_into(out, found), lse]


def _refuse_generator(generator: object) -> None:
    if generator is not None:
        raise NotImplementedError("the `generator` argument is no longer supported, pass None")


def _seed(q: Tensor, p: float) -> tuple[Tensor | None, Tensor]:
    """The seed, None without dropout, and the state (2,) that holds it."""
    seed, state = None, torch.zeros(2, dtype=torch.int64, device=q.device)
    if p:
        seed = dropout_seed(q, p)
        state[:1] = 0 if seed is None else seed  # the operator refuses such a probability
    return seed, state


def _seed_of(state: Tensor | None, p: float) -> Tensor | None:
    if state is not None:
        need_tensor("rng_state", state)
    if p and state is None:
        raise ValueError(f"rng_state must be that of the forward pass with dropout, got p {p}")
    return state[:1].clone() if p else None


def _behind(packing: tuple, leftpad: Tensor, lens: Tensor | None) -> tuple[tuple, Tensor]:
    """The packing whose sequences of keys begin behind their padding, and their lengths."""
    ends_q, ends_k, *longest = packing
    lens = (ends_k.diff() if lens is None else lens) - leftpad
    ends_k = ends_k + torch.nn.functional.pad(leftpad, (0, 1))
    return (ends_q, ends_k, *longest), lens.clamp(min=0)


def _into(buffer: Tensor | None, result: Tensor) -> Tensor:
    """The result, written into the buffer if there is one."""
    return result if buffer is None else buffer.copy_(result)
