"""Attention over a sequence that is distributed over the processes of a group or a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from fa_ops.call.python_types import Window, refuse_unknown
from fa_ops.distributed import balance, ring_steps, schedule, ulysses
from fa_ops.distributed import transport as transports
from fa_ops.distributed.arguments import CheckedCall, ParallelOptions, checked, error_of_flags
from fa_ops.distributed.balance import SchemeChoice
from fa_ops.distributed.layout import Members, SequenceLayout, groups_of, outside_graphs
from fa_ops.distributed.ring_steps import AttentionInSteps, Job, RowWords, row_words
from fa_ops.distributed.schedule import Mask, StepProblem, positions
from fa_ops.distributed.transport import agreed_seed
from fa_ops.distributed.ulysses import HeadSplit, ToHeads, ToTokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from fa_ops.call.python_types import ContextParallelOptions


@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None, scheme: str = "auto",
    *, return_lse: Literal[False] = False, layout: str | SequenceLayout = "zigzag",
    transport: str = "auto", check: bool = True, timeout: float | None = None,
    **options: Unpack[ContextParallelOptions],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None, scheme: str = "auto",
    *, return_lse: Literal[True], layout: str | SequenceLayout = "zigzag",
    transport: str = "auto", check: bool = True, timeout: float | None = None,
    **options: Unpack[ContextParallelOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None, scheme: str = "auto",
    *, return_lse: bool, layout: str | SequenceLayout = "zigzag",
    transport: str = "auto", check: bool = True, timeout: float | None = None,
    **options: Unpack[ContextParallelOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@outside_graphs
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None,
    scheme: str = "auto",
    *,
    is_causal: bool = False,
    window: Window | None = None,
    scale: float | Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    layout: str | SequenceLayout = "zigzag",
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    transport: str = "auto",
    check: bool = True,
    timeout: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this process's queries over the keys of all processes. Differentiable.

    Every process of the group must call it with its tokens of the sequence, equally many. Options
    have the meaning that they have in :func:`fa_ops.attention` for the whole sequence, and masks
    are those of the whole sequence, equal on all processes. Mask tensors may be on the CPU; those
    on a GPU are read by the host once.

    Shape legend: ``B`` batch, ``Hq`` and ``Hkv`` query and key heads (``Hkv`` divides ``Hq``),
    ``S`` tokens of this process, ``n`` processes, ``D`` and ``Dv`` head dimensions.

    Args:
        query: ``(B, Hq, S, D)``.
        key: ``(B, Hkv, S, D)``, or another length that all processes share.
        value: ``(B, Hkv, S, Dv)``.
        mesh_or_group: a ProcessGroup, a DeviceMesh of one dimension, or one of two dimensions: then
            heads are exchanged on the second, and keys on the first. ``None``: all processes.
        scheme: "ring": keys and values of one process after the other are attended, while the next
            ones arrive. "ulysses": an all-to-all gives each process all tokens of some heads.
            "all_gather": all keys that a process attends are gathered, then attended at once.
            "auto": the fastest by estimate, see :func:`explain_context_parallel`.
        is_causal: token ``i`` attends tokens ``j <= i``.
        window: ``(left, right)``, keys that stay visible on either side of a query's position.
        scale: factor of the scores, or a tensor with it, as in :func:`fa_ops.attention`; ``None``:
            ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        dropout_p: probability of dropping a weight. The seed is drawn by the group's first
            process, and drops the weights that it would drop on one device.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``. No gradient.
        sinks: ``(Hq,)``. Its gradient is this process's part: the sum over processes is the whole.
        kv_lens: int32 ``(B,)``; with `cu_seqlens` the keys of each document.
        key_ranges: int32 ``(B or 1, Hq or 1, n S or 1, 2)``.
        cu_seqlens: int32 ``(documents + 1,)``, the boundaries of documents that are packed in the
            sequence. Tokens attend their own document. ``B`` must be 1.
        layout: which tokens each process holds: "zigzag" or "contiguous", as passed to
            :func:`shard`, or a :class:`SequenceLayout`, such as :func:`balanced_layout` returns.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: whether the backward pass is bitwise repeatable.
        backend: as in :func:`fa_ops.attention`; "reference" only without gradients.
        transport: how keys and their gradients travel, with the schemes "ring" and "all_gather".
            "peer": the processes read each other's memory, by copy engines, so that transfers need
            no multiprocessor; on GPUs of one host, without the scheme "ulysses". "nccl":
            messages by the group's backend. "auto": "peer" where it can be used, outside of CUDA
            graphs.
        check: whether the processes compare their arguments before anything else is sent. This
            takes a message between hosts, 0.2 to 1 ms, and no GPU waits. Where it is off, unequal
            arguments may hang.
        timeout: seconds after which waiting for another process fails: between hosts, before the
            first step, and on gloo in each step. ``None``: the group's. In steps on GPUs the
            group's timeout always holds.

    Returns:
        ``out`` ``(B, Hq, S, Dv)`` in query's dtype; with ``return_lse`` ``(out, lse)``, ``lse``
        ``(B, Hq, S)``. Gradients flow through both.

    Raises:
        ValueError: shapes, masks or layouts that do not fit each other or those of other processes,
            a group without this process, a mesh of more than two dimensions.
        TypeError: a dtype or Python type that is not accepted.
        RuntimeError: torch.distributed is not initialised; another process raised an error or did
            not answer, the message names the step.
        NotImplementedError: no backend, or not the requested one, supports the call.

    Source: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; Jacobs et al., DeepSpeed
    Ulysses, https://arxiv.org/abs/2309.14509; Dubey et al., The Llama 3 Herd of Models (section
    3.3.2, all-gather), https://arxiv.org/abs/2407.21783; Fang and Zhao, USP,
    https://arxiv.org/abs/2405.07719.

    Examples:
        >>> q, k, v = (shard(x) for x in (q, k, v))  # whole in every process before
        >>> out = context_parallel_attention(q, k, v, is_causal=True)
    """
    groups = groups_of(mesh_or_group)
    options = ParallelOptions(
        scheme, is_causal, window, scale, softcap, dropout_p, alibi_slopes, sinks, kv_lens,
        key_ranges, cu_seqlens, layout, deterministic, backend, transport,
    )  # fmt: skip
    query, key, value = _autocast(query, key, value)
    error = error_of_flags(check=check, return_lse=return_lse)
    request = agreed(query, key, value, groups, options, return_lse, check, error, timeout)
    out, lse = attend(query, key, value, groups, request, return_lse, timeout)
    return (out, lse) if return_lse else out


