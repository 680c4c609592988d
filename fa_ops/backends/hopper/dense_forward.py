"""Dense forward on sm_90a, following FlashAttention-3: one launch for each call."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from operator import getitem

import torch
from torch import Tensor

from fa_ops.backends.hopper import dropout
from fa_ops.backends.hopper.bias import Bias, bits_of
from fa_ops.backends.hopper.block_lists import BlockLists, skipped_lists
from fa_ops.backends.hopper.configs import Config, WideConfig, forward_config
from fa_ops.backends.hopper.forward_combine import Combine
from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import (
    Kernel,
    Params,
    TensorMap,
    address,
    current_device,
    current_stream,
    empty,
    kernel,
    processors,
    set_zero,
)
from fa_ops.backends.hopper.mask import MaskLayout, MaskPacker
from fa_ops.backends.hopper.problem import (
    LOG2E,
    MISALIGNED,
    UNBOUNDED,
    ScoreUnits,
    alibi_kind,
    key_section,
    shared_strides,
    softcap_kind,
    tma_aligned,
    window_sides,
)
from fa_ops.backends.hopper.tiling import Shape, packed_queries, tiling_of
from fa_ops.call import Call, Run, general
from fa_ops.geometry import rows_are_aligned
from fa_ops.types import NO_TENSORS, DenseTensors, Spec

# maps and addresses; strides and scalars; dropout, pages, a mask's lists, a bias
_PARAMS = struct_layout("forward_rows.cuh", "ForwardParams")
_ADDRESSES, _SCALARS = _PARAMS.packer("q", "v_rows"), _PARAMS.packer("q_strides", "mask_range")
_OPTIONS = "dropout", "pages", "blocks", "positions", "bias"
_PAGES, _BLOCKS, _POSITIONS = (_PARAMS.packer(name, name) for name in _OPTIONS[1:4])
_DROPOUT_AT, _PAGES_AT, _BLOCKS_AT, _POSITIONS_AT, _BIAS_AT = (
    _PARAMS.fields[name].offset for name in _OPTIONS
)
_NO_ADDRESSES = 0, 0, 0, 0
_COUNTER = (1,), (1,), torch.int32


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq).

    With a page `table`, k and v are pages (pages, Hkv, page, D).
    """
    q, k, v = tma_aligned(q), tma_aligned(k), tma_aligned(v)
    spec = spec.with_tensors(as_kernel_inputs(spec.tensors))
    bias, held = None, None
    if bits_of(spec.attn_mask):
        bias, held = Bias.of(spec.attn_mask, spec.mask_blocks)
    plan = plan_of(q, k, v, spec, bias, table)
    return plan.run(q, k, v, True, spec.tensors, held, table)


def prepare(call: Call) -> Run:
    """A function that runs dense calls with the geometry of this one."""
    run = prepare_attention(call.query, call.key, call.value, call.spec)
    return run or general("forward", forward).prepare(call)


def prepare_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, table: Tensor | None = None
) -> Run | None:
    """run(q, k, v, tensors, with_lse, table) for calls with this geometry.

    None where `forward` must copy a tensor or a float mask in every call.
    """
    mask, bias = spec.attn_mask, None
    if not rows_are_aligned(q, k, v):
        return None
    if mask is not None and mask.dtype != torch.bool:
        bias, held = Bias.of(mask, spec.mask_blocks)
        if held.data_ptr() != mask.data_ptr():
            return None
    options, is_converted, tensors = spec, False, spec.tensors
    if tensors is not NO_TENSORS:
        inputs = as_kernel_inputs(tensors)
        is_converted = inputs is not tensors
        spec, options = spec.with_tensors(inputs), spec.with_tensors(NO_TENSORS)
    plan = plan_of(q, k, v, spec, bias, table)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: DenseTensors, with_lse: bool = True,
        table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            return forward(q, k, v, options.with_tensors(tensors), table=table)
        if tensors is NO_TENSORS:
            return plan.run(q, k, v, with_lse, table=table)
        held = None if bias is None else tensors.attn_mask
        if held is not None and held.data_ptr() & MISALIGNED:
            return forward(q, k, v, options.with_tensors(tensors), table=table)
        if is_converted:
            tensors = as_kernel_inputs(tensors)
        return plan.run(q, k, v, with_lse, tensors, held, table)

    return run


