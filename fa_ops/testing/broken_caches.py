"""The meaning of calls over a cache with lengths or pages that lie outside the cache.

Where the host does not check them (docs/decode.md), lengths are clamped to the capacity, new keys
beyond it are not written, and keys in pages that do not exist are masked out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.types import Cache, Spec


def first_invalid_value(k: Tensor, cache: Cache, spec: Spec) -> str | None:
    """The beginning of the error that a backend that checks lengths and pages must raise."""
    new = 0 if cache.key is None else cache.key.shape[2]
    table, size = cache.page_table, k.shape[1]
    for b, length in enumerate(spec.kv_lens.tolist()):
        if length < 0 or length + new > _capacity(k, cache):
            return f"kv_lens[{b}] is {length}, which"
        if table is not None:
            used = table[b, : -(-(length + new) // size)].tolist()
            for n, page in enumerate(used):
                if not 0 <= page < len(k):
                    return f"page_table[{b}, {n}] is {page}, but"
    return None


def _capacity(k: Tensor, cache: Cache) -> int:
    return k.shape[2] if cache.page_table is None else cache.page_table.shape[1] * k.shape[1]


def valid_call(k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> tuple[Cache, Spec, list[Tensor]]:
    """Write the new keys that fit to k and v; return the valid call that remains.

    The last result holds a bool tensor for each row of the batch: which of its keys exist. Pages
    that do not exist are replaced by page len(k), which `with_spare_page` adds.
    """
    new = 0 if cache.key is None else cache.key.shape[2]
    capacity, table, size = _capacity(k, cache), cache.page_table, k.shape[1]
    exists = None if table is None else (table >= 0) & (table < len(k))
    for b, length in enumerate(spec.kv_lens.tolist()):
        for n in range(new):
            at = length + n
            if 0 <= at < capacity and (exists is None or exists[b, at // size]):
                key, value = (x[b, :, n : n + 1].double() for x in (cache.key, cache.value))
                key = _rotated(key, cache, at).to(cache.key.dtype)
                _write(k, key, cache.k_scale, cache, b, at)
                _write(v, value, cache.v_scale, cache, b, at)
    lens = (spec.kv_lens.long() + new).clamp(0, capacity)
    present = [torch.ones(n, dtype=torch.bool, device=k.device) for n in lens.tolist()]
    if exists is not None:
        present = [row.repeat_interleave(size)[: len(p)] for row, p in zip(exists, present)]
        scales = map(_with_spare_scale, (cache.k_scale, cache.v_scale))
        cache = cache._replace(page_table=table.where(exists, len(k)))
        cache = cache._replace(**dict(zip(("k_scale", "v_scale"), scales)))
    return cache._replace(key=None, value=None), spec._replace(kv_lens=lens.int()), present


def _rotated(key: Tensor, cache: Cache, position: int) -> Tensor:
    """A key (H, 1, D), rotated by the last angles if there are none for its position."""
    last = 0 if cache.rotary_cos is None else len(cache.rotary_cos) - 1
    return reference.rotate(key, cache, torch.tensor([min(position, last)]))


def _write(memory: Tensor, new: Tensor, scale: Tensor | None, cache: Cache, b: int, at: int):
    factor = reference.scales(scale, cache, b, range(at, at + 1), memory.shape[1])
    x = reference.quantised(new.double(), factor.to(new.device), memory.dtype)
    view, index = reference.slots(memory, cache, b, at, at + 1)
    view[index] = x.transpose(0, 1).view(view.dtype)


def with_spare_page(k: Tensor, v: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
    """Append a page of zeros to paged caches."""
    if cache.page_table is None:
        return k, v
    return tuple(torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))


def _with_spare_scale(scale: Tensor | None) -> Tensor | None:
    """Append the spare page's scale to scales of pages; return scales of heads unchanged."""
    if scale is None or scale.dim() == 2:
        return scale
    return torch.cat([scale, torch.ones_like(scale[:1])])


def attend_present(present: Sequence[Tensor], attend: Callable) -> Callable:
    """Wrap `attend`, which `reference.cached` calls once a row, to mask out missing keys."""
    rows = iter(present)
    return lambda q, k, v, spec: attend(
        q, k, v, spec._replace(attn_mask=next(rows).view(1, 1, 1, -1))
    )
