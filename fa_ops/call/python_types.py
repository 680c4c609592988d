"""Types of Python arguments, and the operators' arguments made of them.

These checks are those that the schema of an operator cannot express. Shapes, dtypes, devices and
values are checked in `checks`.
"""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import NoReturn, TypedDict

import torch
from torch import Tensor

from fa_ops.call import backend_option
from fa_ops.call.call import CACHED, SELECTED, Call, Signature
from fa_ops.call.options import NO_OPERANDS, Operands, bounded, dtype_name
from fa_ops.tracing import can_read, is_compiling, is_differentiated, is_traced_by_dynamo

Window = tuple[int | None, int | None]
ScoreMod = Callable[..., Tensor]
MaskMod = Callable[..., Tensor]


# The keyword arguments of the public functions without `return_lse`, for the overloads by it.
# They are here once for three signatures; what the arguments mean is in the functions' docstrings.


class ScoreOptions(TypedDict, total=False):
    """Those of every public function."""

    scale: float | Tensor | None
    window: Window | None
    softcap: float
    sinks: Tensor | None
    backend: str | None


class DenseOptions(ScoreOptions, total=False):
    """Those of `attention`, without `return_aux`."""

    alibi_slopes: Tensor | None
    kv_lens: Tensor | None
    key_ranges: Tensor | None
    deterministic: bool
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    mask_blocks: Tensor | None
    enable_gqa: bool


class FlexOptions(TypedDict, total=False):
    """Those of `flex_attention`, without `return_aux`."""

    mask_mod: MaskMod | None
    buffers: Sequence[Tensor]
    is_causal: bool
    window: Window | None
    key_ranges: Tensor | None
    kv_lens: Tensor | None
    sinks: Tensor | None
    deterministic: bool
    backend: str | None


class PackedOptions(ScoreOptions, total=False):
    """Those of `attention_varlen`."""

    alibi_slopes: Tensor | None
    kv_lens: Tensor | None
    page_table: Tensor | None
    deterministic: bool
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


class ShardedCacheOptions(ScoreOptions, total=False):
    """Those of `attention_with_sharded_kv_cache`, without what concerns the processes."""

    key: Tensor | None
    value: Tensor | None
    alibi_slopes: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    num_splits: int
    batch_invariant: bool


class CachedOptions(ShardedCacheOptions, total=False):
    """Those of `attention_with_kv_cache`."""

    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    key_ranges: Tensor | None
    unified_max: Tensor | None


class QuantizedOptions(ScoreOptions, total=False):
    """Those of `quantized_attention`."""

    kv_lens: Tensor | None
    key_ranges: Tensor | None
    qk_dtype: torch.dtype
    smooth_key: bool
    rotate: bool


class SelectedTokensOptions(TypedDict, total=False):
    """Those of `attention_selected_tokens`."""

    counts: Tensor | None
    scale: float | Tensor | None
    sinks: Tensor | None
    backend: str | None


class SelectedOptions(SelectedTokensOptions, total=False):
    """Those of `attention_selected`."""

    block_size: int
    query_block: int
    is_causal: bool
    key_ranges: Tensor | None
    cu_seqlens: Tensor | None
    deterministic: bool


class ContextParallelOptions(ScoreOptions, total=False):
    """Those of `context_parallel_attention`, but for its layout and what concerns the processes."""

    is_causal: bool
    dropout_p: float
    alibi_slopes: Tensor | None
    kv_lens: Tensor | None
    key_ranges: Tensor | None
    cu_seqlens: Tensor | None
    deterministic: bool


_NAMES = ("query", "key", "value")
_FLAGS = (
    "is_causal", "deterministic", "rotary_interleaved", "batch_invariant", "smooth_key", "rotate"
)  # fmt: skip
_SHOWN = {"new_key": "key", "new_value": "value"}  # the names of operands in public functions
_INT = (int, torch.SymInt, numbers.Integral)
_BOOL = (bool, torch.SymBool)
_SYMBOLIC = (torch.SymInt, torch.SymFloat)