def as_kernel_inputs(tensors: DenseTensors) -> DenseTensors:
    """The tensors as the kernel reads them, copied only if needed; `tensors` itself if none is."""
    _, slopes, sinks, lens, ranges, *_ = tensors
    changed = {}
    if lens is not None and not lens.is_contiguous():
        changed["kv_lens"] = lens.contiguous()
    if ranges is not None and ranges.stride(3) != 1:
        changed["key_ranges"] = ranges.contiguous()
    if sinks is not None and not (sinks.dtype == torch.float32 and sinks.is_contiguous()):
        changed["sinks"] = sinks.float().contiguous()
    if slopes is not None and slopes.stride(-1) != 1:
        changed["alibi_slopes"] = slopes.contiguous()
    return tensors._replace(**changed) if changed else tensors


def plan_of(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, bias: Bias | None = None,
    table: Tensor | None = None, sequences: int | None = None,
) -> ForwardPlan:  # fmt: skip
    """The plan of a call whose optional tensors are those of `as_kernel_inputs`.

    A packed batch of `sequences` is one long sequence, with key ranges or a row of the table each.
    """
    mask, ranges, slopes = spec.attn_mask, spec.key_ranges, spec.alibi_slopes
    return _plan(
        q.dtype,
        q.device.index,
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        (spec.is_causal, spec.scale, spec.window_left, spec.window_right, spec.softcap),
        spec.kv_lens is not None,
        None if ranges is None else shared_strides(ranges),
        spec.sinks is not None,
        None if slopes is None else shared_strides(slopes),
        None if mask is None or bias is not None else MaskLayout.of(mask),
        bias,
        spec.dropout_p,
        None if table is None else (table.shape[1], table.stride(0)),
        sequences,
        None if spec.mask_blocks is None else skipped_lists(spec),
    )


