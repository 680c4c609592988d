"""Distribute the tokens of a sequence over the processes of a group.

In zigzag order a sequence is split into `2 n` chunks, and process `r` of `n` holds chunks `r` and
`2 n - 1 - r`, concatenated. Under a causal mask early chunks attend few keys and late chunks many,
so this balances the work of the processes. For other masks `balance.balanced_layout` assigns chunks
by the number of keys that their queries attend.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.call.python_types import need_bool, need_int, need_tensor
from fa_ops.ops.library import after_import

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

F = TypeVar("F", bound=Callable[..., Any])

Segment = tuple[int, int]  # tokens start <= i < stop of the whole sequence


class SequenceLayout(NamedTuple):
    """Which tokens of a sequence each process of a group holds, in ascending order.

    Attributes:
        tokens: the length of the whole sequence.
        segments: for each process its half-open ranges ``(start, stop)`` of tokens. Every token
            belongs to one process, and all processes hold equally many.

    Raises:
        ValueError: segments that overlap, leave out tokens, are not in ascending order, or are not
            equally long for all processes.
        TypeError: segments that are no tuples of ints.
    """

    tokens: int
    segments: tuple[tuple[Segment, ...], ...]

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.segments)

    @property
    def local(self) -> int:
        """The number of tokens of each process."""
        return self.tokens // max(1, self.size)

    def check(self) -> None:
        """Raise unless every token belongs to one process, and all have equally many."""
        if not _are_segments(self.segments):
            raise TypeError(
                "layout must hold a tuple for each process of tuples (start, stop) of ints, got "
                f"{self.segments!r}"
            )
        for rank, segments in enumerate(self.segments):
            held = sum(stop - start for start, stop in segments)
            if held * self.size != self.tokens:
                raise ValueError(
                    f"layout must give each of {self.size} processes {self.tokens / self.size:g} "
                    f"of {self.tokens} tokens, got {held} for process {rank}: balanced_layout "
                    "makes one that does"
                )
            if list(segments) != sorted(segments):
                raise ValueError(
                    f"layout must hold segments in ascending order, got {segments}: pass "
                    f"{tuple(sorted(segments))}"
                )
        everything = sorted(segment for held in self.segments for segment in held)
        if merged(everything) != (((0, self.tokens),) if self.tokens else ()):
            raise ValueError(
                f"layout must hold each of {self.tokens} tokens once, got {everything}: "
                "balanced_layout makes one that does"
            )

    def over(self, inner: int) -> SequenceLayout:
        """The layout of groups of `inner` processes that follow one another."""
        groups = zip(*[iter(self.segments)] * inner, strict=True)
        return SequenceLayout(
            self.tokens, tuple(merged(sorted(sum(group, ()))) for group in groups)
        )


def _are_segments(segments: object) -> bool:
    return isinstance(segments, tuple) and all(
        isinstance(held, tuple)
        and all(isinstance(part, tuple) and [type(x) for x in part] == [int, int] for part in held)
        for held in segments
    )


def merged(segments) -> tuple[Segment, ...]:
    """Ascending segments, those that touch as one, without empty ones."""
    result: list[Segment] = []
    for start, stop in segments:
        if start < stop:
            if result and result[-1][1] == start:
                result[-1] = (result[-1][0], stop)
            else:
                result.append((start, stop))
    return tuple(result)


def contiguous_layout(tokens: int, size: int) -> SequenceLayout:
    """Process `r` of `size` holds part `r` of the sequence."""
    part = tokens // max(1, size)
    return SequenceLayout(tokens, tuple(merged([(r * part, (r + 1) * part)]) for r in range(size)))


def zigzag_layout(tokens: int, size: int) -> SequenceLayout:
    """Process `r` of `n` holds chunks `r` and `2 n - 1 - r` of `2 n`."""
    chunk = tokens // max(1, 2 * size)
    chunks = [(r, 2 * size - 1 - r) for r in range(size)]
    return SequenceLayout(
        tokens, tuple(merged((c * chunk, (c + 1) * chunk) for c in pair) for pair in chunks)
    )


class Members(NamedTuple):
    """A group, the rank of this process in it, and its size."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def global_rank(self, rank: int) -> int:
        """The rank among all processes of a rank in the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def members(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The rank of this process in the group, and the size of the group.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "sequences are distributed over the processes of torch.distributed, which is not "
            "initialised: call init_process_group first"
        )
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(
            f"group must contain this process, rank {dist.get_rank()}: only its processes call this"
        )
    return found.rank(), found.size()


def groups_of(mesh_or_group) -> tuple[Members, ...]:
    """The group of each mesh dimension, one for a group.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is in none, or the mesh has not one or two dimensions.
        TypeError: neither a mesh nor a group.
    """
    if mesh_or_group is None or not hasattr(mesh_or_group, "get_group"):
        member = members(mesh_or_group) if _is_group(mesh_or_group) else None
        if member is None:
            kind = type(mesh_or_group).__name__
            raise TypeError(f"mesh_or_group must be a DeviceMesh or a ProcessGroup, got {kind}")
        return (Members(mesh_or_group, *member),)
    mesh = mesh_or_group
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh must have one dimension, or two for rings of all-to-all groups, got {mesh.ndim} "
            f"of sizes {tuple(mesh.shape)}: pass the mesh of the sequence's dimension, as in "
            'mesh["cp"]'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh must contain this process, rank {dist.get_rank()}: only its processes call this"
        )
    groups = (mesh.get_group(dim) for dim in range(mesh.ndim))
    return tuple(Members(group, *members(group)) for group in groups)


def _is_group(group: object) -> bool:
    if group is None or not dist.is_available():
        return True
    outside = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to other processes
    return group is outside or isinstance(group, dist.ProcessGroup)


def whole_group(mesh_or_group) -> tuple[Members | None, int, int]:
    """The one group that holds the sequence, if any, and the rank and size over all dimensions."""
    groups = groups_of(mesh_or_group)
    rank, size = 0, 1
    for group in groups:
        rank, size = rank * group.size + group.rank, size * group.size
    return (groups[0] if len(groups) == 1 else None), rank, size


def shard(
    x: Tensor,
    group: ProcessGroup | DeviceMesh | None = None,
    dim: int = 2,
    zigzag: bool = True,
    layout: str | SequenceLayout | None = None,
) -> Tensor:
    """The part of a sequence that this process holds. Differentiable.

    Args:
        x: the whole sequence, any shape; its length along `dim` must be a multiple of the number
            of processes, in zigzag order of twice that number.
        group: a ProcessGroup or a DeviceMesh; ``None``: all processes.
        dim: the dimension of the sequence, 2 for ``(B, H, S, D)``.
        zigzag: whether tokens are in zigzag order; else parts are contiguous.
        layout: in place of `zigzag`, the layout of :func:`context_parallel_attention`: "zigzag",
            "contiguous", or the tokens of each process, as :func:`balanced_layout` gives.

    Returns:
        x with this process's tokens alone along `dim`.

    Raises:
        ValueError, TypeError: the length is not such a multiple, or not that of the layout; x has
            no such dimension; arguments of a wrong type.
    """
    _, rank, size = whole_group(group)
    _check(x, dim, zigzag, layout)
    layout = _layout_of(x.shape[dim], dim, size, zigzag, layout)
    parts = [x.narrow(dim, start, stop - start) for start, stop in layout.segments[rank]]
    return torch.cat(parts, dim) if parts else x


def unshard(
    x: Tensor,
    group: ProcessGroup | DeviceMesh | None = None,
    dim: int = 2,
    zigzag: bool = True,
    layout: str | SequenceLayout | None = None,
) -> Tensor:
    """Gather the whole sequence from the parts of :func:`shard`. Not differentiable.

    Args:
        x: this process's part, of the same shape on all processes.
        group: as in :func:`shard`, like all further arguments.
        dim: the dimension of the sequence.
        zigzag: whether tokens are in zigzag order.
        layout: in place of `zigzag`, as in :func:`shard`.

    Returns:
        The whole sequence, on every process.

    Raises:
        ValueError, TypeError: the length is not that of the layout; x has no such dimension;
            arguments of a wrong type.
    """
    groups = groups_of(group)
    _check(x, dim, zigzag, layout)
    x = x.detach().contiguous()
    parts = [x]
    for members in reversed(groups):  # of the inner dimension first
        gathered = [[torch.empty_like(x) for _ in range(members.size)] for _ in parts]
        for received, part in zip(gathered, parts, strict=True):
            dist.all_gather(received, part, members.group)
        parts = [received[r] for r in range(members.size) for received in gathered]
    size = len(parts)
    layout = _layout_of(x.shape[dim] * size, dim, size, zigzag, layout)
    return joined(parts, layout.segments, dim) if layout.tokens else x


def _check(x: Tensor, dim: int, zigzag: bool, layout: str | SequenceLayout | None) -> None:
    """Raise TypeError or ValueError for arguments of a wrong kind, or a dimension that x lacks."""
    need_tensor("x", x)
    need_bool("zigzag", zigzag)
    if not -x.dim() <= need_int("dim", dim) < x.dim():
        raise ValueError(
            f"dim must be one of x's {x.dim()} dimensions, got {dim}: pass that of the tokens"
        )
    if layout is not None:
        check_kind(layout)


def check_kind(layout: str | SequenceLayout) -> None:
    """Raise ValueError unless it is the name of a layout, or a layout."""
    if not isinstance(layout, SequenceLayout) and layout not in ("zigzag", "contiguous"):
        raise ValueError(
            f"layout must be 'zigzag', 'contiguous' or a SequenceLayout, got {layout!r}"
        )


def joined(parts: list[Tensor], segments, dim: int) -> Tensor:
    """The tokens of several processes in ascending order, given the segments of each."""
    pieces = []
    for part, held in zip(parts, segments, strict=True):
        sizes = [stop - start for start, stop in held]
        pieces += zip(held, part.split(sizes, dim) if sizes else (), strict=True)
    if not pieces:
        return torch.cat(parts, dim)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)


def separated(x: Tensor, segments, dim: int) -> list[list[Tensor]]:
    """The reverse of `joined`: the pieces of each process's tokens, in the order of its tokens."""
    pieces = sorted((piece, rank) for rank, held in enumerate(segments) for piece in held)
    parts: list[list[Tensor]] = [[] for _ in segments]
    at = 0
    for (start, stop), rank in pieces:
        parts[rank].append(x.narrow(dim, at, stop - start))
        at += stop - start
    return [part or [x.narrow(dim, 0, 0)] for part in parts]


