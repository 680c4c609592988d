"""Tensors whose numbers the host cannot read: what depends on them has to do without."""

from __future__ import annotations

from torch import Tensor
from torch._C import _functorch as functorch
from transformers.utils.import_utils import is_tracing


def is_hidden(tensor: Tensor) -> bool:
    """Whether a tensor is traced, or holds the samples of a vmap."""
    return is_tracing(tensor) or _is_mapped(tensor)


def _is_mapped(tensor: Tensor) -> bool:
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
