"""Memory that nobody wrote is NaN, so that a kernel that leaves a hole in its output fails."""

from __future__ import annotations

import pytest
import torch

_ALLOCATORS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


def _poisoned(allocate):
    def wrapper(*args, **options):
        x = allocate(*args, **options)
        if x.dtype.is_floating_point and x.device.type != "meta":
            with torch.no_grad():
                x.fill_(float("nan"))
        return x

    return wrapper


@pytest.fixture(autouse=True)
def nan_poisoned_memory(monkeypatch):
    for owner, name in _ALLOCATORS:
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    yield
    torch._dynamo.reset()
