"""Guards against rows without keys, infinities and large scores."""

from __future__ import annotations

import torch

from tests.compile_passes.cases import INF, B, H, S, bhsd, registry, triangle

CASES, case = registry()


def with_rows():
    """Query, key, value, a mask of rows, and a mask of the keys with rows that keep none."""
    rows = torch.zeros(B, 1, S, 1, dtype=torch.bool)
    rows[0, :, 3:5] = True
    hidden = ~triangle()
    hidden = hidden.clone()
    hidden[2] = True
    return (*bhsd()(), rows, hidden)


@case("fuse", with_rows)
def rows_filled_after_the_softmax(q, k, v, rows, hidden):
    p = (q @ k.mT).masked_fill(~triangle(), -INF).softmax(-1)
    return p.masked_fill(rows, 0.0) @ v


@case("fuse", with_rows)
def rows_chosen_after_the_softmax(q, k, v, rows, hidden):
    return torch.where(rows, 0.0, (q @ k.mT / 3).softmax(-1)) @ v


@case("fuse", with_rows)
def rows_kept_after_the_softmax(q, k, v, rows, hidden):
    p = (q @ k.mT / 3).softmax(-1)
    return torch.where(~rows, p, torch.zeros_like(p)) @ v


@case("fuse", with_rows, tags="nan")
def nan_weights_filled(q, k, v, rows, hidden):
    p = (q @ k.mT).masked_fill(hidden, -INF).softmax(-1)
    return p.masked_fill(torch.isnan(p), 0.0) @ v


@case("fuse", with_rows, tags="nan")
def nan_weights_replaced(q, k, v, rows, hidden):
    p = (q @ k.mT).masked_fill(hidden, -INF).softmax(-1)
    p = torch.where(p.isnan(), torch.zeros_like(p), p)
    return p @ v


@case("fuse", bhsd())
def scaled_after_the_maximum(q, k, v):
    s = q @ k.mT
    s = (s - s.amax(-1, keepdim=True)) * 0.3
    return s.softmax(-1) @ v


@case("fuse", bhsd())
def scaled_after_the_maximum_by_hand(q, k, v):
    s = q @ k.mT
    e = ((s - s.amax(-1, keepdim=True).detach()) / 3).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@case("fuse", bhsd())
def detached_before_the_maximum(q, k, v):
    s = (q @ k.mT * 0.3).masked_fill(~triangle(), -INF)
    e = (s - s.detach().float().max(-1, keepdim=True).values).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


@case("fuse", bhsd())
def maximum_without_gradient(q, k, v):
    s = q @ k.mT * 0.3
    with torch.no_grad():
        m = s.amax(-1, keepdim=True)
    e = (s - m).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@case("no_fuse", bhsd())
def sum_of_detached_scores(q, k, v):
    s = q @ k.mT * 0.3
    return (s - s.detach().logsumexp(-1, keepdim=True)).exp() @ v


@case("no_fuse", bhsd())
def exponentials_of_detached_scores_summed(q, k, v):
    s = q @ k.mT * 0.3
    m = s.detach().amax(-1, keepdim=True)
    return ((s - m).exp() / (s.detach() - m).exp().sum(-1, keepdim=True)) @ v


@case("no_fuse", with_rows)
def scores_with_nan_to_num(q, k, v, rows, hidden):
    return (q @ k.mT).masked_fill(hidden, -INF).nan_to_num().softmax(-1) @ v


@case("fuse", with_rows)
def columns_filled_after_the_softmax(q, k, v, rows, hidden):
    return (q @ k.mT).softmax(-1).masked_fill(rows.mT, 0.0) @ v


@case("no_fuse", with_rows)
def rows_filled_with_ones(q, k, v, rows, hidden):
    return (q @ k.mT).softmax(-1).masked_fill(rows, 1.0) @ v


@case("no_fuse", with_rows, tags="nan")
def nan_of_other_weights(q, k, v, rows, hidden):
    other = (k @ q.mT).masked_fill(hidden, -INF).softmax(-1)
    p = (q @ k.mT).softmax(-1)
    return p.masked_fill(other.isnan(), 0.0) @ v


@case("no_fuse", with_rows)
def nan_filled_with_one(q, k, v, rows, hidden):
    p = (q @ k.mT).masked_fill(hidden, -INF).softmax(-1)
    return p.masked_fill(p.isnan(), 1.0) @ v


@case("no_fuse", bhsd())
def scaled_maximum_as_a_sink(q, k, v):
    """The sink is exp(-m), not exp(-m / 3)."""
    s = q @ k.mT
    m = s.amax(-1, keepdim=True)
    e = ((s - m) / 3).exp()
    return (e / (e.sum(-1, keepdim=True) + (-m).exp())) @ v


