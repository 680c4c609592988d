"""Attention that returns its weights, for `output_attentions=True`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_integration.encodings import MaskArguments


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: MaskArguments,
    sinks: Tensor | None,
    *,
    scale: float | None,
    dropout_p: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv), contiguous, and weights (B, Hq, Sq, Sk), as eager attention gives them.

    A row with nothing to attend has weights of zero.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(-1, -2)).float()
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if form.attn_mask is not None and form.attn_mask.dtype != torch.bool:
        scores = scores + form.attn_mask
    keep = form.keep(query.shape[2], key.shape[2], query.device)
    scores = scores.masked_fill(~keep, float("-inf"))
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        scores = torch.cat([scores, column.float().expand(*scores.shape[:3], 1)], -1)
    dead = (scores == float("-inf")).all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    p = F.dropout(p[..., : key.shape[2]], dropout_p).to(value.dtype)
    return (p @ value).transpose(1, 2).contiguous(), p
