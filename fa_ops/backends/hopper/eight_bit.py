"""Attention with 8-bit products on sm_90a, of dense tensors and of packed sequences.

16-bit tensors are quantised first (`eight_bit_inputs`). The keys of packed e4m3 sequences follow
one another, or are in pages; a tile has queries of one sequence, which the kernel finds in
cu_seqlens.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from fa_ops.backends.hopper import eight_bit_inputs
from fa_ops.backends.hopper.configs import QuantizedConfig, quantized_config
from fa_ops.backends.hopper.eight_bit_inputs import VALUE_BLOCK, ScaledPacked, Sequences
from fa_ops.backends.hopper.problem import (
    MISALIGNED,
    UNBOUNDED,
    ScoreUnits,
    key_section,
    limit_error,
    shared_strides,
    softcap_kind,
    tma_aligned,
    window_sides,
)
from fa_ops.backends.hopper.runtime.launch import (
    TensorMap,
    address,
    current_stream,
    empty,
    kernel,
    on_device,
    one_parameter,
    processors,
)
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import Call, Run, general
from fa_ops.call.options import (
    MAX_QUANTIZED_HEAD_DIM,
    Operands,
    Quantization,
    Spec,
    default_scale,
    dtype_name,
    rows_are_aligned,
)

# Attention with 8-bit products on sm_90a: tensors are brought into 8 bits, then attended.

_PARAMS = struct_layout("quantized.cu", "QuantizedParams")
_ADDRESSES, _SCALARS = _PARAMS.packer("out", "tile_counter"), _PARAMS.packer("B", "scale_log2")
_NO_SEQUENCES = bytes(_PARAMS.size - _PARAMS.fields["pages"].offset)  # of packed calls alone
E4M3 = torch.float8_e4m3fn


def support_error(q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec) -> str | None:
    """Why the kernels cannot run a call with 8-bit products, or None."""
    D, Dv = q.shape[3], v.shape[3]
    if q.dtype not in (torch.bfloat16, torch.float16, E4M3):
        return f"quantises bfloat16 and float16, query is {dtype_name(q.dtype)}"
    if reason := head_error(D, Dv):
        return reason
    if q.dtype == E4M3 and (reason := eight_bit_inputs.scale_error(k, how)):
        return reason
    return limit_error(default_scale(spec, D), q.shape[2], k.shape[2])


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


def quantized_forward(
    q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype, bfloat16 for e4m3, laid out (B, Sq, Hq, Dv), and lse."""
    q, k, v = tma_aligned(q), tma_aligned(k), tma_aligned(v)
    lens, ranges = spec.kv_lens, spec.key_ranges
    if lens is not None:
        lens = lens.contiguous()
    if ranges is not None and ranges.stride(3) != 1:
        ranges = ranges.contiguous()
    scales = (t if t is None else t.contiguous() for t in how[:3])
    tensors = Operands(
        sinks=spec.sinks, kv_lens=lens, key_ranges=ranges, **dict(zip(how._fields, scales))
    )
    return plan_of(q, k, v, how, spec, tensors).run(q, k, v, tensors)


def prepare(call: Call) -> Run:
    """What runs calls with the geometry of this one."""
    q, k, v = call.query, call.key, call.value
    if not rows_are_aligned(q, k, v):
        return general("8-bit forward", quantized_forward).prepare(call)
    options = call.without_tensors()
    plan = plan_of(q, k, v, call.quantization, call.spec, call.tensors)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            return quantized_forward(q, k, v, *options.arguments_with(tensors))
        return plan.run(q, k, v, tensors, with_lse)

    return run


def plan_of(
    q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec, tensors: Operands
) -> QuantizedPlan:
    """The plan of a call whose lengths and ranges are contiguous."""
    scales = tensors.q_scale, tensors.k_scale, tensors.v_scale
    return _plan(
        q.dtype,
        q.device.index,
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        how[3:],
        tuple(t if t is None else t.shape for t in scales),
        (spec.is_causal, spec.scale, spec.window_left, spec.window_right, spec.softcap),
        tensors.kv_lens is not None,
        None if tensors.key_ranges is None else shared_strides(tensors.key_ranges),
        tensors.sinks is not None,
    )


