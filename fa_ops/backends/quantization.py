"""Quantisation to 8 bits as torch operations, on any device.

docs/semantics.md defines it; the Triton kernels of `backends/triton/eight_bit.py` compute the
same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_ops.call.call import Call, is_prefill
from fa_ops.call.options import MEAN_KEYS, SCALE_BLOCK

E4M3 = torch.float8_e4m3fn
E4M3_MAX, INT8_MAX = 448.0, 127.0
# What the largest number of an int8 scale becomes, before it is rounded to 127. As 12743 is prime,
# no bfloat16 number lies halfway between two steps, where rounding errors would choose one.
INT8_LARGEST = 127.43
SMALLEST = 2.0**-100  # the largest number of a scale counts as at least this
WEIGHT_SCALE = 256.0  # weights of 1 are rounded as this number, whose e4m3 neighbours go up to 448
# Weights of so many keys are rounded relative to a power of two of their own, at most 2**SLACK_BITS
# above that of the largest of them.
PART_KEYS, SLACK_BITS = 1024, 4.0


class Quantised(NamedTuple):
    """8-bit numbers as a wide dtype, and their scales, which broadcast to them."""

    query: Tensor  # (B, Hq, Sq, D)
    key: Tensor  # (B, Hkv, Sk, D)
    value: Tensor  # (B, Hkv, Sk, Dv)
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    # what the scores lack, (B, Hq, Sq, 1): scale times the product of query and the keys' mean
    offset: Tensor | None = None


def quantised(call: Call, wide: torch.dtype) -> Quantised:
    """Quantise 16-bit tensors, or name the scales of 8-bit ones; keys beyond kv_lens are 0."""
    kv_lens, options, inside = call.operands.kv_lens, call.options, None
    if kv_lens is not None:
        inside = torch.arange(call.key.shape[2], device=call.key.device) < kv_lens.view(-1, 1, 1)
        inside = inside.unsqueeze(-1)
    q, k, v = (t.to(wide) for t in call[:3])
    if inside is not None:
        k, v = (torch.where(inside, t, 0.0) for t in (k, v))
    if call.query.dtype == E4M3:
        t = call.operands
        q_scale, k_scale, v_scale = (x.to(wide) for x in (t.q_scale, t.k_scale, t.v_scale))
        q_scale, k_scale = _of_tokens(q_scale, q.shape[2]), _of_tokens(k_scale, k.shape[2])
        return Quantised(q, k, v, q_scale, k_scale, _of_channels(v_scale))
    offset = None
    if options.smooth_key and not options.softcap:
        mean = mean_of_keys(k, kv_lens)
        per_head = mean.repeat_interleave(q.shape[1] // k.shape[1], 1)
        offset = call.scale * (q * per_head).sum(-1, keepdim=True)
        k = k - mean if inside is None else torch.where(inside, k - mean, 0.0)
    if options.rotate:
        turn = rotation(q.shape[3], wide).to(q.device)
        q, k = q @ turn, k @ turn
    is_int8 = options.qk_dtype in (None, torch.int8)
    q, q_scale = _with_scale(q, q.abs().amax(-1, keepdim=True), is_int8)
    k, k_scale = _with_scale(k, _largest_of_blocks(k), is_int8)
    v, v_scale = _with_scale(v, v.abs().amax(2, keepdim=True), False)
    return Quantised(q, k, v, q_scale, k_scale, v_scale, offset)


def mean_of_keys(k: Tensor, kv_lens: Tensor | None) -> Tensor:
    """The mean of at most MEAN_KEYS evenly spaced keys of each row, (B, Hkv, 1, D)."""
    B, Hkv, Sk, D = k.shape
    lens = [Sk] * B if kv_lens is None else kv_lens.clamp(0, Sk).tolist()
    mean = k.new_zeros(B, Hkv, 1, D)
    for b, n in enumerate(lens):
        if n:
            mean[b] = k[b, :, : n : -(-n // MEAN_KEYS)].mean(1, keepdim=True)
    return mean


def rotation(D: int, dtype: torch.dtype) -> Tensor:
    """A symmetric orthogonal (D, D) matrix: Hadamard's, in blocks of D's largest power of two."""
    n = D & -D
    index = torch.arange(n)
    common = index.view(-1, 1) & index
    parity = sum((common >> bit) & 1 for bit in range(max(n.bit_length() - 1, 1))) & 1
    block = (1.0 - 2.0 * parity.to(dtype)) / math.sqrt(n)
    return torch.block_diag(*[block] * (D // n))


def power_of_two(largest: Tensor) -> Tensor:
    """The smallest power of two by which `largest` is at most 448 when divided."""
    bits = largest.float().clamp(min=SMALLEST).view(torch.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - 8  # 448 is 1.75 * 2**8
    return (exponent.clamp(1, 253) << 23).view(torch.float32)


def rounded(x: Tensor) -> Tensor:
    """x rounded to e4m3, to nearest even; larger numbers become 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(x.dtype)


