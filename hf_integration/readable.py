"""Whether the host can read the values of a tensor, and at what cost."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from transformers.utils.import_utils import is_tracing


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values: not while tracing, under vmap or during graph capture."""
    return not (is_tracing(tensor) or _is_mapped(tensor))


def is_capturing(tensor: Tensor) -> bool:
    """Whether the current stream of a tensor's device is being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def reads_are_free(device: torch.device | str) -> bool:
    """Whether the host can read tensors on a device without synchronising with it."""
    return torch.device(device).type == "cpu"


def _is_mapped(tensor: Tensor) -> bool:
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
