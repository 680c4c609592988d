"""Dense backward on sm_90a, in three kernels: row sums (`preprocess`), the matrix products, and
`postprocess`, which converts the fp32 sums and computes non-finite rows again. CTAs with whole
heads compute those rows themselves, and row sums of small problems. Wide heads and deterministic
gradients compute dQ in a kernel of its own.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from operator import getitem

import torch
from torch import Tensor

from fa_ops.backends.hopper import masks
from fa_ops.backends.hopper.backward_programs import backward_program
from fa_ops.backends.hopper.configs import (
    BackwardConfig,
    MaskGradientConfig,
    backward_config,
    group_parts,
)
from fa_ops.backends.hopper.kernel_plan import (
    LOG2E,
    MISALIGNED,
    UNBOUNDED,
    Geometry,
    KernelPlan,
    key_section,
    macros,
    section_of,
    softcap_kind,
    tma_aligned,
)
from fa_ops.backends.hopper.masks import (
    Bias,
    MaskLayout,
    MaskPacker,
    RareOptions,
    bits_of,
    skipped_lists,
)
from fa_ops.backends.hopper.runtime.launch import (
    Entry,
    Params,
    TensorMap,
    address,
    current_device,
    current_stream,
    empty,
    kernel,
    kernels,
    pointers_to,
    processors,
)
from fa_ops.backends.hopper.runtime.structs import kernel_layout, struct_layout
from fa_ops.backends.hopper.term_gradients import ProgramCall
from fa_ops.call.call import Call, Run, general, rows_are_aligned
from fa_ops.call.options import NO_OPERANDS, Gradients, Operands

# maps and addresses; scalars and strides; a mask's bits; what `RareOptions` writes
_PARAMS = struct_layout("backward_tiles.cuh", "BackwardParams")
_ADDRESSES, _SCALARS = _PARAMS.packer("q", "nonfinite"), _PARAMS.packer("B", "zeros")
_BITS, _BITS_AT = _PARAMS.packer("by_key", "mask_block"), _PARAMS.fields["by_key"].offset
_NO_BITS = (0,) * 5

# addresses, then what all calls share
_CLIP = kernel_layout("backward_preprocess.cu", "clip_ranges")

_ROWS = 64  # tokens of one TMA box, and of a CTA of `preprocess`
# Bytes of Q and dO that concurrent CTAs read. The fp32 sums of dQ have the same size, and atomic
# additions to them are fast while they stay in the L2 cache.
_SECTION_BYTES = 8 << 20
_FLAG_ROWS = 16  # rows for which one word flags whether any is not finite


def backward(call: Call) -> Gradients:
    """All gradients of a dense call, which may have a program."""
    like, (grad_out, grad_lse, out, lse, mask_grad), t = call[:3], call.saved, call.operands
    grad_strides = tuple(map(written_strides, like))
    q, k, v, grad_out, out = map(tma_aligned, (*like, grad_out, out))
    ranges, bias, held = t.key_ranges, None, None
    if ranges is not None and ranges.stride(3) != 1:
        t = t._replace(key_ranges=ranges.contiguous())
    if bits_of(t.attn_mask):
        bias, held = Bias.of(t.attn_mask, t.mask_blocks)
    saved = call.saved._replace(grad_out=grad_out, out=out)
    plan = plan_of(Call(q, k, v, t, call.options, saved), grad_strides, bias)
    lens, slopes = (None if x is None else x.contiguous() for x in (t.kv_lens, t.alibi_slopes))
    t = t._replace(kv_lens=lens, alibi_slopes=slopes)
    *grads, other, workspace = plan.run(grad_out, q, k, v, out, lse, grad_lse, t, held, mask_grad)
    dsinks = sink_gradient(t.sinks, lse, plan, workspace)
    return _gradients(plan, laid_out_like(like, grads), other, dsinks)


def prepare(call: Call) -> Run:
    """A function that runs backward passes with the geometry of this one."""
    in_general = general("backward", backward).prepare(call)
    if bits_of(call.operands.attn_mask) or needs_copies(call):
        return in_general
    plan = plan_of(call, (call.query.stride(), call.key.stride(), call.value.stride()))

    def run(grad_out, grad_lse, q, k, v, out, lse, tensors: Operands) -> Gradients | tuple:
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | grad_out.data_ptr()
        if (addresses | out.data_ptr()) & MISALIGNED:
            return in_general(grad_out, grad_lse, q, k, v, out, lse, tensors)
        results = plan.run(grad_out, q, k, v, out, lse, grad_lse, tensors)
        if tensors is NO_OPERANDS:
            return results[:3]
        *grads, other, workspace = results
        return _gradients(plan, grads, other, sink_gradient(tensors.sinks, lse, plan, workspace))

    return run


def _gradients(
    plan: BackwardPlan, grads: Sequence[Tensor], other: Tensor | None, dsinks: Tensor | None
) -> Gradients:
    """`other` is the gradient of a program's terms, or of the mask."""
    if plan.program is None:
        return Gradients(*grads, other, dsinks)
    return Gradients(*grads, None, dsinks, other)


