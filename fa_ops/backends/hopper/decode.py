"""Decoding on sm_90a: few queries against a long cache. One kernel reads each key once, another
merges what several CTAs found of one row.

Everything here depends on shapes alone: lengths and pages are read on the device, so a captured
CUDA graph serves every length. A cache that grows has another shape in every step: a family of
calls shares all that does not depend on how many keys there are.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa_ops.backends.hopper import launch
from fa_ops.backends.hopper.configs import DecodeConfig, MlaConfig, decode_config
from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import (
    PROMOTE_128B,
    Entry,
    Kernel,
    Params,
    TensorMap,
    address,
    current_device,
    current_stream,
    empty,
    launch_early,
)
from fa_ops.backends.hopper.problem import (
    FAR,
    ScoreUnits,
    copyable,
    limit_error,
    softcap_kind,
    window,
)
from fa_ops.call import CACHED, CacheTensors, Call, Run
from fa_ops.types import Cache, Spec, default_scale, is_decoding, rows_are_aligned

_LAYOUT = struct_layout("decode_params.cuh", "DecodeParams")
_SCALARS, _STRIDES = _LAYOUT.packer("B", "D"), _LAYOUT.packer("q_strides", "v_strides")
# maps and addresses, the scalars, addresses, the strides
_PARAMS = _LAYOUT.packer(packed=("B:D", "q_strides:v_strides"))
MAX_ROWS = 16


def rows_of(q: Tensor, k: Tensor, cache: Cache) -> int:
    """Queries that share a kv head."""
    heads = k.shape[1] if cache.page_table is None else k.shape[2]
    return q.shape[1] // heads * q.shape[2]


def cache_error(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> str | None:
    """Why the kernel cannot attend such a cache, or None."""
    rows = rows_of(q, k, cache)
    if rows > MAX_ROWS:
        return f"attends {MAX_ROWS} queries of a kv head at once, got {rows}"
    return memory_error(q, k, v, cache, spec)


def memory_error(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> str | None:
    """The part of `cache_error` that does not depend on the number of queries."""
    D, Dv = q.shape[-1], v.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype:
        return f"decodes bfloat16 and float16 caches, got {k.dtype} for queries of {q.dtype}"
    if D % 8 or Dv % 8 or max(D, Dv) > 256:
        return f"needs head dims that are multiples of 8 and at most 256, got {D} and {Dv}"
    if cache.key is not None or cache.rotary_cos is not None:
        return "does not write to caches"
    if cache.num_splits or cache.batch_invariant:
        return "cuts keys as the device is filled best, without num_splits and batch_invariant"
    if cache.unified_max is not None:
        return "has no unified maximum"
    if cache.page_table is not None and (k.shape[1] % 16 or (k.shape[1] % 64 and 64 % k.shape[1])):
        return f"needs pages of 16, 32 or a multiple of 64 keys, got {k.shape[1]}"
    table = cache.page_table
    *_, keys = cache_sizes(by_head(k.shape, table is not None), pages_of_row(table))
    reason = limit_error(default_scale(spec, D), q.shape[2], keys)
    if reason:
        return reason
    for name, t in (("query", q), ("key_cache", k), ("value_cache", v)):
        if not rows_are_aligned(t):
            return f"needs rows at multiples of 16 bytes, {name} has strides {t.stride()}"
    return None


def decodes(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> bool:
    """Whether this kernel runs a dense call."""
    return is_decoding(q.shape[2], k.shape[2], spec) and cache_error(q, k, v, Cache(), spec) is None


def forward(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    tensors = Call(CACHED, q, k, v, spec, cache=cache).tensors
    return _plan_of(q, k, v, *_options(cache, spec)).run(q, k, v, tensors)


def prepare(call: Call) -> Run:
    """What runs cached calls with the geometry of this one."""
    return _plan_of(call.query, call.key, call.value, *_options(call.cache, call.spec)).run


def _options(cache: Cache, spec: Spec) -> tuple:
    """What a plan depends on in addition to query, key and value."""
    table, slopes = cache.page_table, spec.alibi_slopes
    return (
        (spec.is_causal, spec.scale, spec.window_left, spec.window_right, spec.softcap),
        None if table is None else (table.shape[1], table.stride(0)),
        spec.kv_lens is not None,
        None if slopes is None else slopes.dim(),
        spec.sinks is not None,
        None if spec.key_ranges is None else spec.key_ranges.shape[0],
    )


def _plan_of(q: Tensor, k: Tensor, v: Tensor, *options) -> DecodePlan:
    shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
    return _plan(q.dtype, q.device.index, shapes, strides, options)


class DecodeFamily:
    """The part of a plan that does not depend on the number and strides of keys and values."""

    def __init__(self, dtype, device, q_shape, q_strides, Hkv, Dv, pages, page, options):
        statics, table, has_lens, slopes, has_sinks, ranges = options
        self.options = options
        B, Hq, Sq, D = q_shape
        group = Hq // Hkv
        causal, scale, left, right, softcap = statics
        left, right, _ = window(causal, left, right)
        if Sq == 1:
            right = FAR  # a single query is at the position of the last key
        units = ScoreUnits.of(D, scale, softcap)
        config = decode_config(D, Dv, group * Sq, page)
        self.device, self.block_n = device, config.block_n
        self.ctas = torch.cuda.get_device_properties(device).multi_processor_count
        defines = kernel_defines(
            config,
            dtype,
            paged=table is not None,
            kv_lens=has_lens,
            ranges=ranges is not None,
            softcap=softcap_kind(softcap),
            alibi=slopes is not None,
            sinks=has_sinks,
        )
        self.kernels = kernels("decode", config, device, defines)
        self.idle = -(B * Hkv) % self.ctas  # as in the kernel
        self.is_varied = has_lens or ranges is not None
        self.of_q = TensorMap(dtype, q_shape, q_strides, Sq, heads=group)
        # made of shape and strides; every byte is read once, so an L2 promotion to 256 bytes would
        # cost bandwidth
        self.cached = functools.partial(
            TensorMap, dtype, rows=config.copy_keys, promotion=PROMOTE_128B,
            whole_rows=config.whole_rows,
        )  # fmt: skip
        self.out = (B, Hq, Sq, Dv), (Sq * Hq * Dv, Dv, Hq * Dv, 1), dtype
        self.lse = (B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32
        # partial sums and statistics of each CTA's first and last work item, then lse if the call
        # does not return it (a returned lse is a tensor of its own: it would keep the workspace)
        rows = 2 * self.ctas * config.rows
        self.stats_at = rows * config.value_dim * 4
        self.lse_at = self.stats_at + rows * 8
        self.workspace = (self.lse_at + B * Hq * Sq * 4,), (1,), torch.uint8
        self.params = Params(_PARAMS)
        self._before = B, Hq, Hkv, group, Sq
        self._behind = (
            *(Dv, self.idle, left, right, page, pages, 0 if table is None else table[1]),
            Hq if slopes == 2 else 0,
            2 if ranges and ranges > 1 else 0,
            *(units.inside_tanh, units.log2, 1.0 / units.accumulator, D),
        )

    def scalars(self, capacity: int) -> bytes:
        """The packed scalars; `capacity`: keys that a batch row has room for."""
        return _SCALARS.pack(*self._before, capacity, *self._behind)

    def merges(self, capacity: int) -> bool:
        """Whether CTAs may share a row; the kernel uses the same rule."""
        tiles = -(-capacity // self.block_n)
        return tiles > 1 and (self.is_varied or self.idle * tiles > self.ctas)


class DecodePlan:
    """The part of a call that depends on its geometry only, not on addresses or values."""

    def __init__(self, dtype, device, shapes, strides, options):
        q_shape, key_shape, (*_, Dv) = shapes
        q_strides, k_strides, v_strides = strides
        paged = options[1] is not None
        k_shape, k_strides = by_head(key_shape, paged), by_head(k_strides, paged)
        pages, page, capacity = cache_sizes(k_shape, options[1] and options[1][0])
        B, Hkv = q_shape[0], k_shape[1]
        if B * Hkv * capacity >= 2**37:
            raise NotImplementedError(f"counts tiles in 32 bits, got {B} x {Hkv} x {capacity} keys")
        self.family = family = _family(
            dtype, device, q_shape, q_strides, Hkv, Dv, pages, page, options
        )
        self.kernels = family.kernels[: 1 + family.merges(capacity)]
        self.of_k = family.cached(k_shape, k_strides)
        self.of_v = family.cached((*k_shape[:3], Dv), by_head(v_strides, paged))
        self.scalars = family.scalars(capacity)
        steps = q_strides, k_strides, by_head(v_strides, paged)
        self.steps = _STRIDES.pack(*(stride for of_one in steps for stride in of_one[:3]))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: CacheTensors, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse, which is None unless asked for."""
        family = self.family
        if current_device() != family.device:
            with torch.cuda.device(family.device):
                return self.run(q, k, v, tensors, with_lse)
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_at | k_at | v_at) & 15:
            q, k, v = map(copyable, (q, k, v))
            return _plan_of(q, k, v, *family.options).run(q, k, v, tensors, with_lse)
        kv_lens, table, ranges, slopes, sinks, *_ = tensors
        if ranges is not None:
            ranges = ranges.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        if slopes is not None:
            slopes = slopes.contiguous()
        out, workspace = empty(*family.out), empty(*family.workspace)
        lse = empty(*family.lse) if with_lse else None
        at = workspace.data_ptr()
        params = family.params.take(
            family.of_q.at(q_at), self.of_k.at(k_at), self.of_v.at(v_at), out.data_ptr(),
            at + family.lse_at if lse is None else lse.data_ptr(), at, at + family.stats_at,
            address(kv_lens), address(ranges), address(table), address(sinks), address(slopes),
            self.scalars, q_at, k_at, v_at, self.steps,
        )  # fmt: skip
        launch_early(self.kernels, family.ctas, current_stream(family.device), params[1])
        family.params.give_back(params)
        return out, lse