def explain_context_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None,
    scheme: str = "auto",
    **options: Any,
) -> SchemeChoice:
    """Explain which scheme a call of :func:`context_parallel_attention` uses, and why.

    Nothing is sent or computed.

    The arguments are those of the call; `check`, `timeout` and `return_lse` do not matter.

    Returns:
        The scheme, the estimated seconds of each, the reasons against the others, and what each
        step of this process attends. Printing it shows all.

    Raises:
        ValueError, TypeError, NotImplementedError: what the checks of this process raise.
    """
    groups = groups_of(mesh_or_group)
    for name in ("check", "timeout", "return_lse"):
        options.pop(name, None)
    unknown = [name for name in options if name not in ParallelOptions._fields]
    if unknown:
        refuse_unknown(context_parallel_attention, {unknown[0]: None})
    query, key, value = _autocast(query, key, value)
    request = checked(query, key, value, groups, ParallelOptions(scheme, **options))
    chosen = choice(query, key, value, groups, request)
    if chosen.scheme == "ulysses":
        return chosen
    transport = transports.describe(groups[0], query.device, request.options.transport)
    problem = _of_groups(request.problem, groups)
    steps = schedule.plan(problem, chosen.scheme, groups[0].rank).steps
    words = tuple(_words(n, step) for n, step in enumerate(steps, 1))
    return chosen._replace(steps=words, transport=transport)


def _words(number: int, step: schedule.Step) -> str:
    sources = ["own keys"] * bool(step.own)
    sources += [
        f"{sum(b - a for a, b in segments)} keys of process {rank}"
        for rank, segments in step.receives
    ]
    forms = [f"{call.rows.stop - call.rows.start} queries, {call.form}" for call in step.calls]
    return f"step {number}: {', '.join(sources) or 'no keys'}: {'; '.join(forms) or 'skipped'}"


