"""Calls of scaled_dot_product_attention: which become the operator, what the masks become, and why
others stay. That results are eager's: spellings/sdpa_calls.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import compile_passes
from compile_passes.fuse import CALL_RULES, CallCase
from tests.compile_passes.helpers import assert_same, check, fuse, qkv, verified
from tests.compile_passes.spellings.sdpa_calls import CASES

sdpa = F.scaled_dot_product_attention
MASKS = {
    "sdpa_causal_bool": "is_causal",
    "sdpa_window": "is_causal, window=(3, 0)",
    "sdpa_chunks": "a key range for each query",
    "sdpa_padding_and_causality": "is_causal, a mask of the keys",
    "sdpa_padding_by_indexing": "is_causal, window=(4, 0), a mask of the keys",
    "sdpa_lengths": "a key range for each query",
    "sdpa_packed_by_positions": "a key range for each query",
    "sdpa_more_queries_than_keys": "window=(None, 7)",
    "sdpa_fewer_queries_than_keys": "is_causal",
    "sdpa_bias_in_a_window": "window=(3, 3), dense attn_mask",
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_become_compact(name):
    case = CASES[name]
    (finding,) = compile_passes.explain(case.fn, *case.make_inputs()).findings
    assert finding.masks == MASKS[name]


@pytest.mark.parametrize(
    "name",
    """sdpa_padding_and_causality sdpa_lengths sdpa_packed_by_positions sdpa_repeated_heads
    sdpa_chunks sdpa_grouped sdpa_more_queries_than_keys""".split(),
)
def test_calls_are_replaced_with_dynamic_shapes(name):
    case = CASES[name]
    fusion = fuse(case.fn, dynamic=True)
    assert_same(case.fn, case.make_inputs(), fusion)
    assert fusion.fused == case.cores, fusion.reasons
    assert "repeat" not in fusion.code


@pytest.mark.parametrize("name", ["sdpa_padding_by_indexing", "sdpa_packed_by_positions"])
def test_verification_covers_calls(name):
    (finding,) = verified(CASES[name].fn, CASES[name].make_inputs())
    assert finding.fused, finding


def test_the_length_of_keys_becomes_kv_lens():
    fusion = fuse(CASES["sdpa_lengths"].fn)
    fusion.run(*CASES["sdpa_lengths"].make_inputs())
    assert "kv_lens" in fusion.code and "key_ranges" not in fusion.code


def test_a_mask_of_the_keys_is_not_expanded_to_queries():
    fusion = fuse(CASES["sdpa_padding_and_causality"].fn)
    fusion.run(*CASES["sdpa_padding_and_causality"].make_inputs())
    (call,) = (n for n in fusion.graphs[-1].nodes if n.target is torch.ops.fa.attention.default)
    assert call.args[3].meta["example_value"].shape == (2, 1, 1, 12)


def causal_mask(q):
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()


def math_only(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, causal_mask(q))


def flash_or_math(q, k, v):
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        return sdpa(q, k, v, causal_mask(q))


def with_dropout(q, k, v):
    return sdpa(q, k, v, causal_mask(q), dropout_p=0.5)


def unread(q, k, v):
    scores = (q @ k.mT).softmax(-1)
    return sdpa(q, k, v, causal_mask(q)) + scores.sum()


def test_math_alone_is_left():
    (finding,) = check(math_only, qkv(), cores=0).findings
    assert finding.reason == "sdpa_kernel permits torch's own arithmetic alone"
    check(flash_or_math, qkv())
    with sdpa_kernel(SDPBackend.MATH):
        assert fuse(with_dropout).run(*qkv()) is not None
        check(unread, qkv(), cores=0)


def test_dropout_becomes_the_operators():
    """The seed is torch's, so that repeated calls with a seed draw the same."""
    fusion = fuse(with_dropout)
    torch.manual_seed(3)
    first = fusion.run(*qkv())
    torch.manual_seed(3)
    torch.testing.assert_close(fusion.run(*qkv()), first)
    assert fusion.fused == 1 and "dropout_seed" in fusion.code
    assert first[:, :, 0].count_nonzero() < first[:, :, 0].numel()  # half of single weights


