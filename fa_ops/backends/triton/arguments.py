"""Arguments of the forward and backward kernels, and their compilation class, of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends import dropout
from fa_ops.backends.mask_blocks import EMPTY, MIXED, lists_of_states
from fa_ops.call.call import Call
from fa_ops.call.options import ALIGNMENT, MASK_BLOCK, MAX_LENGTH, mask_tiles
from fa_ops.programs.tiles import states_of_runs

LOG2E = 1.4426950408889634
_MAX_WINDOW = 2 * MAX_LENGTH  # longer than every sequence, and small enough to add to a position
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38  # normal numbers of float32
_NEGLIGIBLE = 1e-15  # scores no larger than this do not change a float32 result

# The kernels' parameters whose values `arguments` returns, in this order. An absent option is None
# and its strides are 0. scale and cap are those of `primitives.scores`; slopes and sinks are the
# caller's; threshold and keep_scale belong to dropout.
NAMES = (
    "scale", "cap", "mask", "mask_stride_b", "mask_stride_h", "mask_stride_q", "mask_stride_k",
    "blocks", "blocks_stride_b", "blocks_stride_h", "blocks_rows", "blocks_columns", "slopes",
    "slopes_stride_b", "sinks", "kv_lens", "ranges", "ranges_stride_b", "ranges_stride_h",
    "ranges_stride_q", "seed", "threshold", "keep_scale", "window_left", "window_right",
    "term_values", "term_indices",
)  # fmt: skip


class Class(NamedTuple):
    """The properties of a call that kernels are compiled for; part of every kernel's key."""

    fold: bool = True  # scores are products times a positive scale
    extreme: bool = False  # a scale or softcap that `primitives.scores` has to handle exactly
    left: bool = False
    right: bool = False  # a window to the right, or causal
    softcap: bool = False
    mask: tuple[torch.dtype, bool, bool] | None = None  # dtype, 16-byte rows, contiguous in k
    blocks: bool = False
    slopes: bool = False
    sinks: torch.dtype | None = None
    kv_lens: bool = False
    ranges: bool = False
    dropout: torch.dtype | None = None  # of the seed, or of a word for each row
    program: str | None = None

    def divisors(self) -> dict[str, int]:
        """Divisors of the mask's address and strides, for `bind`."""
        if self.mask is None or not self.mask[1]:
            return {}
        units = ALIGNMENT // self.mask[0].itemsize
        return {"mask": ALIGNMENT, **{f"mask_stride_{d}": units for d in "bhq"}}

    def fixed(self) -> tuple[str, ...]:
        """Arguments that are the same in every call of the class, for `bind`."""
        return ("mask_stride_k",) if self.mask is not None and self.mask[2] else ()


_NO_STRIDES = (0, 0, 0, 0)
# calls without options: the values after the scale, and the classes
_FULL = (
    None, None, *_NO_STRIDES, None, *_NO_STRIDES, None, 0, None, None, None, 0, 0, 0, None, None,
    None, None, None, None, None,
)  # fmt: skip
_CAUSAL = (*_FULL[:-3], 0, None, None)
_CLASSES = (Class(), Class(right=True))


def arguments(call: Call, B: int, Hq: int, Sq: int, Sk: int) -> tuple[tuple, Class]:
    """(values of NAMES, class) of a call. Sq and Sk matter only with a mask or a range."""
    mask, slopes, sinks, kv_lens, ranges, seed, mask_blocks, *_ = call.operands
    causal, p, _, left, right, softcap, *_ = call.options
    scale = call.scale
    left = None if left < 0 else min(left, _MAX_WINDOW)
    right = 0 if causal else None if right < 0 else min(right, _MAX_WINDOW)
    if (
        mask is slopes is sinks is kv_lens is ranges is left is None
        and p == softcap == 0.0
        and not call.is_programmed
        and 1e-30 < scale < 1e30
        and (right is None or causal)
    ):
        return (scale * LOG2E, *(_CAUSAL if causal else _FULL)), _CLASSES[causal]

    capped = 0.0 < softcap <= 1e30  # a larger one changes no float32 score
    if capped:
        # Smaller softcaps would make `factor` infinite or `cap` 0; their product is a derivative.
        softcap = max(softcap, _SMALLEST, min(abs(scale) / _LARGEST, _NEGLIGIBLE))
    factor = scale / softcap if capped else scale * LOG2E
    values = (_single(factor), _single(softcap * LOG2E) if capped else None)
    values += _mask(mask, B, Hq, Sq, Sk)
    runs = call.operands.tile_runs
    if runs is None:
        values += _blocks(mask_blocks, mask, B, Hq)
    else:
        values += _blocks_of_runs(runs, B, Hq, Sq, Sk)
    if slopes is not None:
        slopes = slopes.contiguous()
    values += (slopes, 0 if slopes is None or slopes.dim() == 1 else Hq)
    values += (_contiguous(sinks), _contiguous(kv_lens))
    values += _ranges(ranges, B, Hq, Sq)
    if p > 0.0:
        bits = dropout.threshold(p)
        signed = bits - (1 << 32) if bits >= 1 << 31 else bits
        values += (seed.contiguous(), signed, 1.0 / max(1.0 - p, 2.0**-32))
    else:
        values += (None, None, None)
    is_added = mask is not None and mask.dtype != torch.bool
    text = call.options.program
    return (*values, left, right, *_terms(call)), Class(
        fold=not capped and slopes is None and not is_added and scale > 1e-30 and text is None,
        extreme=abs(scale) > 1e30 or (capped and softcap > 64.0),
        left=left is not None,
        right=right is not None,
        softcap=capped,
        mask=None if mask is None else _mask_class(values[2], values[3:7]),
        blocks=mask_blocks is not None or runs is not None,
        slopes=slopes is not None,
        sinks=None if sinks is None else sinks.dtype,
        kv_lens=kv_lens is not None,
        ranges=ranges is not None,
        dropout=seed.dtype if p > 0.0 else None,
        program=text,
    )