@case("no_fuse", bhsd())
def scaled_before_the_other_maximum(q, k, v):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True)).exp()
    f = ((s - s.amax(-1, keepdim=True)) * 0.5).exp()
    return (e / f.sum(-1, keepdim=True)) @ v


@case("fuse", with_rows)
def lowest_replaced_score_enlarged_after_the_maximum(q, k, v, rows, hidden):
    s = (q @ k.mT).masked_fill(hidden, torch.finfo(torch.float32).min)
    return ((s - s.amax(-1, keepdim=True)) * 1.5).softmax(-1) @ v


@case("fuse", with_rows)
def mask_reduced_after_the_maximum(q, k, v, rows, hidden):
    s = q @ k.mT + torch.zeros(S, S).masked_fill(hidden, torch.finfo(torch.float32).min)
    return ((s - s.amax(-1, keepdim=True)) * 0.5).softmax(-1) @ v


@case("no_fuse", with_rows)
def conv_over_heads(q, k, v, rows, hidden):
    """Talking heads."""
    w = torch.nn.functional.conv2d((q @ k.mT).softmax(-1), torch.eye(H)[:, :, None, None] * 0.5)
    return w @ v


@case("no_fuse", with_rows)
def lowest_fill_scaled_after_the_maximum(q, k, v, rows, hidden):
    """A row without keys averages the values; 1.5 times the fill alone would be -inf."""
    s = q @ k.mT + torch.zeros(S, S).masked_fill(hidden, torch.finfo(torch.float32).min)
    return ((s - s.amax(-1, keepdim=True)) * 1.5).softmax(-1) @ v


@case("fuse", with_rows)
def mask_that_absorbs_before_a_scale(q, k, v, rows, hidden):
    """Beside -1e9 scores are lost in float32, beside -3e8 not quite: the sum decides."""
    added = torch.zeros(S, S).masked_fill(hidden, -1e9)
    return ((q @ k.mT + added) * 0.3).softmax(-1) @ v


@case("fuse", with_rows)
def causal_mask_before_a_scale(q, k, v, rows, hidden):
    """Every row attends a key, so that the fill need not absorb anything."""
    added = torch.zeros(S, S).masked_fill(~triangle(), -1e9)
    return ((q @ k.mT + added) * 0.3).softmax(-1) @ v


@case("fuse", with_rows)
def torchs_safe_softmax(q, k, v, rows, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -INF)
    return torch.ops.aten._safe_softmax(s, -1) @ v


@case("fuse", with_rows, tags="nan")
def rows_of_infinite_scores_chosen(q, k, v, rows, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -INF)
    return torch.where((s == -INF).all(-1, keepdim=True), 0.0, s.softmax(-1)) @ v


@case("fuse", with_rows, tags="nan")
def rows_with_a_finite_score_kept(q, k, v, rows, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -INF)
    p = s.softmax(-1)
    return torch.where((~(s == -INF)).any(-1, keepdim=True), p, torch.zeros_like(p)) @ v


@case("fuse", with_rows)
def rows_of_infinite_scores_beside_a_finite_fill(q, k, v, rows, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -1e9)
    return s.softmax(-1).masked_fill((s == -INF).all(dim=-1, keepdim=True), 0.0) @ v


@case("no_fuse", with_rows)
def rows_of_a_finite_fill(q, k, v, rows, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -1e9)
    return s.softmax(-1).masked_fill((s == -1e9).all(dim=-1, keepdim=True), 0.0) @ v


@case("no_fuse", with_rows, tags="nan")
def rows_with_a_finite_score_filled(q, k, v, rows, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -INF)
    return s.softmax(-1).masked_fill((~(s == -INF)).any(dim=-1, keepdim=True), 0.0) @ v


@case("no_fuse", with_rows, tags="nan")
def rows_with_any_hidden_key(q, k, v, rows, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -INF)
    return s.softmax(-1).masked_fill((s == -INF).any(dim=-1, keepdim=True), 0.0) @ v


@case("no_fuse", with_rows, tags="nan")
def keys_that_no_query_attends(q, k, v, rows, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -INF)
    return s.softmax(-1).masked_fill((s == -INF).all(dim=-2, keepdim=True), 0.0) @ v


@case("no_fuse", with_rows, tags="nan")
def rows_of_other_scores(q, k, v, rows, hidden):
    s, t = ((q @ x.mT * 0.3).masked_fill(hidden, -INF) for x in (k, v))
    return s.softmax(-1).masked_fill((t == -INF).all(dim=-1, keepdim=True), 0.0) @ v


@case("no_fuse", with_rows, tags="nan")
def empty_queries_taken_for_keys(q, k, v, rows, hidden):
    s = (q @ k.mT * 0.3).masked_fill(hidden, -INF)
    return s.softmax(-1).masked_fill((s == -INF).all(dim=-1)[:, :, None, :], 0.0) @ v
