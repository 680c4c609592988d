"""Decoding over a latent cache on sm_90a: one kv head, values that are part of its keys.

As with `decode`, all depends on shapes alone, and little of it on how many keys there are.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import MlaConfig, mla_config
from fa_ops.backends.hopper.decode import by_head, cache_sizes, kernels, pages_of_row
from fa_ops.backends.hopper.kernel_params import struct_layout
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
from fa_ops.backends.hopper.problem import FAR, ScoreUnits, copyable, limit_error
from fa_ops.call import CACHED, CacheTensors, Call, Run
from fa_ops.types import Cache, Spec, default_scale, rows_are_aligned, values_in_keys

HEAD_DIM, VALUE_DIM = 576, 512
_LAYOUT = struct_layout("mla_params.cuh", "MlaParams")
_SCALARS, _STRIDES = _LAYOUT.packer("B", "scale_log2"), _LAYOUT.packer("q_strides", "k_strides")
# maps and addresses, the scalars, addresses, the strides
_PARAMS = _LAYOUT.packer(packed=("B:scale_log2", "q_strides:k_strides"))


def has_dims(q: Tensor, v: Tensor) -> bool:
    """Whether the head dimensions are those of the kernel."""
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
    if spec.dropout_p > 0:
        return f"has no dropout for latent caches, got {spec.dropout_p}"
    table = cache.page_table
    *_, keys = cache_sizes(by_head(k.shape, table is not None), pages_of_row(table))
    reason = limit_error(default_scale(spec, HEAD_DIM), q.shape[2], keys)
    if reason:
        return reason
    for name, t in (("query", q), ("key_cache", k)):
        if not rows_are_aligned(t):
            return f"needs rows at multiples of 16 bytes, {name} has strides {t.stride()}"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, 512) laid out (B, Sq, Hq, 512), and lse (B, Hq, Sq)."""
    tensors = Call(CACHED, q, k, v, spec, cache=cache).tensors
    return _plan_of(q, k, *_options(cache, spec)).run(q, k, v, tensors)


def prepare(call: Call) -> Run:
    """What runs cached calls with the geometry of this one."""
    return _plan_of(call.query, call.key, *_options(call.cache, call.spec)).run


def _options(cache: Cache, spec: Spec) -> tuple:
    """What a plan depends on in addition to query and keys."""
    table = cache.page_table
    return (
        (spec.is_causal, spec.scale),
        None if table is None else (table.shape[1], table.stride(0)),
        spec.kv_lens is not None,
    )


def _plan_of(q: Tensor, k: Tensor, *options) -> MlaPlan:
    return _plan(q.dtype, q.device.index, (q.shape, k.shape), (q.stride(), k.stride()), options)


