"""The Hopper backend's host code on CPU tensors: a driver that takes notes stands for the GPU's."""

import ctypes
import struct
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fa_ops.backends.hopper import (
    backward,
    decode,
    eight_bit,
    forward,
    kernel_plan,
    mla,
    packed,
    tangents,
    term_gradients,
)
from fa_ops.backends.hopper.runtime import launch, nvrtc

HOSTS = launch, kernel_plan, decode, mla, forward, backward, packed, eight_bit, term_gradients
HOSTS += (tangents,)


class Launched(NamedTuple):
    name: str
    grid: tuple[int, int]
    params: Any  # what `Driver.read` made of them
    thread: int
    attributes: int  # how many: one of a programmatic dependent launch


class Driver:
    """Notes every call, and of a kernel what it would find; a kernel's handle is its name."""

    def __init__(self):
        self.called: list[str] = []
        self.launched: list[Launched] = []
        self.answers: dict[str, list[int]] = {}  # status of the next calls of that name, then 0
        self.struct_bytes = 0  # of a kernel's only parameter

    def read(self, name, pointers):
        if not pointers:
            return b""
        (where,) = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p * 1)).contents
        # What there is of it: memory may end behind a shorter one, where ctypes would crash.
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(where)
            return memory.read(self.struct_bytes).ljust(self.struct_bytes, b"\0")

    def last(self, name: str) -> tuple[tuple[int, int], Any]:
        """Grid and parameters of the last launch of that kernel."""
        return next(one[1:3] for one in reversed(self.launched) if one.name == name)

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        given, params = config._obj, self.read(function, pointers)
        self.launched.append(
            Launched(function, tuple(given.grid)[:2], params, threading.get_ident(), given.count)
        )
        return self._answer("cuLaunchKernelEx")

    def cuTensorMapEncodeTiled(self, out, dtype, rank, where, *rest):
        """A map is its tensor's address, followed by the other arguments."""
        sizes, steps, box, ones, *modes = rest
        assert len(sizes) == 8 * rank == 8 + len(steps) and len(box) == 4 * rank <= len(ones)
        given = struct.pack("<Q3B", where.value, dtype, rank, modes[2]) + sizes + steps + box
        ctypes.memmove(out, given.ljust(128, b"\0"), 128)
        return self._answer("cuTensorMapEncodeTiled")

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: self._answer(name)

    def _answer(self, call):
        self.called.append(call)
        answers = self.answers.get(call)
        return answers.pop(0) if answers else 0


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(launch, "driver", lambda: fake)
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "_load", lambda name, entry: launch.Kernel(name, 128, 0))
    monkeypatch.setattr(nvrtc, "program", lambda source, entry, defines: entry)
    monkeypatch.setattr(nvrtc, "begin", lambda names: [partial(str, name) for name in names])
    instead = {
        "current_device": lambda: None,  # the index of CPU tensors
        "current_stream": lambda index: 77,
        "empty": _empty,
    }
    for module in HOSTS:
        for name in instead.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, instead[name])
    device = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    _forget()
    yield fake
    _forget()


def _empty(size, stride, dtype):
    """As strict as the function for GPUs, which refuses subclasses of tuple such as torch.Size."""
    assert type(size) is tuple and type(stride) is tuple
    return torch.empty_strided(size, stride, dtype=dtype)


def _forget():
    """What was remembered of another driver."""
    for module in HOSTS:
        for one in vars(module).values():
            if hasattr(one, "cache_clear"):
                one.cache_clear()
