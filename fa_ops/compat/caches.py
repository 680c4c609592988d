"""flash-attn's calls over a cache: rotation, new keys, pages, and their checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.backends import rotary
from fa_ops.call import cache_checks, cache_memory, checks
from fa_ops.call.checks import FP8
from fa_ops.call.python_types import need_tensor
from fa_ops.compat.arguments import (
    DENSE,
    PACKED,
    PAGES,
    Window,
    flag,
    has_shape,
    need_int32,
    of_sequences,
    shape,
    unit_stride,
)
from fa_ops.functions import varlen as varlen_pages
from fa_ops.functions.kv_cache import attention_with_kv_cache
from fa_ops.ops import library
from fa_ops.ops.autograd import undifferentiable

# The positions at which flash-attn rotates queries and new keys of a cache.


class Rotation(NamedTuple):
    """The tables of a rotary embedding, ``(positions, R / 2)``, and how to use them."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    queries_differ: bool  # else all queries of a row are at one position, that of its first new key

    def of_rows(self, q: Tensor, k: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """q ``(B, Sq, Hq, D)`` and k ``(B, Sn, Hkv, D)``, rotated from positions offsets (B,) on.

        Tensors that do not fit are returned unchanged, because the operator refuses them.
        """
        cache_checks.rotary(q.transpose(1, 2), self.cos, self.sin)
        (B, Sq, _, D), Sn = q.shape, k.shape[1]
        if offsets.shape != (B,) or k.shape[0] != B or k.shape[3] != D:
            return q, k
        steps = Sq if self.queries_differ else 1
        self._check(offsets, max(Sn, steps))
        rows = (offsets[:, None] + torch.arange(n, device=q.device) for n in (steps, Sn))
        return tuple(
            self._rotated(x, positions.expand(-1, x.shape[1])) for x, positions in zip((q, k), rows)
        )

    def of_tokens(self, x: Tensor, ends: Tensor, offsets: Tensor, differ: bool) -> Tensor:
        """Packed tokens x ``(T, H, D)``, rotated from the positions offsets (B,) on."""
        cache_checks.rotary(x[None].transpose(1, 2), self.cos, self.sin)
        token = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True)
        inside = (sequence < len(ends) - 1) & (token >= ends[0])
        sequence = sequence.clamp(max=len(ends) - 2)
        positions = offsets[sequence] + (token - ends[sequence] if differ else 0)
        self._check(positions.where(inside, 0), 1)
        return self._rotated(x[None], positions[None])[0]

    def _check(self, offsets: Tensor, steps: int) -> None:
        if tracing.can_read(offsets) and len(offsets):
            needed, found = int(offsets.max()) + steps, self.cos.shape[0]
            if needed > found:
                raise ValueError(f"rotary_cos has {found} positions, but {needed} are needed")

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        positions = positions.clamp(0, self.cos.shape[0] - 1)
        x = rotary.rotated(x.transpose(1, 2), self.cos, self.sin, self.interleaved, positions)
        return x.transpose(1, 2)


# Packed queries over keys in pages, as flash-attn attends them.


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor, ends: Tensor,
    longest: int | None, options: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed queries over a paged cache.

    Args:
        q: ``(Tq, Hq, D)``.
        k: ``(pages, page_size, Hkv, D)``.
        v: ``(pages, page_size, Hkv, Dv)``.
        lens: int32 ``(B,)``, the number of keys of each sequence.
        table: int32 ``(B, max_pages)``.
        ends: int32 ``(B + 1,)``, the cumulative numbers of queries.
        longest: upper bound on the number of queries of a sequence; ``None``: ``Tq``.
        options: those of :func:`fa_ops.attention_with_kv_cache`.

    Returns:
        out ``(Tq, Hq, Dv)`` and lse ``(Hq, Tq)``, 0 and -inf for tokens outside every sequence.
        Backward raises NotImplementedError.
    """
    shape(PACKED, q=q)
    shape(PAGES, k=k, v=v)
    shape("(B, max_pages)", block_table=table)
    inputs = [unit_stride(x) for x in (q, k, v)]
    detached = (x.detach() for x in inputs)
    out, lse = varlen_pages.attend_pages(*detached, ends, lens, table, (longest, None), options)
    message = "attention over pages (block_table) has no backward pass"
    return undifferentiable(message, inputs, out, lse)


def attend_chunks(
    q: Tensor, caches: Caches, lens: Tensor, ends: Tensor, leftpad: Tensor | None, chunk: int,
    options: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same where a query attends only keys in its chunk of positions behind the padding.

    Each query is a row of its own, whose mask is a range of keys.
    """
    varlen_pages.check(q, caches.k, caches.v, ends, lens, caches.table)
    token = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    inside = (sequence < len(lens)) & (token >= ends[0])
    sequence = sequence.clamp(max=max(len(lens) - 1, 0))
    keys = lens[sequence]
    position = keys - (ends[sequence + 1] - token)
    pad = torch.zeros_like(keys) if leftpad is None else leftpad[sequence]
    first = (position - pad).div(chunk, rounding_mode="floor") * chunk + pad
    left, right = options["window"] or (-1, -1)
    right = 0 if options["is_causal"] else right
    lower, upper = torch.maximum(first, pad), first + chunk
    if left >= 0:
        lower = torch.maximum(lower, position - left)
    if right >= 0:
        upper = torch.minimum(upper, position + right + 1)
    ranges = torch.stack((lower, upper), -1).where(inside[:, None], 0)[:, None, None]
    names = "scale", "softcap", "num_splits"
    out, lse = attention_with_kv_cache(
        q[:, :, None], caches.k, caches.v, keys, caches.table[sequence],
        key_ranges=ranges.int().contiguous(), return_lse=True,
        **{name: options[name] for name in names},
    )  # fmt: skip
    return out[:, :, 0], lse[:, :, 0].T.contiguous()


