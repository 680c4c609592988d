"""A second oracle, written from docs/semantics.md, that shares no code with the reference.

It computes one head of one sequence at a time in float64, each row over the keys that it attends,
and is differentiable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_ops.call.call import Call
from fa_ops.call.options import Options

Results = tuple[Tensor, Tensor]


def head(q, k, v, o: Options, n: int, slope, sink, bias, ranges, dropped) -> Results:
    """One head with n keys: q (Sq, D), k (Sk, D), v (Sk, Dv) to out (Sq, Dv) and lse (Sq,)."""
    Sq, Sk = len(q), len(k)
    i, j = torch.arange(Sq).view(Sq, 1) + n - Sq, torch.arange(Sk)
    s = (q @ k.T) * (1 / math.sqrt(q.shape[1]) if o.scale is None else o.scale)
    if o.softcap > 0:
        s = o.softcap * torch.tanh(s / o.softcap)
    left_out = (j >= n).expand(Sq, Sk)
    if o.is_causal:
        left_out = left_out | (j > i)
    if o.window_left != -1:
        left_out = left_out | (i - j > o.window_left)
    if o.window_right != -1:
        left_out = left_out | (j - i > o.window_right)
    if ranges is not None:
        left_out = left_out | (j < ranges[:, :1]) | (j >= ranges[:, 1:])
    if slope is not None:
        s = s - slope * (i - j).abs()
    if bias is not None and bias.dtype == torch.bool:
        left_out = left_out | ~bias
    elif bias is not None:
        s, left_out = s + bias, left_out | (bias == -math.inf)
    outs, lses = [], []
    for row, keys in zip(range(Sq), (~left_out).unbind()):
        logits = s[row, keys]
        if sink is not None:
            logits = torch.cat([logits, sink.view(1)])
        if not (logits > -math.inf).any() and not logits.isnan().any():
            outs.append(v.new_zeros(v.shape[1]))
            lses.append(v.new_tensor(-math.inf))
            continue
        if sink is not None and sink == math.inf:  # no weight is left to the keys
            outs.append(v.new_zeros(v.shape[1]))
            lses.append(sink)
            continue
        lses.append(logits.logsumexp(0))
        weights = logits.softmax(0)[: int(keys.sum())]
        outs.append((weights if dropped is None else weights * dropped[row, keys]) @ v[keys])
    return torch.stack(outs), torch.stack(lses)


def dense(call: Call, dropped: Tensor | None = None) -> Results:
    """(B, H, S, D) tensors; `dropped` (B, Hq, Sq, Sk) holds the factors that dropout applies."""
    (q, k, v), t = call[:3], call.operands
    (B, Hq, Sq, _), (_, Hkv, Sk, _) = q.shape, k.shape
    bias, ranges, slopes = t.attn_mask, t.key_ranges, t.alibi_slopes
    bias = None if bias is None else bias.expand(B, Hq, Sq, Sk)
    ranges = None if ranges is None else ranges.expand(B, Hq, Sq, 2)
    slopes = None if slopes is None else slopes.double().expand(B, Hq)
    heads = []
    for b in range(B):
        n = Sk if t.kv_lens is None else min(max(int(t.kv_lens[b]), 0), Sk)
        for h in range(Hq):
            small = [None if x is None else x[b, h] for x in (slopes, bias, ranges, dropped)]
            sink = None if t.sinks is None else t.sinks[h].double()
            one = q[b, h], k[b, h // (Hq // Hkv)], v[b, h // (Hq // Hkv)]
            heads.append(head(*one, call.options, n, small[0], sink, *small[1:]))
    out, lse = (torch.stack(x) for x in zip(*heads))
    return out.view(B, Hq, Sq, -1), lse.view(B, Hq, Sq)


def row_of(call: Call, b: int, q: Tensor, k: Tensor, v: Tensor, n: int | None) -> Call:
    """The dense call of batch row b alone, with these tensors and n keys."""
    slopes, ranges = call.operands.alibi_slopes, call.operands.key_ranges
    return call.changed(
        query=q, key=k, value=v, kv_lens=None if n is None else torch.tensor([n]),
        alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b : b + 1],
        key_ranges=ranges if ranges is None or len(ranges) == 1 else ranges[b : b + 1],
    )  # fmt: skip


def packed(call: Call, dropped=None) -> Results:
    """(T, H, D) tensors; `dropped` holds the argument of `dense` for each sequence."""
    (q, k, v), t = call[:3], call.operands
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full((q.shape[1], len(q)), -math.inf)
    borders = zip(t.cu_seqlens_q.tolist(), t.cu_seqlens_k.tolist())
    (q0, k0), *borders = borders
    for b, (q1, k1) in enumerate(borders):
        if q1 > q0:
            one = [x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
            n = None if t.kv_lens is None else int(t.kv_lens[b])
            o, m = dense(row_of(call, b, *one, n), None if dropped is None else dropped[b])
            out = torch.cat([out[:q0], o[0].transpose(0, 1), out[q1:]])
            lse = torch.cat([lse[:, :q0], m[0], lse[:, q1:]], 1)
        q0, k0 = q1, k1
    return out, lse


def rotated(x: Tensor, call: Call, position: int) -> Tensor:
    """x (H, D) with its first features rotated by the angles of a position."""
    tables, interleaved = call.operands, call.options.rotary_interleaved
    if tables.rotary_cos is None:
        return x.double()
    cos, sin = (t[max(position, 0)].double() for t in (tables.rotary_cos, tables.rotary_sin))
    x, half = x.double().clone(), len(cos)
    first = range(0, 2 * half, 2) if interleaved else range(half)
    for r, one in enumerate(first):
        two = one + 1 if interleaved else one + half
        a, b = x[:, one].clone(), x[:, two].clone()
        x[:, one], x[:, two] = a * cos[r] - b * sin[r], b * cos[r] + a * sin[r]
    return x


def cached(call: Call) -> Results:
    """Write the new keys and values one by one, then attend each row of the batch."""
    (q, k, v), t = call[:3], call.operands
    new, outs, lses = 0 if t.new_key is None else t.new_key.shape[2], [], []
    for b, length in enumerate(t.kv_lens.tolist()):
        rows = []
        for memory, fresh, scale in ((k, t.new_key, t.k_scale), (v, t.new_value, t.v_scale)):
            keys = []
            for j in range(length + new):
                slot = _slot(memory, t.page_table, b, j)
                factor = _scale(scale, t.page_table, b, j, memory)
                if j >= length:
                    x = fresh[b, :, j - length]
                    x = rotated(x, call, j).to(q.dtype) if memory is k else x
                    x = x.double() / factor
                    if memory.dtype.itemsize == 1:
                        x = x.clamp(-448, 448).float()
                    slot.copy_(x.to(slot.dtype))
                keys.append(slot.double() * factor)
            heads = memory.shape[2 if call.is_paged else 1]
            empty = torch.zeros(heads, 0, memory.shape[3], dtype=torch.float64)
            rows.append(torch.stack(keys, 1) if keys else empty)
        steps = range(q.shape[2])
        query = [rotated(q[b, :, i], call, length + new + i - len(steps)) for i in steps]
        query = torch.stack(query, 1).to(q.dtype).double()
        o, m = dense(row_of(call, b, query[None], rows[0][None], rows[1][None], None))
        outs.append(o), lses.append(m)
    return torch.cat(outs), torch.cat(lses)


def _slot(memory: Tensor, table: Tensor | None, b: int, j: int) -> Tensor:
    """The memory of key j of row b, (Hkv, D)."""
    if table is None:
        return memory[b, :, j]
    return memory[int(table[b, j // memory.shape[1]]), j % memory.shape[1]]


def _scale(
    scale: Tensor | None, table: Tensor | None, b: int, j: int, memory: Tensor
) -> Tensor | float:
    if scale is None:
        return 1.0
    if scale.dim() == 2:
        return scale[b].double()[:, None]
    if table is None:
        return scale[b, :, j].double()[:, None]
    page = int(table[b, j // memory.shape[1]])
    return scale[page, j % scale.shape[1]].double()[:, None]