def needs_copies(call: Call) -> bool:
    """Whether a tensor is copied in every backward pass with the geometry of this one."""
    q, k, v, (grad_out, grad_lse, out, lse, _) = call.query, call.key, call.value, call.saved
    return not (
        lse.is_contiguous()
        and (grad_lse is None or grad_lse.is_contiguous())
        and rows_are_aligned(q, k, v, grad_out, out)
        and all(written_strides(t) == t.stride() for t in (q, k, v))
    )


def plan_of(
    call: Call, grad_strides: tuple[tuple[int, ...], ...], bias: Bias | None = None,
    sequences: int | None = None,
) -> BackwardPlan:  # fmt: skip
    """The plan of a backward pass; a packed batch of `sequences` is one long sequence.

    Gradients are laid out as `torch.empty_like` lays out tensors with the strides `grad_strides`.
    """
    mask, saved = call.operands.attn_mask, call.saved
    geometry = Geometry.of(
        call, bias=bias, sequences=sequences, lists=skipped_lists(call.operands),
        mask=None if mask is None or bias is not None else MaskLayout.of(mask),
        deterministic=call.options.deterministic,
    )  # fmt: skip
    strides = *geometry.strides, saved.grad_out.stride(), saved.out.stride(), *grad_strides
    return _plan(geometry._replace(strides=strides))


