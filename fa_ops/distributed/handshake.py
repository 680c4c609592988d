"""Before anything is sent, all processes of a group show each other what they are about to do.

The messages are exchanged between hosts, over a gloo group, so that no GPU waits. A process whose
arguments are refused shows the error, and then all processes raise.
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.distributed.layout import Members
from fa_ops.functions import attention

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