@pytest.mark.parametrize("asks", ["deterministic", "fallback_random"])
def test_dropout_is_left_where_torch_is_asked_to_repeat(asks):
    torch.use_deterministic_algorithms(asks == "deterministic")
    try:
        with torch._inductor.config.patch(fallback_random=asks == "fallback_random"):
            fusion = fuse(with_dropout)
            torch.manual_seed(3)
            actual = fusion.run(*qkv())
    finally:
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(3)
    torch.testing.assert_close(actual, with_dropout(*qkv()))
    assert "random numbers" in fusion.reasons[0]


def plain(q, k, v):
    return sdpa(q, k, v)


def a_second_call(q, k, v):
    hidden = torch.zeros(q.shape[2], k.shape[2])
    hidden = hidden.masked_fill(q[0, 0].sum(-1)[:, None] > 0, torch.finfo(torch.float32).min)
    return sdpa(q, k, v, hidden)


@pytest.mark.parametrize(
    "function, capability, dtype, reason",
    [
        (plain, (9, 0), torch.bfloat16, "the kernels for Hopper are faster"),
        (plain, (8, 0), torch.bfloat16, "torch computes it as fast"),
        (plain, (9, 0), torch.float32, "the GPU kernels are made for 16 bits"),
        (with_dropout, (8, 0), torch.float32, "its mask becomes compact, and masked tiles are"),
        (plain, None, torch.float32, "torch computes it as fast"),
        (a_second_call, None, torch.float32, "its mask may leave rows without keys"),
    ],
)
def test_rules(function, capability, dtype, reason, monkeypatch):
    """The table decides by device, dtype and mask; only the device is pretended."""
    if capability:
        device = property(lambda case: torch.device("cuda:0"))
        monkeypatch.setattr(CallCase, "device", device)
        monkeypatch.setattr(CallCase, "capability", capability)
    fusion = fuse(function)
    fusion.run(*(x.requires_grad_() for x in qkv(dtype=dtype)))
    (finding,) = fusion.findings
    assert finding.reason.startswith(reason), finding.reason
    taken = {rule.reason: rule.taken for rule in CALL_RULES}[finding.reason]
    assert finding.fused == taken


def test_every_rule_has_a_reason_of_its_own():
    reasons = [rule.reason for rule in CALL_RULES]
    assert len(set(reasons)) == len(reasons) and all(reasons)


def test_under_autocast():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return sdpa(q, k, v, causal_mask(q))

    inputs = qkv()
    fusion = fuse(function)
    actual, expected = fusion.run(*inputs), function(*inputs)
    assert fusion.fused == 1 and actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


def test_modules_and_checkpointed_regions():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, causal_mask(q))

    layer = Layer()
    check(lambda q, k, v: layer(q, k, v), qkv())

    def regions(q, k, v):
        return torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False)

    report = compile_passes.explain(regions, *(x.requires_grad_() for x in qkv()))
    assert report.fused == 1, report


def test_exported_programs():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, causal_mask(q))

    inputs = qkv()
    module = torch.export.export(Layer(), inputs).module()
    found = compile_passes.fuse_module(module)
    torch.testing.assert_close(module(*inputs), Layer()(*inputs))
    assert [f.masks for f in found] == ["is_causal"]


def test_a_function_of_the_users_is_not_a_call():
    def scaled_dot_product_attention(q, k, v):
        return sdpa(q, k, v, causal_mask(q)) * 2.0

    (finding,) = check(scaled_dot_product_attention, qkv()).findings
    assert finding.location.function == "scaled_dot_product_attention"


def test_explain_lists_every_call():
    def function(q, k, v):
        return sdpa(q, k, v, causal_mask(q)) + sdpa(q, k, v) + (q @ k.mT).softmax(-1) @ v

    report = compile_passes.explain(function, *qkv())
    head, *_ = str(report).splitlines()
    calls = "1 of 2 calls of scaled_dot_product_attention"
    assert head == f"1 of 1 softmaxes; {calls} fused, in 1 graph"
    assert [f.operation for f in report.findings].count("softmax") == 1
    assert "scaled_dot_product_attention is left: torch computes it as fast" in str(report)
    assert "scaled_dot_product_attention is replaced: its mask becomes compact" in str(report)


