"""The keys that each query of the whole sequence attends, as half-open intervals on the host.

Every mask of `context_parallel_attention` gives each query one interval of keys. In the keys that a
process has at hand, segments of the whole in ascending order, it is an interval too, and an empty
one shows that a step need not be computed.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call.options import dtype_name
from fa_ops.call.python_types import need_tensor
from fa_ops.distributed.layout import Segment


class Mask(NamedTuple):
    """Which keys each query attends. Tensors are int64 on the CPU."""

    queries: int  # tokens of the whole sequence
    keys: int
    is_causal: bool = False
    left: int = -1  # of the window; -1: unbounded
    right: int = -1
    kv_lens: Tensor | None = None  # (B,), or (documents,) with cu_seqlens
    key_ranges: Tensor | None = None  # (B or 1, Hq or 1, queries or 1, 2)
    cu_seqlens: Tensor | None = None  # (documents + 1,)

    @property
    def aligned_rows(self) -> bool:
        """Whether a query has the same position in every row of the batch."""
        return self.kv_lens is None

    def row(self, b: int) -> Mask:
        """The mask of row `b` of the batch."""
        ranges, lens = self.key_ranges, self.kv_lens
        return self._replace(
            kv_lens=None if lens is None else lens[b : b + 1],
            key_ranges=ranges if ranges is None or len(ranges) == 1 else ranges[b : b + 1],
        )

    def heads(self, heads: slice) -> Mask:
        """The mask of some query heads."""
        ranges = self.key_ranges
        if ranges is None or ranges.shape[1] == 1:
            return self
        return self._replace(key_ranges=ranges[:, heads])

    def offset(self) -> int:
        """The key position of query 0, where it is the same in every row."""
        if self.cu_seqlens is not None:
            return 0
        length = self.keys if self.kv_lens is None else int(self.kv_lens[0].clamp(0, self.keys))
        return length - self.queries

    def digest(self) -> str:
        """A hash of the values of the tensors."""
        known = hashlib.sha1(usedforsecurity=False)
        for t in (self.kv_lens, self.key_ranges, self.cu_seqlens):
            known.update(b"-" if t is None else f"{tuple(t.shape)}".encode())
            if t is not None:
                known.update(t.contiguous().numpy().tobytes())
        return known.hexdigest()[:16]


def check_masks(
    tokens: int, kv_lens: Tensor | None, key_ranges: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raise TypeError or ValueError for masks of a whole sequence that cannot be such."""
    given = {"kv_lens": kv_lens, "key_ranges": key_ranges, "cu_seqlens": cu_seqlens}
    for name, t in given.items():
        if t is not None and need_tensor(name, t).dtype != torch.int32:
            found = dtype_name(t.dtype)
            raise TypeError(f"{name} must be int32, got {found}: pass {name}.int()")
    if key_ranges is not None and (
        key_ranges.dim() != 4 or key_ranges.shape[3] != 2 or key_ranges.shape[2] not in (1, tokens)
    ):
        raise ValueError(
            f"key_ranges must have shape (B or 1, Hq or 1, {tokens} or 1, 2), got "
            f"{tuple(key_ranges.shape)}: pass a first key and an end for each query"
        )
    if cu_seqlens is not None:
        check_ends(cu_seqlens, tokens)
    count = None if cu_seqlens is None else len(cu_seqlens) - 1
    if kv_lens is not None and (kv_lens.dim() != 1 or count not in (None, len(kv_lens))):
        shape, each = ("(B,)", "row") if count is None else (f"({count},)", "document")
        raise ValueError(
            f"kv_lens must have shape {shape}, got {tuple(kv_lens.shape)}: pass a number of keys "
            f"for each {each}"
        )


