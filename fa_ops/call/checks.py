"""Checks of calls, for real and for symbolic shapes.

Only `values` reads what a tensor holds, on the CPU: kernels clamp kv_lens, key_ranges and
cu_seqlens.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fa_ops.call import backend_option
from fa_ops.call.call import Call, Saved, Tangents
from fa_ops.call.options import MASK_BLOCK, NO_OPERANDS, Operands, dtype_name, mask_blocks_shape
from fa_ops.programs.program import MAX_RUNS, ScoreProgram, parse

LAYOUT = "(B, H, S, D)"
PACKED_LAYOUT = "(T, H, D)"
PAGES_LAYOUT = "(pages, page_size, Hkv, D)"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = torch.float8_e4m3fn
_USUAL_DTYPES = frozenset(DTYPES[:3])
_NAMES = "float16, bfloat16, float32 or float64"
_ONE_LAYOUT = "tensors are (B, H, S, D); from (B, S, H, D) pass .transpose(1, 2)"
_warned: list[str] = []  # the argument of which users have been warned


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, given query's."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def need(ok: bool | torch.SymBool, message: str, *values: object, error: type = ValueError) -> None:
    """Raise `error` with the formatted message unless `ok`; a symbolic `ok` becomes a guard.

    Values that are functions are called where the error is made.
    """
    if ok is True:
        return
    check = torch._check_type if error is TypeError else torch._check_value
    check(ok, lambda: message.format(*(_plain(v) for v in values)))


def given(**tensors: Tensor | None) -> None:
    """Raise TypeError for a tensor that is None, which operators take for every tensor."""
    for name, t in tensors.items():
        if t is None:
            need(False, "{} must be a Tensor, got None", name, error=TypeError)


def _plain(value: object) -> object:
    if callable(value):
        value = value()
    if isinstance(value, torch.Size):
        return tuple(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def dense(call: Call, real: bool = False) -> None:
    """Raise ValueError or TypeError unless a dense call is legal.

    `real` tensors have memory, whose strides kernels rely on; those of fakes may lie.
    """
    (q, k, v), tensors = call[:3], call.operands
    if not (real and _obviously_fit(q, k, v)):
        _inputs(q, k, v, LAYOUT)
        B, Hq, _, D = q.shape
        Bk, Hkv, Sk, Dk = k.shape
        Bv, Hv, Sv, _ = v.shape
        batches_and_lengths(B, (Bk, Sk), (Bv, Sv))
        heads(Hq, Hkv, Hv, D, Dk)
        if real:
            contiguous_rows(query=q, key=k, value=v)
    if _is_plain(call):
        return
    B, Hq, Sq, _ = q.shape
    options(call, B, Sq)
    if tensors.attn_mask is not None:
        _mask(q, tensors, (B, Hq, Sq, k.shape[2]))
    if tensors.mask_blocks is not None:
        _mask_blocks(q, tensors, B, Hq)
    if tensors.key_ranges is not None:
        key_ranges(q, tensors.key_ranges, B, Hq, Sq)


def _obviously_fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True only where all of `dense`'s rules about q, k and v hold, found in 2 us instead of 5."""
    try:
        (B, Hq, _, D), (Bk, Hkv, Sk, Dk), (Bv, Hv, Sv, _) = q.shape, k.shape, v.shape
    except (ValueError, AttributeError):  # another number of dimensions, or None
        return False
    return (
        (Bk == B == Bv and Hv == Hkv and Sv == Sk and Dk == D)
        and (Hkv > 0 and Hq > 0 and Hq % Hkv == 0)
        and (q.dtype is k.dtype and q.dtype is v.dtype and q.dtype in _USUAL_DTYPES)
        and (q.device == k.device and q.device == v.device)
        and (q.stride()[3] == 1 and k.stride()[3] == 1 and v.stride()[3] == 1)
    )


def programmed(call: Call, real: bool = False) -> None:
    """The same for a dense call with a program, whose text is parsed."""
    dense(call, real)
    q, k, tensors = call.query, call.key, call.operands
    need(isinstance(call.options.program, str), "program must be a str, got {}: see "
         "fa_ops.programs.program", call.options.program, error=TypeError)  # fmt: skip
    program = parse(call.options.program)
    sizes = (*q.shape[:3], k.shape[2])
    terms(program, sizes, q, tensors.term_values, tensors.term_indices, lse_dtype(q.dtype))
    if tensors.tile_runs is not None:
        need(program.mask is not None, "tile_runs are of a program's mask, and this one has none")
        integers(q, "tile_runs", tensors.tile_runs)
        _tile_runs(tensors.tile_runs, sizes)


