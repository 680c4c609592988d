"""What a prefill has shown about a padding mask that decoding then extends.

A step of decoding on a GPU must not read its padding mask on the host. generate() extends the mask
of the prefill by a column of ones with every token: a mask that was read then, had no holes and
ended in ones is still a run of keys for each row. So a mask is taken for the continuation of the
one read last for the same config and batch size if it is one token longer; and that it is a run is
checked on the device, where an error costs no wait.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor


class Shown(NamedTuple):
    """The mask that was read, or followed, last."""

    config: weakref.ref
    batch_size: int
    length: int
    padded: bool


_shown: dict[int, Shown] = {}  # by the config's id
_MOST = 64  # configs; more come only from making models in a loop


def remember(request, padded: bool, extensible: bool) -> None:
    """Note a mask that was read; one that does not stay a run when ones follow is forgotten."""
    _shown.pop(id(request.config), None)
    if not extensible or request.config is None:
        return
    while len(_shown) >= _MOST:
        _shown.pop(next(iter(_shown)))
    length = request.attention_mask.shape[-1]
    own = weakref.ref(request.config)
    _shown[id(request.config)] = Shown(own, request.batch_size, length, padded)


def forget() -> None:
    """Take no mask for a continuation until the next prefill."""
    _shown.clear()


def followed(request) -> Shown | None:
    """The mask that this one continues, or None."""
    known = _shown.get(id(request.config))
    if known is None or known.config() is not request.config:
        return None
    length = request.attention_mask.shape[-1]
    if known.batch_size != request.batch_size or length - known.length not in (0, 1):
        return None
    _shown[id(request.config)] = known._replace(length=length)
    return known


def check(holds: Tensor) -> None:
    """Stop with an error, without waiting for it, unless a bool tensor holds."""
    torch._assert_async(
        holds,
        "an attention mask in decoding is not the one of the prefill, extended by ones: it has "
        "holes. Call hf_integration.decoding.forget() before decoding with such a mask",
    )
