"""What the functions of FlashAttention 2 and 3 have in common: arguments, packings, caches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.backends import rotary
from fa_ops.backends.dropout import keep_mask
from fa_ops.call import cache_checks, cache_memory, checks
from fa_ops.call.checks import FP8
from fa_ops.call.options import dtype_name
from fa_ops.call.python_types import need_int, need_number, need_tensor
from fa_ops.functions import varlen as varlen_pages
from fa_ops.functions.kv_cache import attention_with_kv_cache
from fa_ops.ops import library
from fa_ops.ops.autograd import undifferentiable

# Arguments as flash-attn takes them: numbers of any kind, layouts, strides, windows.

DENSE, PACKED, PAGES = "(B, S, H, D)", "(T, H, D)", "(pages, page_size, H, D)"
_BORDERS = "pass the first token of each sequence, then the number of tokens"
Window = tuple[int | None, int | None]


def scalar(value: object) -> object:
    """A Python number in place of a bool, a 0-d tensor or a NumPy number."""
    if isinstance(value, float):
        return float(value)  # of NumPy's subclass
    # of Dynamo too, which cannot look for attributes of sizes
    if not isinstance(value, int) and getattr(value, "ndim", None) == 0:
        value = value.item()
    return int(value) if isinstance(value, bool) else value


def flag(name: str, value: object) -> bool:
    """A bool in place of 0, 1 or one of their kinds. Raises TypeError for anything else."""
    value = scalar(value)
    if not isinstance(value, int | float) or value not in (0, 1):
        raise TypeError(f"{name} must be a bool, got {value!r}: pass True or False")
    return bool(value)


def number(name: str, value: object) -> float:
    """A Python number in place of a 0-d tensor or a NumPy number; TypeError for anything else."""
    return need_number(name, scalar(value))


def count(name: str, value: object, kind: str = "an int") -> int:
    """A Python int in place of a 0-d tensor or a NumPy integer; TypeError for anything else."""
    return need_int(name, scalar(value), kind)


def sides(window: object) -> Window | None:
    """The sides of a window, -1 for unbounded ones; None if both are unbounded."""
    if isinstance(window, Tensor) and window.shape == (2,):
        if need_tensor("window_size", window).is_meta:
            raise ValueError("window_size must hold numbers, got a Tensor on meta: pass two ints")
        window = window.tolist()
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(
            f"window_size must be a pair (left, right), got {window!r}: (-1, -1) is unbounded"
        )
    left, right = (
        -1 if side is None else max(count("a side of window_size", side), -1) for side in window
    )
    return None if left == right == -1 else (left, right)


def shape(layout: str, **tensors: Tensor) -> None:
    """Raise TypeError or ValueError unless the tensors have as many dimensions as the layout."""
    dims = layout.count(",") + 1
    for name, t in tensors.items():
        if need_tensor(name, t).dim() != dims:
            remedy = checks.leading_dims_remedy(name, t, dims)
            if layout == DENSE and t.dim() == 3:
                remedy += ", or packed tokens to a varlen function"
            raise ValueError(f"{name} must have shape {layout}, got {tuple(t.shape)}: {remedy}")


def parts(name: str, packed: Tensor, count: int, layout: str) -> tuple[Tensor, ...]:
    """The tensors that are stacked along the third dimension from the end."""
    if need_tensor(name, packed).dim() != layout.count(",") + 1 or packed.shape[-3] != count:
        raise ValueError(
            f"{name} must have shape {layout}, got {tuple(packed.shape)}: pass "
            f"torch.stack([{', '.join('qkv'[-count:])}], -3)"
        )
    return packed.unbind(-3)


def score_options(softmax_scale, causal, window_size, softcap) -> dict:
    """The options of scores and masks, which all functions have in common."""
    scale = None if softmax_scale is None else number("softmax_scale", softmax_scale)
    if type(scale) is float and not math.isfinite(scale):
        raise ValueError(f"softmax_scale must be finite, got {scale}: None is 1 / sqrt(D)")
    return {
        "is_causal": flag("causal", causal), "scale": scale,
        "window": sides(window_size), "softcap": number("softcap", softcap),
    }  # fmt: skip


def unit_stride(x: Tensor) -> Tensor:
    """The tensor, copied if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def heads_first(x: Tensor | None) -> Tensor | None:
    """``(B, H, S, D)`` for ``(B, S, H, D)``, copied if the last dimension is not contiguous."""
    return None if x is None else unit_stride(x).transpose(1, 2)