class MlaFamily:
    """The part of a plan that does not depend on the number and strides of keys."""

    def __init__(self, dtype, device, q_shape, q_strides, pages, page, options):
        (is_causal, scale), table, has_lens = self.options = options
        B, Hq, Sq, D = q_shape
        config = mla_config(page)
        self.device, self.block_n = device, config.block_n
        self.ctas = torch.cuda.get_device_properties(device).multi_processor_count
        head_blocks = -(-Hq // config.rows)
        heads = -(-Hq // head_blocks)
        tokens = min(config.rows // heads, Sq)
        blocks = head_blocks * -(-Sq // tokens)
        width = _width(blocks, self.ctas)
        self.units = -(-blocks // width)
        defines = kernel_defines(config, dtype, paged=table is not None, kv_lens=has_lens)
        self.kernels = kernels("mla", config, device, defines)
        self.of_q = TensorMap(dtype, q_shape, q_strides, tokens, heads=heads)
        self.cached = functools.partial(
            TensorMap, dtype, rows=config.copy_keys, promotion=PROMOTE_128B
        )
        self.out = (
            (B, Hq, Sq, VALUE_DIM),
            (Sq * Hq * VALUE_DIM, VALUE_DIM, Hq * VALUE_DIM, 1),
            dtype,
        )
        self.lse = (B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32
        # as in `decode`: sums, statistics, and an lse that is not returned
        rows = 2 * self.ctas * config.rows
        self.stats_at = rows * VALUE_DIM * 4
        self.lse_at = self.stats_at + rows * 8
        self.workspace = (self.lse_at + B * Hq * Sq * 4,), (1,), torch.uint8
        self.params = Params(_PARAMS)
        self._before = B, Hq, Sq
        self._behind = (
            *(tokens, heads, head_blocks, width, self.units, 0 if is_causal and Sq > 1 else FAR),
            *(page, pages, 0 if table is None else table[1]),
            ScoreUnits.of(D, scale, 0.0).log2,
        )

    def scalars(self, capacity: int) -> bytes:
        """The packed scalars; `capacity`: keys that a batch row has room for."""
        return _SCALARS.pack(*self._before, capacity, *self._behind)


class MlaPlan:
    """The part of a call that depends on its geometry only, not on addresses or values."""

    def __init__(self, dtype, device, shapes, strides, options):
        q_shape, key_shape = shapes
        q_strides, k_strides = strides
        paged = options[1] is not None
        k_shape = by_head(key_shape, paged)
        pages, page, capacity = cache_sizes(k_shape, options[1] and options[1][0])
        self.family = family = _family(dtype, device, q_shape, q_strides, pages, page, options)
        B, units = q_shape[0], family.units
        if B * units * capacity >= 2**37:
            raise NotImplementedError(
                f"counts tiles in 32 bits, got {B} x {units} x {capacity} keys"
            )
        self.kernels = family.kernels[: 1 + (capacity > family.block_n)]
        k_strides = by_head(k_strides, paged)
        self.of_k = family.cached(k_shape, k_strides)
        self.steps = _STRIDES.pack(*q_strides[:3], *k_strides[:3])
        self.scalars = family.scalars(capacity)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: CacheTensors, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse, which is None unless asked for. The values are the keys' first features."""
        family = self.family
        if current_device() != family.device:
            with torch.cuda.device(family.device):
                return self.run(q, k, v, tensors, with_lse)
        q_at, k_at = q.data_ptr(), k.data_ptr()
        if (q_at | k_at) & 15:
            q, k = map(copyable, (q, k))
            return _plan_of(q, k, *family.options).run(q, k, v, tensors, with_lse)
        out, workspace = empty(*family.out), empty(*family.workspace)
        lse = empty(*family.lse) if with_lse else None
        at = workspace.data_ptr()
        params = family.params.take(
            family.of_q.at(q_at), self.of_k.at(k_at), out.data_ptr(),
            at + family.lse_at if lse is None else lse.data_ptr(), at, at + family.stats_at,
            address(tensors.kv_lens), address(tensors.page_table),
            self.scalars, q_at, k_at, self.steps,
        )  # fmt: skip
        launch_early(self.kernels, family.ctas, current_stream(family.device), params[1])
        family.params.give_back(params)
        return out, lse


def _width(blocks: int, ctas: int) -> int:
    """The number of CTAs that process the blocks of a row concurrently.

    Most CTAs should have work. Among such widths the largest is best, because each tile of keys is
    then read from memory once for all of them.
    """

    def busy(width: int) -> float:
        return ctas // width * blocks / -(-blocks // width)

    return max(range(min(2, blocks), min(8, blocks, ctas) + 1), key=lambda w: (busy(w), w))


def kernel_defines(
    config: MlaConfig, dtype: torch.dtype, *, paged: bool = False, kv_lens: bool = True
) -> dict[str, int]:
    """The macros of a kernel."""
    return config.defines() | {
        "IS_BF16": int(dtype == torch.bfloat16),
        "IS_PAGED": int(paged),
        "HAS_KV_LENS": int(kv_lens),
    }


_family = functools.lru_cache(maxsize=256)(MlaFamily)
_plan = functools.lru_cache(maxsize=1024)(MlaPlan)
