"""Programs in Triton's kernels, in the interpreter, against the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import fa_ops
from fa_ops.backends.triton import launch
from fa_ops.functions import flex
from tests.programs import functions as f

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numbers that are masked
]


def attend(backend: str, score_mod, mask_mod, grads: bool, shape=(f.B, f.H, f.S, 16), **options):
    """out, lse and gradients of all that the functions capture."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=torch.float32, requires_grad=grads) for _ in range(3))
    out, lse = fa_ops.flex_attention(
        q, k, v, score_mod, mask_mod=mask_mod, backend=backend, return_lse=True, **options
    )
    if not grads:
        return [out, lse]
    weight = torch.randn_like(out)
    loss = (out * weight).sum() + lse.masked_fill(lse == -math.inf, 0.0).sin().sum()
    leaves = [q, k, v, *f.TRAINED]
    return [out, lse, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def assert_same(score_mod, mask_mod, grads: bool = True, **options) -> None:
    found, expected = (
        attend(backend, score_mod, mask_mod, grads, **options)
        for backend in ("triton", "reference")
    )
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None
        else:
            scale = 1e-5 + b.masked_fill(b.abs() == math.inf, 0.0).abs().max().item()
            torch.testing.assert_close(a, b, atol=3e-5 * scale, rtol=3e-4)


@pytest.mark.parametrize("name", ["gates", "relative", "scale and offset", "powers and roundings"])
def test_scores_and_their_gradients(name):
    assert_same(f.SCORES[name], None)


@pytest.mark.parametrize("name", ["temperature"])
def test_scores_beside_masks(name):
    assert_same(f.SCORES[name], f.MASKS["natten"])


@pytest.mark.parametrize("name", ["tree", "blocks of heads", "times"])
def test_masks(name):
    assert_same(None, f.MASKS[name], grads=False)


def test_options_beside_a_program():
    lens = torch.tensor([60, 96], dtype=torch.int32)
    assert_same(
        f.SCORES["gates"], f.MASKS["documents of rows"], is_causal=True, kv_lens=lens,
        sinks=torch.randn(f.H),
    )  # fmt: skip


def test_a_bias_beside_a_program():
    score_mod = lambda s, b, h, i, j: torch.tanh(s) * f.FACTOR[h] + f.PAIR_BIAS[h, i, j]  # noqa: E731
    assert_same(score_mod, None)


@pytest.mark.parametrize("seed", range(2))
def test_random_functions(seed):
    torch.manual_seed(seed)
    assert_same(f.random_function(seed, True), f.random_function(seed + 50, False), grads=False)


def test_tiles_that_runs_leave_out_are_skipped():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 300, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(300, requires_grad=True)
    score_mod = lambda s, b, h, i, j: torch.tanh(s) + table[j]  # noqa: E731
    mask_mod = lambda b, h, i, j: (i // 128 == j // 128) & ((i - j) % 3 != 0)  # noqa: E731
    runs = fa_ops.mask_tiles(mask_mod, 1, 1, 300, 300)
    everything = lambda b, h, i, j: (i - j) % 3 != 0  # noqa: E731
    found = [
        fa_ops.flex_attention(q, k, v, score_mod, tiles, mask_mod=mod, backend="triton")
        for mod, tiles in ((mask_mod, None), (everything, runs))  # the runs of another mask
    ]
    expected = fa_ops.flex_attention(q, k, v, score_mod, mask_mod=mask_mod, backend="reference")
    weight = torch.randn_like(expected)
    leaves = q, k, v, table
    wanted = torch.autograd.grad(expected, leaves, weight)
    for out in found:
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    for a, b in zip(torch.autograd.grad(found[1], leaves[:3], weight), wanted):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    (of_table,) = torch.autograd.grad(found[0], (table,), weight)
    torch.testing.assert_close(of_table, wanted[3], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("names", [("gates", "documents of rows"), ("softcap", None), (None, None)])
def test_largest_scores(names):
    """Of rows that the loop computes, of such that are computed exactly, and without keys."""
    score_mod, mask_mod = f.SCORES.get(names[0]), f.MASKS.get(names[1])
    found, lses = [], []
    for backend in ("triton", "reference"):
        torch.manual_seed(0)
        q, k, v = (torch.randn(f.B, f.H, f.S, 16) for _ in range(3))
        q[:, :, 40] *= 1e6
        out, aux = fa_ops.flex_attention(
            q, k, v, score_mod, mask_mod=mask_mod, is_causal=names[0] is None, backend=backend,
            sinks=torch.full((f.H,), 50.0), kv_lens=torch.tensor([0, 80], dtype=torch.int32),
            return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
        found.append(aux.max_scores)
        lses.append(aux.lse)
    assert (found[0][0] == -math.inf).all() and found[0][1].amax() > 1e4 or names[0] == "softcap"
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*lses, atol=1e-5, rtol=1e-5)


def test_largest_scores_of_dense_calls():
    """With a soft cap, slopes and a bias, and lengths."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 70, 16) for h in (4, 2, 2))
    options = {
        "attn_mask": torch.randn(70, 70), "is_causal": True, "softcap": 2.0,
        "alibi_slopes": torch.rand(4), "kv_lens": torch.tensor([0, 65], dtype=torch.int32),
    }  # fmt: skip
    found = [
        fa_ops.attention(
            q, k, v, **options, backend=backend, return_aux=AuxRequest(lse=True, max_scores=True)
        )
        for backend in ("triton", "reference")
    ]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_nan_in_a_masked_key_changes_nothing():
    score_mod = lambda s, b, h, i, j: torch.tanh(s)  # noqa: E731
    mask_mod = lambda b, h, i, j: (j < 40) | (i % 2 == 0)  # noqa: E731
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 70, 16) for _ in range(3))
    k[:, :, 50], v[:, :, 60] = math.nan, math.inf
    results = [
        fa_ops.flex_attention(q, k, v, score_mod, mask_mod=mask_mod, backend=backend)[:, :, 1::2]
        for backend in ("triton", "reference")
    ]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_what_triton_lacks_is_refused():
    q = torch.randn(1, 1, 8, 16)
    given = flex.Arguments(q, q, q, lambda s, b, h, i, j: s.abs() ** 1.5, backend="triton")
    call = flex.described(given)
    with pytest.raises(NotImplementedError, match="has no powers but"):
        fa_ops.flex_attention(*given[:4], backend="triton")
    assert "pow" in call.scalars[-1]
