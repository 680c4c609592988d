"""Which backend runs a call, and why.

A call says which backend it wants; where it does not, `use_backend` does, then the environment
variable FA_OPS_BACKEND, and at last "auto": the first of the list below that can run the call. A
backend chosen by name never falls back to another.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from fa_ops.types import (
    Cache,
    Spec,
    is_decoding,
    is_long,
    is_prefill,
    rows_are_aligned,
    values_in_keys,
    without_new,
    writes,
)

BACKENDS = ("hopper", "triton", "cpu", "reference")
# What "auto" tries, by device: no call imports a kernel package that it has no use for.
AUTO = {"cuda": ("hopper", "triton"), "cpu": ("cpu",)}

_PACKAGES = ("triton",)  # that backends import

default: str | None = os.environ.get("FA_OPS_BACKEND") or None

_available: dict[str, str | None] = {}
_selected: dict[tuple, ModuleType] = {}


class use_backend:
    """The backend of the calls inside a `with` block that name none; "auto" lets each decide.

    The choice holds for the whole process, not per thread. Works in and around compiled code.

    Raises:
        ValueError: no backend has that name.

    Example:
        >>> with fa_ops.use_backend("reference"):
        ...     out = fa_ops.attention(q, k, v)
    """

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name

    def __enter__(self) -> None:
        global default
        self.previous = default
        default = self.name

    def __exit__(self, *_: object) -> None:
        global default
        default = self.previous


def check_name(name: str) -> None:
    """Raise ValueError unless a backend has that name."""
    if name not in BACKENDS and name != "auto":
        known = ", ".join(repr(one) for one in BACKENDS)
        raise ValueError(f"backend must be 'auto' or one of {known}, got {name!r}")


def select(q: Tensor, k: Tensor, v: Tensor, spec: Spec, backward: bool = False) -> ModuleType:
    """The backend that runs this call, or with `backward` its gradients.

    The answer is remembered, so a backend's `support_error` may depend on the rank, head
    dimensions, dtype and device of the inputs and on which features are used, on nothing else.
    Lengths decide two things alone: whether `types.is_long`, and whether a forward pass counts as
    decoding, which the hopper backend is asked about as `select_cache` does.

    Raises:
        ValueError: no backend has the name asked for.
        NotImplementedError: the backend asked for, or every one, refuses the call; the message
            says why.
    """
    name = spec[13] or default or "auto"
    decoding = not backward and _decodes(q, k, spec)
    layout = _layout(q, k, v, False) if decoding and _hopper_asked(name) else decoding
    q_shape, k_shape = q.shape, k.shape
    rank = len(q_shape)
    tokens = rank // 4 * 2  # 0 of packed tensors
    long = is_long(q_shape[tokens], k_shape[tokens])
    shape = (rank, q_shape[-1], v.shape[-1], q.dtype, q.device, long)
    key = (*_features(spec), *shape, name, layout)
    backend = _selected.get(key)
    if backend is None:
        ask = _decoding_refusal if decoding and name == "auto" else refusal
        backend = _selected[key] = _choose(name, q, lambda candidate: ask(candidate, q, k, v, spec))
    return backend


def _decodes(q: Tensor, k: Tensor, spec: Spec) -> bool:
    return q.dim() == 4 and is_decoding(q.shape[2], k.shape[2], spec)


def _features(spec: Spec) -> tuple:
    mask = spec.attn_mask
    return (
        None if mask is None else mask.dtype,
        spec.dropout_p > 0,
        spec.is_causal,
        spec.scale is not None and spec.scale <= 0,
        spec.window_left >= 0,
        spec.window_right >= 0,
        spec.softcap > 0,
        spec.alibi_slopes is not None,
        spec.sinks is not None,
        spec.kv_lens is not None,
        spec.key_ranges is not None,
        spec.deterministic,
    )


def select_cache(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> ModuleType:
    """The backend that attends a key-value cache, by the same rules.

    A `cache_error` may depend on dtypes, head dimensions, features and on `types.is_long`; that of
    the hopper backend also on what `_layout` says.
    """
    name = spec.backend or default or "auto"
    given = tuple(t is not None for t in cache[:7])
    keys = k.shape[2] if cache.page_table is None else cache.page_table.shape[1] * k.shape[1]
    shape = (q.dtype, k.dtype, q.device, q.shape[-1], v.shape[-1], is_long(q.shape[2], keys))
    split = (cache.num_splits > 0, cache.batch_invariant, cache.unified_max is not None)
    layout = _layout(q, k, v, cache.page_table is not None) if _hopper_asked(name) else None
    key = ("cache", name, *shape, layout, *split, *given, *_features(spec))
    backend = _selected.get(key)
    if backend is None:
        backend = _selected[key] = _choose(
            name, q, lambda candidate: cache_refusal(candidate, q, k, v, cache, spec)
        )
    return backend


def select_writer(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> ModuleType | None:
    """The backend that writes what is new, where another one then attends many queries sooner than
    it would; None where one does all, if any does."""
    if not (writes(cache) and is_prefill(q)):
        return None
    own = select_cache(q, k, v, cache, spec)
    if not hasattr(own, "cache_write"):
        return None
    return None if select_cache(q, k, v, without_new(cache), spec) is own else own


def _hopper_asked(name: str) -> bool:
    return name in ("auto", "hopper") and available_error("hopper") is None


def _layout(q: Tensor, k: Tensor, v: Tensor, paged: bool) -> tuple[int, int, bool, bool, bool]:
    """Page size, queries of a kv head, whether those fill a device, whether all rows start at
    multiples of 16 bytes, and whether the only head's keys hold its values."""
    heads = k.shape[2 if paged else 1]
    rows = q.shape[1] // heads * q.shape[2]
    many = rows > 16 and is_prefill(q)
    latent = heads == 1 and v.shape[-1] < k.shape[-1] and values_in_keys(k, v)
    return k.shape[1] if paged else 0, min(rows, 17), many, rows_are_aligned(q, k, v), latent


