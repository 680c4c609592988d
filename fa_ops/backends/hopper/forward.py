"""Forward passes on sm_90a, following FlashAttention-3: dense calls, prompts over caches, pages.

Heads of a group may share a tile. Where tiles of queries are too few for the device, each attends a
part of the keys, and a second launch merges the parts. Pages are looked up in their table; e4m3
caches are converted first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from operator import getitem
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends import quantization
from fa_ops.backends.hopper import decode
from fa_ops.backends.hopper.configs import (
    Config,
    WideConfig,
    forward_config,
    padded,
    page_error,
    short_config,
)
from fa_ops.backends.hopper.kernel_plan import (
    LOG2E,
    MISALIGNED,
    UNBOUNDED,
    Geometry,
    KernelPlan,
    kernel_of,
    key_section,
    one_batch,
    result_layouts,
    softcap_kind,
    tma_aligned,
)
from fa_ops.backends.hopper.masks import (
    Bias,
    MaskLayout,
    MaskPacker,
    RareOptions,
    bits_of,
    program_inputs,
    skipped_lists,
)
from fa_ops.backends.hopper.runtime.launch import (
    Params,
    TensorMap,
    address,
    current_device,
    current_stream,
    empty,
    kernel,
    on_device,
    processors,
    set_zero,
)
from fa_ops.backends.hopper.runtime.structs import kernel_layout, struct_layout
from fa_ops.call.call import Call, Run, general, heads_of_tile, rows_are_aligned
from fa_ops.call.options import (
    MASK_BLOCK,
    NO_OPERANDS,
    Operands,
    scales_of,
)

# Dense forward on sm_90a, following FlashAttention-3: one launch for each call.

# maps and addresses; strides and scalars; what `RareOptions` writes; pages
_PARAMS = struct_layout("forward_rows.cuh", "ForwardParams")
_ADDRESSES, _SCALARS = _PARAMS.packer("q", "v_rows"), _PARAMS.packer("q_strides", "mask_range")
_PROGRAM = struct_layout("forward_rows.cuh", "ForwardProgram").packer()
_PROGRAM_AT = _PARAMS.fields["program"].offset
_PAGES, _PAGES_AT = _PARAMS.packer("pages", "pages"), _PARAMS.fields["pages"].offset
_NO_ADDRESSES = 0, 0, 0, 0
E4M3 = torch.float8_e4m3fn
_COUNTER = (1,), (1,), torch.int32


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq).

    With a page table, key and value are pages (pages, Hkv, page, D).
    """
    q, k, v = map(tma_aligned, call[:3])
    tensors, bias, held = as_kernel_inputs(call.operands), None, None
    if bits_of(tensors.attn_mask):
        bias, held = Bias.of(tensors.attn_mask, tensors.mask_blocks)
    plan = plan_of(Call(q, k, v, tensors, call.options), bias)
    return plan.run(q, k, v, True, tensors, held, tensors.page_table)


def prepare(call: Call) -> Run:
    """A function that runs dense calls with the geometry of this one."""
    return prepare_attention(call) or general("forward", forward).prepare(call)


def prepare_attention(call: Call) -> Run | None:
    """run(q, k, v, tensors, with_lse) for calls with this geometry, whose pages, if any, have heads
    before tokens.

    None where `forward` must copy a tensor or a float mask in every call.
    """
    mask, bias = call.operands.attn_mask, None
    if not rows_are_aligned(*call[:3]):
        return None
    if mask is not None and mask.dtype != torch.bool:
        bias, held = Bias.of(mask, call.operands.mask_blocks)
        if held.data_ptr() != mask.data_ptr():
            return None
    options, is_converted = call.without_tensors(), False
    if call.operands is not NO_OPERANDS:
        inputs = as_kernel_inputs(call.operands)
        is_converted = (
            inputs is not call.operands or call.is_programmed
        )  # of which addresses matter
        call = call._replace(operands=inputs)
    plan = plan_of(call, bias)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            return forward(options._replace(query=q, key=k, value=v, operands=tensors))
        if tensors is NO_OPERANDS:
            return plan.run(q, k, v, with_lse)
        held = None if bias is None else tensors.attn_mask
        if held is not None and held.data_ptr() & MISALIGNED:
            return forward(options._replace(query=q, key=k, value=v, operands=tensors))
        if is_converted:
            tensors = as_kernel_inputs(tensors)
        return plan.run(q, k, v, with_lse, tensors, held, tensors.page_table)

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
    tensors = program_inputs(tensors)
    return tensors._replace(**changed) if changed else tensors


