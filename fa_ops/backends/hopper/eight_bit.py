"""Attention with 8-bit products on sm_90a, of dense tensors and of packed sequences.

16-bit query, key and value are quantised first, in one launch: statistics, then the numbers. Of
e4m3 tensors query and key are read where they lie, also in pages; values are transposed, and scales
repeated, in a launch of their own. What either launch writes for a call lies in one allocation. A
tile of a packed batch has queries of one sequence, which the kernel finds in cu_seqlens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import (
    QuantizedConfig,
    limit_error,
    quantized_config,
    rotated_bits,
)
from fa_ops.backends.hopper.decode import table_layout
from fa_ops.backends.hopper.kernel_plan import (
    MISALIGNED,
    UNBOUNDED,
    Geometry,
    KernelPlan,
    kernel_of,
    key_section,
    result_layouts,
    softcap_kind,
    tma_aligned,
)
from fa_ops.backends.hopper.runtime.launch import (
    Kernel,
    TensorMap,
    address,
    current_stream,
    empty,
    kernel,
    on_device,
    one_parameter,
    processors,
    set_zero,
)
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import Call, Run, general, rows_are_aligned
from fa_ops.call.options import (
    MAX_QUANTIZED_HEAD_DIM,
    SCALE_BLOCK,
    Operands,
    dtype_name,
)

# maps, addresses, the scalars, a page table, where sequences begin
_LAYOUT = struct_layout("quantized.cu", "QuantizedParams")
_PARAMS = _LAYOUT.packer(packed=("q:q", "k:k", "v:v", "B:scale_log2", "pages:pages"))
_SCALARS = _LAYOUT.packer("B", "scale_log2")
E4M3 = torch.float8_e4m3fn
PACKED_FEATURES = {"is_int8": 0, "signs": 1, "head_scales": 1}
VALUE_BLOCK = 128  # keys whose values are transposed together
MAX_VALUE_BYTES = 1 << 32  # of the transposed values, for which each call allocates memory
_PAGES = 16, 32  # keys, and multiples of 64: what copies of whole swizzle atoms bring


def support_error(call: Call) -> str | None:
    """Why the kernels cannot run a call with 8-bit products, or None."""
    q, k, v = call[:3]
    D, Dv = q.shape[3], v.shape[3]
    if q.dtype not in (torch.bfloat16, torch.float16, E4M3):
        return f"quantises bfloat16 and float16, query is {dtype_name(q.dtype)}"
    if reason := head_error(D, Dv):
        return reason
    if q.dtype == E4M3 and (reason := scale_error(k, call.operands.k_scale)):
        return reason
    return limit_error(call.scale, q.shape[2], k.shape[2])


def head_error(D: int, Dv: int) -> str | None:
    """Why there are no kernels for these head dimensions, or None."""
    if D % 16 or D > MAX_QUANTIZED_HEAD_DIM:
        return (
            f"needs a head dim that is a multiple of 16, at most {MAX_QUANTIZED_HEAD_DIM}, got {D}"
        )
    if Dv % 8 or Dv > MAX_QUANTIZED_HEAD_DIM:
        return (
            "needs a value head dim that is a multiple of 8, at most "
            f"{MAX_QUANTIZED_HEAD_DIM}, got {Dv}"
        )
    return None


def quantized_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype, bfloat16 for e4m3, laid out (B, Sq, Hq, Dv), and lse."""
    (q, k, v), t, changes = map(tma_aligned, call[:3]), call.operands, {}
    for name in ("kv_lens", "q_scale", "k_scale", "v_scale"):
        if getattr(t, name) is not None:
            changes[name] = getattr(t, name).contiguous()
    if t.key_ranges is not None and t.key_ranges.stride(3) != 1:
        changes["key_ranges"] = t.key_ranges.contiguous()
    t = t._replace(**changes)
    return plan_of(call._replace(query=q, key=k, value=v, operands=t)).run(q, k, v, t)


def prepare(call: Call) -> Run:
    """What runs calls with the geometry of this one."""
    if not rows_are_aligned(*call[:3]):
        return general("8-bit forward", quantized_forward).prepare(call)
    options, plan = call.without_tensors(), plan_of(call)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            again = options._replace(query=q, key=k, value=v, operands=tensors)
            return quantized_forward(again)
        return plan.run(q, k, v, tensors, with_lse)

    return run


