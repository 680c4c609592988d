"""How keys travel between the processes of a group: by reading each other's memory, or by messages.

GPUs of one host with access to each other's memory read it ("peer"); otherwise the group's backend
sends messages. All processes of a group agree on that once, in the first call. With "peer" a
process stages the keys that others attend once in a pass, at the rows where it holds them, so that
the others know where they are. Gradients of another process's keys are staged at the rows where
that process holds the keys. `peer_protocol` says when staging memory may be written and read.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import operator
import os
import platform
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.distributed.layout import Members, Segment, SequenceLayout
from fa_ops.distributed.peer_protocol import (
    GRADIENTS,
    KEYS,
    KEYS_AGAIN,
    Arrival,
    Kind,
    PeerProtocol,
)
from fa_ops.distributed.schedule import RING, Step, StepPlan, rows_of
from fa_ops.functions import attention
from fa_ops.tracing import is_capturing

# Before anything is sent, all processes of a group show each other what they are about to do.
#
# The messages are exchanged between hosts, over a gloo group, so that no GPU waits. A process whose
# arguments are refused shows the error, and then all processes raise.

_BYTES = 1024
_LONGEST = 10**9  # seconds; torch counts them in nanoseconds of 64 bits
_hosts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group: gloo group
_connected: weakref.WeakSet = weakref.WeakSet()


def agree(
    members: Members, what: str, error: Exception | None, device: torch.device, check: bool = True,
    timeout: float | None = None,
) -> None:  # fmt: skip
    """Raise in every process unless all say the same; `error` is raised in this one.

    Args:
        members: the group; every process of it must call this.
        what: a description of the call, the same on every process.
        error: what the checks of this process have raised, or None.
        device: where the tensors are.
        check: False sends nothing, and only raises this process's own error.
        timeout: seconds to wait for the others; None: the group's.

    Raises:
        ValueError: another process describes another call.
        RuntimeError: another process has raised an error, or did not answer in time.
    """
    if members.size > 1 and device.type == "cuda":
        _connect(members, device)
    if members.size == 1 or not check:
        if error is not None:
            raise error
        return
    text = f"E{error}" if error else f"C{what}"
    texts = exchanged(members, text, device, timeout)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text[:1] == "E":
            raise RuntimeError(f"process {rank} of the group has raised: {text[1:]}")
    for rank, text in enumerate(texts):
        if text != texts[members.rank]:
            raise ValueError(
                "all processes must call context parallel attention with the same shapes and "
                f"options, got {texts[members.rank][1:]} on process {members.rank} and "
                f"{text[1:]} on process {rank}"
            )


@contextlib.contextmanager
def shared_errors(
    members: Members, device: torch.device, check: bool, timeout: float | None = None
) -> Iterator[list[str]]:
    """Raise in every process if the block raises in one; with `check` alone, in this one otherwise.

    Yields a list for the words that describe the call, as in `agree`.
    """
    words, error = [], None
    try:
        yield words
    except Exception as raised:  # whatever it is, the others are waiting to hear of it
        if not check:
            raise
        error = raised
    if check:
        agree(members, ", ".join(words), error, device, check, timeout)


def error_of_timeout(timeout: object) -> ValueError | None:
    """The error of a `timeout` that is neither None nor a positive number of seconds, or None."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is None or (is_number and 0 < timeout <= _LONGEST):
        return None
    rule = f"timeout must be None or a positive number up to {_LONGEST}"
    return ValueError(f"{rule}, got {timeout!r}")


