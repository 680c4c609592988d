"""fa::select_tokens: the keys with the largest scores of a lightning indexer, as lists.

Scores are computed in tiles of keys, and each tile joins the best entries of those before it: no
tensor has an element for each pair of a query and a key. It is made of torch's operations, which
run on every device, and never waits for one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import selected_checks
from fa_ops.call.checks import lse_dtype
from fa_ops.ops import library

SELECT = torch.ops.fa.select_tokens.default
PART = {"cpu": 2**21, "cuda": 2**27}  # products of heads that are computed at a time
MIN_TILE = 1024  # keys of a tile, if the lists are not longer
_NOTHING = -(2**63)  # the rank of a key that the query may not attend
_LAST = 2**32 - 1


def _select(
    q: Tensor, k: Tensor, weights: Tensor, count: int, is_causal: bool = True, *,
    scale: float | None = None, kv_lens: Tensor | None = None, key_ranges: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    selected_checks.selection(q, k, weights, count, scale, kv_lens, key_ranges, attn_mask)
    (B, H, Sq, D), Sk = q.shape, k.shape[2]
    lists = torch.full((B, 1, Sq, count), -1, dtype=torch.int32, device=q.device)
    if not lists.numel() or not Sk:
        return lists
    scale = D**-0.5 if scale is None else scale
    low, high = _bounds(q, k, is_causal, kv_lens, key_ranges)
    tile = min(Sk, max(MIN_TILE, count))
    limit = PART.get(q.device.type, PART["cuda"])
    rows = min(B, max(1, limit // (H * tile)))
    queries = min(Sq, max(1, limit // (rows * H * tile)))
    with library.without_autocast():
        for b in range(0, B, rows):
            for i in range(0, Sq, queries):
                at = slice(b, b + rows), slice(i, i + queries)
                end = Sk if not is_causal else min(Sk, i + queries + Sk - Sq)
                mask = None if attn_mask is None else _of_part(attn_mask, *at)
                part = _part(
                    q[at[0], :, at[1]], k[at[0], 0, : max(0, end)], weights[at[0], :, at[1]],
                    count, scale, tile, [_of_part(x[:, None], *at) for x in (low, high)], mask,
                )  # fmt: skip
                lists[at[0], 0, at[1], : part.shape[2]] = part
    return lists


def _bounds(
    q: Tensor, k: Tensor, is_causal: bool, kv_lens: Tensor | None, key_ranges: Tensor | None
) -> tuple[Tensor, Tensor]:
    """int64 (B or 1, Sq, 1): each query may attend the keys from the first on, below the other."""
    i, Sk = torch.arange(q.shape[2], device=q.device)[None], k.shape[2]
    low, high = torch.zeros_like(i), torch.full_like(i, Sk)
    if kv_lens is not None:
        high = kv_lens.long().clamp(0, Sk)[:, None].expand(-1, q.shape[2])
    if is_causal:
        high = high.minimum(high - q.shape[2] + 1 + i)
    if key_ranges is not None:
        low = low.maximum(key_ranges[:, 0, :, 0])
        high = high.minimum(key_ranges[:, 0, :, 1])
    return low.unsqueeze(-1), high.unsqueeze(-1)


def _of_part(x: Tensor, rows: slice, queries: slice) -> Tensor:
    """x (B or 1, 1, Sq or 1, X) of a part, (rows or 1, queries or 1, X)."""
    x = x[:, 0] if x.shape[0] == 1 else x[rows, 0]
    return x if x.shape[1] == 1 else x[:, queries]


def _part(
    q: Tensor, k: Tensor, weights: Tensor, count: int, scale: float, tile: int,
    bounds: list[Tensor], mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """The lists (B, Sq, up to count) of q (B, H, Sq, D), k (B, Sk, D) and weights (B, H, Sq)."""
    (B, H, Sq, _), (low, high), wide = q.shape, bounds, lse_dtype(q.dtype)
    q = q.transpose(1, 2).to(wide).flatten(1, 2)
    weights = weights.transpose(1, 2).to(wide).unsqueeze(2)  # (B, Sq, 1, H)
    best = torch.empty((B, Sq, 0), dtype=torch.int64, device=q.device)
    for start in range(0, k.shape[1], tile):
        keys = k[:, start : start + tile].to(wide)
        products = (q @ keys.transpose(1, 2)).mul_(scale).relu_().unflatten(1, (Sq, H))
        ranks = _ranks((weights @ products).squeeze(2), start)
        j = torch.arange(start, start + keys.shape[1], device=q.device)
        keep = (j >= low) & (j < high)
        if mask is not None:
            keep = keep & mask[..., start : start + keys.shape[1]]
        best = torch.cat((best, ranks.masked_fill_(~keep, _NOTHING)), 2)
        best = best.topk(min(count, best.shape[2]), 2).values
    tokens = (_LAST - (best & _LAST)).int()
    return tokens.masked_fill_(best == _NOTHING, -1)


def _ranks(scores: Tensor, start: int) -> Tensor:
    """int64 numbers in the order of the scores, those of equal scores in falling order of keys.

    A float's bits are in the order of the floats if the bits below the sign of negative ones are
    inverted. In the lower half of a rank is the key, counted backwards.
    """
    scores = scores.float() + 0.0  # which makes -0.0 equal to 0.0
    scores = scores.masked_fill_(scores.isnan(), torch.inf)
    bits = scores.view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    j = torch.arange(start, start + scores.shape[2], device=scores.device)
    return (bits.long() << 32) + (_LAST - j)


def _fake(q, k, weights, count, is_causal=True, *, scale=None, kv_lens=None, key_ranges=None,
          attn_mask=None):  # fmt: skip
    selected_checks.selection(q, k, weights, count, scale, kv_lens, key_ranges, attn_mask)
    return q.new_empty((q.shape[0], 1, q.shape[2], count), dtype=torch.int32)


library.register("select_tokens", _select, _fake)
