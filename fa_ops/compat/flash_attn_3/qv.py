"""qv, queries of the values: scores are ``scale * (q . k + qv . v)``, as those of latent attention.

That is attention of the queries ``(qv, q)`` over the keys ``(v, k)``. GPUs have kernels for such
head dimensions over caches, so the keys of batches and packed sequences are attended as pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import checks, tracing
from fa_ops.argument_types import need_tensor
from fa_ops.compat.flash import segments
from fa_ops.compat.flash.arguments import has_shape, unit_stride
from fa_ops.compat.flash.cache import Caches
from fa_ops.compat.flash.paged import attend_chunks, attend_pages
from fa_ops.ops.undifferentiable import undifferentiable
from fa_ops.types import Packing


def with_features_of_values(q: Tensor, qv: Tensor, caches: Caches) -> tuple[Tensor, Caches]:
    """The queries and caches whose products are those of both: ``(qv, q)`` and ``(v, k)``."""
    k, v, *rest = caches
    check(q, qv, v)
    keys = joined(k, v)
    return torch.cat((qv, q), -1), Caches(keys, keys[..., : v.shape[-1]], *rest)


def check(q: Tensor, qv: Tensor, v: Tensor) -> None:
    """Raise ValueError or TypeError unless qv is of q's tokens and heads and v's features."""
    has_shape("qv", need_tensor("qv", qv), (*q.shape[:-1], v.shape[-1]))
    checks.need(qv.dtype == q.dtype, "qv must have q's dtype {}, got {}", q.dtype, qv.dtype)
    checks.need(qv.device == q.device, "qv must be on {}, got {}", q.device, qv.device)
    checks.same_device(q, "v", v)


def joined(k: Tensor, v: Tensor) -> Tensor:
    """Keys ``(..., Dv + D)`` that begin with the values.

    Nothing is copied where a latent cache holds them so, and k and v are views of it.
    """
    D, Dv = k.shape[-1], v.shape[-1]
    has_shape("k", k, (*v.shape[:-1], D))
    checks.same_device(v, "k", k, "v")
    checks.need(k.dtype == v.dtype, "k must have v's dtype {}, got {}", v.dtype, k.dtype,
                error=TypeError)  # fmt: skip
    if not tracing.is_compiling() and k.stride() == v.stride() and k.stride(-1) == 1:
        behind = k.storage_offset() - v.storage_offset() == Dv
        if behind and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
            return v.as_strided((*v.shape[:-1], Dv + D), v.stride(), v.storage_offset())
    return torch.cat((v, k), -1)


def batch(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, chunk: int, options: dict
) -> tuple[Tensor, Tensor]:
    """out ``(B, Sq, Hq, Dv)`` and lse ``(B, Hq, Sq)``."""
    (B, Sq), Sk = q.shape[:2], k.shape[1]
    check(q, qv, v)
    checks.need(k.shape[0] == B, "k has batch size {}, but q's is {}", k.shape[0], B)
    if not Sk:  # a page holds at least one key
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    ends = torch.arange(B + 1, dtype=torch.int32, device=q.device) * Sq
    lens = torch.full((B,), Sk, dtype=torch.int32, device=q.device)
    table = torch.arange(B, dtype=torch.int32, device=q.device)[:, None]
    flat = (x.flatten(0, 1) for x in (q, qv))
    out, lse = _attend(*flat, Caches(k, v, table, k.shape[1]), lens, ends, Sq, chunk, options)
    return out.unflatten(0, (B, Sq)), lse.unflatten(1, (B, Sq)).transpose(0, 1)


def packed(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, packing: Packing, kv_lens: Tensor | None,
    options: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``(Tq, Hq, Dv)`` and lse ``(Hq, Tq)``; each key is a page of its own."""
    check(q, qv, v)
    segments.check(packing, (q.shape[0], k.shape[0]))
    ends_q, ends_k, longest_q, longest_k = packing
    tokens = k.shape[0]
    lens = ends_k.diff() if kv_lens is None else torch.minimum(kv_lens, ends_k.diff()).clamp(min=0)
    segments.check_longest("max_seqlen_k", longest_k, lens)
    longest_k = tokens if longest_k is None else min(longest_k, tokens)
    table = ends_k[:-1, None] + torch.arange(longest_k, dtype=torch.int32, device=q.device)
    table = table.clamp(0, max(tokens - 1, 0))
    pages = Caches(k[:, None], v[:, None], table, longest_k)
    return _attend(q, qv, pages, lens.int(), ends_q, longest_q, 0, options)


def _attend(q, qv, caches, lens, ends, longest, chunk, options) -> tuple[Tensor, Tensor]:
    given = (q, qv, *caches[:2])
    q, qv, k, v = (unit_stride(x.detach()) for x in given)
    q, caches = with_features_of_values(q, qv, caches._replace(k=k, v=v))
    options = options | {"num_splits": 0}
    if chunk:
        out, lse = attend_chunks(q, caches, lens, ends, None, chunk, options)
    else:
        out, lse = attend_pages(q, *caches[:2], lens, caches.table, ends, longest, options)
    return undifferentiable("attention with qv has no backward pass", given, out, lse)
