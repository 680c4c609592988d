"""Dense forward on sm_90a: a plan per family of calls, one launch per call."""

from __future__ import annotations

import ctypes
import functools
import struct

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import forward_config
from fa_ops.backends.hopper.launch import (
    Kernel,
    Module,
    TensorMap,
    address,
    current_stream,
    on_device,
    set_zero,
)
from fa_ops.backends.hopper.problem import LOG2E, ScoreUnits, copyable, heads_in_l2, window
from fa_ops.types import Spec

_PARAMS = struct.Struct("<512s6Q14i3f")  # struct Params in cuda/scheduler.cuh
_PARAMS_BYTES = 640  # its size there: a multiple of a tensor map's alignment


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    q, k, v = copyable(q), copyable(k), copyable(v)
    B, Hq, Sq, _ = q.shape
    lens, ranges, sinks, slopes = _as_read(spec)
    plan = _plan(
        q.dtype,
        q.device.index,
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        (spec.is_causal, spec.scale, spec.window_left, spec.window_right, spec.softcap),
        lens is not None,
        _strides(ranges),
        sinks is not None,
        _strides(slopes),
    )
    out = torch.empty((B, Sq, Hq, v.shape[3]), dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty((B, Hq, Sq), dtype=torch.float32, device=q.device)
    with on_device(q.device.index):
        plan.launch((q, k, v, out), lse, (lens, ranges, sinks, slopes))
    return out, lse


def _as_read(spec: Spec) -> tuple[Tensor | None, ...]:
    """kv_lens, key_ranges, sinks and slopes as the kernel reads them; no copy where they are."""
    lens, ranges, sinks, slopes = spec.kv_lens, spec.key_ranges, spec.sinks, spec.alibi_slopes
    if lens is not None:
        lens = lens.contiguous()
    if ranges is not None and ranges.stride(3) != 1:
        ranges = ranges.contiguous()
    if sinks is not None:
        sinks = sinks.float().contiguous()
    if slopes is not None and slopes.stride(-1) != 1:
        slopes = slopes.contiguous()
    return lens, ranges, sinks, slopes


def _strides(t: Tensor | None) -> tuple[int, ...] | None:
    """All strides but the last, 0 for broadcast dimensions."""
    if t is None:
        return None
    return tuple(stride if size > 1 else 0 for size, stride in zip(t.shape[:-1], t.stride()))


class Plan:
    """All of a call that does not depend on where its tensors lie or what they hold."""

    def __init__(
        self, dtype, device, shapes, strides, statics, has_lens, ranges, has_sinks, slopes
    ):
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (_, _, _, Dv) = shapes
        causal, scale, left, right, softcap = statics
        left, right, ragged = window(causal, left, right)
        units = ScoreUnits.of(D, scale, softcap)
        config = forward_config(D, Dv)
        self.device = device
        self.kernel, self.grid, self.dynamic, tiles = self._schedule(
            config,
            B * Hq * -(-Sq // config.block_m),
            varied=ragged or has_lens or ranges is not None,
            features={
                "IS_BF16": dtype == torch.bfloat16,
                "IS_RAGGED": ragged,
                "HAS_KV_LENS": has_lens,
                "HAS_RANGES": ranges is not None,
                "HAS_SOFTCAP": softcap > 0,
                "HAS_ALIBI": slopes is not None,
                "HAS_SINKS": has_sinks,
            },
        )
        out = (B, Hq, Sq, Dv), (Sq * Hq * Dv, Dv, Hq * Dv, 1)
        boxes = (64, config.block_n, config.block_n, 64)
        families = zip((*shapes, out[0]), (*strides, out[1]), boxes)
        self.maps = [TensorMap(dtype, shape, stride, rows) for shape, stride, rows in families]
        group = Hq // Hkv
        section = min(B * Hq, group * heads_in_l2(Sk * 2 * (D + Dv)))
        self.scalars = (
            *(B, Hq, group, Sq, Sk, left, right, -(-Sq // config.block_m), tiles, section),
            *(ranges or (0, 0, 0)),
            slopes[0] if slopes else 0,
            *(units.inside_tanh, units.accumulator * LOG2E, 1.0 / units.accumulator),
        )

    def _schedule(self, config, tiles: int, varied: bool, features: dict[str, bool]):
        """Persistent CTAs; where tiles differ in length, they are handed out on demand."""
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        dynamic = varied and tiles > sms
        defines = (
            config.defines()
            | {n: int(on) for n, on in features.items()}
            | {"IS_DYNAMIC": int(dynamic)}
        )
        kernel = _kernel(tuple(defines.items()), config.threads, config.shared_bytes, self.device)
        return kernel, min(tiles, sms), dynamic, tiles

    def launch(
        self,
        tensors: tuple[Tensor, ...],
        lse: Tensor,
        optional: tuple[Tensor | None, ...],
    ) -> None:
        stream = current_stream(self.device)
        counter = None
        if self.dynamic:
            counter = torch.empty(1, dtype=torch.int32, device=lse.device)
            set_zero(counter, stream)
        maps = b"".join([m.at(t.data_ptr()) for m, t in zip(self.maps, tensors)])
        pointers = [address(t) for t in (lse, *optional, counter)]
        params = ctypes.create_string_buffer(_PARAMS_BYTES)
        _PARAMS.pack_into(params, 0, maps, *pointers, *self.scalars)
        self.kernel.launch((self.grid, 1), stream, params)


_plan = functools.lru_cache(maxsize=1024)(Plan)


@functools.cache
def _kernel(defines: tuple[tuple[str, int], ...], threads: int, shared: int, device: int) -> Kernel:
    return Module("forward", dict(defines), device).kernel("forward", threads, shared)
