"""Packed queries and packed new keys over a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import checks
from fa_ops.compat.flash.append import append, check_new, saturated
from fa_ops.compat.flash.arguments import of_sequences
from fa_ops.compat.flash.cache import Caches, ranges_from
from fa_ops.compat.flash.paged import attend_chunks, attend_pages
from fa_ops.compat.flash.rotation import Rotation
from fa_ops.compat.flash_attn_3.numbers import (
    E4M3,
    WIDE,
    Widened,
    attend_none,
    attend_numbers,
    in_32_bits,
    rows_of_tokens,
    say,
)
from fa_ops.compat.flash_attn_3.numbers import check as check_numbers
from fa_ops.compat.flash_attn_3.qv import check, with_features_of_values
from fa_ops.kv_cache import attention_with_kv_cache
from fa_ops.varlen import pages as varlen_pages


class Packed(NamedTuple):
    """What says where packed queries and new keys belong."""

    ends_q: Tensor | None  # int32 (B + 1,); None: rows of equal length
    ends_k: Tensor | None  # of new keys
    lens: Tensor
    rotation: Rotation | None
    offsets: Tensor | None  # of the rotation; None: lens

    def attend(
        self, q: Tensor, qv: Tensor | None, new: tuple[Tensor, Tensor] | None, caches: Caches,
        longest: int | None, leftpad: Tensor | None, chunk: int, options: dict,
        scales: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out and lse in the layout of q; `scales` are those of e4m3 queries, none of others."""
        rows, B = q.shape[:2], len(self.lens)
        ends, lens, caches = self.ends_q, self.lens, caches.in_pages()
        checks.integers(q, "cache_seqlens", lens)
        if leftpad is not None:
            checks.same_device(q, "cache_leftpad", of_sequences("cache_leftpad", leftpad, B), "q")
        if qv is not None:
            check(q, qv, caches.v)
            qv = qv.detach().reshape(-1, *qv.shape[-2:])
        if ends is None:
            longest, ends, q = q.shape[1], _even(B, q), q.flatten(0, 1)
        if scales:
            check_numbers(q, k_cache=caches.k, v_cache=caches.v)
        wide = qv is not None or leftpad is not None or chunk > 0
        if new is not None:
            q, lens = self._appended(q, qv, new, caches, ends, longest, options,
                                     None if wide else scales)  # fmt: skip
        if scales and not wide:
            out, lse = attend_numbers(q, caches, lens, ends, longest, options | scales)
        elif scales:
            tokens = rows_of_tokens(ends, q.shape[0])
            wide = Widened(q, qv, {"k_cache": caches.k, "v_cache": caches.v}, scales, tokens)
            say(4, qv=qv, cache_leftpad=leftpad, attention_chunk=chunk or None)
            out, lse = _attended(wide.q, wide.qv, caches, lens, ends, longest, leftpad, chunk,
                                 options)  # fmt: skip
            out = wide.result(out)
        else:
            out, lse = _attended(q, qv, caches, lens, ends, longest, leftpad, chunk, options)
        if self.ends_q is None:
            return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1)
        return out, lse

    def _appended(
        self, q, qv, new, caches, ends, longest, options, scales
    ) -> tuple[Tensor, Tensor]:
        """The rotated queries, and the lengths, once new keys and values are in the cache."""
        ends_k, (k, v), lens = self.ends_k, new, self.lens
        if ends_k is None:
            ends_k, k, v = _even(len(lens), k), k.flatten(0, 1), v.flatten(0, 1)
        check_new(q, caches, k, v, ends_k, lens)
        filled = (lens + ends_k.diff()).int()
        wide = q if q.dtype != E4M3 else torch.empty_like(q, dtype=WIDE)  # has a shape only
        varlen_pages.check(wide, caches.k, caches.v, ends, filled, caches.table, (longest, None))
        check_options(wide, qv, caches, filled, options)
        if scales:
            attend_none(q, caches, options | scales)
        q, k = self._rotated(q, k, ends, ends_k)
        append(caches, k, v, ends_k, lens)
        return q, filled

    def _rotated(self, q, k, ends, ends_k) -> tuple[Tensor, Tensor]:
        if self.rotation is None:
            return q, k
        offsets, rotation = self.lens if self.offsets is None else self.offsets, self.rotation
        is_eight_bit = q.dtype == E4M3
        if is_eight_bit:
            q, k = q.float(), k.float()
            cos, sin = in_32_bits(rotation.cos), in_32_bits(rotation.sin)
            rotation = rotation._replace(cos=cos, sin=sin)
        q = rotation.of_tokens(q, ends, offsets, rotation.queries_differ)
        k = rotation.of_tokens(k, ends_k, offsets, True)
        return (saturated(q), saturated(k)) if is_eight_bit else (q, k)


def _attended(q, qv, caches, lens, ends, longest, leftpad, chunk, options) -> tuple[Tensor, Tensor]:
    """out and lse of packed queries that are not in 8 bits."""
    if qv is not None:
        q, caches = with_features_of_values(q, qv, caches)
    if chunk:
        return attend_chunks(q, caches, lens, ends, leftpad, chunk, options)
    if leftpad is not None:
        options = options | {"key_ranges": ranges_from(q, leftpad, len(lens))}
    return attend_pages(q, *caches[:2], lens, caches.table, ends, longest, options)


def check_options(
    q: Tensor, qv: Tensor | None, caches: Caches, lens: Tensor, options: dict
) -> None:
    """Raise what attention over the caches would, by a call without rows."""
    more = 0 if qv is None else qv.shape[-1]
    k, v = (x.new_empty(0, *x.shape[1:-1], x.shape[-1] + n) for x, n in zip(caches, (more, 0)))
    query = q.new_empty(0, q.shape[1], 1, q.shape[-1] + more)
    attention_with_kv_cache(query, k, v, lens[:0], caches.table[:0], **options)


def _even(rows: int, x: Tensor) -> Tensor:
    """The cu_seqlens of rows (B, S, ...) of equal length."""
    return torch.arange(rows + 1, dtype=torch.int32, device=x.device) * x.shape[1]
