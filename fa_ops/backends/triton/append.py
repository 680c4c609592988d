"""Appending to a key-value cache: new keys and values, rotary embedding and quantisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.launch import (
    INTERPRETED,
    Launch,
    address,
    architecture,
    bind,
    empty,
    padded,
)
from fa_ops.call.call import Call
from fa_ops.call.options import Operands, scales_of

_launches: dict[tuple, Launch] = {}


@triton.jit(do_not_specialize=["tokens", "Sq", "writers"])
def append_kernel(
    q, rotated, key, value, k, v,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_s: tl.int64,
    key_stride_b: tl.int64, key_stride_h: tl.int64, key_stride_s: tl.int64,
    value_stride_b: tl.int64, value_stride_h: tl.int64, value_stride_s: tl.int64,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_s: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_s: tl.int64,
    Hq: tl.int32, Hkv: tl.int32, Sq: tl.int32, tokens: tl.int32, writers: tl.int32,
    capacity: tl.int32, table, table_stride: tl.int64, pages: tl.int32, kv_lens, ends, k_scale,
    v_scale, cos, sin, positions: tl.int32,
    D: tl.constexpr, Dv: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAGE: tl.constexpr, SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write one new token of a kv head, or rotate one row of q (programs from `writers` on).

    A token beyond the cache's capacity, or whose page does not exist, is not written. `ends`, if
    given, receives the numbers of keys with the new ones. SCALES: one of the constants of `types`.
    """
    pid = tl.program_id(0)
    if PDL:  # the kernel that attends waits for the end of this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if pid < writers:
        h = pid % Hkv
        n = pid // Hkv % tokens
        b = pid // Hkv // tokens
        held = tl.load(kv_lens + b)
        if ends is not None:
            tl.store(ends + b, length_with_new(held, tokens, capacity), mask=h + n == 0)
        position = held + n
        fits = (position >= 0) & (position < capacity)
        if PAGE > 0:
            page = tl.load(table + b * table_stride + position // PAGE, mask=fits, other=-1)
            fits = fits & (page >= 0) & (page < pages)
            row, slot = page, position % PAGE
        else:
            row, slot = b, position
        scale_at = (b * Hkv + h).to(tl.int64)
        if SCALES == 2:
            scale_at = row.to(tl.int64) * Hkv + h
        elif SCALES == 3 and PAGE > 0:
            scale_at = (row.to(tl.int64) * PAGE + slot) * Hkv + h
        elif SCALES == 3:
            scale_at = scale_at * capacity + slot
        write_row(
            key + b * key_stride_b + h * key_stride_h + n * key_stride_s,
            k + row * k_stride_b + h * k_stride_h + slot * k_stride_s, fits,
            k_scale, scale_at, position, positions, cos, sin, D, BLOCK, R, INTERLEAVED,
        )  # fmt: skip
        write_row(
            value + b * value_stride_b + h * value_stride_h + n * value_stride_s,
            v + row * v_stride_b + h * v_stride_h + slot * v_stride_s, fits,
            v_scale, scale_at, position, positions, cos, sin, Dv, BLOCK, 0, False,
        )  # fmt: skip
    elif R > 0:
        index = pid - writers
        i = index % Sq
        head = index // Sq % Hq
        batch = index // Sq // Hq
        write_row(
            q + batch * q_stride_b + head * q_stride_h + i * q_stride_s,
            rotated + index.to(tl.int64) * D, True, None, 0,
            length_with_new(tl.load(kv_lens + batch), tokens, capacity) + i - Sq, positions, cos,
            sin, D, BLOCK, R, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def length_with_new(held, tokens, capacity):
    """The keys of a row that held some before, clamped to the cache's capacity."""
    return tl.maximum(tl.minimum(tl.minimum(held, capacity) + tokens, capacity), 0)


@triton.jit
def write_row(
    source, target, fits, scale, at, position, positions, cos, sin,
    D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Copy D numbers from source to target, the first R of them rotated, in target's dtype."""
    cols = tl.arange(0, BLOCK)
    x = tl.load(source + cols, mask=cols < D, other=0.0).to(tl.float32)
    if R > 0:
        x = rotated(x, source, cols, position, positions, cos, sin, R, INTERLEAVED)
        x = x.to(source.dtype.element_ty).to(tl.float32)
    if scale is not None:
        # IEEE rounding: an approximate quotient would sometimes round to another fp8 number
        x = tl.div_rn(x, tl.load(scale + at, mask=fits, other=1.0))
    if target.dtype.element_ty.primitive_bitwidth == 8:
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)  # NaN stays NaN
    tl.store(target + cols, x.to(target.dtype.element_ty), mask=tl.where(fits, cols < D, False))


@triton.jit
def rotated(
    x, source, cols, position, positions, cos, sin, R: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """x, loaded from `source`, in fp32 with its first R features rotated."""
    inside = cols < R
    if INTERLEAVED:
        partner, angle, first = cols ^ 1, cols // 2, cols % 2 == 0
    else:
        first = cols < R // 2
        partner = tl.where(first, cols + R // 2, cols - R // 2)
        angle = cols % (R // 2)
    at = tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64) * (R // 2) + angle
    c = tl.load(cos + at, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    return x * c + tl.where(first, -y, y) * s


def prepare_cache(call: Call) -> Tensor:
    """Write the new keys and values into the cache; returns the queries, rotated if requested."""
    return bind_cache(call)(*call[:4])[0]


def _by_head(strides: tuple[int, ...], paged: bool) -> tuple[int, ...]:
    """Strides of batch or page, head and token of a cache; in pages the tokens come first."""
    first, second, third, _ = strides
    return (first, third, second) if paged else (first, second, third)


def bind_cache(call: Call, counts: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """The part of `prepare_cache` that does not depend on the tensors' contents and addresses.

    What it returns also returns kv_lens, which include the new keys if it `counts` them.
    """
    (q, k, v), t, capacity = call[:3], call.operands, call.num_keys
    B, Hq, Sq, D = q.shape
    paged, device = call.is_paged, q.get_device()
    Hkv, Dv = k.shape[2 if paged else 1], v.shape[3]
    key, value = (q, q) if t.new_key is None else (t.new_key, t.new_value)
    tokens = 0 if t.new_key is None else key.shape[2]
    positions, half = (0, 0) if t.rotary_cos is None else t.rotary_cos.shape
    R = 2 * half
    writers, turners = B * Hkv * tokens, B * Hq * Sq if R else 0
    strides = _by_head(k.stride(), paged) + _by_head(v.stride(), paged)
    numbers = (
        *q.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides,
        Hq, Hkv, Sq, tokens, writers, capacity,
    )  # fmt: skip
    table_stride, pages = t.page_table.stride(0) if paged else 0, k.shape[0]
    rotated_layout = (B, Hq, Sq, D), (Hq * Sq * D, Sq * D, D, 1), q.dtype, device
    shape_of_ends, counts = ((B,), (1,), torch.int32, device), counts and tokens > 0
    early = architecture(q.device) >= 90 and not INTERPRETED  # programmatic dependent launch
    constants = {
        "D": D, "Dv": Dv, "BLOCK": padded(max(D, Dv)), "R": R,
        "INTERLEAVED": call.options.rotary_interleaved, "PAGE": k.shape[1] if paged else 0,
        "SCALES": scales_of(t.k_scale, t.v_scale, paged), "PDL": early,
    }  # fmt: skip
    scaled = (t.k_scale is not None, t.v_scale is not None)
    angles = t.rotary_cos.dtype if R else None
    key_of_launch = (*constants.values(), *scaled, counts, device, q.dtype, k.dtype, angles)

    def write(q, k, v, tensors: Operands, at=address):
        t = tensors
        rotated = empty(*rotated_layout) if R else q
        ends = empty(*shape_of_ends) if counts else None
        lens = t.kv_lens if ends is None else ends
        small = (
            t.kv_lens, t.page_table, t.new_key, t.new_value, t.k_scale, t.v_scale, t.rotary_cos,
            t.rotary_sin,
        )  # fmt: skip
        kv_lens, table, key, value, k_scale, v_scale, cos, sin = [
            None if t is None else at(t) for t in small
        ]
        q_at = at(q)
        if key is None:
            key = value = q_at
        args = (
            q_at, at(rotated), key, value, at(k), at(v), *numbers, table, table_stride, pages,
            kv_lens, None if ends is None else at(ends), k_scale, v_scale, cos, sin, positions,
        )  # fmt: skip
        if at is not address:
            return args
        if writers + turners:
            launch((writers + turners, 1, 1), args)
        return rotated, lens

    launch = _launches.get(key_of_launch)
    if launch is None:
        samples = write(*call[:4], at=lambda t: t)
        options = {"num_warps": 1} | ({"launch_pdl": True} if early else {})
        launch = _launches[key_of_launch] = bind(
            append_kernel, samples, constants, options, device=q.device
        )
    return write
