"""`explain`: every softmax with its source location and its call, or the reason for none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch._dynamo.utils import counters

import compile_passes
from tests.compile_passes.helpers import fuse, qkv

HERE = str(Path(__file__).parent)


def printed(function, *inputs) -> str:
    lines = str(compile_passes.explain(function, *inputs)).replace(HERE + "/", "").splitlines()
    return "\n".join(lines) + "\n"


def weights_returned(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return p @ v, p


def scores_returned(q, k, v):
    s = q @ k.mT
    return s.softmax(-1) @ v, s


def over_heads(q, k, v):
    return (q @ k.mT).softmax(1) @ v


def over_queries(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def rectified(q, k, v):
    s = F.relu(q @ k.mT)
    return s.softmax(-1) @ v


def squared(q, k, v):
    s = q @ k.mT
    return (s * s).softmax(-1) @ v


def mixed_heads(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return torch.einsum("bhij,hg->bgij", p, torch.ones(4, 4)) @ v


def cumulative(q, k, v):
    return (q @ k.mT).softmax(-1).cumsum(-1) @ v


def smoothed(q, k, v):
    return ((q @ k.mT).softmax(-1) + 1e-3) @ v


def detached(q, k, v):
    return (q @ k.mT).detach().softmax(-1) @ v


CLASSES = torch.nn.Parameter(torch.ones(12, 8), requires_grad=False)


def classifier(q, k, v):
    return F.softmax(F.linear(q, CLASSES[: k.shape[2]]), -1) @ v


def slots(q, k, v):
    p = (k @ q.mT).softmax(-1)
    return (p / p.sum(-2, keepdim=True)).mT @ v


def without_gradient(q, k, v):
    with torch.no_grad():
        p = (q @ k.mT).softmax(-1)
    return p @ v


def key_written_to(q, k, v):
    k = k * 1.0
    p = (q @ k.mT).softmax(-1)
    k.add_(1.0)
    return p @ v, k


def scattered(q, k, v):
    s = q @ k.mT
    i, j = torch.triu_indices(*s.shape[-2:], 1)
    s[..., i, j] = -float("inf")
    return s.softmax(-1) @ v


def first_queries(q, k, v):
    return (q @ k.mT)[:, :, :4].softmax(-1) @ v


def shifted_by_columns(q, k, v):
    s = q @ k.mT
    return (s - s.amax(-2, keepdim=True)).softmax(-1) @ v


def largest_scores(q, k, v):
    s = q @ k.mT
    return s.masked_fill(s < s.topk(2, -1).values[..., -1:], -float("inf")).softmax(-1) @ v


def largest_scores_scattered(q, k, v):
    s = q @ k.mT
    values, indices = s.topk(2, -1)
    return torch.full_like(s, -float("inf")).scatter(-1, indices, values).softmax(-1) @ v


def largest_weights(q, k, v):
    p = (q @ k.mT).softmax(-1)
    p = p.masked_fill(p < p.kthvalue(3, -1, keepdim=True).values, 0.0)
    return p / p.sum(-1, keepdim=True) @ v


def eps_below(q, k, v):
    e = (q @ k.mT).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


REFUSED = [
    weights_returned,
    scores_returned,
    over_heads,
    over_queries,
    rectified,
    squared,
    mixed_heads,
    cumulative,
    smoothed,
    detached,
    classifier,
    slots,
    without_gradient,
    key_written_to,
    scattered,
    first_queries,
    shifted_by_columns,
    largest_scores,
    largest_scores_scattered,
    largest_weights,
]


class TestReport(TestCase):
    maxDiff = None

    def test_fused_attention_is_printed_with_its_call(self):
        def layer(q, k, v):
            s = q @ k.transpose(-1, -2) / 2.0
            s = s.masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), float("-inf"))
            return s.softmax(-1) @ v

        self.assertExpectedInline(
            printed(layer, *qkv()),
            """\
1 of 1 softmaxes fused, in 1 graph
test_explain.py:163 in layer: fused into fa::attention(l_q_, l_k_, l_v_, is_causal=True, scale=0.5)
    mask: is_causal
    > return s.softmax(-1) @ v
