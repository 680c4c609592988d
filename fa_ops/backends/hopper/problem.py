"""Quantities that the forward and the backward pass derive from a call in the same way."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call.options import ALIGNMENT, MAX_LENGTH, rows_are_aligned

LOG2E = 1.4426950408889634
COPIED_PAGES = (4, 8, 16, 32)  # keys of pages that one TMA copy brings
UNBOUNDED = MAX_LENGTH  # the size of an unbounded window, as in cuda/ptx.cuh
MISALIGNED = ALIGNMENT - 1  # bits of an address that TMA cannot read
MAX_NARROW_DIM = 256  # head dimension of all kernels but one
_HEAD_DIM_MULTIPLE = ALIGNMENT // 2  # of 2 bytes: rows are aligned
_LARGE_SOFTCAP = 256.0  # from here on an error of 1e-7 of it is noticeable in a score
_NO_SOFTCAP = 2.0**64  # from here on no score that float32 resolves is capped
_LARGEST_SCALE = 2.0**24  # times NEVER of cuda/softmax.cuh, a float32
_LEAST, _MOST = 2.0**-120, 2.0**120  # factors that float32 holds, and their products with scores


class ScoreUnits(NamedTuple):
    """The factors from a product q.k to a score: unit * product, or unit * tanh with a softcap."""

    gradient: float  # of a score by the product q.k, but for the tanh's derivative
    inside_tanh: float  # factor of the product q.k under the tanh
    accumulator: float
    log2: float  # factor from accumulator units to powers of two

    @classmethod
    def of(cls, head_dim: int, scale: float | None, softcap: float) -> ScoreUnits:
        """The units of a call's scores."""
        scale = max(head_dim**-0.5 if scale is None else scale, _LEAST)
        if softcap and softcap_kind(softcap):
            softcap = max(softcap, _LEAST)
            return cls(scale, min(scale / softcap, _MOST), softcap, softcap * LOG2E)
        return cls(scale, 1.0, scale, scale * LOG2E)


def limit_error(scale: float, queries: int, keys: int) -> str | None:
    """Why scale or lengths exceed what the kernels can represent, or None."""
    if scale <= 0:
        return f"needs a positive scale, got {scale}"
    if not scale <= _LARGEST_SCALE:
        return f"needs a scale of at most {_LARGEST_SCALE:.0f}, got {scale}"
    if max(queries, keys) > MAX_LENGTH:
        return f"attends {MAX_LENGTH} queries and keys at most, got {queries} and {keys}"
    return None


def head_dim_error(D: int, Dv: int, widest: int = MAX_NARROW_DIM) -> str | None:
    """Why the kernels do not have these head dimensions, or None."""
    unit = _HEAD_DIM_MULTIPLE
    if D % unit or Dv % unit or max(D, Dv) > widest:
        return (
            f"needs head dims that are multiples of {unit} and at most {widest}, got {D} and {Dv}"
        )
    return None


def softcap_kind(softcap: float) -> int:
    """The HAS_SOFTCAP macro: 0 without a softcap, 1 with one.

    2 for a softcap so large that tanh must be precise relative to its result.
    """
    if not 0 < softcap < _NO_SOFTCAP:
        return 0
    return 2 if softcap > _LARGE_SOFTCAP else 1


def alibi_kind(is_packed: bool) -> int:
    """The HAS_ALIBI macro with slopes: 1 for those of batch rows.

    2 for packed sequences that are one batch row, where slopes and positions differ by token.
    """
    return 2 if is_packed else 1


def window_sides(is_causal: bool, left: int, right: int) -> tuple[int, int, bool]:
    """Keys visible on either side of the diagonal, and whether any side is bounded."""
    right = min(0 if is_causal else UNBOUNDED, right if right >= 0 else UNBOUNDED)
    left = min(left, UNBOUNDED) if left >= 0 else UNBOUNDED
    return left, right, min(left, right) < UNBOUNDED


def copy_keys(page: int) -> int:
    """The number of keys of a page that one TMA copy brings, or 1 where keys are gathered.

    `page`: keys of a page; 0 for a contiguous cache.
    """
    if page % 64 == 0:
        return 64
    return page if page in COPIED_PAGES else 1


def page_error(page: int) -> str | None:
    """Why prompts do not attend pages of so many keys, or None."""
    if copy_keys(page) < 16:
        return f"needs pages of 16, 32 or a multiple of 64 keys, got {page}"
    return None


def section_of(heads: int, bytes_per_head: int, limit: int) -> int:
    """The number of heads that are processed concurrently, in sections of about equal size."""
    sections = max(1, -(-heads * bytes_per_head // limit))
    return -(-heads // sections)


def key_section(heads: int, Sk: int, dims: int) -> int:
    """The same for heads whose keys and values, `dims` features of 2 bytes, are read again.

    What fits the L2, 32 MB of its 50, serves short sequences best. In long ones the blocks that run
    at once read the same keys anyway, and the longest of a small last section would end alone.
    """
    limit = min(max(32 << 20, Sk << 14), 128 << 20)
    return section_of(heads, Sk * 2 * dims, limit)


def shared_strides(t: Tensor | None) -> tuple[int, ...] | None:
    """All strides but the last; 0 for dimensions of one element, which are broadcast."""
    if t is None:
        return None
    return tuple(stride if size > 1 else 0 for size, stride in zip(t.shape[:-1], t.stride()))


def tma_aligned(t: Tensor) -> Tensor:
    """The tensor itself where TMA can read its rows, else a copy."""
    return t if rows_are_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def one_batch(x: Tensor) -> Tensor:
    """(T, H, D) as (1, H, T, D)."""
    return x.transpose(0, 1)[None]
