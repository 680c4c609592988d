"""Checks of calls, for real and for symbolic shapes.

Only `values` reads what a tensor holds, on the CPU: kernels clamp kv_lens, key_ranges and
cu_seqlens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fa_ops.call import backend_option
from fa_ops.call.call import Saved
from fa_ops.call.options import Operands, Packing, Spec, dtype_name, mask_blocks_shape

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = torch.float8_e4m3fn
_USUAL_DTYPES = frozenset(DTYPES[:3])
_NAMES = "float16, bfloat16, float32 or float64"


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, given query's."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def need(ok: bool | torch.SymBool, message: str, *values: object, error: type = ValueError) -> None:
    """Raise `error` with the formatted message unless `ok`; a symbolic `ok` becomes a guard."""
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
    if isinstance(value, torch.Size):
        return tuple(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def dense(q: Tensor, k: Tensor, v: Tensor, spec: Spec, real: bool = False) -> None:
    """Raise ValueError or TypeError unless q, k, v and the spec make a legal call.

    `real` tensors have memory, whose strides kernels rely on; those of fakes may lie.
    """
    if not (real and _obviously_fit(q, k, v)):
        _inputs(q, k, v, 4, "(B, H, S, D)")
        B, Hq, _, D = q.shape
        Bk, Hkv, Sk, Dk = k.shape
        Bv, Hv, Sv, _ = v.shape
        need(Bk == B, "key has batch size {}, but query's is {}", Bk, B)
        need(Bv == B, "value has batch size {}, but query's is {}", Bv, B)
        need(Sv == Sk, "value has length {}, but key's is {}", Sv, Sk)
        heads(Hq, Hkv, Hv, D, Dk)
        if real:
            contiguous_rows(query=q, key=k, value=v)
    if _is_plain(spec):
        return
    B, Hq, Sq, _ = q.shape
    options(q, spec, B, Hq, Sq)
    if spec.attn_mask is not None:
        _mask(q, spec, (B, Hq, Sq, k.shape[2]))
    if spec.mask_blocks is not None:
        _mask_blocks(q, spec, B, Hq)
    if spec.key_ranges is not None:
        key_ranges(q, spec.key_ranges, B, Hq, Sq)


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


def packed(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: Spec, real: bool = False
) -> None:
    """The same for packed sequences."""
    _inputs(q, k, v, 3, "(T, H, D)")
    _, Hq, D = q.shape
    Tk, Hkv, Dk = k.shape
    Tv, Hv, _ = v.shape
    need(Tv == Tk, "value has {} tokens, but key has {}", Tv, Tk)
    heads(Hq, Hkv, Hv, D, Dk)
    if real:
        contiguous_rows(query=q, key=k, value=v)
    cu_q, cu_k, max_q, max_k = packing
    for name, cu_seqlens in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        integers(q, name, cu_seqlens)
        need(cu_seqlens.dim() == 1, "{} must have shape (B + 1,), got {}", name, cu_seqlens.shape)
        need(cu_seqlens.shape[0] >= 1, "{} must have at least one element", name)
    need(
        cu_q.shape[0] == cu_k.shape[0],
        "cu_seqlens_q and cu_seqlens_k must be of one length, got {} and {}",
        cu_q.shape[0],
        cu_k.shape[0],
    )
    for name, longest in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
        if longest is not None:
            need(longest >= 0, "{} must not be negative, got {}", name, longest)
    if not _is_plain(spec):
        options(q, spec, cu_q.shape[0] - 1, Hq)


def values(
    q: Tensor, k: Tensor, v: Tensor, tensors: Operands,
    longest: tuple[int | None, int | None],
) -> None:  # fmt: skip
    """Raise ValueError unless every sequence lies among the tokens and is at most as long as
    `longest` says. Reads boundaries and lengths on the host."""
    ends_q, ends_k, lens = tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens
    cu_seqlens("cu_seqlens_q", ends_q, q.shape[0])
    cu_seqlens("cu_seqlens_k", ends_k, k.shape[0])
    max_seqlen("max_seqlen_q", longest[0], ends_q.diff(), "queries")
    keys = ends_k.diff() if lens is None else torch.minimum(ends_k.diff(), lens)
    max_seqlen("max_seqlen_k", longest[1], keys, "keys")


def max_seqlen(name: str, most: int | None, lens: Tensor, what: str) -> None:
    """Raise ValueError if a sequence is longer than `most`."""
    if most is not None and len(lens):
        longest = int(lens.max())
        need(longest <= most, "{} is {}, but a sequence has {} {}", name, most, longest, what)


def cu_seqlens(name: str, given: Tensor, tokens: int) -> None:
    """Raise ValueError unless the boundaries of sequences rise within the tokens."""
    before = 0
    for b, end in enumerate(given.tolist()):
        need(end >= before, "{}[{}] is {}, but must not be less than {}", name, b, end, before)
        need(end <= tokens, "{}[{}] is {}, but there are {} tokens", name, b, end, tokens)
        before = end


def saved(q: Tensor, v: Tensor, tensors: Saved) -> None:
    """Raise ValueError or TypeError unless these fit the query and the value of a call."""
    *rows, _ = q.shape
    out_shape = (*rows, v.shape[-1])
    lse_shape = tuple(rows if len(rows) == 3 else reversed(rows))
    grad_out, grad_lse, out, lse, _ = tensors
    given(grad_out=grad_out, out=out, lse=lse)
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
            need(t.dtype == dtype, "{} must be {}, got {}", name, dtype, t.dtype, error=TypeError)
            has_shape(name, t, tuple(shape))


def mask_grad(spec: Spec) -> None:
    """Raise ValueError unless attn_mask can have a gradient."""
    mask = spec.attn_mask
    ok = mask is not None and mask.dtype.is_floating_point
    need(ok, "mask_grad needs a floating point attn_mask")


def states(outs: Tensor, lses: Tensor, names: tuple[str, str] = ("outs", "lses")) -> None:
    """Raise ValueError or TypeError unless these are partial results that can be merged.

    `names` are theirs in messages.
    """
    out, lse = names
    given(**{out: outs, lse: lses})
    wide = lse_dtype(outs.dtype)
    need(outs.dtype in DTYPES, "{} must be {}, got {}", out, _NAMES, outs.dtype, error=TypeError)
    need(lses.dtype == wide, "{} must be {}, got {}", lse, wide, lses.dtype, error=TypeError)
    same_device(outs, lse, lses, out)
    need(outs.dim() >= 2, "{} must have shape (N, ..., Dv), got {}", out, outs.shape)
    need(outs.shape[0] >= 1, "{} must hold at least one state, got shape {}", out, outs.shape)
    has_shape(lse, lses, tuple(outs.shape[:-1]))


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


def _is_plain(spec: Spec) -> bool:
    """Whether no option is given that could be wrong.

    By identity: comparing tuples would compare each tensor with None, which takes 15 us.
    """
    return (
        spec.alibi_slopes is None
        and spec.sinks is None
        and spec.kv_lens is None
        and spec.key_ranges is None
        and spec.dropout_seed is None
        and spec.attn_mask is None
        and spec.mask_blocks is None
        and spec.scale is None
        and spec.backend is None
        and spec.window_left == -1
        and spec.window_right == -1
        and spec.softcap == 0.0
        and spec.dropout_p == 0.0
    )


def _inputs(q: Tensor, k: Tensor, v: Tensor, dims: int, layout: str) -> None:
    """Raise unless query, key and value agree in rank, dtype and device."""
    given(query=q, key=k, value=v)
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim() != dims:
            need(False, "{} must have shape {}, got {}", name, layout, t.shape)
        if t.dtype != q.dtype:
            need(False, "{} is {}, but query is {}", name, t.dtype, q.dtype, error=TypeError)
        if t.device != q.device:
            need(False, "{} is on {}, but query is on {}", name, t.device, q.device)
    query_dtype(q)


def query_dtype(q: Tensor) -> None:
    """Raise TypeError unless query's dtype is supported on its device."""
    if q.dtype not in DTYPES:
        _refuse_dtype(q)
    if q.dtype == torch.float64 and q.is_cuda:
        need(False, "query is float64, which is supported on CPU only", error=TypeError)


