"""What runs calls of one geometry: `Geometry`, and the steps from it to a launch in `KernelPlan`.

And the quantities that several kernels derive from a geometry in the same way: macros, score units,
windows, the layouts of results, sections of heads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper.runtime.launch import Kernel, kernel
from fa_ops.call.call import Call, rows_are_aligned
from fa_ops.call.options import ALIGNMENT, MAX_LENGTH
from fa_ops.programs.program import parse

if TYPE_CHECKING:
    from fa_ops.backends.hopper.masks import Bias, BlockLists, MaskLayout

LOG2E = 1.4426950408889634
UNBOUNDED = MAX_LENGTH  # the size of an unbounded window, as in cuda/ptx.cuh
MISALIGNED = ALIGNMENT - 1  # bits of an address that TMA cannot read
_LARGE_SOFTCAP = 256.0  # from here on an error of 1e-7 of it is noticeable in a score
_NO_SOFTCAP = 2.0**64  # from here on no score that float32 resolves is capped
_LEAST, _MOST = 2.0**-120, 2.0**120  # factors that float32 holds, and their products with scores

Sizes = tuple[int, ...]


class Geometry(NamedTuple):
    """The part of a call that its kernels and launches depend on: neither addresses nor values.

    A tuple, as plans are looked up by it, for a growing cache in every step.
    """

    dtype: torch.dtype
    device: int | None
    shapes: tuple[Sizes, ...]  # of query, key and value; pages have heads before tokens
    strides: tuple[Sizes, ...]  # the same; in a backward pass of all that it reads and writes
    is_causal: bool = False
    scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    has_lens: bool = False
    has_sinks: bool = False
    slopes: Sizes | None = None  # the strides of ALiBi slopes but the last
    ranges: Sizes | None = None  # batches and heads of key ranges, and their strides but the last
    mask: MaskLayout | None = None  # of a bool mask
    bias: Bias | None = None  # the layout of a float mask
    lists: BlockLists | None = None  # the layout of the lists of a mask's tiles
    table: tuple[int, int] | None = None  # pages of a batch row, and the stride between rows
    sequences: int | None = None  # of a packed batch, which is one long sequence
    deterministic: bool = False
    program: str | None = None  # of scores and masks
    runs: tuple[int, int] | None = None  # lines of tile runs between batches and between heads
    key_dtype: torch.dtype | None = None
    scales: int | tuple = 0  # of a cache, see `scales_of`; of 8-bit tensors their shapes
    quantization: tuple = ()  # of 16-bit tensors: dtype, whether keys lose their mean, rotation

    @classmethod
    def of(cls, call: Call, **fields) -> Geometry:
        """The geometry of a call, whose other `fields` are given."""
        (q, k, v), t, o = call[:3], call.operands, call.options
        slopes, ranges = t.alibi_slopes, t.key_ranges
        return cls(
            q.dtype, q.device.index, (q.shape, k.shape, v.shape),
            (q.stride(), k.stride(), v.stride()), o.is_causal, o.scale, o.window_left,
            o.window_right, o.softcap, o.dropout_p, t.kv_lens is not None, t.sinks is not None,
            None if slopes is None else shared_strides(slopes),
            None if ranges is None else (*ranges.shape[:2], *shared_strides(ranges)),
            program=o.program, runs=lines_of_runs(t.tile_runs), **fields,
        )  # fmt: skip

    @property
    def sides(self) -> tuple[int, int, bool]:
        """Keys visible on either side of the diagonal, and whether any side is bounded."""
        return window_sides(self.is_causal, self.window_left, self.window_right)

    @property
    def units(self) -> ScoreUnits:
        """The units of the scores."""
        return ScoreUnits.of(self.shapes[0][-1], self.scale, self.softcap)

    @property
    def alibi(self) -> int:
        """The HAS_ALIBI macro: 0 without slopes, 1 with those of batch rows.

        2 for packed sequences that are one batch row, where slopes and positions differ by token.
        """
        if self.slopes is None:
            return 0
        return 2 if self.ranges and self.sequences else 1

    @property
    def has_natural_scores(self) -> bool:
        """Whether a program makes scores, which are to base e then."""
        return self.program is not None and parse(self.program).score is not None

    @property
    def bias_bits(self) -> int:
        """Bits of an element of a float mask; 0 without one."""
        return self.bias.dtype.itemsize * 8 if self.bias else 0


class KernelPlan:
    """What runs calls of one geometry, in the order in which it is made.

    A configuration and its kernels; tensor maps, by address, and the layouts of results; the
    parameters that all calls share. `run` then fills in addresses and launches.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry, self.device = geometry, geometry.device
        self.configure(geometry)
        self.map_tensors(geometry)
        self.pack_parameters(geometry)

    def configure(self, g: Geometry) -> None:
        """Choose the configuration, divide the work among CTAs, and ask for the kernels."""
        raise NotImplementedError

    def map_tensors(self, g: Geometry) -> None:
        """Describe what the kernels read by TMA, and what they write."""
        raise NotImplementedError

    def pack_parameters(self, g: Geometry) -> None:
        """Pack the parameters that all calls share."""
        raise NotImplementedError


