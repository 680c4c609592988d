"""Padding masks of decoding steps, which extend the mask of the prefill.

A decoding step on a GPU must not read its padding mask on the host. generate() appends a column of
ones to the mask of the prefill with every token. If that mask was read, has no holes and ends in
ones, the extended mask still keeps one range of keys in each row. A mask is therefore treated as
the continuation of the mask last read for the same cache and batch size if it is one token longer.
That it does keep one range is asserted on the device, without synchronising.

Requests are identified by their caches. transformers does not pass the cache to mask functions, so
`install` wraps the function that prepares their arguments to record it.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from fa_ops.tracing import is_compiling
from hf_integration import hooks

_PREPARES = "_preprocess_mask_arguments"
_CACHE_NAMES = ("cache", "past_key_values")  # the second one in older releases


class ReadMask(NamedTuple):
    """The mask last read for a cache, or last accepted as its continuation."""

    batch_size: int
    length: int
    padded: bool


_read: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # cache -> ReadMask
_thread = threading.local()  # .cache: weak reference to the cache of the mask being made


def install() -> str:
    """Record the cache for which masks are made. Idempotent; returns "on", or why it is off."""
    original = hooks.original_of(getattr(masking_utils, _PREPARES, None))
    parameters = inspect.signature(original) if original is not None else inspect.Signature()
    name = next((name for name in _CACHE_NAMES if name in parameters.parameters), None)
    if name is None:
        expected = " or ".join(_CACHE_NAMES)
        return f"off: transformers.masking_utils.{_PREPARES} has no argument {expected}"
    if hasattr(original, "_fa_ops"):
        return "on"

    @functools.wraps(original)
    def prepare(*args, **kwargs):
        if not is_compiling():
            _record_cache(parameters.bind(*args, **kwargs).arguments.get(name))
        return original(*args, **kwargs)

    prepare._fa_ops = True
    setattr(masking_utils, _PREPARES, prepare)
    return "on"


def _record_cache(cache: object) -> None:
    try:
        _thread.cache = weakref.ref(cache)
    except TypeError:  # None, or a tuple
        _thread.cache = None


def pop_cache() -> object | None:
    """Return the cache for which this thread is making a mask, and forget it."""
    reference, _thread.cache = getattr(_thread, "cache", None), None
    return None if reference is None else reference()


def remember(request, padded: bool, extensible: bool) -> None:
    """Record a mask that was read; an `extensible` one stays one range when ones are appended."""
    if request.cache is None:
        return
    if extensible:
        length = request.attention_mask.shape[-1]
        _read[request.cache] = ReadMask(request.batch_size, length, padded)
    else:
        _read.pop(request.cache, None)


def forget() -> None:
    """Treat no mask as a continuation until the next prefill."""
    _read.clear()


def continued(request) -> ReadMask | None:
    """Return the mask that this one continues, or None."""
    known = None if request.cache is None else _read.get(request.cache)
    if known is None:
        return None
    length = request.attention_mask.shape[-1]
    if known.batch_size != request.batch_size or length - known.length not in (0, 1):
        return None
    _read[request.cache] = known._replace(length=length)
    return known


def check(holds: Tensor) -> None:
    """Raise an error unless a bool tensor is True, on a GPU without synchronising."""
    torch._assert_async(
        holds,
        "the attention mask of a decoding step is not that of the prefill, extended by ones: it "
        "has holes. Call hf_integration.decoding.forget() before decoding with such a mask",
    )
