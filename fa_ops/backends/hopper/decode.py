"""Decoding on sm_90a: few queries against a long cache. One kernel reads each key once, another
merges the splits of a row that several CTAs share, as in Flash-Decoding."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa_ops.backends.hopper.decode_configs import DecodeConfig, decode_config
from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import TensorMap
from fa_ops.backends.hopper.problem import (
    UNBOUNDED,
    ScoreUnits,
    head_dim_error,
    softcap_kind,
    window_sides,
)
from fa_ops.backends.hopper.split_kv import (
    SplitKvFamily,
    SplitKvPlan,
    by_head,
    cache_sizes,
    check_tiles,
    gathering_error,
    processors,
    table_layout,
)
from fa_ops.backends.hopper.split_kv import cache_error as split_kv_error
from fa_ops.call import CACHED, CacheTensors, Call, Run
from fa_ops.geometry import queries_of_kv_head
from fa_ops.types import MAX_DECODING_QUERIES, Cache, Spec, scales_of

_LAYOUT = struct_layout("decode.cu", "DecodeParams")
_SCALARS, _STRIDES = _LAYOUT.packer("B", "width"), _LAYOUT.packer("q_strides", "v_strides")
# maps and addresses, the scalars, addresses, the strides
_PARAMS = _LAYOUT.packer(packed=("B:width", "q_strides:v_strides"))
_E4M3 = torch.float8_e4m3fn
MAX_ROWS = MAX_DECODING_QUERIES  # of a KV head, of all its query heads


def cache_error(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> str | None:
    """Why the kernel cannot attend such a cache, or None."""
    rows = queries_of_kv_head(q, k, cache)
    if rows > MAX_ROWS:
        return f"attends {MAX_ROWS} queries of a kv head at once, got {rows}"
    reason = memory_error(q, k, v, cache, spec, (_E4M3,))
    return reason or gathering_error(cache, {"key_cache": k, "value_cache": v})


def memory_error(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec, dtypes: tuple[torch.dtype, ...] = ()
) -> str | None:
    """The part of `cache_error` that does not depend on the number of queries.

    `dtypes`: of caches that have another dtype than the query.
    """
    D, Dv = q.shape[-1], v.shape[-1]
    if reason := head_dim_error(D, Dv):
        return reason
    if cache.num_splits or cache.batch_invariant:
        return "cuts keys as the device is filled best, without num_splits and batch_invariant"
    if cache.unified_max is not None:
        return "has no unified maximum"
    tensors = {"query": q, "key_cache": k, "value_cache": v}
    return split_kv_error(q, k, cache, spec, tensors, dtypes)


def forward(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    tensors = Call(CACHED, q, k, v, spec, cache=cache).tensors
    return _plan_of(q, k, v, *_options(cache, spec)).run(q, k, v, tensors)


def prepare(call: Call) -> Run:
    """What runs cached calls with the geometry of this one."""
    return plan_of(call).run


def plan_of(call: Call) -> DecodePlan:
    """The plan of a call that reads its cache."""
    return _plan_of(call.query, call.key, call.value, *_options(call.cache, call.spec))


def _options(cache: Cache, spec: Spec) -> tuple:
    """The options that a plan depends on in addition to query, key and value."""
    slopes = spec.alibi_slopes
    return (
        (spec.is_causal, spec.scale, spec.window_left, spec.window_right, spec.softcap),
        table_layout(cache.page_table),
        spec.kv_lens is not None,
        None if slopes is None else slopes.dim(),
        spec.sinks is not None,
        None if spec.key_ranges is None else spec.key_ranges.shape[0],
        scales_of(cache.k_scale, cache.v_scale, cache.page_table is not None),
    )


def _plan_of(q: Tensor, k: Tensor, v: Tensor, *options) -> DecodePlan:
    shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
    return _plan(q.dtype, k.dtype == _E4M3, q.device.index, shapes, strides, options)


class DecodeFamily(SplitKvFamily):
    """The part of a plan that does not depend on the number and strides of keys and values."""

    def __init__(
        self, dtype, is_e4m3, device, q_shape, q_strides, Hkv, Dv, pages, page, width, options
    ):
        scalar_options, table, has_lens, slopes, has_sinks, ranges, scales = options
        B, Hq, Sq, D = q_shape
        group = Hq // Hkv
        causal, scale, left, right, softcap = scalar_options
        left, right, _ = window_sides(causal, left, right)
        if Sq == 1:
            right = UNBOUNDED  # a single query is at the position of the last key
        units = ScoreUnits.of(D, scale, softcap)
        config = decode_config(D, Dv, group * Sq, page, is_e4m3, scales)
        defines = kernel_defines(
            config,
            dtype,
            paged=table is not None,
            kv_lens=has_lens,
            ranges=ranges is not None,
            softcap=softcap_kind(softcap),
            alibi=slopes is not None,
            sinks=has_sinks,
            shares_tokens=width > 1,
        )
        q_map = TensorMap(dtype, q_shape, q_strides, Sq, heads=group)
        super().__init__(
            "decode", config, defines, q_map, (B, Hq, Sq, Dv), dtype, device, _PARAMS, options
        )
        self.config, self.cache_dtype = config, torch.uint8 if is_e4m3 else dtype
        self.groups = self.ctas // width
        self.items = B * Hkv // width
        self.idle = -self.items % self.groups  # as in the kernel
        self.has_uneven_items = has_lens or ranges is not None
        self._before_capacity = B, Hq, Hkv, group, Sq
        self._after_capacity = (
            *(Dv, self.idle, left, right, page, pages, 0 if table is None else table[1]),
            Hq if slopes == 2 else 0,
            2 if ranges and ranges > 1 else 0,
            *(units.inside_tanh, units.log2, 1.0 / units.accumulator, D, width),
        )

    def scalars(self, capacity: int) -> bytes:
        """The packed scalars; `capacity`: keys that a batch row has room for."""
        return _SCALARS.pack(*self._before_capacity, capacity, *self._after_capacity)

    def map_of(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
        """The maps of keys or values."""
        config = self.config
        return self.cache_map(
            self.cache_dtype, shape, strides, whole_rows=config.whole_rows,
            row_bytes=config.row_bytes(shape[3]),
        )  # fmt: skip

    def shares_rows(self, capacity: int) -> bool:
        """Whether CTAs may share a row; the kernel uses the same rule."""
        if self.has_short_rows(self.items, self.groups, capacity, self.config.whole_tiles):
            return False
        return self.has_uneven_items or self.idle * -(-capacity // self.block_n) > self.groups


class DecodePlan(SplitKvPlan):
    """The part of a call that depends on its geometry only, not on addresses or values."""

    def __init__(self, dtype, is_e4m3, device, shapes, strides, options):
        q_shape, key_shape, (*_, Dv) = shapes
        table = options[1]
        paged = table is not None
        q_strides, k_strides, v_strides = strides
        k_strides, v_strides = by_head(k_strides, paged), by_head(v_strides, paged)
        k_shape = by_head(key_shape, paged)
        pages, page, capacity = cache_sizes(k_shape, table and table[0])
        B, Hkv = q_shape[0], k_shape[1]
        check_tiles(B, Hkv, capacity)
        self.family = family = _family(
            dtype, is_e4m3, device, q_shape, q_strides, Hkv, Dv, pages, page,
            group_width(B, k_shape, k_strides, processors(device), 1 if is_e4m3 else 2), options,
        )  # fmt: skip
        self.kernels = family.kernels[: 1 + family.shares_rows(capacity)]
        self.k_map = family.map_of(k_shape, k_strides)
        self.v_map = family.map_of((*k_shape[:3], Dv), v_strides)
        self.scalars = family.scalars(capacity)
        self.strides = _STRIDES.pack(*q_strides[:3], *k_strides[:3], *v_strides[:3])

    def plan_of(self, q: Tensor, k: Tensor, v: Tensor) -> DecodePlan:
        """The plan of the same call with other tensors."""
        return _plan_of(q, k, v, *self.family.options)

    def take_params(
        self, inputs: tuple[int, int, int], kv_lens: int, outputs: tuple[int, ...],
        tensors: CacheTensors,
    ) -> tuple[tuple, object]:  # fmt: skip
        """The filled in parameters of a call, and what must live until the launch."""
        _, table, ranges, slopes, sinks, _, _, k_scale, v_scale, *_ = tensors
        if ranges is not None:
            ranges = ranges.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        if slopes is not None:
            slopes = slopes.contiguous()
        if k_scale is not None:
            k_scale = k_scale.contiguous()
        if v_scale is not None:
            v_scale = v_scale.contiguous()
        family, (q, k, v) = self.family, inputs
        kept = ranges, table, sinks, slopes, k_scale, v_scale
        params = family.params.take(
            family.q_map[q], self.k_map[k], self.v_map[v], *outputs, kv_lens,
            *[0 if t is None else t.data_ptr() for t in kept], self.scalars, *inputs, self.strides,
        )  # fmt: skip
        return params, kept


def group_width(
    B: int, k_shape: tuple[int, ...], k_strides: tuple[int, ...], ctas: int, size: int = 2
) -> int:
    """The number of CTAs that attend the same tokens at about the same time, one per kv head.

    With 64 features, and heads between tokens in memory, one head alone reads every eighth line of
    128 bytes: on an H200 groups of 8 CTAs are 5 to 7 % faster there. With more features they gain
    1 % or nothing, and calls of few rows take up to 4 % longer. `size`: bytes of a feature.
    """
    _, Hkv, _, D = k_shape
    has_lines = D * size in (64, 128) and k_strides[1] < k_strides[2]
    return 8 if has_lines and Hkv % 8 == 0 and ctas <= 2 * B * Hkv and ctas >= 8 else 1


def kernel_defines(
    config: DecodeConfig, dtype: torch.dtype, *, paged: bool = False, kv_lens: bool = True,
    ranges: bool = False, softcap: int = 0, alibi: bool = False, sinks: bool = False,
    shares_tokens: bool = False,
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
        "SHARES_TOKENS": int(shares_tokens),
    }


_family = functools.lru_cache(maxsize=256)(DecodeFamily)
_plan = functools.lru_cache(maxsize=1024)(DecodePlan)
