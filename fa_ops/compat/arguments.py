"""Arguments as flash-attn takes them: numbers, layouts, windows, used parts, and its weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.backends.dropout import keep_mask
from fa_ops.call import checks
from fa_ops.call.options import Packing, dtype_name
from fa_ops.call.python_types import need_int, need_number, need_tensor

# Arguments as flash-attn takes them: numbers of any kind, layouts, strides, windows.

DENSE, PACKED, PAGES = "(B, S, H, D)", "(T, H, D)", "(pages, page_size, H, D)"
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
        raise TypeError(f"{name} must be a bool, got {value!r}")
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
            raise ValueError("window_size must hold numbers, got a Tensor on meta")
        window = window.tolist()
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window!r}")
    left, right = (
        -1 if side is None else max(count("a side of window_size", side), -1) for side in window
    )
    return None if left == right == -1 else (left, right)


def shape(layout: str, **tensors: Tensor) -> None:
    """Raise TypeError or ValueError unless the tensors have as many dimensions as the layout."""
    for name, t in tensors.items():
        if need_tensor(name, t).dim() != layout.count(",") + 1:
            raise ValueError(f"{name} must have shape {layout}, got {tuple(t.shape)}")


def parts(name: str, packed: Tensor, count: int, layout: str) -> tuple[Tensor, ...]:
    """The tensors that are stacked along the third dimension from the end."""
    shape(layout, **{name: packed})
    if packed.shape[-3] != count:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(packed.shape)}")
    return packed.unbind(-3)


def score_options(softmax_scale, causal, window_size, softcap) -> dict:
    """The options of scores and masks, which all functions have in common."""
    scale = None if softmax_scale is None else number("softmax_scale", softmax_scale)
    if type(scale) is float and not math.isfinite(scale):
        raise ValueError(f"softmax_scale must be finite, got {scale}")
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
        raise ValueError(f"{name} must lie within the cache's {room} keys, got {lens}")
    return torch.full((rows,), lens, dtype=torch.int32, device=device)


def of_sequences(name: str, x: Tensor | None, count: int) -> Tensor | None:
    """One int32 number for each sequence. Raises TypeError or ValueError for another tensor."""
    if x is None:
        return None
    need_int32(name, x)
    has_shape(name, x, (count,))
    return x


def need_int32(name: str, x: Tensor) -> Tensor:
    """The tensor. Raises TypeError for anything but an int32 tensor."""
    if need_tensor(name, x).dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {dtype_name(x.dtype)}")
    return x


def check_list(name: str, ends: Tensor) -> None:
    """Raise TypeError or ValueError unless these may be cumulative lengths, int32 (B + 1,)."""
    if need_int32(name, ends).dim() != 1 or not ends.shape[0]:
        raise ValueError(f"{name} must have shape (B + 1,), got {tuple(ends.shape)}")


def has_shape(name: str, x: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has this shape; can be traced with symbolic sizes."""
    if tuple(x.shape) != tuple(expected):
        raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(x.shape)}")


def buffers(**pairs: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless each buffer for a result is None or has the result's shape."""
    for name, (buffer, expected) in pairs.items():
        if buffer is not None:
            has_shape(name, need_tensor(name, buffer), expected)


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

Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # first query, queries, first key, keys of each


def packing_of(
    parts: Parts, longest_q: int | None, longest_k: int | None
) -> tuple[Packing, Tensor]:
    """The packing of segments that are in order, and the numbers of keys of its sequences."""
    first_q, queries, first_k, keys = parts
    ends_q, ends_k = (
        torch.stack((first, first + n), -1).flatten().int()
        for first, n in ((first_q, queries), (first_k, keys))
    )
    kv_lens = torch.stack((keys, torch.zeros_like(keys)), -1).flatten()[:-1].int()
    if longest_q is not None and len(kv_lens) and tracing.can_read(ends_q):
        longest_q = max(longest_q, int(ends_q.diff().max()))  # also of what lies between
    return Packing(ends_q, ends_k, longest_q, longest_k), kv_lens


def check(packing: Packing, tokens: tuple[int, int]) -> None:
    """Raise ValueError or TypeError for boundaries that errors about segments would not name.

    `tokens` are the numbers of queries and keys. Their values are checked on the CPU only.
    """
    for name, ends, most in zip(packing._fields, packing[:2], tokens):
        check_list(name, ends)
        has_shape(name, ends, (len(packing.cu_seqlens_q),))
        if tracing.can_read(ends):
            checks.cu_seqlens(name, ends, most)


def check_longest(name: str, longest: int | None, lens: Tensor) -> None:
    """Raise ValueError for an upper bound that is negative or, on the CPU, below a length."""
    if longest is not None and longest < 0:
        raise ValueError(f"{name} must not be negative, got {longest}")
    if tracing.can_read(lens):
        checks.max_seqlen(name, longest, lens, "queries" if name.endswith("q") else "keys")


def used(ends_q: Tensor, ends_k: Tensor, queries: Tensor | None, keys: Tensor | None) -> Parts:
    """The segments of sequences of which the first queries and keys are used; ``None``: all."""
    counts = (
        ends.diff() if n is None else torch.minimum(n, ends.diff()).clamp(min=0)
        for ends, n in ((ends_q, queries), (ends_k, keys))
    )
    queries, keys = counts
    return ends_q[:-1], queries, ends_k[:-1], keys


def chunks(parts: Parts, size: int, longest: int) -> Parts:
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
