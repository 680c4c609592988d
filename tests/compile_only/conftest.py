"""Kernels of Triton, compiled as hosts bind them and not launched."""

from __future__ import annotations

import types

import pytest
import torch


@pytest.fixture
def bound(monkeypatch):
    """bound(arch, *hosts): the kernels that these modules bind from now on, compiled for `arch`,
    by name, or with `by_name=False` in their order.
    """

    def collect(arch: int, *hosts: types.ModuleType, by_name: bool = True):
        from triton.backends.compiler import GPUTarget

        from fa_ops.backends.triton import launch

        found = {} if by_name else []

        def bind(fn, args, constants, options, *, device: torch.device, **details):
            target = GPUTarget("cuda", arch, 32)
            kernel = launch.compile_kernel(fn, args, constants, options, target, **details)
            if by_name:
                found[fn.__name__] = kernel
            else:
                found.append(kernel)
            return lambda grid, args: None

        for host in hosts:
            monkeypatch.setattr(host, "bind", bind)
            monkeypatch.setattr(host, "architecture", lambda device: arch, raising=False)
            monkeypatch.setattr(host, "_launches", {})
        return found

    return collect
