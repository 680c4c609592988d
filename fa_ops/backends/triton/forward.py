"""Launches the forward kernel: attention of dense and of packed tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_ops.backends.triton.alignment import aligned, narrowed, needs_copies, scaled
from fa_ops.backends.triton.arguments import Class, Layout, arguments, precision, widths
from fa_ops.backends.triton.configs import Tile, forward_tile
from fa_ops.backends.triton.decode import Memory, decode
from fa_ops.backends.triton.float32_parts import in_parts, products
from fa_ops.backends.triton.forward_kernel import forward_kernel
from fa_ops.backends.triton.launch import Launch, address, architecture, bind, empty
from fa_ops.geometry import is_decoding
from fa_ops.types import Cache, Packing, Spec

_launches: dict[tuple, tuple[Launch, int]] = {}


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Dense attention: out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    if is_decoding(Sq, Sk, spec):
        return decode(q, Memory.of(k, v, Cache()), spec)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    layout = Layout.of(q, k, v, strides)
    if needs_copies(layout, q.dtype, D, Dv):
        out, lse = forward(*aligned(q, k, v), scaled(spec, D))
        return narrowed(out, Dv), lse
    mode = products(q, B * Hq * Sq * Sk, D, Dv, spec.softcap)
    if mode == "split":
        q, k, v = in_parts(q, k, v)
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        layout = Layout(aligned=True, wide=False)
    return _attend(q, k, v, (B, Hq, Hkv, Sq, Sk), (D, Dv), strides, layout, spec, mode)


def paged_forward(q: Tensor, memory: Memory, spec: Spec) -> tuple[Tensor, Tensor]:
    """The same of a cache that consists of pages, whose rows must be aligned."""
    m = memory
    strides = (*q.stride()[:3], *m.strides)
    layout = Layout.of(q, m.key, m.value, strides)
    (B, Hq, Sq, D), Dv = q.shape, m.value.shape[3]
    return _attend(
        q, m.key, m.value, (B, Hq, m.Hkv, Sq, m.capacity), (D, Dv), strides, layout, spec,
        precision(q.dtype), m.table, m.page,
    )  # fmt: skip


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...], dims: tuple[int, int],
    strides: tuple[int, ...], layout: Layout, spec: Spec, mode: str, table: Tensor | None = None,
    page: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (B, Hq, Hkv, Sq, Sk), (D, Dv), device = sizes, dims, q.get_device()
    row, dtype = Hq * Dv, torch.float32 if mode == "split" else q.dtype
    out = empty((B, Hq, Sq, Dv), (Sq * row, Dv, row, 1), dtype, device)
    lse = empty((B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32, device)
    values, kind = arguments(spec, B, Hq, Sq, Sk, D)
    pages = (None, 0, 0) if table is None else (table, table.stride(0), k.shape[0])
    rest = (*strides, B, Hq, Hq // Hkv, Sq, Sk, *values, None, None, *pages)
    launch, block_m = _find((q, k, v, out, lse), rest, layout, kind, dims, mode, False, page)
    args = (address(q), address(k), address(v), address(out), address(lse), *rest)
    launch((-(-Sq // block_m) * Hq * B, 1, 1), args)
    return out, lse


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Packed attention: out (Tq, Hq, Dv) and lse (Hq, Tq)."""
    Tq, Hq, D = q.shape
    Tk, Hkv, Dv = v.shape
    strides = _packed_strides(q, k, v)
    layout = Layout.of(q, k, v, strides)
    if needs_copies(layout, q.dtype, D, Dv):
        out, lse = varlen_forward(*aligned(q, k, v), packing, scaled(spec, D))
        return narrowed(out, Dv), lse
    cu_q, cu_k = packing.cu_seqlens_q.contiguous(), packing.cu_seqlens_k.contiguous()
    B = cu_q.numel() - 1
    device, dtype = q.get_device(), q.dtype
    mode = products(q, Hq * Tq * Tk // max(B, 1), D, Dv, spec.softcap)
    if mode == "split":
        q, k, v = in_parts(q, k, v)
        strides, layout = _packed_strides(q, k, v), Layout(aligned=True, wide=False)
    out = empty((Tq, Hq, Dv), (Hq * Dv, Dv, 1), dtype, device)
    lse = empty((Hq, Tq), (Tq, 1), torch.float32, device)
    values, kind = arguments(spec, B, Hq, Tq, Tk, D)
    rest = (*strides, B, Hq, Hq // Hkv, Tq, Tk, *values, cu_q, cu_k, None, 0, 0)
    launch, block_m = _find((q, k, v, out, lse), rest, layout, kind, (D, Dv), mode, True)
    args = (address(q), address(k), address(v), address(out), address(lse), *rest)
    launch(((Tq // block_m + B + 2) * Hq, 1, 1), args)
    return out, lse


def _packed_strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    (qs, qh, _), (ks, kh, _), (vs, vh, _) = q.stride(), k.stride(), v.stride()
    return (0, qh, qs, 0, kh, ks, 0, vh, vs)


def _find(
    tensors: tuple, rest: tuple, layout: Layout, kind: Class, dims: tuple[int, int], mode: str,
    packed: bool, page: int = 0,
) -> tuple[Launch, int]:  # fmt: skip
    """The launch for these arguments (compiled on first use) and its number of rows per block."""
    q = tensors[0]
    dtype = q.dtype
    key = (dtype, dims, packed, page, layout, kind, mode, q.get_device())
    found = _launches.get(key)
    if found is None:
        tile = forward_tile(architecture(q.device), dtype, max(dims), kind, mode, page)
        launch = bind(
            forward_kernel, (*tensors, *rest), constants(tile, dims, kind, mode, page),
            tile.options(), device=q.device, fixed=kind.fixed(), wide=layout.wide,
            divisors=layout.divisors("qkv", dtype) | kind.divisors(),
        )  # fmt: skip
        found = _launches[key] = launch, tile.block_m
    return found


def constants(
    tile: Tile, dims: tuple[int, int], kind: Class, mode: str, page: int = 0
) -> dict[str, Any]:
    """The kernel's constexpr parameters."""
    return {
        **widths(dims),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "FOLD": kind.fold,
        "EXTREME": kind.extreme,
        "PRECISION": mode,
        "PAGE": page,
        "GATHERED": page % tile.block_n != 0,
    }