""",
        )

    def test_reasons(self):
        reasons = []
        for function in REFUSED:
            fusion = fuse(function)
            fusion.run(*(x.requires_grad_() for x in qkv()))
            (reason,) = fusion.reasons
            reasons.append(f"{function.__name__}: {reason}")
        self.assertExpectedInline(
            "\n".join(reasons),
            """\
weights_returned: the attention weights are returned; fused attention never computes them
scores_returned: the scores are returned; fused attention never computes them
over_heads: the softmax runs over a batch or head dimension, or over several, not over the keys
over_queries: the attention weights are not used as they are: they are multiplied along another dimension than the keys
rectified: the scores are not scale, bias and mask alone: relu is applied to them
squared: the scores are not scale, bias and mask alone: they are combined with themselves
mixed_heads: the attention weights are not used as they are: their heads are mixed (talking heads), which needs all of them at once
cumulative: the attention weights are not used as they are: cumsum is applied to them
smoothed: the attention weights are not used as they are: add is applied to them
detached: the scores are not scale, bias and mask alone: detach is applied to them
classifier: its input is not the product of a query and a key
slots: the attention weights are not used as they are: sum is applied to them
without_gradient: a part of it runs under another gradient mode than the rest
key_written_to: k is written to before the value product
scattered: the scores are written to by setitem, which is no mask or bias
first_queries: the scores are not scale, bias and mask alone: they are indexed
shifted_by_columns: what is subtracted from the scores varies along the keys
largest_scores: the scores are also read by topk, as where a mask depends on them (top-k, a threshold); fused attention never computes them
largest_scores_scattered: its input is not the product of a query and a key
largest_weights: the attention weights are not used as they are: lt is applied to them""",
        )

    def test_refused_attention_is_printed_with_its_reason(self):
        self.assertExpectedInline(
            printed(weights_returned, *qkv()),
            """\
0 of 1 softmaxes fused, in 1 graph
test_explain.py:25 in weights_returned: not fused: the attention weights are returned; fused attention never computes them
    > p = (q @ k.mT).softmax(-1)
