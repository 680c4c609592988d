"""torch.fx.symbolic_trace records every public function as its operator; torch.jit too."""

from __future__ import annotations

import pytest
import torch

import fa_ops

ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
LENS = torch.tensor([3, 0], dtype=torch.int32)
Q, K, V = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
TOKENS = [x[0].transpose(0, 1) for x in (Q, K, V)]
STEP, NEW = Q[:, :, :1], K[:, :, :1]
CALLS = {
    "attention": (lambda q, k, v: fa_ops.attention(q, k, v, is_causal=True), (Q, K, V)),
    "lse": (lambda q, k, v, lens: fa_ops.attention(q, k, v, kv_lens=lens, return_lse=True),
            (Q, K, V, LENS)),
    "mask": (lambda q, k, v, mask: fa_ops.attention(q, k, v, mask, window=(3, 2), scale=0.5,
                                                    mask_blocks=fa_ops.mask_blocks(mask)),
             (Q, K, V, torch.rand(9, 9) > 0.3)),
    "varlen": (lambda q, k, v, ends: fa_ops.attention_varlen(q, k, v, ends, ends, is_causal=True),
               (*TOKENS, ENDS)),
    "varlen, lse": (lambda q, k, v, ends: fa_ops.attention_varlen(q, k, v, ends, ends, 5,
                                                                  return_lse=True),
                    (*TOKENS, ENDS)),
    "cache": (lambda q, k, v, lens: fa_ops.attention_with_kv_cache(q, k, v, lens, softcap=2.0),
              (STEP, K, V, LENS)),
    "append": (lambda q, k, v, lens, new: fa_ops.attention_with_kv_cache(q, k, v, lens, key=new,
                                                                         value=new),
               (STEP, K, V, LENS, NEW)),
    "quantized": (lambda q, k, v: fa_ops.quantized_attention(q, k, v, rotate=True), (Q, K, V)),
    "merge": (lambda outs, lses: fa_ops.merge_states(outs, lses)[0], (Q, Q[..., 0])),
    "merge two": (lambda a, b, s, t: fa_ops.merge_states((a, b), (s, t)),
                  (Q, Q + 1, Q[..., 0], Q[..., 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_traced_functions_give_the_results_of_eager_ones(name):
    function, tensors = CALLS[name]
    traced = torch.fx.symbolic_trace(function)
    assert any("fa." in str(node.target) for node in traced.graph.nodes)
    results = [f(*(t.clone() for t in tensors)) for f in (function, traced)]
    torch.testing.assert_close(*(r if type(r) is tuple else (r,) for r in results), rtol=0, atol=0)


def test_modules_are_traced_with_their_parameters():
    class Attend(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.randn(4))

        def forward(self, q, k, v):
            return fa_ops.attention(q, k, v, sinks=self.sinks)

    module = Attend()
    traced = torch.fx.symbolic_trace(module)
    assert torch.equal(traced(Q, K, V), module(Q, K, V))
    traced(Q, K, V).sum().backward()
    assert module.sinks.grad.abs().sum() > 0


def test_every_call_of_a_traced_function_drops_other_weights():
    traced = torch.fx.symbolic_trace(lambda q, k, v: fa_ops.attention(q, k, v, dropout_p=0.5))
    first, second = traced(Q, K, V), traced(Q, K, V)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    again = traced(Q, K, V)
    torch.manual_seed(3)
    assert torch.equal(traced(Q, K, V), again)


def test_pages_are_refused_by_name():
    pages, table = torch.zeros(4, 8, 2, 8), torch.arange(4, dtype=torch.int32).view(2, 2)

    def paged(q):
        return fa_ops.attention_varlen(q, pages, pages, ENDS, None, kv_lens=LENS, page_table=table)

    with pytest.raises(NotImplementedError, match="query must be a Tensor with page_table, got"):
        torch.fx.symbolic_trace(paged)


def test_what_is_no_tensor_is_still_refused():
    for wrong in ([1.0], 1.0, None, Q.numpy(), torch.Tensor):
        with pytest.raises(TypeError, match="query must be a Tensor, got"):
            fa_ops.attention(wrong, K, V)


def test_operators_are_scripted():
    @torch.jit.script
    def scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        return torch.ops.fa.attention(q, k, v, None, 0.0, True)

    assert torch.equal(scripted(Q, K, V), fa_ops.attention(Q, K, V, is_causal=True))
