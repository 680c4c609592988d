"""Caches of keys and values in flash-attn's layouts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import checks, tracing
from fa_ops.argument_types import need_tensor
from fa_ops.compat.flash.arguments import (
    DENSE,
    PAGES,
    Window,
    flag,
    has_shape,
    need_int32,
    of_sequences,
    shape,
    unit_stride,
)
from fa_ops.compat.flash.rotation import Rotation
from fa_ops.kv_cache import attention_with_kv_cache


class Caches(NamedTuple):
    """Caches ``(B, Hkv, S, D)``, or pages with their table, and the keys that a row can hold."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    room: int

    def in_pages(self) -> Caches:
        """The same with a table. A contiguous cache is one page for each row."""
        if self.table is not None:
            return self
        rows = torch.arange(self.k.shape[0], dtype=torch.int32, device=self.k.device)
        return Caches(self.k.transpose(1, 2), self.v.transpose(1, 2), rows[:, None], self.room)


def caches_of(
    rows: int, k: Tensor, v: Tensor, name: str, table: Tensor | None, batch_idx: Tensor | None
) -> Caches:
    """The caches of a call with this number of rows, without gradients.

    `name` is that of the table. A cache whose rows are chosen by index, or which has more rows than
    the call, is read as pages of which each row has one: nothing is copied.
    """
    shape(PAGES if table is not None else DENSE, k_cache=k, v_cache=v)
    k, v = without_gradient(k), without_gradient(v)
    if batch_idx is not None:
        checks.integers(k, "cache_batch_idx", need_tensor("cache_batch_idx", batch_idx))
        has_shape("cache_batch_idx", batch_idx, (rows,))
    if table is not None:
        shape("(B, max_pages)", **{name: table})
        need_int32(name, table)
        if batch_idx is not None:
            table = _rows_of(table, name, batch_idx)
        return Caches(k, v, table, table.shape[1] * k.shape[1])
    if batch_idx is None and k.shape[0] > rows and v.shape[0] == k.shape[0]:
        batch_idx = torch.arange(rows, dtype=torch.int32, device=k.device)
    if batch_idx is None:
        return Caches(k.transpose(1, 2), v.transpose(1, 2), None, k.shape[1])
    _check_rows(batch_idx, "k_cache", k.shape[0])
    return Caches(k, v, batch_idx[:, None], k.shape[1])


def _rows_of(table: Tensor, name: str, batch_idx: Tensor) -> Tensor:
    """The rows of a table of pages; on a GPU, rows that it lacks name pages that do not exist."""
    rows = table.shape[0]
    _check_rows(batch_idx, name, rows)
    if not rows:
        return table.new_full((len(batch_idx), table.shape[1]), -1)
    found = table[batch_idx.clamp(0, rows - 1).long()]
    exists = (batch_idx >= 0) & (batch_idx < rows)
    return torch.where(exists[:, None], found, -1)


def _check_rows(batch_idx: Tensor, name: str, rows: int) -> None:
    """Raise ValueError for rows that a tensor does not have, on the CPU."""
    if tracing.can_read(batch_idx) and len(batch_idx):
        low, high = int(batch_idx.min()), int(batch_idx.max())
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            raise ValueError(f"cache_batch_idx has {wrong}, but {name} has {rows} rows")


def attend_rows(
    q: Tensor, caches: Caches, new: tuple[Tensor, Tensor] | None, lens: Tensor,
    leftpad: Tensor | None, rotation: Rotation | None, offsets: Tensor | None, options: dict,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of q ``(B, Sq, Hq, D)`` over caches, to which new keys are appended.

    Args:
        new: keys ``(B, Sn, Hkv, D)`` and values ``(B, Sn, Hkv, Dv)``.
        lens: int32 ``(B,)``, the number of keys of each row before the call.
        leftpad: int32 ``(B,)``, the index of the first key of each row.
        offsets: ``(B,)``, the positions of the first new keys; ``None``: ``lens``.
        options: those of :func:`fa_ops.attention_with_kv_cache`.

    Returns:
        out ``(B, Sq, Hq, Dv)`` and lse ``(B, Hq, Sq)``, or None in its place.
    """
    k, v = new or (None, None)
    if rotation is not None:
        alike = q.shape[1] == k.shape[1] and (q.shape[1] == 1 or rotation.queries_differ)
        if alike and offsets is None:
            cos, sin, interleaved, _ = rotation
            options = options | {"rotary_cos": cos, "rotary_sin": sin,
                                 "rotary_interleaved": interleaved}  # fmt: skip
        else:
            q, k = rotation.of_rows(q, k, lens if offsets is None else offsets)
    if leftpad is not None:
        options = options | {"key_ranges": ranges_from(q, leftpad, q.shape[0])}
    if k is not None:
        options = options | {"key": k.transpose(1, 2), "value": v.transpose(1, 2)}
    result = attention_with_kv_cache(
        q.transpose(1, 2), caches.k, caches.v, lens, caches.table, return_lse=with_lse, **options
    )
    out, lse = result if with_lse else (result, None)
    return out.transpose(1, 2), lse


def new_keys(k: Tensor | None, v: Tensor | None, layout: str) -> tuple[Tensor, Tensor] | None:
    """The new keys and values in this layout, without gradients."""
    if k is None:
        return None
    shape(layout, k=k, v=v)
    return unit_stride(without_gradient(k)), unit_stride(without_gradient(v))


def rotation_of(
    cos: Tensor | None, sin: Tensor | None, interleaved: object, options: dict,
    unbounded: tuple[int, int], chunk: int = 0,
) -> Rotation | None:  # fmt: skip
    """The rotary embedding of a call with these options and chunks of this length.

    `unbounded` are the widths from which on flash-attn ignores the left and right side of a window.
    """
    interleaved = flag("rotary_interleaved", interleaved)
    if cos is None:
        return None
    is_local = chunk > 0 or _is_bounded(options["window"], unbounded)
    return Rotation(cos, sin, interleaved, options["is_causal"] or is_local)


def without_gradient(x: Tensor) -> Tensor:
    """The tensor, detached if it requires grad, which attention over a cache refuses."""
    return x.detach() if x.requires_grad else x


def ranges_from(q: Tensor, leftpad: Tensor, rows: int) -> Tensor:
    """Key ranges from the end of the padding to the end of each of the rows."""
    leftpad = of_sequences("cache_leftpad", leftpad, rows)
    checks.same_device(q, "cache_leftpad", leftpad, "q")
    ends = torch.full_like(leftpad, torch.iinfo(torch.int32).max)
    return torch.stack([leftpad, ends], -1)[:, None, None]


def check_new(k, v, rotary_cos, rotary_sin, cache_seqlens) -> None:
    """Raise ValueError for arguments that lack another."""
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together")
    for name, t in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if t is not None:
            need_tensor(name, t)
    if rotary_cos is not None and k is None:
        raise ValueError("k must be given with rotary_cos, which rotates both queries and new keys")
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k, which is written behind them")


def _is_bounded(window: Window | None, unbounded: tuple[int, int]) -> bool:
    return window is not None and any(0 <= side < end for side, end in zip(window, unbounded))
