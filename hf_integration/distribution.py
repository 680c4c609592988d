"""A model's sequence over the processes of a group, with masks of the whole sequence.

Inside `context_parallel` the model sees this process's tokens only. Masks are made for the whole
sequence, from its padding and positions, and attention runs as
`fa_ops.distributed.context_parallel_attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_ops.distributed import (
    SequenceLayout,
    balanced_layout,
    context_parallel_attention,
    shard,
)
from fa_ops.distributed.layout import whole_group
from hf_integration import call_rewrites, key_ranges, operators
from hf_integration.encodings import MaskArguments, PackingHint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_SDPA = F.scaled_dot_product_attention
IGNORED = -100  # the label of tokens without a loss, in transformers
_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "labels", "token_type_ids")


class Distribution(NamedTuple):
    """The state that a model's layers and masks need inside `context_parallel`."""

    mesh_or_group: ProcessGroup | DeviceMesh | None
    scheme: str
    layout: str | SequenceLayout
    tokens: int  # of the whole sequence
    padding: Tensor | None  # the whole attention_mask (B, S)
    positions: Tensor  # the whole position_ids (B or 1, S)


_active: list[Distribution] = []  # global, as checkpointed layers run in threads of autograd


@contextlib.contextmanager
def context_parallel(
    batch: Mapping[str, Any],
    mesh_or_group: ProcessGroup | DeviceMesh | None = None,
    *,
    scheme: str = "auto",
    layout: str | SequenceLayout = "auto",
) -> Iterator[dict[str, Any]]:
    """Train or run a model with `attn_implementation="fa_ops"` on one part of each sequence.

    Every process passes the same whole batch, and gives its model what the context returns. The
    backward pass belongs inside. The loss is this process's part of the mean over the whole batch:
    the sum over processes is the loss, and the sum of gradients is its gradient.

    Args:
        batch: the arguments of the model by name, whole: `input_ids` or `inputs_embeds`, and
            optionally `attention_mask` (B, S), `position_ids`, `labels` and `token_type_ids`.
            Values that are no tensors are passed on.
        mesh_or_group: a ProcessGroup, a DeviceMesh of one or two dimensions, or None: all
            processes.
        scheme: as in :func:`fa_ops.distributed.context_parallel_attention`.
        layout: which tokens each process holds. "auto": "zigzag", and for documents packed into
            one row, which `position_ids` show, a layout of equal work.

    Yields:
        The model's arguments for this process: tokens, positions and labels in the layout;
        `shift_labels`, shifted before they were distributed; `num_items_in_batch`, the labels of
        the whole batch; `use_cache=False`.

    Raises:
        ValueError, TypeError: tensors that cannot be distributed or do not fit each other, a number
            of tokens that the processes do not divide, or no such layout.
        NotImplementedError: documents packed into several rows; raised by layers whose mask is
            dense, or chunked over padding or documents, or which have a position bias, a cache or
            `output_attentions`.

    Examples:
        >>> with hf_integration.context_parallel(batch, mesh["cp"]) as part:
        ...     loss = model(**part).loss
        ...     loss.backward()
    """
    if _active:
        raise ValueError("context_parallel must not be entered again before it is left")
    tokens, positions = _whole_positions(batch)
    layout = _layout(layout, tokens, positions, mesh_or_group)
    distribution = Distribution(
        mesh_or_group, scheme, layout, tokens, batch.get("attention_mask"), positions
    )
    local = _local(batch, distribution)
    _active.append(distribution)
    try:
        yield local
    finally:
        _active.clear()


def refuse_others(layer: nn.Module, attention_mask: object) -> None:
    """Raise NotImplementedError where torch or accelerate distributes the sequence of a layer."""
    _refuse_context_parallel_of_torch()
    if attention_mask is None and layer._forward_pre_hooks:
        _refuse_removed_mask(layer)


