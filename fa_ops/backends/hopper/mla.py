"""Decoding over a latent cache on sm_90a: one kv head, values that are part of its keys.

As with `decode`, all depends on shapes alone: a captured CUDA graph serves every length.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import MlaConfig, mla_config
from fa_ops.backends.hopper.decode import kernels
from fa_ops.backends.hopper.launch import (
    PROMOTE_128B,
    Params,
    TensorMap,
    address,
    current_device,
    current_stream,
    empty,
    launch_early,
)
from fa_ops.backends.hopper.problem import FAR, LOG2E
from fa_ops.types import Cache, Spec, default_scale, rows_are_aligned, values_in_keys

HEAD_DIM, VALUE_DIM = 576, 512
# struct Params: maps and addresses, then what all calls of a plan share
_HEAD, _SCALARS = struct.Struct("<128s128s6Q"), struct.Struct("<13if24x")


def has_dims(q: Tensor, v: Tensor) -> bool:
    """Whether head dims are the kernel's."""
    return q.shape[-1] == HEAD_DIM and v.shape[-1] == VALUE_DIM


def cache_error(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> str | None:
    """Why the kernel cannot attend such a cache, or None."""
    heads = k.shape[1] if cache.page_table is None else k.shape[2]
    page = 0 if cache.page_table is None else k.shape[1]
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype:
        return f"decodes bfloat16 and float16 caches, got {k.dtype} for queries of {q.dtype}"
    if heads != 1 or not values_in_keys(k, v):
        return (
            f"has head dims {HEAD_DIM} and {VALUE_DIM} only where one head's keys hold its values"
        )
    if cache.key is not None or cache.rotary_cos is not None:
        return "does not write to caches"
    if cache.num_splits or cache.batch_invariant or cache.unified_max is not None:
        return "has no num_splits, batch_invariant and unified_max for latent caches"
    if spec.window_left >= 0 or spec.window_right >= 0 or spec.softcap > 0:
        return "has no window and no softcap for latent caches"
    if not (spec.attn_mask is spec.alibi_slopes is spec.sinks is spec.key_ranges is None):
        return "has no mask, ALiBi, sinks or key_ranges for latent caches"
    if page % 16 or (page % 64 and 64 % page):
        return f"needs pages of 16, 32 or a multiple of 64 keys, got {page}"
    if spec.dropout_p > 0 or default_scale(spec, HEAD_DIM) <= 0:
        return f"needs a positive scale and no dropout, got {spec.scale} and {spec.dropout_p}"
    for name, t in (("query", q), ("key_cache", k)):
        if not rows_are_aligned(t):
            return f"needs rows at multiples of 16 bytes, {name} has strides {t.stride()}"
    return None


def forward(q: Tensor, k: Tensor, cache: Cache, spec: Spec) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, 512) laid out (B, Sq, Hq, 512), and lse (B, Hq, Sq)."""
    table = cache.page_table
    plan = _plan(
        q.dtype,
        q.device.index,
        (q.shape, k.shape),
        (q.stride(), k.stride()),
        (spec.is_causal, spec.scale),
        None if table is None else (table.shape[1], table.stride(0)),
        spec.kv_lens is not None,
    )
    return plan.run(q, k, table, spec.kv_lens)


class Plan:
    """All of a call that does not depend on where its tensors lie or what they hold."""

    def __init__(self, dtype, device, shapes, strides, statics, table, has_lens):
        (B, Hq, Sq, D), key_shape = shapes
        page, pages, stride, k_strides = 0, 0, 0, strides[1]
        if table is None:
            capacity = key_shape[2]
        else:
            pages, page = key_shape[:2]
            max_pages, stride = table
            capacity = page * max_pages
            key_shape = (pages, 1, page, D)
            k_strides = tuple(k_strides[i] for i in (0, 2, 1, 3))
        is_causal, scale = statics
        config = mla_config(page)
        self.device = device
        self.ctas = torch.cuda.get_device_properties(device).multi_processor_count
        head_blocks = -(-Hq // config.rows)
        heads = -(-Hq // head_blocks)
        tokens = min(config.rows // heads, Sq)
        blocks = head_blocks * -(-Sq // tokens)
        width = _width(blocks, self.ctas)
        units = -(-blocks // width)
        if B * units * capacity >= 2**37:
            raise NotImplementedError(
                f"counts tiles in 32 bits, got {B} x {units} x {capacity} keys"
            )
        defines = kernel_defines(config, dtype, paged=table is not None, kv_lens=has_lens)
        self.kernels = kernels("mla", config, device, defines, merges=capacity > config.block_n)
        self.maps = (
            TensorMap(dtype, shapes[0], strides[0], tokens, heads=heads),
            TensorMap(dtype, key_shape, k_strides, config.copy_keys, promotion=PROMOTE_128B),
        )
        self.out = (
            (B, Hq, Sq, VALUE_DIM),
            (Sq * Hq * VALUE_DIM, VALUE_DIM, Hq * VALUE_DIM, 1),
            dtype,
        )
        # apart from the workspace: it would keep all of that
        self.lse = (B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32
        # of each CTA's first and last unit: sums and statistics
        rows = 2 * self.ctas * config.rows
        self.stats_at = rows * VALUE_DIM * 4
        self.workspace = (self.stats_at + rows * 8,), (1,), torch.uint8
        scalars = _SCALARS.pack(
            *(B, Hq, Sq, capacity, tokens, heads, head_blocks, width, units),
            *(0 if is_causal and Sq > 1 else FAR, page, pages, stride),
            (D**-0.5 if scale is None else scale) * LOG2E,
        )
        self.params = Params(_HEAD, scalars)

    def run(
        self, q: Tensor, k: Tensor, table: Tensor | None, kv_lens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(q, k, table, kv_lens)
        out, lse, workspace = empty(*self.out), empty(*self.lse), empty(*self.workspace)
        of_q, of_k = self.maps
        at = workspace.data_ptr()
        params = self.params.take(
            of_q.at(q.data_ptr()), of_k.at(k.data_ptr()), out.data_ptr(), lse.data_ptr(), at,
            at + self.stats_at, address(kv_lens), address(table),
        )  # fmt: skip
        launch_early(self.kernels, self.ctas, current_stream(self.device), params[1])
        self.params.give_back(params)
        return out, lse


def _width(blocks: int, ctas: int) -> int:
    """How many CTAs attend a row's blocks side by side: so that most of them have work, then many,
    as each tile comes from memory once for all of them."""

    def busy(width: int) -> float:
        return ctas // width * blocks / -(-blocks // width)

    return max(range(min(2, blocks), min(8, blocks, ctas) + 1), key=lambda w: (busy(w), w))


def kernel_defines(
    config: MlaConfig, dtype: torch.dtype, *, paged: bool = False, kv_lens: bool = True
) -> dict[str, int]:
    """What a kernel is compiled for."""
    return config.defines() | {
        "IS_BF16": int(dtype == torch.bfloat16),
        "IS_PAGED": int(paged),
        "HAS_KV_LENS": int(kv_lens),
    }


_plan = functools.lru_cache(maxsize=1024)(Plan)