""",
        )


def test_refused_functions_keep_their_results():
    """With square shapes, where sizes do not identify dimensions."""
    for function in (*REFUSED, eps_below):
        inputs = [x.requires_grad_() for x in qkv(Sq=8, Sk=8)]
        fusion = fuse(function)
        found, expected = (f(*inputs) for f in (fusion.run, function))
        torch.testing.assert_close(found, expected)
        assert fusion.fused == 0, function.__name__


def test_reports_are_data():
    report = compile_passes.explain(weights_returned, *qkv())
    (finding,) = report.missed
    assert (report.fused, report.graphs) == (0, 1)
    assert Path(finding.location.file) == Path(__file__)
    assert finding.location.code == "p = (q @ k.mT).softmax(-1)"
    assert finding.location.function == "weights_returned"


def test_explain_covers_graph_breaks_and_compiled_functions():
    def function(q, k, v):
        out = (q @ k.mT).softmax(-1) @ v
        torch._dynamo.graph_break()
        return (out @ k.mT).softmax(-1) @ v

    report = compile_passes.explain(torch.compile(function), *qkv())
    assert (report.fused, report.graphs) == (2, 2)


def test_counters_hold_totals_and_reasons():
    counters.clear()
    fuse(weights_returned).run(*qkv())
    fuse(lambda q, k, v: (q @ k.mT).softmax(-1) @ v).run(*qkv())
    assert counters["fa_ops"]["softmaxes"] == 2 and counters["fa_ops"]["fused"] == 1
    (reason,) = [key for key in counters["fa_ops"] if key.startswith("not fused: ")]
    assert "weights" in reason


def test_a_softmax_over_one_key_is_attention_only_before_a_value():
    """SwiftFormer's additive attention has a softmax over one number; the other function would be
    fused with more keys.
    """

    def additive(q, k, v):
        return (q * (q @ k[:, :, :1].mT).softmax(-1)).sum(1)

    def one_key(q, k, v):
        return (q @ k[:, :, :1].mT).softmax(-1) @ v[:, :, :1]

    q = torch.randn(2, 4, 12, 8)
    reasons = [compile_passes.explain(f, q, q, q).missed[0].reason for f in (additive, one_key)]
    assert reasons == [
        "its result is not multiplied with a value",
        "the softmax runs over a dimension of size 1",
    ]


def test_views_that_only_read_the_shape_are_allowed():
    """ProphetNet reads a length so."""

    def shape_read(q, k, v, table):
        scores = q @ k.mT
        length = scores.view(2 * q.shape[1], *scores.shape[2:]).transpose(1, 2).shape[1]
        return (scores + table[:length]).softmax(-1) @ v

    def read(q, k, v, table):
        scores = q @ k.mT
        flat = scores.view(2 * q.shape[1], *scores.shape[2:])
        return (scores + table[: flat.shape[2]]).softmax(-1) @ v, flat.transpose(1, 2)

    q, table = torch.randn(2, 4, 12, 8), torch.randn(20, 12)
    reports = [compile_passes.explain(f, q, q, q, table) for f in (shape_read, read)]
    assert [r.fused for r in reports] == [1, 0]
    assert "also read by view" in reports[1].missed[0].reason


def by_hand(q, k, v):
    e = (q @ k.mT).exp()
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


def with_epsilon(q, k, v):
    e = (q @ k.mT).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


def not_divided(q, k, v):
    return (q @ k.mT).exp() @ v


def of_absolute_scores(q, k, v):
    e = (q @ k.mT).abs().exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def gumbel(q, k, v):
    return F.gumbel_softmax(q @ k.mT, dim=-1) @ v


@pytest.mark.parametrize(
    "function, reason",
    [
        (with_epsilon, "something is added to the sum of their exponentials"),
        (not_divided, "is not divided by their sum"),
        (of_absolute_scores, "abs is applied to them"),
        (gumbel, "gumbel_softmax is applied to them"),
    ],
)
def test_exponentials_that_become_no_weights_are_listed(function, reason):
    (finding,) = compile_passes.explain(function, *qkv()).findings
    assert not finding.fused and finding.reason.endswith(reason), finding


def test_exponentials_without_a_value_are_not_listed():
    def loss(q, k, v):
        s = q @ k.mT
        return (s.exp().sum(-1).log() - s[..., 0]).mean()

    assert not compile_passes.explain(loss, *qkv()).findings


def test_findings_say_whether_they_were_verified():
    def with_dropout(q, k, v):
        return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v

    (checked,) = compile_passes.explain(by_hand, *qkv(), verify=True).findings
    (random,) = compile_passes.explain(with_dropout, *qkv(), verify=True).findings
    (plain,) = compile_passes.explain(by_hand, *qkv()).findings
    assert checked.fused and checked.verified and "\n    verified" in str(checked)
    assert random.fused and not random.verified
    assert plain.fused and not plain.verified and "verified" not in str(plain)


def relu_attention(q, k, v):
    return (q @ k.mT).relu() @ v


def sigmoid_attention(q, k, v):
    return (q @ k.mT * 0.3).sigmoid() @ v


def linear_attention(q, k, v):
    return F.elu(q) @ (F.elu(k).mT @ v)


@pytest.mark.parametrize("function", [relu_attention, sigmoid_attention, linear_attention])
def test_reports_say_that_no_softmax_was_found(function):
    report = compile_passes.explain(function, *qkv())
    assert str(report) == "no softmax and no call of attention was found, in 1 graph"
    assert (report.fused, report.missed) == (0, ())


def test_einsums_that_are_no_scores_are_named():
    def function(q, k, v):
        return torch.einsum("bhqd,bhke->bhqk", q, k).softmax(-1) @ v

    (finding,) = compile_passes.explain(function, *qkv()).findings
    assert "an einsum of 2 tensors that is no product of two with a sum" in finding.reason


def test_a_sum_over_the_features_too_is_a_refusal_for_that_attention_alone():
    def function(q, k, v):
        weights = (q @ k.mT).softmax(-1)
        total = (weights.unsqueeze(-1) * v.unsqueeze(2)).sum((-2, -1))
        return total, (q @ k.mT).softmax(-1) @ v

    first, second = compile_passes.explain(function, *qkv()).findings
    assert not first.fused and "dimensions which they lack" in first.reason
    assert second.fused