def _layout_of(
    tokens: int, dim: int, size: int, zigzag: bool, layout: str | SequenceLayout | None
) -> SequenceLayout:
    if isinstance(layout, SequenceLayout):
        if (layout.tokens, layout.size) != (tokens, size):
            raise ValueError(
                f"layout is of {layout.tokens} tokens on {layout.size} processes, but x has "
                f"{tokens} along dim {dim} on {size}: pass the layout with which x was made"
            )
        return layout
    if layout is not None:
        zigzag = layout == "zigzag"
    count = 2 * size if zigzag else size
    if tokens % count:
        raise ValueError(
            f"x must have a multiple of {count} tokens along dim {dim} for {size} processes, got "
            f"{tokens}: pad it by {-tokens % count}"
        )
    return (zigzag_layout if zigzag else contiguous_layout)(tokens, size)


# Functions that exchange messages run outside the graphs of torch.compile.

_waiting: list[Callable[[], None]] = []  # for the compiler to be imported


def outside_graphs(function: F) -> F:
    """Make torch.compile break its graph at the function, rather than trace the host's plans.

    `torch.compiler.disable` would import the compiler, which takes seconds, so it is applied once
    something else has imported it.
    """
    current = [function]

    @functools.wraps(function)
    def call(*args, **options):
        return current[0](*args, **options)

    def disable() -> None:
        reason = f"{function.__name__} exchanges messages with other processes"
        current[0] = torch.compiler.disable(function, reason=reason)

    _waiting.append(disable)
    if _is_imported():
        _disable_all()
    return call


def _is_imported() -> bool:
    """Whether the compiler has been imported, and not just begun to be."""
    return hasattr(sys.modules.get("torch._dynamo"), "disable")


def _disable_all() -> None:
    while _waiting and _is_imported():
        _waiting.pop()()


after_import("torch._dynamo", _disable_all)
