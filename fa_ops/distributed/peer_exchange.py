"""The exchanges of `exchange.Exchange`, by processes of one host that read each other's memory.

A process stages the keys that others attend once in a pass, at the rows where it holds them, so
that the others know where they are. Gradients of another process's keys are staged at the rows
where that process holds the keys. `peer_protocol` says when staging memory may be written and read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from fa_ops.distributed.exchange import PackedKeys, empty_tokens, in_advance, tokens_first
from fa_ops.distributed.layout import SequenceLayout
from fa_ops.distributed.peer_protocol import GRADIENTS, KEYS, KEYS_AGAIN, Arrival, PeerProtocol
from fa_ops.distributed.plans import RING, Step, StepPlan, rows_of


class PeerExchange:
    """The exchanges of one call. A pass of the call is in `forward_pass` or `backward_pass`."""

    def __init__(self, protocol: PeerProtocol, keys: SequenceLayout, scheme: str) -> None:
        self._protocol, self._layout = protocol, keys
        memory = protocol.memory
        self._rank, self._size = memory.rank, memory.size
        # a step of a ring has keys of one other process, another scheme's of all of them
        self._owners = 1 if scheme == RING else memory.size - 1
        self._kind = KEYS

    @contextlib.contextmanager
    def forward_pass(self, plan: StepPlan, k: Tensor, v: Tensor) -> Iterator[None]:
        """What a forward pass sends and receives is in here."""
        with self._protocol.passes():
            self._begin_keys(KEYS, plan, k, v)
            yield

    @contextlib.contextmanager
    def backward_pass(
        self, plan: StepPlan, k: Tensor, v: Tensor, keeps_keys: bool
    ) -> Iterator[None]:
        """What a backward pass sends and receives is in here."""
        with self._protocol.passes():
            if not keeps_keys:
                self._begin_keys(KEYS_AGAIN, plan, k, v)
            readers, sources = _others(plan)
            size = self._owners * _Rows.of(k, v, self._layout.local).nbytes
            self._protocol.begin(GRADIENTS, size, sources, readers)
            yield

    def _begin_keys(self, kind, plan: StepPlan, k: Tensor, v: Tensor) -> None:
        self._kind = kind
        self._protocol.begin(kind, _Rows.of(k, v, self._layout.local).nbytes, *_others(plan))

    def keys(
        self, plan: StepPlan, k: Tensor, v: Tensor
    ) -> Iterator[tuple[int, Step, tuple[Tensor, Tensor], PackedKeys | None]]:
        """As `Exchange.keys`."""
        readers, _ = _others(plan)
        if readers:
            rows = _Rows.of(k, v, self._layout.local)
            staged = rows.packed(self._protocol.overwrite(self._kind), k, v)
            D, segments = k.shape[3], [x for step in plan.steps for _, s in step.sends for x in s]
            for part in _joined(rows_of(plan.keys, segments)):
                staged[part, ..., :D].copy_(tokens_first(k)[part])
                staged[part, ..., D:].copy_(tokens_first(v)[part])
            self._protocol.publish(self._kind, readers)
        return in_advance(plan, k, v, lambda number: self._request(plan, number, k, v))

    def _request(
        self, plan: StepPlan, number: int, k: Tensor, v: Tensor
    ) -> tuple[PackedKeys | None, Arrival]:
        """Start to read a step's keys; returns where they arrive."""
        step, held, parts = plan.steps[number], None, []
        if step.receives:
            held = PackedKeys.empty(step.buffer, k, v)
            if step.own:
                held.write(plan.keys, k, v)
            row = _Rows.of(k, v, 1).nbytes
            for rank, segments in step.receives:
                there = rows_of(self._layout.segments[rank], segments)
                pairs = _consecutive(there, rows_of(step.buffer, segments))
                parts.append((rank, [(of.start * row, held.x[to]) for of, to in pairs]))
        return held, self._protocol.fetch(self._kind, parts)

    def gradients(self, plan: StepPlan, number: int, grads: tuple, k: Tensor, v: Tensor):
        """As `Exchange.gradients`."""
        step, rows = plan.steps[number], _Rows.of(k, v, self._layout.local)
        if step.receives:
            staging = self._protocol.overwrite(GRADIENTS)
            for rank, segments in step.receives:
                part = staging[self._slot(rank, self._rank) * rows.nbytes :]
                there = rows_of(self._layout.segments[rank], segments)
                for to, of in _consecutive(there, rows_of(step.buffer, segments)):
                    for staged, x in zip(rows.apart(part, k, v), grads, strict=True):
                        staged[to].copy_(tokens_first(x)[of])
            self._protocol.publish(GRADIENTS, [rank for rank, _ in step.receives])
        received, parts = [], []
        for rank, segments in step.sends:
            first, copies = self._slot(self._rank, rank) * rows.nbytes, []
            for part in _joined(rows_of(plan.keys, segments)):
                pair = [empty_tokens(x, part.stop - part.start) for x in (k, v)]
                received.append((part, *(x.permute(1, 2, 0, 3) for x in pair)))
                copies += [
                    (first + at, x) for at, x in zip(rows.offsets(part.start), pair, strict=True)
                ]
            parts.append((rank, copies))
        return received, self._protocol.fetch(GRADIENTS, parts)

    def _slot(self, owner: int, stager: int) -> int:
        """Which part of a process's staging memory has the gradients of an owner's keys."""
        return 0 if self._owners == 1 else (owner - stager) % self._size - 1


