"""Forward passes on sm_90a, following FlashAttention-3: dense calls, prompts over caches, pages.

Heads of a group may share a tile. Where tiles of queries are too few for the device, each attends a
part of the keys, and a second launch merges the parts. Pages are looked up in their table; e4m3
caches are converted first.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from operator import getitem
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends import conversion
from fa_ops.backends.hopper import decode, eight_bit_inputs, masks
from fa_ops.backends.hopper.configs import Config, WideConfig, forward_config, padded, short_config
from fa_ops.backends.hopper.masks import (
    Bias,
    BlockLists,
    MaskLayout,
    MaskPacker,
    bits_of,
    skipped_lists,
)
from fa_ops.backends.hopper.problem import (
    LOG2E,
    MISALIGNED,
    UNBOUNDED,
    ScoreUnits,
    alibi_kind,
    key_section,
    one_batch,
    page_error,
    shared_strides,
    softcap_kind,
    tma_aligned,
    window_sides,
)
from fa_ops.backends.hopper.runtime.launch import (
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
from fa_ops.backends.hopper.runtime.structs import kernel_layout, struct_layout
from fa_ops.call.call import CACHED, Call, Run, general
from fa_ops.call.options import NO_OPERANDS, Cache, Operands, Spec, heads_of_tile, rows_are_aligned

# Dense forward on sm_90a, following FlashAttention-3: one launch for each call.

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
    if tensors is not NO_OPERANDS:
        inputs = as_kernel_inputs(tensors)
        is_converted = inputs is not tensors
        spec, options = spec.with_tensors(inputs), spec.with_tensors(NO_OPERANDS)
    plan = plan_of(q, k, v, spec, bias, table)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True,
        table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            return forward(q, k, v, options.with_tensors(tensors), table=table)
        if tensors is NO_OPERANDS:
            return plan.run(q, k, v, with_lse, table=table)
        held = None if bias is None else tensors.attn_mask
        if held is not None and held.data_ptr() & MISALIGNED:
            return forward(q, k, v, options.with_tensors(tensors), table=table)
        if is_converted:
            tensors = as_kernel_inputs(tensors)
        return plan.run(q, k, v, with_lse, tensors, held, table)

    return run


def as_kernel_inputs(tensors: Operands) -> Operands:
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
        self.row_seeds = masks.RowSeeds(B, Hq, Sq, device, sequences) if dropout_p > 0 else None
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
        tensors: Operands = NO_OPERANDS,
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
        if tensors is not NO_OPERANDS:
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
        self, params: ctypes.Array, tensors: Operands, bias: Tensor | None,
        table: Tensor | None, cu_seqlens: tuple[int, int], stream: int,
    ) -> Tensor | None:  # fmt: skip
        """Write the parameters of options that few calls have; returns what dropout's point to."""
        seeds = None
        if self.row_seeds is not None:
            seeds = masks.words_of_rows(self.row_seeds, tensors.dropout_seed, cu_seqlens, stream)
            masks.write_parameters(params, _DROPOUT_AT, seeds, self.dropout_p)
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


# Merges the results of the forward kernel for parts of the keys.

_THREADS, _ROWS = 256, 8  # a warp for each row
_COMBINE_PARAMS = kernel_layout("forward_combine.cu", "forward_combine")


