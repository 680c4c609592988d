"""Repeated packed calls on a GPU: what was prepared gives the bits of the first call."""

import pytest
import torch

import fa_ops
from fa_ops.backends import reference
from fa_ops.call.options import Packing, Spec
from fa_ops.plans import planning
from fa_ops.testing import assert_within_budget, naive

LENGTHS = (5, 0, 140, 51, 300)
TOKENS = sum(LENGTHS) + 4  # two before the first sequence, two behind the last
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (30, None)},
    "lengths": {"is_causal": True, "kv_lens": (2, 0, 140, 0, 77)},
    "sinks": {"sinks": True},
    "ALiBi": {"is_causal": True, "alibi_slopes": True},
    "dropout": {"dropout_p": 0.3},
}


def ends():
    return torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int() + 2


def tensors(offset=0, fused=False):
    """Query, key and value; `fused`: as slices of one tensor, `offset`: elements into memory."""
    if fused:
        return torch.randn(TOKENS, 3, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(1)
    sizes = [TOKENS * heads * 64 for heads in (4, 2, 2)]
    memory = [torch.randn(n + offset, device="cuda", dtype=torch.bfloat16) for n in sizes]
    return [x[offset:].view(TOKENS, -1, 64) for x in memory]


def options_of(name):
    options = dict(OPTIONS[name])
    if "kv_lens" in options:
        options["kv_lens"] = torch.tensor(options["kv_lens"], device="cuda", dtype=torch.int32)
    if "sinks" in options:
        options["sinks"] = torch.randn(4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(len(LENGTHS), 4, device="cuda") * 0.2
    return options


def results(inputs, options, both):
    """out and lse, then all gradients, of a call with torch's seed 0."""
    torch.manual_seed(0)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = fa_ops.attention_varlen(*leaves, both, both, return_lse=True, **options)
    wanted = [*leaves, *([options["sinks"]] if "sinks" in options else [])]
    outputs, given = (out, lse), (torch.ones_like(out), torch.ones_like(lse))
    grads = torch.autograd.grad(outputs, wanted, given)
    return out.detach(), lse.detach(), *grads


@pytest.mark.parametrize("layout", [{}, {"offset": 8}, {"offset": 1}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_repeated_calls_give_the_first_ones_results(name, layout):
    options = options_of(name)
    given = [(tensors(**layout), ends()) for _ in range(3)]
    expected = []
    for inputs, both in given:
        planning.forget()
        expected.append(results(inputs, options, both))
    planning.forget()
    for (inputs, both), first in list(zip(given, expected)) * 2:
        out, lse, *grads = results(inputs, options, both)
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])
        for a, b in zip(grads, first[2:]):  # sums of dQ are added in any order
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    assert len(planning._prepared) == 2


def test_plans_agree_with_the_oracle_and_the_operator():
    (q, k, v), both = tensors(), ends()
    packing, spec = Packing(both, both), Spec(is_causal=True)
    for _ in range(3):
        out, lse = fa_ops.attention_varlen(q, k, v, both, both, is_causal=True, return_lse=True)
        assert lse[:, :2].isneginf().all() and not out[-2:].any()
        exact = reference.varlen_forward(*(x.double() for x in (q, k, v)), packing, spec)[0]
        rounded = naive_packed(q, k, v, both)
        inside = slice(2, TOKENS - 2)
        assert_within_budget("out", out[inside], exact[inside], rounded[inside])
        found = torch.ops.fa.attention_varlen(q, k, v, both, both, is_causal=True)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)


def naive_packed(q, k, v, both):
    """Attention written out, sequence by sequence."""
    out = torch.zeros_like(q)
    for first, end in zip(both.tolist(), both.tolist()[1:]):
        if end > first:
            one = (x[first:end].transpose(0, 1)[None] for x in (q, k, v))
            out[first:end] = naive(*one, Spec(is_causal=True))[0][0].transpose(0, 1)
    return out


@pytest.mark.parametrize("name", ["causal", "dropout"])
def test_a_captured_call_reads_lengths_when_it_is_replayed(name):
    options, both = OPTIONS[name], ends()
    q, k, v = tensors()

    def call():
        return fa_ops.attention_varlen(q, k, v, both, both, return_lse=True, **options)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for shift in (0, 3):
        both.copy_(ends() + torch.tensor([0, shift, 0, shift, shift, 0], device="cuda"))
        graph.replay()
        fresh = fa_ops.attention_varlen(q, k, v, both, both, return_lse=True, **options)
        torch.cuda.synchronize()
        assert torch.equal(lse, fresh[1])  # which dropout leaves as it is
        if name == "causal":
            assert torch.equal(out, fresh[0])
