"""The public functions: how they normalise their arguments."""

from __future__ import annotations

import inspect
import re
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fa_ops
from fa_ops.backends import cpu
from fa_ops.call.options import NO_OPERANDS, Options
from fa_ops.ops import dense, kv_cache, varlen
from fa_ops.testing import make_case


def qkv(**options):
    return make_case(B=2, Hq=4, Hkv=4, Sq=5, Sk=5, D=8, Dv=8).fresh(**options)[:3]


@pytest.fixture
def calls(monkeypatch):
    """The calls that reach a backend."""
    calls, choose = [], fa_ops.plans.dispatch.choose

    def spy(call):
        calls.append(call)
        return choose(call)

    monkeypatch.setattr(fa_ops.plans.dispatch, "choose", spy)
    return calls


def test_the_first_arguments_are_those_of_sdpa():
    names = list(inspect.signature(fa_ops.attention).parameters)
    assert names[:6] == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
    q, k, v = qkv()
    mask = torch.rand(5, 5) > 0.2
    for args in ((None, 0.0, True), (mask, 0.0, False), (mask.float(), 0.0, False)):
        ours, theirs = (
            fa_ops.attention(q, k, v, *args),
            F.scaled_dot_product_attention(q, k, v, *args),
        )
        torch.testing.assert_close(ours, theirs)


def test_return_lse_returns_the_log_sum_of_exponentials():
    q, k, v = qkv()
    out, lse = fa_ops.attention(q, k, v, return_lse=True)
    assert torch.equal(out, fa_ops.attention(q, k, v))
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT / 8**0.5, -1))
    ends = torch.tensor([0, 5], dtype=torch.int32)
    tokens = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    packed, packed_lse = fa_ops.attention_varlen(*tokens, ends, ends, return_lse=True)
    torch.testing.assert_close(packed.transpose(0, 1), out[0])
    torch.testing.assert_close(packed_lse, lse[0])
    assert torch.equal(fa_ops.attention_varlen(*tokens, ends, ends), packed)


@pytest.mark.parametrize(
    "window, sides",
    [
        (None, (-1, -1)),
        ((3, 2), (3, 2)),
        ((None, 0), (-1, 0)),
        ((-1, 4), (-1, 4)),
        ([0, None], (0, -1)),
        ((np.int64(3), np.uint8(2)), (3, 2)),
        ((2**31 - 2, 2**31 - 1), (2**31 - 2, -1)),
        ((2**31, 2**40), (-1, -1)),
        ((sys.maxsize, 2**63), (-1, -1)),
        ((10**30, 0), (-1, 0)),
        ((np.uint64(2**64 - 1), 0), (-1, 0)),
    ],
)
def test_windows_are_normalised(calls, window, sides):
    """By every entry point, backends receive Python ints below 2**31 - 1, or -1."""
    q, k, v = qkv()
    ends = torch.tensor([0, 5], dtype=torch.int32)
    tokens = [t[0].transpose(0, 1) for t in (q, k, v)]
    lens = torch.full((2,), 5, dtype=torch.int32)
    for grad in (False, True):
        x = q.detach().requires_grad_(grad)
        fa_ops.attention(x, k, v, window=window)
        fa_ops.attention(x, k, v, window=window, sinks=torch.ones(4), return_lse=True)
        fa_ops.attention_varlen(tokens[0].detach().requires_grad_(grad), *tokens[1:], ends, ends,
                                window=window).sum()  # fmt: skip
    fa_ops.attention_with_kv_cache(q, k, v, lens, window=window)
    fa_ops.attention_with_kv_cache(q, k, v, lens - 1, key=k[:, :, :1].clone(),
                                   value=v[:, :, :1].clone(), window=window)  # fmt: skip
    if window and None not in window and max(window) < 2**63:
        given = {"window_left": int(window[0]), "window_right": int(window[1])}
        out, lse = dense.WITH_LSE(q, k, v, **given)
        dense.BACKWARD(out, None, q, k, v, out, lse, **given)
        packed, lse = varlen.VARLEN(*tokens, ends, ends, **given)
        varlen.BACKWARD(packed, None, *tokens, packed, lse, ends, ends, **given)
        kv_cache.READ(q, k, v, lens, **given)
    assert len(calls) >= 5
    for call in calls:
        found = call.options.window_left, call.options.window_right
        assert found == sides and [type(side) for side in found] == [int, int]


