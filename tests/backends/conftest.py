"""A driver for decoding calls of the Hopper tier on the host: it launches nothing, notes all."""

import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fa_ops.backends.hopper import decode, launch, mla

STREAM = 77


class Launched(NamedTuple):
    name: str
    params: bytes
    thread: int


class Driver:
    """Notes the parameter struct of each kernel launched, as the kernel would find it."""

    def __init__(self):
        self.size = 576  # of the struct
        self.launched: list[Launched] = []
        self.answers, self.others = [], []

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        params = ctypes.string_at(pointers[0], self.size)
        self.launched.append(Launched(function, params, threading.get_ident()))
        return self.answers.pop(0) if self.answers else 0

    def cuTensorMapEncodeTiled(self, out, dtype, rank, where, *rest):
        """The address, and behind it all that a map is told, in 128 bytes."""
        sizes, steps, box, ones, *modes = rest
        assert len(sizes) == 8 * rank == 8 + len(steps) and len(box) == 4 * rank <= len(ones)
        head = struct.pack("<Q3B", where.value, dtype, rank, modes[2])
        told = head + sizes + steps + box
        ctypes.memmove(out, told.ljust(128, b"\0"), 128)
        return 0

    def __getattr__(self, name):
        return lambda *args: self.others.append(name) or 0


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(launch, "driver", lambda: fake)
    monkeypatch.setattr(launch, "kernel", lambda source, name, *rest: launch.Kernel(name, 128, 0))
    device = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    for module in (launch, decode, mla):
        monkeypatch.setattr(module, "current_device", lambda: None)
        monkeypatch.setattr(module, "current_stream", lambda index: STREAM)
        monkeypatch.setattr(
            module,
            "empty",
            lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        )
    monkeypatch.setattr(decode, "kernel", launch.kernel)
    plans = (
        decode._plan, decode._family, mla._plan, mla._family, launch._early, launch._context
    )  # fmt: skip
    for one in plans:
        one.cache_clear()
    yield fake
    for one in plans:
        one.cache_clear()