class ForwardPlan:
    """The part of a forward pass that depends on its geometry only, not on addresses or values."""

    def __init__(
        self, dtype, device, shapes, strides, scalar_options, has_lens, ranges, has_sinks, slopes,
        mask, bias=None, dropout_p=0.0, table=None, sequences=None, lists=None,
    ):  # fmt: skip
        (B, Hq, Sq, D), (count, Hkv, Sk, _), (_, _, _, Dv) = shapes
        group, page = Hq // Hkv, Sk if table else 0
        self.pages = (table[1], page, count, *_page_groups(shapes, strides)) if table else ()
        Sk = page * table[0] if table else Sk
        causal, scale, left, right, softcap = scalar_options
        left, right, has_window = window_sides(causal, left, right)
        units, bias_bits = ScoreUnits.of(D, scale, softcap), bias.dtype.itemsize * 8 if bias else 0
        few_registers, by_row = bool(mask) or dropout_p > 0, bool(ranges) or slopes is not None
        self.lists: BlockLists | None = None if bias else lists
        alibi = 0 if slopes is None else alibi_kind(bool(ranges and sequences))
        self.positions = 8 * Sq if alibi == 2 else None  # behind the ranges, in bytes
        config = forward_config(D, Dv, bias_bits, few_registers, page, by_row, lists is not None)
        is_plain = not (bias or few_registers or ranges)
        can_cut = is_plain and slopes is None, is_plain and not (sequences and has_sinks)
        sizes = Shape(B, Hq, Hkv, Sq, min(Sk, Sq + left), Dv)
        if packs_queries := table is not None and sequences is not None:
            config, sizes = packed_queries(config, sizes, sequences, can_cut[0])
        config, splits = tiling_of(config, sizes, processors(device), *can_cut)
        if config.whole_rows and not min(self.pages[3:]):
            config = dataclasses.replace(config, whole_rows=False)
        self.device, self.dropout_p = device, dropout_p
        self.kernel, self.grid, self.is_dynamic, *blocks = self._schedule(
            config,
            (sizes.B * Hq, sizes.Sq, splits),
            has_window or has_lens or bool(ranges or mask or (bias and bias.blocks)),
            features=dict(
                dtype=dtype, window=has_window, left=left < UNBOUNDED, kv_lens=has_lens,
                ranges=ranges is not None, softcap=softcap and softcap_kind(softcap),
                alibi=alibi, sinks=has_sinks and splits == 1, mask=mask is not None,
                dropout=dropout_p > 0, splits=splits > 1,
            ),
        )  # fmt: skip
        self.combine = Combine.of((B, Hq, Sq, Dv), splits, dtype, has_sinks, device)
        self.out, self.lse = _results((B, Hq, Sq, Dv), dtype, sequences is not None)
        self.maps = _maps(dtype, shapes, strides, config)
        if bias is not None:
            self.bias = functools.partial(bias.packed, bias.map(), unit=units.accumulator)
        section = group // config.packed_heads * key_section(B * Hkv, Sk, D + Dv)
        section, B = (splits, sequences) if packs_queries else (section, B)
        self.packer = MaskPacker.by_query(mask, Sk, device) if mask else None
        *self.mask_strides, mask_range = self.packer.bits_layout if mask else (0, 0, 0, 0)
        scalars = _SCALARS.pack(
            *(*strides[0][:3], *strides[1][:3], *strides[2][:3]),
            *(B, Hq, group, Sq, Sk, D, Dv),
            *(left, right, *blocks, section),
            *(ranges or (0, 0, 0)),
            slopes[0] if slopes else 0,
            units.inside_tanh,
            LOG2E if bias else units.log2,  # with a bias, scores have its units
            1.0 / units.accumulator,
            mask_range,
        )
        self.params = Params(_ADDRESSES, scalars.ljust(_PARAMS.size - _ADDRESSES.size, b"\0"))
        self.row_seeds = dropout.RowSeeds(B, Hq, Sq, device, sequences) if dropout_p > 0 else None
        self.has_features = not (self.row_seeds is table is lists is bias is self.positions is None)

    def _schedule(
        self, config: Config | WideConfig, sizes: tuple[int, int, int], is_uneven: bool,
        features: dict,
    ):  # fmt: skip
        """Persistent CTAs; tiles of different lengths are scheduled dynamically.

        Of wide heads a cluster of two CTAs for each tile.
        """
        (heads, Sq, splits), per_tile = sizes, config.tile_queries
        m_blocks = -(-Sq // per_tile)
        tiles = heads // config.packed_heads * m_blocks * splits
        found = _kernel_of(config, self.device, **features)
        if isinstance(config, WideConfig):
            return found, (2 * tiles, 1), False, m_blocks, tiles
        ctas = processors(self.device) * config.ctas
        is_dynamic = (is_uneven or Sq % per_tile > 0) and tiles > ctas
        return found, (min(tiles, ctas), 1), is_dynamic, m_blocks, tiles

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        with_lse: bool = False,
        tensors: DenseTensors = NO_TENSORS,
        bias: Tensor | None = None,
        table: Tensor | None = None,
        cu_seqlens: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse, which is None unless asked for.

        Of a packed batch the tensors are (T, H, D), and `cu_seqlens` the addresses of both.
        """
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(q, k, v, with_lse, tensors, bias, table, cu_seqlens)
        stream, out = current_stream(self.device), empty(*self.out)
        lse = empty(*self.lse) if with_lse else None
        counter = empty(*_COUNTER) if self.is_dynamic else None
        bits = (
            None if self.packer is None else self.packer.run(stream, tensors.attn_mask.data_ptr())
        )
        written = None, out.data_ptr(), 0 if lse is None else lse.data_ptr()
        if self.combine is not None:
            written = self.combine.parts()
        rows, addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr()), _NO_ADDRESSES
        if tensors is not NO_TENSORS:
            _, slopes, sinks, lens, ranges, *_ = tensors
            addresses = (
                0 if lens is None else lens.data_ptr(),
                0 if ranges is None else ranges.data_ptr(),
                0 if sinks is None else sinks.data_ptr(),
                0 if slopes is None else slopes.data_ptr(),
            )
        params = self.params.take(
            *map(getitem, self.maps, rows), *written[1:],
            *addresses,
            0 if bits is None else bits.data_ptr(), *self.mask_strides,
            0 if counter is None else counter.data_ptr(), *rows,
        )  # fmt: skip
        held = None
        if self.has_features:
            held = self._write_features(params[0], tensors, bias, table, cu_seqlens, stream)
        if counter is not None:
            set_zero(counter.data_ptr(), 1, stream)
        self.kernel.launch(self.grid, stream, params[1])
        self.params.give_back(params)
        if self.combine is not None:
            self.combine.run(stream, written, tensors.sinks, out, lse)
        del held  # the kernel that reads it is launched
        return out, lse

    def _write_features(
        self, params: ctypes.Array, tensors: DenseTensors, bias: Tensor | None,
        table: Tensor | None, cu_seqlens: tuple[int, int], stream: int,
    ) -> Tensor | None:  # fmt: skip
        """Write the parameters of options that few calls have; returns what dropout's point to."""
        seeds = None
        if self.row_seeds is not None:
            seeds = dropout.words_of_rows(self.row_seeds, tensors.dropout_seed, cu_seqlens, stream)
            dropout.write_parameters(params, _DROPOUT_AT, seeds, self.dropout_p)
        if table is not None:
            _PAGES.pack_into(params, _PAGES_AT, table.data_ptr(), *self.pages, cu_seqlens[0])
        if self.positions is not None:
            at = tensors.key_ranges.data_ptr() + self.positions
            _POSITIONS.pack_into(params, _POSITIONS_AT, at)
        if self.lists is not None:
            blocks = tensors.mask_blocks
            _BLOCKS.pack_into(params, _BLOCKS_AT, blocks.data_ptr(), *self.lists)
        if bias is not None:
            packed = self.bias(bias.data_ptr(), address(tensors.mask_blocks))
            params[_BIAS_AT : _BIAS_AT + len(packed)] = packed
        return seeds


def _results(shape: tuple[int, int, int, int], dtype: torch.dtype, is_packed: bool) -> list[tuple]:
    """Sizes, strides and dtype of out and lse; `shape`: (B, Hq, Sq, Dv)."""
    B, Hq, Sq, Dv = shape
    if is_packed:
        out, lse = ((Sq, Hq, Dv), (Hq * Dv, Dv, 1)), ((Hq, Sq), (Sq, 1))
    else:
        out = (B, Hq, Sq, Dv), (Sq * Hq * Dv, Dv, Hq * Dv, 1)
        lse = (B, Hq, Sq), (Hq * Sq, Sq, 1)
    return [(*out, dtype), (*lse, torch.float32)]


def _page_groups(shapes: Sequence, strides: Sequence) -> list[int]:
    """Groups of 8 keys from one page to the next, of k and v (pages, Hkv, page, D).

    0 where one copy cannot bring whole groups with all their features.
    """
    found = []
    for (count, _, page, D), (batch, _, token, _) in zip(shapes[1:], strides[1:]):
        fits = count > 0 < token and D % 64 == page % 8 == batch % (8 * max(token, 1)) == 0
        found.append(batch // (8 * token) if fits else 0)
    return found


def _maps(
    dtype: torch.dtype, shapes: Sequence, strides: Sequence, config: Config
) -> list[TensorMap]:
    """The tensor maps of q, k and v; a box of packed queries holds several heads of each."""
    (q_shape, *others), (q_strides, *other_strides) = shapes, strides
    keys = config.copy_keys or config.block_n
    groups = _page_groups(shapes, strides) if config.whole_rows else (0, 0)
    maps = [
        TensorMap(dtype, shape, stride, keys, batch_groups=group)
        for shape, stride, group in zip(others, other_strides, groups)
    ]
    if config.packed_heads == 1:
        return [TensorMap(dtype, q_shape, q_strides, 64), *maps]
    swapped = [(x[0], x[2], x[1], x[3]) for x in (q_shape, q_strides)]
    return [
        TensorMap(dtype, *swapped, rows=config.packed_heads, heads=config.consumer_queries),
        *maps,
    ]


def kernel_defines(
    config: Config, dtype: torch.dtype, *, window: bool = False, kv_lens: bool = False,
    ranges: bool = False, softcap: int = 0, alibi: int = 0, sinks: bool = False,
    left: bool = False, mask: bool = False, dropout: bool = False, splits: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The macros of a kernel; `window`: causal or a window, `left`: the window has a left side.

    `alibi`: 2 of packed sequences. `splits`: a tile attends one of several parts of the keys.
    """
    return config.defines() | {
        "SHARED_BYTES": config.shared_bytes(mask),
        "IS_BF16": int(dtype == torch.bfloat16),
        "HAS_WINDOW": int(window),
        "HAS_LEFT": int(left or ranges),
        "HAS_KV_LENS": int(kv_lens),
        "HAS_RANGES": int(ranges),
        "HAS_SOFTCAP": int(softcap),
        "HAS_ALIBI": int(alibi),
        "HAS_SINKS": int(sinks),
        "HAS_MASK": int(mask),
        "HAS_DROPOUT": int(dropout),
        "SPLITS_KEYS": int(splits),
    }


@functools.lru_cache(maxsize=1024)
def _kernel_of(config: Config | WideConfig, device: int, **features) -> Kernel:
    """The kernel of a configuration; `features` are the arguments of `kernel_defines`."""
    defines = kernel_defines(config, **features)
    shared, macros = defines["SHARED_BYTES"], tuple(defines.items())
    return kernel(config.kernel, config.kernel, device, config.threads, shared, macros)


_plan = functools.lru_cache(maxsize=1024)(ForwardPlan)
