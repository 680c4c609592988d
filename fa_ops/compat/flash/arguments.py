"""Arguments as flash-attn takes them: numbers of any kind, layouts, strides, windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_ops.argument_types import need_int, need_number, need_tensor
from fa_ops.types import dtype_name

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
