"""quantized_attention, and what attention does with e4m3 tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from fa_ops.call.call import QUANTIZED
from fa_ops.call.options import Operands, dtype_name, new_operands
from fa_ops.call.python_types import Window, need_bool, read_scale, refuse_unknown, sides
from fa_ops.ops import autocast, quantized
from fa_ops.ops.eager import PublicFunction, run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fa_ops.call.python_types import QuantizedOptions

_QUANTIZED = PublicFunction(
    QUANTIZED, lambda call, with_lse: quantized.SCHEMA, autocast.cast_quantized,
    refuse_gradients=quantized.refuse_gradients,
)  # fmt: skip


@overload
def quantized_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
    *, return_lse: Literal[False] = False, **options: Unpack[QuantizedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def quantized_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
    *, return_lse: Literal[True], **options: Unpack[QuantizedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def quantized_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
    *, return_lse: bool, **options: Unpack[QuantizedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def quantized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    qk_dtype: torch.dtype = torch.int8,
    smooth_key: bool = True,
    rotate: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention whose two products are computed with 8-bit numbers, for inference.

    Query, key and value are quantised by the call itself: query with a scale for each token, key
    less its mean over tokens with a scale for each 64 tokens, value in e4m3 with a scale for each
    channel; softmax weights are rounded to e4m3. The page "Semantics" says exactly what is
    computed. The error is about 4 % of the result's root mean square for Gaussian inputs.

    Shape legend: ``B`` batch, ``Hq`` and ``Hkv`` query and key heads (``Hkv`` divides ``Hq``),
    ``Sq`` and ``Sk`` lengths, ``D`` head dimension, ``Dv`` value head dimension.

    Args:
        query: ``(B, Hq, Sq, D)``, float16, bfloat16 or float32.
        key: ``(B, Hkv, Sk, D)``, query's dtype.
        value: ``(B, Hkv, Sk, Dv)``, query's dtype.
        is_causal: as in :func:`attention`, aligned at the bottom right.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``; a tensor as in
            :func:`attention`.
        window: ``(left, right)`` as in :func:`attention`.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off. With a softcap the mean
            of the keys is not subtracted, as tanh would change.
        sinks: ``(Hq,)``, as in :func:`attention`.
        kv_lens: int32 ``(B,)``, as in :func:`attention`.
        key_ranges: int32 ``(B or 1, Hq or 1, Sq or 1, 2)``, as in :func:`attention`.
        qk_dtype: the dtype of the quantised query and key, ``torch.int8`` or
            ``torch.float8_e4m3fn``. int8 is more accurate.
        smooth_key: subtract the mean of the keys before they are quantised; this changes no softmax
            weight, and lse is corrected for it.
        rotate: rotate query and key by one Hadamard matrix, which spreads outliers of one channel
            over all and changes no product.
        return_lse: also return the logarithm of the softmax's denominator.
        backend: as in :func:`attention`.
        **unknown: refused.

    Returns:
        ``out`` ``(B, Hq, Sq, Dv)`` in query's dtype, laid out ``(B, Sq, Hq, Dv)`` in memory; with
        ``return_lse`` ``(out, lse)``, ``lse`` ``(B, Hq, Sq)`` natural, float32.

    Raises:
        ValueError: shapes, devices or values that do not fit each other; an argument that requires
            grad, as there is no gradient.
        TypeError: a dtype or Python type that is not accepted.
        NotImplementedError: no backend, or not the one named, can run the call.

    Source: Zhang et al., SageAttention2, https://arxiv.org/abs/2411.10958 (int8 products, keys
    without their mean); Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608 (rotation).

    Examples:
        >>> q, k, v = (torch.randn(1, heads, 512, 64) for heads in (8, 2, 2))
        >>> fa_ops.quantized_attention(q, k, v, is_causal=True).shape
        torch.Size([1, 8, 512, 64])
    """
    if unknown:
        refuse_unknown(quantized_attention, unknown)
    if type(return_lse) is not bool:
        need_bool("return_lse", return_lse)
    if qk_dtype is None:
        raise TypeError("qk_dtype must be a torch.dtype, got None: pass torch.int8")
    if scale is not None and type(scale) is not float:
        scale = read_scale(scale)
    operands = new_operands((
        None, None, sinks, kv_lens, key_ranges, None, None, None, None, None, None, None, None,
        None, None, None, None, None, None, None, None, None, None, None,
    ))  # fmt: skip
    left, right = (-1, -1) if window is None else sides(window)
    scalars = (
        is_causal, 0.0, scale, left, right, softcap, False, backend, qk_dtype, smooth_key, rotate
    )  # fmt: skip
    return run(query, key, value, operands, scalars, _QUANTIZED, return_lse)


def scaled_attention(
    query, key, value, is_causal, scale, window, softcap, operands: Operands, return_lse,
    backend, **refused,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` of e4m3 tensors with their scales; of `refused` all must have their defaults."""
    refuse_given(refused)
    refuse_missing(operands)
    if isinstance(query, Tensor) and query.dtype.itemsize > 1:
        raise TypeError(
            f"q_scale is for tensors in float8_e4m3fn, but query is {dtype_name(query.dtype)}: "
            "pass query / q_scale as float8_e4m3fn, or call quantized_attention without scales"
        )
    scalars = (is_causal, 0.0, scale, *sides(window), softcap, False, backend, None, False, False)
    return run(query, key, value, operands, scalars, _QUANTIZED, return_lse)


def refuse_given(arguments: dict[str, tuple]) -> None:
    """Raise ValueError unless all of these, (given, default) by name, have their defaults."""
    for name, (value_given, default) in arguments.items():
        is_number = isinstance(value_given, int | float)
        if value_given is not default and not (is_number and value_given == default):
            raise ValueError(
                f"{name} must not be given with q_scale, k_scale and v_scale: leave it out, or "
                "pass tensors of 16 bits without scales"
            )


def refuse_missing(operands: Operands) -> None:
    """Raise ValueError unless all three scales are given."""
    scales = "q_scale", "k_scale", "v_scale"
    missing = [name for name in scales if getattr(operands, name) is None]
    if missing:
        raise ValueError(
            f"q_scale, k_scale and v_scale go together: {missing[0]} is missing, pass "
            "torch.ones(1) for numbers without a scale"
        )
