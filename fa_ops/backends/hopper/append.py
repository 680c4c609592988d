"""New keys and values of a cached call, written before a kernel attends them; queries rotated.

One launch does all of it. Lengths and pages are read on the device alone, so a captured CUDA graph
serves every length.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import (
    Entry,
    Params,
    current_device,
    current_stream,
    empty,
    kernels,
)
from fa_ops.backends.hopper.split_kv import by_head, cache_sizes
from fa_ops.call import CacheTensors, Call, Run
from fa_ops.types import scales_of

if TYPE_CHECKING:
    from fa_ops.backends.hopper.split_kv import SplitKvPlan

_LAYOUT = struct_layout("append.cu", "AppendParams")
_SIZES = _LAYOUT.packer("q_strides")
# addresses that may be null, behind that of `ends`, and the tensors there
_OPTIONAL = {"table": "page_table", "k_scale": "k_scale", "v_scale": "v_scale"}
_OPTIONAL |= {"cos": "rotary_cos", "sin": "rotary_sin"}
_E4M3 = torch.float8_e4m3fn
_THREADS, _FEATURES = 128, 8  # of a CTA, and of a thread, as in cuda/append.cu
_ALIGNMENT = 128  # of what is written for one call, in a workspace
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
    """A function that appends and rotates for calls with the geometry of this one.

    It returns the queries, rotated if requested, and the lengths with the new keys.
    """
    return Appender(call).run


def prepare_before(plan_of: Callable[[Call], SplitKvPlan], call: Call) -> Run:
    """What writes and rotates, then attends with the plan that `plan_of` makes of the rest."""
    appender, rest = Appender(call), call.read_only()
    if appender.rotates:  # rotated queries are a tensor of their own
        rest = rest._replace(query=rest.query.new_empty(rest.query.shape))
    plan = plan_of(rest)
    appender.share(plan.family.workspace)
    return functools.partial(plan.run, appender=appender)


def _addresses(has_new: bool, given: list[str]) -> struct.Struct:
    """Packs the addresses that are not null."""
    names = list(_LAYOUT.fields)[: list(_LAYOUT.fields).index("q_strides")]
    null = set() if has_new else {"key", "value", "ends"}
    null |= _OPTIONAL.keys() - given
    return struct.Struct("<" + "".join("8x" if name in null else "Q" for name in names))


def _rows(call: Call) -> tuple[int, int]:
    """The number of new keys of all heads, and of queries to rotate."""
    cache, (B, Hq, Sq, _) = call.cache, call.query.shape
    new = 0 if cache.key is None else B * cache.key.shape[1] * cache.key.shape[2]
    return new, 0 if cache.rotary_cos is None else B * Hq * Sq


class Appender:
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
        given = [name for name in _OPTIONAL if getattr(call.tensors, _OPTIONAL[name]) is not None]
        self._params = Params(_addresses(new > 0, given), sizes)
        self._given = [CacheTensors._fields.index(_OPTIONAL[name]) for name in given]
        self._device = q.device.index
        self._grid = -(-(2 * new + queries) // (_THREADS >> lanes_log2)), 1
        self.rotates = queries > 0
        self._rotated = (B, Hq, Sq, D), (Hq * Sq * D, Sq * D, D, 1), q.dtype
        self._ends = ((B,), (1,), torch.int32) if new else None
        defines = kernel_defines(q.dtype, k.dtype, cache.rotary_cos.dtype if is_rotated else None)
        entry = Entry("append", _THREADS)
        (self._kernel,) = kernels("append", self._device, [entry], tuple(defines.items()))

    def share(self, workspace: tuple) -> None:
        """Add to a workspace: its size, strides and dtype, bytes. `launch` writes behind it."""
        ((size,), *layout), (B, *rows), dtype = workspace, self._rotated[0], self._rotated[2]
        self._rotated_at = -(-size // _ALIGNMENT) * _ALIGNMENT
        rotated = B * math.prod(rows) * dtype.itemsize if self.rotates else 0
        self._ends_at = self._rotated_at + -(-rotated // _ALIGNMENT) * _ALIGNMENT
        self.workspace = (self._ends_at + 4 * B,), *layout

    def run(self, q: Tensor, k: Tensor, v: Tensor, t: CacheTensors) -> tuple[Tensor, Tensor]:
        """Launch; returns queries and lengths, in memory of their own where they are not given."""
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.run(q, k, v, t)
        queries = empty(*self._rotated) if self.rotates else q
        ends = t.kv_lens if self._ends is None else empty(*self._ends)
        inputs, written = (q, k, v, t.kv_lens), (queries, ends)
        self._launch(
            *[x.data_ptr() for x in (*inputs, *written)], t, current_stream(self._device)
        )  # fmt: skip
        return queries, ends

    def launch(
        self, q: int, k: int, v: int, kv_lens: int, workspace: int, t: CacheTensors, stream: int
    ) -> tuple[int, int]:
        """Launch on the current device; takes addresses, returns those of queries and lengths."""
        queries = workspace + self._rotated_at if self.rotates else q
        ends = kv_lens if self._ends is None else workspace + self._ends_at
        self._launch(q, k, v, kv_lens, queries, ends, t, stream)
        return queries, ends

    def _launch(
        self, q: int, k: int, v: int, kv_lens: int, queries: int, ends: int, t: CacheTensors,
        stream: int,
    ) -> None:  # fmt: skip
        rest = [t[i].data_ptr() for i in self._given]
        if self._ends is None:
            params = self._params.take(q, queries, k, v, kv_lens, *rest)
        else:
            params = self._params.take(
                q, queries, t.key.data_ptr(), t.value.data_ptr(), k, v, kv_lens, ends, *rest
            )
        self._kernel.launch(self._grid, stream, params[1], dependent=True)
        self._params.give_back(params)


def kernel_defines(
    dtype: torch.dtype, cached: torch.dtype, angles: torch.dtype | None = None
) -> dict[str, int]:
    """The macros of the kernel; `cached`: dtype of the cache, `angles`: of the rotary tables."""
    return {
        "IS_BF16": int(dtype == torch.bfloat16),
        "IS_E4M3": int(cached == _E4M3),
        "ROTATION": 0 if angles is None else 1 if angles == torch.float32 else 2,
    }
