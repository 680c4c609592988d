"""The order of reads and writes in memory that processes share, on streams that run at random."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from unittest import mock

import pytest
import torch

from fa_ops.distributed import peer_memory
from fa_ops.distributed.peer_memory import Watch
from fa_ops.distributed.peer_protocol import GRADIENTS, KEYS, KEYS_AGAIN, KINDS, PeerProtocol
from tests.distributed.simulated_peers import SimulatedStreams, StreamMemory

SIZE, COUNT = 3, 4  # processes, and values that a process stages for each other one


class Script:
    """Which passes are made, and who reads from whom in each."""

    def __init__(self, seed: int, passes: int = 5) -> None:
        choose = random.Random(seed)
        pairs = [(of, to) for of in range(SIZE) for to in range(SIZE) if of != to]
        self.passes = [
            (choose.choice(KINDS), [pair for pair in pairs if choose.random() < 0.7])
            for _ in range(passes)
        ]

    @staticmethod
    def value(number: int, of: int) -> torch.Tensor:
        return torch.arange(COUNT, dtype=torch.float32) + 100.0 * number + 10.0 * of


class Process:
    """What the host of one process does: passes one after the other, in the same memory."""

    def __init__(self, streams: SimulatedStreams, rank: int, memory=StreamMemory) -> None:
        self.memory = memory(streams, rank)
        self.protocol, self.rank, self.found = PeerProtocol(self.memory), rank, {}
        self.received = {of: torch.zeros(COUNT) for of in range(SIZE)}

    def run(self, script: Script, fails_in: int = -1, fails_at: int = 0) -> None:
        for number, (kind, pairs) in enumerate(script.passes):
            at = fails_at if number == fails_in else None
            with contextlib.suppress(MemoryError):
                self.one_pass(number, kind, pairs, script, at)

    def one_pass(self, number: int, kind, pairs: list, script: Script, fails_at: int | None):
        def may_fail(at: int) -> None:
            if at == fails_at:
                raise MemoryError

        readers = [to for of, to in pairs if of == self.rank]
        sources = [of for of, to in pairs if to == self.rank]
        protocol, memory = self.protocol, self.memory
        with protocol.passes():
            protocol.begin(kind, 4 * COUNT, readers, sources)
            may_fail(0)
            if readers:
                staging = protocol.overwrite(kind).view(torch.float32)
                memory.write(staging, script.value(number, self.rank))
                may_fail(1)
                protocol.publish(kind, readers)
            may_fail(2)
            arrivals = [protocol.fetch(kind, [(of, [(0, self.received[of])])]) for of in sources]
            may_fail(3)
            for of, arrival in zip(sources, arrivals, strict=True):
                arrival.wait()
                self.found[number, of] = torch.zeros(COUNT)
                memory.write(self.found[number, of], self.received[of])  # uses what has arrived,
                memory.write(self.received[of], torch.full((COUNT,), -1.0))  # and its memory again

    def wrong(self, script: Script, may_be_nan: tuple = ()) -> list:
        """What was received and is not what was sent."""
        found = []
        for (number, of), x in self.found.items():
            right = torch.equal(x, script.value(number, of))
            if not right and not ((number, of) in may_be_nan and x.isnan().all()):
                found.append((number, of, x))
        return found


def simulate(seed: int, memory=StreamMemory, in_one_queue: bool = False) -> list:
    """The errors of one random order."""
    streams, script = SimulatedStreams(SIZE, 4 * COUNT, in_one_queue), Script(seed)
    processes = [Process(streams, rank, memory) for rank in range(SIZE)]
    for process in processes:
        process.run(script)
    streams.run(seed)
    reads = sum(len(pairs) for _, pairs in script.passes)
    assert sum(len(process.found) for process in processes) == reads
    return [error for process in processes for error in process.wrong(script)]


@pytest.mark.parametrize("in_one_queue", [False, True])
def test_every_order_of_the_streams_gives_what_was_sent(in_one_queue):
    for seed in range(300):
        assert not simulate(seed, in_one_queue=in_one_queue)


class WithoutWaits(StreamMemory):
    """Counters of one kind are not awaited."""

    ignored = 0

    def wait(self, stream, counter, value):
        if counter // self.size % 2 != self.ignored:
            super().wait(stream, counter, value)


class WithoutReady(WithoutWaits):
    ignored = 0


class WithoutDone(WithoutWaits):
    ignored = 1


class WithoutFollowing(StreamMemory):
    """One stream does not wait for the other."""

    ignored = "side"

    def follow(self, stream, event):
        if stream[1] != self.ignored:
            super().follow(stream, event)


class WithoutMain(WithoutFollowing):
    ignored = "main"


class SignalsAtOnce(StreamMemory):
    """Counters are written before what the stream has done has ended."""

    def signal(self, stream, rank, counter, value):
        self.streams.counters[rank][counter] = value


BROKEN = (WithoutReady, WithoutDone, WithoutFollowing, WithoutMain, SignalsAtOnce)


@pytest.mark.parametrize("memory", BROKEN, ids=lambda x: x.__name__)
def test_each_wait_is_needed(memory):
    assert any(simulate(seed, memory) for seed in range(300))


@pytest.mark.parametrize("fails_at", range(4))
def test_after_an_error_others_get_nan_and_the_next_passes_are_right(fails_at):
    failed = functools.partial(Process.run, fails_in=1, fails_at=fails_at)
    unsent = 0
    for seed in range(150):
        streams, script = SimulatedStreams(SIZE, 4 * COUNT), Script(seed)
        processes = [Process(streams, rank) for rank in range(SIZE)]
        for process in processes:
            (failed if process.rank == 0 else Process.run)(process, script)
        streams.run(seed)
        may_be_nan = ((1, 0),) if fails_at < 2 else ()
        for process in processes:
            assert not process.wrong(script, may_be_nan)
            unsent += any(x.isnan().any() for x in process.found.values())
        for process in processes[1:]:  # the others go on
            assert len(process.found) == sum(
                to == process.rank for _, pairs in script.passes for _, to in pairs
            )
    assert bool(unsent) == (fails_at < 2)


def test_keys_of_both_passes_share_memory_and_gradients_have_their_own():
    assert KEYS.region == KEYS_AGAIN.region != GRADIENTS.region
    assert len({kind.number for kind in KINDS}) == len(KINDS)


def test_a_pass_that_does_not_end_in_time_ends_the_process():
    first, last = (mock.Mock(**{"query.return_value": False}) for _ in range(2))
    with mock.patch.object(peer_memory, "_end") as end, mock.patch.object(time, "monotonic") as now:
        watch, now.return_value = Watch(10.0), 0.0
        watch.look()
        watch.latest = first
        watch.look()
        assert watch.latest is None  # the event is recorded no more
        watch.latest = last
        now.return_value = 9.0
        watch.look()
        first.query.return_value = True
        now.return_value = 20.0
        watch.look()  # awaits the last one from now on
        now.return_value = 29.0
        watch.look()
        assert not end.called
        now.return_value = 31.0
        watch.look()
    end.assert_called_once()
    assert "did not answer within the 10 seconds" in end.call_args.args[0]
