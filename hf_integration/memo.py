"""Values derived from a tensor, kept as long as it: the layers of a forward pass share them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_integration.readable import is_capturing


class PerTensorMemo:
    """Keeps the values derived from a few tensors, each until the tensor is changed in place.

    A few, because layers of different kinds have a mask for each kind. Inference tensors do not
    count their changes, and a CUDA graph has to record how its values are computed: there a value
    is valid until the layer that computed it asks again, which is the next forward pass.
    Threads may share it.
    """

    KEPT = 4

    def __init__(self) -> None:
        # tensor, version, id of the layer that computed it, value; replaced whole, for threads
        self._entries: tuple[tuple, ...] = ()

    def get(self, tensor: Tensor, layer: nn.Module | None, compute: Callable[[], Any]) -> Any:
        """The value derived from `tensor`, computed if it is new or has changed."""
        if torch.compiler.is_compiling():
            return compute()
        version, others = _version(tensor), []
        for entry in self._entries:
            known, seen, owner, value = entry
            if known() is not tensor:
                others.append(entry)
            elif seen == version and (type(version) is int or owner != id(layer)):
                return value
        value = compute()
        self._entries = (
            (weakref.ref(tensor), version, id(layer), value),
            *others[: self.KEPT - 1],
        )
        return value


def _version(tensor: Tensor) -> int | str:
    """A number that counts changes, or why there is none to rely on."""
    if is_capturing(tensor):
        return "capturing"
    return "inference" if tensor.is_inference() else tensor._version