class BackwardPlan(KernelPlan):
    """A backward pass: one launch, or row sums, products and the conversion of fp32 sums."""

    def configure(self, g: Geometry) -> None:
        """The tiles, what CTAs own, the workspace and the kernels."""
        (q_shape, k_shape, (*_, Dv)), count = g.shapes, processors(g.device)
        left, right, has_window = self.sides = g.sides
        softcap, has_ranges = softcap_kind(g.softcap), g.ranges is not None
        few_registers = g.mask is not None or g.dropout_p > 0 or softcap > 0
        pairs = prefers_pairs(q_shape, k_shape, (left, right), count, has_ranges, g.sequences)
        differs_by_row = g.has_lens or has_ranges or g.slopes is not None
        program = None if g.program is None else backward_program(g.program)
        if program is not None:
            few_registers, differs_by_row = program.keeps_registers, True
        is_plain = g.mask is g.bias is None and not (few_registers or differs_by_row)
        whole = is_plain and prefers_whole_heads(q_shape, k_shape, (left, right), count)
        sums_rows = whole and prefers_own_row_sums(q_shape, k_shape, Dv, count)
        self.config = backward_config(
            q_shape[3], Dv, g.deterministic, g.bias_bits, few_registers, pairs,
            g.lists is not None or g.runs is not None, whole, differs_by_row=differs_by_row,
            sums_rows=sums_rows,
            sums_distances=program is not None and program.distance_sum is not None,
        )  # fmt: skip
        self._divide(g, count)
        self.options = RareOptions.of(g, _PARAMS)
        self.program = None
        if program is not None:
            blocks = -(-k_shape[2] // self.config.block_n) * self.config.block_n
            self.program = ProgramCall(program, g, blocks, self.parts)
        self.kernels = _kernels_for(
            self.config, g.dtype, g.device, window=has_window, kv_lens=g.has_lens,
            ranges=has_ranges, softcap=softcap, alibi=g.alibi, mask=g.mask is not None,
            dropout=g.dropout_p > 0, split=self.parts > 1, program=g.program,
        )  # fmt: skip
        self.by_key = self.by_query = None
        if g.mask is not None:
            # for scores with a row for each key, and for those with a row for each query
            self.by_key = MaskPacker.by_key(g.mask, g.device)
            if not self.config.adds_dq:
                self.by_query = MaskPacker.by_query(g.mask, k_shape[2], g.device)
            self.mask_block = 0 if g.mask.queries_share else self.config.block_m // 8

    def map_tensors(self, g: Geometry) -> None:
        """Queries, keys, values, the gradient of the results, and the gradients."""
        *inputs, _ = g.strides[:5]
        grads = [_like(*of, g.dtype) for of in zip(g.shapes, g.strides[5:])]
        out_shape = *g.shapes[0][:3], g.shapes[2][3]
        layouts = (*zip((*g.shapes, out_shape), inputs), *(of[:2] for of in grads))
        self.maps = [TensorMap(g.dtype, shape, stride, _ROWS) for shape, stride in layouts]
        self.grads = grads if g.sequences is None else [_of_tokens(*of) for of in grads]
        self.strides = *inputs, *(strides for _, strides, _ in grads), g.strides[4]

    def pack_parameters(self, g: Geometry) -> None:
        """Sizes, factors and strides."""
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (_, _, _, Dv) = g.shapes
        (left, right, _), units, group, parts = self.sides, g.units, Hq // Hkv, self.parts
        scalars = _SCALARS.pack(
            *(B, Hq, Hkv, group, Sq, Sk, left, right, self.m_blocks),
            *(-(-Sk // self.config.block_n), self.section),
            key_section(B * Hkv, Sk, D + Dv) * group,
            Hq if g.slopes else 0,
            g.ranges[1] if g.ranges else 1,
            *(parts, group // parts, D, Dv),
            # the kernels do not apply dropout's factor to the weights
            *(units.gradient * masks.scale(g.dropout_p), units.inside_tanh),
            # with a bias, scores are in its units, and changed by a program natural
            LOG2E if g.bias or (self.program and self.program.changes_scores) else units.log2,
            1.0 / units.accumulator,
            *(n for of in self.strides for n in of[:3]),
            self.zeros,
        )
        self.params = Params(_ADDRESSES, scalars.ljust(_PARAMS.size - _ADDRESSES.size, b"\0"))
        if g.ranges:
            sizes = *g.ranges[2:], g.ranges[1], Sq, Sk, left, right
            self.clip_ranges = Params.of(_CLIP, "strides", sizes)

    def _divide(self, g: Geometry, processors: int) -> None:
        """Divide the work among CTAs, and the workspace.

        Into `parts` of a group of query heads; `section` heads of keys, or parts of their groups,
        are processed concurrently.
        """
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (_, _, _, Dv) = g.shapes
        config, group, parts = self.config, Hq // Hkv, 1
        key_blocks = -(-Sk // config.block_n) * B * Hkv
        items = B * Hkv if config.whole_heads else key_blocks * config.ctas_of_block
        if not config.whole_heads:
            parts = group_parts(group, items, processors, config.waves)
        self.parts, self.m_blocks, self.heads = parts, -(-Sq // config.block_m), B * Hq
        self.row_blocks = self.m_blocks * config.block_m // _ROWS
        self.rows = self.row_blocks * _ROWS
        self.ctas = min(items * parts, processors) if config.is_persistent else items * parts
        of_head = Sq * 2 * (D + Dv) * (group // parts)
        self.section = section_of(B * Hkv * parts, of_head, _SECTION_BYTES)
        sums = self.rows * config.sum_features if config.adds_dq else 0
        if config.whole_heads:  # those of a CTA's heads, unless there is one block of keys
            sums *= self.ctas * group if Sk > config.block_n else 0
        else:
            sums *= self.heads
        self._allocate(sums, key_blocks, parts, B * g.ranges[1] if g.ranges else 0)
        finished = self.m_blocks * self.heads * config.sums_dq + 2 * key_blocks * (parts > 1)
        self.postprocess_ctas = finished or processors

    def _allocate(self, sums: int, key_blocks: int, parts: int, range_heads: int) -> None:
        """Shapes, strides and dtypes of the workspace, whose parts follow one another:
        log-sum-exps, row sums, in one pass the sums of dQ, where groups are split those of dK and
        dV, the counter of tiles, and the flags."""
        config, rows = self.config, self.heads * self.rows
        keys, dims = key_blocks * config.block_n, config.head_features + config.value_features
        key_sums = keys * dims * (1 if config.adds_dq else parts) if parts > 1 else 0
        # those that are added to, by 16 bytes
        self.zeros = (sums + key_sums) // 4 if config.sums_dq else 0
        flags = (2 * keys if parts == 1 else 0) + (0 if config.adds_dq else rows)
        if config.whole_heads:
            flags = 0  # in shared memory
        self.row_bytes = 4 * rows
        self.key_sums_at = 2 * self.row_bytes + 4 * sums
        self.counter_at = self.key_sums_at + 4 * key_sums
        self.workspace = (self.counter_at // 4 + 1 + flags // _FLAG_ROWS,), (1,), torch.float32
        self.range_bytes = 8 * range_heads * self.rows
        self.clipped = (range_heads * (2 * self.rows + 4 * self.m_blocks),), (1,), torch.int32
        self.clip_grid = range_heads, self.m_blocks

    def run(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None = None,
        tensors: Operands = NO_OPERANDS,
        bias: Tensor | None = None,
        mask_grad: bool = False,
        cu_seqlens: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor | None, ...]:
        """Launch the kernels: dq, dk, dv, the mask's gradient, and the workspace with row sums.

        Of a packed batch the tensors are (T, H, D), and `cu_seqlens` the addresses of both.
        """
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(
                    grad_out, q, k, v, out, lse, grad_lse, tensors, bias, mask_grad, cu_seqlens
                )
        config, kernels = self.config, self.kernels
        mask, slopes, _, lens, ranges, *_ = tensors
        stream = current_stream(self.device)
        dq, dk, dv = [empty(*of) for of in self.grads]
        workspace, clipped, ranges_at = empty(*self.workspace), None, (0, 0)
        if ranges is not None:
            clipped, ranges_at = self._clip_ranges(ranges, lens, stream)
        at = lse_log2 = workspace.data_ptr()
        delta, sums, counter = at + self.row_bytes, at + 2 * self.row_bytes, at + self.counter_at
        addresses = [t.data_ptr() for t in (q, k, v, grad_out, dq, dk, dv)]
        params = self.params.take(
            *map(getitem, self.maps, addresses), *addresses, out.data_ptr(), lse.data_ptr(),
            0 if grad_lse is None else grad_lse.data_ptr(), lse_log2, delta, sums, counter,
            0 if lens is None else lens.data_ptr(), 0 if slopes is None else slopes.data_ptr(),
            *ranges_at, at + self.key_sums_at, counter + 4,
        )  # fmt: skip
        bits = held = None
        if self.by_key is not None:
            bits = self._write_bits(params[0], mask, stream)
        if self.options is not None:
            held = self.options.write(params[0], tensors, bias, cu_seqlens, stream)
        sums = packed = read = None
        if self.program is not None:
            packed, sums, *read = self.program.write(params[0], tensors)
        if kernels.preprocess is None:
            kernels.products.launch((self.ctas, 1), stream, params[1])
        else:
            self._launch_in_order(stream, params[1])
        if kernels.distances is not None:
            kernels.distances.launch(self.program.grid, stream, params[1])
        dmask = None
        if mask_grad:
            dmask = mask_gradient(mask, q, k, config, kernels.defines, params[0], stream)
        self.params.give_back(params)
        del clipped, bits, held, read  # the kernels that read them are launched
        if self.program is not None:
            delta = self.row_sums(workspace).view(*q.shape[:2], -1)[..., : q.shape[2]]
            dterms = self.program.gradients(packed, tensors, lse, grad_lse, delta, sums)
            return dq, dk, dv, dterms, workspace
        return dq, dk, dv, dmask, workspace

    def _launch_in_order(self, stream: int, params: ctypes.Array) -> None:
        """Launch the kernels of a call for which one kernel is not enough."""
        config, kernels = self.config, self.kernels
        kernels.preprocess.launch((self.heads, self.row_blocks), stream, params)
        kernels.products.launch((self.ctas, 1), stream, params, dependent=True)
        if kernels.queries is not None:
            ctas = config.query_ctas(self.m_blocks) * self.heads
            kernels.queries.launch((ctas, 1), stream, params, dependent=config.is_wide)
        if kernels.postprocess is not None:
            kernels.postprocess.launch((self.postprocess_ctas, 1), stream, params, dependent=True)

    def row_sums(self, workspace: Tensor) -> Tensor:
        """(B, Hq, rows), rows from Sq on undefined."""
        return workspace[self.row_bytes // 4 :][: self.row_bytes // 4]

    def _clip_ranges(
        self, ranges: Tensor, lens: Tensor | None, stream: int
    ) -> tuple[Tensor, tuple[int, int]]:
        """The keys of each query after every mask, and the bounds of each block of queries: memory,
        and where in it they are."""
        clipped = empty(*self.clipped)
        at = clipped.data_ptr(), clipped.data_ptr() + self.range_bytes
        params = self.clip_ranges.take(ranges.data_ptr(), address(lens), *at)
        self.kernels.clip_ranges.launch(self.clip_grid, stream, params[1])
        self.clip_ranges.give_back(params)
        return clipped, at

    def _write_bits(
        self, params: ctypes.Array, mask: Tensor, stream: int
    ) -> tuple[Tensor | None, ...]:
        """Pack a bool mask and write where its bits are; returns the tensors that hold them."""
        by_key, key_bits = _packed(self.by_key, mask, stream)
        by_query, query_bits = _packed(self.by_query, mask, stream)
        _BITS.pack_into(params, _BITS_AT, *key_bits, *query_bits, self.mask_block)
        return by_key, by_query


_plan = functools.lru_cache(maxsize=1024)(BackwardPlan)


def _packed(
    packer: MaskPacker | None, mask: Tensor, stream: int
) -> tuple[Tensor | None, tuple[int, ...]]:
    """The bits of a mask, and struct MaskBits of cuda/backward_tiles.cuh."""
    if packer is None:
        return None, _NO_BITS
    bits = packer.run(stream, mask.data_ptr())
    return bits, (bits.data_ptr(), *packer.bits_layout)


def _of_tokens(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> tuple:
    """The layout of (1, H, T, D) as (T, H, D)."""
    return tuple(tuple(sizes[i] for i in (2, 1, 3)) for sizes in (shape, strides)) + (dtype,)


def laid_out_like(like: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the layout of `torch.empty_like`, copied where TMA could not write it."""
    pairs = zip(like, grads)
    return [
        g if t.stride() == written_strides(t) else torch.empty_like(t).copy_(g) for t, g in pairs
    ]


def written_strides(t: Tensor) -> tuple[int, ...]:
    """The strides of `t`, or contiguous ones where TMA cannot write a tensor like `t`."""
    like = torch.empty_like(t, device="meta")
    return t.stride() if tma_aligned(like) is like else like.contiguous().stride()


def _like(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of what `torch.empty_like` makes."""
    meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return tuple(shape), torch.empty_like(meta).stride(), dtype


def sink_gradient(
    sinks: Tensor | None, lse: Tensor, plan: BackwardPlan, workspace: Tensor,
    outside: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Minus a sink's weight times delta, summed over batch and queries; delta holds -dlse.

    lse is (B, Hq, Sq), or (Hq, Tq) of a packed batch, in which sinks have no weight for the tokens
    `outside`, bool (Tq,).
    """
    if sinks is None:
        return None
    lse = lse if lse.dim() == 3 else lse[None]
    B, Hq, Sq = lse.shape
    delta = plan.row_sums(workspace).view(B, Hq, -1)[..., :Sq]
    # a sink of -inf has no weight, not even in a row without keys, whose lse is -inf; one of +inf,
    # which is the lse of its rows, has all
    most = torch.finfo(torch.float32).max
    weight = torch.exp(sinks.float().clamp(max=most).view(1, Hq, 1) - lse.clamp(-most, most))
    without = weight == 0 if outside is None else (weight == 0) | outside
    return -(weight * delta).masked_fill(without, 0).sum((0, 2)).to(sinks.dtype)


class _Kernels:
    def __init__(self, defines: tuple[tuple[str, int], ...], config: BackwardConfig, device: int):
        self.defines = defines
        entries = entries_of(config, dict(defines))
        names = (entry.name for entry in entries)
        found = dict(zip(names, kernels("backward", device, entries, defines)))
        products, queries = config.products
        self.products, self.queries = found[products], found.get(queries)
        self.preprocess, self.postprocess = found.get("preprocess"), found.get("postprocess")
        self.clip_ranges, self.distances = found.get("clip_ranges"), found.get("distance_gradient")


def entries_of(config: BackwardConfig, defines: dict[str, int]) -> list[Entry]:
    """The kernels that a call launches."""
    products, queries = config.products
    entries = [] if config.sums_rows else [Entry("preprocess", 256)]
    entries.append(Entry(products, config.threads, config.shared_bytes))
    if not config.whole_heads:
        entries.append(Entry("postprocess", 256))
    if not config.adds_dq:
        entries.append(Entry(queries, config.threads, config.query_shared_bytes))
    if defines["HAS_RANGES"]:
        entries.append(Entry("clip_ranges", config.block_m))
    if config.sums_distances:
        entries.append(Entry("distance_gradient", 256))
    return entries


_kernels = functools.cache(_Kernels)


def _kernels_for(
    config: BackwardConfig, dtype: torch.dtype, device: int, program: str | None = None,
    **features: int,
) -> _Kernels:  # fmt: skip
    defines = macros(config, dtype, **features)
    if program is not None:
        defines["HAS_PROGRAM"] = program
    return _kernels(tuple(defines.items()), config, device)


# The gradient of a float mask: a separate kernel that sums broadcast elements in fixed order.

_MASK_PARAMS = struct_layout("backward_mask.cu", "MaskGradientParams").packer()
_CTAS_A_PROCESSOR = 4


def mask_gradient(
    mask: Tensor, q: Tensor, k: Tensor, backward: BackwardConfig, defines: tuple,
    params: ctypes.Array, stream: int,
) -> Tensor:  # fmt: skip
    """The gradient in the mask's shape and dtype; `params` are those of the backward's kernels.

    Where few tiles of the mask stand for many of the scores, more CTAs than tiles sum a part each,
    and their sums are added here.
    """
    config = MaskGradientConfig(backward)
    whole = (*q.shape[:3], k.shape[2])
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    summed = tuple(size == 1 for size in shape)
    blocks = *whole[:2], -(-whole[2] // config.rows), -(-whole[3] // config.columns)
    tiles = loop = 1
    for count, one in zip(blocks, summed):
        tiles, loop = (tiles, loop * count) if one else (tiles * count, loop)
    index = q.device.index
    most = _CTAS_A_PROCESSOR * processors(index) // tiles
    steps = -(-loop // max(1, min(loop, most)))
    splits = -(-loop // steps)
    # a sum over queries or keys leaves those of one tile apart
    tile = 1, 1, config.rows, config.columns
    sizes = [(n, size)[not one] for n, size, one in zip(tile, shape, summed)]
    is_whole = splits == 1 and sizes == list(shape)
    if is_whole:
        sums = torch.empty_like(mask)
        strides = 0, *sums.view(shape).stride()
    else:
        sums = torch.empty((splits, *sizes), dtype=torch.float32, device=q.device)
        strides = sums.stride()
    steps_of = [0 if size == 1 else stride for size, stride in zip(sizes, strides[1:])]
    packed = _MASK_PARAMS.pack(
        *(sums.data_ptr(), strides[0], *steps_of[:2], *strides[3:]),
        *(*map(int, summed), steps, sums.dtype != torch.float32),
    )
    entry = kernel(
        "mask_gradient", "mask_gradient", index, config.threads, config.shared_bytes,
        tuple((dict(defines) | config.defines()).items()),
    )  # fmt: skip
    own = ctypes.create_string_buffer(packed)
    entry.launch((splits * tiles, 1), stream, pointers_to(params, own))
    if is_whole:
        return sums
    sums = sums.sum([0, *(dim + 1 for dim in (2, 3) if summed[dim])], keepdim=True)
    return torch.empty_like(mask).copy_(sums.view(mask.shape))


# The rules for backward passes in which one CTA processes all keys of a head, or in one kernel.
#
# Otherwise several CTAs add to the dQ of a head in memory, and separate kernels clear and convert
# these fp32 sums, in 0.06 ms for 16384 tokens with 2048 features. A CTA with all keys of a head
# needs neither kernel. But then all CTAs read queries and sums of different heads, once for each
# block of keys, and the L2 cache must hold them.
#
# Time of blocks of keys over that of whole heads on an H200 with 132 multiprocessors, 16384 tokens:
#
#     D     keys             sums of all CTAs   keys of a query   ratio
#     64    128 full         none               128               1.48
#     64    256 causal       9 MB               128               1.33
#     64    512 causal       17 MB              256               1.17
#     64    512 full         17 MB              512               1.04
#     64    1024 causal      35 MB              512               0.95
#     64    1024 full        35 MB              1024              0.73
#     128   256 causal       17 MB              128               1.39
#     128   512 causal       35 MB              256               1.06
#     128   512 full         35 MB              512               0.84
#     128   1024 causal      69 MB              512               0.81
#
# Small problems take the time of their launches, which is that of a few steps: one kernel is faster
# even if most multiprocessors have no work. It reads the results of the forward pass to sum rows,
# which a CTA does for its own heads before its products, and another kernel does on all
# multiprocessors. Microseconds on the GPU, in a CUDA graph:
#
#     heads  D     tokens            one kernel   row sums apart   blocks of keys, three kernels
#     8      64    64 full           6.8          7.1              9.4
#     8      64    128 causal        7.5          7.9              9.6
#     8      128   128 causal        10.4         9.9              12.2
#     8      64    256 causal        15.2         15.1             12.3
#     8      64    256 full          17.5         17.3             12.1
#     48     64    256 full          18.2         18.3             16.0
#     96     64    197 full          18.5         18.8             23.3
#     32     64    4096 x 77 full    119.8        102.2            109.0
#     256    64    1024 x 77 full    75.7         73.2             127.8
#     1024   64    512 causal        306.6        301.4            367.8
#     1024   128   256 causal        218.8        220.4            321.5
#
# The host needs about 15 us less for one kernel than for three.

_BLOCK = 128  # keys of a CTA at a time
# steps of 128 queries, 128 keys and 64 features that a CTA may have, and the least part of the
# multiprocessors that have work
_FEW_STEPS = ((2, 0.0), (4, 0.7))
_LEAST_WORK = 0.85  # of the multiprocessors' time
_MOST_BYTES = 96 << 20  # of sums that all CTAs add to in the time of a head
_OWN_BYTES = 256 << 10  # of `out` and its gradient, beyond a multiprocessor's share of all


def prefers_whole_heads(
    query: tuple[int, ...], key: tuple[int, ...], sides: tuple[int, int], processors: int
) -> bool:
    """Whether a CTA for all keys of a head is faster, in a call without masks, ranges or lengths.

    Args:
        query: shape (B, Hq, Sq, D).
        key: shape (B, Hkv, Sk, D).
        sides: keys on either side of the diagonal, see `kernel_plan.window_sides`.
        processors: multiprocessors of the device.
    """
    (B, Hq, Sq, D), (_, Hkv, Sk, _) = query, key
    if Sk < Sq and sides[1] < UNBOUNDED:  # no CTA would write the gradients of rows without keys
        return False
    if Sk <= _BLOCK and Hq == Hkv:  # the work is divided in the same way, and nothing is summed
        return True
    heads = B * Hkv
    rounds = -(-heads // processors)
    steps = Hq // Hkv * -(-Sq // _BLOCK) * -(-Sk // _BLOCK) * -(-D // 64)
    if any(steps <= few and heads >= part * rounds * processors for few, part in _FEW_STEPS):
        return True
    sums = min(heads, processors) * (Hq // Hkv) * Sq * D * 4
    added = sums * attended_keys(Sq, Sk, *sides) / _BLOCK
    return heads >= _LEAST_WORK * rounds * processors and added <= _MOST_BYTES


def prefers_own_row_sums(
    query: tuple[int, ...], key: tuple[int, ...], Dv: int, processors: int
) -> bool:
    """Whether row sums by the CTAs with whole heads are faster than by a kernel before them.

    Args:
        query: shape (B, Hq, Sq, D).
        key: shape (B, Hkv, Sk, D).
        Dv: features of values.
        processors: multiprocessors of the device.
    """
    B, Hq, Sq, _ = query
    heads = B * key[1]
    rows = (Hq // key[1] * -(-heads // processors) - B * Hq / processors) * Sq
    return rows * 2 * 2 * Dv <= _OWN_BYTES


# The rule for backward passes that are faster by pairs of CTAs than in two passes.
#
# Pairs execute five products for each block of queries and keys, two passes execute seven. But
# pairs add to fp32 sums of dQ, which are cleared, written and read once for each query, so that
# pairs are faster only if queries attend many keys. If there are few tiles of queries, the pass for
# dQ leaves multiprocessors idle, and fewer keys are enough. Pairs leave some idle if blocks of keys
# are few and of unequal lengths.
#
# Time of two passes over that of pairs, D 256 on an H200 with 132 multiprocessors:
#
#     queries, heads   keys of a query   ratio
#     16384 x 8        256 / 1024        0.82 / 0.94
#     16384 x 8        2048 / 3072       0.99 to 1.00
#     16384 x 8        4096 to 16384     1.03 to 1.08
#     4096 x 8         2048              0.98; heads in one group 1.19
#     2048 x 8         1024              1.20; heads in one group 1.77
#     1024 x 8         512, causal       0.88: 64 pairs at once, for the time of the longest

_TILE = 128  # queries of a CTA of the pass for dQ
_KEYS = 1024  # that a query must attend for each tile of queries of a multiprocessor
_MOST_TILES = 3.5  # beyond which more tiles ask for no more keys


def prefers_pairs(
    query: tuple[int, ...], key: tuple[int, ...], sides: tuple[int, int], processors: int,
    has_ranges: bool = False, sequences: int | None = None,
) -> bool:  # fmt: skip
    """Whether pairs of CTAs are faster.

    Args:
        query: shape (B, Hq, Sq, D); of a packed batch B is 1, and Sq counts all tokens.
        key: shape (B, Hkv, Sk, D).
        sides: keys on either side of the diagonal, see `kernel_plan.window_sides`.
        processors: multiprocessors of the device.
        has_ranges: whether key ranges say which keys queries attend. The host does not know them.
        sequences: of a packed batch. Half of their mean length is counted, as they may be causal.
    """
    if has_ranges and not sequences:
        return False
    (B, Hq, Sq, _), (_, Hkv, Sk, _) = query, key
    keys = Sk / sequences / 2 if sequences else attended_keys(Sq, Sk, *sides)
    tiles = B * Hq * -(-Sq // _TILE) / processors
    if keys < _KEYS * min(max(tiles, 1.0), _MOST_TILES):
        return False
    blocks = -(-Sk // BackwardConfig.block_n) * B * Hkv
    ctas = 2 * blocks * group_parts(Hq // Hkv, 2 * blocks, processors)
    is_even = min(sides) == UNBOUNDED and not sequences
    return is_even or ctas > processors


def attended_keys(Sq: int, Sk: int, left: int, right: int) -> float:
    """The number of keys that a query attends, averaged over 32 queries."""
    diagonals = ((2 * i + 1) * Sq // 64 + Sk - Sq for i in range(32))
    return sum(max(0, min(Sk, d + right + 1) - max(0, d - left)) for d in diagonals) / 32
