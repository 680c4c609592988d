"""The weights that flash-attn returns with dropout, for tests of what was dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.dropout import keep_mask

_MULTIPLE = 128  # lengths are rounded up to multiples of it


def signed_weights(
    q: Tensor, k: Tensor, seed: Tensor, lens: tuple[Tensor | int, Tensor | int], options: dict
) -> Tensor:
    """Softmax before its normalisation; dropped weights are negative, masked ones 0.

    Args:
        q: ``(B, Sq, Hq, D)``.
        k: ``(B, Sk, Hkv, D)``.
        seed: that of the call.
        lens: the numbers of queries and of keys, of each row ``(B, 1, 1, 1)`` or of all.
        options: those of fa_ops.attention.

    Returns:
        ``(B, Hq, Sq, Sk)`` in q's dtype with both lengths rounded up to multiples of 128:
        ``exp(score - m)``, where ``m`` is the largest score of the row.
    """
    (B, Sq, Hq, D), (Sk, Hkv), dtype = q.shape, k.shape[1:3], q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (x.detach().to(wide).transpose(1, 2) for x in (q, k))
    scale = D**-0.5 if options["scale"] is None else options["scale"]
    scores = q @ k.repeat_interleave(Hq // Hkv, 1).mT * scale
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    rows = torch.arange(Sq, device=q.device)[:, None]
    columns = torch.arange(Sk, device=q.device)
    distance = columns - rows - (lens[1] - lens[0])
    slopes = options["alibi_slopes"]
    if slopes is not None:
        scores = scores - slopes.reshape(-1, Hq, 1, 1) * distance.abs()
    visible = _visible(distance, options) & (rows < lens[0]) & (columns < lens[1])
    scores = scores.masked_fill(~visible, float("-inf"))
    largest = scores.amax(-1, keepdim=True) if Sk else scores.new_zeros(B, Hq, Sq, 1)
    weights = (scores - largest.masked_fill(largest == float("-inf"), 0.0)).exp()
    stream = torch.arange(B * Hq, device=q.device).view(B, Hq, 1, 1)
    keep = keep_mask(seed, stream, rows, columns, options["dropout_p"])
    weights = torch.where(keep, weights, -weights).to(dtype)
    return torch.nn.functional.pad(weights, (0, -Sk % _MULTIPLE, 0, -Sq % _MULTIPLE))


def _visible(distance: Tensor, options: dict) -> Tensor:
    """Which keys at these distances from the queries' positions are attended."""
    left, right = options["window"] or (-1, -1)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible & (distance <= 0) if options["is_causal"] else visible