def round_weights_(t: Tensor, m: Tensor) -> Tensor:
    """Replace t by WEIGHT_SCALE * 2**(t - m), rounded to e4m3 in parts of PART_KEYS keys.

    t (..., Sk) are scores in units of log2, -inf where masked; m (..., 1) is not below t's largest,
    rounded up, and finite. The references of the parts depend on no order of the keys.
    """
    for part in t.split(PART_KEYS, -1):
        largest = part.amax(-1, keepdim=True).ceil_()
        reference = torch.minimum(largest + SLACK_BITS, m).where(largest > -math.inf, m)
        part.sub_(reference).exp2_().mul_(WEIGHT_SCALE)
        part.copy_(rounded(part)).mul_(torch.exp2(reference - m))
    return t


def _with_scale(x: Tensor, largest: Tensor, is_int8: bool) -> tuple[Tensor, Tensor]:
    """(numbers, scale): int8 or e4m3 numbers whose product with the scale is about x."""
    if is_int8:
        scale = largest.float().clamp(min=SMALLEST).to(x.dtype) / INT8_LARGEST
        return (x / scale).round().clamp(-INT8_MAX, INT8_MAX), scale
    scale = power_of_two(largest).to(x.dtype)
    return rounded(x / scale), scale


def _largest_of_blocks(k: Tensor) -> Tensor:
    """The largest magnitude of each SCALE_BLOCK keys, (B, Hkv, Sk, 1)."""
    Sk = k.shape[2]
    largest = F.pad(k.abs().amax(-1), (0, -Sk % SCALE_BLOCK))
    largest = largest.unflatten(2, (-1, SCALE_BLOCK)).amax(-1)
    return largest.repeat_interleave(SCALE_BLOCK, 2)[:, :, :Sk].unsqueeze(-1)


def _of_tokens(scale: Tensor, S: int) -> Tensor:
    if scale.dim() < 2:
        return scale.view(1, 1, 1, 1)
    if scale.dim() == 3 and scale.shape[2] != S:
        scale = scale.repeat_interleave(SCALE_BLOCK, 2)[:, :, :S]
    return scale.view(*scale.shape[:2], -1, 1)


def _of_channels(scale: Tensor) -> Tensor:
    return scale.view(1, 1, 1, 1) if scale.dim() < 2 else scale.view(*scale.shape[:2], 1, -1)


# Conversion of e4m3 caches, which backends do for long prompts.

MAX_CONVERTED_BYTES = 1 << 32  # of the converted cache


def conversion_error(call: Call) -> str | None:
    """Why an e4m3 cache is not converted to the dtype of query before a prompt attends it, or None.

    The products of a prompt take many times as long as the conversion of the keys of its rows.
    """
    (q, k, v), tensors = call[:3], call.operands
    if not is_prefill(q):
        return (
            "converts e4m3 caches for 64 and more queries of a head that fill the device, got "
            f"{q.shape[2]} of {q.shape[0]} x {q.shape[1]} heads"
        )
    if q.dtype == torch.float16 and (tensors.k_scale is not None or tensors.v_scale is not None):
        return "converts no e4m3 caches with scales to float16, which may not hold their products"
    heads, keys = k.shape[2 if call.is_paged else 1], call.num_keys
    token = q.shape[0] * heads * (q.shape[3] + v.shape[3]) * q.element_size()
    fitting = MAX_CONVERTED_BYTES // token
    most = 1 << fitting.bit_length() - 1 if fitting else 0
    if keys > most:  # a power of two, so that families of calls agree on it
        return f"converts e4m3 caches of at most {most} keys of such shapes, got {keys}"
    return None
