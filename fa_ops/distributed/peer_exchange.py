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

from fa_ops.distributed.exchange import (
    PackedKeys,
    copy_rows,
    empty_tokens,
    in_advance,
    tokens_first,
)
from fa_ops.distributed.layout import Segment, SequenceLayout
from fa_ops.distributed.peer_protocol import (
    GRADIENTS,
    KEYS,
    KEYS_AGAIN,
    Arrival,
    Kind,
    PeerProtocol,
)
from fa_ops.distributed.plans import RING, Step, StepPlan, rows_of


class PeerExchange:
    """The exchanges of one call. A pass of the call is in `forward_pass` or `backward_pass`."""

    def __init__(self, protocol: PeerProtocol, keys: SequenceLayout, scheme: str) -> None:
        self._protocol, self._layout = protocol, keys
        self._rank, self._size = protocol.memory.rank, protocol.memory.size
        # a step of a ring has keys of one other process, another scheme's of all of them
        self._owners = 1 if scheme == RING else self._size - 1
        self._kind, self._sizes = KEYS, None

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
            routes, size = self._routes(plan), self._owners * self._rows(k, v).nbytes
            self._protocol.begin(GRADIENTS, size, routes.sources, routes.readers)
            yield

    def _begin_keys(self, kind: Kind, plan: StepPlan, k: Tensor, v: Tensor) -> None:
        self._kind, routes = kind, self._routes(plan)
        self._protocol.begin(kind, self._rows(k, v).nbytes, routes.readers, routes.sources)

    def keys(
        self, plan: StepPlan, k: Tensor, v: Tensor
    ) -> Iterator[tuple[int, Step, tuple[Tensor, Tensor], PackedKeys | None]]:
        """As `Exchange.keys`."""
        routes, D = self._routes(plan), k.shape[3]
        if routes.readers:
            staged = self._rows(k, v).packed(self._protocol.overwrite(self._kind), k, v)
            for part in routes.staged:
                copy_rows(staged[part, ..., :D], tokens_first(k)[part])
                copy_rows(staged[part, ..., D:], tokens_first(v)[part])
            self._protocol.publish(self._kind, routes.readers)
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
            row = self._rows(k, v).row
            parts = [
                (rank, [(of.start * row, held.x[to]) for of, to in pairs])
                for rank, pairs in self._routes(plan).received[number]
            ]
        return held, self._protocol.fetch(self._kind, parts)

    def gradients(self, plan: StepPlan, number: int, grads: tuple, k: Tensor, v: Tensor):
        """As `Exchange.gradients`."""
        routes, rows = self._routes(plan), self._rows(k, v)
        if routes.received[number]:
            staging = self._protocol.overwrite(GRADIENTS)
            for rank, pairs in routes.received[number]:
                slot = staging[self._slot(rank, self._rank) * rows.nbytes :]
                for staged, x in zip(rows.apart(slot, k, v), grads, strict=True):
                    for there, here in pairs:
                        copy_rows(staged[there], tokens_first(x)[here])
            self._protocol.publish(GRADIENTS, [rank for rank, _ in routes.received[number]])
        received, parts = [], []
        for rank, pieces in routes.returned[number]:
            slot, copies = self._slot(self._rank, rank) * rows.nbytes, []
            for part in pieces:
                pair = [empty_tokens(x, part.stop - part.start) for x in (k, v)]
                received.append((part, *(x.permute(1, 2, 0, 3) for x in pair)))
                places = rows.offsets(part.start)
                copies += [(slot + at, x) for at, x in zip(places, pair, strict=True)]
            parts.append((rank, copies))
        return received, self._protocol.fetch(GRADIENTS, parts)

    def _slot(self, owner: int, stager: int) -> int:
        """Which part of a process's staging memory has the gradients of an owner's keys."""
        return 0 if self._owners == 1 else (owner - stager) % self._size - 1

    def _rows(self, k: Tensor, v: Tensor) -> _Rows:
        if self._sizes is None:
            (B, H, _, D), unit = k.shape, k.element_size()
            sizes = B * H * D * unit, B * H * v.shape[3] * unit
            self._sizes = _Rows(self._layout.local, *sizes)
        return self._sizes

    def _routes(self, plan: StepPlan) -> Routes:
        """What follows from a plan; kept as long as this is used."""
        known = _known.get(id(plan))
        if known is None:
            if len(_known) >= _LIMIT:
                _known.clear()
            known = _known[id(plan)] = plan, Routes.of(plan, self._layout.segments)
        return known[1]


class Routes(NamedTuple):
    """Which rows travel in which step."""

    readers: tuple[int, ...]  # who attends keys of this process
    sources: tuple[int, ...]  # whose keys this process attends
    staged: tuple[slice, ...]  # rows of this process that others attend
    # for each step from whom, the rows there, and the rows of the step's keys
    received: tuple[list[tuple[int, list[tuple[slice, slice]]]], ...]
    # for each step from whom gradients return, and the rows of this process
    returned: tuple[list[tuple[int, list[slice]]], ...]

    @classmethod
    def of(cls, plan: StepPlan, held: tuple[tuple[Segment, ...], ...]) -> Routes:
        """Those of a plan; `held` has the keys of all processes."""
        received, returned = [], []
        for step in plan.steps:
            received.append([
                (rank, _consecutive(rows_of(held[rank], wanted), rows_of(step.buffer, wanted)))
                for rank, wanted in step.receives
            ])  # fmt: skip
            returned.append([(r, _joined(rows_of(plan.keys, wanted))) for r, wanted in step.sends])
        staged = _joined([part for step in returned for _, parts in step for part in parts])
        readers, sources = (
            tuple(rank for step in steps for rank, _ in step) for steps in (returned, received)
        )
        return cls(readers, sources, tuple(staged), tuple(received), tuple(returned))


_LIMIT = 32
_known: dict[int, tuple[StepPlan, Routes]] = {}  # by the identity of plans, which are kept here


class _Rows(NamedTuple):
    """Where rows of keys and values, or of their gradients, are in staging memory."""

    count: int
    key: int  # bytes of a token's key
    value: int

    @property
    def row(self) -> int:
        return self.key + self.value

    @property
    def nbytes(self) -> int:
        return self.count * self.row

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