def measure_link_rate(
    mesh_or_group: ProcessGroup | DeviceMesh | None = None, device: str | torch.device = "cpu"
) -> float:
    """Measure the rate of the link between processes, for the estimates of `scheme="auto"`.

    All processes must call it.

    Args:
        mesh_or_group: as in :func:`context_parallel_attention`; of a mesh of two dimensions the
            first is measured.
        device: the type of device whose memory is sent.

    Returns:
        Bytes per second of the slowest process, infinite for a group of one. It is kept.
    """
    return balance.measure_link_rate(groups_of(mesh_or_group)[0], torch.device(device))


def agreed(
    query: Tensor, key: Tensor, value: Tensor, groups: tuple[Members, ...],
    options: ParallelOptions,
    return_lse: bool, check: bool = True, error: Exception | None = None,
    timeout: float | None = None,
) -> CheckedCall:  # fmt: skip
    """The checked call, once all processes have shown that theirs is the same.

    The error of one process reaches those of its own row of a mesh, and then all others. `error` is
    one that this process has found before.
    """
    request, text = None, ""
    refused = transports.error_of_timeout(timeout)
    if refused is not None:
        error, timeout = error or refused, None
    try:
        request = checked(query, key, value, groups, options)
        text = request.text + ", return_lse" * (return_lse is True)
    except Exception as refused:  # whatever it is, the others are waiting to hear of it
        error = error or refused
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    for members in reversed(groups):
        try:
            # a process whose `check` is refused shows that to the others
            transports.agree(members, text, error, device, check is not False, timeout)
        except Exception as refused:
            error = error or refused
    if error is not None:
        raise error
    return request