def lengths(name: str, lens: object, rows: int, room: int, device: torch.device) -> Tensor:
    """Lengths (B,) from a tensor, from one number for all rows, or from None for the capacity."""
    lens = room if lens is None else lens
    if isinstance(lens, Tensor):
        lens = lens.int() if lens.dtype == torch.int64 and lens.dim() == 0 else lens
        need_int32(name, lens)
        return lens.expand(rows) if lens.dim() < 2 and lens.numel() == 1 else lens
    lens = count(name, lens, "a Tensor or an int")
    if not 0 <= lens <= room:
        raise ValueError(
            f"{name} must lie within the cache's {room} keys, got {lens}: pass a longer cache, or "
            "fewer keys"
        )
    return torch.full((rows,), lens, dtype=torch.int32, device=device)


def of_sequences(name: str, x: Tensor | None, count: int) -> Tensor | None:
    """One int32 number for each sequence. Raises TypeError or ValueError for another tensor."""
    if x is None:
        return None
    need_int32(name, x)
    has_shape(name, x, (count,), f"pass a number for each of the {count} sequences")
    return x


def need_int32(name: str, x: Tensor) -> Tensor:
    """The tensor. Raises TypeError for anything but an int32 tensor."""
    if need_tensor(name, x).dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {dtype_name(x.dtype)}: pass {name}.int()")
    return x


def check_list(name: str, ends: Tensor) -> None:
    """Raise TypeError or ValueError unless these may be cumulative lengths, int32 (B + 1,)."""
    if need_int32(name, ends).dim() != 1 or not ends.shape[0]:
        raise ValueError(f"{name} must have shape (B + 1,), got {tuple(ends.shape)}: {_BORDERS}")


def has_shape(name: str, x: Tensor, expected: tuple[int, ...], remedy: str) -> None:
    """Raise ValueError unless the tensor has this shape; can be traced with symbolic sizes."""
    if tuple(x.shape) != tuple(expected):
        found = tuple(x.shape)
        raise ValueError(f"{name} must have shape {tuple(expected)}, got {found}: {remedy}")


