"""Memory of one host's GPUs that processes share, and a limit on how long they wait."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fa_ops.backends.hopper.runtime import launch
from fa_ops.distributed import peer_protocol

# A limit on how long a GPU waits for another process, which the waits of streams do not have.

_OF_THIS_THREAD = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Event(Protocol):
    """An event of a GPU."""

    def query(self) -> bool:
        """Whether it has happened."""


class Watch:
    """Ends this process if a pass does not end within a number of seconds.

    That is what the timeout of an NCCL group does to processes that wait for one that has raised an
    error or ended; a process that is waiting for its GPU cannot raise.

    Attributes:
        latest: the end of the latest pass; None once it is awaited.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since = seconds, 0.0
        self.latest: Event | None = None
        self._awaited: Event | None = None

    def start(self) -> Watch:
        """Look now and then, in a thread."""
        arguments = weakref.ref(self), self._seconds / 4
        threading.Thread(target=_look_on, args=arguments, daemon=True).start()
        return self

    def look(self) -> None:
        """End the process if the awaited event is overdue; await the latest if it has happened."""
        if self._awaited is None or self._awaited.query():
            self._awaited, self.latest, self._since = self.latest, None, time.monotonic()
        elif time.monotonic() - self._since > self._seconds:
            _end(
                "context parallel attention: another process of the group did not answer within "
                f"the {self._seconds:g} seconds of the group's timeout, it may have raised an "
                "error or ended; this process is ended"
            )


def _look_on(watch: weakref.ref[Watch], pause: float) -> None:
    # so that a query does not break a CUDA graph that another thread captures
    mode = ctypes.c_int(_OF_THIS_THREAD)
    launch.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    while True:
        time.sleep(pause)
        found = watch()
        if found is None:
            return
        found.look()
        del found


def _end(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os.abort()


# Memory of the GPUs of one host that all processes of a group can read, by torch's symmetric
# memory, with copies by the copy engines and counters that streams themselves write and await.

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, of the signed difference
_FENCED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: after a fence of what the stream has written
_UNIT = 2**21  # bytes; growth by less would make a new allocation for each length


def error() -> str | None:
    """Why symmetric memory cannot be had here, or None."""
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: F401
    except ImportError as missing:
        return f"torch {torch.__version__} has no symmetric memory: {missing}"
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    try:
        driver = launch.driver()
    except OSError as missing:
        return f"the CUDA driver cannot be loaded: {missing}"
    if not hasattr(driver, "cuStreamWaitValue32_v2"):
        return "the CUDA driver has no cuStreamWaitValue32_v2"
    return None


class PeerMemory:
    """Staging memory and counters of a group's processes; see `peer_protocol.SharedMemory`."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._name, self._device = group.group_name, device  # the group, which ends before this
        self.rank, self.size = group.rank(), group.size()
        self.side = torch.cuda.Stream(device)
        self._main: torch.cuda.Stream | None = None
        self._free: list[torch.cuda.Event] = []  # making one takes longer than recording it
        self._regions: list[_Shared | None] = [None] * peer_protocol.REGIONS
        self._counters = self._shared(4 * peer_protocol.counters(self.size))
        self._counters.mine.zero_()
        torch.cuda.synchronize(device)
        timeout = group._get_backend(device).options._timeout
        self._watch = Watch(timeout.total_seconds()).start()

    def _shared(self, nbytes: int) -> _Shared:
        return _Shared(nbytes, self._name, self._device, self.size)

    def main(self) -> torch.cuda.Stream:
        """The current stream; if it is another one than before, after what is there."""
        before, current = self._main, launch.current_stream(self._device.index)
        if before is None or before.cuda_stream != current:
            self._main = torch.cuda.current_stream(self._device)
            if before is not None:
                self._main.wait_stream(before)
        return self._main

    def reserve(self, region: int, nbytes: int) -> None:
        """Replace staging memory that is too small, once no process reads it any more."""
        held = self._regions[region]
        if held is not None and nbytes <= held.mine.numel():
            return
        torch.cuda.synchronize(self._device)  # this process has read what it was to read
        self._regions[region] = self._shared((nbytes // _UNIT + 1) * _UNIT)  # waits for all

    def staging(self, region: int) -> Tensor:
        """The staging memory of this process."""
        return self._regions[region].mine

    def poison(self, stream: torch.cuda.Stream, region: int) -> None:
        """All bits set are a NaN in every dtype."""
        mine = self._regions[region].mine
        count = ctypes.c_size_t(mine.numel())
        launch.call("cuMemsetD8Async", _pointer(mine.data_ptr()), 255, count, _handle(stream))

    def copy(
        self, stream: torch.cuda.Stream, to: Tensor, rank: int, region: int, offset: int
    ) -> None:
        """One transfer, which the driver gives to a copy engine."""
        where = self._regions[region].addresses[rank] + offset
        count = ctypes.c_size_t(to.nbytes)
        launch.call(
            "cuMemcpyAsync", _pointer(to.data_ptr()), _pointer(where), count, _handle(stream)
        )

    def signal(self, stream: torch.cuda.Stream, rank: int, counter: int, value: int) -> None:
        """A write by the stream itself."""
        where = _pointer(self._counters.addresses[rank] + 4 * counter)
        launch.call(
            "cuStreamWriteValue32_v2", _handle(stream), where, ctypes.c_uint32(value), _FENCED
        )

    def wait(self, stream: torch.cuda.Stream, counter: int, value: int) -> None:
        """A wait of the stream itself, for a counter in this GPU's memory."""
        where = _pointer(self._counters.addresses[self.rank] + 4 * counter)
        launch.call(
            "cuStreamWaitValue32_v2", _handle(stream), where, ctypes.c_uint32(value), _AT_LEAST
        )

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event, which `follow` frees."""
        event = self._free.pop() if self._free else torch.cuda.Event()
        event.record(stream)
        return event

    def follow(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Wait for an event."""
        stream.wait_event(event)
        self._free.append(event)  # the stream waits for what has been recorded so far

    def watch(self) -> None:
        """A pass that does not end within the group's timeout ends this process."""
        event = self._watch.latest or torch.cuda.Event()
        event.record(self.main())
        self._watch.latest = event


class _Shared:
    """Memory of equal size on all GPUs, and its addresses; made by all processes together."""

    def __init__(self, nbytes: int, name: str, device: torch.device, size: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        # torch's own workspace is made so: of the pool that `empty` uses, parts may differ in place
        self.mine = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        self._handle = rendezvous(self.mine, name)
        self.addresses = [
            self._handle.get_buffer(rank, (nbytes,), torch.uint8).data_ptr() for rank in range(size)
        ]


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _handle(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)