def result_layouts(g: Geometry, dtype: torch.dtype | None = None) -> list[tuple]:
    """Sizes, strides and dtype of out and lse, which are (T, H, D) and (H, T) of a packed batch."""
    *outer, Hq, Sq, _ = g.shapes[0] if g.sequences is None else _by_head(g.shapes[0])
    Dv = g.shapes[2][-1]
    if g.sequences is not None:
        out, lse = ((Sq, Hq, Dv), (Hq * Dv, Dv, 1)), ((Hq, Sq), (Sq, 1))
    else:
        out = (*outer, Hq, Sq, Dv), (Sq * Hq * Dv, Dv, Hq * Dv, 1)
        lse = (*outer, Hq, Sq), (Hq * Sq, Sq, 1)
    return [(*out, dtype or g.dtype), (*lse, torch.float32)]


def _by_head(shape: Sizes) -> Sizes:
    """(1, H, T, D) of packed tokens, which may be (T, H, D)."""
    return shape if len(shape) == 4 else (1, shape[1], shape[0], shape[2])


# The macros of features that a call has or lacks.
_MACROS = {
    "paged": "IS_PAGED",
    "is_int8": "IS_INT8",
    "window": "HAS_WINDOW",  # causal or with a window
    "left": "HAS_LEFT",  # the window has a left side, or there are ranges
    "kv_lens": "HAS_KV_LENS",
    "ranges": "HAS_RANGES",
    "softcap": "HAS_SOFTCAP",  # see `softcap_kind`
    "alibi": "HAS_ALIBI",  # 2: of packed sequences
    "sinks": "HAS_SINKS",
    "mask": "HAS_MASK",
    "dropout": "HAS_DROPOUT",
    "splits": "SPLITS_KEYS",  # a tile attends one of several parts of the keys
    "split": "SPLITS_GROUP",  # each group of query heads is divided into several parts
    "signs": "HAS_SIGNS",  # scales may be negative
    "head_scales": "HEAD_SCALES",  # all keys of a head have one scale, and all of its values
    "shares_tokens": "SHARES_TOKENS",
    "grad_out": "HAS_GRAD_OUT",
    "program": "HAS_PROGRAM",  # its text, see `runtime.nvrtc.program`
}


def macros(config, dtype: torch.dtype, **features: int | str) -> dict[str, int | str]:
    """The macros of a configuration's kernels for calls with these of its `features`.

    Raises:
        TypeError: the kernels do not have a feature.
    """
    if unknown := sorted(features.keys() - config.features.keys()):
        raise TypeError(f"{type(config).__name__} has no feature {unknown[0]}")
    given = config.features | features
    if given.get("left") == 0:
        given["left"] = given["ranges"]
    found = config.defines(**given) | {"IS_BF16": int(dtype == torch.bfloat16)}
    for name, value in given.items():
        if name in _MACROS:
            found[_MACROS[name]] = value if isinstance(value, str) else int(value)
    return found


@functools.lru_cache(maxsize=1024)
def kernel_of(config, device: int | None, dtype: torch.dtype, **features: int | str) -> Kernel:
    """The kernel of a configuration; `features` are the arguments of `macros`."""
    defines, name = macros(config, dtype, **features), config.kernel
    shared = defines["SHARED_BYTES"]
    return kernel(name, name, device, config.threads, shared, tuple(defines.items()))


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


def softcap_kind(softcap: float) -> int:
    """The HAS_SOFTCAP macro: 0 without a softcap, 1 with one.

    2 for a softcap so large that tanh must be precise relative to its result.
    """
    if not 0 < softcap < _NO_SOFTCAP:
        return 0
    return 2 if softcap > _LARGE_SOFTCAP else 1


def window_sides(is_causal: bool, left: int, right: int) -> tuple[int, int, bool]:
    """Keys visible on either side of the diagonal, and whether any side is bounded."""
    right = min(0 if is_causal else UNBOUNDED, right if right >= 0 else UNBOUNDED)
    left = min(left, UNBOUNDED) if left >= 0 else UNBOUNDED
    return left, right, min(left, right) < UNBOUNDED


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


def lines_of_runs(runs: Tensor | None) -> tuple[int, int] | None:
    """Lines between the batches and between the heads of contiguous tile runs, 0 where shared."""
    if runs is None:
        return None
    B, H, lines, _ = runs.shape
    return H * lines * (B > 1), lines * (H > 1)


def shared_strides(t: Tensor) -> Sizes:
    """All strides but the last; 0 for dimensions of one element, which are broadcast."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(t.shape[:-1], t.stride()))


def tma_aligned(t: Tensor) -> Tensor:
    """The tensor itself where TMA can read its rows, else a copy."""
    return t if rows_are_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def one_batch(x: Tensor) -> Tensor:
    """(T, H, D) as (1, H, T, D)."""
    return x.transpose(0, 1)[None]
