"""Decoding on sm_90a: few queries against a long cache, split over keys, as in Flash-Decoding.

One kernel reads each key once, another merges the splits of a row that several CTAs share. One
launch before it writes new keys and values and rotates the queries. Everything here depends on
shapes alone: lengths and pages are read on the device, so a captured CUDA graph serves every
length. A cache that grows has another shape in every step: its plans share a template, which has
all that does not depend on how many keys there are. `mla` has the same parts for latent caches.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import (
    DecodeConfig,
    MlaConfig,
    copy_keys,
    decode_config,
    head_dim_error,
    limit_error,
)
from fa_ops.backends.hopper.kernel_plan import (
    MISALIGNED,
    UNBOUNDED,
    Geometry,
    KernelPlan,
    macros,
    result_layouts,
    softcap_kind,
    tma_aligned,
)
from fa_ops.backends.hopper.runtime import launch
from fa_ops.backends.hopper.runtime.launch import (
    PROMOTE_128B,
    Entry,
    Params,
    TensorMap,
    current_device,
    current_stream,
    empty,
    kernels,
    launch_dependent,
    processors,
)
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import Call, Run, queries_of_kv_head, rows_are_aligned
from fa_ops.call.options import (
    ALIGNMENT,
    MAX_DECODING_QUERIES,
    Operands,
    dtype_name,
    scales_of,
)

_MAX_GATHERED_BYTES = 16 << 32  # offsets count units of 16 bytes in 32 bits


def split_cache_error(
    call: Call, tensors: dict[str, Tensor], dtypes: tuple[torch.dtype, ...] = ()
) -> str | None:
    """Why no kernel here can attend a cache in this memory, or None.

    `tensors` are read by TMA. `dtypes`: of caches that have another dtype than the query.
    """
    q, k = call.query, call.key
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype not in (q.dtype, *dtypes):
        found = f"{dtype_name(k.dtype)} for queries of {dtype_name(q.dtype)}"
        return f"decodes bfloat16 and float16 caches, got {found}"
    if call.writes_cache:
        return "does not write to caches"
    table_length = call.operands.page_table.shape[1] if call.is_paged else None
    *_, keys = cache_sizes(by_head(k.shape, call.is_paged), table_length)
    reason = limit_error(call.scale, q.shape[2], keys)
    if reason:
        return reason
    for name, t in tensors.items():
        if not rows_are_aligned(t):
            return f"needs rows at multiples of {ALIGNMENT} bytes, {name} has strides {t.stride()}"
    return None


def gathering_error(call: Call, tensors: dict[str, Tensor]) -> str | None:
    """Why the kernels cannot gather keys from these tensors of pages, or None."""
    for name, t in tensors.items():
        if not call.is_paged or copy_keys(t.shape[1]) > 1:
            continue
        size = t.shape[0] * t.stride(0) * t.itemsize
        if size > _MAX_GATHERED_BYTES:
            return (
                f"gathers keys from at most {_MAX_GATHERED_BYTES} bytes of pages of "
                f"{t.shape[1]} keys, {name} has {size}"
            )
    return None


class SplitKvTemplate:
    """The part of a plan that does not depend on the number and strides of keys and values.

    Of its geometry the keys have no tokens, but those of a page, and neither they nor values have
    strides.
    """

    def __init__(
        self, g: Geometry, config: DecodeConfig | MlaConfig, q_map: TensorMap,
        params: struct.Struct, **features: int,
    ) -> None:  # fmt: skip
        B, Hq, Sq, _ = g.shapes[0]
        self.config, self.device, self.block_n = config, g.device, config.block_n
        self.ctas = processors(g.device)
        self.grid = self.ctas, 1
        defines = macros(config, g.dtype, paged=g.table is not None, kv_lens=g.has_lens, **features)
        entries = entries_of(config)
        self.kernels = launch.kernels(config.kernel, g.device, entries, tuple(defines.items()))
        self.q_map = q_map
        # made of shape and strides; every byte is read once, so an L2 promotion to 256 bytes would
        # cost bandwidth
        self.cache_map = functools.partial(TensorMap, rows=config.copy_keys, promotion=PROMOTE_128B)
        self.out, self.lse = result_layouts(g)
        # partial sums and statistics of each CTA's first and last work item, then lse if the call
        # does not return it (a returned lse is a tensor of its own: it would keep the workspace)
        rows = 2 * self.ctas * config.rows
        self.stats_offset = rows * config.value_dim * config.partial_bytes
        self.lse_offset = self.stats_offset + rows * config.stats_per_row * 8
        self.workspace = (self.lse_offset + B * Hq * Sq * 4,), (1,), torch.uint8
        self.params = Params(params)

    def has_short_rows(self, items: int, groups: int, capacity: int, whole_tiles: int) -> bool:
        """Whether no row is shared by CTAs, as its keys are few; the kernels use the same rule.

        `groups` of CTAs attend `items`, each of which has at most `capacity` keys.
        """
        tiles = -(-capacity // self.block_n)
        return tiles <= 1 or -(-items // groups) * tiles <= whole_tiles


class SplitKvPlan(KernelPlan):
    """One launch, and a second one that merges the rows that CTAs share.

    Subclasses set `template`, which the plans of a growing cache share, `kernels`, the tensor maps
    of keys and values, and what is packed of a geometry.
    """

    template: SplitKvTemplate
    kernels: tuple[launch.Kernel, ...]

    def take_params(
        self, inputs: tuple[int, int, int], kv_lens: int, outputs: tuple[int, ...],
        tensors: Operands,
    ) -> tuple[tuple, object]:  # fmt: skip
        """The filled in parameters of a call, and what must live until the launch.

        `inputs` are the addresses of query, key and value; `kv_lens` that of the lengths that the
        kernels read; `outputs` those of out, lse, partial sums and their statistics.
        """
        raise NotImplementedError

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True,
        appender: Appender | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """out and lse, which is None unless asked for.

        `appender` is launched before: what it writes for this call alone is in the same workspace.
        """
        template = self.template
        if current_device() != template.device:
            with torch.cuda.device(template.device):
                return self.run(q, k, v, tensors, with_lse, appender)
        q_at, k_at, v_at = inputs = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_at | k_at | v_at) & MISALIGNED:
            if appender is not None:
                q, kv_lens = appender.run(q, k, v, tensors)
                tensors = tensors._replace(kv_lens=kv_lens)
            q, k, v = map(tma_aligned, (q, k, v))
            plan = split_kv_plan(type(self), with_layouts(self.geometry, q, k, v))
            return plan.run(q, k, v, tensors, with_lse)
        stream = current_stream(template.device)
        out = empty(*template.out)
        workspace = empty(*(template.workspace if appender is None else appender.workspace))
        lse = empty(*template.lse) if with_lse else None
        at = workspace.data_ptr()
        lse_at = at + template.lse_offset if lse is None else lse.data_ptr()
        outputs = out.data_ptr(), lse_at, at, at + template.stats_offset
        kv_lens = 0 if tensors.kv_lens is None else tensors.kv_lens.data_ptr()
        if appender is not None:
            q_at, kv_lens = appender.launch(*inputs, kv_lens, at, tensors, stream)
            inputs = q_at, k_at, v_at
        params, kept = self.take_params(inputs, kv_lens, outputs, tensors)
        launch_dependent(self.kernels, template.grid, stream, params[1])
        template.params.give_back(params)
        del kept
        return out, lse


@functools.lru_cache(maxsize=1024)
def split_kv_plan(kind: type[SplitKvPlan], geometry: Geometry) -> SplitKvPlan:
    """The plan of a geometry."""
    return kind(geometry)


def check_tiles(B: int, items: int, keys: int) -> None:
    """Raise NotImplementedError where the kernels could not count all tiles in 32 bits.

    `items` are the work items of a batch row, each with all its keys.
    """
    if B * items * keys >= 2**37:
        raise NotImplementedError(f"counts tiles in 32 bits, got {B} x {items} x {keys} keys")


def by_head(x: tuple[int, ...], paged: bool) -> tuple[int, ...]:
    """Sizes or strides of a cache with heads before tokens; in pages the tokens come first."""
    return (x[0], x[2], x[1], x[3]) if paged else x


def cache_sizes(shape: tuple[int, ...], table_length: int | None) -> tuple[int, int, int]:
    """Number of pages, tokens of a page, tokens of a batch row; `table_length`: pages of a row."""
    if table_length is None:
        return 0, 0, shape[2]
    return shape[0], shape[2], shape[2] * table_length


def table_layout(table: Tensor | None) -> tuple[int, int] | None:
    """Pages of a batch row and the stride between rows, or None without a page table."""
    return None if table is None else (table.shape[1], table.stride(0))


def geometry_of(call: Call) -> Geometry:
    """The geometry of a call that reads its cache."""
    t = call.operands
    geometry = Geometry.of(
        call, table=table_layout(t.page_table), key_dtype=call.key.dtype,
        scales=scales_of(t.k_scale, t.v_scale, call.is_paged),
    )  # fmt: skip
    return with_layouts(geometry, *call[:3]) if call.is_paged else geometry


def with_layouts(g: Geometry, q: Tensor, k: Tensor, v: Tensor) -> Geometry:
    """The geometry of the same call with other tensors, heads of a page before its tokens."""
    paged = g.table is not None
    return g._replace(
        shapes=(q.shape, by_head(k.shape, paged), by_head(v.shape, paged)),
        strides=(q.stride(), by_head(k.stride(), paged), by_head(v.stride(), paged)),
    )


def without_keys(g: Geometry) -> Geometry:
    """The geometry of a template."""
    q, (pages, Hkv, page, D), v = g.shapes
    if g.table is None:
        pages = page = 0
    shapes = q, (pages, Hkv, page, D), (pages, Hkv, page, v[3])
    # half the time of `_replace`, in each step of a growing cache
    return Geometry._make((*g[:2], shapes, g.strides[:1], *g[4:]))


def entries_of(config: DecodeConfig | MlaConfig) -> tuple[Entry, Entry]:
    """The attention kernel and the combine kernel."""
    first = Entry(config.kernel, config.threads, config.shared_bytes)
    return first, Entry("combine", config.merge_threads)


_LAYOUT = struct_layout("decode.cu", "DecodeParams")
_SCALARS, _STRIDES = _LAYOUT.packer("B", "width"), _LAYOUT.packer("q_strides", "v_strides")
# maps and addresses, the scalars, addresses, the strides
_PARAMS = _LAYOUT.packer(packed=("B:width", "q_strides:v_strides"))
_E4M3 = torch.float8_e4m3fn
MAX_ROWS = MAX_DECODING_QUERIES  # of a KV head, of all its query heads


def cache_error(call: Call) -> str | None:
    """Why the kernel cannot attend such a cache, or None."""
    rows = queries_of_kv_head(call)
    if rows > MAX_ROWS:
        return f"attends {MAX_ROWS} queries of a kv head at once, got {rows}"
    reason = memory_error(call, (_E4M3,))
    return reason or gathering_error(call, {"key_cache": call.key, "value_cache": call.value})


def memory_error(call: Call, dtypes: tuple[torch.dtype, ...] = ()) -> str | None:
    """The part of `cache_error` that does not depend on the number of queries.

    `dtypes`: of caches that have another dtype than the query.
    """
    q, k, v = call[:3]
    D, Dv = q.shape[-1], v.shape[-1]
    if reason := head_dim_error(D, Dv):
        return reason
    if call.options.num_splits or call.options.batch_invariant:
        return "cuts keys as the device is filled best, without num_splits and batch_invariant"
    if call.operands.unified_max is not None:
        return "has no unified maximum"
    tensors = {"query": q, "key_cache": k, "value_cache": v}
    return split_cache_error(call, tensors, dtypes)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    return plan_of(call).run(*call[:4])


def prepare(call: Call) -> Run:
    """What runs cached calls with the geometry of this one."""
    return plan_of(call).run


def plan_of(call: Call) -> DecodePlan:
    """The plan of a call that reads its cache."""
    return split_kv_plan(DecodePlan, geometry_of(call))


class DecodeTemplate(SplitKvTemplate):
    """The part of a plan that does not depend on the number and strides of keys and values."""

    def __init__(self, g: Geometry, width: int) -> None:
        (B, Hq, Sq, D), (pages, Hkv, page, _), (*_, Dv) = g.shapes
        group, units, is_e4m3 = Hq // Hkv, g.units, g.key_dtype == _E4M3
        left, right, _ = g.sides
        if Sq == 1:
            right = UNBOUNDED  # a single query is at the position of the last key
        super().__init__(
            g, decode_config(D, Dv, group * Sq, page, is_e4m3, g.scales),
            TensorMap(g.dtype, g.shapes[0], g.strides[0], Sq, heads=group), _PARAMS,
            ranges=g.ranges is not None, softcap=softcap_kind(g.softcap),
            alibi=g.slopes is not None, sinks=g.has_sinks, shares_tokens=width > 1,
        )  # fmt: skip
        self.cache_dtype = torch.uint8 if is_e4m3 else g.dtype
        self.groups = self.ctas // width
        self.items = B * Hkv // width
        self.idle = -self.items % self.groups  # as in the kernel
        self.has_uneven_items = g.has_lens or g.ranges is not None
        self._before_capacity = B, Hq, Hkv, group, Sq
        self._after_capacity = (
            *(Dv, self.idle, left, right, page, pages, g.table[1] if g.table else 0),
            Hq if g.slopes else 0,
            2 if g.ranges and g.ranges[0] > 1 else 0,
            *(units.inside_tanh, units.log2, 1.0 / units.accumulator, D, width),
        )

    def scalars(self, capacity: int) -> bytes:
        """The packed scalars; `capacity`: keys that a batch row has room for."""
        return _SCALARS.pack(*self._before_capacity, capacity, *self._after_capacity)

    def map_of(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
        """The maps of keys or values."""
        config = self.config
        return self.cache_map(
            self.cache_dtype, shape, strides, whole_rows=config.whole_rows,
            row_bytes=config.row_bytes(shape[3]),
        )  # fmt: skip

    def shares_rows(self, capacity: int) -> bool:
        """Whether CTAs may share a row; the kernel uses the same rule."""
        if self.has_short_rows(self.items, self.groups, capacity, self.config.whole_tiles):
            return False
        return self.has_uneven_items or self.idle * -(-capacity // self.block_n) > self.groups


class DecodePlan(SplitKvPlan):
    """Few queries against a long cache."""

    def configure(self, g: Geometry) -> None:
        """The template, the kernels, and the keys that a batch row has room for."""
        k_shape, size = g.shapes[1], 1 if g.key_dtype == _E4M3 else 2
        B, Hkv, (*_, capacity) = (
            g.shapes[0][0],
            k_shape[1],
            cache_sizes(k_shape, g.table and g.table[0]),
        )
        check_tiles(B, Hkv, capacity)
        width = group_width(B, k_shape, g.strides[1], processors(g.device), size)
        self.template, self.capacity = _template(without_keys(g), width), capacity
        self.kernels = self.template.kernels[: 1 + self.template.shares_rows(capacity)]

    def map_tensors(self, g: Geometry) -> None:
        """Keys and values."""
        self.k_map, self.v_map = map(self.template.map_of, g.shapes[1:], g.strides[1:])

    def pack_parameters(self, g: Geometry) -> None:
        """Sizes and factors, and strides."""
        self.scalars = self.template.scalars(self.capacity)
        self.strides = _STRIDES.pack(*g.strides[0][:3], *g.strides[1][:3], *g.strides[2][:3])

    def take_params(
        self, inputs: tuple[int, int, int], kv_lens: int, outputs: tuple[int, ...],
        tensors: Operands,
    ) -> tuple[tuple, object]:  # fmt: skip
        """The filled in parameters of a call, and what must live until the launch."""
        t, k_scale, v_scale = tensors, tensors.k_scale, tensors.v_scale
        table, ranges, slopes, sinks = t.page_table, t.key_ranges, t.alibi_slopes, t.sinks
        if ranges is not None:
            ranges = ranges.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        if slopes is not None:
            slopes = slopes.contiguous()
        if k_scale is not None:
            k_scale = k_scale.contiguous()
        if v_scale is not None:
            v_scale = v_scale.contiguous()
        template, (q, k, v) = self.template, inputs
        kept = ranges, table, sinks, slopes, k_scale, v_scale
        params = template.params.take(
            template.q_map[q], self.k_map[k], self.v_map[v], *outputs, kv_lens,
            *[0 if t is None else t.data_ptr() for t in kept], self.scalars, *inputs, self.strides,
        )  # fmt: skip
        return params, kept


def group_width(
    B: int, k_shape: tuple[int, ...], k_strides: tuple[int, ...], ctas: int, size: int = 2
) -> int:
    """The number of CTAs that attend the same tokens at about the same time, one per kv head.

    With 64 features, and heads between tokens in memory, one head alone reads every eighth line of
    128 bytes: on an H200 groups of 8 CTAs are 5 to 7 % faster there. With more features they gain
    1 % or nothing, and calls of few rows take up to 4 % longer. `size`: bytes of a feature.
    """
    _, Hkv, _, D = k_shape
    has_lines = D * size in (64, 128) and k_strides[1] < k_strides[2]
    return 8 if has_lines and Hkv % 8 == 0 and ctas <= 2 * B * Hkv and ctas >= 8 else 1


_template = functools.lru_cache(maxsize=256)(DecodeTemplate)


# New keys and values of a cached call, written before a kernel attends them; queries rotated.
#
# One launch does all of it. Lengths and pages are read on the device alone, so a captured CUDA
# graph serves every length.

_APPEND_LAYOUT = struct_layout("append.cu", "AppendParams")
_SIZES = _APPEND_LAYOUT.packer("q_strides")
# addresses that may be null, behind that of `ends`, and the tensors there
_OPTIONAL = {"table": "page_table", "k_scale": "k_scale", "v_scale": "v_scale"}
_OPTIONAL |= {"cos": "rotary_cos", "sin": "rotary_sin"}
_CACHED_E4M3 = torch.float8_e4m3fn
_THREADS, _FEATURES = 128, 8  # of a CTA, and of a thread, as in cuda/append.cu
_ALIGNMENT = 128  # of what is written for one call, in a workspace
_MAX_ROWS = 2**31 - 1 - _THREADS  # new keys, values and queries


def append_error(call: Call) -> str | None:
    """Why the kernel cannot write and rotate what the call needs, or None.

    Dtypes and head dimensions are those that some kernel attends.
    """
    q, cos = call.query, call.operands.rotary_cos
    if not q.numel():
        return f"appends to caches that queries attend, got a query of shape {tuple(q.shape)}"
    if cos is not None and not cos.shape[1]:
        return f"rotates at least two features, rotary_cos is {tuple(cos.shape)}"
    new, queries = _rows(call)
    if 2 * new + queries > _MAX_ROWS:
        return f"writes at most {_MAX_ROWS} rows, got {2 * new + queries}"
    return None


def prepare_append(call: Call) -> Run:
    """A function that appends and rotates for calls with the geometry of this one.

    It returns the queries, rotated if requested, and the lengths with the new keys.
    """
    return Appender(call).run


def append_before(plan_of: Callable[[Call], SplitKvPlan], call: Call) -> Run:
    """What writes and rotates, then attends with the plan that `plan_of` makes of the rest."""
    appender, rest = Appender(call), call.read_only()
    if appender.rotates:  # rotated queries are a tensor of their own
        rest = rest._replace(query=rest.query.new_empty(rest.query.shape))
    plan = plan_of(rest)
    appender.share(plan.template.workspace)
    return functools.partial(plan.run, appender=appender)


def _addresses(has_new: bool, given: list[str]) -> struct.Struct:
    """Packs the addresses that are not null."""
    names = list(_APPEND_LAYOUT.fields)[: list(_APPEND_LAYOUT.fields).index("q_strides")]
    null = set() if has_new else {"key", "value", "ends"}
    null |= _OPTIONAL.keys() - given
    return struct.Struct("<" + "".join("8x" if name in null else "Q" for name in names))


def _rows(call: Call) -> tuple[int, int]:
    """The number of new keys of all heads, and of queries to rotate."""
    key, (B, Hq, Sq, _) = call.operands.new_key, call.query.shape
    new = 0 if key is None else B * key.shape[1] * key.shape[2]
    return new, 0 if call.operands.rotary_cos is None else B * Hq * Sq


class Appender:
    """The launch for calls of one geometry."""

    def __init__(self, call: Call) -> None:
        (q, k, v), t, cos = call[:3], call.operands, call.operands.rotary_cos
        (B, Hq, Sq, D), Dv, table = q.shape, v.shape[3], t.page_table
        paged, is_rotated, tokens = call.is_paged, cos is not None, 0
        shape = by_head(k.shape, paged)
        pages, page, capacity = cache_sizes(shape, table.shape[1] if paged else None)
        key_strides = value_strides = (0, 0, 0)
        if t.new_key is not None:
            tokens = t.new_key.shape[2]
            key_strides, value_strides = t.new_key.stride()[:3], t.new_value.stride()[:3]
        positions, angles = cos.shape if is_rotated else (0, 0)
        new, queries = _rows(call)
        lanes_log2 = (-(-max(D, Dv) // _FEATURES) - 1).bit_length()
        sizes = _SIZES.pack(
            *q.stride()[:3], *key_strides, *value_strides, *by_head(k.stride(), paged)[:3],
            *by_head(v.stride(), paged)[:3], Hq, shape[1], Sq, tokens, D, Dv, capacity, page, pages,
            table.stride(0) if paged else 0, scales_of(t.k_scale, t.v_scale, paged),
            positions, 2 * angles, call.options.rotary_interleaved, new, queries, lanes_log2,
        )  # fmt: skip
        given = [name for name in _OPTIONAL if getattr(t, _OPTIONAL[name]) is not None]
        self._params = Params(_addresses(new > 0, given), sizes)
        self._given = [Operands._fields.index(_OPTIONAL[name]) for name in given]
        self._device = q.device.index
        self._grid = -(-(2 * new + queries) // (_THREADS >> lanes_log2)), 1
        self.rotates = queries > 0
        self._rotated = (B, Hq, Sq, D), (Hq * Sq * D, Sq * D, D, 1), q.dtype
        self._ends = ((B,), (1,), torch.int32) if new else None
        defines = append_defines(q.dtype, k.dtype, cos.dtype if is_rotated else None)
        entry = Entry("append", _THREADS)
        (self._kernel,) = kernels("append", self._device, [entry], tuple(defines.items()))

    def share(self, workspace: tuple) -> None:
        """Add to a workspace: its size, strides and dtype, bytes. `launch` writes behind it."""
        ((size,), *layout), (B, *rows), dtype = workspace, self._rotated[0], self._rotated[2]
        self._rotated_at = -(-size // _ALIGNMENT) * _ALIGNMENT
        rotated = B * math.prod(rows) * dtype.itemsize if self.rotates else 0
        self._ends_at = self._rotated_at + -(-rotated // _ALIGNMENT) * _ALIGNMENT
        self.workspace = (self._ends_at + 4 * B,), *layout

    def run(self, q: Tensor, k: Tensor, v: Tensor, t: Operands) -> tuple[Tensor, Tensor]:
        """Launch; returns queries and lengths, in memory of their own where they are not given."""
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.run(q, k, v, t)
        queries = empty(*self._rotated) if self.rotates else q
        ends = t.kv_lens if self._ends is None else empty(*self._ends)
        inputs, written = (q, k, v, t.kv_lens), (queries, ends)
        self._launch(
            *[x.data_ptr() for x in (*inputs, *written)], t, current_stream(self._device)
        )  # fmt: skip
        return queries, ends

    def launch(
        self, q: int, k: int, v: int, kv_lens: int, workspace: int, t: Operands, stream: int
    ) -> tuple[int, int]:
        """Launch on the current device; takes addresses, returns those of queries and lengths."""
        queries = workspace + self._rotated_at if self.rotates else q
        ends = kv_lens if self._ends is None else workspace + self._ends_at
        self._launch(q, k, v, kv_lens, queries, ends, t, stream)
        return queries, ends

    def _launch(
        self, q: int, k: int, v: int, kv_lens: int, queries: int, ends: int, t: Operands,
        stream: int,
    ) -> None:  # fmt: skip
        rest = [t[i].data_ptr() for i in self._given]
        if self._ends is None:
            params = self._params.take(q, queries, k, v, kv_lens, *rest)
        else:
            params = self._params.take(
                q, queries, t.new_key.data_ptr(), t.new_value.data_ptr(), k, v, kv_lens, ends, *rest
            )
        self._kernel.launch(self._grid, stream, params[1], dependent=True)
        self._params.give_back(params)


def append_defines(
    dtype: torch.dtype, cached: torch.dtype, angles: torch.dtype | None = None
) -> dict[str, int]:
    """The macros of the kernel; `cached`: dtype of the cache, `angles`: of the rotary tables."""
    return {
        "IS_BF16": int(dtype == torch.bfloat16),
        "IS_E4M3": int(cached == _CACHED_E4M3),
        "ROTATION": 0 if angles is None else 1 if angles == torch.float32 else 2,
    }
