"""The sequences of a problem with 8-bit products, packed: their results are those of its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.types import Quantization, Spec

GAP = 2  # tokens before the first sequence and after the last


def call(
    q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec, page: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend the last queries of each row, as many as are drawn, by attention_varlen.

    Args:
        page: keys of a page; 0: keys follow one another.
        seed: of the numbers of queries and of the order of pages.

    Returns:
        out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), unset where a query is left out, and which are
        there, bool (B, 1, Sq).
    """
    import fa_ops

    g = torch.Generator().manual_seed(seed)
    (B, Hq, Sq, _), Sk = q.shape, k.shape[2]
    lens = [Sk] * B if spec.kv_lens is None else spec.kv_lens.clamp(0, Sk).tolist()
    counts = [Sq, *torch.randint(0, Sq + 1, (B - 1,), generator=g).tolist()]
    gap = q.new_zeros(GAP, Hq, q.shape[3])
    query = _joined([gap, *(q[b, :, Sq - n :].transpose(0, 1) for b, n in enumerate(counts)), gap])
    ends_q = _ends(counts, q.device) + GAP
    if page:
        key, value, table = _pages(k, v, page, g)
        keys = {"kv_lens": torch.tensor(lens, dtype=torch.int32, device=q.device)}
        ends_k, keys = None, keys | {"page_table": table}
    else:
        key, value = (
            _joined([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lens)]) for x in (k, v)
        )
        ends_k, keys = _ends(lens, q.device), {}
    found, found_lse = fa_ops.attention_varlen(
        query, key, value, ends_q, ends_k, max(counts), Sk, is_causal=spec.is_causal,
        scale=spec.scale, window=(spec.window_left, spec.window_right), softcap=spec.softcap,
        sinks=spec.sinks, return_lse=True, backend=spec.backend, **keys,
        **dict(zip(how._fields, how[:3])),
    )  # fmt: skip
    assert not found[:GAP].any() and not found[len(found) - GAP :].any(), "tokens of no sequence"
    out, lse = found.new_empty(B, Hq, Sq, v.shape[3]), found_lse.new_empty(B, Hq, Sq)
    there = torch.zeros(B, 1, Sq, dtype=torch.bool, device=q.device)
    for b, (begin, n) in enumerate(zip(ends_q.tolist(), counts)):
        out[b, :, Sq - n :] = found[begin : begin + n].transpose(0, 1)
        lse[b, :, Sq - n :] = found_lse[:, begin : begin + n]
        there[b, :, Sq - n :] = True
    return out, lse, there


def _ends(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0).int()


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([x.view(torch.uint8) for x in parts]).view(parts[0].dtype)


def _pages(k: Tensor, v: Tensor, page: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pages in a random order with unused ones among them, and their table."""
    B, _, Sk, _ = k.shape
    width = -(-Sk // page)
    order = torch.randperm(B * width + 3, generator=g)[: B * width].to(k.device)
    made = []
    for x in (k, v):
        rows = x.view(torch.uint8).transpose(1, 2)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, width * page - Sk), value=127)
        pages = rows.new_full((B * width + 3, page, *rows.shape[2:]), 127)  # NaN
        pages[order] = rows.reshape(B * width, page, *rows.shape[2:])
        made.append(pages.view(x.dtype))
    return *made, order.view(B, width).int()