def _refuse_context_parallel_of_torch() -> None:
    """Raise NotImplementedError inside torch's `context_parallel`.

    It replaces `scaled_dot_product_attention` alone; other attention would attend the tokens of its
    own process, without an error.
    """
    current = F.scaled_dot_product_attention
    if current is not _SDPA and "_context_parallel" in (current.__module__ or ""):
        raise NotImplementedError(
            'attn_implementation="fa_ops" does not support torch\'s context_parallel, which '
            "accelerate's cp_size enters and which distributes sequences for SDPA alone: enter "
            "hf_integration.context_parallel in its place"
        )


def _refuse_removed_mask(layer: nn.Module) -> None:
    """Raise NotImplementedError where a hook of accelerate has removed the mask of a layer.

    accelerate's `cp_size` puts such a hook before all attention of a model that it prepares. What
    remains of a mask is causality: padding and packed documents would be attended, without an error
    and outside of torch's `context_parallel` too.
    """
    for hook in layer._forward_pre_hooks.values():
        if getattr(hook, "__qualname__", "").startswith("_attach_context_parallel_hooks."):
            raise NotImplementedError(
                f"accelerate's cp_size has removed the mask of {type(layer).__name__}: prepare the "
                "model without it, and enter hf_integration.context_parallel"
            )


def active() -> Distribution | None:
    """The distribution of the context that has been entered, if any."""
    return _active[-1] if _active else None


def _whole_positions(batch: Mapping[str, Any]) -> tuple[int, Tensor]:
    """The number of tokens, and the positions (B or 1, S)."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batch must be a mapping of a model's arguments, got {type(batch).__name__}"
        )
    first = batch.get("input_ids")
    first = batch.get("inputs_embeds") if first is None else first
    if not isinstance(first, Tensor) or first.dim() < 2:
        raise ValueError("batch must hold input_ids (B, S) or inputs_embeds (B, S, width)")
    tokens = first.shape[1]
    mask = batch.get("attention_mask")
    for name in ("attention_mask", *_TOKENS):
        value = batch.get(name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
        if tuple(value.shape[1:2]) != (tokens,):
            raise ValueError(f"{name} must have {tokens} tokens, got shape {tuple(value.shape)}")
        if len(value) != len(first) and not (name == "position_ids" and len(value) == 1):
            raise ValueError(f"{name} must have {len(first)} rows, got shape {tuple(value.shape)}")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"attention_mask must have shape (B, S), got {tuple(mask.shape)}")
    known = (*_TOKENS, "attention_mask")
    unknown = [n for n, x in batch.items() if isinstance(x, Tensor) and n not in known]
    if unknown:
        raise ValueError(f"batch holds {unknown[0]!r}, which cannot be distributed over processes")
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens, device=first.device)[None]
    if mask is None and positions.shape[0] > 1 and bool((positions.diff() != 1).any()):
        raise NotImplementedError("context_parallel needs packed documents in a single row")
    return tokens, positions


def _layout(layout, tokens: int, positions: Tensor, mesh_or_group) -> str | SequenceLayout:
    if isinstance(layout, SequenceLayout):
        return layout
    if layout not in ("auto", "zigzag", "contiguous"):
        raise ValueError(
            f"layout must be 'auto', 'zigzag', 'contiguous' or a SequenceLayout, got {layout!r}"
        )
    documents = None
    if layout == "auto":
        documents = (
            call_rewrites.packed_documents(positions, None) if positions.shape[0] == 1 else None
        )
        layout = "zigzag"
    _, _, size = whole_group(mesh_or_group)
    count = 2 * size if layout == "zigzag" and documents is None else size
    if tokens % count:
        order = "packed documents" if documents is not None else f"{layout} order"
        raise ValueError(
            f"batch must have a multiple of {count} tokens, for {size} processes and {order}, got "
            f"{tokens}: pad it"
        )
    if documents is None:
        return layout
    return balanced_layout(tokens, mesh_or_group, is_causal=True, cu_seqlens=documents.q_ends)


def _local(batch: Mapping[str, Any], to: Distribution) -> dict[str, Any]:
    """The arguments of this process's model."""
    local = dict(batch) | {"position_ids": to.positions, "use_cache": False}
    labels = batch.get("labels")
    if labels is not None:
        shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        local["shift_labels"] = shifted
        local["num_items_in_batch"] = (shifted != IGNORED).sum()
    for name in (*_TOKENS, "shift_labels"):
        if local.get(name) is not None:
            local[name] = shard(local[name], to.mesh_or_group, 1, layout=to.layout)
    # all ones: positions of parts must not be taken for packed documents
    ids = local.get("input_ids")
    like = local["inputs_embeds"][..., 0] if ids is None else ids
    local["attention_mask"] = torch.ones_like(like, dtype=torch.long)
    return local


