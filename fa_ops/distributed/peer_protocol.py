"""The order in which processes of one host read each other's memory.

A process copies what it sends into staging memory of its own, and the others read it there. Each
process has a counter for every kind of data and every other process, in memory that the others
write:

- READY: the last pass for which the other process has staged data for this one;
- DONE: the last pass whose data the other process has read from this one.

In a pass a process

1. waits on its main stream until all readers of what it staged before are DONE, stages its data
   there, and tells the readers that it is READY;
2. on its side stream, which has waited for the main stream, waits for each process that it reads
   from to be READY, reads into ordinary tensors, and tells that process that it is DONE;
3. waits on its main stream for those reads, and uses the tensors.

Copies between GPUs run on copy engines, and counters are written and awaited by the stream itself,
so nothing of this needs a multiprocessor, and it proceeds while a kernel occupies them all.

The results do not depend on timing, because

- staged data is not overwritten before it has been read (1);
- staged data is complete when it is read: the main stream orders the copies before the signal (1),
  and memory is fenced before a counter is written;
- a tensor is not written while an earlier use of its memory is under way (2), and not used before
  it is complete (3);
- counters only grow, so that a signal is never taken for that of another pass, and keys of forward
  and backward passes are of different kinds.

Every wait ends, because all processes make the same passes of each kind in the same order, as for
collectives, and a process waits only for what comes earlier in that order in the other process.
This holds even if a device runs its streams one after the other, or a host waits for its device.

A process that raises within a pass still gives the others what they wait for: NaN in place of the
data that it has not staged, and DONE. They do not hang, their results that depend on this process
are NaN, and the next pass is not affected. If a process does not make a pass, or has ended, the
others wait until the timeout of the group ends them (`peer_watch`), as with NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor


class Kind(NamedTuple):
    """A kind of data: its counters, and the staging memory that it shares with others."""

    number: int
    region: int


KEYS, KEYS_AGAIN, GRADIENTS = KINDS = Kind(0, 0), Kind(1, 0), Kind(2, 1)
REGIONS = 2
READY, DONE = range(2)
Copies = list[tuple[int, Tensor]]  # (where in the other's staging memory, contiguous destination)


class SharedMemory(Protocol):
    """What the protocol needs of the device. Streams are opaque."""

    rank: int
    size: int
    side: object

    def main(self) -> object:
        """The current stream, in order with what this returned before."""

    def reserve(self, region: int, nbytes: int) -> None:
        """Have so much staging memory. All processes call this alike."""

    def staging(self, region: int) -> Tensor:
        """The staging memory of this process, uint8."""

    def poison(self, stream: object, region: int) -> None:
        """Fill the staging memory with NaN."""

    def copy(self, stream: object, to: Tensor, rank: int, region: int, offset: int) -> None:
        """Copy to a contiguous tensor from a process's staging memory."""

    def signal(self, stream: object, rank: int, counter: int, value: int) -> None:
        """Set a counter of a process once everything before on the stream has ended."""

    def wait(self, stream: object, counter: int, value: int) -> None:
        """Wait until a counter of this process has at least a value."""

    def record(self, stream: object) -> object:
        """An event: everything on the stream so far. It is followed once."""

    def follow(self, stream: object, event: object) -> None:
        """Let the stream wait for an event."""

    def watch(self) -> None:
        """Limit how long everything on the main stream so far may take."""


class _RestOfPass:
    """What remains to be done in the current pass of a kind."""

    def __init__(self, readers: Iterable[int], sources: Iterable[int]) -> None:
        self.readers, self.sources = set(readers), set(sources)


class PeerProtocol:
    """The passes of this process, over the memory of a group on one device."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._numbers = dict.fromkeys(KINDS, 0)
        self._owed: dict[Kind, _RestOfPass] = {}
        self._unread: list[list[tuple[int, int]]] = [[] for _ in range(REGIONS)]
        self._arriving: dict[int, Arrival] = {}  # whose tensors are still being written

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Passes begin in here. After an error the other processes get what they wait for."""
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        self.memory.watch()

    def begin(
        self, kind: Kind, nbytes: int, readers: Iterable[int], sources: Iterable[int]
    ) -> None:
        """Begin a pass, in which `readers` read from this process, and this one from `sources`.

        All processes begin it with the same size of staging memory, even those without a part.
        """
        self.memory.reserve(kind.region, nbytes)
        self._numbers[kind] += 1
        self._owed[kind] = _RestOfPass(readers, sources)

    def overwrite(self, kind: Kind) -> Tensor:
        """The staging memory, which the current stream may write from now on."""
        stream, unread = self.memory.main(), self._unread[kind.region]
        for counter, number in unread:
            self.memory.wait(stream, counter, number)
        unread.clear()
        return self.memory.staging(kind.region)

    def publish(self, kind: Kind, readers: Iterable[int]) -> None:
        """Let these processes read what the current stream has staged."""
        stream, number = self.memory.main(), self._numbers[kind]
        for reader in readers:
            self._unread[kind.region].append((self._counter(kind, DONE, reader), number))
            mine = self._counter(kind, READY, self.memory.rank)
            self.memory.signal(stream, reader, mine, number)
            self._owed[kind].readers.discard(reader)

    def fetch(self, kind: Kind, parts: list[tuple[int, Copies]]) -> Arrival:
        """Start to copy from the staging memory of other processes."""
        memory, side, number = self.memory, self.memory.side, self._numbers[kind]
        arrival = Arrival(self, [to for _, copies in parts for _, to in copies])
        if not parts:
            return arrival
        self._arriving[id(arrival)] = arrival
        memory.follow(side, memory.record(memory.main()))
        for source, copies in parts:
            memory.wait(side, self._counter(kind, READY, source), number)
            for offset, to in copies:
                memory.copy(side, to, source, kind.region, offset)
            memory.signal(side, source, self._counter(kind, DONE, memory.rank), number)
            self._owed[kind].sources.discard(source)
        arrival.event = memory.record(side)
        return arrival

    def arrived(self, arrival: Arrival) -> None:
        """Let the current stream wait for an arrival."""
        event, arrival.event = arrival.event, None
        if event is not None:
            self.memory.follow(self.memory.main(), event)
        self._arriving.pop(id(arrival), None)

    def _counter(self, kind: Kind, what: int, of: int) -> int:
        return (2 * kind.number + what) * self.memory.size + of

    def _abandon(self) -> None:
        memory, side = self.memory, self.memory.side
        for kind, owed in self._owed.items():
            readers = sorted(owed.readers)
            if readers:
                self.overwrite(kind)
                memory.poison(memory.main(), kind.region)
                self.publish(kind, readers)
            for source in sorted(owed.sources):
                counter = self._counter(kind, DONE, memory.rank)
                memory.signal(side, source, counter, self._numbers[kind])
            owed.sources.clear()
        memory.follow(memory.main(), memory.record(side))
        self._arriving.clear()


class Arrival:
    """Tensors that are being written."""

    def __init__(self, protocol: PeerProtocol, tensors: list[Tensor]) -> None:
        self._protocol, self.tensors = protocol, tensors
        self.event: object | None = None

    def wait(self) -> None:
        """Let the current stream wait for them."""
        self._protocol.arrived(self)
        self.tensors = []


def counters(size: int) -> int:
    """The number of counters of a process."""
    return 2 * len(KINDS) * size
