"""The oracle: dense attention in fp64 with every feature, in plain differentiable torch code.

It defines the semantics of the library, and is not meant to be fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fa_ops.backends import dropout, quantization
from fa_ops.backends.mask_blocks import mask_blocks  # noqa: F401 - for fa::mask_blocks
from fa_ops.call.call import Call, Plan, general, general_plan
from fa_ops.call.options import Gradients
from fa_ops.programs.evaluation import Elements
from fa_ops.programs.program import parse


def keep_mask(call: Call) -> Tensor:
    """The mask of a dense call: bool (B, Hq or 1, Sq, Sk), True where a query attends a key."""
    t, o, (B, _, Sq, _), Sk = call.operands, call.options, call.query.shape, call.key.shape[2]
    j = torch.arange(Sk, device=call.query.device)
    lens = key_lengths(call)
    diagonal = torch.arange(Sq, device=j.device).view(Sq, 1) + lens - Sq
    keep = (j < lens).expand(B, 1, Sq, Sk)
    if o.is_causal:
        keep = keep & (j <= diagonal)
    if o.window_left >= 0:
        keep = keep & (diagonal - j <= o.window_left)
    if o.window_right >= 0:
        keep = keep & (j - diagonal <= o.window_right)
    if t.key_ranges is not None:
        keep = keep & (j >= t.key_ranges[..., :1]) & (j < t.key_ranges[..., 1:])
    if t.attn_mask is not None:
        bias = t.attn_mask
        keep = keep & (bias if bias.dtype == torch.bool else bias != float("-inf"))
    return keep if t.block_indices is None else keep & _listed(call)


def _listed(call: Call) -> Tensor:
    """Bool (B, Hq or 1, Sq, Sk), True where the block of a key is in a query's list."""
    t, o, Sq, Sk = call.operands, call.options, call.query.shape[2], call.key.shape[2]
    i, j = (torch.arange(n, device=call.query.device) for n in (Sq, Sk))
    first, end = torch.zeros_like(i), torch.full_like(i, Sk)  # of the sequence of each query
    if t.cu_seqlens is not None:
        end = torch.zeros_like(i)
        ends = t.cu_seqlens.clamp(0, Sk).cummax(0).values.tolist()
        for start, stop in zip(ends, ends[1:]):
            first[start:stop], end[start:stop] = start, stop
    block = (j - first[:, None]).div(o.block_size, rounding_mode="floor")
    is_inside = (j >= first[:, None]) & (j < end[:, None])
    lists = t.block_indices.repeat_interleave(o.query_block, 2)[:, :, :Sq]
    keep = torch.zeros((*lists.shape[:3], Sk), dtype=torch.bool, device=j.device)
    for at in range(lists.shape[3]):
        is_equal = lists[..., at, None] == block
        if t.counts is not None:
            counts = t.counts.repeat_interleave(o.query_block, 2)[:, :, :Sq, None]
            is_equal = is_equal & (at < counts)
        keep |= is_equal
    heads = keep.shape[1]
    return (keep & is_inside).repeat_interleave(
        1 if heads == 1 else call.query.shape[1] // heads, 1
    )


def key_lengths(call: Call) -> Tensor:
    """Number of keys per batch element (B or 1, 1, 1, 1), kv_lens clamped to [0, Sk]."""
    Sk, lens = call.key.shape[2], call.operands.kv_lens
    lens = torch.full((1,), Sk, device=call.query.device) if lens is None else lens.long()
    return lens.clamp(0, Sk).view(-1, 1, 1, 1)


def modify_scores(products: Tensor, call: Call) -> Tensor:
    """Convert products q.k (B, Hq, Sq, Sk) to scores, -inf where masked.

    Scale, softcap, ALiBi and float mask are applied in this order.
    """
    _, Hq, Sq, Sk = products.shape
    s, softcap = call.scale * products, call.options.softcap
    mask, slopes = call.operands.attn_mask, call.operands.alibi_slopes
    if softcap > 0:
        cap = min(max(softcap, 1e-150), 1e150)  # keeps gradients from overflowing
        s = cap * torch.tanh(s / cap)
    if slopes is not None:
        i = torch.arange(Sq, device=s.device).view(Sq, 1)
        distance = (i + key_lengths(call) - Sq - torch.arange(Sk, device=s.device)).abs()
        s = s - slopes.to(s.dtype).view(-1, Hq, 1, 1) * distance
    keep = keep_mask(call)
    if call.is_programmed:
        s, kept = _programmed(s, call)
        keep = keep & kept
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.to(s.dtype)
    return s.masked_fill(~keep, float("-inf"))