@pytest.mark.parametrize("side", [2**31 - 1, sys.maxsize, 2**63, 10**30])
def test_windows_of_any_size_compile(side):
    q, k, v = qkv()
    compiled = torch.compile(
        lambda left: fa_ops.attention(q, k, v, window=(left, 0)), backend="aot_eager",
        fullgraph=True,
    )  # fmt: skip
    expected = fa_ops.attention(q, k, v, is_causal=True)
    torch.testing.assert_close(compiled(side), expected)
    constant = torch.compile(
        lambda q: fa_ops.attention(q, k, v, window=(side, 0)), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(constant(q), expected)


def test_plans_are_made_of_windows_that_leave_keys_out(monkeypatch):
    windows, plan = [], cpu.plan
    note = lambda call: windows.append(call.options.window_left) or plan(call)  # noqa: E731
    monkeypatch.setattr(cpu, "plan", note)
    q, k, v = qkv()
    for _ in range(2):
        kv_cache.READ(q, k, v, torch.full((2,), 5, dtype=torch.int32), window_left=2**40)
    assert windows == [-1]


def test_options_are_passed_to_the_backend(calls):
    given = {
        "scale": 0.5,
        "softcap": 3.0,
        "alibi_slopes": torch.rand(4),
        "sinks": torch.rand(4),
        "kv_lens": torch.tensor([3, 5], dtype=torch.int32),
        "key_ranges": torch.tensor([1, 4], dtype=torch.int32).expand(1, 1, 1, 2),
        "deterministic": True,
        "backend": "reference",
    }
    fa_ops.attention(*qkv(), torch.zeros(5, 5), 0.0, True, **given)
    tensors, options = calls[0].operands, calls[0].options
    assert options.is_causal and tensors.attn_mask.shape == (5, 5)
    for name, value in given.items():
        if torch.is_tensor(value):
            torch.testing.assert_close(getattr(tensors, name), value)
        else:
            assert getattr(options, name) == value


def test_small_tensors_are_made_contiguous(calls):
    fa_ops.attention(
        *qkv(),
        alibi_slopes=torch.rand(8)[::2],
        sinks=torch.rand(1).expand(4),
        kv_lens=torch.arange(1, 5, dtype=torch.int32)[::2],
        key_ranges=torch.tensor([0, 3], dtype=torch.int32).expand(2, 1, 5, 2),
    )
    for name in ("alibi_slopes", "sinks", "kv_lens", "key_ranges"):
        assert getattr(calls[0].operands, name).is_contiguous(), name


def test_ints_are_accepted_for_floats(calls):
    fa_ops.attention(*qkv(), scale=1, softcap=2)
    assert (calls[0].options.scale, calls[0].options.softcap) == (1.0, 2.0)


def test_results_are_no_views():
    q, k, v = qkv()
    for grad in (False, True):
        x = q.detach().requires_grad_(grad)
        out, lse = fa_ops.attention(x, k, v, return_lse=True)
        assert out._base is None and lse._base is None
        assert torch.ops.fa.attention(x, k, v)._base is None


@pytest.mark.parametrize("argument", ["query", "key", "value", "attn_mask", "sinks"])
def test_every_differentiable_argument_has_a_gradient(argument):
    q, k, v = qkv()
    given = {
        "query": q,
        "key": k,
        "value": v,
        "attn_mask": torch.randn(5, 5),
        "sinks": torch.randn(4),
    }
    x = given[argument].requires_grad_()
    fa_ops.attention(**given).sin().sum().backward()
    assert x.grad.shape == x.shape and x.grad.abs().sum() > 0


def test_slopes_may_require_grad_under_no_grad():
    inputs, slopes = qkv(), torch.rand(4, requires_grad=True)
    with torch.no_grad():
        out = fa_ops.attention(*inputs, alibi_slopes=slopes)
    wanted = fa_ops.attention(*inputs, alibi_slopes=slopes.detach())
    assert torch.equal(out, wanted) and not out.requires_grad


def test_the_dropout_seed_is_drawn_from_torchs_generator():
    q, k, v = qkv()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(fa_ops.attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    before = torch.get_rng_state()
    fa_ops.attention(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)


def test_merge_states_accepts_sequences():
    q, k, v = qkv()
    states = [
        fa_ops.attention(q, k[:, :, s], v[:, :, s], return_lse=True)
        for s in (slice(2), slice(2, 5))
    ]
    outs, lses = zip(*states)
    merged = fa_ops.merge_states(outs, lses)
    torch.testing.assert_close(merged, fa_ops.merge_states(torch.stack(outs), torch.stack(lses)))
    torch.testing.assert_close(merged, fa_ops.attention(q, k, v, return_lse=True))


def test_the_function_and_the_operator_have_the_same_defaults():
    parameters = inspect.signature(fa_ops.attention).parameters
    for name, default in (NO_OPERANDS._asdict() | Options()._asdict()).items():
        if name in parameters:
            assert parameters[name].default == default, name
    assert torch.equal(fa_ops.attention(*qkv()), dense.ATTENTION(*qkv()))


FUNCTIONS = (fa_ops.attention, fa_ops.attention_varlen, fa_ops.merge_states)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_docstrings_describe_every_parameter(function):
    text = inspect.getdoc(function)
    for part in ("Args:", "Returns:", "Raises:"):
        assert part in text
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", text), name
