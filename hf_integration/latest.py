"""What was made of a tensor last: all layers of a forward pass share their mask and positions."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Latest:
    """Remembers the values of a few tensors, each until it is changed in place.

    A few, because layers of different kinds have a mask for each kind. Inference tensors do not say
    whether they were changed: of them a value holds until the layer that had it made asks again,
    which is the next forward pass. Threads may share it.
    """

    KEPT = 4

    def __init__(self) -> None:
        # tensor, version, id of the layer that had it made, value; swapped whole, for threads
        self._known: tuple[tuple, ...] = ()

    def of(self, tensor: Tensor, layer: nn.Module, make: Callable[[], Any]) -> Any:
        version, others = None if tensor.is_inference() else tensor._version, []
        for entry in self._known:
            known, seen, maker, value = entry
            if known() is not tensor:
                others.append(entry)
            elif seen == version and (version is not None or maker != id(layer)):
                return value
        value = make()
        self._known = ((weakref.ref(tensor), version, id(layer), value), *others[: self.KEPT - 1])
        return value