def plan_of(call: Call) -> DensePlan:
    """The plan of a call whose lengths and ranges are contiguous."""
    t, o = call.operands, call.options
    shapes = tuple(x if x is None else x.shape for x in (t.q_scale, t.k_scale, t.v_scale))
    how = o.qk_dtype, o.smooth_key, o.rotate
    return _plan(Geometry.of(call, scales=shapes, quantization=how))


def has_head_dim(D: int) -> bool:
    """Whether there are kernels for heads of D features in query, key and value."""
    return D in range(16, MAX_QUANTIZED_HEAD_DIM + 1, 16)


def packed_error(call: Call) -> str | None:
    """Why the kernels cannot run a packed call with 8-bit products, or None."""
    (q, k, v), page = call[:3], call.key.shape[1]
    if q.dtype != E4M3:
        return f"attends packed sequences in float8_e4m3fn, query is {dtype_name(q.dtype)}"
    if reason := head_error(q.shape[-1], v.shape[-1]):
        return reason
    if call.is_paged and page not in _PAGES and page % 64:
        return f"needs pages of 16, 32 or a multiple of 64 keys, got {page}"
    sequences = Sequences.of(_geometry_of(call))
    blocks = sequences.key_blocks * VALUE_BLOCK
    if (needed := blocks * k.shape[-2] * v.shape[-1]) > MAX_VALUE_BYTES:
        return f"transposes at most {MAX_VALUE_BYTES} bytes of values, got {needed}"
    return limit_error(call.scale, len(q), max(sequences.keys, blocks))


def prepare_packed(call: Call) -> Run:
    """What runs packed calls with the geometry of this one."""
    plan = _plan_of(call) if rows_are_aligned(call.query, call.key, call.value) else None
    options = call.without_tensors()

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        used, addresses = plan, q.data_ptr() | k.data_ptr() | v.data_ptr()
        if used is None or addresses & MISALIGNED:
            q, k, v = map(tma_aligned, (q, k, v))
            used = _plan_of(options._replace(query=q, key=k, value=v, operands=tensors))
        return used.run(q, k, v, tensors, with_lse)

    return run


def _plan_of(call: Call) -> PackedPlan:
    """The plan of a call whose queries and keys TMA can read; values need rows of whole 8 bytes."""
    return _packed_plan(_geometry_of(call))


def _geometry_of(call: Call) -> Geometry:
    """Of tokens and pages as they are given."""
    t, table = call.operands, call.operands.page_table
    return Geometry.of(
        call, table=table_layout(table),
        sequences=len(t.cu_seqlens_q) - 1 if table is None else len(table),
        scales=(t.q_scale.shape, t.k_scale.shape, t.v_scale.shape),
    )  # fmt: skip


class EightBitPlan(KernelPlan):
    """A launch that brings tensors into the kernel's order, and one that attends."""

    source: Quantizer | Scaled | ScaledPacked
    kernel: Kernel
    grid: tuple[int, int]
    is_dynamic: bool  # tiles are handed out on demand
    maps: list[TensorMap]
    scalars: bytes

    def load(self, g: Geometry, **features: int) -> None:
        """Ask for the kernel."""
        left, _, has_window = g.sides
        dtype = torch.bfloat16 if g.dtype == E4M3 else g.dtype
        self.kernel = kernel_of(
            self.config, g.device, dtype, window=has_window, left=left < UNBOUNDED,
            softcap=softcap_kind(g.softcap), sinks=g.has_sinks, **features,
        )  # fmt: skip
        self.out, self.lse = result_layouts(g, dtype)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands,
        with_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """out and lse, which is None unless asked for."""
        sinks = tensors.sinks
        if sinks is not None:
            sinks = sinks.float().contiguous()
        with on_device(self.device):
            stream, out = current_stream(self.device), empty(*self.out)
            lse = empty(*self.lse) if with_lse else None
            eight, memory = self.source.run(q, k, v, tensors, stream, with_lse or sinks is not None)
            q_map, k_map, v_map = self.maps
            params = _PARAMS.pack(
                q_map[eight.query], k_map[eight.key], v_map[eight.value],
                out.data_ptr(), address(lse), eight.q_scale, eight.k_scale, eight.v_scale,
                eight.offset, eight.mean, eight.kv_lens, eight.key_ranges, address(sinks),
                eight.counter if self.is_dynamic else 0, self.scalars, eight.pages,
                eight.key_starts,
            )  # fmt: skip
            self.kernel.launch(self.grid, stream, one_parameter(params), dependent=True)
            del memory  # what runs later in this stream may use it
        return out, lse


