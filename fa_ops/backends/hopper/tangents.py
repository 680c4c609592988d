"""The tangents of out and lse on sm_90a, by one launch of cuda/tangent.cu."""

from __future__ import annotations

import dataclasses
import functools
from operator import getitem

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import HeadDims, head_dim_error, limit_error
from fa_ops.backends.hopper.kernel_plan import (
    UNBOUNDED,
    Geometry,
    KernelPlan,
    kernel_of,
    key_section,
    result_layouts,
    tma_aligned,
)
from fa_ops.backends.hopper.runtime.launch import (
    Params,
    TensorMap,
    address,
    current_stream,
    empty,
    on_device,
    processors,
    set_zero,
)
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import Call
from fa_ops.call.options import dtype_name

_PARAMS = struct_layout("tangent.cu", "TangentParams")
_ADDRESSES, _SCALARS = _PARAMS.packer("q", "tile_counter"), _PARAMS.packer("out_strides")
_COUNTER = (1,), (1,), torch.int32
_ROWS = 64  # queries of one TMA box, and of a consumer
_WIDEST = 128  # of heads whose sums, scores and tangents registers hold


@dataclasses.dataclass(frozen=True)
class TangentConfig(HeadDims):
    """The tile: two consumers of 64 queries, and stages of keys and values with their tangents."""

    block_n: int
    stages: int
    block_m: int = 128

    kernel = "tangent"
    features = dict.fromkeys(("window", "left", "kv_lens", "ranges", "grad_out"), 0)

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warpgroup copies, two compute."""
        return self.block_m * 2 + 128

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        consumers = self.block_m // _ROWS
        keys = self.stages * self.block_n * (self.head_dim + self.value_dim)
        barriers = 2 * consumers + 4 * self.stages + 4
        return 2 * 2 * (self.block_m * self.head_dim + keys) + 8 * barriers + 2 * 48 + 8

    def defines(self, **_: int) -> dict[str, int]:
        """The macros of this configuration."""
        return {
            "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim,
            "HEAD_FEATURES": self.head_features, "VALUE_FEATURES": self.value_features,
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "STAGES": self.stages,
            "QUERY_STAGES": 1, "PACKED_HEADS": 1, "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip


def tangent_config(D: int, Dv: int) -> TangentConfig:
    """The tile for heads of up to 128 features."""
    return TangentConfig(D, Dv, *((96, 3) if max(D, Dv) <= 64 else (80, 2)))


def tangent_error(call: Call) -> str | None:
    """Why the kernel cannot compute the tangents of a call's results, or None."""
    (q, k, v), t, o = call[:3], call.operands, call.options
    if call.is_backward:
        return "has no kernel for the tangents of gradients"
    if call.is_packed:
        return "has no kernel for the tangents of packed sequences"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"has tangents of bfloat16 and float16, query is {dtype_name(q.dtype)}"
    if reason := head_dim_error(q.shape[-1], v.shape[-1], _WIDEST):
        return f"{reason}, for tangents"
    options = {
        "attn_mask": t.attn_mask is not None, "alibi_slopes": t.alibi_slopes is not None,
        "sinks": t.sinks is not None, "key_ranges": t.key_ranges is not None,
        "softcap": o.softcap > 0, "dropout_p": o.dropout_p > 0,
    }  # fmt: skip
    for name, is_given in options.items():
        if is_given:
            return f"has no kernel for tangents with {name}"
    for name in ("query", "key", "value"):
        if getattr(call.tangents, name) is None:
            return f"has a kernel for tangents of query, key and value together, {name} has none"
    return limit_error(call.scale, q.shape[2], k.shape[2])


def jvp(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tangents of out and lse, and the sum of grad_out times the former, if grad_out is given.

    out is laid out (B, Sq, Hq, Dv), the others are (B, Hq, Sq) in float32.
    """
    saved, t, lens = call.saved, call.tangents, call.operands.kv_lens
    inputs = [tma_aligned(x) for x in (*call[:3], t.query, t.key, t.value)]
    out = tma_aligned(saved.out)
    grad_out = None if saved.grad_out is None else tma_aligned(saved.grad_out)
    read = [*inputs, out, *([] if grad_out is None else [grad_out])]
    geometry = Geometry.of(call)._replace(strides=tuple(x.stride() for x in read))
    lens = None if lens is None else lens.contiguous()
    return _plan(geometry).run(inputs, out, grad_out, saved.lse.contiguous(), lens)


class TangentPlan(KernelPlan):
    """Persistent CTAs over tiles of queries, as the forward pass has them."""

    def configure(self, g: Geometry) -> None:
        """The tile and its kernel, and the number of CTAs."""
        (B, Hq, Sq, D), _, (*_, Dv) = g.shapes
        left, _, has_window = self.sides = g.sides
        self.config = config = tangent_config(D, Dv)
        self.has_grad = len(g.strides) == 8
        self.kernel = kernel_of(
            config, g.device, g.dtype, window=has_window, left=left < UNBOUNDED,
            kv_lens=g.has_lens, grad_out=self.has_grad,
        )  # fmt: skip
        self.m_blocks = -(-Sq // config.block_m)
        self.tiles, count = B * Hq * self.m_blocks, processors(g.device)
        self.grid = min(self.tiles, count), 1
        is_uneven = has_window or g.has_lens or Sq % config.block_m > 0
        self.is_dynamic = is_uneven and self.tiles > count

    def map_tensors(self, g: Geometry) -> None:
        """Queries, keys and values, then their tangents."""
        self.out, self.lse = result_layouts(g)
        rows = _ROWS, self.config.block_n, self.config.block_n
        layouts = zip(g.shapes * 2, g.strides, rows * 2)
        self.maps = [TensorMap(g.dtype, *layout) for layout in layouts]

    def pack_parameters(self, g: Geometry) -> None:
        """Strides, sizes and factors."""
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (*_, Dv) = g.shapes
        (left, right, _), units, group = self.sides, g.units, Hq // Hkv
        scalars = _SCALARS.pack(
            *(*g.strides[6][:3], *g.strides[-1][:3]), *(B, Hq, group, Sq, Sk, D, Dv),
            *(left, right, self.m_blocks, self.tiles),
            group * key_section(B * Hkv, Sk, 2 * (D + Dv)), units.gradient, units.log2,
        )  # fmt: skip
        self.params = Params(_ADDRESSES, scalars)

    def run(
        self, inputs: list[Tensor], out: Tensor, grad_out: Tensor | None, lse: Tensor,
        lens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Launch. `inputs`: query, key and value, then their tangents."""
        with on_device(self.device):
            stream, rows = current_stream(self.device), [x.data_ptr() for x in inputs]
            out_t, lse_t = empty(*self.out), empty(*self.lse)
            dot = empty(*self.lse) if self.has_grad else None
            counter = empty(*_COUNTER) if self.is_dynamic else None
            if counter is not None:
                set_zero(counter.data_ptr(), 1, stream)
            params = self.params.take(
                *map(getitem, self.maps, rows), out.data_ptr(), address(grad_out), lse.data_ptr(),
                out_t.data_ptr(), lse_t.data_ptr(), address(dot), address(lens), address(counter),
            )  # fmt: skip
            self.kernel.launch(self.grid, stream, params[1])
            self.params.give_back(params)
        return out_t, lse_t, dot


_plan = functools.lru_cache(maxsize=256)(TangentPlan)
