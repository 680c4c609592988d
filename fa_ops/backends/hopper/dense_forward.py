"""Dense forward on sm_90a, following FlashAttention-3: one launch for each call."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa_ops.backends.hopper import dropout
from fa_ops.backends.hopper.bias import Bias, bits_of
from fa_ops.backends.hopper.configs import Config, forward_config
from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import (
    TensorMap,
    address,
    current_stream,
    empty,
    kernel,
    on_device,
    one_parameter,
    set_zero,
)
from fa_ops.backends.hopper.mask import bits_by_query, layout_of_bits, run_at
from fa_ops.backends.hopper.problem import (
    FAR,
    LOG2E,
    ScoreUnits,
    copyable,
    key_section,
    shared_strides,
    softcap_kind,
    window,
)
from fa_ops.call import Call, Run, general
from fa_ops.types import NO_TENSORS, DenseTensors, Packing, Spec

# behind the tensor maps: addresses, strides and scalars, dropout, pages, and a bias
_PARAMS = struct_layout("forward_params.cuh", "ForwardParams")
_ADDRESSES, _SCALARS = _PARAMS.packer("out", "v_rows"), _PARAMS.packer("q_strides", "mask_range")
_PAGES = struct_layout("paged_kv.cuh", "PageTable").packer()
_NO_PAGES = bytes(_PAGES.size)
_NONE = (None,) * 5
_COUNTER = (1,), (1,), torch.int32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    packing: Packing | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq).

    Only dropout reads `packing`. With a page `table`, k and v are pages (pages, Hkv, page, D).
    """
    q, k, v = copyable(q), copyable(k), copyable(v)
    bits = bias = held = None
    if bits_of(spec.attn_mask):
        bias, held = Bias.of(spec.attn_mask)
    elif spec.attn_mask is not None:
        bits = bits_by_query(spec.attn_mask, k.shape[2])
    optional = *_as_read(spec.tensors), bits
    plan = _plan_of(q, k, v, spec, optional, bias, table)
    row_keys = dropout.row_keys(q, spec, packing)
    return plan.run(q, k, v, True, optional, held, row_keys, table)


def prepare(call: Call) -> Run:
    """What runs dense calls with the geometry of this one."""
    run = prepare_attention(call.query, call.key, call.value, call.spec)
    return run or general("forward", forward).prepare(call)


def prepare_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, table: Tensor | None = None
) -> Run | None:
    """run(q, k, v, tensors, with_lse, table) for calls with this geometry.

    None where `forward` must copy a tensor or a float mask in every call.
    """
    mask = spec.attn_mask
    can_copy = copyable(q) is q and copyable(k) is k and copyable(v) is v
    if bits_of(mask) or not can_copy:
        return None
    bits = None if mask is None else layout_of_bits(mask, k.shape[2])
    plan = _plan_of(q, k, v, spec, (*_as_read(spec.tensors), bits), table=table)
    options = spec.with_tensors(NO_TENSORS)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: DenseTensors, with_lse: bool = True,
        table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return forward(q, k, v, options.with_tensors(tensors), table=table)
        if tensors is NO_TENSORS:
            return plan.run(q, k, v, with_lse, table=table)
        mask, seed = tensors.attn_mask, tensors.dropout_seed
        bits = None if mask is None else bits_by_query(mask, k.shape[2])
        row_keys = None
        if seed is not None:
            row_keys = dropout.row_keys(q, options.with_tensors(tensors), None)
        optional = (*_as_read(tensors), bits)
        return plan.run(q, k, v, with_lse, optional, None, row_keys, table)

    return run


def _as_read(tensors: DenseTensors) -> tuple[Tensor | None, ...]:
    """kv_lens, key_ranges, sinks and slopes as the kernel reads them, copied only if needed."""
    _, slopes, sinks, lens, ranges, _ = tensors
    if lens is not None:
        lens = lens.contiguous()
    if ranges is not None and ranges.stride(3) != 1:
        ranges = ranges.contiguous()
    if sinks is not None:
        sinks = sinks.float().contiguous()
    if slopes is not None and slopes.stride(-1) != 1:
        slopes = slopes.contiguous()
    return lens, ranges, sinks, slopes


def _plan_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    optional: tuple[Tensor | None, ...] = _NONE,
    bias: Bias | None = None,
    table: Tensor | None = None,
) -> ForwardPlan:
    """The plan; `optional` are the results of `_as_read` and a mask's bits."""
    lens, ranges, sinks, slopes, bits = optional
    return _plan(
        q.dtype,
        q.device.index,
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        (spec.is_causal, spec.scale, spec.window_left, spec.window_right, spec.softcap),
        lens is not None,
        shared_strides(ranges),
        sinks is not None,
        shared_strides(slopes),
        None if bits is None else (*shared_strides(bits), run_at(bits)),
        bias,
        spec.dropout_p,
        None if table is None else (table.shape[1], table.stride(0)),
    )