def terms(
    program: ScoreProgram, sizes: tuple, q: Tensor, values: Tensor | None, indices: Tensor | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raise unless the terms are those of the program for (B, Hq, Sq, Sk), on q's device."""
    for name, type, t, kind in (
        ("term_values", "float", values, dtype), ("term_indices", "int", indices, torch.int32)
    ):  # fmt: skip
        _, total = program.places(type, *sizes)
        is_read = any(term.type == type for term in program.terms)
        need(is_read == (t is not None), "{} must be given where the program has terms of {}, and "
             "not otherwise: fa_ops.flex_attention makes it", name, type)  # fmt: skip
        if t is not None:
            same_device(q, name, t)
            has_dtype(name, t, kind)
            has_shape(name, t, (total,), "fa_ops.flex_attention makes it for these lengths")


def tiles_of_program(
    like: Tensor, text: str, sizes: tuple, values: Tensor | None, indices: Tensor | None
) -> ScoreProgram:
    """The program of an operator that lists the tiles of a mask, once its arguments are checked."""
    given(like=like)
    program = parse(text)
    need(program.mask is not None, "program must have a mask, whose tiles are listed")
    for name, size in zip(("B", "Hq", "Sq", "Sk"), sizes, strict=True):
        need(size >= 1, "{} must be at least 1, got {}: it is a number of elements", name, size)
    dtype = torch.float32 if values is None or values.dtype != torch.float64 else values.dtype
    terms(program, sizes, like, values, indices, dtype)
    return program


def _tile_runs(runs: Tensor, sizes: tuple) -> None:
    B, H, Sq, Sk = sizes
    rows = -(-Sq // MASK_BLOCK) - (-Sk // MASK_BLOCK)
    message = "tile_runs must have shape {}, B and H or 1, got {}: pass fa_ops.mask_tiles(...)"
    expected = B, H, rows, 1 + 2 * MAX_RUNS
    need(runs.dim() == 4, message, expected, runs.shape)
    for size, whole in zip(runs.shape[:2], (B, H)):
        need((size - 1) * (size - whole) == 0, message, expected, runs.shape)
    need(runs.shape[2] == rows, message, expected, runs.shape)
    need(runs.shape[3] == expected[3], message, expected, runs.shape)


def packed(call: Call, real: bool = False) -> None:
    """The same for packed sequences."""
    q, k, v = call[:3]
    _inputs(q, k, v, PACKED_LAYOUT)
    _, Hq, D = q.shape
    Tk, Hkv, Dk = k.shape
    Tv, Hv, _ = v.shape
    need(Tv == Tk, "value has {} tokens, but key has {}: {}", Tv, Tk, "each key needs its value")
    heads(Hq, Hkv, Hv, D, Dk, layout=PACKED_LAYOUT)
    if real:
        contiguous_rows(query=q, key=k, value=v)
    cu_q, cu_k = call.operands.cu_seqlens_q, call.operands.cu_seqlens_k
    max_q, max_k = call.options.max_seqlen_q, call.options.max_seqlen_k
    for name, cu_seqlens in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        integers(q, name, cu_seqlens)
        borders(name, cu_seqlens)
    need(
        cu_q.shape[0] == cu_k.shape[0],
        "cu_seqlens_q and cu_seqlens_k must be of one length, got {} and {}: both are of the same "
        "sequences, of which some may be empty",
        cu_q.shape[0],
        cu_k.shape[0],
    )
    for name, longest in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
        if longest is not None:
            bound(name, longest)
    if not _is_plain(call):
        options(call, cu_q.shape[0] - 1)


def values(
    q: Tensor, k: Tensor, v: Tensor, tensors: Operands,
    longest: tuple[int | None, int | None],
) -> None:  # fmt: skip
    """Raise ValueError unless every sequence lies among the tokens and is at most as long as
    `longest` says. Reads boundaries and lengths on the host."""
    ends_q, ends_k, lens = tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens
    cu_seqlens("cu_seqlens_q", ends_q, q.shape[0])
    cu_seqlens("cu_seqlens_k", ends_k, k.shape[0])
    if longest[0] is not None:
        max_seqlen("max_seqlen_q", longest[0], ends_q.diff(), "queries")
    if longest[1] is not None:
        keys = ends_k.diff() if lens is None else torch.minimum(ends_k.diff(), lens)
        max_seqlen("max_seqlen_k", longest[1], keys, "keys")


def max_seqlen(name: str, most: int | None, lens: Tensor, what: str) -> None:
    """Raise ValueError if a sequence is longer than `most`."""
    if most is not None and len(lens):
        longest = int(lens.max())
        need(longest <= most, "{} is {}, but a sequence has {} {}: pass at least that, or None",
             name, most, longest, what)  # fmt: skip


def bound(name: str, longest: int | None) -> None:
    """Raise ValueError unless it can be the length of a longest sequence."""
    need(longest is None or longest >= 0, "{} must not be negative, got {}: pass None where it is "
         "not known", name, longest)  # fmt: skip


def borders(name: str, given: Tensor) -> None:
    """Raise ValueError unless it has the shape of boundaries of sequences."""
    remedy = lambda: f": pass {name}.flatten()" if 1 in given.shape else ""  # noqa: E731
    need(given.dim() == 1, "{} must have shape (B + 1,), got {}{}", name, given.shape, remedy)
    need(given.shape[0] >= 1, "{} must have at least one element, got none: it begins with 0", name)


def cu_seqlens(name: str, given: Tensor, tokens: int, all_tokens: bool = True) -> None:
    """Raise ValueError unless the boundaries of sequences rise within the tokens.

    Warns once if they leave tokens out; not `all_tokens`: which may be.
    """
    before, ends = 0, given.tolist()
    if ends[0] == 0 and ends[-1] == tokens and ends == sorted(ends):
        return
    remedy = lambda: (  # noqa: E731
        f"if {name} holds lengths, pass torch.nn.functional.pad({name}.cumsum(0), (1, 0)).int()"
    )
    for b, end in enumerate(ends):
        need(end >= before, "{}[{}] is {}, but must not be less than {}: {}", name, b, end, before,
             remedy)  # fmt: skip
        need(end <= tokens, "{}[{}] is {}, but there are {} tokens: {}", name, b, end, tokens,
             remedy)  # fmt: skip
        before = end
    if all_tokens and (ends[0] or ends[-1] != tokens) and len(ends) > 1 and not _warned:
        _warned.append(name)
        shown = f"{str(ends[:8])[:-1]}{', ...' * (len(ends) > 8)}]"
        warnings.warn(
            f"{name} should begin with 0 and end with the number of tokens, {tokens}, got {shown}: "
            f"tokens outside give 0; {remedy()}",
            stacklevel=2,
        )


def saved(q: Tensor, v: Tensor, tensors: Saved, is_backward: bool = True) -> None:
    """Raise ValueError or TypeError unless these fit the query and the value of a call.

    Not `is_backward`: `grad_out` may be missing.
    """
    *rows, _ = q.shape
    out_shape = (*rows, v.shape[-1])
    lse_shape = tuple(rows if len(rows) == 3 else reversed(rows))
    grad_out, grad_lse, out, lse, _ = tensors
    given(**{"grad_out": grad_out} if is_backward else {}, out=out, lse=lse)
    wide = lse_dtype(q.dtype)
    expected = (
        ("grad_out", grad_out, out_shape, q.dtype),
        ("out", out, out_shape, q.dtype),
        ("lse", lse, lse_shape, wide),
        ("grad_lse", grad_lse, lse_shape, wide),
    )
    for name, t, shape, dtype in expected:
        if t is not None:
            same_device(q, name, t)
            has_dtype(name, t, dtype)
            has_shape(name, t, tuple(shape), "it is of the call with this query and value")


def tangents(call: Call) -> None:
    """Raise ValueError or TypeError unless each tangent is one of a floating point tensor.

    It has the shape, the dtype and the device of that tensor.
    """
    saved, operands = call.saved, call.operands
    of = dict(zip(("query", "key", "value"), call[:3]))
    of |= {"attn_mask": operands.attn_mask, "sinks": operands.sinks, "grad_out": saved.grad_out}
    of |= {"out": saved.out} | dict.fromkeys(("lse", "grad_lse", "grad_dot"), saved.lse)
    for name, t in zip(Tangents._fields, call.tangents):
        if t is None:
            continue
        x, argument = of[name], name if name == "grad_dot" else f"{name}_t"
        need(x is not None, "{} is given without {}: pass {}=None", argument, name, argument)
        need(x.dtype.is_floating_point, "{} is the tangent of a floating point {}, got {}: pass "
             "{}=None", argument, name, x.dtype, argument)  # fmt: skip
        same_device(call.query, argument, t)
        has_dtype(argument, t, x.dtype)
        has_shape(argument, t, tuple(x.shape), f"a tangent has the shape of {name}")


def mask_grad(mask: Tensor | None) -> None:
    """Raise ValueError unless attn_mask can have a gradient."""
    ok = mask is not None and mask.dtype.is_floating_point
    need(ok, "mask_grad needs a floating point attn_mask, got {}: pass mask_grad=False",
         None if mask is None else mask.dtype)  # fmt: skip


def states(outs: Tensor, lses: Tensor, names: tuple[str, str] = ("outs", "lses")) -> None:
    """Raise ValueError or TypeError unless these are partial results that can be merged.

    `names` are theirs in messages.
    """
    out, lse = names
    given(**{out: outs, lse: lses})
    wide = lse_dtype(outs.dtype)
    need(outs.dtype in DTYPES, "{} must be {}, got {}: pass {}.float()", out, _NAMES, outs.dtype,
         out, error=TypeError)  # fmt: skip
    has_dtype(lse, lses, wide)
    same_device(outs, lse, lses, out)
    need(outs.dim() >= 2, "{} must have shape (N, ..., Dv), got {}: stack the results of N sets of "
         "keys", out, outs.shape)  # fmt: skip
    need(outs.shape[0] >= 1, "{} must hold at least one state, got shape {}: there is nothing to "
         "merge", out, outs.shape)  # fmt: skip
    has_shape(lse, lses, tuple(outs.shape[:-1]), f"pass the lse of each of {out}")


def no_gradients(arguments: Mapping[str, object], reason: str) -> None:
    """Raise ValueError where a gradient of one of these arguments would be recorded."""
    for name, t in arguments.items() if torch.is_grad_enabled() else ():
        if isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(f"{name} must not require grad: {reason}")


def contiguous_rows(**tensors: Tensor) -> None:
    """Raise ValueError unless the last dimension of each tensor is contiguous.

    A tensor without elements is, with any strides, and torch's `contiguous` does not change it.
    """
    for name, t in tensors.items():
        strides = t.stride()
        if strides[-1] != 1 and t.shape[-1] != 1 and t.numel() != 0:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got strides {strides}: "
                f"pass {name}.contiguous()"
            )


def _is_plain(call: Call) -> bool:
    """Whether no option is given that could be wrong, and no tensor but borders of sequences.

    By identity: comparing tuples would compare each tensor with None, which takes 15 us.
    """
    t, o = call.operands, call.options
    return (
        (t is NO_OPERANDS or t.attn_mask is t.alibi_slopes is t.sinks is t.kv_lens is None)
        and t.key_ranges is t.dropout_seed is t.mask_blocks is None
        and o.scale is o.backend is None
        and o.window_left == o.window_right == -1
        and o.softcap == o.dropout_p == 0.0
    )


def _inputs(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    """Raise unless query, key and value agree in rank, dtype and device."""
    given(query=q, key=k, value=v)
    for name, t in (("query", q), ("key", k), ("value", v)):
        rank(name, t, layout)
        same_dtype(q, name, t)
        same_device(q, name, t)
    query_dtype(q)


def rank(name: str, t: Tensor, layout: str) -> None:
    """Raise ValueError unless the tensor has as many dimensions as the layout."""
    dims = layout.count(",") + 1
    if t.dim() == dims:
        return
    if dims == 3:
        remedy = f"pass {name}.flatten(0, 1) of (B, S, H, D), or batches to attention"
    elif layout != LAYOUT:
        remedy = "without page_table it is (B, Hkv, S, D)"
    else:
        remedy = leading_dims_remedy(name, t, dims)
        remedy += ", or tokens (T, H, D) to attention_varlen" * (t.dim() == 3)
    need(False, "{} must have shape {}, got {}: {}", name, layout, t.shape, remedy)


def leading_dims_remedy(name: str, t: Tensor, dims: int) -> str:
    """The expression of a tensor with so many dimensions: the first ones are joined or added."""
    if t.dim() > dims:
        return f"pass {name}.flatten(0, {-dims})"
    return f"pass {name}[{', '.join(['None'] * (dims - t.dim()))}]"


def query_dtype(q: Tensor, names: str = "query, key and value") -> None:
    """Raise TypeError unless query's dtype, that of `names`, is supported on its device."""
    if q.dtype not in DTYPES:
        _refuse_dtype(q, names)
    if q.dtype == torch.float64 and q.is_cuda:
        need(False, "query is float64, which is supported on CPU only: pass query.float()",
             error=TypeError)  # fmt: skip


def _refuse_dtype(q: Tensor, names: str) -> None:
    if "float8" in str(q.dtype):
        advice = "attention takes it with q_scale, k_scale and v_scale; else cast to bfloat16"
        need(False, "query is {}; {}", q.dtype, advice, error=TypeError)
    need(False, "query must be {}, got {}: cast {}, as by query.float()", _NAMES, q.dtype, names,
         error=TypeError)  # fmt: skip


def batches_and_lengths(
    B, of_key: tuple, of_value: tuple, names: tuple[str, str] = ("key", "value")
) -> None:
    """Raise ValueError unless these batch sizes and lengths, of (B, H, S, D), fit each other."""
    (Bk, Sk), (Bv, Sv), (key, value) = of_key, of_value, names
    for name, size in ((key, Bk), (value, Bv)):
        remedy = functools.partial(_batch_remedy, name, size, B)
        need(size == B, "{} has batch size {}, but query's is {}: {}", name, size, B, remedy)
    need(Sv == Sk, "{} has length {}, but {}'s is {}: {}", value, Sv, key, Sk, _ONE_LAYOUT)


def _batch_remedy(name: str, size, B) -> str:
    return f"pass {name}.expand({B}, -1, -1, -1)" if size == 1 else _ONE_LAYOUT


def heads(Hq, Hkv, Hv, D, Dk, key: str = "key", value: str = "value", layout: str = LAYOUT) -> None:
    """Raise ValueError unless numbers of heads and head dimensions fit each other."""
    of = _ONE_LAYOUT if layout == LAYOUT else f"{key} is {layout}"
    need(Dk == D, "{} has head dimension {}, but query's is {}: value alone may have another one",
         key, Dk, D)  # fmt: skip
    need(Hv == Hkv, "{} has {} heads, but {} has {}: {}", value, Hv, key, Hkv, of)
    need(Hkv >= 1, "{} has no heads: {}", key, of)
    message = "{} has {} heads, which does not divide query's {}: {}"
    need(Hq % Hkv == 0 and Hq >= 1, message, key, Hkv, Hq, of)


def options(call: Call, B, rows: int | None = None) -> None:
    """Raise ValueError or TypeError unless all options but attn_mask and key_ranges are legal.

    `B`: rows of the batch, or sequences; `rows`: queries of a dense call.
    """
    q, tensors, o, Hq = call.query, call.operands, call.options, call.query.shape[1]
    p, seed, softcap = o.dropout_p, tensors.dropout_seed, o.softcap
    need(
        0.0 <= p < 1.0,
        "dropout_p must be in [0, 1), got {}: pass the share of weights to drop, 0 for none", p,
    )  # fmt: skip
    need(
        p == 0 or seed is not None,
        "dropout_p > 0 needs dropout_seed, an int64 tensor of one element, got None: pass "
        "torch.randint(2**63 - 1, (1,), device=query.device)",
    )
    if seed is not None:
        _seed(q, seed, None if rows is None else (B, Hq, rows))
    need(
        o.scale is None or math.isfinite(o.scale),
        "scale must be finite, got {}: None is 1 / sqrt(D)",
        o.scale,
    )
    need(0.0 <= softcap < math.inf, "softcap must be finite and >= 0 (0 is off), got {}", softcap)
    for side, size in (("left", o.window_left), ("right", o.window_right)):
        rule = "the {0} side of window (window_{0}) must be -1 (unbounded) or more, got {1}"
        need(size >= -1, rule, side, size)
    if o.backend is not None:
        backend_option.check_name(o.backend)
    slopes, sinks, lens = tensors.alibi_slopes, tensors.sinks, tensors.kv_lens
    if slopes is not None:
        same_device(q, "alibi_slopes", slopes)
        has_dtype("alibi_slopes", slopes, torch.float32)
        expected = (Hq,) if slopes.dim() == 1 else (B, Hq)
        has_shape("alibi_slopes", slopes, expected, "pass a slope for each query head")
    if sinks is not None:
        floats(q, "sinks", sinks)
        has_shape("sinks", sinks, (Hq,), "pass a sink for each query head")
    if lens is not None:
        integers(q, "kv_lens", lens)
        has_shape("kv_lens", lens, (B,), "pass a number of keys for each row or sequence")


def _mask(q: Tensor, tensors: Operands, full: tuple) -> None:
    mask = tensors.attn_mask
    remedy = lambda: _mask_remedy(mask, full)  # noqa: E731
    floats(q, "attn_mask", mask, torch.bool, remedy=remedy)
    both = mask.dtype == torch.bool and tensors.key_ranges is not None
    need(not both, "a bool attn_mask and key_ranges both say which keys are kept: pass one of them")
    broadcastable = "attn_mask must broadcast to (B, Hq, Sq, Sk) = {}, got shape {}{}"
    need(mask.dim() <= 4, broadcastable, full, mask.shape, remedy)
    for size, whole in zip(reversed(mask.shape), reversed(full), strict=False):
        # a product instead of `or`, which a symbolic size could not defer
        need((size - 1) * (size - whole) == 0, broadcastable, full, mask.shape, remedy)


def _mask_remedy(mask: Tensor, full: tuple) -> str:
    """What to do with a mask of another dtype or shape, after a colon."""
    B, _, Sq, Sk = full
    as_bool = "" if mask.dtype.is_floating_point or mask.dtype == torch.bool else ".bool()"
    shape = tuple(mask.shape)
    if shape == (B, Sk) and (as_bool or shape != (Sq, Sk)):
        lengths = "" if mask.dtype.is_floating_point else (
            ", or kv_lens=attn_mask.sum(1).int() where the padding is at the end"
        )  # fmt: skip
        return f": a padding mask (B, Sk) is attn_mask[:, None, None, :]{as_bool}{lengths}"
    if shape == (B, Sq, Sk):
        return f": a mask of rows (B, Sq, Sk) is attn_mask[:, None]{as_bool}"
    if as_bool:
        return ": pass attn_mask.bool(), True where a key is attended"
    return ": each of its sizes is 1 or that of the scores"


def _mask_blocks(q: Tensor, tensors: Operands, B, Hq) -> None:
    mask, blocks = tensors.attn_mask, tensors.mask_blocks
    need(mask is not None, "mask_blocks describe an attn_mask: pass both or neither")
    integers(q, "mask_blocks", blocks)
    expected = mask_blocks_shape(mask)
    message = (
        "mask_blocks must be those of the attn_mask, of shape {}, got {}: pass "
        "fa_ops.mask_blocks(attn_mask)"
    )
    need(blocks.dim() == 3, message, expected, blocks.shape)
    for size, own, whole in zip(blocks.shape, expected, (B, Hq)):
        # what samples of a transform share is not repeated for each of them
        need((size - 1) * (size - own) * (size - whole) == 0, message, expected, blocks.shape)
    need(blocks.shape[2] == expected[2], message, expected, blocks.shape)


def attn_mask(mask: Tensor) -> None:
    """Raise ValueError or TypeError unless it is a mask of which `mask_blocks` can be made."""
    known = (torch.bool, *DTYPES)
    need(
        mask.dtype in known, "attn_mask must be bool, {}, got {}: pass attn_mask.bool()", _NAMES,
        mask.dtype, error=TypeError,
    )  # fmt: skip
    message = "attn_mask must have up to four dimensions, (B, Hq, Sq, Sk), got shape {}: {}"
    need(mask.dim() <= 4, message, mask.shape, "pass attn_mask.flatten(0, -4)")


def key_ranges(q: Tensor, ranges: Tensor, B, Hq, Sq) -> None:
    """Raise ValueError or TypeError unless the ranges fit the scores."""
    integers(q, "key_ranges", ranges)
    message = (
        "key_ranges must have shape (B or 1, Hq or 1, Sq or 1, 2) with (B, Hq, Sq) = {}, got {}{}"
    )
    remedy = {2: ": pass key_ranges[None, None]", 3: ": pass key_ranges[:, None]"}
    found = ranges.shape, remedy.get(ranges.dim(), "")
    need(ranges.dim() == 4, message, (B, Hq, Sq), *found)
    need(ranges.shape[3] == 2, message, (B, Hq, Sq), *found)
    for size, whole in zip(ranges.shape, (B, Hq, Sq), strict=False):
        need((size - 1) * (size - whole) == 0, message, (B, Hq, Sq), *found)


def has_shape(name: str, t: Tensor, shape: tuple, meaning: str) -> None:
    """Raise ValueError unless the tensor has this shape.

    `meaning` is the remedy where the tensor does not become one of this shape by a view.
    """
    remedy = lambda: _shape_remedy(name, t, shape) or meaning  # noqa: E731
    message = "{} must have shape {}, got {}: {}"
    need(t.dim() == len(shape), message, name, shape, t.shape, remedy)
    for size, expected in zip(t.shape, shape, strict=True):
        need(size == expected, message, name, shape, t.shape, remedy)


def _shape_remedy(name: str, t: Tensor, shape: tuple) -> str:
    """The view that has this shape, or nothing."""
    if "Sn" in shape:
        return ""
    if t.numel() == math.prod(shape) and [n for n in t.shape if n != 1] == [
        n for n in shape if n != 1
    ]:
        return f"pass {name}.reshape{shape}"
    fits = t.dim() <= min(len(shape), 2) and all(
        own in (1, size) for own, size in zip(reversed(t.shape), reversed(shape))
    )
    return f"pass {name}.expand{shape}" if fits else ""


def same_device(q: Tensor, name: str, t: Tensor, other: str = "query") -> None:
    """Raise ValueError unless the tensor is on q's device, and TypeError if there is none."""
    given(**{name: t})
    if t.device != q.device:
        need(False, "{} is on {}, but {} is on {}: pass {}.to({}.device)", name, t.device, other,
             q.device, name, other)  # fmt: skip


def same_dtype(q: Tensor, name: str, t: Tensor, other: str = "query") -> None:
    """Raise TypeError unless the tensor has q's dtype."""
    if t.dtype != q.dtype:
        need(False, "{} is {}, but {} is {}: pass {}.to({}.dtype)", name, t.dtype, other, q.dtype,
             name, other, error=TypeError)  # fmt: skip


_CASTS = {
    torch.int32: "int", torch.int64: "long", torch.bool: "bool", torch.float16: "half",
    torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double",
}  # fmt: skip


def has_dtype(name: str, t: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError unless the tensor has this dtype."""
    if t.dtype != dtype:
        need(False, "{} must be {}, got {}: pass {}.{}()", name, dtype, t.dtype, name,
             _CASTS[dtype], error=TypeError)  # fmt: skip


def _seed(q: Tensor, seed: Tensor, words: tuple[int, int, int] | None) -> None:
    """Raise unless it is a seed of dropout, or a word for each row in the shape `words`."""
    if words is None or seed.dtype != torch.int32 or seed.dim() != 3:
        integers(q, "dropout_seed", seed, torch.int64)
        need(seed.numel() == 1, "dropout_seed must have one element, got shape {}: pass "
             "dropout_seed[:1]", seed.shape)  # fmt: skip
        return
    same_device(q, "dropout_seed", seed)
    message = "dropout_seed of int32 must have shape {}, a word for each row, got {}"
    need(seed.shape == words, message, words, tuple(seed.shape))


def integers(q: Tensor, name: str, t: Tensor, dtype: torch.dtype = torch.int32) -> None:
    """Raise unless the tensor has this dtype and is on query's device."""
    same_device(q, name, t)
    has_dtype(name, t, dtype)


def floats(
    q: Tensor, name: str, t: Tensor, *also: torch.dtype, remedy: Callable[[], str] | None = None
) -> None:
    """Raise unless the tensor is on query's device, in query's dtype, float32 or one of `also`.

    `remedy` is for tensors that are not floating point.
    """
    same_device(q, name, t)
    dtypes = dict.fromkeys((*also, q.dtype, torch.float32))
    if t.dtype not in dtypes:
        names = " or ".join(_plain(dtype) for dtype in dtypes)
        cast = f": pass {name}.float()"
        if remedy is not None and not t.dtype.is_floating_point:
            cast = remedy()
        need(False, "{} must be {}, got {}{}", name, names, t.dtype, cast, error=TypeError)
