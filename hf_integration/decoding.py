"""What a prefill has read of a padding mask that decoding then extends.

A step of decoding on a GPU must not read its padding mask on the host. generate() appends a column
of ones to the prefill's mask with every token: a mask that was read then, had no holes and ended in
ones still keeps one range of keys in each row. So a mask counts as the continuation of the one read
last for the same cache and batch size if it is one token longer; that it keeps one range is checked
on the device, where an error costs no wait.

A cache is one request. Mask functions are not given the cache, so the function that prepares their
arguments is wrapped to note it.
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

_PREPARES = "_preprocess_mask_arguments"


class ReadMask(NamedTuple):
    """The mask that was last read, or taken for a continuation, for a cache."""

    batch_size: int
    length: int
    padded: bool


_read: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # cache -> ReadMask
_thread = threading.local()  # .cache: weak reference to the cache of the mask being made


def install() -> str:
    """Note the cache for which masks are made. Idempotent; returns "on", or why it is off."""
    original = getattr(masking_utils, _PREPARES, None)
    if original is None or "past_key_values" not in inspect.signature(original).parameters:
        return f"off: transformers.masking_utils.{_PREPARES} takes no past_key_values"
    if hasattr(original, "_fa_ops"):
        return "on"
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def prepare(*args, **kwargs):
        if not torch.compiler.is_compiling():
            _note(parameters.bind(*args, **kwargs).arguments.get("past_key_values"))
        return original(*args, **kwargs)

    prepare._fa_ops = True
    setattr(masking_utils, _PREPARES, prepare)
    return "on"


def _note(cache: object) -> None:
    try:
        _thread.cache = weakref.ref(cache)
    except TypeError:  # None, or a tuple
        _thread.cache = None


def noted_cache() -> object | None:
    """The cache for which this thread is making a mask, once."""
    note, _thread.cache = getattr(_thread, "cache", None), None
    return None if note is None else note()


def remember(request, padded: bool, extensible: bool) -> None:
    """Record a mask that was read; `extensible`: it stays one range when ones are appended."""
    if request.cache is None:
        return
    if extensible:
        length = request.attention_mask.shape[-1]
        _read[request.cache] = ReadMask(request.batch_size, length, padded)
    else:
        _read.pop(request.cache, None)


def forget() -> None:
    """Take no mask for a continuation until the next prefill."""
    _read.clear()


def continued(request) -> ReadMask | None:
    """The mask that this one continues, or None."""
    known = None if request.cache is None else _read.get(request.cache)
    if known is None:
        return None
    length = request.attention_mask.shape[-1]
    if known.batch_size != request.batch_size or length - known.length not in (0, 1):
        return None
    _read[request.cache] = known._replace(length=length)
    return known


def check(holds: Tensor) -> None:
    """Stop with an error, without waiting for it, unless a bool tensor holds."""
    torch._assert_async(
        holds,
        "an attention mask in decoding is not the one of the prefill, extended by ones: it has "
        "holes. Call hf_integration.decoding.forget() before decoding with such a mask",
    )