def _programmed(s: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The scores that a program makes of all scores, and which of them its mask keeps."""
    program, (B, H, Sq, Sk), t = parse(call.options.program), s.shape, call.operands
    arange = functools.partial(torch.arange, device=s.device)
    arguments = {
        "score": s, "b": arange(B).view(B, 1, 1, 1), "h": arange(H).view(H, 1, 1),
        "q": arange(Sq).view(Sq, 1), "k": arange(Sk),
    }  # fmt: skip
    values = None if t.term_values is None else t.term_values.to(s.dtype)
    terms = program.views(values, t.term_indices, B, H, Sq, Sk)
    elements = Elements(program, arguments, terms, slice(0, Sq), slice(0, Sk), Sk, s.dtype)
    score = s if program.score is None else elements.evaluate(program.score)[0].expand(s.shape)
    keep = torch.ones((), dtype=torch.bool, device=s.device)
    return score, keep if program.mask is None else elements.evaluate(program.mask)[0]


def weights(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax with an optional sink: (p, lse).

    Rows without attended keys have p = 0, lse = -inf (or their sink), and no gradients. A sink of
    +inf leaves no weight to the keys, and is their lse.
    """
    m = s.new_full((*s.shape[:-1], 1), float("-inf"))
    if s.shape[-1] > 0:
        m = s.detach().amax(-1, keepdim=True)
    column = None if sinks is None else _at_most_largest(sinks.to(s.dtype)).view(1, -1, 1, 1)
    if column is not None:
        m = torch.maximum(m, column.detach())
    m = m.masked_fill(m == float("-inf"), 0.0)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    if column is not None:
        total = total + torch.exp(column - m)
    dead = total == 0
    total = total.masked_fill(dead, 1.0)
    lse = (m + total.log()).masked_fill(dead, float("-inf"))
    if sinks is not None:  # a sink of +inf, which passes on the gradient of lse
        lse = lse + torch.where(sinks == float("inf"), sinks, 0.0).to(s.dtype).view(1, -1, 1, 1)
    return e / total, lse.squeeze(-1)


def _at_most_largest(logits: Tensor) -> Tensor:
    """The largest finite number in place of +inf, so that no difference is NaN."""
    return logits.clamp(max=torch.finfo(logits.dtype).max)


def product(a: Tensor, b: Tensor, terms: Tensor) -> Tensor:
    """a @ b in which only `terms` (..., M, N) count: NaN and Inf elsewhere add 0.

    A plain product would add 0 * NaN.
    """
    wrong_a, wrong_b = ~torch.isfinite(a), ~torch.isfinite(b)
    if not bool(wrong_a.any() | wrong_b.any()):
        return a @ b
    out = a.masked_fill(wrong_a, 0.0) @ b.masked_fill(wrong_b, 0.0)
    touched = (wrong_a & terms).any(-1, keepdim=True)
    touched = touched | ((terms.to(b.dtype) @ wrong_b.to(b.dtype)) > 0)
    return out.masked_fill(touched, float("nan"))


class _Scores(torch.autograd.Function):
    """q @ k^T with gradients, of each order, that sum over attended pairs only."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, attended: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, attended)
        return q @ k.transpose(-1, -2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k, attended = ctx.saved_tensors
        mirrored = attended.transpose(-1, -2)
        of_q = _Weighted.apply(grad, k, attended)
        return of_q, _Weighted.apply(grad.transpose(-1, -2), q, mirrored), None


class _Weighted(torch.autograd.Function):
    """p @ v, a sum over attended keys only, and so are its gradients of each order."""

    @staticmethod
    def forward(ctx, p: Tensor, v: Tensor, attended: Tensor) -> Tensor:
        ctx.save_for_backward(p, v, attended)
        return product(p, v, attended)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        p, v, attended = ctx.saved_tensors
        of_p = _Scores.apply(grad, v, attended).masked_fill(~attended, 0.0)
        of_v = _Weighted.apply(p.transpose(-1, -2), grad, attended.transpose(-1, -2))
        return of_p, of_v, None


def apply_weights(p: Tensor, v: Tensor, attended: Tensor) -> Tensor:
    """p @ v in which a NaN or Inf affects only the rows that attend it."""
    return _Weighted.apply(p.masked_fill(~attended, 0.0), v, attended)


def dropout_factor(call: Call, first_batch: int = 0) -> Tensor:
    """Dropout's factor of each weight (B, Hq, Sq, Sk): 0, or 1 / (1 - p) where kept."""
    p, seed = call.options.dropout_p, call.operands.dropout_seed
    words = dropout.words_of(seed, *call.query.shape[:3], first_batch).unsqueeze(3)
    keep = dropout.kept(words, torch.arange(call.key.shape[2], device=words.device), p)
    return keep.double() / max(1.0 - p, 2.0**-32)


def dense(call: Call, first_batch: int = 0) -> tuple[Tensor, Tensor]:
    """Differentiable (out, lse) in the dtype of q, k, v, which callers convert to fp64.

    `first_batch` is the batch index of the first element in the dropout stream: packed sequences
    have the dropout of the batch that they form.
    """
    q, k, v = call[:3]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    keep = keep_mask(call)
    if call.is_programmed:
        keep = keep & _programmed(q.new_zeros(*q.shape[:3], k.shape[2]), call)[1]
    keep = keep.expand(*q.shape[:3], k.shape[2])
    s = modify_scores(_Scores.apply(q, k, keep), call)
    p, lse = weights(s, call.operands.sinks)
    if call.options.dropout_p > 0:
        p = p * dropout_factor(call, first_batch)
    return apply_weights(p, v, keep), lse


def doubled(call: Call) -> Call:
    """The call with query, key and value in fp64."""
    return Call(*(t.double() for t in call[:3]), *call[3:])


def forward(call: Call) -> tuple[Tensor, ...]:
    """out in q's dtype, laid out (B, Sq, Hq, Dv) in memory; lse in fp32 (fp64 for fp64); maxima."""
    out, lse = dense(doubled(call))
    dtype = lse_dtype(call.query.dtype)
    results = bshd(out.to(call.query.dtype)), lse.to(dtype)
    return (*results, max_scores(doubled(call)).to(dtype)) if call.options.max_scores else results


def max_scores(call: Call) -> Tensor:
    """The largest score of each query (B, Hq, Sq), -inf without keys."""
    q, k = call[:2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return modify_scores(q @ k.mT, call).amax(-1)


def varlen(call: Call, attend: Callable = dense) -> tuple[Tensor, Tensor]:
    """Packed attention, by one call of `attend` per sequence.

    q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv) give out (Tq, Hq, Dv), lse (Hq, Tq).
    """
    q, k, v = call[:3]
    q_ends, k_ends = call.operands.cu_seqlens_q.tolist(), call.operands.cu_seqlens_k.tolist()
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    outs, lses = [out[: q_ends[0]]], [lse[:, : q_ends[0]]]
    for b in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        one = [t.transpose(0, 1).unsqueeze(0) for t in (q[rows], k[keys], v[keys])]
        o, m = attend(call.rows(slice(b, b + 1), *one), first_batch=b)
        outs.append(o.squeeze(0).transpose(0, 1))
        lses.append(m.squeeze(0))
    outs.append(out[q_ends[-1] :])
    lses.append(lse[:, q_ends[-1] :])
    return torch.cat(outs), torch.cat(lses, 1)


def varlen_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Packed out (Tq, Hq, Dv) in q's dtype, and lse (Hq, Tq)."""
    out, lse = varlen(doubled(call))
    return out.to(call.query.dtype), lse.to(lse_dtype(call.query.dtype))


def backward(call: Call) -> Gradients:
    """Gradients by autograd through the dense forward; `out` and `lse` are not used."""
    return _differentiate(dense, call)


def varlen_backward(call: Call) -> Gradients:
    """Gradients by autograd through the packed forward; `out` and `lse` are not used."""
    return _differentiate(varlen, call)


def _differentiate(function: Callable, call: Call) -> Gradients:
    grad_out, grad_lse, *_, mask_grad = call.saved
    with torch.enable_grad():
        x = leaves(call, mask_grad)
        outputs = results(function, call, x)
        seeds = [grad_out.double(), torch.zeros_like(outputs[1])]
        if grad_lse is not None:
            seeds[1] = grad_lse.double()
        grads = dict(zip(x, derivative(outputs, list(x.values()), seeds)))
    return gradients(call, grads)


def leaves(call: Call, mask_grad: bool, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Copies in `dtype` of the tensors that results are differentiated by, by name."""
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    tensors |= {"attn_mask": call.operands.attn_mask if mask_grad else None}
    tensors |= {"sinks": call.operands.sinks, "term_values": call.operands.term_values}
    given = {name: t for name, t in tensors.items() if t is not None}
    return {name: t.detach().to(dtype, copy=True).requires_grad_() for name, t in given.items()}


def results(function: Callable, call: Call, x: dict[str, Tensor]) -> list[Tensor]:
    """out and lse of a call with other tensors; lse is 0 where it is -inf, and has no gradient."""
    out, lse = function(call.changed(**x))
    return [out, lse.masked_fill(lse == float("-inf"), 0.0)]


def derivative(outputs: list[Tensor], x: list[Tensor], seeds: list[Tensor], **more: bool) -> tuple:
    """Gradients of <outputs, seeds>, 0 where nothing depends on x."""
    pairs = [(o, s) for o, s in zip(outputs, seeds) if o.requires_grad]  # none: no sequences
    outputs, seeds = ([pair[i] for pair in pairs] for i in range(2))
    return torch.autograd.grad(outputs, x, seeds, allow_unused=True, materialize_grads=True, **more)


def gradients(call: Call, grads: dict[str, Tensor]) -> Gradients:
    """Gradients by name in the dtypes and layouts of the call's tensors."""
    of = [torch.empty_like(t).copy_(grads[n]) for n, t in zip(("query", "key", "value"), call[:3])]
    others = call.operands._asdict() if call.saved.mask_grad else {}
    others |= {"sinks": call.operands.sinks, "term_values": call.operands.term_values}
    names = "attn_mask", "sinks", "term_values"
    given = {n: others[n] for n in names if others.get(n) is not None}
    return Gradients(*of, **{n: grads[n].to(x.dtype) for n, x in given.items()})


def tangents(call: Call, attend: Callable | None = None) -> tuple | Gradients:
    """Tangents of out and lse, or of the gradients, by autograd; what is saved is not used.

    Gradients g(x; y) along (x_t, y_t) change by g(x; y_t) and by the gradient of <g(x; y), x_t> by
    x, as Hessians are symmetric. The gradient of <g(x; y), x_t> by y is the tangent of the results.
    Rows of lse that are -inf have no tangent.
    """
    t, saved, q = call.tangents, call.saved, call.query
    dtype = torch.float64 if attend is None else q.dtype
    attend = attend or (varlen if call.is_packed else dense)
    x_t = {n: g.to(dtype) for n, g in zip(t._fields[:5], t[:5]) if g is not None}
    with torch.enable_grad():
        x = leaves(call, saved.mask_grad or "attn_mask" in x_t, dtype)
        outputs = results(attend, call, x)
        y = [torch.zeros_like(o) if g is None else g.to(o.dtype) for o, g in zip(outputs, saved)]
        y = [g.detach().requires_grad_() for g in y]
        first = derivative(outputs, list(x.values()), y, create_graph=True)
        pairs = [(g, x_t[n]) for n, g in zip(x, first) if n in x_t]
        along = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if not call.is_backward:
            out_t, lse_t = derivative(along[0], y, along[1])
            dot = None if saved.grad_out is None else (saved.grad_out.to(out_t) * out_t).sum(-1)
            wide = lse_dtype(q.dtype)
            if dot is not None:
                dot = (dot.transpose(0, 1) if call.is_packed else dot).to(wide).contiguous()
            order = (0, 1, 2) if call.is_packed else (0, 2, 1, 3)
            laid_out = torch.empty_permuted(out_t.shape, order, dtype=q.dtype, device=q.device)
            return laid_out.copy_(out_t), lse_t.to(wide), dot
        by_x = derivative(along[0], list(x.values()), along[1], retain_graph=True)
        y_t = [torch.zeros_like(g) if s is None else s.to(g.dtype) for g, s in zip(y, t[5:7])]
        by_y = derivative(outputs, list(x.values()), y_t)
    return gradients(call, {n: a + b for n, a, b in zip(x, by_x, by_y)})


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, from the attention over each.

    outs (N, ..., Dv) and lses (N, ...) give out (..., Dv) and lse (...). A state whose lse is -inf
    has no keys, and its out does not count. One whose lse is +inf has all weight.
    """
    p, lse = weights(_at_most_largest(lses.double()).movedim(0, -1), None)
    lse = lse.masked_fill((lses == float("inf")).any(0), float("inf"))
    outs_with_keys = outs.double().masked_fill((lses == float("-inf")).unsqueeze(-1), 0.0)
    out = (p.movedim(-1, 0).unsqueeze(-1) * outs_with_keys).sum(0)
    return out.to(outs.dtype), lse.to(lses.dtype)


def rotate(x: Tensor, call: Call, positions: Tensor) -> Tensor:
    """x (H, S, D) in fp64 with its first R features rotated by the angles of positions (S,)."""
    t, interleaved = call.operands, call.options.rotary_interleaved
    if t.rotary_cos is None:
        return x
    cos, sin = (t.double()[positions] for t in (t.rotary_cos, t.rotary_sin))
    R = 2 * cos.shape[1]
    first = torch.arange(0, R, 2) if interleaved else torch.arange(R // 2)
    second = first + (1 if interleaved else R // 2)
    a, b = x[..., first], x[..., second]
    x = x.clone()
    x[..., first], x[..., second] = a * cos - b * sin, a * sin + b * cos
    return x


def slots(x: Tensor, table: Tensor | None, b: int, first: int, last: int) -> tuple[Tensor, tuple]:
    """A view of a cache, and the index that selects keys first ... last - 1 of sequence b from it.

    The selection is (S, Hkv, D). An fp8 cache is viewed as bytes, because torch cannot index fp8 on
    every device.
    """
    if x.dtype.itemsize == 1:
        x = x.view(torch.uint8)
    if table is None:
        return x.transpose(1, 2), (b, slice(first, last))
    keys = torch.arange(first, last, device=x.device)
    return x, (table[b, keys // x.shape[1]].long(), keys % x.shape[1])


def scales(
    scale: Tensor | None, table: Tensor | None, b: int, keys: range, page_size: int
) -> Tensor:
    """Dequantisation factors of keys of sequence b: fp64, (Hkv or 1, S or 1, 1)."""
    if scale is None:
        return torch.ones(1, 1, 1, dtype=torch.float64)
    if scale.dim() == 2:
        return scale[b].double().view(-1, 1, 1)
    at = torch.tensor(keys, dtype=torch.int64, device=scale.device)
    if table is None:
        return scale[b, :, at].double().unsqueeze(-1)
    pages = table[b, at // page_size].long()
    return scale[pages, at % scale.shape[1]].double().t().unsqueeze(-1)


def quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x (Hkv, S, D) converted to a cache's dtype; fp8 saturates."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    x = x / scale
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).float().to(dtype)


def cached(call: Call, attend: Callable = dense) -> tuple[Tensor, Tensor]:
    """Append the new keys and values, if any, then `attend` each sequence separately.

    Rotated queries and new keys are rounded to q's dtype; (out, lse) are fp64.
    """
    (q, k, v), t, table = call[:3], call.operands, call.operands.page_table
    new = 0 if t.new_key is None else t.new_key.shape[2]
    outs, lses = [], []
    for b, length in enumerate(t.kv_lens.tolist()):
        last = length + new
        if t.new_key is not None:
            positions = torch.arange(length, last, device=q.device)
            key = rotate(t.new_key[b].double(), call, positions).to(q.dtype)
            for memory, x, scale in ((k, key, t.k_scale), (v, t.new_value[b], t.v_scale)):
                factor = scales(scale, table, b, range(length, last), memory.shape[1])
                x = quantised(x.double(), factor.to(x.device), memory.dtype)
                view, index = slots(memory, table, b, length, last)
                view[index] = x.transpose(0, 1).view(view.dtype)
        positions = torch.arange(last - q.shape[2], last, device=q.device).clamp(min=0)
        rows = rotate(q[b].double(), call, positions).to(q.dtype)
        one = [rows.double().unsqueeze(0)]
        for memory, scale in ((k, t.k_scale), (v, t.v_scale)):
            view, index = slots(memory, table, b, 0, last)
            x = view[index].view(memory.dtype).transpose(0, 1).double()
            factor = scales(scale, table, b, range(last), memory.shape[1])
            one.append((x * factor.to(x.device)).unsqueeze(0))
        o, m = attend(call.rows(slice(b, b + 1), *one).changed(kv_lens=None))
        outs.append(o)
        lses.append(m)
    return torch.cat(outs), torch.cat(lses)


def cache_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Append the new keys and values, if any, then attend: out in q's dtype, and lse."""
    out, lse = cached(call)
    return bshd(out.to(call.query.dtype)), lse.to(lse_dtype(call.query.dtype))


def rounded_weights(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax whose weights are rounded to e4m3 and then normalised: (p, lse).

    Weights are relative to powers of two, of the row's maximum and of that of each part of the
    keys, so that their rounding does not depend on the order in which keys are processed. sinks
    broadcast to (B, Hq, Sq, 1).
    """
    t = s * math.log2(math.e)
    m = t.amax(-1, keepdim=True).ceil()
    base = m.masked_fill(m == float("-inf"), 0.0)
    w = quantization.round_weights_(t, base) / quantization.WEIGHT_SCALE
    if sinks is not None:
        sinks = _at_most_largest(sinks.double() * math.log2(math.e))
        m = torch.maximum(m, sinks)
    top = m.masked_fill(m == float("-inf"), 0.0)
    w = w * torch.exp2(base.minimum(top) - top)  # no sink makes weights larger
    total = w.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp2(sinks - top)
    dead = total == 0
    total = total.masked_fill(dead, 1.0)
    lse = (top * math.log(2.0) + total.log()).masked_fill(dead, float("-inf"))
    return w / total, lse


def quantized(call: Call) -> tuple[Tensor, Tensor]:
    """Attention with 8-bit products: out and lse in fp64, of 16-bit or of e4m3 tensors."""
    eight, sinks = quantization.quantised(call, torch.float64), call.operands.sinks
    group = call.query.shape[1] // call.key.shape[1]
    k, v = eight.key * eight.k_scale, eight.value * eight.v_scale
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    products = (eight.query * eight.q_scale) @ k.transpose(-1, -2)
    s = modify_scores(products, call)
    if sinks is not None:
        sinks = sinks.double().view(1, -1, 1, 1)
        sinks = sinks if eight.offset is None else sinks - eight.offset
    p, lse = rounded_weights(s, sinks)
    if eight.offset is not None:
        lse = lse + eight.offset
    return apply_weights(p, v, s > float("-inf")), lse.squeeze(-1)


def quantized_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out in q's dtype, bfloat16 for e4m3, laid out (B, Sq, Hq, Dv) in memory; lse in fp32."""
    (out, lse), dtype = quantized(call), call.query.dtype
    return bshd(out.to(torch.bfloat16 if dtype.itemsize == 1 else dtype)), lse.float()


def bshd(out: Tensor) -> Tensor:
    """Lay `out` out as (B, S, H, D) in memory, so that merging heads is a view."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse for inputs of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def supports(call: Call) -> str | None:
    """Why the oracle cannot run the call, or None."""
    return None


def plan(call: Call) -> Plan:
    """The plan of a call on the oracle."""
    if call.is_quantized:
        return general("8-bit forward", quantized_forward)
    functions = forward, backward, varlen_forward, varlen_backward, cache_forward, tangents
    return general_plan(call, *functions)


def append_error(call: Call) -> str | None:
    """Why the oracle cannot write new keys for a backend."""
    return "appends and attends in one call"


def merge_error(outs: Tensor) -> str | None:
    """Return None: all states can be merged."""
    return None


def mask_blocks_error(mask: Tensor) -> str | None:
    """Return None: every mask can be summarised."""
    return None


def available_error() -> str | None:
    """Return None: this backend runs everywhere."""
    return None
