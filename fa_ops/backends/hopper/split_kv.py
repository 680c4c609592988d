"""Common parts of `decode` and `mla`: few queries against a long cache, split over keys.

Everything here depends on shapes alone: lengths and pages are read on the device, so a captured
CUDA graph serves every length. A cache that grows has another shape in every step: a family of
calls shares all that does not depend on how many keys there are.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fa_ops.backends.hopper import launch
from fa_ops.backends.hopper.decode_configs import DecodeConfig, MlaConfig
from fa_ops.backends.hopper.launch import (
    PROMOTE_128B,
    Entry,
    Params,
    TensorMap,
    current_device,
    current_stream,
    empty,
    launch_dependent,
    processors,
)
from fa_ops.backends.hopper.problem import MISALIGNED, copy_keys, limit_error, tma_aligned
from fa_ops.call import CacheTensors
from fa_ops.geometry import rows_are_aligned
from fa_ops.types import ALIGNMENT, Cache, Spec, default_scale, dtype_name

if TYPE_CHECKING:
    from fa_ops.backends.hopper.append import Appender

_MAX_GATHERED_BYTES = 16 << 32  # offsets count units of 16 bytes in 32 bits


def cache_error(
    q: Tensor, k: Tensor, cache: Cache, spec: Spec, tensors: dict[str, Tensor],
    dtypes: tuple[torch.dtype, ...] = (),
) -> str | None:  # fmt: skip
    """Why no kernel here can attend a cache in this memory, or None.

    `tensors` are read by TMA. `dtypes`: of caches that have another dtype than the query.
    """
    table = cache.page_table
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype not in (q.dtype, *dtypes):
        found = f"{dtype_name(k.dtype)} for queries of {dtype_name(q.dtype)}"
        return f"decodes bfloat16 and float16 caches, got {found}"
    if cache.key is not None or cache.rotary_cos is not None:
        return "does not write to caches"
    table_length = None if table is None else table.shape[1]
    *_, keys = cache_sizes(by_head(k.shape, table is not None), table_length)
    reason = limit_error(default_scale(spec, q.shape[-1]), q.shape[2], keys)
    if reason:
        return reason
    for name, t in tensors.items():
        if not rows_are_aligned(t):
            return f"needs rows at multiples of {ALIGNMENT} bytes, {name} has strides {t.stride()}"
    return None


def gathering_error(cache: Cache, tensors: dict[str, Tensor]) -> str | None:
    """Why the kernels cannot gather keys from these tensors of pages, or None."""
    for name, t in tensors.items():
        if cache.page_table is None or copy_keys(t.shape[1]) > 1:
            continue
        size = t.shape[0] * t.stride(0) * t.itemsize
        if size > _MAX_GATHERED_BYTES:
            return (
                f"gathers keys from at most {_MAX_GATHERED_BYTES} bytes of pages of "
                f"{t.shape[1]} keys, {name} has {size}"
            )
    return None


class SplitKvFamily:
    """The part of a plan that does not depend on the number and strides of keys and values."""

    def __init__(
        self, kind: str, config: DecodeConfig | MlaConfig, defines: dict[str, int],
        q_map: TensorMap, out_shape: tuple[int, int, int, int], dtype: torch.dtype, device: int,
        params: struct.Struct, options: tuple,
    ) -> None:  # fmt: skip
        B, Hq, Sq, Dv = out_shape
        self.device, self.block_n, self.options = device, config.block_n, options
        self.ctas = processors(device)
        self.grid = self.ctas, 1
        entries = entries_of(kind, config)
        self.kernels = launch.kernels(kind, device, entries, tuple(defines.items()))
        self.q_map = q_map
        # made of shape and strides; every byte is read once, so an L2 promotion to 256 bytes would
        # cost bandwidth
        self.cache_map = functools.partial(TensorMap, rows=config.copy_keys, promotion=PROMOTE_128B)
        self.out = out_shape, (Sq * Hq * Dv, Dv, Hq * Dv, 1), dtype
        self.lse = out_shape[:3], (Hq * Sq, Sq, 1), torch.float32
        # partial sums and statistics of each CTA's first and last work item, then lse if the call
        # does not return it (a returned lse is a tensor of its own: it would keep the workspace)
        rows = 2 * self.ctas * config.rows
        self.stats_offset = rows * config.value_dim * config.partial_bytes
        self.lse_offset = self.stats_offset + rows * config.stats_per_row * 8
        self.workspace = (self.lse_offset + B * Hq * Sq * 4,), (1,), torch.uint8
        self.params = Params(params)

    def has_short_rows(self, items: int, groups: int, capacity: int, whole_tiles: int) -> bool:
        """Whether no row is shared by CTAs, as its keys are few; the kernels use the same rule.

        `groups` of CTAs attend `items`, each of which has at most `capacity` keys.
        """
        tiles = -(-capacity // self.block_n)
        return tiles <= 1 or -(-items // groups) * tiles <= whole_tiles


class SplitKvPlan:
    """The part of a call that depends on its geometry only, not on addresses or values.

    Subclasses set `family` and `kernels`, of which the second merges the rows that CTAs share.
    """

    family: SplitKvFamily
    kernels: tuple[launch.Kernel, ...]

    def take_params(
        self, inputs: tuple[int, int, int], kv_lens: int, outputs: tuple[int, ...],
        tensors: CacheTensors,
    ) -> tuple[tuple, object]:  # fmt: skip
        """The filled in parameters of a call, and what must live until the launch.

        `inputs` are the addresses of query, key and value; `kv_lens` that of the lengths that the
        kernels read; `outputs` those of out, lse, partial sums and their statistics.
        """
        raise NotImplementedError

    def plan_of(self, q: Tensor, k: Tensor, v: Tensor) -> SplitKvPlan:
        """The plan of the same call with other tensors."""
        raise NotImplementedError

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: CacheTensors, with_lse: bool = True,
        appender: Appender | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """out and lse, which is None unless asked for.

        `appender` is launched before: what it writes for this call alone is in the same workspace.
        """
        family = self.family
        if current_device() != family.device:
            with torch.cuda.device(family.device):
                return self.run(q, k, v, tensors, with_lse, appender)
        q_at, k_at, v_at = inputs = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_at | k_at | v_at) & MISALIGNED:
            if appender is not None:
                q, kv_lens = appender.run(q, k, v, tensors)
                tensors = tensors._replace(kv_lens=kv_lens)
            q, k, v = map(tma_aligned, (q, k, v))
            return self.plan_of(q, k, v).run(q, k, v, tensors, with_lse)
        stream = current_stream(family.device)
        out = empty(*family.out)
        workspace = empty(*(family.workspace if appender is None else appender.workspace))
        lse = empty(*family.lse) if with_lse else None
        at = workspace.data_ptr()
        lse_at = at + family.lse_offset if lse is None else lse.data_ptr()
        outputs = out.data_ptr(), lse_at, at, at + family.stats_offset
        kv_lens = 0 if tensors.kv_lens is None else tensors.kv_lens.data_ptr()
        if appender is not None:
            q_at, kv_lens = appender.launch(*inputs, kv_lens, at, tensors, stream)
            inputs = q_at, k_at, v_at
        params, kept = self.take_params(inputs, kv_lens, outputs, tensors)
        launch_dependent(self.kernels, family.grid, stream, params[1])
        family.params.give_back(params)
        del kept
        return out, lse


def check_tiles(B: int, items: int, keys: int) -> None:
    """Raise NotImplementedError where the kernels could not count all tiles in 32 bits.

    `items` are the work items of a batch row, each with all its keys.
    """
    if B * items * keys >= 2**37:
        raise NotImplementedError(f"counts tiles in 32 bits, got {B} x {items} x {keys} keys")


def by_head(x: tuple[int, ...], paged: bool) -> tuple[int, ...]:
    """Sizes or strides of a cache with heads before tokens; in pages the tokens come first."""
    return (x[0], x[2], x[1], x[3]) if paged else x


def cache_sizes(shape: tuple[int, ...], table_length: int | None) -> tuple[int, int, int]:
    """Number of pages, tokens of a page, tokens of a batch row; `table_length`: pages of a row."""
    if table_length is None:
        return 0, 0, shape[2]
    return shape[0], shape[2], shape[2] * table_length


def table_layout(table: Tensor | None) -> tuple[int, int] | None:
    """Pages of a batch row and the stride between rows, or None without a page table."""
    return None if table is None else (table.shape[1], table.stride(0))


def entries_of(kind: str, config: DecodeConfig | MlaConfig) -> tuple[Entry, Entry]:
    """The attention kernel and the combine kernel."""
    first = Entry(kind, config.threads, config.shared_bytes)
    return first, Entry("combine", config.merge_threads)
