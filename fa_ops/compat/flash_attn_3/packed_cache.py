"""Packed queries and packed new keys over a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import checks
from fa_ops.compat.flash.append import append, check_new
from fa_ops.compat.flash.arguments import of_sequences
from fa_ops.compat.flash.cache import Caches, ranges_from
from fa_ops.compat.flash.paged import attend_chunks, attend_pages
from fa_ops.compat.flash.rotation import Rotation
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
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out and lse in the layout of q."""
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
        if new is not None:
            ends_k, (k, v) = self.ends_k, new
            if ends_k is None:
                ends_k, k, v = _even(B, k), k.flatten(0, 1), v.flatten(0, 1)
            check_new(q, caches, k, v, ends_k, lens)
            filled = (lens + ends_k.diff()).int()
            varlen_pages.check(q, caches.k, caches.v, ends, filled, caches.table, (longest, None))
            check_options(q, qv, caches, filled, options)
            q, k = self._rotated(q, k, ends, ends_k)
            append(caches, k, v, ends_k, lens)
            lens = filled
        if qv is not None:
            q, caches = with_features_of_values(q, qv, caches)
        if chunk:
            out, lse = attend_chunks(q, caches, lens, ends, leftpad, chunk, options)
        else:
            if leftpad is not None:
                options = options | {"key_ranges": ranges_from(q, leftpad, B)}
            k, v, table, _ = caches
            out, lse = attend_pages(q, k, v, lens, table, ends, longest, options)
        if self.ends_q is None:
            return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1)
        return out, lse

    def _rotated(self, q, k, ends, ends_k) -> tuple[Tensor, Tensor]:
        if self.rotation is None:
            return q, k
        offsets = self.lens if self.offsets is None else self.offsets
        q = self.rotation.of_tokens(q, ends, offsets, self.rotation.queries_differ)
        return q, self.rotation.of_tokens(k, ends_k, offsets, True)


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