def whole_mask(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a mask function, for the mask of the whole sequence."""
    to = active()
    function = keywords.get("mask_function", key_ranges.causal)
    chunked = any(
        key_ranges.factory_name(f) == "chunked_overlay" for f in key_ranges.conjuncts(function)
    )
    if chunked and (to.padding is not None or _documents(to, None) is not None):
        raise NotImplementedError(
            "context_parallel supports chunked attention without padding and packed documents only"
        )
    lengths = {"q_length": to.tokens, "kv_length": to.tokens, "q_offset": 0, "kv_offset": 0}
    padding = None if to.padding is None else to.padding.bool()
    return keywords | lengths | {"attention_mask": padding}


def _documents(to: Distribution, layer: nn.Module | None) -> operators.Documents | None:
    """The documents of a single row."""
    return (
        call_rewrites.packed_documents(to.positions, layer) if to.positions.shape[0] == 1 else None
    )


_UNSUPPORTED = (
    "position_bias", "indices", "block_indices", "cu_seq_lens_q", "output_attentions"
)  # fmt: skip


def attention(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: MaskArguments,
    sinks: Tensor | None, options: dict, unsupported: Sequence[object],
) -> Tensor:  # fmt: skip
    """Attention of a layer: (B, S, Hq, Dv) of this process's tokens.

    `unsupported` are the values that the layer passes for the arguments `_UNSUPPORTED`.
    """
    to = active()
    for name, given in zip(_UNSUPPORTED, unsupported, strict=True):
        if given is not None and given is not False:
            raise NotImplementedError(
                f"context_parallel does not support {name}, which {type(layer).__name__} passes"
            )
    if call_rewrites.is_latent(layer, query, key):
        key, value = call_rewrites.expand_latents(layer, key, value)
    if key.shape[2] != query.shape[2]:
        raise NotImplementedError(
            f"context_parallel needs as many keys as queries in {type(layer).__name__}, without a "
            f"cache, got {key.shape[2]} and {query.shape[2]}"
        )
    if mask.attn_mask is not None or mask.visible_keys not in (None, to.tokens):
        raise NotImplementedError(
            "context_parallel needs a mask in which each query attends one range of keys, which "
            f"that of {type(layer).__name__} is not"
        )
    if query.dtype != value.dtype or key.dtype != value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    out = context_parallel_attention(
        query, key, value, to.mesh_or_group, to.scheme, layout=to.layout, sinks=sinks,
        **_masks(layer, mask, to), **options,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def _masks(layer: nn.Module, mask: MaskArguments, to: Distribution) -> dict[str, Any]:
    """The mask of the whole sequence, with its documents, as arguments of the call."""
    documents = None if mask.packing is PackingHint.NONE else _documents(to, layer)
    if documents is not None:
        if mask.key_ranges is None or mask.packing is PackingHint.ONLY:
            is_causal = mask.is_causal or mask.packing is PackingHint.ONLY
            return {"is_causal": is_causal, "cu_seqlens": documents.q_ends}
        mask = call_rewrites.within_documents(mask, documents, (1, to.tokens, to.tokens))
    return {
        "is_causal": mask.is_causal,
        "key_ranges": mask.key_ranges,
        "kv_lens": mask.kv_lens,
    }