def buffers(**pairs: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless each buffer for a result is None or has the result's shape."""
    for name, (buffer, expected) in pairs.items():
        if buffer is not None:
            remedy = f"pass {name}.new_empty{tuple(expected)}"
            has_shape(name, need_tensor(name, buffer), expected, remedy)


def infinite_where_empty(lse: Tensor) -> Tensor:
    """The lse of FlashAttention 2, which is +inf in rows that attend no key, for ours."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def finite_or_empty(lse: Tensor) -> Tensor:
    """Our lse, which is -inf in rows that attend no key, for that of FlashAttention 2."""
    return lse.masked_fill(lse == float("inf"), float("-inf"))


# Packed sequences that do not follow one another, and chunks of them, as a packing.
#
# A packing has two tensors of boundaries, so what lies between two segments must belong to a
# sequence too. It has 0 keys, which gives 0 to its queries.

# cu_seqlens of queries and keys, and the lengths of the longest sequences, or None
Borders = tuple[Tensor, Tensor, int | None, int | None]
Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # first query, queries, first key, keys of each


def packing_of(
    parts: Parts, longest_q: int | None, longest_k: int | None
) -> tuple[Borders, Tensor]:
    """The packing of segments that are in order, and the numbers of keys of its sequences."""
    first_q, queries, first_k, keys = parts
    ends_q, ends_k = (
        torch.stack((first, first + n), -1).flatten().int()
        for first, n in ((first_q, queries), (first_k, keys))
    )
    kv_lens = torch.stack((keys, torch.zeros_like(keys)), -1).flatten()[:-1].int()
    if longest_q is not None and len(kv_lens) and tracing.can_read(ends_q):
        longest_q = max(longest_q, int(ends_q.diff().max()))  # also of what lies between
    return (ends_q, ends_k, longest_q, longest_k), kv_lens


def check_packing(packing: Borders, tokens: tuple[int, int]) -> None:
    """Raise ValueError or TypeError for boundaries that errors about segments would not name.

    `tokens` are the numbers of queries and keys. Their values are checked on the CPU only.
    """
    for name, ends, most in zip(("cu_seqlens_q", "cu_seqlens_k"), packing[:2], tokens):
        check_list(name, ends)
        has_shape(name, ends, (len(packing[0]),), "both are of the same sequences")
        if tracing.can_read(ends):
            checks.cu_seqlens(name, ends, most)


def check_longest(name: str, longest: int | None, lens: Tensor) -> None:
    """Raise ValueError for an upper bound that is negative or, on the CPU, below a length."""
    if longest is not None and longest < 0:
        raise ValueError(f"{name} must not be negative, got {longest}: pass the longest length")
    if tracing.can_read(lens):
        checks.max_seqlen(name, longest, lens, "queries" if name.endswith("q") else "keys")


def used_parts(
    ends_q: Tensor, ends_k: Tensor, queries: Tensor | None, keys: Tensor | None
) -> Parts:
    """The segments of sequences of which the first queries and keys are used; ``None``: all."""
    counts = (
        ends.diff() if n is None else torch.minimum(n, ends.diff()).clamp(min=0)
        for ends, n in ((ends_q, queries), (ends_k, keys))
    )
    queries, keys = counts
    return ends_q[:-1], queries, ends_k[:-1], keys


def chunk_parts(parts: Parts, size: int, longest: int) -> Parts:
    """The segments of which each query attends only keys of its own chunk of positions.

    Chunk ``c`` has the positions from ``c * size`` on. A segment of n queries lies in at most
    ``ceil(n / size) + 1`` chunks; the number of segments follows from `longest`, the upper bound.
    """
    first_q, queries, first_k, keys = (x.long()[:, None] for x in parts)
    before = keys - queries  # the position of the first query
    number = torch.arange(-(-longest // size) + 1, device=keys.device)
    start = (before.div(size, rounding_mode="floor") + number) * size
    zero = torch.zeros_like(keys)
    query, query_end, key, key_end = (
        torch.minimum(torch.maximum(x, zero), n)
        for x, n in (
            (start - before, queries), (start + size - before, queries), (start, keys),
            (start + size, keys),
        )
    )  # fmt: skip
    found = first_q + query, query_end - query, first_k + key, key_end - key
    return tuple(x.flatten() for x in found)


def chunk_ranges(Sq: int, Sk: int, size: int, device: torch.device) -> Tensor:
    """The key ranges (1, 1, Sq, 2) of queries that attend their own chunk of positions."""
    positions = torch.arange(Sk - Sq, Sk, device=device, dtype=torch.int32)
    start = positions.div(size, rounding_mode="floor") * size
    return torch.stack((start, start + size), -1)[None, None]


# The weights that flash-attn returns with dropout, for tests of what was dropped.

_MULTIPLE = 128  # lengths are rounded up to multiples of it


def signed_weights(
    q: Tensor, k: Tensor, seed: Tensor, lens: tuple[Tensor | int, Tensor | int], options: dict
) -> Tensor:
    """Softmax before its normalisation; dropped weights are negative, masked ones 0.

    Args:
        q: ``(B, Sq, Hq, D)``.
        k: ``(B, Sk, Hkv, D)``.
        seed: that of the call.
        lens: the numbers of queries and of keys, of each row ``(B, 1, 1, 1)`` or of all.
        options: those of fa_ops.attention.

    Returns:
        ``(B, Hq, Sq, Sk)`` in q's dtype with both lengths rounded up to multiples of 128:
        ``exp(score - m)``, where ``m`` is the largest score of the row.
    """
    (B, Sq, Hq, D), (Sk, Hkv), dtype = q.shape, k.shape[1:3], q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (x.detach().to(wide).transpose(1, 2) for x in (q, k))
    scale = D**-0.5 if options["scale"] is None else options["scale"]
    scores = q @ k.repeat_interleave(Hq // Hkv, 1).mT * scale
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    rows = torch.arange(Sq, device=q.device)[:, None]
    columns = torch.arange(Sk, device=q.device)
    distance = columns - rows - (lens[1] - lens[0])
    slopes = options["alibi_slopes"]
    if slopes is not None:
        scores = scores - slopes.reshape(-1, Hq, 1, 1) * distance.abs()
    visible = _visible(distance, options) & (rows < lens[0]) & (columns < lens[1])
    scores = scores.masked_fill(~visible, float("-inf"))
    largest = scores.amax(-1, keepdim=True) if Sk else scores.new_zeros(B, Hq, Sq, 1)
    weights = (scores - largest.masked_fill(largest == float("-inf"), 0.0)).exp()
    stream = torch.arange(B * Hq, device=q.device).view(B, Hq, 1, 1)
    keep = keep_mask(seed, stream, rows, columns, options["dropout_p"])
    weights = torch.where(keep, weights, -weights).to(dtype)
    return torch.nn.functional.pad(weights, (0, -Sk % _MULTIPLE, 0, -Sq % _MULTIPLE))


def _visible(distance: Tensor, options: dict) -> Tensor:
    """Which keys at these distances from the queries' positions are attended."""
    left, right = options["window"] or (-1, -1)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible & (distance <= 0) if options["is_causal"] else visible


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
                raise ValueError(
                    f"rotary_cos has {found} positions, but {needed} are needed: pass a row for "
                    "each"
                )

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
        checks.same_dtype(q, name, x, "q")
        expected = k.shape[0], *cache.shape[2:]
        has_shape(name, x, expected, "pass k's tokens, with the heads and features of the cache")
    has_memory = not (tracing.is_compiling() or tracing.in_functorch()) and all(
        type(t) in tracing.PLAIN and library.is_strided(t) for t in (caches.k, caches.v)
    )
    if has_memory:
        has_pages = caches.table.shape[1] > 1  # one is a row of a contiguous cache
        checks.need(not cache_memory.caches_share_memory(caches.k, caches.v, has_pages),
                    "v_cache shares memory with k_cache, and both are written to: pass "
                    "v_cache.clone()")  # fmt: skip
    checks.integers(k, "cu_seqlens_k_new", ends)
    has_shape("cu_seqlens_k_new", ends, (len(caches.table) + 1,), _BORDERS)
    checks.integers(k, "cache_seqlens", lens)
    of_rows = "pass the number of keys that each sequence has in the cache"
    has_shape("cache_seqlens", lens, (len(caches.table),), of_rows)
    if not tracing.can_read(ends, lens, caches.table):
        return
    checks.cu_seqlens("cu_seqlens_k_new", ends, k.shape[0])
    size = caches.k.shape[1]
    for b, (held, new) in enumerate(zip(lens.tolist(), ends.diff().tolist())):
        if held < 0 or held + new > caches.room:
            raise ValueError(
                f"cache_seqlens[{b}] is {held}, which with {new} new keys is not within the "
                f"cache's {caches.room}: pass a longer cache, or fewer keys"
            )
        used = caches.table[b, : -(-(held + new) // size)]
        if ((used < 0) | (used >= len(caches.k))).any():
            raise ValueError(
                f"page_table[{b}] has pages {used.tolist()}, but there are {len(caches.k)}: the "
                "first one is 0"
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
        remedy = "pass a row of the cache for each row of q"
        has_shape("cache_batch_idx", batch_idx, (rows,), remedy)
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
            raise ValueError(
                f"cache_batch_idx has {wrong}, but {name} has {rows} rows: the first one is 0"
            )


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
        raise ValueError(
            "rotary_cos and rotary_sin must be given together, got one: pass both, or neither"
        )
    for name, t in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if t is not None:
            need_tensor(name, t)
    if rotary_cos is not None and k is None:
        raise ValueError(
            "k must be given with rotary_cos, which rotates queries and new keys, got None: pass k "
            "and v"
        )
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(
            f"k and v must be given together, got {given} without {missing}: pass both, or neither"
        )
    if k is not None and cache_seqlens is None:
        raise ValueError(
            "cache_seqlens must be given with k, which is written behind them, got None: pass the "
            "number of keys that the cache holds"
        )


def _is_bounded(window: Window | None, unbounded: tuple[int, int]) -> bool:
    return window is not None and any(0 <= side < end for side, end in zip(window, unbounded))
