"""Log-sum-exps that the model reads, and sinks per query: both use the operator's own."""

import pytest
import torch

from tests.compile_passes.helpers import check, fuse, qkv, results, verified

INF = float("inf")
LOWEST = torch.finfo(torch.float32).min
WITH_LSE = torch.ops.fa.attention_with_lse.default


def causal(scores, fill=-INF):
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, fill)


def left_padded():
    keep = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    keep[0, ..., :5] = False
    return keep


def returned(q, k, v):
    """As ring attention exchanges it."""
    scores = causal(q @ k.mT * 0.35)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def returned_with_its_dimension(q, k, v):
    k, v = (x.repeat_interleave(2, 1) for x in (k[:, :2], v[:, :2]))
    scores = causal(q @ k.mT * 0.35)
    return torch.logsumexp(scores, dim=3, keepdim=True), scores.softmax(-1) @ v


def gate_before_the_product(q, k, v):
    """As GraniteSWA applies its sinks."""
    scores = causal(q @ k.mT * 0.35)
    gate = (scores.logsumexp(-1) - torch.linspace(-1, 1, 4).view(1, -1, 1)).sigmoid()
    return (scores.softmax(-1) @ v) * gate[..., None]


def weights_from_it(q, k, v):
    scores = q @ k.mT * 0.35
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def loss_beside(q, k, v):
    scores = torch.tanh(q @ k.mT / 5.0) * 5.0
    return scores.softmax(-1) @ v, scores.logsumexp(-1).square().mean()


SPELLINGS = [
    returned,
    returned_with_its_dimension,
    gate_before_the_product,
    weights_from_it,
    loss_beside,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_lse_comes_from_the_operator(spelling, dynamic):
    fusion = check(spelling, qkv(), dynamic=dynamic)
    assert len(fusion.graphs[-1].find_nodes(op="call_function", target=WITH_LSE)) == 1
    assert "logsumexp" not in fusion.code


@pytest.mark.parametrize("kind", ["filled", "added", "added to a bias"])
def test_rows_without_keys_have_their_fill_as_lse(kind):
    def function(q, k, v, keep, bias):
        scores = q @ k.mT * 0.35
        visible = keep & torch.ones(12, 12, dtype=torch.bool).tril()
        if kind == "filled":
            scores = scores.masked_fill(~visible, LOWEST)
        elif kind == "added":
            scores = scores + torch.where(visible, 0.0, LOWEST)
        else:
            scores = scores + bias + torch.where(visible, 0.0, LOWEST)
        lse = scores.logsumexp(-1) * 1e-38  # so that gradients are of order 1 there
        return scores.softmax(-1) @ v, lse, torch.where(lse < -1.0, lse * 1e38 / LOWEST, lse)

    check(function, (*qkv(), left_padded(), torch.randn(4, 12, 12)))


def test_gradients_of_the_lse_reach_rows_without_keys():
    def function(q, k, v, keep):
        scores = q @ k.mT * 0.35 + torch.where(keep, 0.0, LOWEST)
        return scores.softmax(-1) @ v, (scores.logsumexp(-1) - LOWEST).clamp(max=10.0)

    keep = left_padded().expand(2, 1, 12, 12).clone()
    keep[1, :, 3] = False
    check(function, (*qkv(), keep))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_lse_is_verified(spelling):
    (finding,) = verified(spelling, qkv())
    assert finding.fused and finding.call.startswith("fa::attention_with_lse(")
    assert torch._dynamo.utils.counters["fa_ops"]["verified"] == 2  # the result and the lse


@pytest.mark.parametrize("dynamic", [False, True])
def test_sinks_per_query_are_fused(dynamic):
    """As in Inkling."""

    def function(q, k, v, sinks):
        scores = torch.cat([causal(q @ k.mT * 0.35), sinks], -1)
        return scores.softmax(-1)[..., :-1] @ v

    check(function, (*qkv(), torch.randn(2, 4, 12, 1)), dynamic=dynamic)


def test_sinks_per_query_allow_rows_without_keys():
    def function(q, k, v, sinks, keep):
        scores = q @ k.mT * 0.35 + torch.where(keep, 0.0, LOWEST)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v

    check(function, (*qkv(), torch.randn(2, 4, 12, 1), left_padded().tril().expand(2, 1, 12, 12)))


def of_other_scores(q, k, v):
    scores = q @ k.mT
    return (scores * 0.35).softmax(-1) @ v, scores.logsumexp(-1)


def over_the_queries(q, k, v):
    scores = q @ k.mT * 0.35
    return scores.softmax(-1) @ v, scores.logsumexp(-2)


def over_keys_and_queries(q, k, v):
    scores = q @ k.mT * 0.35
    return scores.softmax(-1) @ v, scores.logsumexp((-2, -1))


def before_the_mask(q, k, v):
    scores = q @ k.mT * 0.35
    return causal(scores).softmax(-1) @ v, scores.logsumexp(-1)


def after_a_constant(q, k, v):
    scores = q @ k.mT * 0.35 + 1.0
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def in_the_value(q, k, v):
    scores = q @ k.mT * 0.35
    return scores.softmax(-1) @ (v * scores.logsumexp(-1)[..., None])


def maximum_returned(q, k, v):
    scores = q @ k.mT * 0.35
    return scores.softmax(-1) @ v, scores.amax(-1)


def written_between(q, k, v):
    scores = q @ k.mT * 0.35
    gate = v.new_zeros(2, 4, 12)
    lse = scores.logsumexp(-1) + gate
    gate.add_(1.0)
    return scores.softmax(-1) @ v + lse[..., None] + gate[..., None]


NEAR_MISSES = [
    of_other_scores,
    over_the_queries,
    over_keys_and_queries,
    before_the_mask,
    after_a_constant,
    in_the_value,
    maximum_returned,
    written_between,
]


@pytest.mark.parametrize("spelling", NEAR_MISSES, ids=lambda f: f.__name__)
def test_other_statistics_are_refused(spelling):
    fusion = fuse(spelling)
    results(fusion.run, qkv(), True)
    assert fusion.fused == 0 and len(fusion.reasons) == 1
