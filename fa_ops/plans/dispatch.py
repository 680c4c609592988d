"""The choice of the backend that runs a call.

"auto" is the first backend of the list for the call's device that supports the call. A backend that
was named never falls back to another one.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call.backend_option import BACKENDS, check_name, chosen
from fa_ops.call.call import Call
from fa_ops.call.options import MASK_BLOCK, Operands

# The backends that "auto" tries on each device; no others are imported.
AUTO = {"cuda": ("hopper", "triton"), "cpu": ("cpu",)}

_SKIPPING = ("hopper", "triton", "cpu")  # the backends that skip tiles by `mask_blocks`
_SUMMARISING = ("triton", "cpu")  # those that make `mask_blocks` of a mask

# What merges partial results for a backend that has no kernel for it.
_MERGING = {"hopper": "triton"}

_PACKAGES = ("triton",)  # third-party packages that backends import

_available: dict[str, str | None] = {}


def choose(call: Call) -> ModuleType:
    """The backend that runs this call: the one asked for, or the first that supports it.

    Raises as `choose_for` does.
    """
    return choose_for(call.backend, call.query.device, lambda backend: backend.supports(call))


def choose_for(
    name: str, device: torch.device, refusal: Callable[[ModuleType], str | None]
) -> ModuleType:
    """The backend with this name, or for "auto" the first of the device without a `refusal`.

    Raises:
        ValueError: no backend has the name asked for.
        NotImplementedError: the backend asked for, or every one, refuses the call; the message
            says why.
    """
    check_name(name)
    reasons = {}
    candidates = AUTO.get(device.type, ()) if name == "auto" else (name,)
    for candidate in candidates:
        reason = available_error(candidate)
        backend = load(candidate) if reason is None else None
        reasons[candidate] = reason or refusal(backend)
        if reasons[candidate] is None:
            for preferred in reasons:
                _warn_if_missing(preferred)
            return backend
    if name != "auto":
        raise NotImplementedError(f"backend {name!r} cannot run this call: {reasons[name]}")
    lines = "".join(f"\n  {candidate}: {reason}" for candidate, reason in reasons.items())
    raise NotImplementedError(f"no backend can run this call on {device}:{lines}")


@functools.cache
def _warn_if_missing(name: str) -> None:
    """Warn that a backend made for this GPU cannot run on this machine, once per process."""
    reason = available_error(name)
    if reason is None:
        return
    try:
        is_for_this_gpu = getattr(load(name), "is_for_this_gpu", bool)()
    except ImportError:
        is_for_this_gpu = True  # the module that could tell cannot be imported
    if is_for_this_gpu:
        warnings.warn(
            f"fa_ops' {name!r} backend, the fastest on this GPU, is not available: {reason}. "
            "Slower kernels run instead; backend=, use_backend or FA_OPS_BACKEND choose one "
            "without this warning.",
            RuntimeWarning,
            stacklevel=2,
        )


def load(name: str) -> ModuleType:
    """The backend's module."""
    return importlib.import_module(f"..backends.{name}", __package__)


def available_error(name: str) -> str | None:
    """Why the backend cannot run on this machine at all, or None. Determined once per process."""
    if name not in _available:
        try:
            _available[name] = load(name).available_error()
        except ImportError as error:
            remedy = f"; pip install {error.name}" if error.name in _PACKAGES else ""
            _available[name] = f"cannot be imported: {error}{remedy}"
    return _available[name]


def refusal(name: str, call: Call) -> str | None:
    """Why the backend cannot run this call; None where it can."""
    return available_error(name) or load(name).supports(call)


def mask_blocks_pay(queries: int, mask: Tensor) -> bool:
    """Whether attention with a dense mask is faster with `mask_blocks`, counting their making.

    With fewer queries than a tile has, making them reads as much of the mask as attention does.
    """
    return queries >= MASK_BLOCK and skips_tiles(mask.device.type)


def merging_backend() -> str:
    """The backend of `merge_states`: the default one, or what merges in its place."""
    name = chosen() or "auto"
    return _MERGING.get(name, name)


def tile_finder(device: torch.device, sizes: tuple) -> ModuleType | None:
    """The backend whose kernel finds the tiles of a program's mask on a device, or None."""
    if device.type != "cuda" or available_error("triton") is not None:
        return None
    backend = load("triton")
    return backend if backend.program_tiles_error(device, sizes) is None else None


def skips_tiles(device: str) -> bool:
    """Whether the usual backend of a device skips by `mask_blocks`, and some backend makes them."""
    name = chosen() or "auto"
    names = AUTO.get(device, ()) if name == "auto" else (name,)
    able = [name for name in names if available_error(name) is None]
    return bool(able) and able[0] in _SKIPPING and any(n in _SUMMARISING for n in able)


def backends() -> list[tuple[str, str | None]]:
    """Every backend, with why it cannot run on this machine, or None where it can."""
    return [(name, available_error(name)) for name in BACKENDS]


class CallExplanation(NamedTuple):
    """The backend and kernel of a call, and the reasons why other backends do not run it."""

    backend: str | None  # None: none can
    kernel: str | None
    route: str
    reasons: dict[str, str | None]  # of every backend; None where it can run the call
    notes: tuple[str, ...] = ()  # what the call's tensors are taken for

    def __str__(self) -> str:
        lines = [f"backend: {self.backend or 'none'}"]
        if self.kernel is not None:
            lines += [f"kernel: {self.kernel}", f"route: {self.route}"]
        lines += self.notes
        lines += [f"  {name}: {reason or 'can run this'}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def notes(
    query: Tensor, key: Tensor, value: Tensor, operands: Operands, is_causal: bool
) -> tuple[str, ...]:
    """What a legal call's tensors are taken for, and what causality means for them."""
    is_packed, is_paged = operands.cu_seqlens_q is not None, operands.page_table is not None
    of_query = ("tokens", "heads", "features") if is_packed else _DIMENSIONS
    of_keys = ("pages", "tokens", "heads", "features") if is_paged else of_query
    tensors = ("query", query, of_query), ("key", key, of_keys), ("value", value, of_keys)
    lines = [f"{name}: {', '.join(map(_counted, t.shape, of))}" for name, t, of in tensors]
    if not is_packed and not is_paged:
        heads, tokens = max(query.shape[1], key.shape[1]), key.shape[2]
        if heads > 4 * tokens:
            lines.append(
                f"hint: {_counted(heads, 'heads')} of {_counted(tokens, 'tokens')}: tensors are "
                "(B, H, S, D); from (B, S, H, D) pass .transpose(1, 2)"
            )
    if is_causal:
        lines.append(f"causal, bottom right: {_first_query(query, key, operands)}")
    return tuple(lines)


_DIMENSIONS = "rows", "heads", "tokens", "features"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun.removesuffix('s') if count == 1 else noun}"


def _first_query(query: Tensor, key: Tensor, operands: Operands) -> str:
    """Which keys the first query of a causal call attends."""
    if operands.cu_seqlens_q is not None:
        return "query 0 of m queries and n keys of a sequence attends keys 0 to n - m"
    if operands.kv_lens is not None:
        held = "n keys, the new ones included," if operands.new_key is not None else "n keys"
        return f"query 0 of a row of {held} attends keys 0 to n - {query.shape[2]}"
    last = key.shape[2] - query.shape[2]
    if last < 0:
        return f"the first {-last} of {query.shape[2]} queries attend no key"
    return "query 0 attends key 0" if last == 0 else f"query 0 attends keys 0 to {last}"