def check_ends(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise ValueError unless these are boundaries of documents in so many tokens."""
    ends = on_host(cu_seqlens)
    if ends.dim() != 1 or not len(ends):
        raise ValueError(
            f"cu_seqlens must have shape (documents + 1,), got {tuple(ends.shape)}: pass the first "
            "token of each document, then the number of tokens"
        )
    if bool((ends.diff() < 0).any()) or ends[0] < 0 or ends[-1] > tokens:
        raise ValueError(
            f"cu_seqlens must not decrease and be within [0, {tokens}], the tokens of all "
            f"processes, got {ends.tolist()[:16]}: pass the boundaries in the whole sequence"
        )


class Ranges(NamedTuple):
    """Half-open intervals of keys, int64 (B or 1, Hq or 1, rows); (0, 0) where empty."""

    lo: Tensor
    hi: Tensor

    def rows(self, rows: slice) -> Ranges:
        """Those of some rows."""
        return Ranges(self.lo[..., rows], self.hi[..., rows])

    def hull(self) -> Segment | None:
        """The smallest interval that contains all; None if all are empty."""
        end = int(self.hi.max()) if self.hi.numel() else 0
        if not end:
            return None
        return int(self.lo.masked_fill(self.hi <= self.lo, end).min()), end

    def pairs(self) -> float:
        """The number of pairs of queries and keys, as a mean over rows of the batch and heads."""
        return float((self.hi - self.lo).sum()) / (self.lo.shape[0] * self.lo.shape[1])

    def queries(self) -> float:
        """The number of queries that attend a key, as a mean over rows of the batch and heads."""
        return float((self.hi > self.lo).sum()) / (self.lo.shape[0] * self.lo.shape[1])


def visible(mask: Mask, queries: Tensor) -> Ranges:
    """The intervals of these queries (rows,), in keys of the whole sequence."""
    i = queries.view(1, 1, -1)
    if mask.cu_seqlens is None:
        length = mask.kv_lens
        if length is None:
            length = torch.full((1,), mask.keys, device=i.device)
        length = length.clamp(0, mask.keys).view(-1, 1, 1)
        lo, hi, position = torch.zeros_like(i), length, i + length - mask.queries
    else:
        lo, hi, position = _in_documents(mask, i)
    lo, hi = torch.broadcast_tensors(lo, hi)
    if mask.is_causal:
        hi = hi.minimum(position + 1)
    if mask.right >= 0:
        hi = hi.minimum(position + mask.right + 1)
    if mask.left >= 0:
        lo = lo.maximum(position - mask.left)
    if mask.key_ranges is not None:
        ranges = mask.key_ranges
        if ranges.shape[2] > 1:
            ranges = ranges[:, :, queries]
        lo, hi = lo.maximum(ranges[..., 0]), hi.minimum(ranges[..., 1])
    return _without_empty(*torch.broadcast_tensors(lo, hi))


def _in_documents(mask: Mask, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(first key, end of keys, position) of each query in its document."""
    ends = mask.cu_seqlens
    inside = (i >= ends[0]) & (i < ends[-1])
    document, start = document_of(mask, i)
    stop = ends[document + 1] if len(ends) > 1 else start
    length = stop - start
    if mask.kv_lens is not None and len(mask.kv_lens):
        length = length.minimum(mask.kv_lens[document].clamp(min=0))
    position = i + length - (stop - start)
    return start, torch.where(inside, start + length, start), position


def document_of(mask: Mask, i: Tensor) -> tuple[Tensor, Tensor]:
    """The document of each token and its first token; of tokens in none, those of any."""
    ends = mask.cu_seqlens
    document = torch.searchsorted(ends[1:].contiguous(), i, right=True)
    document = document.clamp(max=max(0, len(ends) - 2))
    return document, ends[document]


def _without_empty(lo: Tensor, hi: Tensor) -> Ranges:
    there = hi > lo
    return Ranges(torch.where(there, lo, 0), torch.where(there, hi, 0))


def within(ranges: Ranges, segments: tuple[Segment, ...]) -> Ranges:
    """The intervals in the keys of a buffer that holds these ascending segments."""
    lo, hi = torch.zeros_like(ranges.lo), torch.zeros_like(ranges.hi)
    for start, stop in segments:
        lo += (ranges.lo - start).clamp(0, stop - start)
        hi += (ranges.hi - start).clamp(0, stop - start)
    return _without_empty(lo, hi)


def positions(segments: tuple[Segment, ...]) -> Tensor:
    """The tokens of ascending segments, int64 on the CPU."""
    parts = [torch.arange(start, stop, device="cpu") for start, stop in segments]
    return torch.cat(parts) if parts else torch.arange(0, device="cpu")


_known: dict[int, tuple[weakref.ref, int, Tensor]] = {}


def on_host(t: Tensor | None) -> Tensor | None:
    """The values in int64 on the CPU. Those of a GPU's tensor are read once until it is changed."""
    if t is None:
        return None
    if t.device.type == "cpu":
        return t.detach().long()
    version = -1 if t.is_inference() else t._version
    reference, known_version, values = _known.get(id(t), (lambda: None, -1, None))
    if reference() is not t or known_version != version or version < 0:
        values = t.detach().cpu().long()
        if len(_known) >= 64:
            _known.clear()
        _known[id(t)] = weakref.ref(t), version, values
    return values