def _refuse_dtype(q: Tensor) -> None:
    if "float8" in str(q.dtype):
        advice = "attention takes it with q_scale, k_scale and v_scale; else cast to bfloat16"
        need(False, "query is {}; {}", q.dtype, advice, error=TypeError)
    need(False, "query must be {}, got {}", _NAMES, q.dtype, error=TypeError)


def heads(Hq, Hkv, Hv, D, Dk, key: str = "key", value: str = "value") -> None:
    """Raise ValueError unless numbers of heads and head dimensions fit each other."""
    need(Dk == D, "{} has head dimension {}, but query's is {}", key, Dk, D)
    need(Hv == Hkv, "{} has {} heads, but {} has {}", value, Hv, key, Hkv)
    need(Hkv >= 1, "{} has no heads", key)
    message = "{} has {} heads, which does not divide query's {}"
    need(Hq % Hkv == 0 and Hq >= 1, message, key, Hkv, Hq)


def options(q: Tensor, spec: Spec, B, Hq, rows: int | None = None) -> None:
    """Raise ValueError or TypeError unless all options but attn_mask and key_ranges are legal.

    `rows`: queries of a dense call.
    """
    p, seed, softcap = spec.dropout_p, spec.dropout_seed, spec.softcap
    need(0.0 <= p < 1.0, "dropout_p must be in [0, 1), got {}", p)
    need(
        p == 0 or seed is not None,
        "dropout_p > 0 needs dropout_seed, an int64 tensor of one element",
    )
    if seed is not None:
        _seed(q, seed, None if rows is None else (B, Hq, rows))
    need(
        spec.scale is None or math.isfinite(spec.scale), "scale must be finite, got {}", spec.scale
    )
    need(0.0 <= softcap < math.inf, "softcap must be finite and >= 0 (0 is off), got {}", softcap)
    for side, size in (("left", spec.window_left), ("right", spec.window_right)):
        rule = "the {0} side of window (window_{0}) must be -1 (unbounded) or more, got {1}"
        need(size >= -1, rule, side, size)
    if spec.backend is not None:
        backend_option.check_name(spec.backend)
    slopes, sinks, lens = spec.alibi_slopes, spec.sinks, spec.kv_lens
    if slopes is not None:
        same_device(q, "alibi_slopes", slopes)
        wide = torch.float32
        need(
            slopes.dtype == wide,
            "alibi_slopes must be float32, got {}",
            slopes.dtype,
            error=TypeError,
        )
        has_shape("alibi_slopes", slopes, (Hq,) if slopes.dim() == 1 else (B, Hq))
    if sinks is not None:
        floats(q, "sinks", sinks)
        has_shape("sinks", sinks, (Hq,))
    if lens is not None:
        integers(q, "kv_lens", lens)
        has_shape("kv_lens", lens, (B,))