def test_a_mask_that_is_written_to_keeps_the_call():
    def function(q, k, v):
        mask = torch.arange(12) <= torch.arange(12)[:, None]
        mask[:, 0] = False
        return sdpa(q, k, v, mask)

    fusion = fuse(function)
    assert_same(function, qkv(), fusion)
    assert not fusion.fused or "is_causal=True" not in fusion.findings[0].call


@pytest.mark.parametrize("kind", ["positions", "other steps", "neighbours too"])
def test_documents_need_positions_that_count_by_one(kind):
    """With another step, or between documents, positions are not indices."""
    step = 2 if kind == "other steps" else 1

    def function(q, k, v, positions):
        start = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != step
        text = start.cumsum(-1)
        a, b = text[:, None, :], text[:, :, None]
        same = (a - b).abs() <= 1 if kind == "neighbours too" else a == b
        causal = positions[:, None, :] <= positions[:, :, None]
        return sdpa(q, k, v, (same & causal)[:, None])

    positions = [[0, 1, 2, 0, 1, 2, 3, 0, 2, 4, 6, 1], [0, 2, 4, 5, 6, 0, 1, 2, 9, 8, 7, 6]]
    fusion = fuse(function)
    assert_same(function, (*qkv(), torch.tensor(positions)), fusion)
    compact = [f.masks == "a key range for each query" for f in fusion.findings]
    assert compact == [kind == "positions"]


def by_the_kernel_for_cpus(q, k, v):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, True, scale=0.2)[0] + kernel(q, k, v, attn_mask=added(q))[0]


def added(q):
    return q.new_full((q.shape[2], q.shape[2]), -torch.inf).triu(1)


def with_the_lse_of_the_kernel(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=added(q))


def by_the_operator_for_math(q, k, v):
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, causal_mask(q))[0]


@pytest.mark.parametrize("dynamic", [None, True])
def test_operators_of_kernels_are_calls(dynamic):
    check(by_the_kernel_for_cpus, qkv(), 1, dynamic=dynamic)


@pytest.mark.parametrize(
    "function, reason",
    [
        (with_the_lse_of_the_kernel, "its log-sum-exp is read, or its result is not"),
        (by_the_operator_for_math, "sdpa_kernel permits torch's own arithmetic alone"),
    ],
)
def test_operators_of_kernels_that_are_left(function, reason):
    (finding,) = compile_passes.explain(function, *qkv()).findings
    assert (finding.operation, finding.reason) == ("scaled_dot_product_attention", reason)


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_operators_of_gpu_kernels_are_calls(name, monkeypatch):
    monkeypatch.setattr(CallCase, "capability", (9, 0))
    kernel = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    masked = name != "flash"

    def function(q, k, v):
        rest = (None, False, 0.0, True) if masked else (0.0, True)
        return kernel(q, k, v, *rest)[0]

    with FakeTensorMode():
        short, q, k, v = (
            torch.empty(2, n, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for n in (8, 16, 16, 16)
        )
        graph = make_fx(function)(q, k, v)
        longer = None if masked else make_fx(function)(short, k, v)
    strides = graph.graph.output_node().args[0].meta["val"].stride()
    (finding,) = compile_passes.fuse_module(graph)
    assert finding.fused and finding.masks == "is_causal", finding
    assert graph.graph.output_node().args[0].meta["val"].stride() == strides
    if longer:
        (finding,) = compile_passes.fuse_module(longer)
        assert finding.reason == "it is causal, with other numbers of queries and keys"


class Exported(torch.nn.Module):
    def forward(self, q, k, v):
        return sdpa(q, k, v, attn_mask=causal_mask(q))


def test_exported_calls_that_are_decomposed_are_fused():
    """As a kernel's operator, or written out with a guard of rows without keys, by torch's version."""
    exported = torch.export.export(Exported(), qkv()).run_decompositions()
    names = [str(n.target) for n in exported.graph.nodes]
    assert "aten.scaled_dot_product_attention.default" not in names
    module = exported.module()
    (finding,) = compile_passes.fuse_module(module)
    assert finding.fused and finding.masks == "is_causal", finding
    torch.testing.assert_close(module(*qkv()), Exported()(*qkv()), atol=1e-5, rtol=1e-4)