def checked_call(
    signature: Signature, query: Tensor, key: Tensor, value: Tensor, operands: Operands,
    scalars: tuple,
) -> Call:  # fmt: skip
    """The call with these arguments, the types of Python values checked.

    Numbers are floats and ints afterwards, and the backend is the one that is chosen now.
    """
    names = ("query", "key_cache", "value_cache") if signature is CACHED else _NAMES
    for name, t in zip(names, (query, key, value)):
        need_tensor(name, t)
    named = () if operands is NO_OPERANDS else zip(Operands._fields, operands)
    for name, t in named:
        if t is not None or name in signature.required:
            need_tensor(_SHOWN.get(name, name), t)
    if operands.cu_seqlens_q is not None and operands.page_table is None:
        need_tensor("cu_seqlens_k", operands.cu_seqlens_k)
    if (operands.new_key is None) != (operands.new_value is None):
        given, missing = ("key", "value") if operands.new_value is None else ("value", "key")
        raise ValueError(
            f"key and value must be given together, got {given} without {missing}: pass both, or "
            "neither where nothing is appended"
        )
    call = signature.call(query, key, value, operands, scalars)
    options, changes = call.options, {}
    for name in _FLAGS:
        flag = getattr(options, name)
        if type(flag) is not bool:
            need_bool(name, flag)
    if options.scale is not None and type(options.scale) is not float:
        changes["scale"] = need_number("scale", options.scale)
    if type(options.softcap) is not float:
        changes["softcap"] = need_number("softcap", options.softcap)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        longest = getattr(options, name)
        if longest is not None:
            changes[name] = need_int(name, longest, "an int or None")
    if type(options.num_splits) is not int or options.num_splits:
        changes["num_splits"] = need_int("num_splits", options.num_splits)
    if signature is SELECTED:
        for name in ("block_size", "query_block"):
            changes[name] = need_int(name, getattr(options, name))
    dtype = options.qk_dtype
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"qk_dtype must be a torch.dtype, got {dtype!r}: pass torch.int8")
    backend = options.backend
    if backend is None:
        backend = backend_option.chosen()
    if backend is not None:
        backend_option.check_name(backend)
    if backend is not options.backend:
        changes["backend"] = backend
    return call._replace(options=options._replace(**changes)) if changes else call


def checked_packing(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor, int | None, int | None]:
    """The borders and longest lengths of packed sequences, types checked."""
    need_tensor("cu_seqlens_q", cu_seqlens_q)
    need_tensor("cu_seqlens_k", cu_seqlens_k)
    if max_seqlen_q is not None:
        max_seqlen_q = need_int("max_seqlen_q", max_seqlen_q, "an int or None")
    if max_seqlen_k is not None:
        max_seqlen_k = need_int("max_seqlen_k", max_seqlen_k, "an int or None")
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


def sides(window: Window | None) -> tuple[int, int]:
    """The sides of a window, -1 where they exclude no key."""
    if window is None:
        return -1, -1
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(
            f"window must be a pair (left, right), got {window!r}: as (5, 0) for the 5 keys before "
            "each query"
        )
    for side in window:
        if side is not None and not is_int(side):
            raise TypeError(f"window must hold ints or None, got {window!r}: None is unbounded")
    left, right = window
    return _side(left), _side(right)


def _side(side: int | None) -> int:
    if side is None:
        return -1
    side = bounded(side if isinstance(side, torch.SymInt) else int(side))
    if side < -(2**63):
        raise ValueError(
            f"window must hold integers of 64 bits, got {_short(side)}: None is unbounded"
        )
    return side


# The names of other libraries, and those here.
_OTHER_NAMES = {
    "causal": "is_causal", "dropout": "dropout_p", "mask": "attn_mask", "attn_bias": "attn_mask",
    "attention_mask": "attn_mask", "softmax_scale": "scale", "sm_scale": "scale",
    "scaling": "scale", "window_size": "window", "sliding_window": "window",
    "logits_soft_cap": "softcap", "s_aux": "sinks", "learnable_sink": "sinks",
    "return_attn_probs": "return_lse", "return_softmax_lse": "return_lse",
    "need_weights": "return_lse", "block_table": "page_table", "block_tables": "page_table",
    "cache_seqlens": "kv_lens", "seqused_k": "kv_lens", "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_kv": "max_seqlen_k", "k_cache": "key_cache", "v_cache": "value_cache",
    "k": "key", "v": "value", "q_descale": "q_scale", "k_descale": "k_scale",
    "v_descale": "v_scale",
}  # fmt: skip


def refuse_unknown(function: Callable, unknown: dict[str, object]) -> NoReturn:
    """Raise TypeError for arguments that a public function does not have, with what was meant."""
    name = next(iter(unknown))
    known = inspect.signature(function).parameters
    meant = _OTHER_NAMES.get(name)
    if meant not in known:
        meant = next(iter(difflib.get_close_matches(name, known.keys() - {"unknown"}, 1)), None)
    remedy = "" if meant is None else f": did you mean {meant}?"
    if name == "enable_gqa":
        remedy = ": leave it out, as heads may always form groups"
    elif meant == "return_lse":
        remedy = ": did you mean return_lse? It returns lse; weights are never stored"
    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{remedy}")


