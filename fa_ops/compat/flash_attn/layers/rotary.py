"""flash_attn.layers.rotary: rotary embedding with gradients, and its module."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call.python_types import need_tensor
from fa_ops.compat.flash import count, flag, number, parts
from fa_ops.compat.flash_attn.ops.triton.rotary import apply_rotary, check

Offsets = int | Tensor


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """``(-b, a)`` of features ``(a, b)``, which are halves or neighbours."""
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((-b, a), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """x ``(B, S, H, D)``, rotated in its dtype by cos and sin ``([B,] S, R / 2)``."""
    R = 2 * cos.shape[-1]
    cos, sin = (
        (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)).unsqueeze(-2)
        for t in (cos, sin)
    )
    first, rest = x[..., :R], x[..., R:]
    return torch.cat((first * cos + rotate_half(first, interleaved) * sin, rest), -1)


class ApplyRotaryEmb(torch.autograd.Function):
    """A tensor whose tokens are rotated; the gradient is rotated back."""

    @staticmethod
    def forward(
        ctx, x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None,
        max_seqlen=None,
    ):  # fmt: skip
        """Rotate x, which is written without autograd's notice if `inplace`."""
        inplace = flag("inplace", inplace)
        tables = cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved
        ctx.tables = tables
        out = apply_rotary(x.detach(), *tables, inplace)
        return x if inplace else out

    @staticmethod
    def backward(ctx, grad):
        """Rotate the gradient the other way."""
        return apply_rotary(grad, *ctx.tables, False, True), *[None] * 7


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x with the first R features of each head rotated; the arguments are those of apply_rotary."""
    return ApplyRotaryEmb.apply(
        need_tensor("x", x), cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    )


apply_rotary_emb_func = apply_rotary_emb


class _RotatedParts(torch.autograd.Function):
    """A tensor (B, S, parts, ...) in which some parts are rotated in place."""

    @staticmethod
    def forward(ctx, x, parts, interleaved, offsets):
        ctx.arguments = parts, interleaved, offsets
        _rotate_parts(x.detach(), *ctx.arguments, False)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        _rotate_parts(grad, *ctx.arguments, True)
        return grad, None, None, None


def _rotate_parts(x: Tensor, parts: tuple, interleaved: bool, offsets: Offsets, back: bool) -> None:
    for where, cos, sin in parts:
        part = x[:, :, where]
        apply_rotary(part, cos, sin, offsets, None, None, interleaved, True, back)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate queries and keys in place.

    Args:
        qkv: ``(B, S, 3, H, D)``, or ``(B, S, Hq + 2 Hkv, D)`` with ``num_heads_q``.
        cos: ``(positions, R / 2)``.
        sin: ``(positions, R / 2)``.
        cos_k: the table for keys, if it is another one.
        sin_k: the same for sines.
        interleaved: as in apply_rotary.
        seqlen_offsets: as in apply_rotary.
        num_heads_q: ``Hq``.

    Returns:
        qkv.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    tables_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    interleaved = flag("interleaved", interleaved)
    if num_heads_q is not None:
        num_heads_q = count("num_heads_q", num_heads_q, "an int or None")
    if need_tensor("qkv", qkv).dim() == 5 and qkv.shape[2] == 3:
        q, k = 0, 1
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        both = (qkv.shape[2] + num_heads_q) // 2
        q, k = slice(0, num_heads_q), slice(num_heads_q, both)
    else:
        raise ValueError(
            "qkv must have shape (B, S, 3, H, D), or (B, S, Hq + 2 Hkv, D) with num_heads_q, got "
            f"{tuple(qkv.shape)} and {num_heads_q}: pass torch.stack([q, k, v], 2)"
        )
    parts = (q, cos, sin), (k, *tables_k)
    of_keys = tuple(
        own if t is not None else shared
        for own, shared, t in (("cos_k", "cos", cos_k), ("sin_k", "sin", sin_k))
    )
    for (where, *tables), names in zip(parts, (("cos", "sin"), of_keys)):
        check(qkv[:, :, where], *tables, seqlen_offsets, names=("qkv", *names))
    return _RotatedParts.apply(qkv, parts, interleaved, seqlen_offsets)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Offsets = 0
) -> Tensor:
    """Rotate the keys of kv ``(B, S, 2, H, D)`` in place; the other arguments are as above."""
    k, _ = parts("kv", kv, 2, "(B, S, 2, H, D)")
    check(k, cos, sin, seqlen_offsets, names=("kv", "cos", "sin"))
    return _RotatedParts.apply(kv, ((0, cos, sin),), interleaved, seqlen_offsets)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with tables that grow with the sequences.

    Args:
        dim: the number of features that are rotated.
        base: the largest wavelength is about ``2 pi base``.
        interleaved: as in apply_rotary.
        scale_base: the unit of XPos' decay, in positions; ``None``: no decay.
        device: where the frequencies are.

    Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864; Sun et al., XPos,
    https://arxiv.org/abs/2212.10554.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base = count("dim", dim), float(number("base", base))
        self.interleaved = flag("interleaved", interleaved)
        self.scale_base = None if scale_base is None else number("scale_base", scale_base)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (steps + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def _compute_inv_freq(self, device=None) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (-steps / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device=None, dtype=None) -> None:
        """Make the tables for this many positions, in float32 whatever the model's dtype."""
        held = self._cos_cached
        if (
            held is not None
            and seqlen <= self._seq_len_cached
            and (held.device, held.dtype) == (device, dtype)
            and not (self.training and held.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        frequencies = self.inv_freq
        if frequencies.dtype != torch.float32:
            frequencies = self._compute_inv_freq(device)
        angles = torch.outer(positions, frequencies.to(positions.device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is not None:
            power = (positions - seqlen // 2) / self.scale_base
            scale = self.scale.float().to(positions.device) ** power[:, None]
            self._cos_k_cached, self._sin_k_cached = (
                (cos / scale).to(dtype),
                (sin / scale).to(dtype),
            )
            cos, sin = cos * scale, sin * scale
        self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place.

        Args:
            qkv: as in apply_rotary_emb_qkv_; with ``kv`` the queries ``(B, S, Hq, D)``.
            kv: ``(B, S, 2, Hkv, D)``.
            seqlen_offset: as in apply_rotary. A tensor needs ``max_seqlen``.
            max_seqlen: the number of positions that the tables must have.
            num_heads_q: ``Hq``, if the heads of queries and keys lie in one dimension.

        Returns:
            qkv, or ``(q, kv)``.
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif self._cos_cached is None:
            raise ValueError(
                "max_seqlen must be given with the first seqlen_offset that is a Tensor"
            )
        tables, tables_k = (self._cos_cached, self._sin_cached), (None, None)
        if self.scale is not None:
            tables_k = self._cos_k_cached, self._sin_k_cached
        options = self.interleaved, seqlen_offset
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, *tables_k, *options, num_heads_q)
        q = apply_rotary_emb(qkv, *tables, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(
            kv, *(tables if self.scale is None else tables_k), *options
        )  # fmt: skip