class ForwardPlan:
    """The part of a forward pass that depends on its geometry only, not on addresses or values."""

    def __init__(
        self, dtype, device, shapes, strides, statics, has_lens, ranges, has_sinks, slopes, mask,
        bias=None, dropout_p=0.0, table=None,
    ):  # fmt: skip
        (B, Hq, Sq, D), (count, Hkv, Sk, _), (_, _, _, Dv) = shapes
        page = Sk if table else 0
        self.pages = (table[1], page, count) if table else (0, 0, 0)
        Sk = page * table[0] if table else Sk
        causal, scale, left, right, softcap = statics
        left, right, ragged = window(causal, left, right)
        units = ScoreUnits.of(D, scale, softcap)
        bias_bits = bias.dtype.itemsize * 8 if bias else 0
        is_crowded = mask is not None or dropout_p > 0
        config = forward_config(D, Dv, bias_bits, is_crowded, page)
        has_short_tiles = Sq % config.block_m > 0
        self.device = device
        self.kernel, self.grid, self.dynamic, tiles = self._schedule(
            config,
            B * Hq * -(-Sq // config.block_m),
            varied=has_short_tiles or ragged or has_lens or bool(ranges) or bool(mask),
            features=dict(
                dtype=dtype,
                ragged=ragged,
                left=left < FAR,
                kv_lens=has_lens,
                ranges=ranges is not None,
                softcap=softcap_kind(softcap),
                alibi=slopes is not None,
                sinks=has_sinks,
                mask=mask is not None,
                dropout=dropout_p > 0,
            ),
        )
        self.out = (B, Hq, Sq, Dv), (Sq * Hq * Dv, Dv, Hq * Dv, 1), dtype
        self.lse = (B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32
        keys = config.copy_keys or config.block_n
        boxes = (64, keys, keys)
        families = zip(shapes, strides, boxes)
        self.bias = None
        if bias is not None:
            self.bias = functools.partial(bias.packed, bias.map(), unit=units.accumulator)
        self.maps = [TensorMap(dtype, shape, stride, rows) for shape, stride, rows in families]
        group = Hq // Hkv
        section = group * key_section(B * Hkv, Sk, D + Dv)
        *self.mask, mask_run = mask or (0, 0, 0, 0)
        self.scalars = _SCALARS.pack(
            *(*strides[0][:3], *strides[1][:3], *strides[2][:3]),
            *(B, Hq, group, Sq, Sk, D, Dv),
            *(left, right, -(-Sq // config.block_m), tiles, section),
            *(ranges or (0, 0, 0)),
            slopes[0] if slopes else 0,
            units.inside_tanh,
            LOG2E if bias else units.log2,  # with a bias, scores have its units
            1.0 / units.accumulator,
            mask_run,
        )
        self.dropout_p = dropout_p

    def _schedule(self, config: Config, tiles: int, varied: bool, features: dict):
        """Persistent CTAs; tiles of different lengths are scheduled dynamically."""
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        dynamic = varied and tiles > sms
        found = kernel(
            "forward", "forward", self.device, config.threads,
            config.shared_bytes(features["mask"]),
            tuple(kernel_defines(config, **features).items()),
        )  # fmt: skip
        return found, min(tiles, sms), dynamic, tiles

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        with_lse: bool = False,
        optional: tuple[Tensor | None, ...] = _NONE,
        bias: Tensor | None = None,
        row_keys: Tensor | None = None,
        table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse, which is None unless asked for."""
        of_q, of_k, of_v = self.maps
        with on_device(self.device):
            stream, out = current_stream(self.device), empty(*self.out)
            lse = empty(*self.lse) if with_lse else None
            counter = empty(*_COUNTER) if self.dynamic else None
            rows = q.data_ptr(), k.data_ptr(), v.data_ptr()
            words = *map(address, (out, lse, *optional)), *self.mask, address(counter), *rows
            params = (
                of_q.at(rows[0]), of_k.at(rows[1]), of_v.at(rows[2]), _ADDRESSES.pack(*words),
                self.scalars, dropout.parameters(row_keys, self.dropout_p),
                _NO_PAGES if table is None else _PAGES.pack(address(table), *self.pages),
                b"" if bias is None else self.bias(address(bias)),
            )  # fmt: skip
            if counter is not None:
                set_zero(counter, stream)
            self.kernel.launch((self.grid, 1), stream, one_parameter(b"".join(params)))
        return out, lse


def kernel_defines(
    config: Config, dtype: torch.dtype, *, ragged: bool = False, kv_lens: bool = False,
    ranges: bool = False, softcap: int = 0, alibi: bool = False, sinks: bool = False,
    left: bool = False, mask: bool = False, dropout: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The macros of a kernel; `ragged`: causal or a window, `left`: the window has a left side."""
    return config.defines() | {
        "SHARED_BYTES": config.shared_bytes(mask),
        "IS_BF16": int(dtype == torch.bfloat16),
        "HAS_WINDOW": int(ragged),
        "HAS_LEFT": int(left or ranges),
        "HAS_KV_LENS": int(kv_lens),
        "HAS_RANGES": int(ranges),
        "HAS_SOFTCAP": int(softcap),
        "HAS_ALIBI": int(alibi),
        "HAS_SINKS": int(sinks),
        "HAS_MASK": int(mask),
        "HAS_DROPOUT": int(dropout),
    }


_plan = functools.lru_cache(maxsize=1024)(ForwardPlan)