def choice(
    query: Tensor, key: Tensor, value: Tensor, groups: tuple[Members, ...], request: CheckedCall
) -> SchemeChoice:
    """The scheme of a call: the one asked for, or the one that `costs` chooses."""
    options = request.options
    problem, reason = _of_groups(request.problem, groups), None
    if options.transport == "peer":
        reason = "its all-to-all is the group's backend's, not 'peer'"
    if len(groups) == 2:
        reason, inner = "heads are exchanged on the other dimension of the mesh", groups[1].size
        query = query[:, : query.shape[1] // inner]
        key, value = (x[:, : max(1, x.shape[1] // inner)] for x in (key, value))
    found = balance.choose(problem, query, key, value, groups[0], reason)
    if options.scheme in ("auto", found.scheme):
        return found
    others = dict.fromkeys(set(found.seconds) - {options.scheme}, "not asked for")
    return found._replace(scheme=options.scheme, reasons=others)


def attend(
    query: Tensor, key: Tensor, value: Tensor, groups: tuple[Members, ...], request: CheckedCall,
    return_lse: bool, timeout: float | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run a checked call, whose tensors have autocast's dtype."""
    if torch.is_autocast_enabled(query.device.type):
        with torch.autocast(query.device.type, enabled=False):
            return attend(query, key, value, groups, request, return_lse, timeout)
    scheme = request.options.scheme
    if scheme == "auto":
        scheme = chosen_scheme(query, key, value, groups, request)
    if scheme == "ulysses" or len(groups) == 2:
        return _with_heads(query, key, value, groups, request, scheme, return_lse, timeout)
    options, heads = request.options, slice(0, query.shape[1])
    words = _seeded(query, groups, request, heads, query.shape[1], timeout)
    return _in_steps(
        query, key, value, options.sinks, options.alibi_slopes, groups[0], request.problem,
        scheme, request, timeout, words,
    )  # fmt: skip


def _seeded(
    query: Tensor,
    groups: tuple[Members, ...],
    request: CheckedCall,
    heads: slice,
    Hq: int,
    timeout: float | None,
) -> Callable[[schedule.StepPlan], RowWords] | None:
    """What gives the words of dropout to the queries of a plan, these of `Hq` heads; or None."""
    p = request.options.dropout_p
    if not p:
        return None
    seed, B = agreed_seed(query, p, groups, timeout), query.shape[0]
    mask = request.problem.mask
    return lambda plan: RowWords(p, row_words(seed, mask, plan.queries, B, heads, Hq))


def chosen_scheme(query, key, value, groups, request: CheckedCall) -> str:
    """The scheme that "auto" stands for; kept for calls that are alike."""
    rates = balance.rates_for(groups[0], query.device)
    if rates not in request.kept:
        request.kept[rates] = choice(query, key, value, groups, request).scheme
    return request.kept[rates]


def _in_steps(
    query, key, value, sinks, slopes, members: Members, problem: StepProblem, scheme: str,
    request: CheckedCall, timeout, words: Callable[[schedule.StepPlan], RowWords] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    known = request.kept.get(scheme)
    if known is None:
        plan = schedule.plan(problem, scheme, members.rank)
        outside = None if sinks is None else _outside(problem.mask, plan, query.device)
        keeps_keys = _keeps_keys(query, key, value, members.size)
        known = request.kept[scheme] = plan, keeps_keys, outside
    exchange = transports.exchange(
        members, query.device, request.options.transport, problem.keys, scheme, timeout
    )
    dropout = None if words is None else words(known[0])
    job = Job(*known, exchange, request.options.step_options, slopes, dropout)
    if not torch.is_grad_enabled():
        return ring_steps.attend(query, key, value, sinks, job)[:2]
    return AttentionInSteps.apply(query, key, value, sinks, job)


def _keeps_keys(query: Tensor, key: Tensor, value: Tensor, size: int) -> bool:
    """Whether the keys of all processes take no more memory than this one's query and out.

    They are kept then for the backward pass. All processes must decide alike.
    """
    D, Dv = query.shape[3], value.shape[3]
    tokens = size * key.shape[2] * key.shape[1]
    return tokens * (D + Dv) <= query.shape[2] * query.shape[1] * (D + Dv)


def _outside(mask: Mask, plan: schedule.StepPlan, device: torch.device) -> Tensor | None:
    """Which of this process's tokens belong to no document; None if there are no documents."""
    if mask.cu_seqlens is None:
        return None
    i = positions(plan.queries)
    return ((i < mask.cu_seqlens[0]) | (i >= mask.cu_seqlens[-1])).to(device)


def _of_groups(problem: StepProblem, groups: tuple[Members, ...]) -> StepProblem:
    """The problem of the processes that exchange keys."""
    return problem if len(groups) == 1 else problem.over(groups[1].size)


def _with_heads(
    query, key, value, groups, request: CheckedCall, scheme: str, return_lse: bool, timeout
) -> tuple[Tensor, Tensor | None]:
    """Exchange heads, attend, exchange them back."""
    members, options, problem = groups[-1], request.options, request.problem
    here = slice(groups[0].rank * members.size, (groups[0].rank + 1) * members.size)
    if len(groups) == 1:
        here = slice(0, members.size)
    tokens = (x.segments[here] for x in (problem.queries, problem.keys))
    split = HeadSplit(members, *tokens, query.shape[1], key.shape[1], timeout)
    q, k, v = ToHeads.apply(query, key, value, split)
    k, v = split.served(k), split.served(v)
    heads = split.query_heads(members.rank)
    has_words = options.dropout_p > 0 and options.cu_seqlens is not None
    if len(groups) == 1 and not has_words:
        out, lse = ulysses.attend(q, k, v, split, problem.mask, options)
    else:
        part = problem.over(members.size)
        part = part._replace(mask=part.mask.heads(heads))
        sinks, slopes = ulysses.of_heads(options.sinks, options.alibi_slopes, heads)
        words = _seeded(q, groups, request, heads, query.shape[1], timeout)
        outer = groups[0] if len(groups) == 2 else Members(None, 0, 1)
        out, lse = _in_steps(q, k, v, sinks, slopes, outer, part, scheme, request, timeout, words)
    if return_lse:
        return ToTokens.apply(split, out, lse)
    return ToTokens.apply(split, out)[0], None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, if it is on."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )
