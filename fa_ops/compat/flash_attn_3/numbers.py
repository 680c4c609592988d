"""Attention of e4m3 tensors.

Calls that have 8-bit products attend the numbers as they are. In the others the queries are widened
to bfloat16 and multiplied by the factors of both queries and keys, and the result by those of the
values, so that keys, values and caches stay as they are.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from fa_ops import checks
from fa_ops.api import attention_varlen
from fa_ops.compat.flash.cache import Caches
from fa_ops.compat.flash_attn_3.qv import check as check_qv
from fa_ops.ops.undifferentiable import undifferentiable

E4M3, WIDE = torch.float8_e4m3fn, torch.bfloat16
SCALES = "q_scale", "k_scale", "v_scale"
_said: set[str] = set()


class Widened:
    """Queries of e4m3 tensors in bfloat16, whose scores are those of the tensors and scales.

    Attributes:
        q: ``(..., Hq, D)``, for products with the 8-bit keys.
        qv: ``(..., Hq, Dv)``, for products with the 8-bit values; or ``None``.
    """

    def __init__(
        self, q: Tensor, qv: Tensor | None, keys_and_values: dict[str, Tensor],
        scales: dict[str, Tensor], rows: Tensor,
    ) -> None:  # fmt: skip
        """`scales` are those of :meth:`Scales.options`; `rows` says which row of them a token has.

        `rows` broadcasts to the tokens; rows behind the last one have factors of 1. Keys and
        values, by name, are only checked.
        """
        check(q, **keys_and_values)
        if qv is not None:
            check_qv(q, qv, [*keys_and_values.values()][1])
        factors = [_by_token(scales[name], rows, q.shape[-2]) for name in SCALES]
        wide = q.float() * factors[0]
        self.q = (wide * factors[1]).to(WIDE)
        self.qv = None if qv is None else (qv.float() * factors[0] * factors[2]).to(WIDE)
        self._values = factors[2]

    def result(self, out: Tensor) -> Tensor:
        """out ``(..., Hq, Dv)`` of the 8-bit values, times their factors."""
        return (out.float() * self._values).to(WIDE)


def _by_token(scale: Tensor, rows: Tensor, heads: int) -> Tensor:
    """The scale (1,) or (B, H) as a factor of tokens (..., heads, features)."""
    if scale.dim() == 1:
        return scale
    scale = torch.nn.functional.pad(scale, (0, 0, 0, 1), value=1.0)
    return scale[rows].repeat_interleave(heads // scale.shape[1], -1)[..., None]


def rows_of_tokens(ends: Tensor, tokens: int) -> Tensor:
    """The sequence of each packed token; for tokens behind all of them their number."""
    token = torch.arange(tokens, device=ends.device)
    return torch.searchsorted(ends[1:].contiguous(), token, right=True)


def say(level: int, **arguments: object) -> None:
    """Warn once of each of these that is given: with it products are not computed in 8 bits.

    `level` is the stack level of the caller. Compiled functions warn when they are traced.
    """
    for name, value in arguments.items():
        if value is not None:
            _warn_once(name, level + 1)


@torch.compiler.assume_constant_result
def _warn_once(name: str, level: int) -> None:
    if name not in _said:
        _said.add(name)
        warnings.warn(
            f"no kernel has 8-bit products with {name}: products of float8_e4m3fn tensors are "
            "computed in bfloat16, which takes about twice as long on a GPU",
            RuntimeWarning,
            stacklevel=level,
        )


def in_32_bits(x: Tensor) -> Tensor:
    """The tensor in float32 if its dtype is a smaller one of floating point."""
    return x.float() if x.is_floating_point() and x.itemsize < 4 else x


def check(q: Tensor, **keys_and_values: Tensor) -> None:
    """Raise TypeError or ValueError unless keys and values fit the e4m3 queries.

    The first are the keys, all in layouts that end with ``(H, D)``.
    """
    for name, x in keys_and_values.items():
        checks.same_device(q, name, x, "q")
        checks.need(x.dtype == q.dtype, "{} is {}, but q is {}", name, x.dtype, q.dtype,
                    error=TypeError)  # fmt: skip
    (Hq, D), (Hkv, Dk), (Hv, _) = (x.shape[-2:] for x in (q, *keys_and_values.values()))
    checks.heads(Hq, Hkv, Hv, D, Dk, *keys_and_values)


def of_used_parts(scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scales of a packing of the used parts of sequences, and of what lies between two."""
    return {n: s if s.dim() == 1 else s.repeat_interleave(2, 0)[:-1] for n, s in scales.items()}


def without_backward(inputs: tuple[Tensor | None, ...], result: tuple) -> tuple[Tensor, ...]:
    """The tensors of a result, whose backward pass raises if one of the inputs requires grad."""
    message = "attention of float8_e4m3fn tensors has no backward pass"
    return undifferentiable(message, [x for x in inputs if x is not None], *result)


def attend_numbers(
    q: Tensor, caches: Caches, lens: Tensor, ends: Tensor | None, longest: int | None, options: dict
) -> tuple[Tensor, Tensor]:
    """out and lse in the layout of q: rows ``(B, Sq, Hq, D)`` or packed ``(Tq, Hq, D)``.

    Args:
        ends: int32 ``(B + 1,)``, the cumulative numbers of packed queries; ``None``: rows.
        longest: upper bound on the number of queries of a packed sequence.
        options: those of :func:`fa_ops.attention_varlen`, and ``num_splits``, which is ignored.
    """
    rows, caches = q.shape[:2], caches.in_pages()
    options = {name: value for name, value in options.items() if name != "num_splits"}
    packed, longest = (q, longest) if ends is not None else (q.flatten(0, 1), rows[1])
    if ends is None:
        ends = torch.arange(rows[0] + 1, dtype=torch.int32, device=q.device) * rows[1]
    out, lse = attention_varlen(
        packed, caches.k, caches.v, ends, None, longest, kv_lens=lens, page_table=caches.table,
        return_lse=True, **options,
    )  # fmt: skip
    if packed is q:
        return out, lse
    return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1)


def attend_none(q: Tensor, caches: Caches, options: dict) -> None:
    """Raise what attention of packed queries over these caches would, by a call without rows."""
    none = torch.zeros(1, dtype=torch.int32, device=q.device)
    options = options | {n: options[n][:0] for n in SCALES if options[n].dim() > 1}
    attend_numbers(q[:0], caches._replace(table=caches.table[:0]), none[:0], none, 0, options)
