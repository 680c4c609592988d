"""Checks of the Triton kernels that run both in the interpreter and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.testing.caches import CacheCase
from fa_ops.types import Cache

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_batch_invariant(backend, case: CacheCase) -> tuple[Tensor, Tensor]:
    """Check that each row of a batch is bitwise equal to a batch of that row; return (out, lse)."""
    q, k, v, _, spec = case.fresh()
    cache = Cache(batch_invariant=True)
    together = backend.cache_forward(q, k, v, cache, spec)
    for b in range(case.B):
        row = (x[b : b + 1] for x in (q, k, v))
        alone = backend.cache_forward(*row, cache, spec._replace(kv_lens=spec.kv_lens[b : b + 1]))
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
