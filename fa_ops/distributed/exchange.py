"""Send parts of tensors between processes, and wait for them with errors that name the step."""

from __future__ import annotations

import contextlib
import datetime
import functools
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.distributed.layout import Members, Segment
from fa_ops.distributed.schedule import Step, StepPlan, rows_of


class Waiting(NamedTuple):
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


class Exchange(NamedTuple):
    """The processes of a group, and how long to wait for each other."""

    members: Members
    timeout: float | None = None

    def start(self, sends: list, receives: list, what: str) -> Waiting:
        """Start to send and receive tensors; both are lists of (rank in the group, tensor)."""
        group = self.members.group
        operations = [
            dist.P2POp(operation, tensor, self.members.global_rank(rank), group)
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for rank, tensor in pairs
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Waiting(works, [tensor for _, tensor in sends], what, self.timeout)

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
    ) -> tuple[PackedKeys | None, Waiting]:
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
) -> Waiting:
    """Start to gather tensors, of shapes equal on all processes, along their first dimensions.

    Unless it `overlaps` with what follows, it needs no other stream on a GPU.
    """
    # the second name is that until torch 2.12, which 2.13 deprecates
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    works = [
        gather(there, x, exchange.members.group, async_op=overlaps or not x.is_cuda)
        for there, x in zip(whole, mine, strict=True)
    ]
    return Waiting(works, mine, what, exchange.timeout)


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
