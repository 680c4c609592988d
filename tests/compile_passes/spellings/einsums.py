"""Einsums of several operands, in all their forms, with projections, masks and gates inside."""

from __future__ import annotations

from functools import partial

from torch import einsum

from tests.compile_passes.cases import randn, registry

CASES, case = registry()
B, H, S, T, C, D = 2, 4, 6, 7, 5, 8


def tensors(*shapes):
    return partial(_tensors, shapes)


def _tensors(shapes):
    return tuple(randn(*shape) * 0.7 for shape in shapes)


@case("fuse", tensors((B, S, D), (B, T, D), (B, T, D)))
def lists(q, k, v):
    return einsum(
        einsum(q, [0, 1, 2], k, [0, 3, 2], [0, 1, 3]).softmax(-1),
        [0, 1, 3],
        v,
        [0, 3, 2],
        [0, 1, 2],
    )


@case("fuse", tensors((B, S, D), (B, T, D), (B, T, D)))
def lists_without_a_result(q, k, v):
    return einsum(einsum(q, [0, 1, 2], k, [0, 3, 2], [0, 1, 3]).softmax(-1) @ v, [0, 1, 2]) * 1


@case("fuse", tensors((B, S, D), (B, T, D), (B, T, D)))
def lists_with_an_ellipsis(q, k, v):
    return einsum(
        einsum(q, [..., 1, 2], k, [..., 3, 2], [..., 1, 3]).softmax(-1),
        [..., 1, 3],
        v,
        [..., 3, 2],
        [..., 1, 2],
    )


@case("fuse", tensors((S, D), (T, D), (T, D)))
def without_a_result(q, k, v):
    return einsum("id,kd", q, k).softmax(-1) @ v


@case("fuse", tensors((S, D), (T, D), (T, D)))
def without_a_result_keys_first(q, k, v):
    return einsum("xd,kd", q, k).softmax(0).t() @ v


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D)))
def with_an_ellipsis(q, k, v):
    return einsum("...qd,...kd->...qk", q, k).softmax(-1) @ v


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (D,)))
def weights_of_features(q, k, v, w):
    return einsum("bhqd,bhkd,d->bhqk", q, k, w).softmax(-1) @ v


@case("fuse", tensors((B, S, C), (C, D), (B, T, D), (B, T, D)))
def query_projected_inside(x, w, k, v):
    return einsum("bqc,cd,bkd->bqk", x, w, k).softmax(-1) @ v


@case("fuse", tensors((B, S, D), (B, T, C), (C, D), (B, T, D)))
def key_projected_inside(q, y, w, v):
    return einsum("bqd,bkc,cd->bqk", q, y, w).softmax(-1) @ v


@case("fuse", tensors((B, S, C), (C, D), (B, T, C), (C, D), (B, T, D)))
def both_projected_inside(x, w, y, u, v):
    return einsum("bqc,cd,bke,ed->bqk", x, w, y, u).softmax(-1) @ v


@case("fuse", tensors((B, S, C), (C, H, D), (B, H, T, D), (B, H, T, D)))
def heads_projected_inside(x, w, k, v):
    return einsum("bqc,chd,bhkd->bhqk", x, w, k).softmax(-1) @ v


@case("fuse", tensors((B, S, C), (C, C), (B, T, C), (B, T, D)))
def bilinear_scores(x, w, y, v):
    return einsum("bqc,cd,bkd->bqk", x, w, y).softmax(-1) @ v


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (H, D, C)))
def result_projected_inside(q, k, v, w):
    return einsum("bhqk,bhkd,hdc->bqc", (q @ k.mT).softmax(-1), v, w)


@case("fuse", tensors((B, S, D), (B, T, D), (B, T, C), (C, D)))
def value_projected_inside(q, k, y, w):
    return einsum("bqk,bkc,cd->bqd", (q @ k.mT).softmax(-1), y, w)


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, T, C), (H, C, D), (H, D, C)))
def value_and_result_projected_inside(q, k, y, w, u):
    return einsum("bhqk,bkc,hcd,hde->bqe", (q @ k.mT).softmax(-1), y, w, u)


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (B, T)))
def gate_inside_the_value_product(q, k, v, g):
    return einsum("bhqk,bhkd,bk->bhqd", (q @ k.mT).softmax(-1), v, g)


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (B, T)))
def factor_of_keys_inside(q, k, v, g):
    return einsum("bhqd,bhkd,bk->bhqk", q, k, g).softmax(-1) @ v


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (H,)))
def factor_of_heads_inside(q, k, v, g):
    return einsum("bhqd,bhkd,h->bhqk", q, k, g).softmax(-1) @ v


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (B, S)))
def factor_of_queries_inside(q, k, v, g):
    return einsum("bhqd,bhkd,bq->bhqk", q, k, g).softmax(-1) @ v


