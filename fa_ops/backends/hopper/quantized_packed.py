"""Attention with 8-bit products of packed e4m3 sequences on sm_90a: their keys follow one another,
or are in pages.

A tile has queries of one sequence, which the kernel finds in cu_seqlens, as those of `paged` do.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import QuantizedConfig, quantized_config
from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import (
    TensorMap,
    address,
    current_stream,
    empty,
    kernel,
    on_device,
    one_parameter,
    processors,
)
from fa_ops.backends.hopper.problem import (
    MISALIGNED,
    UNBOUNDED,
    ScoreUnits,
    limit_error,
    softcap_kind,
    tma_aligned,
    window_sides,
)
from fa_ops.backends.hopper.quantize import VALUE_BLOCK
from fa_ops.backends.hopper.quantized import E4M3, head_error, kernel_defines
from fa_ops.backends.hopper.scaled_packed import ScaledPacked, Sequences
from fa_ops.call import Call, PackedQuantizedTensors, Run
from fa_ops.geometry import rows_are_aligned
from fa_ops.types import default_scale, dtype_name

MAX_VALUE_BYTES = 1 << 32  # of the transposed values, for which each call allocates memory
_PAGES = 16, 32  # keys, and multiples of 64: what copies of whole swizzle atoms bring
_LAYOUT = struct_layout("quantized.cu", "QuantizedParams")
_PARAMS = _LAYOUT.packer(packed=("q:q", "k:k", "v:v", "B:scale_log2", "pages:pages"))
_SCALARS = _LAYOUT.packer("B", "scale_log2")


def support_error(call: Call) -> str | None:
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


def prepare(call: Call) -> Run:
    """What runs packed calls with the geometry of this one."""
    plan = _plan_of(call) if rows_are_aligned(call.query, call.key, call.value) else None
    options = call.without_tensors()

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: PackedQuantizedTensors, with_lse: bool = True
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
    return _plan(
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
        self.maps = _maps(shapes, strides, is_paged, config, keys)
        self.scalars = _SCALARS.pack(
            *(sequences.count, Hq, Hq // Hkv, T, keys, Dv, left, right, 1, tiles, 1),
            *(0, 0, 0),
            units.inside_tanh,
            units.log2,
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: PackedQuantizedTensors,
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
            params = _PARAMS.pack(
                q_map[eight.query], k_map[eight.key], v_map[eight.value],
                out.data_ptr(), address(lse), eight.q_scale, eight.k_scale, eight.v_scale,
                eight.offset, 0, found.kv_lens, 0, address(sinks),
                eight.counter if self.is_dynamic else 0, self.scalars,
                self.sequences.table(tensors), found.key_starts,
            )  # fmt: skip
            self.kernel.launch(self.grid, stream, one_parameter(params), dependent=True)
            del memory  # what runs later in this stream may use it
        return out, lse


def _maps(shapes, strides, is_paged: bool, config: QuantizedConfig, keys: int) -> list[TensorMap]:
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


_plan = functools.lru_cache(maxsize=1024)(PackedPlan)