def has_head_dim(D: int) -> bool:
    """Whether there are kernels for heads of D features in query, key and value."""
    return D in range(16, MAX_QUANTIZED_HEAD_DIM + 1, 16)


class QuantizedPlan:
    """The part of a call that depends on its geometry only, not on addresses or values."""

    def __init__(
        self,
        dtype,
        device,
        shapes,
        strides,
        how,
        scales,
        scalar_options,
        has_lens,
        ranges,
        has_sinks,
    ):
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (_, _, _, Dv) = shapes
        causal, scale, left, right, softcap = scalar_options
        qk_dtype, smooth_key, rotate = how
        left, right, has_window = window_sides(causal, left, right)
        units = ScoreUnits.of(D, scale, softcap)
        is_int8 = dtype != E4M3 and qk_dtype in (None, torch.int8)
        config = quantized_config(D, Dv, dtype != E4M3)
        self.device = device
        signs = dtype == E4M3
        head_scales = signs and all(len(shape) < 3 for shape in scales[1:])
        if dtype == E4M3:
            self.source, dtype = (
                eight_bit_inputs.Scaled(device, shapes, strides, scales),
                torch.bfloat16,
            )
        else:
            self.source = eight_bit_inputs.Quantizer(
                dtype, device, shapes, strides, units.gradient, is_int8,
                smooth_key and not softcap, rotate, not config.quantises_queries,
            )  # fmt: skip
        m_blocks = -(-Sq // config.block_m)
        tiles = B * Hq * m_blocks
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        is_uneven = Sq % config.block_m > 0 or has_window or has_lens or bool(ranges)
        self.is_dynamic, self.grid = is_uneven and tiles > sms, (min(tiles, sms), 1)
        defines = kernel_defines(
            config, dtype, is_int8, window=has_window, left=left < UNBOUNDED, kv_lens=has_lens,
            ranges=ranges is not None, softcap=softcap and softcap_kind(softcap), sinks=has_sinks,
            signs=signs, rotated=rotate * D, head_scales=head_scales,
        )  # fmt: skip
        self.kernel = kernel(
            "quantized", "quantized", device, config.threads, config.shared_bytes,
            tuple(defines.items()),
        )  # fmt: skip
        self.out = (B, Hq, Sq, Dv), (Sq * Hq * Dv, Dv, Hq * Dv, 1), dtype
        self.lse = (B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32
        raw = strides[0] if config.quantises_queries else None
        self.maps = _maps(shapes, self.source, config.block_n, raw)
        group = Hq // Hkv
        self.scalars = _SCALARS.pack(
            *(B, Hq, group, Sq, Sk, Dv, left, right, m_blocks, tiles),
            group * key_section(B * Hkv, Sk, (D + Dv) // 2),
            *(ranges or (0, 0, 0)),
            units.inside_tanh,
            units.log2,
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse, which is None unless asked for."""
        sinks, kv_lens, key_ranges = tensors.sinks, tensors.kv_lens, tensors.key_ranges
        if sinks is not None:
            sinks = sinks.float().contiguous()
        with on_device(self.device):
            stream, out = current_stream(self.device), empty(*self.out)
            lse = empty(*self.lse) if with_lse else None
            eight, memory = self.source.run(q, k, v, tensors, stream, with_lse or sinks is not None)
            words = _ADDRESSES.pack(
                out.data_ptr(), address(lse), eight.q_scale, eight.k_scale, eight.v_scale,
                eight.offset, eight.mean, address(kv_lens), address(key_ranges), address(sinks),
                eight.counter if self.is_dynamic else 0,
            )  # fmt: skip
            q_map, k_map, v_map = self.maps
            maps = q_map[eight.query] + k_map[eight.key] + v_map[eight.value]
            params = one_parameter(maps + words + self.scalars + _NO_SEQUENCES)
            self.kernel.launch(self.grid, stream, params, dependent=True)
            del memory  # what runs later in this stream may use it
        return out, lse


def _maps(
    shapes: tuple[tuple[int, ...], ...],
    source: eight_bit_inputs.Quantizer | eight_bit_inputs.Scaled,
    block_n: int,
    raw: tuple[int, ...] | None,
) -> list[TensorMap]:
    """Tensor maps of queries, keys and transposed values, for tiles of `block_n` keys.

    `raw`: the strides of queries with 16 bits, whose map is of bytes.
    """
    (B, Hkv, _, Dv), keys = shapes[2], source.blocks * eight_bit_inputs.VALUE_BLOCK
    of_queries, of_keys = zip(shapes, source.strides)
    if raw:
        B, Hq, Sq, D = shapes[0]
        of_queries = (B, Hq, Sq, 2 * D), tuple(2 * x for x in raw)
    of_values = (shapes[2][0], Hkv, Dv, keys), (Hkv * Dv * keys, Dv * keys, keys, 1)
    return [
        TensorMap(torch.uint8, *of_queries, 64),
        TensorMap(torch.uint8, *of_keys, block_n),
        TensorMap(torch.uint8, *of_values, Dv, row_bytes=block_n),
    ]


def kernel_defines(
    config: QuantizedConfig, dtype: torch.dtype, is_int8: bool = True, *, window: bool = False,
    left: bool = False, kv_lens: bool = False, ranges: bool = False, softcap: int = 0,
    sinks: bool = False, signs: bool = False, rotated: int = 0, head_scales: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The macros of a kernel.

    `window`: causal or a window; `left`: the window has a left side; `signs`: scales may be
    negative; `rotated`: features of queries that are rotated here; `head_scales`: all keys of a
    head have one scale, and all of its values.
    """
    return config.defines() | {
        "IS_BF16": int(dtype == torch.bfloat16),
        "IS_INT8": int(is_int8),
        "HAS_WINDOW": int(window),
        "HAS_LEFT": int(left or ranges),
        "HAS_KV_LENS": int(kv_lens),
        "HAS_RANGES": int(ranges),
        "HAS_SOFTCAP": int(softcap),
        "HAS_SINKS": int(sinks),
        "HAS_SIGNS": int(signs),
        "HEAD_SCALES": int(head_scales),
        "ROTATED_BITS": eight_bit_inputs.rotated_bits(rotated) if config.quantises_queries else 0,
    }


_plan = functools.lru_cache(maxsize=1024)(QuantizedPlan)


MAX_VALUE_BYTES = 1 << 32  # of the transposed values, for which each call allocates memory
_PAGES = 16, 32  # keys, and multiples of 64: what copies of whole swizzle atoms bring
_SEQUENCES_LAYOUT = struct_layout("quantized.cu", "QuantizedParams")
_PACKED_PARAMS = _SEQUENCES_LAYOUT.packer(
    packed=("q:q", "k:k", "v:v", "B:scale_log2", "pages:pages")
)
_PACKED_SCALARS = _SEQUENCES_LAYOUT.packer("B", "scale_log2")


def packed_error(call: Call) -> str | None:
    """Why the kernels cannot run a packed call with 8-bit products, or None."""
    q, k, v, spec = call.query, call.key, call.value, call.spec
    if q.dtype != E4M3:
        return f"attends packed sequences in float8_e4m3fn, query is {dtype_name(q.dtype)}"
    if reason := head_error(q.shape[-1], v.shape[-1]):
        return reason
    table, page = call.cache and call.cache.page_table, k.shape[1]
    if table is not None and page not in _PAGES and page % 64:
        return f"needs pages of 16, 32 or a multiple of 64 keys, got {page}"
    sequences = _sequences_of(call)
    blocks = sequences.key_blocks * VALUE_BLOCK
    if (needed := blocks * k.shape[-2] * v.shape[-1]) > MAX_VALUE_BYTES:
        return f"transposes at most {MAX_VALUE_BYTES} bytes of values, got {needed}"
    return limit_error(default_scale(spec, q.shape[-1]), len(q), max(sequences.keys, blocks))


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
            used = _plan_of(options.with_tensors(tensors)._replace(query=q, key=k, value=v))
        return used.run(q, k, v, tensors, with_lse)

    return run


def _plan_of(call: Call) -> PackedPlan:
    """The plan of a call whose queries and keys TMA can read; values need rows of whole 8 bytes."""
    q, k, v, spec = call.query, call.key, call.value, call.spec
    is_paged = call.cache is not None
    return _packed_plan(
        q.device.index,
        _sequences_of(call),
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        tuple(t.shape for t in call.quantization[:3]),
        (spec.is_causal, spec.scale, spec.window_left, spec.window_right, spec.softcap),
        spec.sinks is not None,
        is_paged,
    )


def _sequences_of(call: Call) -> Sequences:
    tokens, keys = len(call.query), len(call.key)
    if call.cache is None:
        return Sequences(len(call.packing.cu_seqlens_q) - 1, tokens, keys)
    table, page = call.cache.page_table, call.key.shape[1]
    count, width = table.shape
    return Sequences(count, tokens, width * page, (table.stride(0), page, keys))


class PackedPlan:
    """The part of a call that depends on its geometry only, not on addresses or values."""

    def __init__(
        self, device, sequences, shapes, strides, scales, scalar_options, has_sinks, is_paged
    ):
        (T, Hq, D), (*_, Hkv, _), (*_, Dv) = shapes
        causal, scale, left, right, softcap = scalar_options
        left, right, has_window = window_sides(causal, left, right)
        units = ScoreUnits.of(D, scale, softcap)
        config = packed_config(D, Dv, shapes[1][1] if is_paged else 0)
        self.device, self.sequences, self.has_sinks = device, sequences, has_sinks
        v_strides = strides[2] if is_paged else (0, *strides[2])
        v_strides = v_strides[0], v_strides[2], v_strides[1]  # pages, heads, tokens
        self.source = ScaledPacked(device, sequences, (Hq, Hkv), Dv, v_strides, scales)
        tiles = Hq * (T // config.block_m + sequences.count + 2)
        ctas = min(tiles, processors(device))
        self.is_dynamic, self.grid = tiles > ctas, (ctas, 1)
        defines = packed_defines(
            config, window=has_window, left=left < UNBOUNDED,
            softcap=softcap and softcap_kind(softcap), sinks=has_sinks,
        )  # fmt: skip
        self.kernel = kernel(
            "quantized", "quantized", device, config.threads, config.shared_bytes,
            tuple(defines.items()),
        )  # fmt: skip
        self.out = (T, Hq, Dv), (Hq * Dv, Dv, 1), torch.bfloat16
        self.lse = (Hq, T), (T, 1), torch.float32
        keys = sequences.key_blocks * VALUE_BLOCK
        self.maps = _packed_maps(shapes, strides, is_paged, config, keys)
        self.scalars = _PACKED_SCALARS.pack(
            *(sequences.count, Hq, Hq // Hkv, T, keys, Dv, left, right, 1, tiles, 1),
            *(0, 0, 0),
            units.inside_tanh,
            units.log2,
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands,
        with_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """out (Tq, Hq, Dv) and lse (Hq, Tq), which is None unless asked for."""
        sinks = tensors.sinks
        if sinks is not None:
            sinks = sinks.float().contiguous()
        with on_device(self.device):
            stream, out = current_stream(self.device), empty(*self.out)
            lse = empty(*self.lse) if with_lse else None
            found, memory = self.source.run(q, k, v, tensors, stream, with_lse or self.has_sinks)
            eight = found.numbers
            q_map, k_map, v_map = self.maps
            params = _PACKED_PARAMS.pack(
                q_map[eight.query], k_map[eight.key], v_map[eight.value],
                out.data_ptr(), address(lse), eight.q_scale, eight.k_scale, eight.v_scale,
                eight.offset, 0, found.kv_lens, 0, address(sinks),
                eight.counter if self.is_dynamic else 0, self.scalars,
                self.sequences.table(tensors), found.key_starts,
            )  # fmt: skip
            self.kernel.launch(self.grid, stream, one_parameter(params), dependent=True)
            del memory  # what runs later in this stream may use it
        return out, lse


def _packed_maps(
    shapes, strides, is_paged: bool, config: QuantizedConfig, keys: int
) -> list[TensorMap]:
    """Tensor maps of queries, of keys or pages, and of transposed values of `keys` keys."""
    (T, Hq, D), k_shape, (*_, Hkv, Dv) = shapes
    (q_token, q_head, _), k_strides = strides[:2]
    if is_paged:
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


def packed_defines(config: QuantizedConfig, **features) -> dict[str, int]:
    """The macros of a kernel, with `features` as `kernel_defines` has them."""
    return kernel_defines(config, torch.bfloat16, False, signs=True, head_scales=True, **features)


_packed_plan = functools.lru_cache(maxsize=1024)(PackedPlan)