@case("no_fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (S, T)))
def factor_of_scores_inside(q, k, v, g):
    return einsum("bhqd,bhkd,qk->bhqk", q, k, g).softmax(-1) @ v


@case("no_fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (S, T)))
def factor_of_weights_inside(q, k, v, g):
    return einsum("bhqk,qk,bhkd->bhqd", (q @ k.mT).softmax(-1), g, v)


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (B, T)))
def gate_by_an_einsum(q, k, v, g):
    return einsum("bhqk,bk->bhqk", (q @ k.mT).softmax(-1), g) @ v


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (B, T)))
def gate_by_an_einsum_that_transposes(q, k, v, g):
    return einsum("bhqk,bk->bhkq", (q @ k.mT).softmax(-1), g).mT @ v


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D)))
def heads_summed_inside(q, k, v):
    return einsum("bhqk,bhkd->bqd", (q @ k.mT).softmax(-1), v)


@case("fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (H,)))
def heads_weighted_inside(q, k, v, g):
    return einsum("bhqk,bhkd,h->bqd", (q @ k.mT).softmax(-1), v, g)


@case("no_fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D)))
def einsum_over_heads(q, k, v):
    return einsum("bhqd,bhkd->bhqk", q, k).softmax(1) @ v


@case("no_fuse", tensors((B, S, D), (B, T, D), (B, T, D)))
def lists_over_queries(q, k, v):
    return einsum(q, [0, 1, 2], k, [0, 3, 2], [0, 1, 3]).softmax(1) @ v


@case("no_fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (H, H)))
def heads_mixed_inside(q, k, v, w):
    return einsum("bhqd,bhkd,hg->bgqk", q, k, w).softmax(-1) @ v


@case("no_fuse", tensors((B, H, S, D), (B, H, T, D), (B, H, T, D), (H, H)))
def heads_mixed_inside_the_value_product(q, k, v, w):
    return einsum("bhqk,hg,bgkd->bgqd", (q @ k.mT).softmax(-1), w, v)


@case("fuse", tensors((B, S, D), (B, T, D), (B, T, D)))
def result_times_the_query(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return einsum("bqk,bkd,bqd->bqd", p, v, q)


@case("fuse", tensors((B, S, C), (H, C, D), (B, T, C), (H, C, D), (B, T, C), (H, C, D), (H, D, C)))
def layer_of_two_einsums(x, a, y, b, z, w, u):
    p = einsum("bqc,hcd,bke,hed->bhqk", x, a, y, b) * 0.3
    return einsum("bhqk,bkc,hcd,hde->bqe", p.softmax(-1), z, w, u)


@case("fuse", tensors((B, S, D), (B, T, D), (B, T, D)))
def query_twice(q, k, v):
    return einsum("bqd,bkd,bqd->bqk", q, k, q).softmax(-1) @ v


@case("fuse", tensors((B, H, S, D), (H, T, D), (H, T, D)))
def keys_without_a_batch(q, k, v):
    return einsum("bhqd,hkd->bhqk", q, k).softmax(-1) @ v


@case("fuse", tensors((B, S, H, D), (B, T, H, D), (B, T, H, D)))
def lists_of_four(q, k, v):
    p = einsum(q, [0, 1, 2, 3], k, [0, 4, 2, 3], [0, 2, 1, 4]).softmax(3)
    return einsum(p, [0, 2, 1, 4], v, [0, 4, 2, 3], [0, 1, 2, 3])


@case("fuse", tensors((B, S, H, D), (B, T, H, D), (B, T, H, D)))
def operands_in_a_list(q, k, v):
    return einsum("bqhd,bkhd->bhqk", [q, k]).softmax(-1) @ v.transpose(1, 2)