class DensePlan(EightBitPlan):
    """Of tensors (B, H, S, D), with 16 bits or in e4m3."""

    def configure(self, g: Geometry) -> None:
        """The tile, its kernel, and the launch before it."""
        (B, Hq, Sq, D), _, (*_, Dv) = g.shapes
        (qk_dtype, smooth_key, rotate), is_e4m3 = g.quantization, g.dtype == E4M3
        self.config = config = quantized_config(D, Dv, not is_e4m3)
        is_int8 = not is_e4m3 and qk_dtype in (None, torch.int8)
        self.load(
            g, is_int8=is_int8, kv_lens=g.has_lens, ranges=g.ranges is not None, signs=is_e4m3,
            head_scales=is_e4m3 and all(len(shape) < 3 for shape in g.scales[1:]),
            rotated=rotate * D,
        )  # fmt: skip
        if is_e4m3:
            self.source = Scaled(g)
        else:
            subtracts_mean = smooth_key and not g.softcap
            self.source = Quantizer(
                g, is_int8, subtracts_mean, rotate, not config.quantises_queries
            )
        self.m_blocks = -(-Sq // config.block_m)
        self.tiles, ctas = B * Hq * self.m_blocks, processors(g.device)
        is_uneven = Sq % config.block_m > 0 or g.sides[2] or g.has_lens or bool(g.ranges)
        self.is_dynamic, self.grid = is_uneven and self.tiles > ctas, (min(self.tiles, ctas), 1)

    def map_tensors(self, g: Geometry) -> None:
        """Queries, keys and transposed values."""
        self.maps = _maps(g, self.source, self.config)

    def pack_parameters(self, g: Geometry) -> None:
        """Sizes, strides of ranges, and factors."""
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (_, _, _, Dv) = g.shapes
        (left, right, _), units, group = g.sides, g.units, Hq // Hkv
        self.scalars = _SCALARS.pack(
            *(B, Hq, group, Sq, Sk, Dv, left, right, self.m_blocks, self.tiles),
            group * key_section(B * Hkv, Sk, (D + Dv) // 2),
            *(g.ranges[2:] if g.ranges else (0, 0, 0)),
            units.inside_tanh,
            units.log2,
        )


class PackedPlan(EightBitPlan):
    """Of e4m3 tokens (T, H, D), whose keys may be in pages."""

    def configure(self, g: Geometry) -> None:
        """The tile, its kernel, and the launch before it."""
        self.sequences, (T, Hq, D), Dv = Sequences.of(g), g.shapes[0], g.shapes[2][-1]
        self.config = config = packed_config(D, Dv, g.shapes[1][1] if g.table else 0)
        self.load(g, **PACKED_FEATURES)
        self.source = ScaledPacked(g, self.sequences)
        self.tiles = Hq * (T // config.block_m + g.sequences + 2)
        ctas = min(self.tiles, processors(g.device))
        self.is_dynamic, self.grid = self.tiles > ctas, (ctas, 1)

    def map_tensors(self, g: Geometry) -> None:
        """Queries, keys or pages, and transposed values."""
        self.keys = self.sequences.key_blocks * VALUE_BLOCK
        self.maps = _packed_maps(g, self.config, self.keys)

    def pack_parameters(self, g: Geometry) -> None:
        """Sizes and factors."""
        (T, Hq, _), (*_, Hkv, Dv), (left, right, _), units = *g.shapes[::2], g.sides, g.units
        self.scalars = _SCALARS.pack(
            *(g.sequences, Hq, Hq // Hkv, T, self.keys, Dv, left, right, 1, self.tiles, 1),
            *(0, 0, 0),
            units.inside_tanh,
            units.log2,
        )


def _maps(g: Geometry, source: Quantizer | Scaled, config: QuantizedConfig) -> list[TensorMap]:
    """Tensor maps of queries, keys and transposed values."""
    (B, Hkv, _, Dv), keys, block_n = g.shapes[2], source.blocks * VALUE_BLOCK, config.block_n
    of_queries, of_keys = zip(g.shapes, source.strides)
    if config.quantises_queries:  # which have 16 bits: a map of bytes
        B, Hq, Sq, D = g.shapes[0]
        of_queries = (B, Hq, Sq, 2 * D), tuple(2 * x for x in g.strides[0])
    of_values = (g.shapes[2][0], Hkv, Dv, keys), (Hkv * Dv * keys, Dv * keys, keys, 1)
    return [
        TensorMap(torch.uint8, *of_queries, 64),
        TensorMap(torch.uint8, *of_keys, block_n),
        TensorMap(torch.uint8, *of_values, Dv, row_bytes=block_n),
    ]


def _packed_maps(g: Geometry, config: QuantizedConfig, keys: int) -> list[TensorMap]:
    """Tensor maps of queries, of keys or pages, and of transposed values of `keys` keys."""
    (T, Hq, D), k_shape, (*_, Hkv, Dv) = g.shapes
    (q_token, q_head, _), k_strides, _ = g.strides
    if g.table:
        k_shape = [k_shape[i] for i in (0, 2, 1, 3)]
        k_strides = [k_strides[i] for i in (0, 2, 1, 3)]
    else:
        k_shape = 1, k_shape[1], k_shape[0], k_shape[2]
        k_strides = 0, k_strides[1], k_strides[0], k_strides[2]
    return [
        TensorMap(torch.uint8, (1, Hq, T, D), (0, q_head, q_token, 1), 64),
        TensorMap(torch.uint8, k_shape, k_strides, config.copy_keys or config.block_n),
        TensorMap(
            torch.uint8, (1, Hkv, Dv, keys), (0, Dv * keys, keys, 1), Dv, row_bytes=VALUE_BLOCK
        ),
    ]


def packed_config(D: int, Dv: int, page: int = 0) -> QuantizedConfig:
    """The tile of packed calls; `page`: keys of a page, 0 without pages."""
    return dataclasses.replace(quantized_config(D, Dv), packs_queries=True, copy_keys=min(page, 64))


_plan = functools.lru_cache(maxsize=1024)(DensePlan)
_packed_plan = functools.lru_cache(maxsize=1024)(PackedPlan)


# What the kernel reads: quantised tensors, or e4m3 tensors with their scales.

THREADS = 256
_CTAS = 4  # of those that find the largest values, on a multiprocessor
_QUERY_ROWS = 16  # of a CTA's lanes: QUERY_UNITS * QUERY_STEPS of quantize.cu
_KEY_STEPS = 4  # blocks of a CTA, in quantize.cu
_QUANTIZE_PARAMS = struct_layout("quantize.cu", "QuantizeParams")
_QUANTIZE_ADDRESSES, _QUANTIZE_SIZES = (
    _QUANTIZE_PARAMS.packer("q", "kv_lens"),
    _QUANTIZE_PARAMS.packer("q_strides"),
)
_PAGE_TABLE = struct_layout("sequences.cuh", "PageTable").packer()
_ALIGNMENT = 256


class Addresses(NamedTuple):
    """Where the quantised tensors of a call lie, by address."""

    query: int  # (B, Hq, Sq, D), int8 or e4m3, or with 16 bits
    key: int  # (B, Hkv, Sk, D)
    value: int  # (B, Hkv, Dv, blocks of VALUE_BLOCK keys), e4m3, in the order of quantize.cu
    q_scale: int  # (B, Hq, Sq)
    k_scale: int  # (B, Hkv, 2 blocks), of SCALE_BLOCK keys each
    v_scale: int  # (B, Hkv, Dv)
    offset: int  # (B, Hq, Sq), what the scores lack, or 0
    mean: int  # (B, Hkv, D), of the keys, or 0
    counter: int  # a word that is 0
    kv_lens: int
    key_ranges: int = 0
    pages: bytes = bytes(_PAGE_TABLE.size)
    key_starts: int = 0  # (B, 2): the first key and the first block of each sequence


class Quantizer:
    """Quantises the tensors of calls with one geometry.

    `blocks` of keys, and the `strides` of quantised query and key, describe what it writes.
    """

    def __init__(
        self, g: Geometry, is_int8: bool, subtracts_mean: bool, rotate: bool,
        with_queries: bool = True,
    ) -> None:  # fmt: skip
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (_, _, _, Dv) = g.shapes
        self.blocks = -(-Sk // VALUE_BLOCK)
        self.strides = (Hq * Sq * D, Sq * D, D, 1), (Hkv * Sk * D, Sk * D, D, 1)
        self._subtracts_mean, self._with_queries = subtracts_mean, with_queries
        largest, mean = B * Hkv * Dv, B * Hkv * D if subtracts_mean else 0
        tokens = B * Hq * Sq
        quantised = tokens * with_queries
        self._counters = 4 * largest, 4 * (largest + B * Hkv)
        self._zeroed = largest + 2 * B * Hkv + 1
        sizes = (
            4 * self._zeroed, 4 * mean, quantised * D, B * Hkv * Sk * D,
            B * Hkv * Dv * self.blocks * VALUE_BLOCK, 4 * quantised, 8 * B * Hkv * self.blocks,
            4 * largest, 4 * tokens if subtracts_mean else 0,
        )  # fmt: skip
        self._offsets, total = offsets_of(sizes)
        self._memory = (total // 4,), (1,), torch.int32
        ctas = -(-_CTAS * processors(g.device) // (B * Hkv))
        parts = max(1, min(ctas, -(-Sk // SCALE_BLOCK)))
        of_keys = parts + subtracts_mean + -(-self.blocks // value_blocks(Dv))
        of_keys += -(-2 * self.blocks // _KEY_STEPS)
        query_parts = with_queries * -(-Sq * lanes(D) // (THREADS * _QUERY_ROWS))
        self._grid = B * (Hkv * of_keys + Hq * query_parts), 1
        self._scalars = _QUANTIZE_SIZES.pack(
            *(*g.strides[0][:3], *g.strides[1][:3], *g.strides[2][:3]),
            *(B, Hq, Hq // Hkv, Sq, Sk, D, Dv, parts, g.units.gradient, (D & -D) ** -0.5),
        )
        defines = quantize_defines(g.dtype, D, Dv, is_int8, rotate)
        self._kernel = kernel("quantize", "quantize", g.device, THREADS, 0, tuple(defines.items()))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands, stream: int,
        with_offset: bool,
    ) -> tuple[Addresses, Tensor]:  # fmt: skip
        """The addresses of the results, and the memory that holds them.

        `with_offset`: compute what the scores lack, which changes LSE and the weight of sinks only.
        """
        memory = empty(*self._memory)
        begin = memory.data_ptr()
        set_zero(begin, self._zeroed, stream)
        largest, mean, q8, k8, v8, q_scale, k_scale, v_scale, offset = [
            begin + x for x in self._offsets
        ]
        if not self._subtracts_mean:
            mean = 0
        if not (self._subtracts_mean and with_offset):
            offset = 0
        if not self._with_queries:
            q8 = 0
        lens = address(tensors.kv_lens)
        found = Addresses(
            q8 or q.data_ptr(), k8, v8, q_scale, k_scale, v_scale, offset, mean,
            largest + 4 * (self._zeroed - 1), lens, address(tensors.key_ranges),
        )  # fmt: skip
        params = _QUANTIZE_ADDRESSES.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q8, k8, v8, q_scale, k_scale, v_scale,
            offset if q8 else 0, mean, largest, *(largest + at for at in self._counters), lens,
        ) + self._scalars  # fmt: skip
        self._kernel.launch(self._grid, stream, one_parameter(params))
        return found, memory


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these numbers of bytes begin in one allocation, and its size."""
    *offsets, total = itertools.accumulate(
        (-(-x // _ALIGNMENT) * _ALIGNMENT for x in sizes), initial=0
    )
    return offsets, total


def quantize_defines(
    dtype: torch.dtype, D: int, Dv: int, is_int8: bool = True, rotate: bool = False
) -> dict[str, int]:
    """The macros of the kernels; a row has a power of two of lanes, each of eight features."""
    return {
        "IS_BF16": int(dtype == torch.bfloat16), "IS_INT8": int(is_int8),
        "HEAD_LANES": lanes(D), "VALUE_LANES": lanes(Dv),
        "ROTATED_BITS": rotated_bits(D) if rotate else 0,
    }  # fmt: skip


def value_blocks(Dv: int) -> int:
    """Blocks of values of a CTA, as quantize.cu has them."""
    return 2 if lanes(Dv) < 32 else 1


def lanes(features: int) -> int:
    """Lanes that hold a row, eight features each."""
    return 8 if features <= 64 else 16 if features <= 128 else 32


# e4m3 query, key and value with their scales, as the kernel with 8-bit products reads them.
#
# Query and key are read where they lie; values are transposed, and scales repeated, in a launch of
# their own.

_E4M3_PARAMS = struct_layout("prepare_e4m3.cu", "ScaledParams")
_E4M3_ADDRESSES = _E4M3_PARAMS.packer("v", "kv_lens")
_E4M3_SIZES = _E4M3_PARAMS.packer("v_strides")


def scale_error(k: Tensor, scale: Tensor) -> str | None:
    """Why the kernel cannot take these scales of keys, or None."""
    if scale.dim() == 3 and scale.shape[2] != -(-k.shape[2] // SCALE_BLOCK):
        return f"has no scale for each key, but for each {SCALE_BLOCK}"
    return None


class Scaled:
    """Brings the tensors of calls with one geometry into the kernel's order.

    `blocks` of keys, and the `strides` of query and key, are those of `Quantizer`.
    """

    def __init__(self, g: Geometry) -> None:
        (B, Hq, Sq, _), (_, Hkv, Sk, _), (_, _, _, Dv) = g.shapes
        self.blocks, self.strides = -(-Sk // VALUE_BLOCK), g.strides[:2]
        queries, keys, channels = B * Hq * Sq, B * Hkv * 2 * self.blocks, B * Hkv * Dv
        values = channels * self.blocks * VALUE_BLOCK
        self._offsets, size = offsets_of((values, 4, 4 * queries, 4 * keys, 4 * channels))
        self._memory = (size // 4,), (1,), torch.int32
        of_queries, of_keys, of_values = map(_count, g.scales)
        tokens = SCALE_BLOCK if of_queries != Sq else 1
        self._scalars = _E4M3_SIZES.pack(
            *(*g.strides[2][:3], of_queries, tokens, of_keys, 1, of_values, 1),
            *(B, Hq, Hkv, Sq, Sk, Dv),
        )
        defines = e4m3_defines(Dv)
        self._kernel = kernel("scaled", "scaled", g.device, THREADS, 0, tuple(defines.items()))
        repeating = -(-(queries + keys + channels) // THREADS)
        self._grid = B * Hkv * self.blocks + repeating, 1

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands, stream: int,
        with_offset: bool,
    ) -> tuple[Addresses, Tensor]:  # fmt: skip
        """Launch the kernel; returns its addresses and the memory that it writes."""
        memory = empty(*self._memory)
        begin = memory.data_ptr()
        v8, counter, q_scale, k_scale, v_scale = [begin + x for x in self._offsets]
        set_zero(counter, 1, stream)
        lens = address(tensors.kv_lens)
        params = _E4M3_ADDRESSES.pack(
            v.data_ptr(),
            *map(address, (tensors.q_scale, tensors.k_scale, tensors.v_scale)),
            v8,
            q_scale,
            k_scale,
            v_scale,
            lens,
        )
        self._kernel.launch(self._grid, stream, one_parameter(params + self._scalars))
        found = Addresses(
            q.data_ptr(), k.data_ptr(), v8, q_scale, k_scale, v_scale, 0, 0, counter, lens,
            address(tensors.key_ranges),
        )  # fmt: skip
        return found, memory


def _count(shape: tuple[int, ...]) -> int:
    """Scales of a head in a tensor of this shape; 0 if there is one for all heads."""
    return 0 if len(shape) < 2 else 1 if len(shape) == 2 else shape[2]


def e4m3_defines(Dv: int) -> dict[str, int]:
    """The macros of the kernel."""
    return {"IS_BF16": 1, "VALUE_LANES": lanes(Dv)}


# e4m3 tensors of packed sequences, as the kernel with 8-bit products reads them.
#
# Query and key are read where they lie, also in pages; values are transposed, and scales repeated,
# in a launch of their own, which also writes where each sequence's keys lie.

_SEQUENCES_LAYOUT = struct_layout("prepare_e4m3.cu", "ScaledPackedParams")
_SEQUENCES_SIZES = _SEQUENCES_LAYOUT.packer("v_strides")
_SEQUENCES_PARAMS = _SEQUENCES_LAYOUT.packer(packed=("pages:pages", "v_strides:key_blocks"))


class Sequences(NamedTuple):
    """The sequences and tokens of a packed call, and the location of its keys."""

    count: int
    queries: int  # of all sequences
    keys: int  # of all sequences; in pages, of one sequence whose pages are all in use
    pages: tuple[int, int, int] | None = None  # a table's stride, keys of a page, number of pages

    @classmethod
    def of(cls, g: Geometry) -> Sequences:
        """The sequences of a packed call."""
        tokens, (keys, page, *_) = g.shapes[0][0], g.shapes[1]
        if g.table is None:
            return cls(g.sequences, tokens, keys)
        width, stride = g.table
        return cls(g.sequences, tokens, width * page, (stride, page, keys))

    @property
    def key_blocks(self) -> int:
        """Blocks of VALUE_BLOCK keys, as cuda/prepare_e4m3.cu counts them."""
        if self.pages is not None:
            return self.count * -(-self.keys // VALUE_BLOCK)
        return self.keys // VALUE_BLOCK + self.count

    def table(self, tensors: Operands) -> bytes:
        """The page table, without pages only the borders of the queries, as kernels have them."""
        borders = tensors.cu_seqlens_q.data_ptr()
        return _PAGE_TABLE.pack(
            address(tensors.page_table), *(self.pages or (0, 0, 0)), 0, 0, borders
        )


class ScaledPacked:
    """Brings the tensors of packed calls with one geometry into the kernel's order."""

    def __init__(self, g: Geometry, sequences: Sequences) -> None:
        Hq, (*_, Hkv, Dv), B, blocks = (
            g.shapes[0][1],
            g.shapes[2],
            g.sequences,
            sequences.key_blocks,
        )
        *page, token, head, _ = g.strides[2]
        queries, keys, channels = Hq * sequences.queries, Hkv * 2 * blocks, B * Hkv * Dv
        values = Hkv * Dv * blocks * VALUE_BLOCK
        sizes = 4, values, 4 * queries, 4 * keys, 4 * channels, 4 * B, 8 * B
        self._offsets, size = offsets_of(sizes)
        self._memory = (size // 4,), (1,), torch.int32
        self._sequences = sequences
        self._sizes = _SEQUENCES_SIZES.pack(
            *(page or [0]), head, token, *(int(len(shape) == 2) for shape in g.scales),
            *(B, Hq, Hkv, sequences.queries, sequences.keys, Dv, blocks),
        )  # fmt: skip
        defines = packed_e4m3_defines(Dv, sequences.pages is not None)
        self._kernel = kernel(
            "scaled_packed", "scaled_packed", g.device, THREADS, 0, tuple(defines.items())
        )
        self._grid = Hkv * blocks + -(-(queries + keys + channels + B) // THREADS), 1

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands, stream: int,
        with_offset: bool,
    ) -> tuple[Addresses, Tensor]:  # fmt: skip
        """Launch the kernel; returns its addresses and the memory that it writes."""
        t, memory = tensors, empty(*self._memory)
        begin = memory.data_ptr()
        counter, v8, q_scale, k_scale, v_scale, lens, starts = [begin + x for x in self._offsets]
        set_zero(counter, 1, stream)
        table = self._sequences.table(t)
        params = _SEQUENCES_PARAMS.pack(
            v.data_ptr(), *map(address, (t.q_scale, t.k_scale, t.v_scale)),
            address(t.cu_seqlens_k), address(t.kv_lens),
            v8, q_scale, k_scale, v_scale, lens, starts, table, self._sizes,
        )  # fmt: skip
        self._kernel.launch(self._grid, stream, one_parameter(params))
        found = Addresses(
            q.data_ptr(), k.data_ptr(), v8, q_scale, k_scale, v_scale, 0, 0, counter, lens, 0,
            table, starts,
        )  # fmt: skip
        return found, memory


def packed_e4m3_defines(Dv: int, is_paged: bool) -> dict[str, int]:
    """The macros of the kernel."""
    return {"IS_BF16": 1, "VALUE_LANES": lanes(Dv), "IS_PAGED": int(is_paged)}
