"""Autocast: the tensors that it casts, of operators and of calls that leave the dispatcher out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fa_ops.call.options import NO_OPERANDS, Operands
from fa_ops.ops import (
    dense,
    fully_masked_rows,
    kv_cache,
    library,
    programmed,
    quantized,
    selected,
    varlen,
)

_DEVICES = ("cpu", "cuda")
_WIDE = (torch.float32, torch.float64)  # may be added to float32 scores as they are


def below(
    function: Callable, cast: Callable, query: Tensor, key: Tensor, value: Tensor,
    operands: Operands, *options,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Call `function` with the tensors that autocast casts, and autocast switched off.

    `cast(dtype, query, key, value, operands)` is one of the functions below, and `function` takes
    the same tensors followed by `options`. It refuses what is missing by name.
    """
    is_missing = query is None or key is None or value is None
    device = "" if is_missing else query.device.type
    if device in _DEVICES and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value, operands = cast(dtype, query, key, value, operands)
    with library.without_autocast():
        return function(query, key, value, operands, *options)


def cast_attention(
    dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, operands: Operands
) -> tuple:
    """query, key and value in autocast's dtype, and a mask or sinks in half precision too."""
    if operands is not NO_OPERANDS:
        operands = Operands(*[t if t is None else _cast(t, dtype, _WIDE) for t in operands])
    return _cast(query, dtype), _cast(key, dtype), _cast(value, dtype), operands


def cast_cached(
    dtype: torch.dtype, query: Tensor, key_cache: Tensor, value_cache: Tensor, operands: Operands
) -> tuple:
    """query and new keys in the dtype of the cache, which is written in place."""
    if key_cache.dtype.itemsize > 1:  # fp8 has no arithmetic of its own
        dtype = key_cache.dtype
    if operands.new_key is not None:
        new = _cast(operands.new_key, dtype), _cast(operands.new_value, dtype)
        operands = operands._replace(new_key=new[0], new_value=new[1])
    return _cast(query, dtype), key_cache, value_cache, operands


def cast_quantized(
    dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, operands: Operands
) -> tuple:
    """query, key and value, unless they are 8-bit, in autocast's dtype, and sinks of 16 bits."""
    operands = operands._replace(sinks=_cast(operands.sinks, dtype, _WIDE))
    return _cast(query, dtype), _cast(key, dtype), _cast(value, dtype), operands


def _cast(t: object, dtype: torch.dtype, kept: tuple = (torch.float64,)) -> object:
    """A tensor in autocast's dtype, unless autocast would leave it alone, as all of 8 bits."""
    if not isinstance(t, Tensor) or t.dtype is dtype or t.dtype in kept:
        return t
    return t.to(dtype) if t.dtype.is_floating_point and t.dtype.itemsize > 1 else t


def _attention(operator: torch._ops.OpOverload, device: str) -> Callable:
    """The Autocast kernel of an operator whose tensors `cast_attention` casts."""

    def kernel(query, key, value, *args, **options):
        dtype = torch.get_autocast_dtype(device)
        query, key, value, _ = cast_attention(dtype, query, key, value, NO_OPERANDS)
        args = [_cast(t, dtype, _WIDE) for t in args]
        options = {name: _cast(t, dtype, _WIDE) for name, t in options.items()}
        with library.without_autocast():
            return operator(query, key, value, *args, **options)

    return kernel


def _cached(operator: torch._ops.OpOverload, device: str) -> Callable:
    """The same for calls over a cache."""
    new = 2 if operator is kv_cache.APPEND else 0

    def kernel(query, key_cache, value_cache, *args, **options):
        dtype, operands = torch.get_autocast_dtype(device), NO_OPERANDS
        if new:
            operands = Operands(new_key=args[0], new_value=args[1])
        query, _, _, operands = cast_cached(dtype, query, key_cache, value_cache, operands)
        args = (operands.new_key, operands.new_value)[:new] + args[new:]
        with library.without_autocast():
            return operator(query, key_cache, value_cache, *args, **options)

    return kernel


def _quantized(operator: torch._ops.OpOverload, device: str) -> Callable:
    """The same for products of 8-bit numbers."""

    def kernel(query, key, value, *args, **options):
        dtype, operands = torch.get_autocast_dtype(device), Operands(sinks=options.get("sinks"))
        query, key, value, operands = cast_quantized(dtype, query, key, value, operands)
        with library.without_autocast():
            return operator(query, key, value, *args, **options | {"sinks": operands.sinks})

    return kernel


_KERNELS = {
    dense.ATTENTION: _attention,
    dense.WITH_LSE: _attention,
    fully_masked_rows.OPERATOR: _attention,
    varlen.VARLEN: _attention,
    programmed.PROGRAMMED_ATTENTION: _attention,
    programmed.WITH_MAX: _attention,
    selected.BLOCKS: _attention,
    selected.TOKENS: _attention,
    kv_cache.READ: _cached,
    kv_cache.APPEND: _cached,
    quantized.QUANTIZED_ATTENTION: _quantized,
}
for _operator, _kernel_of in _KERNELS.items():
    for _device in _DEVICES:
        _key = f"Autocast{_device.upper()}"
        library.lib.impl(_operator._opname, _kernel_of(_operator, _device), _key)
