"""What a mask costs as a flag, as runs of keys, as a bool tensor; what packed documents save."""

from __future__ import annotations

import torch
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.bench.timing import Run, Time, device_times

DOCUMENT = 1024


def masks(S: int, device: str) -> dict[str, dict]:
    """Options of `fa_ops.attention` by name; the first three say the same."""
    i = torch.arange(S, device=device, dtype=torch.int32)
    causal = torch.stack([torch.zeros_like(i), i + 1], -1)[None, None]
    packed = torch.stack([i // DOCUMENT * DOCUMENT, i + 1], -1)[None, None]
    return {
        "is_causal": {"is_causal": True},
        "causal as key_ranges": {"key_ranges": causal},
        "causal as a bool mask": {"attn_mask": i[None] <= i[:, None]},
        f"documents of {DOCUMENT} as key_ranges": {"key_ranges": packed},
    }


def times(B: int, H: int, S: int, D: int, device: str, budget: float) -> dict[str, list[Time]]:
    """For each mask the time of forward and of backward."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(B, S, H, D, device=device, dtype=dtype).transpose(1, 2) for _ in range(3)
    )
    forward, backward = {}, {}
    for name, options in masks(S, device).items():
        forward[name] = Run(lambda _, o=options: fa_ops.attention(q, k, v, **o))
        backward[name] = _backward(q, k, v, options)
    with torch.no_grad():
        first = device_times(forward, device, budget)
    second = device_times(backward, device, budget)
    return {name: [first[name], second[name]] for name in forward}


def _backward(q: Tensor, k: Tensor, v: Tensor, options: dict) -> Run:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    grad_out = torch.randn_like(q)
    return Run(
        lambda out: torch.autograd.grad(out, leaves, grad_out),
        lambda: fa_ops.attention(*leaves, **options),
    )


def table(title: str, measured: dict[str, list[Time]]) -> Table:
    result = Table(title=title, caption="ms, median; in brackets: over the first row")
    for column in ("mask", "forward", "backward"):
        result.add_column(column, justify="left" if column == "mask" else "right")
    base = next(iter(measured.values()))
    for name, row in measured.items():
        cells = (f"{t.ms:.3f} ({t.ms / b.ms:.2f}x)" for t, b in zip(row, base))
        result.add_row(name, *cells)
    return result
