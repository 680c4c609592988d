"""flash_attn.ops.triton.rotary: rotary embedding without autograd, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.rotary import rotated
from fa_ops.call import checks
from fa_ops.call.python_types import need_int, need_tensor
from fa_ops.compat.flash import DENSE, PACKED, check_list, count, flag, has_shape, shape


@torch.no_grad()
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the first R features of each head, computed in float32.

    Args:
        x: ``(B, S, H, D)``, or ``(T, H, D)`` with ``cu_seqlens``.
        cos: ``(positions, R / 2)``. Tokens at positions behind the last one are not rotated.
        sin: ``(positions, R / 2)``.
        seqlen_offsets: position of the first token, of all sequences or of each ``(B,)``.
        cu_seqlens: int32 ``(B + 1,)``, the cumulative lengths of packed sequences.
        max_seqlen: upper bound on a packed sequence's length, needed with ``cu_seqlens``.
        interleaved: features pair up as (0, 1), (2, 3), ...; else as (0, R / 2), ....
        inplace: write the result into x.
        conjugate: rotate the other way.

    Returns:
        x, or a new tensor of its shape.

    Raises:
        ValueError: the tables do not fit each other, x, or its tokens.
        TypeError: a dtype or Python type that is not accepted.
    """
    interleaved, inplace = flag("interleaved", interleaved), flag("inplace", inplace)
    conjugate = flag("conjugate", conjugate)
    check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    cos = torch.nn.functional.pad(cos, (0, 0, 0, 1), value=1.0)
    sin = torch.nn.functional.pad(-sin if conjugate else sin, (0, 0, 0, 1))
    positions = _positions(x, seqlen_offsets, cu_seqlens).clamp(0, len(cos) - 1)
    rows = x if cu_seqlens is None else x[None]
    found = rotated(rows.transpose(1, 2), cos, sin, interleaved, positions).transpose(1, 2)
    found = found if cu_seqlens is None else found[0]
    return x.copy_(found) if inplace else found.contiguous()


def _positions(x: Tensor, offsets: int | Tensor, ends: Tensor | None) -> Tensor:
    """The positions (B, S) of tokens, or (1, T) of packed ones."""
    if ends is None:
        offsets = offsets.view(-1, 1) if isinstance(offsets, Tensor) else offsets
        positions = torch.arange(x.shape[1], device=x.device) + offsets
        return positions.expand(x.shape[0], -1)
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    sequence = sequence.clamp(max=len(ends) - 2)
    offsets = offsets[sequence] if isinstance(offsets, Tensor) else offsets
    return (token - ends[sequence] + offsets)[None]


def check(
    x: Tensor, cos: Tensor, sin: Tensor, offsets: int | Tensor, ends: Tensor | None = None,
    longest: int | None = None, names: tuple[str, str, str] = ("x", "cos", "sin"),
) -> None:  # fmt: skip
    """Raise ValueError or TypeError for arguments that `apply_rotary` cannot rotate.

    `names` are those of the first three in messages.
    """
    of_x, of_cos, of_sin = names
    for name, t in zip(names, (x, cos, sin)):
        need_tensor(name, t)
        checks.same_device(x, name, t, of_x)
        checks.need(t.is_floating_point(), "{} must be floating point, got {}", name, t.dtype,
                    error=TypeError)  # fmt: skip
    if not isinstance(offsets, Tensor):
        need_int("seqlen_offsets", offsets, "an int or a Tensor")
    if longest is not None:
        count("max_seqlen", longest, "an int or None")
    if ends is not None and longest is None:
        raise ValueError("max_seqlen must be given with cu_seqlens: pass the longest length")
    shape(DENSE if ends is None else PACKED, **{of_x: x})
    _check_sequences(x, offsets, ends)
    if cos.dim() != 2 or sin.shape != cos.shape:
        shapes = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        both = f"{of_cos} and {of_sin} must both have shape (positions, R / 2)"
        raise ValueError(f"{both}, got {shapes}: pass an angle for each pair of rotated features")
    if 2 * cos.shape[1] > x.shape[-1]:
        features = f"{2 * cos.shape[1]} features, but {of_x} has {x.shape[-1]}"
        raise ValueError(f"{of_cos} is for {features}: pass {of_cos}[:, :{x.shape[-1] // 2}]")
    needed = x.shape[1] if ends is None else longest
    needed += 0 if isinstance(offsets, Tensor) else offsets
    if needed > cos.shape[0]:
        raise ValueError(
            f"{of_cos} has {cos.shape[0]} positions, but {needed} are needed: pass a row for each"
        )


def _check_sequences(x: Tensor, offsets: int | Tensor, ends: Tensor | None) -> None:
    if ends is not None:
        check_list("cu_seqlens", ends)
        checks.same_device(x, "cu_seqlens", ends, "x")
    if isinstance(offsets, Tensor):
        is_integer = offsets.dtype in (torch.int32, torch.int64)
        checks.need(is_integer, "seqlen_offsets must be int32 or int64, got {}", offsets.dtype,
                    error=TypeError)  # fmt: skip
        rows = x.shape[0] if ends is None else ends.shape[0] - 1
        remedy = "pass an int, or one for each sequence"
        has_shape("seqlen_offsets", offsets, (rows,), remedy)
        checks.same_device(x, "seqlen_offsets", offsets, "x")
