"""A limit on how long a GPU waits for another process, which the waits of streams do not have."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from typing import Protocol

from fa_ops.backends.hopper import launch

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
