"""Decoding against a cache whose keys are distributed over the processes of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.options import dtype_name
from fa_ops.call.python_types import (
    ShardedCacheOptions,
    Window,
    need_bool,
    need_tensor,
    read_scale,
    sides,
)
from fa_ops.distributed import transport
from fa_ops.distributed.layout import groups_of, outside_graphs
from fa_ops.distributed.transport import Exchange, all_gather
from fa_ops.functions import attention
from fa_ops.functions.kv_cache import attention_with_kv_cache

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


@overload
def attention_with_sharded_kv_cache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, kv_lens: Tensor,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None, page_table: Tensor | None = None,
    is_causal: bool = False,
    *, return_lse: Literal[False] = False, check: bool = False,
    timeout: float | None = None, **options: Unpack[ShardedCacheOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_with_sharded_kv_cache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, kv_lens: Tensor,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None, page_table: Tensor | None = None,
    is_causal: bool = False,
    *, return_lse: Literal[True], check: bool = False,
    timeout: float | None = None, **options: Unpack[ShardedCacheOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_sharded_kv_cache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, kv_lens: Tensor,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None, page_table: Tensor | None = None,
    is_causal: bool = False,
    *, return_lse: bool, check: bool = False,
    timeout: float | None = None, **options: Unpack[ShardedCacheOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@outside_graphs
def attention_with_sharded_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_lens: Tensor,
    mesh_or_group: ProcessGroup | DeviceMesh | None = None,
    page_table: Tensor | None = None,
    is_causal: bool = False,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    scale: float | Tensor | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    check: bool = False,
    timeout: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of queries, equal on all processes, over a cache of which each holds some keys.

    Each process attends its own keys with :func:`attention_with_kv_cache`. Partial results and
    their log-sum-exps are then gathered and merged on every process. The host reads no length.

    Where positions matter (`is_causal` with several queries, a window, ALiBi), keys are in the
    order of the processes: those of process 0 first in each row. The new keys of a step are given
    to the last process then, and otherwise to any one process.

    Args:
        query: ``(B, Hq, Sq, D)``, equal on all processes, and already rotated.
        key_cache: this process's keys, as in :func:`attention_with_kv_cache`.
        value_cache: the same for values.
        kv_lens: int32 ``(B,)``, keys that each row of this process's cache holds before the call.
        mesh_or_group: a ProcessGroup or a DeviceMesh of one dimension; ``None``: all processes.
        page_table: of this process's cache.
        is_causal: query ``i`` attends keys up to its own position, ``Sq - 1 - i`` before the last.
            The last ``Sq`` keys of each row must be on the last process.
        key: ``(B, Hkv, Sn, D)``, to be appended to this process's cache; None on other processes.
        value: ``(B, Hkv, Sn, Dv)``.
        scale: factor of the scores, or a tensor with it, as in :func:`fa_ops.attention`; ``None``:
            ``1 / sqrt(D)``.
        window: ``(left, right)``; one query only.
        softcap: as in :func:`attention_with_kv_cache`.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``; one query only.
        sinks: ``(Hq,)``, equal on all processes.
        k_scale: of this process's cache, as in :func:`attention_with_kv_cache`.
        v_scale: the same for values.
        num_splits: number of splits of this process's keys; 0: chosen from shapes.
        batch_invariant: as in :func:`attention_with_kv_cache`.
        return_lse: also return the logarithm of the softmax's denominator.
        backend: as in :func:`fa_ops.attention`.
        check: whether the processes compare shapes and options first, and tell each other of errors
            up to those of their own attention, between hosts. Where it is off, the others of a
            process that raises wait until `timeout`, and unequal arguments may end all.
        timeout: seconds after which waiting for another process fails, between hosts and on gloo.
            ``None``: the group's. On NCCL the group's timeout always holds.

    Returns:
        ``out`` ``(B, Hq, Sq, Dv)`` in query's dtype, equal on all processes; with ``return_lse``
        ``(out, lse)``.

    Raises:
        ValueError, TypeError: what :func:`attention_with_kv_cache` raises; a mesh of two
            dimensions.
        RuntimeError: torch.distributed is not initialised; another process raised an error or did
            not answer, the message names the step.
        NotImplementedError: a window or ALiBi with several queries.

    Source: Dao et al., Flash-Decoding, https://pytorch.org/blog/flash-decoding, for the merge.
    """
    groups = groups_of(mesh_or_group)
    if len(groups) != 1:
        raise ValueError(
            "mesh must have one dimension for a sharded cache, got 2: pass the one over which keys "
            'are distributed, as in mesh["cp"]'
        )
    exchange, (members,) = Exchange(groups[0], timeout), groups
    need_bool("check", check)
    placed = {"window": window, "alibi_slopes": alibi_slopes}
    placed = {name: given for name, given in placed.items() if given is not None}
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    with transport.shared_errors(members, device, check, timeout) as words:
        _check(query, kv_lens, key, sinks, placed, timeout)
        need_bool("is_causal", is_causal)
        need_bool("return_lse", return_lse)
        scale = read_scale(scale)
        options = {"is_causal": is_causal, "scale": scale, "softcap": softcap, "window": window}
        words += _words(query, value_cache, options, {"alibi_slopes": alibi_slopes, "sinks": sinks})
    length = kv_lens if key is None else kv_lens + key.shape[2]
    after = _keys_after(length, exchange) if placed else None
    with transport.shared_errors(members, device, check, timeout):
        out, lse = attention_with_kv_cache(
            query, key_cache, value_cache, kv_lens, page_table,
            is_causal and members.rank == members.size - 1, key=key, value=value, scale=scale,
            softcap=softcap, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
            num_splits=num_splits, batch_invariant=batch_invariant,
            key_ranges=None if window is None else _in_window(window, length, after),
            return_lse=True, backend=backend,
        )  # fmt: skip
    if alibi_slopes is not None:  # the distance to the keys that follow on other processes
        slopes = alibi_slopes.to(lse.dtype).view(-1, alibi_slopes.shape[-1], 1)
        lse = lse - slopes * after.view(-1, 1, 1)
    out, lse = _merged(*_gathered((out, lse), exchange, "results"), sinks)
    return (out, lse) if return_lse else out


