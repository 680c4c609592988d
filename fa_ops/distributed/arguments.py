"""What a call of `context_parallel_attention` asks for, checked before anything is sent."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fa_ops.call import backend_option, checks
from fa_ops.call.call import DENSE, Call, attention_call
from fa_ops.call.options import Operands, dtype_name
from fa_ops.call.python_types import (
    Window,
    checked_call,
    need_bool,
    need_number,
    need_tensor,
    read_scale,
    sides,
)
from fa_ops.distributed.layout import (
    Members,
    SequenceLayout,
    check_kind,
    contiguous_layout,
    zigzag_layout,
)
from fa_ops.distributed.ring_steps import StepOptions
from fa_ops.distributed.schedule import Mask, StepProblem, check_ends, on_host
from fa_ops.distributed.transport import TRANSPORTS
from fa_ops.ops import autograd, dense, varlen
from fa_ops.plans import dispatch, planning

SCHEMES = ("auto", "ring", "ulysses", "all_gather")


class ParallelOptions(NamedTuple):
    """The options of a call, as the user gave them."""

    scheme: str = "auto"
    is_causal: bool = False
    window: Window | None = None
    scale: float | Tensor | None = None  # a number in those of a `CheckedCall`
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    kv_lens: Tensor | None = None
    key_ranges: Tensor | None = None
    cu_seqlens: Tensor | None = None
    layout: str | SequenceLayout = "zigzag"
    deterministic: bool = False
    backend: str | None = None
    transport: str = "auto"

    @property
    def step_options(self) -> StepOptions:
        """What all calls of the operator share."""
        return StepOptions(self.scale, float(self.softcap), self.deterministic, self.backend)

    @property
    def sides(self) -> tuple[int, int]:
        """The window, -1 for unbounded sides."""
        return sides(self.window)


class CheckedCall(NamedTuple):
    """A checked call."""

    problem: StepProblem
    options: ParallelOptions
    text: str  # describes the call; equal on all processes
    kept: dict  # what calls that are alike share


_LIMIT = 256
_known: dict[tuple, tuple[StepProblem, str, dict]] = {}
_shared: dict[tuple, dict] = {}  # of calls whose masks are compared by a hash of their values


def error_of_flags(**flags: object) -> TypeError | None:
    """The error of the first that is no bool, of which other processes are to hear, or None."""
    for name, flag in flags.items():
        try:
            need_bool(name, flag)
        except TypeError as error:
            return error
    return None


def checked(
    query: Tensor, key: Tensor, value: Tensor, groups: tuple[Members, ...], options: ParallelOptions
) -> CheckedCall:
    """Check a call by what this process alone can know; once for calls that are alike.

    Raises:
        ValueError, TypeError: the call is not legal.
        NotImplementedError: no backend, or not the one asked for, can run it.
    """
    if isinstance(options.scale, Tensor):
        options = options._replace(scale=read_scale(options.scale))
    alike = _alike(query, key, value, groups, options)
    known = None if alike is None else _known.get(alike)
    if known is not None:
        problem, text, kept = known
        return CheckedCall(problem, options, text, kept)
    request = _checked(query, key, value, groups, options)
    if alike is None:
        sizes = tuple((group.rank, group.size) for group in groups)
        same = request.problem.key(), request.text, query.device, sizes, options.sinks is None
        if len(_shared) >= _LIMIT:
            _shared.clear()
        return request._replace(kept=_shared.setdefault(same, request.kept))
    if len(_known) >= _LIMIT:
        _known.clear()
    _known[alike] = request.problem, request.text, request.kept
    return request


def _alike(
    q: object, k: object, v: object, groups: tuple[Members, ...], options: ParallelOptions
) -> tuple | None:
    """What calls have in common that are checked alike; None where that is not known."""
    tensors = (q, k, v, options.alibi_slopes, options.sinks)
    masks = (options.kv_lens, options.cu_seqlens)
    if options.key_ranges is not None or not all(
        x is None or type(x) in (Tensor, Parameter) for x in (*tensors, *masks)
    ):
        return None
    geometry = [
        x is None or (x.shape, x.dtype, x.device, x.requires_grad, x.stride()[-1:])
        for x in (*tensors, *masks)
    ]
    values = [None if x is None else on_host(x).numpy().tobytes() for x in masks]
    sides = options.window if isinstance(options.window, tuple) else ()
    plain = options._replace(alibi_slopes=None, sinks=None, kv_lens=None, cu_seqlens=None)
    key = (
        *geometry, *values, plain, *map(type, (*plain, *sides)), backend_option.chosen(),
        torch.is_grad_enabled(),
        *((group.rank, group.size) for group in groups),
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:  # an option of a type that the checks refuse
        return None
    return key


def _checked(
    query: Tensor, key: Tensor, value: Tensor, groups: tuple[Members, ...], options: ParallelOptions
) -> CheckedCall:
    for name, t in (("query", query), ("key", key), ("value", value)):
        checks.rank(name, need_tensor(name, t), checks.LAYOUT)
    size = 1
    for members in groups:
        _check_device(query, key, value, members)
        size *= members.size
    _check_scheme(options, groups, query)
    layouts = [_layout(options.layout, name, x.shape[2], size) for name, x in _named(query, key)]
    _check_operator(query, key, value, size, options)
    _check_backend(query, key, value, options)
    mask = _mask(options, *(layout.tokens for layout in layouts))
    problem = StepProblem(
        mask, *layouts, options.alibi_slopes is not None, query.shape[0], options.dropout_p > 0
    )
    return CheckedCall(problem, options, _text(query, key, value, problem, options), {})


def _check_device(query: Tensor, key: Tensor, value: Tensor, members: Members) -> None:
    for name, t in (("key", key), ("value", value)):
        checks.same_device(query, name, t)
    kind, backends = query.device.type, dist.get_backend_config(members.group)
    if members.size > 1 and f"{kind}:" not in backends:
        raise ValueError(
            f"query is on {query.device}, but the group has backends for {backends}: make it by "
            f"new_group(backend=...) with one for {kind}"
        )


def _named(query: Tensor, key: Tensor) -> tuple:
    return ("query", query), ("key", key)


def _check_scheme(options: ParallelOptions, groups: tuple[Members, ...], query: Tensor) -> None:
    scheme = options.scheme
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    if options.transport not in TRANSPORTS:
        words = ", ".join(TRANSPORTS)
        raise ValueError(f"transport must be one of {words}, got {options.transport!r}")
    if len(groups) == 2 and scheme == "ulysses":
        raise ValueError(
            "scheme must be 'auto', 'ring' or 'all_gather' on a mesh of two dimensions, whose "
            "second one exchanges heads, got 'ulysses'"
        )
    if options.transport == "peer" and scheme == "ulysses":
        raise ValueError(
            "transport must be 'auto' or 'nccl' with scheme='ulysses', whose all-to-all is the "
            "group's backend's, got 'peer'"
        )
    exchanging = groups[-1].size if len(groups) == 2 or scheme == "ulysses" else 1
    if query.shape[1] % exchanging:
        alone = "a mesh of one dimension" if len(groups) == 2 else "scheme='ring'"
        raise ValueError(
            f"query must have a number of heads that the {exchanging} processes which exchange "
            f"heads divide, got {query.shape[1]}: pass {alone}"
        )


def _layout(layout: str | SequenceLayout, name: str, local: int, size: int) -> SequenceLayout:
    if isinstance(layout, SequenceLayout):
        if (layout.tokens, layout.size) != (local * size, size):
            raise ValueError(
                f"layout is of {layout.tokens} tokens on {layout.size} processes, but {name} has "
                f"{local} on each of {size}: pass the layout that was given to shard"
            )
        layout.check()
        return layout
    check_kind(layout)
    if layout == "contiguous":
        return contiguous_layout(local * size, size)
    if size > 1 and local % 2:
        raise ValueError(
            f"{name} must have an even number of tokens in zigzag order, got {local}: pass "
            "layout='contiguous', as to shard"
        )
    return zigzag_layout(local * size, size)


def _check_operator(q: Tensor, k: Tensor, v: Tensor, size: int, options: ParallelOptions) -> None:
    """Raise the operator's own errors for the call over the whole sequence."""
    tensors = Operands(
        None, options.alibi_slopes, options.sinks, options.kv_lens, options.key_ranges
    )
    scalars = (
        options.is_causal, options.dropout_p, options.scale, *options.sides, options.softcap,
        options.deterministic, options.backend,
    )  # fmt: skip
    call = checked_call(DENSE, q, k, v, tensors, scalars)
    if not 0.0 <= need_number("dropout_p", options.dropout_p) < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {options.dropout_p}")
    checks.contiguous_rows(query=q, key=k, value=v)
    for name, t in (("alibi_slopes", options.alibi_slopes), ("sinks", options.sinks)):
        if t is not None:
            checks.same_device(q, name, t)
    autograd.refuse_gradient_of(options.alibi_slopes)
    whole = [_whole(x, size) for x in (q, k, v)]
    on_meta = Operands(*(None if x is None else x.detach().to("meta") for x in call.operands))
    call = Call(*whole, on_meta, call.options._replace(dropout_p=0.0))  # which needs a seed
    ends = options.cu_seqlens
    if ends is None:
        dense.OPERATORS.forward.run(call)
    else:
        _check_documents(q, k, size, options)
        query, key, value = (x[0].transpose(0, 1) for x in whole)
        ends = need_tensor("cu_seqlens", ends).to("meta")
        borders = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "packed": True}
        call = call.changed(query=query, key=key, value=value, **borders)
        varlen.OPERATORS.forward.run(call)
    leaves = (q, k, v) if options.sinks is None else (q, k, v, options.sinks)
    records = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
    if records and (options.backend or backend_option.chosen()) == "reference":
        raise NotImplementedError(
            "the reference backend has no gradients of ring attention or of the other schemes, got "
            "inputs that require grad"
        )


def _whole(x: Tensor, size: int) -> Tensor:
    shape = (x.shape[0], x.shape[1], x.shape[2] * size, x.shape[3])
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _check_backend(q: Tensor, k: Tensor, v: Tensor, options: ParallelOptions) -> None:
    """Raise NotImplementedError unless a backend supports such calls on this device."""
    left, right = options.sides
    arguments = {"dropout_seed": None, "key_ranges": None}
    if options.dropout_p > 0:
        words = torch.empty(q.shape[:3], dtype=torch.int32, device=q.device)
        arguments["dropout_seed"] = words
    if (
        options.kv_lens is not None
        or options.key_ranges is not None
        or options.cu_seqlens is not None
    ):
        arguments["key_ranges"] = torch.zeros(1, 1, 1, 2, dtype=torch.int32, device=q.device)
    call = attention_call(
        q, k, v, dropout_p=options.dropout_p, is_causal=options.is_causal, scale=options.scale,
        window_left=left, window_right=right, softcap=options.softcap,
        alibi_slopes=options.alibi_slopes, backend=options.backend, **arguments,
    )  # fmt: skip
    dispatch.choose(planning.normalised(call))


def _check_documents(q: Tensor, k: Tensor, size: int, options: ParallelOptions) -> None:
    ends = need_tensor("cu_seqlens", options.cu_seqlens)
    tokens = q.shape[2] * size
    if q.shape[0] != 1:
        raise ValueError(
            f"query must have a batch of 1 with cu_seqlens, got {q.shape[0]}: put the documents "
            "one after the other"
        )
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"key must be as long as query with cu_seqlens, got {k.shape[2]} and {q.shape[2]} "
            "tokens: pass this process's part of both"
        )
    if options.key_ranges is not None:
        raise ValueError("key_ranges and cu_seqlens both separate documents: pass one of them")
    check_ends(ends, tokens)
    slopes = options.alibi_slopes
    if slopes is not None and (slopes.dim() != 1 or options.kv_lens is not None):
        raise NotImplementedError(
            "alibi_slopes with cu_seqlens must have shape (Hq,), without kv_lens: distances are "
            f"those of the packed tokens, got shape {tuple(slopes.shape)}: pass a slope for each "
            "head"
        )


