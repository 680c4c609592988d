"""torch.compile: one graph, dynamic lengths, no recompilation, eager's numbers."""

from __future__ import annotations

import pytest
import torch

import fa_ops
from fa_ops.call import backend_option
from fa_ops.call.call import general
from fa_ops.plans import dispatch
from tests.ops.cases import CASES, dense_call

LENGTHS = (7, 8, 13, 16, 33)


@pytest.fixture(autouse=True)
def any_stance():
    yield
    torch.compiler.set_stance("default")


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def inputs(S: int, requires_grad: bool = True) -> list[torch.Tensor]:
    shapes = [(2, 4, S, 8), (2, 2, S + 3, 8), (2, 2, S + 3, 8)]
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


def causal(q, k, v):
    return fa_ops.attention(q, k, v, is_causal=True)


def with_everything(q, k, v):
    S, Sk = q.shape[2], k.shape[2]
    mask = torch.zeros(S, Sk, dtype=q.dtype) + q.mean()
    out, lse = fa_ops.attention(
        q, k, v, mask, window=(S // 2, None), softcap=4.0, sinks=q.mean((0, 2, 3)),
        alibi_slopes=torch.ones(4), kv_lens=torch.full((2,), 5, dtype=torch.int32), return_lse=True,
    )  # fmt: skip
    return out + lse.unsqueeze(-1)


def ranges(q, k, v):
    ends = torch.arange(q.shape[2], dtype=torch.int32).view(1, 1, -1, 1) + 3
    runs = torch.cat([ends - 3, ends], -1)
    return fa_ops.attention(q, k, v, key_ranges=runs)


def packed(q, k, v):
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    ends = torch.arange(3, dtype=torch.int32)
    ends_q, ends_k = ends * (q.shape[0] // 2), ends * (k.shape[0] // 2)
    out, lse = fa_ops.attention_varlen(q, k, v, ends_q, ends_k, q.shape[0] // 2, return_lse=True)
    return out + lse.t().unsqueeze(-1)


def merged(q, k, v):
    cut = k.shape[2] // 2
    halves = [(k[:, :, :cut], v[:, :, :cut]), (k[:, :, cut:], v[:, :, cut:])]
    states = [fa_ops.attention(q, k, v, return_lse=True) for k, v in halves]
    return fa_ops.merge_states(*zip(*states))[0]


FUNCTIONS = [causal, with_everything, ranges, packed, merged]


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_graph_over_five_lengths(function, dynamic):
    """Forward and backward; without dynamic=True the second length makes the graph dynamic."""
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n, S in enumerate(LENGTHS):
        if n == (1 if dynamic else 2):
            torch.compiler.set_stance("fail_on_recompile")
        args = inputs(S)
        expected = function(*args)
        grads = torch.autograd.grad(expected.sin().sum(), args)
        actual = compiled(*args)
        assert_same(actual, expected)
        assert_same(torch.autograd.grad(actual.sin().sum(), args), grads)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_gradients(function):
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    args = inputs(9, requires_grad=False)
    assert_same(compiled(*args), function(*args))
    with torch.inference_mode():
        assert_same(compiled(*args), function(*args))


def test_inductor():
    """Inductor asserts the strides that the fakes promised."""
    for function in (causal, with_everything, packed):
        args = inputs(9)
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        actual, expected = compiled(*args), function(*args)
        assert_same(actual, expected)
        assert_same(
            torch.autograd.grad(actual.sin().sum(), args),
            torch.autograd.grad(expected.sin().sum(), args),
        )


def test_windows_do_not_recompile():
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def windowed(q, k, v, left):
        return fa_ops.attention(q, k, v, window=(left, None))

    args = inputs(16, requires_grad=False)
    for left in (2, 3, 5, 8):
        assert_same(windowed(*args, left), fa_ops.attention(*args, window=(left, None)))
        torch.compiler.set_stance("fail_on_recompile")


def test_the_operator_is_one_node():
    seen = []

    def record(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(causal, backend=record, fullgraph=True)(*inputs(9))
    assert seen == ["fa.attention.default"]


def test_dropout_is_the_same_in_forward_and_backward():
    def function(q, k, v):
        return fa_ops.attention(q, k, v, dropout_p=0.5)

    args = inputs(9)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for f in (function, compiled):
        torch.manual_seed(3)
        out = f(*args)
        # out is linear in v, so its gradient with the same mask gives the output back
        (dv,) = torch.autograd.grad(out, args[2], torch.ones_like(out))
        torch.testing.assert_close((dv * args[2]).sum(), out.sum())
        torch.manual_seed(3)
        assert torch.equal(f(*args), out)
        assert not torch.equal(f(*args), out)


def test_use_backend_around_and_inside_a_graph():
    calls, reference = [], dispatch.load("reference")

    def forward(call):
        calls.append(call.options.backend)
        return reference.forward(call)

    def inside(q, k, v):
        with fa_ops.use_backend("reference"):
            return fa_ops.attention(q, k, v)

    args = inputs(9, requires_grad=False)
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(reference, "plan", lambda call: general("spy", forward))
        compiled = torch.compile(causal, backend="eager", fullgraph=True)
        compiled(*args)
        assert calls == []
        with fa_ops.use_backend("reference"):
            compiled(*args)
        assert calls == ["reference"]
        compiled(*args)
        assert calls == ["reference"]
        torch.compile(inside, backend="eager", fullgraph=True)(*args)
        assert calls == ["reference"] * 2
    assert backend_option.chosen() is None


def test_compiled_autograd():
    args = inputs(9)
    expected = torch.autograd.grad(causal(*args).sin().sum(), args)
    with torch._dynamo.utils.maybe_enable_compiled_autograd(True, fullgraph=True, dynamic=False):
        out = causal(*args).sin().sum()
        assert_same(torch.autograd.grad(out, args), expected)


@pytest.mark.parametrize("name", CASES)
def test_raw_operator(name):
    args, options = dense_call(CASES[name], requires_grad=True)
    floats = [t for t in (*args, *options.values()) if getattr(t, "requires_grad", False)]

    def function(*args, **options):
        return torch.ops.fa.attention(*args, **options).sin().sum()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    actual, expected = compiled(*args, **options), function(*args, **options)
    assert_same(actual, expected)
    grads = [torch.autograd.grad(x, floats) for x in (actual, expected)]
    assert_same(*grads)
