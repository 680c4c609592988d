"""Ring attention without masks, or causal: `context_parallel_attention` with fewer options."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from fa_ops.distributed.arguments import Options, error_of_flags
from fa_ops.distributed.context_parallel import agreed, attend
from fa_ops.distributed.layout import groups_of, outside_graphs


@outside_graphs
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    zigzag: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this process's queries over the keys of all processes. Differentiable.

    This is :func:`context_parallel_attention` with the scheme "ring". Every process of the group
    must call it, with tensors of the same shapes: its parts of the sequence, as :func:`shard`
    returns them.

    Shape legend: ``B`` batch, ``Hq`` and ``Hkv`` query and key heads (``Hkv`` divides ``Hq``),
    ``S`` tokens of this process, ``D`` and ``Dv`` head dimensions.

    Args:
        query: ``(B, Hq, S, D)``.
        key: ``(B, Hkv, S, D)``; without causality any length that all processes share.
        value: ``(B, Hkv, S, Dv)``.
        group: ``None``: all processes.
        is_causal: token ``i`` of the whole sequence attends tokens ``j <= i``.
        zigzag: the order of the tokens, as passed to :func:`shard`; matters only if causal.
        scale: factor of the scores; ``None``: ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: whether the backward pass is bitwise repeatable.
        backend: as in :func:`fa_ops.attention`; "reference" only without gradients.

    Returns:
        ``out`` ``(B, Hq, S, Dv)`` in query's dtype; with ``return_lse`` ``(out, lse)``, ``lse``
        ``(B, Hq, S)``. Gradients flow through both.

    Raises:
        ValueError: shapes that do not fit each other, or a group without this process.
        RuntimeError: torch.distributed is not initialised.
        NotImplementedError: no backend, or not the requested one, supports the call.

    Source: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; Brandon et al., Striped
    Attention, https://arxiv.org/abs/2311.09431, for balancing causal attention by order.
    """
    groups = groups_of(group)
    order = "zigzag" if zigzag and is_causal else "contiguous"
    options = Options(
        "ring", is_causal, None, scale, softcap, layout=order, deterministic=deterministic,
        backend=backend,
    )  # fmt: skip
    refused = error_of_flags(zigzag=zigzag, return_lse=return_lse)
    tensors = [t for t in (query, key) if isinstance(t, Tensor) and t.dim() == 4]
    if is_causal and len(tensors) == 2 and query.shape[2] != key.shape[2]:
        lengths = f"{key.shape[2]} and {query.shape[2]} tokens"
        refused = ValueError(f"key must be as long as query if is_causal, got {lengths}")
    request = agreed(query, key, value, groups, options, return_lse, error=refused)
    out, lse = attend(query, key, value, groups, request, return_lse)
    return (out, lse) if return_lse else out