class Combine:
    """The launch behind a forward kernel whose tiles attend parts of the keys.

    `out` is (B, Hq, Sq, Dv). The results of the parts are float32 (splits, B, Sq, Hq, Dv), then
    their lse (splits, B, Sq, Hq).
    """

    def __init__(
        self, out: tuple[int, int, int, int], splits: int, dtype: torch.dtype, has_sinks: bool,
        device: int,
    ) -> None:  # fmt: skip
        B, Hq, Sq, Dv = out
        rows = B * Sq * Hq
        defines = {
            "IS_BF16": int(dtype == torch.bfloat16), "HAS_SINKS": int(has_sinks),
            "MAX_SPLITS": MAX_SPLITS,
        }  # fmt: skip
        name = "forward_combine"
        self._kernel = kernel(name, name, device, _THREADS, 0, tuple(defines.items()))
        self._grid = -(-rows // _ROWS), 1
        self._params = Params.of(_COMBINE_PARAMS, "splits", (splits, rows, Sq, Hq, Dv))
        self._parts = (splits * rows * (Dv + 1),), (1,), torch.float32
        self._lse_offset = splits * rows * Dv * 4

    @classmethod
    def of(cls, out: tuple[int, int, int, int], splits: int, *options) -> Combine | None:
        """None for a single part, which is the result."""
        return cls(out, splits, *options) if splits > 1 else None

    def parts(self) -> tuple[Tensor, int, int]:
        """Memory for the parts, and the addresses in it of their results and of their lse."""
        memory = empty(*self._parts)
        at = memory.data_ptr()
        return memory, at, at + self._lse_offset

    def run(
        self, stream: int, parts: tuple[Tensor, int, int], sinks: Tensor | None, out: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        """Launch behind the kernel that writes `parts`."""
        params = self._params.take(*parts[1:], address(sinks), out.data_ptr(), address(lse))
        self._kernel.launch(self._grid, stream, params[1], dependent=True)
        self._params.give_back(params)


# The tiling of a forward pass: heads of a group that share a tile, and splits of the keys.

MAX_SPLITS = 32  # parts of the keys: a lane of the merging warp has one
_MAX_PART_BYTES = 256 << 20  # of the results of all parts

# Times on an H200, in keys that a tile attends meanwhile (with 128 features, 128 keys take 1.3 us):
# a tile's own, a merge's own, one for each part, and one by the numbers that parts write and a
# merge reads. Tiles together attend no more keys than memory brings, 4.3 TB/s.
_TILE_KEYS, _MERGE_KEYS, _PART_KEYS, _NUMBERS_PER_KEY = 128, 320, 24, 2500
_BYTES_PER_KEY = 43_000

# Of a full tile's time, where a consumer of 64 rows has none. On an H200 0.82 of two, 0.55 of four.
_PARTIAL_TILE = 0.8
# Of the time of tiles of one head with all keys, what others must stay below.
_WORTHWHILE = 0.9


class Tiling(NamedTuple):
    """A configuration, and into how many parts the keys of each tile are cut."""

    config: Config | WideConfig
    splits: int


class Shape(NamedTuple):
    """The sizes that decide the tiling; `keys` is the number of keys of a row, if known."""

    B: int
    Hq: int
    Hkv: int
    Sq: int
    keys: int
    Dv: int


def tiling_of(
    config: Config | WideConfig,
    shape: Shape,
    processors: int,
    can_pack: bool = True,
    can_split: bool = True,
) -> Tiling:
    """The tiling of a call with tiles of `config`: the least divided of those about as fast.

    `can_pack`, `can_split`: whether the kernel has the call's options for packed heads, and for
    parts of the keys. How many heads share a tile depends on the group alone, so that lengths have
    two kernels at most, and parts two more. Parts are for queries that are few beside the keys;
    other calls have enough tiles, or are short.
    """
    if isinstance(config, WideConfig):
        return Tiling(config, 1)
    if can_pack and shape.Hq == shape.Hkv and shape.B * shape.Hq > processors:
        config = short_config(config, shape.Sq, shape.keys)
    packed = config
    if can_pack and not config.packs_queries:
        packed = dataclasses.replace(config, packed_heads=heads_of_tile(shape.Hq // shape.Hkv))
    configs = [config] if packed == config else [config, packed]
    can_split = can_split and 4 * shape.Sq <= shape.keys and config.ctas == 1
    ways = [way for c in configs for way in _ways(c, shape, processors, can_split)]
    best_time, best = min(ways, key=lambda way: way[0])
    return best if best_time <= _WORTHWHILE * ways[0][0] else ways[0][1]


def packed_queries(
    config: Config, shape: Shape, sequences: int, can_pack: bool
) -> tuple[Config, Shape]:
    """The configuration of a packed batch over pages, and its tiles as rows of a batch.

    They are as many as there may be: those that `shape.Sq` tokens fill, and one for what is left in
    each sequence, before the first and after the last. Heads share tiles wherever they can, as
    sequences may have a single query.
    """
    heads = heads_of_tile(shape.Hq // shape.Hkv) if can_pack else 1
    config = dataclasses.replace(config, packs_queries=True, packed_heads=heads)
    rows = shape.Sq // config.tile_queries + sequences + 2
    return config, shape._replace(B=rows, Sq=config.tile_queries)


def _ways(
    config: Config, shape: Shape, processors: int, can_split: bool
) -> Iterator[tuple[float, Tiling]]:
    """The times of tiles of one configuration with more and more parts of the keys."""
    B, Hq, Hkv, Sq, keys, Dv = shape
    tiles = B * Hq // config.packed_heads * -(-Sq // config.tile_queries)
    is_partial = Sq <= config.tile_queries - config.consumer_queries
    key_time = _PARTIAL_TILE if is_partial else 1.0
    numbers = B * Hq * Sq * Dv
    least = B * Hkv * keys * 4 * max(Dv, 1) / _BYTES_PER_KEY  # for keys and values, of 2 bytes
    splits = 1
    while True:
        rounds = -(-tiles * splits // processors)
        blocks = -(-keys // (config.block_n * splits))
        time = max(rounds * (blocks * config.block_n * key_time + _TILE_KEYS), least)
        if splits > 1:
            time += _MERGE_KEYS + splits * (_PART_KEYS + numbers / _NUMBERS_PER_KEY)
        yield time, Tiling(config, splits)
        splits += 1
        fits = blocks > 1 and splits <= MAX_SPLITS and 4 * numbers * splits <= _MAX_PART_BYTES
        if not (can_split and fits and tiles < 4 * processors):
            return


# More queries of a kv head than decoding attends at once: the dense forward kernel over a cache.
#
# It looks pages up in their table. Where tiles of queries are too few for the device, each attends
# a part of the keys (`tiling`). e4m3 caches are converted first.


def cache_error(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> str | None:
    """Why the kernel cannot attend such a cache, or None."""
    if spec.key_ranges is not None:
        return f"has no key_ranges for more than {decode.MAX_ROWS} queries of a kv head"
    D, Dv = q.shape[3], v.shape[3]
    if padded(Dv) > padded(D):
        return f"needs a value head dim that is not the larger one, got {D} and {Dv}"
    if cache.page_table is not None and (reason := page_error(k.shape[1])):
        return reason
    is_e4m3 = k.dtype == eight_bit_inputs.E4M3
    reason = decode.memory_error(q, k, v, cache, spec, (eight_bit_inputs.E4M3,) if is_e4m3 else ())
    return conversion.error(q, k, v, cache) if is_e4m3 and reason is None else reason


def cached_forward(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    table = cache.page_table
    if k.dtype == eight_bit_inputs.E4M3:
        k, v = map(tma_aligned, (k, v))
        tensors = Call(CACHED, q, k, v, spec, cache=cache).tensors
        k, v, table = eight_bit_inputs.converter(q, k, v, cache).run(k, v, tensors)
    return forward(q, *_by_head(k, v, table), spec, table=table)


def prepare_cached(call: Call) -> Run:
    """A function that runs cached calls with the geometry of this one."""
    k, v, table = call.key, call.value, call.cache.page_table
    converter = None
    if k.dtype == eight_bit_inputs.E4M3:
        converter = eight_bit_inputs.converter(call.query, k, v, call.cache)
        k, v, table = converter.empty()
    k, v = _by_head(k, v, table)
    attend = prepare_attention(call.query, k, v, call.spec, table)
    if attend is None:
        return general("prefill", cached_forward).prepare(call)
    options = call.without_tensors()

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        t, table = tensors, tensors.page_table
        if converter is not None:
            if (k.data_ptr() | v.data_ptr()) & MISALIGNED:
                return cached_forward(q, k, v, *options.arguments_with(tensors))
            k, v, table = converter.run(k, v, tensors)
        small = Operands(None, t.alibi_slopes, t.sinks, t.kv_lens)
        return attend(q, *_by_head(k, v, table), small, with_lse, table)

    return run


def _by_head(k: Tensor, v: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The cache with heads before tokens; in pages the tokens come first."""
    return (k, v) if table is None else (k.transpose(1, 2), v.transpose(1, 2))


# Packed queries over keys in pages: the forward kernel, whose tiles look up their sequences.


def paged_error(call: Call) -> str | None:
    """Why the kernel cannot run the call, or None."""
    query, keys = call.query.dtype, call.key.dtype
    if keys != query:
        return f"attends packed queries over pages of their own dtype, got {query} and {keys}"
    return cache_error(one_batch(call.query), call.key, call.value, call.cache, call.spec)


def prepare_paged(call: Call) -> Run:
    """A function that runs calls with the geometry of this one."""
    options, sequences = call.without_tensors(), call.cache.page_table.shape[0]
    plan = _paged_plan(call, sequences)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        used, t = plan, tensors
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            q, k, v = map(tma_aligned, (q, k, v))
            again = options.with_tensors(t)._replace(query=q, key=k, value=v)
            used = _paged_plan(again, sequences)
        small = Operands(None, t.alibi_slopes, t.sinks, t.kv_lens)
        small = as_kernel_inputs(small)
        cu_seqlens = t.cu_seqlens_q.data_ptr(), 0
        return used.run(q, k, v, with_lse, small, None, t.page_table, cu_seqlens)

    return run


def _paged_plan(call: Call, sequences: int) -> ForwardPlan:
    spec = call.spec.with_tensors(as_kernel_inputs(call.spec.tensors))
    pages = call.key.transpose(1, 2), call.value.transpose(1, 2)
    return plan_of(
        one_batch(call.query), *pages, spec, table=call.cache.page_table, sequences=sequences
    )