def _mask(options: ParallelOptions, queries: int, keys: int) -> Mask:
    left, right = options.sides
    ranges = on_host(options.key_ranges)
    if ranges is not None:
        ranges = ranges.clamp(0, keys)
    return Mask(
        queries, keys, bool(options.is_causal), left, right, on_host(options.kv_lens), ranges,
        on_host(options.cu_seqlens),
    )  # fmt: skip


def _text(q: Tensor, k: Tensor, v: Tensor, problem: StepProblem, options: ParallelOptions) -> str:
    """What must be equal on all processes."""
    shapes = ", ".join(
        f"{name} {tuple(t.shape)}" for name, t in (("query", q), ("key", k), ("value", v))
    )
    tensors = {"alibi_slopes", "sinks", "kv_lens", "key_ranges", "cu_seqlens", "layout"}
    scalars = {n: x for n, x in options._asdict().items() if n not in tensors}
    changed = [f"{n}={x}" for n, x in scalars.items() if x != ParallelOptions._field_defaults[n]]
    there = [n for n in ("alibi_slopes", "sinks") if getattr(options, n) is not None]
    if options.sinks is not None and options.sinks.requires_grad and torch.is_grad_enabled():
        there.append("gradient of sinks")
    records = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    layout = options.layout
    if not isinstance(layout, str):
        layout = hashlib.sha1(repr(layout).encode(), usedforsecurity=False).hexdigest()[:16]
    return ", ".join([
        f"{shapes} of {dtype_name(q.dtype)}", *changed, *there,
        f"mask {problem.mask.digest()}", f"gradients {records}", f"layout {layout}",
    ])  # fmt: skip
