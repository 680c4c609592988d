"""Decoding over a latent cache on sm_90a: one kv head, values that are part of its keys.

As with `decode`, all depends on shapes alone, and little of it on how many keys there are.
"""

from __future__ import annotations

import functools

from torch import Tensor

from fa_ops.backends.hopper.configs import MlaConfig, mla_config
from fa_ops.backends.hopper.decode import (
    SplitKvPlan,
    SplitKvTemplate,
    cache_sizes,
    check_tiles,
    gathering_error,
    geometry_of,
    processors,
    split_kv_plan,
    without_keys,
)
from fa_ops.backends.hopper.decode import split_cache_error as split_kv_error
from fa_ops.backends.hopper.kernel_plan import UNBOUNDED, Geometry, ScoreUnits
from fa_ops.backends.hopper.runtime.launch import TensorMap, address
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import Call, Run, values_in_keys
from fa_ops.call.options import Operands

HEAD_DIM, VALUE_DIM = MlaConfig.head_dim, MlaConfig.value_dim
_LAYOUT = struct_layout("mla.cu", "MlaParams")
_SCALARS, _STRIDES = _LAYOUT.packer("B", "scale_log2"), _LAYOUT.packer("q_strides", "k_strides")
# maps and addresses, the scalars, addresses, the strides
_PARAMS = _LAYOUT.packer(packed=("B:scale_log2", "q_strides:k_strides"))


def cache_error(call: Call) -> str | None:
    """Why the kernel cannot attend such a cache, or None."""
    (q, k, v), t, o = call[:3], call.operands, call.options
    heads = k.shape[2 if call.is_paged else 1]
    if heads != 1 or not values_in_keys(k, v):
        return (
            f"has head dims {HEAD_DIM} and {VALUE_DIM} only where one head's keys hold its values"
        )
    if o.num_splits or o.batch_invariant or t.unified_max is not None:
        return "has no num_splits, batch_invariant and unified_max for latent caches"
    if o.window_left >= 0 or o.window_right >= 0 or o.softcap > 0:
        return "has no window and no softcap for latent caches"
    if not (t.attn_mask is t.alibi_slopes is t.sinks is t.key_ranges is None):
        return "has no mask, ALiBi, sinks or key_ranges for latent caches"
    if o.dropout_p > 0:
        return f"has no dropout for latent caches, got {o.dropout_p}"
    reason = split_kv_error(call, {"query": q, "key_cache": k})
    return reason or gathering_error(call, {"key_cache": k})


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, 512) laid out (B, Sq, Hq, 512), and lse (B, Hq, Sq)."""
    return plan_of(call).run(*call[:4])


def prepare(call: Call) -> Run:
    """What runs cached calls with the geometry of this one."""
    return plan_of(call).run


def plan_of(call: Call) -> MlaPlan:
    """The plan of a call that reads its cache."""
    return split_kv_plan(MlaPlan, geometry_of(call))


class MlaTemplate(SplitKvTemplate):
    """The part of a plan that does not depend on the number and strides of keys."""

    def __init__(self, g: Geometry) -> None:
        (B, Hq, Sq, D), (pages, _, page, _), _ = g.shapes
        config = mla_config(page)
        head_blocks = -(-Hq // config.rows)
        heads = -(-Hq // head_blocks)
        tokens = min(config.rows // heads, Sq)
        blocks = head_blocks * -(-Sq // tokens)
        self.width = width = _group_width(blocks, processors(g.device))
        self.items = -(-blocks // width)
        self.whole_tiles = 2 + 2 * ((tokens * heads + 32) // 64)  # as in the kernel
        q_map = TensorMap(g.dtype, g.shapes[0], g.strides[0], tokens, heads=heads)
        super().__init__(g, config, q_map, _PARAMS)
        right = 0 if g.is_causal and Sq > 1 else UNBOUNDED
        self._before_capacity = B, Hq, Sq
        self._after_capacity = (
            *(tokens, heads, head_blocks, width, self.items, right),
            *(page, pages, g.table[1] if g.table else 0),
            ScoreUnits.of(D, g.scale, 0.0).log2,
        )

    def scalars(self, capacity: int) -> bytes:
        """The packed scalars; `capacity`: keys that a batch row has room for."""
        return _SCALARS.pack(*self._before_capacity, capacity, *self._after_capacity)


class MlaPlan(SplitKvPlan):
    """Few queries against a latent cache; values are the keys' first features."""

    def configure(self, g: Geometry) -> None:
        """The template, the kernels, and the keys that a batch row has room for."""
        self.template = template = _template(without_keys(g))
        *_, self.capacity = cache_sizes(g.shapes[1], g.table and g.table[0])
        B = g.shapes[0][0]
        check_tiles(B, template.items, self.capacity)
        items, groups = B * template.items, template.ctas // template.width
        is_short = template.has_short_rows(items, groups, self.capacity, template.whole_tiles)
        self.kernels = template.kernels[: 1 if is_short else 2]

    def map_tensors(self, g: Geometry) -> None:
        """Keys, which hold the values."""
        self.k_map = self.template.cache_map(g.dtype, g.shapes[1], g.strides[1])

    def pack_parameters(self, g: Geometry) -> None:
        """Sizes and factors, and strides."""
        self.scalars = self.template.scalars(self.capacity)
        self.strides = _STRIDES.pack(*g.strides[0][:3], *g.strides[1][:3])

    def take_params(
        self, inputs: tuple[int, int, int], kv_lens: int, outputs: tuple[int, ...],
        tensors: Operands,
    ) -> tuple[tuple, object]:  # fmt: skip
        """The filled in parameters of a call; nothing else must live until the launch."""
        template, (q, k, _) = self.template, inputs
        params = template.params.take(
            template.q_map[q], self.k_map[k], *outputs,
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


_template = functools.lru_cache(maxsize=256)(MlaTemplate)