def by_head(x: tuple[int, ...], paged: bool) -> tuple[int, ...]:
    """Sizes or strides of a cache with heads before tokens; in pages the tokens come first."""
    return (x[0], x[2], x[1], x[3]) if paged else x


def pages_of_row(table: Tensor | None) -> int | None:
    """Pages of a batch row, or None without a page table."""
    return None if table is None else table.shape[1]


def cache_sizes(shape: tuple[int, ...], table_length: int | None) -> tuple[int, int, int]:
    """Number of pages, tokens of a page, tokens of a batch row; `table_length`: pages of a row."""
    if table_length is None:
        return 0, 0, shape[2]
    return shape[0], shape[2], shape[2] * table_length


def kernels(
    source: str,
    config: DecodeConfig | MlaConfig,
    device: int,
    defines: dict[str, int],
) -> tuple[Kernel, ...]:
    """The kernels that a call launches in order; the second only where CTAs may share a row."""
    return launch.kernels(source, device, entries_of(source, config), tuple(defines.items()))


def entries_of(source: str, config: DecodeConfig | MlaConfig) -> tuple[Entry, Entry]:
    """The attention kernel and the combine kernel."""
    first = Entry(source, config.threads, config.shared_bytes)
    return first, Entry("combine", config.merge_threads)


def kernel_defines(
    config: DecodeConfig, dtype: torch.dtype, *, paged: bool = False, kv_lens: bool = True,
    ranges: bool = False, softcap: int = 0, alibi: bool = False, sinks: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The macros of a kernel."""
    return config.defines() | {
        "IS_BF16": int(dtype == torch.bfloat16),
        "IS_PAGED": int(paged),
        "HAS_KV_LENS": int(kv_lens),
        "HAS_RANGES": int(ranges),
        "HAS_SOFTCAP": int(softcap),
        "HAS_ALIBI": int(alibi),
        "HAS_SINKS": int(sinks),
    }


_family = functools.lru_cache(maxsize=256)(DecodeFamily)
_plan = functools.lru_cache(maxsize=1024)(DecodePlan)
