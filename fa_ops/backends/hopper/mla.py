"""Decoding over a latent cache on sm_90a: one kv head, values that are part of its keys.

As with `decode`, all depends on shapes alone, and little of it on how many keys there are.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import MlaConfig, mla_config
from fa_ops.backends.hopper.decode import (
    SplitKvFamily,
    SplitKvPlan,
    by_head,
    cache_sizes,
    check_tiles,
    gathering_error,
    processors,
    table_layout,
)
from fa_ops.backends.hopper.decode import split_cache_error as split_kv_error
from fa_ops.backends.hopper.problem import UNBOUNDED, ScoreUnits
from fa_ops.backends.hopper.runtime.launch import TensorMap, address
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import CACHED, Call, Run
from fa_ops.call.options import Cache, Operands, Spec, values_in_keys

HEAD_DIM, VALUE_DIM = MlaConfig.head_dim, MlaConfig.value_dim
_LAYOUT = struct_layout("mla.cu", "MlaParams")
_SCALARS, _STRIDES = _LAYOUT.packer("B", "scale_log2"), _LAYOUT.packer("q_strides", "k_strides")
# maps and addresses, the scalars, addresses, the strides
_PARAMS = _LAYOUT.packer(packed=("B:scale_log2", "q_strides:k_strides"))


def cache_error(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> str | None:
    """Why the kernel cannot attend such a cache, or None."""
    heads = k.shape[1] if cache.page_table is None else k.shape[2]
    if heads != 1 or not values_in_keys(k, v):
        return (
            f"has head dims {HEAD_DIM} and {VALUE_DIM} only where one head's keys hold its values"
        )
    if cache.num_splits or cache.batch_invariant or cache.unified_max is not None:
        return "has no num_splits, batch_invariant and unified_max for latent caches"
    if spec.window_left >= 0 or spec.window_right >= 0 or spec.softcap > 0:
        return "has no window and no softcap for latent caches"
    if not (spec.attn_mask is spec.alibi_slopes is spec.sinks is spec.key_ranges is None):
        return "has no mask, ALiBi, sinks or key_ranges for latent caches"
    if spec.dropout_p > 0:
        return f"has no dropout for latent caches, got {spec.dropout_p}"
    reason = split_kv_error(q, k, cache, spec, {"query": q, "key_cache": k})
    return reason or gathering_error(cache, {"key_cache": k})


def forward(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, 512) laid out (B, Sq, Hq, 512), and lse (B, Hq, Sq)."""
    tensors = Call(CACHED, q, k, v, spec, cache=cache).tensors
    return _plan_of(q, k, *_options(cache, spec)).run(q, k, v, tensors)


def prepare(call: Call) -> Run:
    """What runs cached calls with the geometry of this one."""
    return plan_of(call).run


def plan_of(call: Call) -> MlaPlan:
    """The plan of a call that reads its cache."""
    return _plan_of(call.query, call.key, *_options(call.cache, call.spec))


def _options(cache: Cache, spec: Spec) -> tuple:
    """The options that a plan depends on in addition to query and keys."""
    table = table_layout(cache.page_table)
    return (spec.is_causal, spec.scale), table, spec.kv_lens is not None


def _plan_of(q: Tensor, k: Tensor, *options) -> MlaPlan:
    return _plan(q.dtype, q.device.index, (q.shape, k.shape), (q.stride(), k.stride()), options)


class MlaFamily(SplitKvFamily):
    """The part of a plan that does not depend on the number and strides of keys."""

    def __init__(self, dtype, device, q_shape, q_strides, pages, page, options):
        (is_causal, scale), table, has_lens = options
        B, Hq, Sq, D = q_shape
        config = mla_config(page)
        head_blocks = -(-Hq // config.rows)
        heads = -(-Hq // head_blocks)
        tokens = min(config.rows // heads, Sq)
        blocks = head_blocks * -(-Sq // tokens)
        self.width = width = _group_width(blocks, processors(device))
        self.items = -(-blocks // width)
        self.whole_tiles = 2 + 2 * ((tokens * heads + 32) // 64)  # as in the kernel
        defines = kernel_defines(config, dtype, paged=table is not None, kv_lens=has_lens)
        q_map = TensorMap(dtype, q_shape, q_strides, tokens, heads=heads)
        super().__init__(
            "mla", config, defines, q_map, (B, Hq, Sq, VALUE_DIM), dtype, device, _PARAMS, options
        )
        right = 0 if is_causal and Sq > 1 else UNBOUNDED
        self._before_capacity = B, Hq, Sq
        self._after_capacity = (
            *(tokens, heads, head_blocks, width, self.items, right),
            *(page, pages, 0 if table is None else table[1]),
            ScoreUnits.of(D, scale, 0.0).log2,
        )

    def scalars(self, capacity: int) -> bytes:
        """The packed scalars; `capacity`: keys that a batch row has room for."""
        return _SCALARS.pack(*self._before_capacity, capacity, *self._after_capacity)


class MlaPlan(SplitKvPlan):
    """The part of a call that depends on its geometry only; values are the keys' first features."""

    def __init__(self, dtype, device, shapes, strides, options):
        q_shape, key_shape = shapes
        table = options[1]
        q_strides, k_strides = strides[0], by_head(strides[1], table is not None)
        k_shape = by_head(key_shape, table is not None)
        pages, page, capacity = cache_sizes(k_shape, table and table[0])
        self.family = family = _family(dtype, device, q_shape, q_strides, pages, page, options)
        check_tiles(q_shape[0], family.items, capacity)
        items = q_shape[0] * family.items
        groups = family.ctas // family.width
        is_short = family.has_short_rows(items, groups, capacity, family.whole_tiles)
        self.kernels = family.kernels[: 1 if is_short else 2]
        self.k_map = family.cache_map(dtype, k_shape, k_strides)
        self.strides = _STRIDES.pack(*q_strides[:3], *k_strides[:3])
        self.scalars = family.scalars(capacity)

    def plan_of(self, q: Tensor, k: Tensor, v: Tensor) -> MlaPlan:
        """The plan of the same call with other tensors."""
        return _plan_of(q, k, *self.family.options)

    def take_params(
        self, inputs: tuple[int, int, int], kv_lens: int, outputs: tuple[int, ...],
        tensors: Operands,
    ) -> tuple[tuple, object]:  # fmt: skip
        """The filled in parameters of a call; nothing else must live until the launch."""
        family, (q, k, _) = self.family, inputs
        params = family.params.take(
            family.q_map[q], self.k_map[k], *outputs,
            kv_lens, address(tensors.page_table), self.scalars, q, k, self.strides,
        )  # fmt: skip
        return params, None


def _group_width(blocks: int, ctas: int) -> int:
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
