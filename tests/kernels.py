"""Checks of the Triton kernels that run both in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.ops import merge
from fa_ops.testing.caches import CacheCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def alternating_dtype(name: str, names: Iterable[str]) -> torch.dtype:
    """float32 and float16 in turns: what a feature computes does not depend on the dtype."""
    return (torch.float32, torch.float16)[[*names].index(name) % 2]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_batch_invariant(backend, case: CacheCase) -> tuple[Tensor, Tensor]:
    """Check that each row of a batch is bitwise equal to a batch of that row; return (out, lse)."""
    call = case.fresh().changed(batch_invariant=True)
    together = backend.cache_forward(call)
    for b in range(case.B):
        q, k, v, lens = (x[b : b + 1] for x in (*call[:3], call.operands.kv_lens))
        alone = backend.cache_forward(call.changed(query=q, key=k, value=v, kv_lens=lens))
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone))
    return together


def assert_merges(backend, outs: Tensor, lses: Tensor) -> None:
    """Compare with the reference, after setting some of `lses` to -inf, as without keys."""
    lses[0, ..., 0] = float("-inf")
    lses[:, ..., 1:2] = float("-inf")
    out, lse = backend.merge_states(outs, lses)
    expected, expected_lse = reference.merge_states(outs, lses)
    rtol = max(2 * torch.finfo(out.dtype).eps, 1e-5)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=rtol)
    torch.testing.assert_close(lse, expected_lse, atol=1e-6, rtol=1e-6)


def assert_merges_into(backend, dtype: torch.dtype, device: str, D: int = 16, **sum_dtype) -> None:
    """Merge one result into rows of another, (B, S, H, D) in memory, as against the reference."""
    draw = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
    out = draw(2, 40, 3, D).to(sum_dtype.get("sum_dtype", dtype)).transpose(1, 2)
    part, lse, part_lse = (
        draw(2, 33, 3, D).to(dtype).transpose(1, 2),
        draw(2, 3, 40),
        draw(2, 3, 33),
    )
    rows = slice(5, 38)
    lse[:, :, 6], part_lse[:, 1] = float("-inf"), float("-inf")
    out[:, :, 6], part[:, 1] = float("nan"), float("nan")  # of no key, which may be anything
    outs, lses = (
        torch.stack((out[:, :, rows], part.to(out.dtype))),
        torch.stack((lse[:, :, rows], part_lse)),
    )
    expected, expected_lse = reference.merge_states(outs, lses)
    others = out[:, :, :5].clone(), out[:, :, 38:].clone(), lse[:, :, :5].clone()
    merge.merger_of(backend)(out[:, :, rows], lse[:, :, rows], part, part_lse)
    rtol = max(2 * torch.finfo(out.dtype).eps, 1e-5)
    torch.testing.assert_close(out[:, :, rows], expected, atol=1e-6, rtol=rtol)
    torch.testing.assert_close(lse[:, :, rows], expected_lse, atol=1e-6, rtol=1e-6)
    for kept, now in zip(others, (out[:, :, :5], out[:, :, 38:], lse[:, :, :5])):
        assert torch.equal(kept, now)