def _check(
    query: Tensor, kv_lens: Tensor, key: Tensor | None, sinks: Tensor | None, placed: dict,
    timeout: float | None,
) -> None:  # fmt: skip
    """Raise for what is used before or after :func:`attention_with_kv_cache`, which checks all."""
    error = transport.error_of_timeout(timeout)
    if error is not None:
        raise error
    checks.rank("query", need_tensor("query", query), checks.LAYOUT)
    for name in placed if query.shape[2] > 1 else ():
        raise NotImplementedError(
            f"{name} over a sharded cache needs a single query, got {query.shape[2]}: pass one "
            "query at a time"
        )
    checks.integers(query, "kv_lens", need_tensor("kv_lens", kv_lens))
    each_row = "pass a number of keys for each row"
    checks.has_shape("kv_lens", kv_lens, query.shape[:1], each_row)
    if key is not None:
        checks.rank("key", need_tensor("key", key), checks.LAYOUT)
    if sinks is not None:
        checks.floats(query, "sinks", need_tensor("sinks", sinks))
        checks.has_shape("sinks", sinks, query.shape[1:2], "pass a sink for each query head")


def _words(query: Tensor, value_cache: Tensor, options: dict, tensors: dict) -> list[str]:
    """What must be equal on all processes."""
    width = need_tensor("value_cache", value_cache).shape[-1]
    words = [f"query {tuple(query.shape)} of {dtype_name(query.dtype)}, value_cache (..., {width})"]
    words += [f"{name}={x}" for name, x in options.items()]
    return words + [name for name, x in tensors.items() if x is not None]


def _merged(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states of all processes as one; sinks are a state without a value."""
    if sinks is not None:
        outs = torch.cat((outs, torch.zeros_like(outs[:1])))
        column = sinks.to(lses.dtype).view(1, 1, -1, 1).expand_as(lses[:1])
        lses = torch.cat((lses, column))
    out, lse = attention.merge_states(outs, lses)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def _gathered(tensors: tuple[Tensor, ...], exchange: Exchange, what: str) -> list[Tensor]:
    """Of each tensor those of all processes, stacked."""
    mine = [x.contiguous() for x in tensors]
    stacked = [x.new_empty(exchange.members.size, *x.shape) for x in mine]
    rows = [x.flatten(0, 1) for x in stacked]
    all_gather(rows, mine, exchange, f"the exchange of {what}", overlaps=False).wait()
    return stacked


def _keys_after(length: Tensor, exchange: Exchange) -> Tensor:
    """The number of keys of each row on the processes after this one."""
    (lengths,) = _gathered((length,), exchange, "lengths")
    return lengths[exchange.members.rank + 1 :].sum(0)


def _in_window(window: Window, length: Tensor, after: Tensor) -> Tensor:
    """The keys of this process that one query, the last token, attends: (B, 1, 1, 2)."""
    left, _ = sides(window)
    start = torch.zeros_like(length) if left < 0 else (length + after - 1 - left).clamp(min=0)
    return torch.stack((start.minimum(length), length), -1).to(torch.int32).view(-1, 1, 1, 2)
