"""What attention_varlen does with e4m3 tensors: one kernel where a backend has it, elsewhere the
operator for a batch of rows of equal length (`padding`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.call import backend_option, checks, quantized_checks
from fa_ops.call.call import QUANTIZED_PACKED, Call
from fa_ops.call.options import Operands
from fa_ops.call.python_types import Window, checked_call, need_tensor, sides
from fa_ops.functions.quantized import refuse_given, refuse_missing
from fa_ops.ops import eager, library, quantized
from fa_ops.ops.library import Route
from fa_ops.plans import planning

BACKEND = "hopper"  # which has the kernel


def scaled_attention(
    query: Tensor, key: Tensor, value: Tensor, tensors: Operands,
    longest: tuple[int | None, int | None], is_causal: bool, scale: float | None,
    window: Window | None, softcap: float, backend: str | None, **refused,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (Tq, Hq, Dv) and lse (Hq, Tq); of `refused` all must have their defaults.

    `longest` are upper bounds on the lengths of sequences.
    """
    refuse(tensors, refused)
    route = library.route_of(query, key, value, *tensors)
    if route is Route.RECORD:
        quantized.refuse_gradients(query, key, value, *tensors)
    scalars = is_causal, 0.0, scale, *sides(window), softcap, False, backend, *longest
    tensors = with_lengths(query, tensors)
    if route is Route.DIRECT and _may_run(query, key, value, tensors, backend):
        found = eager.run_on(BACKEND, QUANTIZED_PACKED, query, key, value, tensors, scalars)
        if found is not None:
            return found
    call = checked_call(QUANTIZED_PACKED, query, key, value, tensors, scalars)
    planning.check(call)
    if tracing.can_read(query):
        quantized_checks.values(query, key, value, tensors, longest)
    return _attend_rows(call)


def refuse(tensors: Operands, refused: dict[str, tuple]) -> None:
    """Raise ValueError unless all scales are given, and each value of `refused` is its default."""
    refuse_given(refused)
    refuse_missing(tensors)


def with_lengths(query: Tensor, tensors: Operands) -> Operands:
    """With `kv_lens` in place of cu_seqlens_k where keys are in pages."""
    table, ends, lens = tensors.page_table, tensors.cu_seqlens_k, tensors.kv_lens
    if table is None:
        return tensors
    if (lens is None) == (ends is None):
        given = "neither" if lens is None else "both"
        raise ValueError(
            f"kv_lens or cu_seqlens_k must be given with page_table, one of them, got {given}: "
            "pass kv_lens and cu_seqlens_k=None"
        )
    if lens is None:
        checks.integers(query, "cu_seqlens_k", need_tensor("cu_seqlens_k", ends))
        lens = ends.diff()
    return tensors._replace(cu_seqlens_k=None, kv_lens=lens)


def _may_run(
    query: Tensor, key: Tensor, value: Tensor, tensors: Operands, backend: str | None
) -> bool:
    """Whether the backend with the kernel may be chosen, and there is something to attend."""
    table = tensors.page_table
    return (
        query.is_cuda
        and (backend or backend_option.chosen() or "auto") in ("auto", BACKEND)
        and min(query.numel(), key.numel(), value.numel()) > 0
        and (table is None or table.numel() > 0)
    )


def _attend_rows(call: Call) -> tuple[Tensor, Tensor]:
    """The results of a checked call by the operator for batches."""
    call = call if _has_keys(call) else _with_unused_key(call)
    (q, k, v), t, o = call[:3], call.operands, call.options
    tokens, lengths = len(call.query), _lengths_of_rows(call)
    if not (lengths.query and len(lengths.ends_q) > 1):
        out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=torch.bfloat16)
        return out, q.new_full((q.shape[1], tokens), float("-inf"), dtype=torch.float32)
    if t.page_table is None:
        rows = rows_of(q, k, v, *lengths[:2], t.kv_lens, *lengths[2:])
    else:
        rows = rows_of_pages(q, k, v, lengths.ends_q, t.page_table, t.kv_lens, *lengths[2:])
    names = "scale", "window_left", "window_right", "softcap", "backend"
    options = {name: getattr(o, name) for name in names}
    out, lse = quantized.QUANTIZED_ATTENTION(
        *rows[:3], t.q_scale, t.k_scale, t.v_scale, o.is_causal, kv_lens=rows.kv_lens,
        sinks=t.sinks, smooth_key=False, **options,
    )  # fmt: skip
    return packed(out, lse, lengths.ends_q, tokens)


class _Lengths(NamedTuple):
    """Borders of sequences, in order and among the tokens, and the lengths of their rows."""

    ends_q: Tensor
    ends_k: Tensor | None  # None: keys are in pages
    query: int
    key: int


def _lengths_of_rows(call: Call) -> _Lengths:
    (q, k, _), t, o = call[:3], call.operands, call.options
    ends = borders(t.cu_seqlens_q, len(q))
    longest_q = _longest(ends, o.max_seqlen_q, len(q))
    if t.page_table is not None:
        longest_k = _smaller(o.max_seqlen_k, call.num_keys)
        return _Lengths(ends, None, longest_q, max(longest_k, 1))
    ends_k = borders(t.cu_seqlens_k, len(k))
    return _Lengths(ends, ends_k, longest_q, max(_longest(ends_k, o.max_seqlen_k, len(k)), 1))


def shape_of_rows(call: Call) -> Call:
    """The call for a batch by which a checked one is attended where no kernel takes it as it is.

    Its queries, keys and values have memory, but no values.
    """
    q, k, v, lengths = call.query, call.key, call.value, _lengths_of_rows(call)
    count = len(lengths.ends_q) - 1
    rows = (
        x.new_empty(count, length, *x.shape[-2:]).transpose(1, 2)
        for x, length in ((q, lengths.query), (k, lengths.key), (v, lengths.key))
    )
    t, kv_lens = call.operands, lengths.ends_q.new_zeros(count, dtype=torch.int32)
    operands = Operands(
        sinks=t.sinks, kv_lens=kv_lens, q_scale=t.q_scale, k_scale=t.k_scale, v_scale=t.v_scale
    )
    return Call(*rows, operands, call.options, backend=call.backend)


def _has_keys(call: Call) -> bool:
    return len(call.key) > 0 and (not call.is_paged or call.operands.page_table.shape[1] > 0)


def _with_unused_key(call: Call) -> Call:
    """A call without keys as one with a key, or a page, that no sequence has."""
    k, v = (x.new_zeros(1, *x.shape[1:]) for x in (call.key, call.value))
    operands, table = call.operands, call.operands.page_table
    if table is not None:
        operands = operands._replace(
            page_table=table.new_zeros(table.shape[0], 1),
            kv_lens=torch.zeros_like(operands.kv_lens),
        )
    return call._replace(key=k, value=v, operands=operands)


def _longest(ends: Tensor, most: int | None, tokens: int) -> int:
    """An upper bound on the lengths of sequences; the exact one where nothing is waited for."""
    if most is None and tracing.can_read(ends):
        return int(ends.diff().max()) if len(ends) > 1 else 0
    return _smaller(most, tokens)


def _smaller(most: int | None, tokens: int) -> int:
    return tokens if most is None else min(most, tokens)


# Packed sequences as a batch of rows of equal length, where no kernel takes them packed.
#
# The last query of a sequence is the last one of its row, so that causal masks and windows, which
# count from the end, are those of the sequence.


class Rows(NamedTuple):
    """Tensors (B, H, S, D) of packed sequences, and how many keys each of them has."""

    query: Tensor
    key: Tensor
    value: Tensor
    kv_lens: Tensor


def rows_of(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor,
    kv_lens: Tensor | None, longest_q: int, longest_k: int,
) -> Rows:  # fmt: skip
    """Rows of sequences whose keys follow one another."""
    steps = torch.arange(longest_k, device=query.device)
    lens = ends_k.diff()
    if kv_lens is not None:
        lens = torch.minimum(lens, kv_lens.clamp(min=0))
    keys = ends_k[:-1, None] + steps
    k, v = (_taken(x, keys) for x in (key, value))
    return Rows(_queries(query, ends_q, longest_q), k, v, lens.int())


def rows_of_pages(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, page_table: Tensor,
    kv_lens: Tensor, longest_q: int, longest_k: int,
) -> Rows:  # fmt: skip
    """Rows of sequences whose keys are in pages (pages, page_size, Hkv, D)."""
    page = key.shape[1]
    table = page_table[:, : -(-longest_k // page)]
    lens = kv_lens.clamp(0, page_table.shape[1] * page)
    k, v = (_taken(x, table, 1) for x in (key, value))
    return Rows(_queries(query, ends_q, longest_q), k, v, lens.int())


def packed(out: Tensor, lse: Tensor, ends_q: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Results (B, H, S, Dv) and (B, H, S) of rows as (Tq, H, Dv) and (H, Tq).

    Tokens outside every sequence have 0 and -inf.
    """
    token = torch.arange(tokens, device=ends_q.device)
    sequence = torch.searchsorted(ends_q[1:].contiguous(), token, right=True)
    outside = (sequence >= len(ends_q) - 1) | (token < ends_q[0])
    sequence = sequence.clamp(max=len(ends_q) - 2)
    row = (token - ends_q[sequence + 1] + out.shape[2]).clamp(0, out.shape[2] - 1)
    out = out.transpose(1, 2)[sequence, row].masked_fill(outside[:, None, None], 0.0)
    lse = lse.transpose(1, 2)[sequence, row].masked_fill(outside[:, None], float("-inf"))
    return out, lse.T.contiguous()


def borders(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """cu_seqlens clamped to the tokens; an entry below its predecessor is set equal to it."""
    return cu_seqlens.clamp(0, tokens).cummax(0).values


def _queries(query: Tensor, ends: Tensor, longest: int) -> Tensor:
    steps = torch.arange(longest, device=query.device) - longest
    return _taken(query, ends[1:, None] + steps)


def _taken(x: Tensor, index: Tensor, flattened: int = 0) -> Tensor:
    """(B, H, S, D) of the rows (H, D), or of the pages (page, H, D), that an index (B, S) names."""
    index = index.clamp(0, x.shape[0] - 1)
    # 8-bit numbers as bytes, which every device can index
    bits = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    taken = bits[index]
    taken = taken.flatten(1, 2) if flattened else taken
    return taken.view(x.dtype).transpose(1, 2)
