"""Launches the kernels of tangents: of out and lse, of dq, and of dk and dv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.triton.backward import (
    ROW_UNIT,
    laid_out_as,
    layout_of,
    strides_of,
    written_like,
)
from fa_ops.backends.triton.configs import Tile, tangent_tiles
from fa_ops.backends.triton.launch import (
    NAMES,
    Class,
    Launch,
    aligned_rows,
    architecture,
    arguments,
    bind,
    needs_copies,
    precision,
    widths,
)
from fa_ops.backends.triton.tangent_kernels import (
    second_key_kernel,
    second_query_kernel,
    tangent_kernel,
)
from fa_ops.call.call import Call, Saved, Tangents
from fa_ops.call.options import Gradients

MAX_TANGENT_DIM = 256  # the sums of both gradients and four tiles fill the registers


class TangentProblem(NamedTuple):
    """The tensors, sizes and options of one call; tensors and their tangents have equal strides."""

    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]
    value: tuple[Tensor, Tensor | None]
    outs: tuple[Tensor | None, ...]  # out, grad_out, their tangents
    mask_t: Tensor | None
    sizes: tuple[int, int, int, int, int]  # batch, Hq, group, Sq, Sk; tokens for Sq, Sk if packed
    values: tuple  # of arguments.NAMES without blocks and terms, and cu_seqlens_q, cu_seqlens_k
    kind: Class
    saved: Saved
    tangents: Tangents

    @classmethod
    def of(cls, call: Call) -> TangentProblem:
        """The problem of a call, with copies of tensors whose layouts differ from their tangents'.

        Tiles of a mask are not skipped: kernels read all of it.
        """
        (q, k, v), t, saved, operands = call[:3], call.tangents, call.saved, call.operands
        axis = 0 if call.is_packed else 2
        Sq, Sk, Hq = q.shape[axis], k.shape[axis], q.shape[1]
        packing = (None, None)
        if call.is_packed:
            packing = operands.cu_seqlens_q.contiguous(), operands.cu_seqlens_k.contiguous()
        B = len(q) if packing[0] is None else packing[0].numel() - 1
        scale, mask_t = call.scale, t.attn_mask  # before features are padded
        tensors = {
            "query": alike(q, t.query), "key": alike(k, t.key), "value": alike(v, t.value),
            "outs": alike(saved.out, saved.grad_out, t.out, t.grad_out),
        }  # fmt: skip
        call = call.changed(scale=scale, mask_blocks=None)
        values, kind = arguments(call, B, Hq, Sq, Sk)
        without = "blocks", "term_"
        without_blocks = [x for n, x in zip(NAMES, values) if not n.startswith(without)]
        if mask_t is not None:
            mask_t = mask_t.expand(B, Hq, Sq, Sk)
        sizes = B, Hq, Hq // k.shape[1], Sq, Sk
        values = (*without_blocks, *packing)
        return cls(**tensors, mask_t=mask_t, sizes=sizes, values=values, kind=kind, saved=saved,
                   tangents=t)  # fmt: skip

    @property
    def dims(self) -> tuple[int, int]:
        """D and Dv as the kernels read them."""
        return self.query[0].shape[-1], self.value[0].shape[-1]

    def tiles(self) -> tuple[Tile, Tile, Tile]:
        """Those of the three kernels."""
        q = self.query[0]
        return tangent_tiles(architecture(q.device), q.dtype, max(self.dims))

    def programs(self, tokens: int, block: int, heads: int) -> int:
        """Number of programs for blocks of `block` of `tokens` tokens per head."""
        if self.values[-1] is not None:
            return heads * (tokens // block + self.sizes[0] + 2)
        return heads * self.sizes[0] * -(-tokens // block)


def alike(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors with equal strides and aligned rows, by copies where needed."""
    given = [x for x in tensors if x is not None]
    first = given[0]
    D = first.shape[-1]
    named = {str(n): x for n, x in enumerate(given)}
    layout = layout_of(named, strides_of(named), 0)
    if any(x.stride() != first.stride() for x in given) or 0 in first.stride():
        tensors = tuple(None if x is None else x.contiguous() for x in tensors)
        named = {str(n): x for n, x in enumerate(x for x in tensors if x is not None)}
        layout = layout_of(named, strides_of(named), 0)
    if needs_copies(layout, first.dtype, D, D):
        padded = (None if x is None else aligned_rows(x).contiguous() for x in tensors)
        tensors = tuple(padded)
    return tensors


