"""Whether the host may read a tensor, and values read once for all layers of a forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fa_ops.tracing import can_read, is_capturing, is_compiling

# Whether the host can read the values of a tensor, and at what cost.


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values: not while tracing, under vmap or during graph capture."""
    return can_read(tensor, waiting=True)


def reads_are_free(device: torch.device | str) -> bool:
    """Whether the host can read tensors on a device without synchronising with it."""
    return torch.device(device).type == "cpu"


# Values derived from a tensor, which the layers of a forward pass share.


class PerTensorCache:
    """The values derived from a few tensors, each valid until its tensor is changed in place.

    Several are kept because a model has a mask for each kind of layer. Inference tensors do not
    count their changes, and a CUDA graph must record how its values are computed. For these a value
    is valid until the layer that computed it requests it again, which is the next forward pass.
    Thread-safe.
    """

    MAX_ENTRIES = 4

    def __init__(self) -> None:
        # (tensor, version, id of the layer, value); replaced as a whole, because threads share it
        self._entries: tuple[tuple, ...] = ()

    def get(self, tensor: Tensor, layer: nn.Module | None, compute: Callable[[], Any]) -> Any:
        """Return the value derived from `tensor`, computed if the tensor is new or has changed."""
        if is_compiling():
            return compute()
        version, others = _version(tensor), []
        for entry in self._entries:
            known_tensor, known_version, layer_id, value = entry
            if known_tensor() is not tensor:
                others.append(entry)
            elif known_version == version and (type(version) is int or layer_id != id(layer)):
                return value
        value = compute()
        entry = (weakref.ref(tensor), version, id(layer), value)
        self._entries = (entry, *others[: self.MAX_ENTRIES - 1])
        return value


def _version(tensor: Tensor) -> int | str:
    """The number of in-place changes, or why it cannot be relied on."""
    if is_capturing(tensor.device):
        return "capturing"
    return "inference" if tensor.is_inference() else tensor._version