def exchanged(
    members: Members, text: str, device: torch.device, timeout: float | None
) -> list[str]:
    """The texts of all processes."""
    group = _between_hosts(members, device)
    message = text.encode()[:_BYTES].ljust(_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    messages = [torch.empty_like(mine) for _ in range(members.size)]
    try:
        work = dist.all_gather(messages, mine, group, async_op=True)
        if timeout is None:
            work.wait()
        else:
            work.wait(datetime.timedelta(seconds=timeout))
    except RuntimeError as failure:
        raise RuntimeError(
            "context parallel attention: before the first step, another process of the group did "
            f"not call it, or has ended: {failure}"
        ) from failure
    return [_text(x) for x in messages]


def _text(message: Tensor) -> str:
    return message.numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _connect(members: Members, device: torch.device) -> None:
    """Make NCCL's communicator, which all processes must do together; steps may leave out some."""
    group = members.group or dist.group.WORLD
    if group not in _connected:
        _connected.add(group)
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _between_hosts(members: Members, device: torch.device) -> dist.ProcessGroup | None:
    """A gloo group of the same processes, made by the first call for each group."""
    if device.type == "cpu" or "gloo" in dist.get_backend(members.group):
        return members.group
    group = members.group or dist.group.WORLD
    if group not in _hosts:
        ranks = [members.global_rank(rank) for rank in range(members.size)]
        timeout = datetime.timedelta(minutes=10)
        _hosts[group] = dist.new_group(
            ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
        )
    return _hosts[group]


class Transfer(NamedTuple):
    """Requests that have been started, and what they are for."""

    works: list[dist.Work | None]  # None: done, or in order on this stream
    tensors: list[Tensor]  # what is sent must live until it has been
    what: str
    timeout: float | None

    def wait(self) -> None:
        """Wait; on an NCCL stream if the group is one of NCCL.

        Raises:
            RuntimeError: another process has failed or did not answer in time.
        """
        for work in filter(None, self.works):
            try:
                if self.timeout is None:
                    work.wait()
                else:
                    work.wait(datetime.timedelta(seconds=self.timeout))
            except RuntimeError as error:
                raise RuntimeError(
                    f"context parallel attention: {self.what} failed, another process may have "
                    f"raised an error or not called it: {error}"
                ) from error


def agreed_seed(
    query: Tensor, p: float, groups: tuple[Members, ...], timeout: float | None
) -> Tensor:
    """The seed that the first process of all draws; the others draw one too, and drop it."""
    seed = attention.dropout_seed(query, p)
    for members in reversed(groups):
        if members.size > 1:
            first = members.global_rank(0)
            work = dist.broadcast(seed, first, group=members.group, async_op=True)
            Transfer([work], [seed], "the seed of dropout", timeout).wait()
    return seed


# Exchanges of keys and of their gradients.


class Exchange(NamedTuple):
    """The processes of a group, and how long to wait for each other."""

    members: Members
    timeout: float | None = None

    def start(self, sends: list, receives: list, what: str) -> Transfer:
        """Start to send and receive tensors; both are lists of (rank in the group, tensor)."""
        group = self.members.group
        operations = [
            dist.P2POp(operation, tensor, self.members.global_rank(rank), group)
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for rank, tensor in pairs
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works, [tensor for _, tensor in sends], what, self.timeout)

    @contextlib.contextmanager
    def forward_pass(self, plan: StepPlan, k: Tensor, v: Tensor) -> Iterator[None]:
        """What a forward pass sends and receives is in here."""
        yield

    @contextlib.contextmanager
    def backward_pass(
        self, plan: StepPlan, k: Tensor, v: Tensor, keeps_keys: bool
    ) -> Iterator[None]:
        """What a backward pass sends and receives is in here."""
        yield

    def keys(
        self, plan: StepPlan, k: Tensor, v: Tensor
    ) -> Iterator[tuple[int, Step, tuple[Tensor, Tensor], PackedKeys | None]]:
        """Yield (number, step, (keys, values), what was received) while those of the next arrive.

        What was received has the keys and values too.
        """
        own = _sent(plan, k, v)
        return in_advance(plan, k, v, lambda number: self._request(plan, number, own, k, v))

    def _request(
        self, plan: StepPlan, number: int, own: PackedKeys | None, k: Tensor, v: Tensor
    ) -> tuple[PackedKeys | None, Transfer]:
        """Start a step's exchange of keys; returns where they arrive."""
        step, held, receives = plan.steps[number], None, []
        if step.receives:
            held = PackedKeys.empty(step.buffer, k, v)
            if step.own:
                held.write(plan.keys, k, v)
                own = held
            receives = [(rank, x) for rank, s in step.receives for x in held.parts(s)]
        sends = [(rank, x) for rank, s in step.sends for x in own.parts(s)] if step.sends else []
        ranks = ", ".join(str(rank) for rank, _ in step.receives) or "none"
        what = f"step {number + 1} of {len(plan.steps)} (keys of process {ranks})"
        return held, self.start(sends, receives, what)

    def gradients(self, plan: StepPlan, number: int, grads: tuple, k: Tensor, v: Tensor):
        """Start to return a step's gradients of keys and values to the owners of the keys.

        Returns (rows of this process's keys, gradients of keys, gradients of values) of what others
        return, and what to wait for.
        """
        step = plan.steps[number]
        sends = [
            (rank, tokens_first(x)[rows].to(like.dtype).contiguous())
            for rank, segments in step.receives
            for rows in rows_of(step.buffer, segments)
            for x, like in zip(grads, (k, v), strict=True)
        ]
        received, receives = [], []
        for rank, segments in step.sends:
            for rows in rows_of(plan.keys, segments):
                pair = [empty_tokens(x, rows.stop - rows.start) for x in (k, v)]
                received.append((rows, *(x.permute(1, 2, 0, 3) for x in pair)))
                receives += [(rank, x) for x in pair]
        ranks = ", ".join(str(rank) for rank, _ in step.sends) or "none"
        what = f"step {number + 1} of {len(plan.steps)} (gradients from process {ranks})"
        return received, self.start(sends, receives, what)


def in_advance(
    plan: StepPlan, k: Tensor, v: Tensor, request: Callable
) -> Iterator[tuple[int, Step, tuple[Tensor, Tensor], PackedKeys | None]]:
    """The steps of `Exchange.keys`; `request(number)` starts an exchange.

    It returns where keys arrive, and what to wait for.
    """
    arriving = request(0)
    for number, step in enumerate(plan.steps):
        held, waiting = arriving
        if number + 1 < len(plan.steps):
            arriving = request(number + 1)
        waiting.wait()
        yield number, step, _keys(step, held, k, v), held


class PackedKeys(NamedTuple):
    """Keys with their values, token by token, so that consecutive tokens are one message."""

    x: Tensor  # (tokens, B, Hkv, D + Dv)
    segments: tuple[Segment, ...]  # the tokens

    @classmethod
    def empty(cls, segments: tuple[Segment, ...], k: Tensor, v: Tensor) -> PackedKeys:
        """Memory for segments of keys and values such as k and v."""
        (B, H, _, D), Dv = k.shape, v.shape[3]
        return cls(k.new_empty(_count(segments), B, H, D + Dv), segments)

    def write(self, held: tuple[Segment, ...], k: Tensor, v: Tensor) -> None:
        """Copy those of k and v, whose tokens are the segments `held`, that lie in here."""
        D = k.shape[3]
        for segment in held:
            for low, high in self.segments:
                common = (max(segment[0], low), min(segment[1], high))
                if common[0] < common[1]:
                    (to,), (of,) = rows_of(self.segments, (common,)), rows_of(held, (common,))
                    copy_rows(self.x[to, ..., :D], tokens_first(k)[of])
                    copy_rows(self.x[to, ..., D:], tokens_first(v)[of])

    def parts(self, segments: tuple[Segment, ...]) -> list[Tensor]:
        """A message for each segment."""
        return [self.x[rows] for rows in rows_of(self.segments, segments)]

    def tensors(self, D: int) -> tuple[Tensor, Tensor]:
        """The keys and the values, (B, Hkv, tokens, D) and (B, Hkv, tokens, Dv)."""
        x = self.x.permute(1, 2, 0, 3)
        return x[..., :D], x[..., D:]


def kept_keys(
    plan: StepPlan, kept: dict[int, Tensor], k: Tensor, v: Tensor
) -> Iterator[tuple[int, Step, tuple[Tensor, Tensor]]]:
    """Yield (number, step, (keys, values)) from what was received before, by number.

    Steps whose gradients are exchanged come first, and return while the last step is run.
    """
    steps = enumerate(plan.steps)
    for number, step in sorted(steps, key=lambda x: not (x[1].receives or x[1].sends)):
        held = PackedKeys(kept[number], step.buffer) if number in kept else None
        yield number, step, _keys(step, held, k, v)


def _keys(step: Step, held: PackedKeys | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a step."""
    if held is not None:
        return held.tensors(k.shape[3])
    return (k, v) if step.own else (k[:, :, :0], v[:, :, :0])


def _sent(plan: StepPlan, k: Tensor, v: Tensor) -> PackedKeys | None:
    """This process's keys that others attend, in one piece of memory for each of its segments."""
    if not plan.sent:
        return None
    packed = PackedKeys.empty(plan.sent, k, v)
    packed.write(plan.keys, k, v)
    return packed


def all_gather(
    whole: list[Tensor], mine: list[Tensor], exchange: Exchange, what: str, overlaps: bool = True
) -> Transfer:
    """Start to gather tensors, of shapes equal on all processes, along their first dimensions.

    Unless it `overlaps` with what follows, it needs no other stream on a GPU.
    """
    # the second name is that until torch 2.12, which 2.13 deprecates
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    works = [
        gather(there, x, exchange.members.group, async_op=overlaps or not x.is_cuda)
        for there, x in zip(whole, mine, strict=True)
    ]
    return Transfer(works, mine, what, exchange.timeout)


def copy_rows(to: Tensor, of: Tensor) -> None:
    """Copy rows of features, by 16 bytes at a time where that is possible.

    Elementwise kernels copy tensors of different strides by elements, two bytes at half the rate.
    """
    if to.dtype == of.dtype and all(_has_wide_rows(x) for x in (to, of)):
        to, of = to.view(torch.complex128), of.view(torch.complex128)
    to.copy_(of)


def _has_wide_rows(x: Tensor) -> bool:
    *strides, last = x.stride()
    places = x.shape[-1] | x.storage_offset() | functools.reduce(operator.or_, strides)
    return last == 1 and not (places * x.element_size() | x.data_ptr()) % 16


def tokens_first(x: Tensor) -> Tensor:
    """(tokens, B, H, D) of (B, H, tokens, D)."""
    return x.permute(2, 0, 1, 3)


def empty_tokens(x: Tensor, tokens: int) -> Tensor:
    """Memory (tokens, B, H, D) for so many tokens of x (B, H, S, D)."""
    B, H, _, D = x.shape
    return x.new_empty(tokens, B, H, D)


def _count(segments: tuple[Segment, ...]) -> int:
    return sum(stop - start for start, stop in segments)


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


TRANSPORTS = ("auto", "peer", "nccl")

# of a group and then a device: what the processes share, or why they share nothing
_shared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def exchange(
    members: Members, device: torch.device, asked: str, keys: SequenceLayout, scheme: str,
    timeout: float | None,
) -> Exchange | PeerExchange:  # fmt: skip
    """What exchanges the keys of a call.

    Raises:
        NotImplementedError: "peer" is asked for and cannot be had, in all processes.
    """
    if members.size == 1 or asked == "nccl":
        return Exchange(members, timeout)
    found = _unsuitable(device) or shared_memory(members, device, timeout)
    if isinstance(found, PeerProtocol):
        return PeerExchange(found, keys, scheme)
    if asked == "peer":
        raise NotImplementedError(f"transport 'peer' cannot be used: {found}")
    return Exchange(members, timeout)


def describe(members: Members, device: torch.device, asked: str) -> str:
    """What `exchange` would use, as far as this process knows."""
    if members.size == 1:
        return "none, there is one process"
    backend = dist.get_backend(members.group)
    if asked == "nccl":
        return backend
    group = members.group or dist.group.WORLD
    found = _unsuitable(device) or _shared.get(group, {}).get(device)
    if found is None:
        return f"peer or {backend}, which the processes agree on in the first call"
    return "peer" if isinstance(found, PeerProtocol) else f"{backend}, as {found}"


def _unsuitable(device: torch.device) -> str | None:
    """Why a call cannot read the memory of other processes, whatever the group is."""
    if device.type != "cuda":
        return f"memory on {device.type} is not shared"
    if is_capturing(device):
        return "a CUDA graph would replay the signals between processes with their old numbers"
    return None


def shared_memory(
    members: Members, device: torch.device, timeout: float | None
) -> PeerProtocol | str:
    """What the group's processes share, or why they share nothing; the same on all of them."""
    group = members.group or dist.group.WORLD
    known = _shared.setdefault(group, {})
    if device not in known:
        known[device] = _shared_memory(members, group, device, timeout)
    return known[device]


def _shared_memory(
    members: Members, group: dist.ProcessGroup, device: torch.device, timeout: float | None
) -> PeerProtocol | str:
    shown_by_all = lambda text: exchanged(members, text, device, timeout)  # noqa: E731
    from fa_ops.distributed import peer_memory

    shown = shown_by_all(f"{_host()} {_uuid(device)}")
    hosts, uuids = zip(*(text.rsplit(" ", 1) for text in shown), strict=True)
    if len(set(hosts)) > 1:
        return "the processes are on several hosts"
    reason = _first(shown_by_all(peer_memory.error() or _no_access(device, uuids) or ""))
    if reason is None:
        protocol, failed = None, ""
        try:
            protocol = PeerProtocol(peer_memory.PeerMemory(group, device))
        except Exception as error:  # whatever it is, the others are waiting to hear of it
            failed = f"symmetric memory cannot be made: {error}"
        reason = _first(shown_by_all(failed))  # counters are zero before anyone goes on
        if reason is None:
            return protocol
    warnings.warn(
        f"context parallel attention exchanges keys through NCCL, which is slower here: {reason}. "
        "transport='nccl' chooses that without this warning.",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


def _first(reasons: list[str]) -> str | None:
    """The reason of the first process that has one."""
    return next((f"{x} (process {rank})" for rank, x in enumerate(reasons) if x), None)


def _host() -> str:
    """What processes of one host have in common, and others do not."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else os.getppid()}"


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _no_access(device: torch.device, uuids: tuple[str, ...]) -> str | None:
    """Why this process cannot read the memory of all others' GPUs, or None."""
    if len(set(uuids)) < len(uuids):
        return "several processes have the same GPU"
    visible = {_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    for uuid in uuids:
        if uuid not in visible:
            return "CUDA_VISIBLE_DEVICES hides GPUs of other processes"
        other = visible[uuid]
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"GPU {device.index} has no access to the memory of GPU {other}"
    return None