def jvp(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tangents of out and lse, and the sum of grad_out times the former, if grad_out is given."""
    problem = TangentProblem.of(call)
    out, grad_out, *_ = problem.outs
    saved, t = problem.saved, problem.tangents
    order = (0, 1, 2) if call.is_packed else (0, 2, 1, 3)
    of_out = torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device)
    of_lse = torch.empty(saved.lse.shape, dtype=torch.float32, device=out.device)
    dot = None if grad_out is None else torch.empty_like(of_lse)
    sinks_t = None if t.sinks is None else t.sinks.contiguous()
    tensors = (
        problem.query[0], problem.key[0], problem.value[0], problem.query[1], problem.key[1],
        problem.value[1], out, grad_out, saved.lse.contiguous(), sinks_t, of_out, of_lse, dot,
    )  # fmt: skip
    named = {"q": problem.query[0], "k": problem.key[0], "v": problem.value[0], "out": out}
    tile = problem.tiles()[0]
    launch, args = _prepare(tangent_kernel, tile, problem, named | {"of_out": of_out}, tensors)
    _, Hq, _, Sq, _ = problem.sizes
    launch((problem.programs(Sq, tile.block_m, Hq), 1, 1), args)
    Dv = call.value.shape[-1]
    if Dv != out.shape[-1]:
        of_out = torch.empty_permuted(
            saved.out.shape, order, dtype=out.dtype, device=out.device
        ).copy_(of_out[..., :Dv])
    return of_out, of_lse, dot


def backward_jvp(call: Call) -> Gradients:
    """The tangents of gradients; that of a mask is summed by atomics where it is broadcast."""
    problem = TangentProblem.of(call)
    (q, q_t), (k, k_t), (v, v_t), (out, grad_out, out_t, grad_out_t) = problem[:4]
    saved, t, mask = problem.saved, problem.tangents, call.operands.attn_mask
    batch, Hq, group, Sq, Sk = problem.sizes
    dq, dk, dv = map(written_like, (q, k, v))
    stats = _row_buffers(problem, q.device)
    dmask, dmask_view = None, None
    if saved.mask_grad:
        dmask = torch.zeros(mask.shape, dtype=torch.float32, device=q.device)
        dmask_view = dmask.expand(batch, Hq, Sq, Sk)
    rows = [None if x is None else x.contiguous() for x in (
        saved.lse, t.lse, saved.grad_lse, t.grad_lse, t.grad_dot
    )]  # fmt: skip
    tensors = (q, k, v, q_t, k_t, v_t, grad_out, grad_out_t, out, out_t, *rows, dq, dmask_view)
    named = {"q": q, "k": k, "v": v, "out": out}
    _, query_tile, key_tile = problem.tiles()
    strides = (0,) * 4 if dmask_view is None else dmask_view.stride()
    launch, args = _prepare(
        second_query_kernel, query_tile, problem, named | {"dq": dq}, (*tensors, *stats), strides
    )
    launch((problem.programs(Sq, query_tile.block_m, Hq), 1, 1), args)
    tensors = (q, k, v, q_t, k_t, v_t, grad_out, grad_out_t, *stats, dk, dv)
    named |= {"dk": dk, "dv": dv}
    launch, args = _prepare(second_key_kernel, key_tile, problem, named, tensors)
    launch((problem.programs(Sk, key_tile.block_n, Hq // group), 1, 1), args)
    grads = [
        laid_out_as(g, x)
        if g.shape == x.shape
        else torch.empty_like(x).copy_(g[..., : x.shape[-1]])
        for g, x in zip((dq, dk, dv), call[:3])
    ]
    sinks = call.operands.sinks
    dsinks = None if sinks is None else _sinks_gradient(stats, sinks, t.sinks)
    return Gradients(*grads, None if dmask is None else dmask.to(mask.dtype), dsinks)


def _row_buffers(problem: TangentProblem, device: torch.device) -> Tensor:
    """(4, heads, rows): lse in units of log2, its tangent, delta and its tangent.

    Where sinks are summed over all rows, rows of no query count as rows without keys.
    """
    batch, Hq, _, Sq, _ = problem.sizes
    unit = ROW_UNIT.value
    shape = (4, batch * Hq, -(-Sq // unit) * unit)
    if problem.values[-1] is not None:
        shape = (4, Hq, (Sq // unit + batch + 2) * unit)
    stats = torch.empty(shape, dtype=torch.float32, device=device)
    if problem.kind.sinks is not None:
        stats[0], stats[1:] = float("inf"), 0.0
    return stats


def _sinks_gradient(stats: Tensor, sinks: Tensor, of_sinks: Tensor | None) -> Tensor:
    """The tangent of minus the sum over rows of (the sink's weight) * delta."""
    largest = torch.finfo(torch.float32).max  # the lse of a sink of +inf is +inf
    lse, mu, delta, of_delta = stats.view(4, -1, len(sinks), stats.shape[-1])
    logits = (sinks.float() * 1.4426950408889634).clamp(max=largest).view(-1, 1)
    share = torch.exp2(logits - lse.clamp(max=largest))
    of_sink = -mu if of_sinks is None else of_sinks.float().view(-1, 1) - mu
    return -(share * (of_sink * delta + of_delta)).sum((0, 2)).to(sinks.dtype)


_launches: dict[tuple, Launch] = {}


def _prepare(
    kernel: Any, tile: Tile, problem: TangentProblem, named: Mapping[str, Tensor], tensors: tuple,
    more: tuple = (),
) -> tuple[Launch, tuple]:  # fmt: skip
    """The launch of a kernel, compiled on first use, and its arguments.

    named: the tensors whose strides the kernel takes; more: strides behind these.
    """
    q, mask_t = problem.query[0], problem.mask_t
    strides = strides_of(named)
    of_mask_t = (0,) * 4 if mask_t is None else mask_t.stride()
    args = (*tensors, *strides, *more, mask_t, *of_mask_t, *problem.sizes, *problem.values)
    layout, kind = layout_of(named, strides, max(problem.sizes[3:])), problem.kind
    given = tuple(None if x is None else x.dtype for x in (*tensors, mask_t))
    mode = precision(q.dtype)
    packed = problem.values[-1] is not None
    key = (kernel, given, problem.dims, packed, layout, kind, mode, q.device)
    launch = _launches.get(key)
    if launch is None:
        constexpr = {
            **widths(problem.dims), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "EXTREME": kind.extreme, "PRECISION": mode,
        }  # fmt: skip
        divisors = layout.divisors(tuple(named), q.dtype)
        tangents = {"q": "q_t", "k": "k_t", "v": "v_t", "out": "grad_out"}
        if layout.aligned:
            divisors |= {x: divisors[n] for n, x in tangents.items() if n in divisors}
        launch = _launches[key] = bind(
            kernel, args, constexpr, tile.options(), device=q.device,
            divisors=divisors | kind.divisors(), fixed=kind.fixed(), wide=layout.wide,
        )  # fmt: skip
    return launch, args