def need_int(name: str, value: object, kind: str = "an int") -> int:
    """The value, of Python's own type."""
    if not is_int(value):
        raise TypeError(f"{name} must be {kind}, got {value!r}{_item(name, value)}")
    if isinstance(value, torch.SymInt):
        return value
    value = int(value)
    if not is_compiling() and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be an integer of 64 bits, got {_short(value)}")
    return value


def is_int(value: object) -> bool:
    """Whether it is an int of Python, of torch.compile or of NumPy, and not a bool."""
    return isinstance(value, _INT) and not isinstance(value, bool)


def _short(value: int) -> str:
    return str(value) if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"


def _item(name: str, value: object) -> str:
    return f": pass {name}.item()" if isinstance(value, Tensor) and value.dim() == 0 else ""


def need_bool(name: str, value: object) -> None:
    """Raise TypeError unless the value is a bool of Python or of torch.compile."""
    if not isinstance(value, _BOOL):
        raise TypeError(f"{name} must be a bool, got {value!r}: pass True or False")


def need_number(name: str, value: object) -> float:
    """The value as a float, or a symbol; raises TypeError for a bool, a fraction or no number."""
    if type(value) is float or isinstance(value, _SYMBOLIC):
        return value
    is_float = isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational)
    if not is_float and not is_int(value):
        raise TypeError(f"{name} must be a number, got {value!r}{_item(name, value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float, got {_short(value)}") from None


def read_scale(scale: object) -> object:
    """The scale, or in place of a tensor without dimensions its value, for which a GPU is awaited.

    Raises TypeError for other tensors, and where a value cannot be read or a derivative by it is
    asked for.
    """
    if not isinstance(scale, Tensor):
        return scale
    if scale.dim() or scale.dtype == torch.bool or scale.is_complex():
        raise TypeError(
            "scale must be a number, or a tensor with one and without dimensions, got one of "
            f"shape {tuple(scale.shape)} and {dtype_name(scale.dtype)}: pass scale.item(), or "
            "multiply query by it"
        )
    remedy = "multiply query by it, and pass scale=1.0"
    if not is_traced_by_dynamo() and is_differentiated(scale):
        raise TypeError(
            f"scale must not require grad, as attention has no gradient by it: {remedy}"
        )
    if not can_read(scale, waiting=True):
        raise TypeError(
            "scale must be a number where the value of a tensor cannot be read, as on the meta "
            f"device and under torch.compile, torch.vmap or CUDA graph capture: {remedy}"
        )
    return float(scale)


def probability(value: object) -> float:
    """The probability of dropout; False is 0, as SDPA takes it."""
    return need_number("dropout_p", 0.0 if value is False else value)


def need_tensor(name: str, value: object) -> Tensor:
    """The value, if it is a Tensor with strides or stands for one; raises TypeError if not."""
    if isinstance(value, Tensor):
        if value.layout not in (torch.strided, torch.jagged):
            raise TypeError(
                f"{name} must be a strided Tensor, got one of {value.layout}: pass "
                f"{name}.to_dense()"
            )
        if value.is_nested and value.layout is torch.strided:
            raise TypeError(f"{name} must be a Tensor, or a nested one with layout=torch.jagged, "
                            "got a nested one of torch.strided: pass torch.nested.nested_tensor("
                            f"{name}.unbind(), layout=torch.jagged)")  # fmt: skip
    elif not is_proxy(value):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a Tensor, got {kind}{_as_tensor(name, value)}")
    return value


# The tensors of integers, with the shapes that a single int stands for.
_INTEGERS = {
    "kv_lens": "(B,)", "page_table": None, "cu_seqlens_q": None, "cu_seqlens_k": None,
    "key_ranges": None, "mask_blocks": None,
}  # fmt: skip


def _as_tensor(name: str, value: object) -> str:
    """How a value becomes a tensor, after a colon."""
    if is_int(value) and _INTEGERS.get(name) is not None:
        return f": pass torch.full({_INTEGERS[name]}, {name}, dtype=torch.int32)"
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        kind = ", dtype=torch.int32" if name in _INTEGERS else ""
        return f": pass torch.tensor({name}{kind})"
    return ""


def is_proxy(value: object) -> bool:
    """Whether it stands for a tensor, as in `torch.fx.symbolic_trace`; operators record it."""
    return hasattr(type(value), "__torch_function__") and not isinstance(value, Tensor)