def cache_refusal(
    name: str, q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> str | None:
    """Why the backend cannot attend this cache; None where it can."""
    reason = available_error(name)
    if reason is not None:
        return reason
    own = getattr(load(name), "cache_error", None)
    return own(q, k, v, cache, spec) if own else "has no kernel for key-value caches yet"


def select_merge(outs: Tensor) -> ModuleType:
    """The backend of `merge_states`, by the same rules."""
    name = default or "auto"
    key = (outs.shape[-1], outs.dtype, outs.device, name)
    backend = _selected.get(key)
    if backend is None:
        rows = outs.reshape(-1, 1, outs.shape[-1])  # as packed tokens of one head
        backend = _selected[key] = _choose(
            name, rows, lambda candidate: _merge_refusal(candidate, rows)
        )
    return backend


def _merge_refusal(name: str, rows: Tensor) -> str | None:
    reason = refusal(name, rows, rows, rows, Spec())
    if reason is None and not hasattr(load(name), "merge_states"):
        return "has no kernel that merges"
    return reason


def _choose(name: str, q: Tensor, ask: Callable[[str], str | None]) -> ModuleType:
    check_name(name)
    reasons = {}
    for candidate in _candidates(name, q):
        reasons[candidate] = ask(candidate)
        if reasons[candidate] is None:
            for passed in reasons:
                _warn_if_missing(passed)
            return load(candidate)
    if name != "auto":
        raise NotImplementedError(f"backend {name!r} cannot run this call: {reasons[name]}")
    lines = "".join(f"\n  {candidate}: {reason}" for candidate, reason in reasons.items())
    raise NotImplementedError(f"no backend can run this call on {q.device}:{lines}")


@functools.cache
def _warn_if_missing(name: str) -> None:
    """Warn that a backend made for this GPU cannot run on this machine, once per process."""
    reason = available_error(name)
    if reason is None:
        return
    try:
        is_for_this_gpu = getattr(load(name), "is_for_this_gpu", bool)()
    except ImportError:
        is_for_this_gpu = True  # it cannot be asked
    if is_for_this_gpu:
        warnings.warn(
            f"fa_ops' {name!r} backend, the fastest on this GPU, is not available: {reason}. "
            "Slower kernels run instead; backend=, use_backend or FA_OPS_BACKEND choose one "
            "without this warning.",
            RuntimeWarning,
            stacklevel=2,
        )


def _candidates(name: str, q: Tensor) -> tuple[str, ...]:
    return AUTO.get(q.device.type, ()) if name == "auto" else (name,)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"fa_ops.backends.{name}")


def available_error(name: str) -> str | None:
    """Why the backend cannot run on this machine at all, or None. Asked once per process."""
    if name not in _available:
        try:
            _available[name] = load(name).available_error()
        except ImportError as error:
            remedy = f"; pip install {error.name}" if error.name in _PACKAGES else ""
            _available[name] = f"cannot be imported: {error}{remedy}"
    return _available[name]


def refusal(name: str, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> str | None:
    """Why the backend cannot run this call; None where it can."""
    return available_error(name) or load(name).support_error(q, k, v, spec)


def _decoding_refusal(name: str, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> str | None:
    """The same for few queries against many keys: a kernel that cuts the keys, or another tier."""
    if name == "hopper":
        return cache_refusal(name, q, k, v, Cache(), spec)
    return refusal(name, q, k, v, spec)


def backends() -> list[tuple[str, str | None]]:
    """Every backend, with why it cannot run on this machine, or None where it can."""
    return [(name, available_error(name)) for name in BACKENDS]


class CallExplanation(NamedTuple):
    """Which backend runs a call (None: none can), and what each of them says: None where it can."""

    backend: str | None
    reasons: dict[str, str | None]

    def __str__(self) -> str:
        lines = [f"backend: {self.backend or 'none'}"]
        lines += [f"  {name}: {reason or 'can run this'}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def explain(q: Tensor, k: Tensor, v: Tensor, **options) -> CallExplanation:
    """Which backend would run this call, and why not the others; `options` are `Spec`'s fields.

    Nothing is computed. Raises ValueError for the name of an unknown backend.

    Example:
        >>> print(dispatch.explain(q, k, v, is_causal=True))
        backend: cpu
          hopper: needs a CUDA device
          triton: ...
          cpu: can run this
          reference: can run this
    """
    spec = Spec(**options)
    name = spec.backend or default or "auto"
    check_name(name)
    ask = _decoding_refusal if name == "auto" and _decodes(q, k, spec) else refusal
    reasons = {candidate: ask(candidate, q, k, v, spec) for candidate in BACKENDS}
    chosen = next((one for one in _candidates(name, q) if reasons[one] is None), None)
    return CallExplanation(chosen, reasons)
