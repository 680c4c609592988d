"""What was made of a tensor last: all layers of a forward pass share their mask and positions."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Latest:
    """Remembers one value, until another tensor comes or this one is changed in place.

    Inference tensors do not say whether they were changed: of them a value holds until the layer
    that had it made asks again, which is the next forward pass.
    """

    def __init__(self) -> None:
        self._tensor: Callable[[], Tensor | None] = lambda: None
        self._version: int | None = None
        self._layer = 0
        self._value: Any = None

    def of(self, tensor: Tensor, layer: nn.Module, make: Callable[[], Any]) -> Any:
        version = None if tensor.is_inference() else tensor._version
        known = self._tensor() is tensor and self._version == version
        if known and (version is not None or self._layer != id(layer)):
            return self._value
        value = make()
        self._tensor, self._version = weakref.ref(tensor), version
        self._layer, self._value = id(layer), value
        return value