def _mask(q: Tensor, spec: Spec, full: tuple) -> None:
    mask = spec.attn_mask
    floats(q, "attn_mask", mask, torch.bool)
    both = mask.dtype == torch.bool and spec.key_ranges is not None
    need(not both, "a bool attn_mask and key_ranges both say which keys are kept: pass one of them")
    broadcastable = "attn_mask must broadcast to (B, Hq, Sq, Sk) = {}, got shape {}"
    need(mask.dim() <= 4, broadcastable, full, mask.shape)
    for size, whole in zip(reversed(mask.shape), reversed(full), strict=False):
        # a product instead of `or`, which a symbolic size could not defer
        need((size - 1) * (size - whole) == 0, broadcastable, full, mask.shape)


def _mask_blocks(q: Tensor, spec: Spec, B, Hq) -> None:
    mask, blocks = spec.attn_mask, spec.mask_blocks
    need(mask is not None, "mask_blocks describe an attn_mask: pass both or neither")
    integers(q, "mask_blocks", blocks)
    expected = mask_blocks_shape(mask)
    message = "mask_blocks must be those of the attn_mask, of shape {}, got {}"
    need(blocks.dim() == 3, message, expected, blocks.shape)
    for size, own, whole in zip(blocks.shape, expected, (B, Hq)):
        # what samples of a transform share is not repeated for each of them
        need((size - 1) * (size - own) * (size - whole) == 0, message, expected, blocks.shape)
    need(blocks.shape[2] == expected[2], message, expected, blocks.shape)


