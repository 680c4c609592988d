"""The operator on the whole sequence with some of the heads, after an all-to-all of heads.

Masks are those of the whole sequence, and so every option works as on one device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import api
from fa_ops.backends.dropout import seed_of_heads
from fa_ops.distributed.dropout import agreed_seed
from fa_ops.distributed.masks import Mask
from fa_ops.distributed.requests import Options
from fa_ops.distributed.ulysses import HeadSplit


def attend(
    q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, mask: Mask, options: Options
) -> tuple[Tensor, Tensor]:
    """out and lse of these heads."""
    heads = split.query_heads(split.members.rank)
    given = _options(options, heads, q.device)
    if options.cu_seqlens is not None:
        return _documents(q, k, v, mask, options, given)
    ranges = options.key_ranges
    if ranges is not None:
        given["key_ranges"] = (ranges[:, heads] if ranges.shape[1] > 1 else ranges).to(q.device)
    if not options.dropout_p:
        return api.attention(q, k, v, **given)
    return _with_dropout(q, k, v, split, options, given)


def of_heads(
    sinks: Tensor | None, slopes: Tensor | None, heads: slice
) -> tuple[Tensor | None, Tensor | None]:
    """Sinks and ALiBi slopes of some query heads."""
    sinks = None if sinks is None else sinks[heads]
    return sinks, None if slopes is None else slopes[..., heads]


def _options(options: Options, heads: slice, device: torch.device) -> dict:
    sinks, slopes = of_heads(options.sinks, options.alibi_slopes, heads)
    lens = options.kv_lens
    return {
        "is_causal": options.is_causal,
        "scale": options.scale,
        "window": options.window,
        "softcap": options.softcap,
        "alibi_slopes": slopes,
        "sinks": sinks,
        "kv_lens": None if lens is None else lens.to(device),
        "return_lse": True,
        "deterministic": options.deterministic,
        "backend": options.backend,
    }


def _documents(q, k, v, mask: Mask, options: Options, given: dict) -> tuple[Tensor, Tensor]:
    """Packed sequences, as `attention_varlen` attends them on one device."""
    ends = options.cu_seqlens.to(q.device)
    lengths = mask.cu_seqlens.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = api.attention_varlen(*packed, ends, ends, longest, longest, **given)
    return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, options: Options, given: dict
) -> tuple[Tensor, Tensor]:
    """One call for each row of the batch, whose heads then follow one another in the hash."""
    seed = agreed_seed(q, options.dropout_p, (split.members,), split.timeout)
    first, results = split.query_heads(split.members.rank).start, []
    left, right = options.sides
    for b in range(q.shape[0]):
        row = slice(b, b + 1)
        of_row = {n: _row(x, row) for n, x in given.items() if n not in ("window", "return_lse")}
        results.append(torch.ops.fa.attention_with_lse(
            q[row], k[row], v[row], None, options.dropout_p, window_left=left, window_right=right,
            dropout_seed=seed_of_heads(seed, b * split.Hq + first), **of_row,
        ))  # fmt: skip
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _row(x: object, row: slice) -> object:
    """What belongs to a row of the batch: kv_lens, and masks that differ between rows."""
    per_row = isinstance(x, Tensor) and (x.dtype == torch.int32 or x.dim() == 2) and len(x) > 1
    return x[row] if per_row else x