def _terms(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The terms of a program, and something in place of those that it does not have."""
    if not call.is_programmed:
        return None, None
    t, nothing = call.operands, call.query.new_empty(1, dtype=torch.int32)
    values = nothing if t.term_values is None else t.term_values
    return values, nothing if t.term_indices is None else t.term_indices


def _single(x: float) -> float:
    """x clamped to the normal numbers of float32, or 0."""
    return 0.0 if abs(x) < _SMALLEST else max(-_LARGEST, min(x, _LARGEST))


def size_error(queries: int, keys: int) -> str | None:
    """Return why the kernels cannot index so many queries (or tokens) and keys, or None."""
    if queries <= MAX_LENGTH and keys <= MAX_LENGTH:
        return None
    return f"takes up to {MAX_LENGTH} queries and keys, got {queries} and {keys}"


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _mask(mask: Tensor | None, B: int, Hq: int, Sq: int, Sk: int) -> tuple:
    if mask is None:
        return (None, *_NO_STRIDES)
    mask = mask.expand(B, Hq, Sq, Sk)
    return (mask, *mask.stride())


def _blocks(blocks: Tensor | None, mask: Tensor | None, B: int, Hq: int) -> tuple:
    if blocks is None:
        return (None, *_NO_STRIDES)
    blocks = blocks.expand(B, Hq, blocks.shape[2])
    return (blocks, *blocks.stride()[:2], *mask_tiles(mask)[2:])


def _blocks_of_runs(runs: Tensor, B: int, Hq: int, Sq: int, Sk: int) -> tuple:
    """The lists of the tiles in runs, in all of which masks, and a bias, are read."""
    m, n = (-(-size // MASK_BLOCK) for size in (Sq, Sk))
    kept = states_of_runs(runs, m, n) != EMPTY
    blocks = lists_of_states(torch.where(kept, MIXED, EMPTY)).expand(B, Hq, -1)
    return (blocks, *blocks.stride()[:2], m, n)


def _mask_class(mask: Tensor, strides: tuple) -> tuple[torch.dtype, bool, bool]:
    b, h, q, k = strides
    units = ALIGNMENT // mask.dtype.itemsize
    aligned = (b | h | q) % units == 0 and mask.data_ptr() % ALIGNMENT == 0
    return mask.dtype, aligned, k == 1


def _ranges(ranges: Tensor | None, B: int, Hq: int, Sq: int) -> tuple:
    if ranges is None:
        return (None, 0, 0, 0)
    if ranges.stride(-1) != 1:
        ranges = ranges.contiguous()
    ranges = ranges.expand(B, Hq, Sq, 2)
    return (ranges, *ranges.stride()[:3])


class Layout(NamedTuple):
    """The properties of addresses and strides of q, k and v that kernels are compiled for."""

    aligned: bool  # every row starts at a multiple of 16 bytes
    wide: bool  # a row's stride is so large that a tile's offsets need 64 bits

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, strides: tuple[int, ...]) -> Layout:
        """`strides`: batch, head and sequence strides of one tensor after the other."""
        qb, qh, qs, kb, kh, ks, vb, vh, vs = strides
        elements = qb | qh | qs | kb | kh | ks | vb | vh | vs
        bits = elements * q.element_size() | q.data_ptr() | k.data_ptr() | v.data_ptr()
        return _LAYOUTS[bits % ALIGNMENT == 0][(qs | ks | vs) >= 1 << 23]

    def divisors(self, names: Sequence[str], dtype: torch.dtype) -> dict[str, int]:
        """For `bind`, of parameters x, x_stride_b, x_stride_h, x_stride_s for x in names."""
        if not self.aligned:
            return {}
        units = ALIGNMENT // dtype.itemsize
        strides = {f"{name}_stride_{d}": units for name in names for d in "bhs"}
        return strides | dict.fromkeys(names, ALIGNMENT)


_LAYOUTS = [[Layout(aligned, wide) for wide in (False, True)] for aligned in (False, True)]


def padded(head_dim: int) -> int:
    """The width of a head's tile: a power of two, at least the 16 of tensor cores."""
    return max(16, 1 << (head_dim - 1).bit_length())


def widths(dims: tuple[int, int]) -> dict[str, int]:
    """The constexpr parameters of kernels for heads of D and Dv features."""
    return dict(zip(("D", "Dv", "BLOCK_D", "BLOCK_DV"), (*dims, *map(padded, dims))))


def precision(dtype: torch.dtype) -> str:
    """Precision of fp32 products, according to torch's setting.

    `fp32_precision` follows the older `allow_tf32`, which raises once the newer one was used.
    """
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"