def attn_mask(mask: Tensor) -> None:
    """Raise ValueError or TypeError unless it is a mask of which `mask_blocks` can be made."""
    known = (torch.bool, *DTYPES)
    need(
        mask.dtype in known, "attn_mask must be bool, {}, got {}", _NAMES, mask.dtype,
        error=TypeError,
    )  # fmt: skip
    message = "attn_mask must have up to four dimensions, (B, Hq, Sq, Sk), got shape {}"
    need(mask.dim() <= 4, message, mask.shape)


def key_ranges(q: Tensor, ranges: Tensor, B, Hq, Sq) -> None:
    """Raise ValueError or TypeError unless the ranges fit the scores."""
    integers(q, "key_ranges", ranges)
    message = (
        "key_ranges must have shape (B or 1, Hq or 1, Sq or 1, 2) with (B, Hq, Sq) = {}, got {}"
    )
    need(ranges.dim() == 4, message, (B, Hq, Sq), ranges.shape)
    need(ranges.shape[3] == 2, message, (B, Hq, Sq), ranges.shape)
    for size, whole in zip(ranges.shape, (B, Hq, Sq), strict=False):
        need((size - 1) * (size - whole) == 0, message, (B, Hq, Sq), ranges.shape)


def has_shape(name: str, t: Tensor, shape: tuple) -> None:
    """Raise ValueError unless the tensor has this shape."""
    message = "{} must have shape {}, got {}"
    need(t.dim() == len(shape), message, name, shape, t.shape)
    for size, expected in zip(t.shape, shape, strict=True):
        need(size == expected, message, name, shape, t.shape)


def same_device(q: Tensor, name: str, t: Tensor, other: str = "query") -> None:
    """Raise ValueError unless the tensor is on q's device, and TypeError if there is none."""
    given(**{name: t})
    need(t.device == q.device, "{} is on {}, but {} is on {}", name, t.device, other, q.device)


def _seed(q: Tensor, seed: Tensor, words: tuple[int, int, int] | None) -> None:
    """Raise unless it is a seed of dropout, or a word for each row in the shape `words`."""
    if words is None or seed.dtype != torch.int32 or seed.dim() != 3:
        integers(q, "dropout_seed", seed, torch.int64)
        need(seed.numel() == 1, "dropout_seed must have one element, got shape {}", seed.shape)
        return
    same_device(q, "dropout_seed", seed)
    message = "dropout_seed of int32 must have shape {}, a word for each row, got {}"
    need(seed.shape == words, message, words, tuple(seed.shape))


def integers(q: Tensor, name: str, t: Tensor, dtype: torch.dtype = torch.int32) -> None:
    """Raise unless the tensor has this dtype and is on query's device."""
    same_device(q, name, t)
    need(t.dtype == dtype, "{} must be {}, got {}", name, dtype, t.dtype, error=TypeError)


def floats(q: Tensor, name: str, t: Tensor, *also: torch.dtype) -> None:
    """Raise unless the tensor is on query's device, in query's dtype, float32 or one of `also`."""
    same_device(q, name, t)
    dtypes = dict.fromkeys((*also, q.dtype, torch.float32))
    if t.dtype not in dtypes:
        names = " or ".join(_plain(dtype) for dtype in dtypes)
        need(False, "{} must be {}, got {}", name, names, t.dtype, error=TypeError)
