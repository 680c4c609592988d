"""The CPU backend where numbers end: NaN and Inf, huge and tiny scores, caps, scales and sinks."""

from __future__ import annotations

import math

import pytest
import torch

import fa_ops
from fa_ops.backends import cpu, reference
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import assert_close_to_oracle, make_case

NAN, INF = math.nan, math.inf
S = 40
FEATURES = {
    "causal": {"is_causal": True},
    "causal, loop": {"is_causal": True, "softcap": 9.0},
    "window": {"window": (3, 0)},
    "kv_lens": {"kv_lens": torch.tensor([30, 12]).int(), "is_causal": True},
    "kv_lens, loop": {"kv_lens": torch.tensor([30, 12]).int(), "softcap": 5.0},
    "bool mask": {"attn_mask": torch.ones(S, S).tril().bool()},
    "mask": {"attn_mask": torch.full((S, S), -INF).triu(1)},
    "documents": {
        "key_ranges": torch.stack([torch.arange(S) // 8 * 8, torch.arange(S) // 8 * 8 + 8], -1)
        .int()
        .view(1, 1, S, 2)
    },
    "alibi": {"alibi_slopes": torch.rand(4), "is_causal": True},
    "sinks": {"sinks": torch.randn(4), "is_causal": True},
    "dropout": {"dropout_p": 0.4, "is_causal": True},
}


def by_operator(options: dict) -> dict:
    """The options of a call, given those of the public function."""
    left, right = options.get("window", (-1, -1))
    rest = {n: x for n, x in options.items() if n != "window"}
    return {"window_left": left, "window_right": right, **rest}


def run(inputs, grad_out, grad_lse, options: dict, call=None) -> tuple:
    torch.manual_seed(7)  # of dropout
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out, lse = (call or fa_ops.attention)(q, k, v, **options, return_lse=True)
    outputs, seeds = [out], [grad_out]
    if grad_lse is not None:
        outputs.append(lse.masked_fill(lse == -INF, 0.0))
        seeds.append(grad_lse)
    return out.detach(), lse.detach(), *torch.autograd.grad(outputs, (q, k, v), seeds)


POISONS = [(NAN, torch.float32), (NAN, torch.bfloat16), (INF, torch.float32)]


@pytest.mark.parametrize("poison, dtype", POISONS, ids=str)
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("where", ["query", "key", "value", "grad_out"])
@pytest.mark.parametrize("lse_grad", [False, True])
def test_nan_and_inf_reach_only_what_attends_them(name, where, poison, dtype, lse_grad):
    """Forward and backward: by row of queries, and by key that such a row attends."""
    options, at = FEATURES[name], 20
    g = torch.Generator().manual_seed(0)
    draw = lambda H: torch.randn(2, H, S, 16, generator=g).to(dtype)  # noqa: E731
    inputs, grad_out = [draw(4), draw(2), draw(2)], draw(4)
    grad_lse = torch.randn(2, 4, S, generator=g) if lse_grad else None
    clean = run(inputs, grad_out, grad_lse, options)
    keep = reference.keep_mask(attention_call(*inputs, **by_operator(options)))
    if name == "mask":
        keep = keep & (options["attn_mask"] == 0)
    keep = keep.expand(2, 4, S, S)
    given = {"query": inputs[0], "key": inputs[1], "value": inputs[2], "grad_out": grad_out}
    given[where][0, 1, at, 3] = poison  # of a key it is heads 2 and 3 that see it
    out, lse, dq, dk, dv = run(inputs, grad_out, grad_lse, options)
    bad = torch.zeros(2, 4, S, dtype=torch.bool)
    if where in ("query", "grad_out"):
        bad[0, 1, at] = True
    else:
        bad[0, 2:] = keep[0, 2:, :, at]
    reached = torch.zeros_like(bad) if where == "grad_out" else bad
    near = 2e-2 if dtype == torch.bfloat16 else 1e-4
    close = {"rtol": near, "atol": near}
    torch.testing.assert_close(out[~reached], clean[0][~reached], **close)
    touched_lse = torch.zeros_like(bad) if where == "value" else reached
    torch.testing.assert_close(lse[~touched_lse], clean[1][~touched_lse], **close)
    torch.testing.assert_close(dq[~bad], clean[2][~bad], **close)
    keys = (keep & bad.unsqueeze(-1)).any(2).view(2, 2, 2, S).any(2)
    assert not keys.all()
    torch.testing.assert_close(dk[~keys], clean[3][~keys], **close)
    torch.testing.assert_close(dv[~keys], clean[4][~keys], **close)
    if math.isnan(poison) and name != "dropout":
        attends = keep.any(-1)
        if where in ("query", "key"):
            assert out[bad & attends].isnan().all() and lse[bad & attends].isnan().all()
        if where == "value":
            assert out[bad][:, 3].isnan().all()
        assert dq[bad & attends].isnan().any(-1).all()
        assert dk[keys].isnan().any(-1).all()


@pytest.mark.parametrize("slope", [INF, -INF])
@pytest.mark.parametrize("name", ["window", "kv_lens", "bool mask", "mask"])
def test_infinite_slopes_reach_no_masked_key(name, slope):
    g = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(2, 4, S, 16, generator=g) for _ in range(4))
    slopes = torch.full((4,), slope)
    call = attention_call(q, k, v, alibi_slopes=slopes, **by_operator(FEATURES[name]))
    out, lse = cpu.forward(call)
    expected, expected_lse = reference.forward(call)
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, equal_nan=True)
    call = call._replace(saved=Saved(grad_out, None, out, lse))
    grads, expected = cpu.backward(call)[:3], reference.backward(call)[:3]
    torch.testing.assert_close(grads, expected, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("where", range(4), ids=["query", "key", "value", "grad_out"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("lengths", [(7, 7, 7), (3, 9, 9), (40, 2, 40)], ids=str)
def test_nan_and_inf_stay_in_their_sequence(where, poison, options, lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    T, at = int(ends[-1]), lengths[0] + 1
    given = [torch.randn(T, H, 16) for H in (4, 2, 2, 4)]
    call = lambda q, k, v, **rest: fa_ops.attention_varlen(q, k, v, ends, ends, **rest)  # noqa: E731
    clean = run(given[:3], given[3], None, options, call)
    given[where][at] = poison
    found = run(given[:3], given[3], None, options, call)
    others = torch.ones(T, dtype=torch.bool)
    others[lengths[0] : lengths[0] + lengths[1]] = False
    for one, other in zip(found, clean, strict=True):
        one, other = (x.transpose(0, 1) if x.dim() == 2 else x for x in (one, other))
        torch.testing.assert_close(one[others], other[others])
        assert not one.isnan()[others].any()


@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("Sq", [1, 3])
def test_unused_cache_entries_are_ignored(page, softcap, Sq):
    lens, q = torch.tensor([5, 0, 8]).int(), torch.randn(3, 4, Sq, 16)
    k, v = torch.randn(3, 2, 16, 16), torch.randn(3, 2, 16, 16)
    results = []
    for poison in (0.0, NAN, INF):
        caches = []
        for x in (k, v):
            x = x.masked_fill(torch.arange(16).view(16, 1) >= lens.view(3, 1, 1, 1), poison)
            caches.append(x if page is None else x.transpose(1, 2).reshape(12, 4, 2, 16))
        table = None if page is None else torch.arange(12).int().view(3, 4)
        result = fa_ops.attention_with_kv_cache(
            q, *caches, lens, table, is_causal=True, softcap=softcap, return_lse=True
        )
        results.append(result)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


SMALL = {"B": 1, "Hq": 2, "Hkv": 1, "Sq": 12, "Sk": 20, "is_causal": True}
SCALES = [None, 0.0, 1e-40, -1e-30, 1e6, 1e15]
CAPS = [0.0, 1e-310, 1e-40, 1e-30, 1e-6, 1e6, 1e15, 1e39, 1e300, 1.7e308]


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("softcap", CAPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_scales_and_caps(scale, softcap, dtype):
    case = make_case(**SMALL, scale=scale, softcap=softcap, dtype=dtype)
    q, k, v = case.fresh()[:3]
    q[0, 0, 10] = 0.0  # scores of 0, which an overflowing factor would make NaN
    options = {"is_causal": True, "scale": scale, "softcap": softcap}
    grad_out, _ = case.grad_outputs(q, q[..., 0])
    found = run((q, k, v), grad_out, None, options)
    wide = [x.double() for x in (q, k, v)]
    expected = run(wide, grad_out.double(), None, options | {"backend": "reference"})
    assert all(torch.isfinite(x).all() for x in (*found, *expected))
    if scale is None or scale < 1:
        near = 20 * torch.finfo(dtype).eps
        for one, other in zip(found, expected):
            most = other.abs().max().clamp(min=1.0).item()
            torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=near * most)


@pytest.mark.parametrize("softcap", [1e-40, 1e300])
def test_caps_at_their_limits(softcap):
    """Scores that are all the same, and scores as they are."""
    q, k, v = make_case().fresh()[:3]
    out = fa_ops.attention(q, k, v, softcap=softcap)
    scale = 1e-30 if softcap < 1 else None
    torch.testing.assert_close(out, fa_ops.attention(q, k, v, scale=scale))


@pytest.mark.parametrize("sink", [-INF, -3e38, 0.0, 3e38])
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("lse_grad", [False, True])
def test_sinks(sink, keys, softcap, dtype, lse_grad):
    q, k, v = make_case(dtype=dtype).fresh(requires_grad=True)[:3]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sinks = torch.full((4,), sink, dtype=wide, requires_grad=True)
    lens = torch.tensor([47, 9] if keys else [0, 0]).int()
    out, lse = fa_ops.attention(
        q, k, v, sinks=sinks, kv_lens=lens, softcap=softcap, is_causal=True, return_lse=True
    )
    finite = lse.masked_fill(lse == -INF, 0.0) if lse_grad else 0.0
    grads = torch.autograd.grad((out.float().sum() + finite).sum(), (q, k, v, sinks))
    for x in (out, *grads):
        assert torch.isfinite(x).all()
    assert not lse.isnan().any()
    if not keys:
        assert (out == 0).all() and (lse == torch.tensor(sink, dtype=wide)).all()
        assert all((x == 0).all() for x in grads[:3])
        rows = 2.0 * 33 if lse_grad and sink > -INF else 0.0
        assert (grads[3] == rows).all()
    elif sink == -INF:
        plain = fa_ops.attention(q, k, v, kv_lens=lens, softcap=softcap, is_causal=True)
        torch.testing.assert_close(out, plain)
        assert (grads[3] == 0).all()


@pytest.mark.parametrize("softcap", [0.0, 1e3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_huge_inputs(dtype, causal, softcap):
    """As torch's test_flash_attention_large_bf16_nan_values."""
    huge = 133120.0 if dtype != torch.float16 else 1000.0
    q, k, v = (torch.full((1, 1, 1, 64), huge, dtype=dtype).repeat(1, 2, 300, 1) for _ in range(3))
    q[:, :, ::2] *= 0.5
    k[:, :, ::3] *= -1.0
    grad_out = torch.randn(q.shape).to(dtype)
    options = {"is_causal": causal, "softcap": softcap}
    found = run((q, k, v), grad_out, None, options)
    for x in found:
        assert torch.isfinite(x).all()
    torch.testing.assert_close(found[0], v)


def test_huge_scores_that_cancel():
    """Rounded otherwise in the backward pass than in the forward pass, by far more than 1."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 300, 64, generator=g) * 3e5 for _ in range(3))
    for options in ({}, {"is_causal": True}, {"window": (50, 0)}):
        found = run((q, k, v / 3e5), torch.ones_like(v), None, options)
        assert all(torch.isfinite(x).all() for x in found)


@pytest.mark.parametrize("cap", [1e6, 1e7])
def test_large_caps_keep_their_digits(cap):
    assert_close_to_oracle(make_case(softcap=cap, is_causal=True), "cpu")
    assert_close_to_oracle(make_case(softcap=cap, magnitude=1e6, is_causal=True), "cpu", False)