class _Rows(NamedTuple):
    """Where rows of keys and values, or of their gradients, are in staging memory."""

    count: int
    key: int  # bytes of a token's key
    value: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, count: int) -> _Rows:
        """So many rows of tensors such as k and v."""
        (B, H, _, D), Dv = k.shape, v.shape[3]
        unit = B * H * k.element_size()
        return cls(count, unit * D, unit * Dv)

    @property
    def nbytes(self) -> int:
        return self.count * (self.key + self.value)

    def packed(self, staging: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keys with their values, (tokens, B, Hkv, D + Dv)."""
        shape = (self.count, *k.shape[:2], k.shape[3] + v.shape[3])
        return staging[: self.nbytes].view(k.dtype).view(shape)

    def apart(self, staging: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, then values: (tokens, B, Hkv, D) and (tokens, B, Hkv, Dv)."""
        ends = self.count * self.key, self.nbytes
        flat = staging[: ends[0]], staging[ends[0] : ends[1]]
        return tuple(
            x.view(like.dtype).view(self.count, *like.shape[:2], like.shape[3])
            for x, like in zip(flat, (k, v), strict=True)
        )

    def offsets(self, row: int) -> tuple[int, int]:
        """Where a row's key and value are, of `apart`."""
        return row * self.key, self.count * self.key + row * self.value


def _others(plan: StepPlan) -> tuple[list[int], list[int]]:
    """Who attends keys of this process, and whose keys this process attends."""
    steps = plan.steps
    readers = [rank for step in steps for rank, _ in step.sends]
    return readers, [rank for step in steps for rank, _ in step.receives]


def _joined(rows: list[slice]) -> list[slice]:
    """The rows in ascending order, each once, those that touch as one."""
    found: list[slice] = []
    for part in sorted(rows, key=lambda x: x.start):
        if found and part.start <= found[-1].stop:
            found[-1] = slice(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return found


def _consecutive(these: list[slice], those: list[slice]) -> list[tuple[slice, slice]]:
    """Pairs of equally many rows, pairs of which both follow on the last as one."""
    found: list[tuple[slice, slice]] = []
    for a, b in zip(these, those, strict=True):
        if found and (found[-1][0].stop, found[-1][1].stop) == (a.start, b.start):
            a, b = slice(found[-1][0].start, a.stop), slice(found[-1][1].start, b.stop)
            found.pop()
        found.append((a, b))
    return found
