"""Send parts of tensors between processes, and wait for them with errors that name the step."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.distributed.layout import Members, Segment
from fa_ops.distributed.plans import Step, StepPlan


class Waiting(NamedTuple):
    """Requests that have been started, and what they are for."""

    works: list[dist.Work]
    tensors: list[Tensor]  # what is sent must live until it has been
    what: str
    timeout: float | None

    def wait(self) -> None:
        """Wait; on an NCCL stream if the group is one of NCCL.

        Raises:
            RuntimeError: another process has failed or did not answer in time.
        """
        for work in self.works:
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

    def keys(self, plan: StepPlan, k: Tensor, v: Tensor) -> Iterator[tuple[int, Step, list]]:
        """Yield (number, step, [keys, values]), while receiving those of the next step."""
        arriving = self._request(plan, 0, k, v)
        for number, step in enumerate(plan.steps):
            received, waiting = arriving
            if number + 1 < len(plan.steps):
                arriving = self._request(plan, number + 1, k, v)
            waiting.wait()
            yield number, step, _buffers(plan, step, (k, v), received)

    def _request(self, plan: StepPlan, number: int, k: Tensor, v: Tensor) -> tuple[list, Waiting]:
        """Start a step's exchange of keys; returns what is received from each process."""
        step = plan.steps[number]
        sends = [(r, part(x, plan.keys, s)) for r, s in step.sends for x in (k, v)]
        received = [[_empty(x, s) for x in (k, v)] for _, s in step.receives]
        receives = [(rank, x) for (rank, _), pair in zip(step.receives, received) for x in pair]
        ranks = ", ".join(str(rank) for rank, _ in step.receives) or "none"
        what = f"step {number + 1} of {len(plan.steps)} (keys of process {ranks})"
        return received, self.start(sends, receives, what)

    def gradients(self, plan: StepPlan, number: int, grads: tuple, k: Tensor, v: Tensor):
        """Start to return a step's gradients of keys and values to the owners of the keys.

        Returns the gradients of this process's keys that others return, and what to wait for.
        """
        step, buffer = plan.steps[number], plan.steps[number].buffer
        sends = [
            (r, part(x, buffer, s).to(like.dtype))
            for r, s in step.receives
            for x, like in zip(grads, (k, v), strict=True)
        ]
        received = [[_empty(x, s) for x in (k, v)] for _, s in step.sends]
        receives = [(rank, x) for (rank, _), pair in zip(step.sends, received) for x in pair]
        ranks = ", ".join(str(rank) for rank, _ in step.sends) or "none"
        what = f"step {number + 1} of {len(plan.steps)} (gradients from process {ranks})"
        return received, self.start(sends, receives, what)


def all_gather(
    whole: Tensor, mine: Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Gather tensors of equal shapes along their first dimension."""
    # the second name is that until torch 2.12, which 2.13 deprecates
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, mine, group, async_op)


def part(x: Tensor, held: tuple[Segment, ...], wanted: tuple[Segment, ...]) -> Tensor:
    """The wanted segments of (B, H, S, D), whose tokens are the segments held; contiguous."""
    pieces = [x[:, :, rows] for rows in rows_of(held, wanted)]
    if not pieces:
        return x[:, :, :0]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, 2)


def rows_of(held: tuple[Segment, ...], wanted: tuple[Segment, ...]) -> list[slice]:
    """Where wanted segments, each within one that is held, are in memory."""
    found = []
    for start, stop in wanted:
        at = 0
        for low, high in held:
            if low <= start and stop <= high:
                found.append(slice(at + start - low, at + stop - low))
            at += high - low
    return found


def _empty(x: Tensor, segments: tuple[Segment, ...]) -> Tensor:
    tokens = sum(stop - start for start, stop in segments)
    return x.new_empty(x.shape[0], x.shape[1], tokens, x.shape[3])


def _buffers(plan: StepPlan, step: Step, own: tuple[Tensor, Tensor], received: list) -> list:
    """The keys and values of a step in the order of its buffer; without a copy from one source."""
    if not step.receives:
        return list(own) if step.own else [x[:, :, :0] for x in own]
    if not step.own and len(step.receives) == 1:
        return received[0]
    buffers = []
    for n, x in enumerate(own):
        pieces = list(zip(step.own, x.split([b - a for a, b in step.own], 2), strict=True))
        for (_, segments), pair in zip(step.receives, received, strict=True):
            pieces += zip(segments, pair[n].split([b - a for a, b in segments], 2), strict=True)
        buffers.append(torch.cat([piece for _, piece in sorted(pieces, key=_start)], 2))
    return buffers


def _start(piece: tuple[Segment, Tensor]) -> Segment:
    return piece[0]