# New keys and values of packed sequences, written after those that a cache holds.


def append(caches: Caches, k: Tensor, v: Tensor, ends: Tensor, lens: Tensor) -> None:
    """Write tokens into pages.

    Args:
        caches: in pages.
        k: ``(T, Hkv, D)``.
        v: ``(T, Hkv, Dv)``.
        ends: int32 ``(B + 1,)``, the cumulative numbers of new tokens.
        lens: int32 ``(B,)``, the number of keys of each row before.

    The arguments are those that `check_new` accepts. Tokens outside every sequence or beyond the
    cache are not written. Nothing is waited for.
    """
    if not k.shape[0]:
        return
    (pages, size), rows = caches.k.shape[:2], len(lens)
    token = torch.arange(k.shape[0], device=k.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    row = sequence.clamp(max=rows - 1)
    position = lens[row] + token - ends[row]
    column = (position // size).clamp(0, caches.table.shape[1] - 1)
    page = caches.table[row, column].long()
    valid = (sequence < rows) & (token >= ends[0]) & (position >= 0) & (position < caches.room)
    valid &= (page >= 0) & (page < pages)
    # A token that is not written repeats the write of the first one that is, or what is there.
    first = valid.int().argmax(0, keepdim=True)  # a tensor without dimensions would be read
    page = page.where(valid, page[first]).clamp(0, pages - 1)
    slot = (position % size).where(valid, (position % size)[first])
    for cache, new in ((caches.k, k), (caches.v, v)):
        if cache.dtype == FP8:  # numbers in 8 bits have few operations of torch
            new = new if new.dtype == FP8 else saturated(new)
            cache, new = cache.view(torch.uint8), new.view(torch.uint8)
        kept = torch.where(
            valid[first], new[first].to(cache.dtype), cache[page[first], slot[first]]
        )
        cache[page, slot] = torch.where(valid[:, None, None], new.to(cache.dtype), kept)


def check_appended(
    q: Tensor, caches: Caches, k: Tensor, v: Tensor, ends: Tensor, lens: Tensor
) -> None:
    """Raise ValueError or TypeError for tokens that `append` cannot write.

    On the CPU also for tokens beyond the cache.
    """
    shape(PACKED, k=k, v=v)
    for name, x, cache in (("k", k, caches.k), ("v", v, caches.v)):
        checks.same_device(q, name, x, "q")
        checks.need(x.dtype == q.dtype, "{} is {}, but q is {}", name, x.dtype, q.dtype,
                    error=TypeError)  # fmt: skip
        has_shape(name, x, (k.shape[0], *cache.shape[2:]))
    has_memory = not (tracing.is_compiling() or tracing.in_functorch()) and all(
        type(t) in tracing.PLAIN and library.is_strided(t) for t in (caches.k, caches.v)
    )
    if has_memory:
        has_pages = caches.table.shape[1] > 1  # one is a row of a contiguous cache
        checks.need(not cache_memory.caches_share_memory(caches.k, caches.v, has_pages),
                    "v_cache shares memory with k_cache, and both are written to")  # fmt: skip
    checks.integers(k, "cu_seqlens_k_new", ends)
    has_shape("cu_seqlens_k_new", ends, (len(caches.table) + 1,))
    checks.integers(k, "cache_seqlens", lens)
    has_shape("cache_seqlens", lens, (len(caches.table),))
    if not tracing.can_read(ends, lens, caches.table):
        return
    checks.cu_seqlens("cu_seqlens_k_new", ends, k.shape[0])
    size = caches.k.shape[1]
    for b, (held, new) in enumerate(zip(lens.tolist(), ends.diff().tolist())):
        if held < 0 or held + new > caches.room:
            raise ValueError(
                f"cache_seqlens[{b}] is {held}, which with {new} new keys is not within the "
                f"cache's {caches.room}"
            )
        used = caches.table[b, : -(-(held + new) // size)]
        if ((used < 0) | (used >= len(caches.k))).any():
            raise ValueError(
                f"page_table[{b}] has pages {used.tolist()}, but there are {len(caches.k)}"
            )


def saturated(x: Tensor) -> Tensor:
    """x rounded to e4m3; larger numbers become the largest."""
    largest = torch.finfo(FP8).max
    return x.clamp(-largest, largest).to(FP8)


# Caches of keys and values in flash-attn's layouts.


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
