"""`peer_protocol.SharedMemory` without GPUs: simulated streams, and files that processes share."""

from __future__ import annotations

import random
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.distributed import peer_protocol, transport
from fa_ops.distributed.peer_protocol import PeerProtocol


class SimulatedStreams:
    """A main and a side stream for each of `size` processes, whose work runs in random order."""

    def __init__(self, size: int, nbytes: int, in_one_queue: bool = False) -> None:
        self.size = size
        names = ["main", "main"] if in_one_queue else ["main", "side"]
        self.queues = {(rank, name): deque() for rank in range(size) for name in names}
        self.names = names
        self.counters = [[0] * peer_protocol.counters(size) for _ in range(size)]
        self.staging = [
            [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(peer_protocol.REGIONS)]
            for _ in range(size)
        ]

    def add(self, stream: tuple, work: Callable, is_ready: Callable = lambda: True) -> None:
        """Add work to a stream, which starts when it is first there and ready."""
        self.queues[stream].append((is_ready, work))

    def run(self, seed: int) -> None:
        """Run everything. Raises AssertionError if nothing can proceed."""
        choose = random.Random(seed)
        while any(self.queues.values()):
            able = [queue for queue in self.queues.values() if queue and queue[0][0]()]
            assert able, "all streams wait"
            choose.choice(able).popleft()[1]()


class StreamMemory:
    """The memory of one process of `SimulatedStreams`. Every copy is made in two parts."""

    def __init__(self, streams: SimulatedStreams, rank: int) -> None:
        self.streams, self.rank, self.size = streams, rank, streams.size
        self._main, self.side = ((rank, name) for name in streams.names)

    def main(self) -> tuple:
        return self._main

    def reserve(self, region: int, nbytes: int) -> None:
        assert nbytes <= self.staging(region).numel()

    def staging(self, region: int) -> Tensor:
        return self.streams.staging[self.rank][region]

    def write(self, to: Tensor, value: Tensor) -> None:
        """Copy on the main stream, in two parts."""
        self._copy(self._main, to, value)

    def _copy(self, stream: tuple, to: Tensor, of: Tensor) -> None:
        for target, source in zip(to.chunk(2), of.chunk(2), strict=True):
            self.streams.add(stream, lambda t=target, s=source: t.copy_(s))

    def poison(self, stream: tuple, region: int) -> None:
        self.streams.add(stream, lambda: self.staging(region).fill_(255))

    def copy(self, stream: tuple, to: Tensor, rank: int, region: int, offset: int) -> None:
        there = self.streams.staging[rank][region][offset : offset + to.nbytes].view(to.dtype)
        self._copy(stream, to, there)

    def signal(self, stream: tuple, rank: int, counter: int, value: int) -> None:
        counters = self.streams.counters[rank]
        self.streams.add(stream, lambda: counters.__setitem__(counter, value))

    def wait(self, stream: tuple, counter: int, value: int) -> None:
        counters = self.streams.counters[self.rank]
        self.streams.add(stream, lambda: None, lambda: counters[counter] >= value)

    def record(self, stream: tuple) -> list:
        event = []
        self.streams.add(stream, lambda: event.append(True))
        return event

    def follow(self, stream: tuple, event: list) -> None:
        self.streams.add(stream, lambda: None, lambda: bool(event))

    def watch(self) -> None:
        pass


class FileMemory:
    """Files that the processes of a group map. Everything is done at once, in the host's order."""

    side = None

    def __init__(self, members, seconds: float = 60.0) -> None:
        self.rank, self.size, self._seconds = members.rank, members.size, seconds
        self._group = members.group
        name = [f"fa_ops_{uuid.uuid4().hex}"]
        dist.broadcast_object_list(name, members.global_rank(0), group=self._group)
        self._name = name[0]
        self._regions: list[list[Tensor]] = [[] for _ in range(peer_protocol.REGIONS)]
        self._made = 0
        self._counters = self._shared(peer_protocol.counters(self.size), torch.int32)

    def _shared(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        self._made += 1
        name = Path(tempfile.gettempdir(), f"{self._name}_{self._made}")
        paths = [name.with_suffix(f".{rank}") for rank in range(self.size)]
        paths[self.rank].write_bytes(bytes(count * dtype.itemsize))
        dist.barrier(self._group)
        mapped = [torch.from_file(str(x), shared=True, size=count, dtype=dtype) for x in paths]
        dist.barrier(self._group)
        paths[self.rank].unlink()  # what is mapped remains
        return mapped

    def main(self) -> None:
        return None

    def reserve(self, region: int, nbytes: int) -> None:
        held = self._regions[region]
        if not held or held[0].numel() < nbytes:
            self._regions[region] = self._shared(max(1, nbytes), torch.uint8)

    def staging(self, region: int) -> Tensor:
        return self._regions[region][self.rank]

    def poison(self, stream: None, region: int) -> None:
        self.staging(region).fill_(255)

    def copy(self, stream: None, to: Tensor, rank: int, region: int, offset: int) -> None:
        assert to.is_contiguous()
        to.copy_(
            self._regions[region][rank][offset : offset + to.nbytes].view(to.dtype).view(to.shape)
        )

    def signal(self, stream: None, rank: int, counter: int, value: int) -> None:
        self._counters[rank][counter] = value

    def wait(self, stream: None, counter: int, value: int) -> None:
        end = time.monotonic() + self._seconds
        while self._counters[self.rank][counter] < value:
            time.sleep(1e-4)
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.rank}: counter {counter} is below {value}")

    def record(self, stream: None) -> None:
        return None

    def follow(self, stream: None, event: None) -> None:
        pass

    def watch(self) -> None:
        pass


def use_files() -> None:
    """Let all groups of this process exchange keys through files, where "nccl" is not asked for."""
    transport._unsuitable = lambda device: None
    transport._shared_memory = lambda members, group, device, timeout: PeerProtocol(
        FileMemory(members)
    )
