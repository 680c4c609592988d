"""Facts that follow from the shapes, strides and addresses of a call's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_ops.types import (
    ALIGNMENT,
    MAX_DECODING_QUERIES,
    MAX_SHORT_GRADIENT_ROWS,
    MAX_SHORT_HEAD_DIM,
    MAX_SHORT_ROWS,
    MIN_DECODING_KEYS,
    Cache,
    Spec,
)

if TYPE_CHECKING:
    from torch import Tensor


def is_decoding(Sq: int, Sk: int, spec: Spec) -> bool:
    """Whether a dense call has so few queries and so many keys that splitting the keys pays.

    With `key_ranges`, all queries of a row must share one range.
    """
    return (
        Sq <= MAX_DECODING_QUERIES
        and Sk >= MIN_DECODING_KEYS
        and spec.attn_mask is None
        and (spec.key_ranges is None or spec.key_ranges.shape[1:3] == (1, 1))
        and spec.dropout_p == 0.0
    )


def has_short_rows(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> bool:
    """Whether a program can hold whole rows of the scores of a dense call in 16 bits, and a bias.

    The bias is a float mask, and the call has no other option than a scale.
    """
    mask = spec.attn_mask
    if mask is None or not mask.is_floating_point() or q.element_size() != 2:
        return False
    if spec.is_causal or spec.dropout_p > 0 or spec.softcap > 0:
        return False
    others = spec.alibi_slopes, spec.sinks, spec.kv_lens, spec.key_ranges, spec.mask_blocks
    if any(x is not None for x in others) or max(spec.window_left, spec.window_right) >= 0:
        return False
    if spec.scale is not None and abs(spec.scale) > 1e30:  # scores may exceed float32
        return False
    widest, longest = max(q.shape[3], v.shape[3]), max(q.shape[2], k.shape[2])
    return widest <= MAX_SHORT_HEAD_DIM and longest <= MAX_SHORT_ROWS


def has_short_gradients(q: Tensor, k: Tensor, v: Tensor, spec: Spec, mask_grad: bool) -> bool:
    """Whether a program can hold all scores of a head and their gradients, as `has_short_rows`.

    The gradient of a bias that the batch shares is a sum over the batch, of any other one it is
    that of the scores.
    """
    if not has_short_rows(q, k, v, spec) or q.shape[1] != k.shape[1]:
        return False
    if max(q.shape[2], k.shape[2]) > MAX_SHORT_GRADIENT_ROWS:
        return False
    shape, full = spec.attn_mask.shape, (*q.shape[:3], k.shape[2])
    return not mask_grad or len(shape) < 4 or shape[0] == 1 or shape == full


def is_prefill(q: Tensor) -> bool:
    """Whether a cached call has so many queries (B, H, S, D) that tiles of queries fill the device.

    Each tile then attends all keys of its row; a kernel that cannot split keys is slower with less.
    """
    B, H, S, _ = q.shape
    return S >= 64 and B * H * S >= 4096


def queries_of_kv_head(q: Tensor, k: Tensor, cache: Cache) -> int:
    """Queries (B, Hq, Sq, D) of a batch row that share a kv head of a cache."""
    heads = k.shape[1] if cache.page_table is None else k.shape[2]
    return q.shape[1] // heads * q.shape[2]


def heads_of_tile(group: int) -> int:
    """The number of heads of a group that share 64 rows of a tile.

    A tile has whole queries, and this number leaves the fewest rows unused.
    """
    divisors = [n for n in range(2, min(group, 64) + 1) if group % n == 0]
    return max(divisors, key=lambda n: (64 // n * n, n), default=1)


def rows_are_aligned(*tensors: Tensor) -> bool:
    """Whether every row of the last dimension is contiguous and starts at a multiple of 16 bytes.

    False for expanded tensors too, whose strides of 0 TMA does not accept.
    """
    for t in tensors:
        *strides, last = t.stride()
        if last != 1 or t.data_ptr() % ALIGNMENT:
            return False
        bits, unit = 0, ALIGNMENT // t.element_size()
        for stride in strides:
            bits |= stride
        if bits % unit or 0 in strides:
            pairs = zip(t.shape, strides)
            if any(size > 1 and (stride % unit or not stride) for size, stride in pairs):
                return False
    return True


def values_in_keys(k: Tensor, v: Tensor) -> bool:
    """Whether the values are the first features of the keys, in the same memory."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
