"""flash_attn.bert_padding: padded batches as packed tokens and back."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.call import checks
from fa_ops.call.options import dtype_name
from fa_ops.call.python_types import need_tensor
from fa_ops.compat.flash import count, has_shape


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` of x ``(rows, ...)``. Differentiable."""
    _need_rows("x", x, indices)
    _need_within("x", x.shape[0], indices)
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``(first_axis_dim, ...)``, values in rows ``indices`` and 0 elsewhere. Differentiable."""
    _need_rows("values", values, indices)
    has_shape("indices", indices, values.shape[:1], "pass an index for each row of values")
    first_axis_dim = count("first_axis_dim", first_axis_dim)
    _need_within("the result", first_axis_dim, indices)
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``indices`` of x, and x."""
    return index_first_axis(x, indices), x


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch that a mask selects, one sequence after another.

    Args:
        hidden_states: ``(B, S, ...)``.
        attention_mask: ``(B, S)``, bool or integers: 1 selects.
        unused_mask: the same for tokens that are packed too, but not counted in the last result.

    Returns:
        tokens ``(T, ...)``, their indices in the flattened batch, the cumulative lengths int32
        ``(B + 1,)``, the longest length, and how many tokens of each sequence the first mask
        selects ``(B,)``.
    """
    need_tensor("hidden_states", hidden_states)
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None or name == "attention_mask":
            remedy = "pass an element for each token of hidden_states"
            has_shape(name, need_tensor(name, mask), hidden_states.shape[:2], remedy)
            checks.same_device(hidden_states, name, mask, "hidden_states")
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    tokens, indices, lens = _selected(hidden_states, packed)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return tokens, indices, _ends(lens), _longest(lens), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of a batch whose rows hold several sequences.

    Args:
        hidden_states: ``(B, S, ...)``.
        attention_mask_in_length: integers ``(B, S)``: the lengths of the sequences of a row, one
            after another, then zeros.

    Returns:
        tokens ``(T, ...)``, their indices in the flattened batch, the cumulative lengths of all
        sequences int32, and the longest length.
    """
    need_tensor("hidden_states", hidden_states)
    lens = need_tensor("attention_mask_in_length", attention_mask_in_length)
    remedy = "pass the lengths of each row's sequences, then zeros"
    has_shape("attention_mask_in_length", lens, hidden_states.shape[:2], remedy)
    checks.same_device(hidden_states, "attention_mask_in_length", lens, "hidden_states")
    columns = torch.arange(lens.shape[1], device=lens.device)
    tokens, indices, _ = _selected(hidden_states, columns < lens.sum(-1, keepdim=True))
    lens = lens[lens > 0]
    return tokens, indices, _ends(lens), _longest(lens)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens ``(T, ...)`` as a padded batch ``(batch, seqlen, ...)``; padding is 0.

    On the CPU, indices outside the batch are a ValueError; on a GPU, where the host does not read
    them, torch's kernel ends in a device-side assertion.
    """
    _need_rows("hidden_states", hidden_states, indices)
    has_shape("indices", indices, hidden_states.shape[:1], "pass an index for each token")
    batch, seqlen = count("batch", batch), count("seqlen", seqlen)
    for name, size in (("batch", batch), ("seqlen", seqlen)):
        checks.need(size >= 0, "{} must not be negative, got {}", name, size)
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def _need_rows(name: str, x: Tensor, indices: Tensor) -> None:
    """Raise TypeError or ValueError unless both are tensors, and the second one (n,) integers."""
    if need_tensor(name, x).dim() == 0:
        raise ValueError(f"{name} must have shape (rows, ...), got (): pass {name}[None]")
    if need_tensor("indices", indices).dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int32 or int64, got {dtype_name(indices.dtype)}")
    if indices.dim() != 1:
        raise ValueError(
            f"indices must have shape (n,), got {tuple(indices.shape)}: pass indices.flatten()"
        )
    checks.same_device(x, "indices", indices, name)


def _need_within(name: str, rows: int, indices: Tensor) -> None:
    """Raise ValueError for rows that do not exist, where the host may read the indices."""
    if indices.numel() and tracing.can_read(indices):
        lowest, highest = (int(x) for x in indices.aminmax())
        if lowest < 0 or highest >= rows:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"indices has {wrong}, but {name} has {rows} rows: the first one is 0")


def _selected(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The selected tokens, their indices in the flattened batch, and their number in each row."""
    indices = mask.flatten().nonzero().flatten()
    return index_first_axis(x.flatten(0, 1), indices), indices, mask.sum(-1, dtype=torch.int32)


def _ends(lens: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lens: Tensor) -> int:
    return int(lens.max()) if len(lens) else 0


def __getattr__(name: str):
    """einops' functions, which flash-attn's module has too, and which verl imports from it."""
    if name in ("rearrange", "repeat"):
        return getattr(importlib.import_module("einops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
