"""New keys and values of a cached call, written before a kernel attends them; queries rotated.

One launch does all of it. Lengths and pages are read on the device alone, so a captured CUDA graph
serves every length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import (
    Entry,
    Params,
    address,
    current_device,
    current_stream,
    empty,
    kernels,
    launch_dependent,
)
from fa_ops.backends.hopper.split_kv import by_head, cache_sizes
from fa_ops.call import CacheTensors, Call, Run
from fa_ops.types import scales_of

_LAYOUT = struct_layout("append.cu", "AppendParams")
_ADDRESSES, _SIZES = _LAYOUT.packer("q", "sin"), _LAYOUT.packer("q_strides")
_E4M3 = torch.float8_e4m3fn
_THREADS, _FEATURES = 128, 8  # of a CTA, and of a thread, as in cuda/append.cu
_MAX_ROWS = 2**31 - 1 - _THREADS  # new keys, values and queries


def support_error(call: Call) -> str | None:
    """Why the kernel cannot write and rotate what the call needs, or None.

    Dtypes and head dimensions are those that some kernel attends.
    """
    q, cache = call.query, call.cache
    if not q.numel():
        return f"appends to caches that queries attend, got a query of shape {tuple(q.shape)}"
    if cache.rotary_cos is not None and not cache.rotary_cos.shape[1]:
        return f"rotates at least two features, rotary_cos is {tuple(cache.rotary_cos.shape)}"
    new, queries = _rows(call)
    if 2 * new + queries > _MAX_ROWS:
        return f"writes at most {_MAX_ROWS} rows, got {2 * new + queries}"
    return None


def prepare(call: Call) -> Run:
    """What writes and rotates for calls with the geometry of this one.

    It returns the queries, rotated if requested, and the lengths with the new keys.
    """
    return _Appender(call).run


def _rows(call: Call) -> tuple[int, int]:
    """The number of new keys of all heads, and of queries to rotate."""
    cache, (B, Hq, Sq, _) = call.cache, call.query.shape
    new = 0 if cache.key is None else B * cache.key.shape[1] * cache.key.shape[2]
    return new, 0 if cache.rotary_cos is None else B * Hq * Sq


class _Appender:
    """The launch for calls of one geometry."""

    def __init__(self, call: Call) -> None:
        q, k, v, cache = call.query, call.key, call.value, call.cache
        (B, Hq, Sq, D), Dv, table = q.shape, v.shape[3], cache.page_table
        paged, is_rotated, tokens = table is not None, cache.rotary_cos is not None, 0
        shape = by_head(k.shape, paged)
        pages, page, capacity = cache_sizes(shape, table.shape[1] if paged else None)
        key_strides = value_strides = (0, 0, 0)
        if cache.key is not None:
            tokens = cache.key.shape[2]
            key_strides, value_strides = cache.key.stride()[:3], cache.value.stride()[:3]
        positions, angles = cache.rotary_cos.shape if is_rotated else (0, 0)
        new, queries = _rows(call)
        lanes_log2 = (-(-max(D, Dv) // _FEATURES) - 1).bit_length()
        sizes = _SIZES.pack(
            *q.stride()[:3], *key_strides, *value_strides, *by_head(k.stride(), paged)[:3],
            *by_head(v.stride(), paged)[:3], Hq, shape[1], Sq, tokens, D, Dv, capacity, page, pages,
            table.stride(0) if paged else 0, scales_of(cache.k_scale, cache.v_scale, paged),
            positions, 2 * angles, cache.rotary_interleaved, new, queries, lanes_log2,
        )  # fmt: skip
        self._params = Params(_ADDRESSES, sizes)
        self._device = q.device.index
        self._ctas = -(-(2 * new + queries) // (_THREADS >> lanes_log2))
        self._rotated = ((B, Hq, Sq, D), (Hq * Sq * D, Sq * D, D, 1), q.dtype) if queries else None
        self._ends = ((B,), (1,), torch.int32) if new else None
        defines = kernel_defines(q.dtype, k.dtype, cache.rotary_cos.dtype if is_rotated else None)
        entry = Entry("append", _THREADS)
        self._kernels = kernels("append", self._device, [entry], tuple(defines.items()))

    def run(self, q: Tensor, k: Tensor, v: Tensor, t: CacheTensors) -> tuple[Tensor, Tensor]:
        """Launch; returns queries and lengths."""
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.run(q, k, v, t)
        queries = q if self._rotated is None else empty(*self._rotated)
        ends = None if self._ends is None else empty(*self._ends)
        params = self._params.take(
            q.data_ptr(), queries.data_ptr(), address(t.key), address(t.value), k.data_ptr(),
            v.data_ptr(), t.kv_lens.data_ptr(), address(ends), address(t.page_table),
            address(t.k_scale), address(t.v_scale), address(t.rotary_cos), address(t.rotary_sin),
        )  # fmt: skip
        launch_dependent(self._kernels, self._ctas, current_stream(self._device), params[1])
        self._params.give_back(params)
        return queries, t.kv_lens if ends is None else ends


def kernel_defines(
    dtype: torch.dtype, cached: torch.dtype, angles: torch.dtype | None = None
) -> dict[str, int]:
    """The macros of the kernel; `cached`: dtype of the cache, `angles`: of the rotary tables."""
    return {
        "IS_BF16": int(dtype == torch.bfloat16),
        "IS_E4M3": int(cached == _E4M3),
        "ROTATION": 0 if angles is None else 1 if angles == torch.float32 else 2,
    }