def plan_of(call: Call, bias: Bias | None = None, sequences: int | None = None) -> ForwardPlan:
    """The plan of a call whose operands are those of `as_kernel_inputs`, with heads before tokens.

    A packed batch of `sequences` is one long sequence, with key ranges or a row of the table each.
    """
    t = call.operands
    return _plan(
        Geometry.of(
            call, bias=bias,
            lists=None if t.mask_blocks is None else skipped_lists(t),
            sequences=sequences,
            mask=None if t.attn_mask is None or bias is not None else MaskLayout.of(t.attn_mask),
            table=None if t.page_table is None else decode.table_layout(t.page_table),
        )
    )  # fmt: skip


class ForwardPlan(KernelPlan):
    """A forward pass: one launch, and one behind it where tiles attend parts of the keys."""

    def configure(self, g: Geometry) -> None:
        """The tiles, their kernel, and what merges parts.

        Persistent CTAs; tiles of different lengths are scheduled dynamically. Of wide heads a
        cluster of two CTAs for each tile.
        """
        (B, Hq, Sq, D), (count, Hkv, Sk, _), (_, _, _, Dv) = g.shapes
        self.pages, self.keys, page = (), Sk, 0
        if g.table:
            (width, stride), page = g.table, Sk
            self.pages = stride, page, count, *_page_groups(g.shapes, g.strides)
            self.keys = page * width
        left, _, has_window = self.sides = g.sides
        few_registers, by_row = (
            bool(g.mask) or g.dropout_p > 0,
            bool(g.ranges or g.slopes is not None),
        )
        config = forward_config(
            D, Dv, g.bias_bits, few_registers, page, by_row, bool(g.lists or g.runs)
        )
        is_plain = not (g.bias or few_registers or g.ranges or g.program)
        can_cut = is_plain and g.slopes is None, is_plain and not (g.sequences and g.has_sinks)
        sizes = Shape(B, Hq, Hkv, Sq, min(self.keys, Sq + left), Dv)
        self.packs_queries = g.table is not None and g.sequences is not None
        if self.packs_queries:
            config, sizes = packed_queries(config, sizes, g.sequences, can_cut[0])
        count = processors(g.device)
        config, self.splits = tiling_of(config, sizes, count, *can_cut)
        if config.whole_rows and not min(self.pages[3:]):
            config = dataclasses.replace(config, whole_rows=False)
        self.config, per_tile = config, config.tile_queries
        self.kernel = kernel_of(
            config, g.device, g.dtype, window=has_window, left=left < UNBOUNDED,
            kv_lens=g.has_lens, ranges=g.ranges is not None, alibi=g.alibi,
            softcap=softcap_kind(g.softcap), sinks=g.has_sinks and self.splits == 1,
            mask=g.mask is not None, dropout=g.dropout_p > 0, splits=self.splits > 1,
            program=g.program or 0,
        )  # fmt: skip
        self.m_blocks = -(-sizes.Sq // per_tile)
        self.tiles = sizes.B * Hq // config.packed_heads * self.m_blocks * self.splits
        if isinstance(config, WideConfig):
            self.grid, self.is_dynamic = (2 * self.tiles, 1), False
        else:
            ctas, masks = count * config.ctas, g.ranges or g.mask or (g.bias and g.bias.blocks)
            is_uneven = has_window or g.has_lens or bool(masks or g.runs)
            is_uneven = is_uneven or sizes.Sq % per_tile > 0
            self.grid = min(self.tiles, ctas), 1
            self.is_dynamic = is_uneven and self.tiles > ctas
        self.combine = Combine.of((B, Hq, Sq, Dv), self.splits, g.dtype, g.has_sinks, g.device)
        self.packer = MaskPacker.by_query(g.mask, self.keys, g.device) if g.mask else None
        self.options, self.program = RareOptions.of(g, _PARAMS), None
        if g.program is not None:  # the scale and sizes of terms; runs of tiles
            shared = g.units.accumulator, B, Hq, Sq, Sk
            tiles = *(g.runs or (0, 0)), -(-Sq // MASK_BLOCK), -(-Sk // MASK_BLOCK)
            self.program = shared, tiles

    def map_tensors(self, g: Geometry) -> None:
        """Queries, keys and values; a box of packed queries holds several heads of each."""
        self.out, self.lse = result_layouts(g)
        q_shape, q_strides, config, groups = g.shapes[0], g.strides[0], self.config, (0, 0)
        if config.whole_rows:
            groups = self.pages[3:]
        keys = config.copy_keys or config.block_n
        box = {"rows": 64}
        if config.packed_heads > 1:
            q_shape, q_strides = ((x[0], x[2], x[1], x[3]) for x in (q_shape, q_strides))
            box = {"rows": config.packed_heads, "heads": config.consumer_queries}
        self.maps = [
            TensorMap(g.dtype, q_shape, q_strides, **box),
            TensorMap(g.dtype, g.shapes[1], g.strides[1], keys, batch_groups=groups[0]),
            TensorMap(g.dtype, g.shapes[2], g.strides[2], keys, batch_groups=groups[1]),
        ]

    def pack_parameters(self, g: Geometry) -> None:
        """Strides, sizes and factors."""
        (B, Hq, Sq, D), (_, Hkv, *_), (*_, Dv) = g.shapes
        (left, right, _), units, group = self.sides, g.units, Hq // Hkv
        section = group // self.config.packed_heads * key_section(B * Hkv, self.keys, D + Dv)
        if self.packs_queries:
            section, B = self.splits, g.sequences
        *self.mask_strides, mask_range = self.packer.bits_layout if self.packer else (0, 0, 0, 0)
        scalars = _SCALARS.pack(
            *(*g.strides[0][:3], *g.strides[1][:3], *g.strides[2][:3]),
            *(B, Hq, group, Sq, self.keys, D, Dv),
            *(left, right, self.m_blocks, self.tiles, section),
            *(g.ranges[2:] if g.ranges else (0, 0, 0)),
            g.slopes[0] if g.slopes else 0,
            units.inside_tanh,
            LOG2E if g.bias or g.has_natural_scores else units.log2,
            1.0 / units.accumulator,
            mask_range,
        )
        self.params = Params(_ADDRESSES, scalars.ljust(_PARAMS.size - _ADDRESSES.size, b"\0"))

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
        if self.program is not None:
            shared, tiles = self.program
            terms = map(address, (tensors.term_values, tensors.term_indices))
            runs = address(tensors.tile_runs)
            _PROGRAM.pack_into(params[0], _PROGRAM_AT, *terms, *shared, runs, *tiles)
        if self.options is not None:
            held = self.options.write(params[0], tensors, bias, cu_seqlens, stream)
        if table is not None:
            _PAGES.pack_into(params[0], _PAGES_AT, table.data_ptr(), *self.pages, cu_seqlens[0])
        if counter is not None:
            set_zero(counter.data_ptr(), 1, stream)
        self.kernel.launch(self.grid, stream, params[1])
        self.params.give_back(params)
        if self.combine is not None:
            self.combine.run(stream, written, tensors.sinks, out, lse)
        del held  # the kernel that reads it is launched
        return out, lse


def _page_groups(shapes: Sequence, strides: Sequence) -> list[int]:
    """Groups of 8 keys from one page to the next, of k and v (pages, Hkv, page, D).

    0 where one copy cannot bring whole groups with all their features.
    """
    found = []
    for (count, _, page, D), (batch, _, token, _) in zip(shapes[1:], strides[1:]):
        fits = count > 0 < token and D % 64 == page % 8 == batch % (8 * max(token, 1)) == 0
        found.append(batch // (8 * token) if fits else 0)
    return found


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


def cache_error(call: Call) -> str | None:
    """Why the kernel cannot attend such a cache, or None."""
    if call.operands.key_ranges is not None:
        return f"has no key_ranges for more than {decode.MAX_ROWS} queries of a kv head"
    D, Dv = call.query.shape[-1], call.value.shape[-1]
    if padded(Dv) > padded(D):
        return f"needs a value head dim that is not the larger one, got {D} and {Dv}"
    if call.is_paged and (reason := page_error(call.key.shape[1])):
        return reason
    is_e4m3 = call.key.dtype == E4M3
    reason = decode.memory_error(call, (E4M3,) if is_e4m3 else ())
    return quantization.conversion_error(call) if is_e4m3 and reason is None else reason


def cached_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    k, v, tensors = call.key, call.value, call.operands
    if k.dtype == E4M3:
        k, v = map(tma_aligned, (k, v))
        k, v, table = converter(call._replace(key=k, value=v)).run(k, v, tensors)
        tensors = tensors._replace(page_table=table)
    k, v = _by_head(k, v, tensors.page_table)
    return forward(call._replace(key=k, value=v, operands=tensors))


def prepare_cached(call: Call) -> Run:
    """A function that runs cached calls with the geometry of this one."""
    k, v, tensors, own = call.key, call.value, call.operands, None
    if k.dtype == E4M3:
        own = converter(call)
        k, v, table = own.empty()
        tensors = tensors._replace(page_table=table)
    k, v = _by_head(k, v, tensors.page_table)
    attend = prepare_attention(call._replace(key=k, value=v, operands=tensors))
    if attend is None:
        return general("prefill", cached_forward).prepare(call)
    options = call.without_tensors()

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if own is not None:
            if (k.data_ptr() | v.data_ptr()) & MISALIGNED:
                again = options._replace(query=q, key=k, value=v, operands=tensors)
                return cached_forward(again)
            k, v, table = own.run(k, v, tensors)
            tensors = tensors._replace(page_table=table)
        return attend(q, *_by_head(k, v, tensors.page_table), tensors, with_lse)

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
    return cache_error(call._replace(query=one_batch(call.query)))


def prepare_paged(call: Call) -> Run:
    """A function that runs calls with the geometry of this one."""
    options, sequences = call.without_tensors(), call.operands.page_table.shape[0]
    plan = _paged_plan(call, sequences)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        used, t = plan, tensors
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            q, k, v = map(tma_aligned, (q, k, v))
            again = options._replace(query=q, key=k, value=v, operands=t)
            used = _paged_plan(again, sequences)
        small = as_kernel_inputs(t)
        cu_seqlens = t.cu_seqlens_q.data_ptr(), 0
        return used.run(q, k, v, with_lse, small, None, t.page_table, cu_seqlens)

    return run


def _paged_plan(call: Call, sequences: int) -> ForwardPlan:
    query, key, value = one_batch(call.query), call.key.transpose(1, 2), call.value.transpose(1, 2)
    return plan_of(
        Call(query, key, value, as_kernel_inputs(call.operands), call.options), sequences=sequences
    )


# Conversion of e4m3 caches to 16 bits for prompts, whose products take many times as long.
#
# The keys of each row of the batch are converted in every call, into memory of its own.

_DEQUANTIZE_LAYOUT = struct_layout("dequantize.cu", "DequantizeParams")
_CACHE_ADDRESSES, _CACHE_SIZES = (
    _DEQUANTIZE_LAYOUT.packer("k", "table_out"),
    _DEQUANTIZE_LAYOUT.packer("k_strides"),
)
_TOKENS, _CONVERTING_THREADS = 16, 256  # of a CTA, as in cuda/dequantize.cu
_MAX_GRID_ROWS = 65535  # limit of the grid's second dimension; a CTA loops over further rows


def converter(call: Call) -> Converter:
    """A function that converts caches with this geometry to the dtype of the query."""
    (q, k, v), t = call[:3], call.operands
    return _converter(
        q.dtype, q.device.index, q.shape[0], (k.shape, v.shape), (k.stride(), v.stride()),
        decode.table_layout(t.page_table), scales_of(t.k_scale, t.v_scale, call.is_paged),
    )  # fmt: skip


class Converter:
    """Converts caches of one geometry."""

    def __init__(
        self, dtype: torch.dtype, device: int, B: int, shapes, strides,
        table: tuple[int, int] | None, scales: int,
    ) -> None:  # fmt: skip
        paged = table is not None
        k_shape, k_strides = decode.by_head(shapes[0], paged), decode.by_head(strides[0], paged)
        v_strides, Dv = decode.by_head(strides[1], paged), shapes[1][3]
        pages, page, keys = decode.cache_sizes(k_shape, table and table[0])
        Hkv, D = k_shape[1], k_shape[3]
        self._device, self._dtype = device, dtype
        self._table = None if table is None else ((B, table[0]), (table[0], 1), torch.int32)
        self._layouts = [
            _as_tokens(B, Hkv, keys, dim)
            if table is None
            else _as_pages(B * table[0], page, Hkv, dim)
            for dim in (D, Dv)
        ]
        sizes = _CACHE_SIZES.pack(
            *k_strides[:3], *v_strides[:3], B, Hkv, keys, D, Dv, page, pages,
            0 if table is None else table[1], scales,
        )  # fmt: skip
        self._params = Params(_CACHE_ADDRESSES, sizes)
        self._grid = -(-keys // _TOKENS), min(B, _MAX_GRID_ROWS)
        defines = tuple(dequantize_defines(dtype).items())
        self._kernel = kernel(
            "dequantize", "dequantize", device, _CONVERTING_THREADS, defines=defines
        )

    def empty(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Memory for keys, values and their page table."""
        with on_device(self._device):
            k, v = (empty(*layout, self._dtype) for layout in self._layouts)
            return k, v, None if self._table is None else empty(*self._table)

    def run(self, k: Tensor, v: Tensor, tensors: Operands) -> tuple[Tensor, Tensor, Tensor | None]:
        """16-bit keys and values, and their page table if there is one."""
        k_out, v_out, table = self.empty()
        scales = [s if s is None else s.contiguous() for s in (tensors.k_scale, tensors.v_scale)]
        with on_device(self._device):
            params = self._params.take(
                k.data_ptr(), v.data_ptr(), *map(address, scales), tensors.kv_lens.data_ptr(),
                address(tensors.page_table), k_out.data_ptr(), v_out.data_ptr(), address(table),
            )  # fmt: skip
            self._kernel.launch(self._grid, current_stream(self._device), params[1])
            self._params.give_back(params)
        return k_out, v_out, table


def _as_tokens(B: int, H: int, S: int, D: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape (B, H, S, D) and strides of a cache that is (B, S, H, D) in memory."""
    return (B, H, S, D), (S * H * D, D, H * D, 1)


def _as_pages(pages: int, size: int, H: int, D: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape (pages, size, H, D) and strides."""
    return (pages, size, H, D), (size * H * D, H * D, D, 1)


def dequantize_defines(dtype: torch.dtype) -> dict[str, int]:
    """The macros of the kernel."""
    return {"IS_BF16": int(dtype == torch.bfloat16), "HAS_KV_LENS": 1}


_converter = functools.lru_cache(maxsize=256)(Converter)
