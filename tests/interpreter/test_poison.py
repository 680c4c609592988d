"""NaN and Inf reach only what attends them, and extreme numbers make none."""

import math

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.call.call import Call, Saved, attention_call
from fa_ops.call.options import MAX_LENGTH
from fa_ops.testing import make_case
from fa_ops.testing.caches import CacheCase

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NaN, Inf and log2(0) are what it is of
]

INF, NAN = math.inf, math.nan
MASKS = {
    "causal": {"is_causal": True},
    "window": {"window": (9, 5)},
    "left window": {"window": (9, -1)},
    "bool mask": {"mask": "bool", "mask_holes": True},
    "float mask": {"mask": "float", "mask_holes": True},
    "ranges": {"key_ranges": (1, 1, 1)},
    "ranges and a bias": {"key_ranges": (1, 0, 1), "mask": "float"},
    "lengths": {"kv_lens": True, "is_causal": True},
    "dropout": {"is_causal": True, "dropout_p": 0.3},
    "softcap, alibi, sinks": {"is_causal": True, "softcap": 2.0, "alibi": "heads", "sinks": True},
}


def attends(call: Call) -> torch.Tensor:
    """Bool (B, H, Sq, Sk), by the oracle's formulas."""
    scores = torch.zeros(*call.query.shape[:3], call.num_keys)
    return reference.modify_scores(scores, call.changed(alibi_slopes=None)) > -INF


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("name", MASKS)
def test_forward(name, poison):
    """A poisoned key of the first sequence, which the second does not attend."""
    case = make_case(Sq=40, Sk=50, Hq=2, Hkv=1, **MASKS[name])
    call = case.fresh()
    expected, expected_lse = reference.forward(call)
    keep = attends(call)
    for where in ("key", "value"):
        for j in (0, 35):
            bad = {"key": call.key.clone(), "value": call.value.clone()}
            bad[where][0, :, j, 3] = poison
            out, lse = backend.forward(call._replace(**bad))
            clean = ~keep[..., j]
            clean[1] = True
            torch.testing.assert_close(out[clean], expected[clean], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(lse[clean], expected_lse[clean], atol=1e-5, rtol=1e-5)
            if math.isnan(poison) and case.dropout_p == 0:
                assert bool(out[~clean].isnan().any(-1).all())


@pytest.mark.parametrize("name", MASKS)
def test_backward(name):
    """What a poisoned row or key attends, or is attended by, may be NaN; nothing else is.

    The row or key is of the first sequence.
    """
    case = make_case(Sq=40, Sk=50, Hq=2, Hkv=1, **MASKS[name])
    call, grad = case.fresh(), torch.randn(2, 2, 40, 16)
    right = reference.forward(call)
    expected = reference.backward(call._replace(saved=Saved(grad, None, *right)))
    keep = attends(call)
    first = torch.tensor([True, False]).view(2, 1, 1)
    for where, at in (("key", 35), ("value", 35), ("query", 30), ("grad", 30)):
        given = dict(zip(("query", "key", "value", "grad"), (*call[:3], grad)))
        bad = given | {where: given[where].clone()}
        bad[where][0, :, at, 3] = NAN
        of_keys = where in ("key", "value")
        rows = first & (keep[..., at] if of_keys else torch.arange(40).eq(at).expand(2, 2, 40))
        bad_grad, poisoned = bad.pop("grad"), call._replace(**bad)
        out, lse = backend.forward(poisoned)
        grads = backend.backward(poisoned._replace(saved=Saved(bad_grad, None, out, lse)))
        clean = {"query": ~rows, "key": ~(keep & rows[..., None]).any((1, 2))[:, None]}
        clean["value"] = clean["key"]
        if of_keys:
            clean["key"] = clean["value"] = clean["key"] & ~(first & torch.arange(50).eq(at))
        assert where == "value" or not clean["key"].all()
        for name in clean:
            found, wanted = (getattr(x, name)[clean[name]] for x in (grads, expected))
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
        if case.dropout_p == 0:
            assert bool(grads.query[rows & keep.any(-1)].isnan().any(-1).all())


def test_backward_of_a_mask():
    case = make_case(Sq=20, Sk=30, Hq=2, Hkv=1, mask="float", mask_grad=True, is_causal=True)
    call, grad = case.fresh(), torch.randn(2, 2, 20, 16)
    right = Saved(grad, None, *reference.forward(call), True)
    expected = reference.backward(call._replace(saved=right)).attn_mask
    call.value[:, :, 25, 3] = NAN
    found = Saved(grad, None, *backend.forward(call), True)
    found = backend.backward(call._replace(saved=found)).attn_mask
    clean = ~attends(call)[..., 25]
    torch.testing.assert_close(found[clean], expected[clean], atol=1e-5, rtol=1e-4)


def test_a_nan_query_reaches_only_its_row():
    call = make_case(B=1, Sq=50, Sk=60, is_causal=True).fresh()
    q = call.query
    expected = reference.forward(call)[0]
    q[:, 1, 40, 2] = NAN
    out, _ = backend.forward(call)
    assert bool(out[:, 1, 40].isnan().all())
    out[:, 1, 40] = expected[:, 1, 40]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_packed_sequences():
    """Nothing of one sequence reaches another, nor a row that does not attend it."""
    q, k, v = torch.randn(90, 2, 16), torch.randn(100, 1, 16), torch.randn(100, 1, 16)
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 90], [0, 45, 100]))
    call = attention_call(q, k, v, is_causal=True, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    expected = reference.varlen_forward(call)
    k[45] = NAN
    v[60] = INF
    out, lse = backend.varlen_forward(call)
    torch.testing.assert_close(out[:40], expected[0][:40], atol=1e-5, rtol=1e-4)
    assert bool(out[40:].isnan().any(-1).all())  # all of them attend the first key


@pytest.mark.parametrize(
    "changes",
    [
        {"Sq": 4}, {"Sq": 4, "page_size": 8}, {"Sq": 4, "num_splits": 3},
        {"Sq": 3, "window": (20, 0)}, {"Sq": 1, "window": (20, 0)}, {"Sq": 4, "unified_max": 2.0},
        {"Sq": 4, "shared": True, "Hkv": 1},
    ],
    ids=str,
)  # fmt: skip
def test_decoding(changes):
    case = CacheCase(B=2, S=150, is_causal=True, lens=(150, 90), **changes)
    call = case.fresh()
    k, v = call[1:3]
    expected = reference.cache_forward(call._replace(key=k.clone(), value=v.clone()))[0]
    Sq, left = case.Sq, case.window[0]
    hidden = [147, 148, 149] if left < 0 else [5, 125, 127]  # rows 0 ... 2 attend not the first
    for j in hidden:
        bad = v.clone()
        place = (0, slice(None), j)
        if case.page_size:
            page = int(call.operands.page_table[0, j // case.page_size])
            place = (page, j % case.page_size)
        bad[place] = NAN
        keys = bad if case.shared else k
        out, _ = backend.cache_forward(call._replace(key=keys, value=bad))
        for i in range(Sq):
            diagonal = 150 - Sq + i
            seen = j <= diagonal and (left < 0 or j >= diagonal - left)
            if seen:
                assert bool(out[0, :, i].isnan().all())
            else:
                torch.testing.assert_close(out[0, :, i], expected[0, :, i], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(out[1], expected[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "shape, softcap", [((1, 1, 1, 30), 0.0), ((1, 1, 20, 30), 0.0), ((1, 1, 1, 30), 2.0)]
)
def test_an_infinite_key_that_a_float_mask_excludes_leaves_gradients_finite(shape, softcap):
    call = make_case(Sq=20, Sk=30, Hq=2, Hkv=1).fresh()
    k = call.key
    k[0, 0, 7, 3] = INF
    mask = torch.zeros(shape)
    mask[..., 7] = -INF
    call = call.changed(attn_mask=mask, softcap=softcap)
    out, lse = backend.forward(call)
    call = call._replace(saved=Saved(torch.randn_like(out), None, out, lse, True))
    for found, expected in zip(backend.backward(call)[:4], reference.backward(call)[:4]):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


EXTREMES = {
    "no scale": {"scale": 0.0},
    "a scale of nearly nothing": {"scale": 1e-40},
    "a scale of nothing": {"scale": 1e-300},
    "a large scale": {"scale": 1e4},
    "a huge scale": {"scale": 1e20},
    "a huge negative scale": {"scale": -1e20},
    "softcap 1e-40": {"softcap": 1e-40},
    "softcap 1e-320": {"softcap": 1e-320},
    "softcap 1e4": {"softcap": 1e4},
    "softcap 1e6": {"softcap": 1e6, "is_causal": True},
    "softcap 1e300": {"softcap": 1e300},
    "windows": {"window": (2**31 - 2, 2**31 - 2)},
    "one window": {"window": (2**31 - 2, 3), "Sq": 40, "Sk": 20},
}


@pytest.mark.parametrize("Sq, Sk", [(20, 40), (3, 520)])
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_numbers(name, Sq, Sk):
    case = make_case(**{"Sq": Sq, "Sk": Sk, "B": 1, "Hq": 2, "Hkv": 1} | EXTREMES[name])
    call = case.fresh()
    expected = reference.forward(call)
    out, lse = backend.forward(call)
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=1e-5)
    grad = torch.ones_like(out)
    grads = backend.backward(call._replace(saved=Saved(grad, None, out, lse)))
    assert all(bool(x.isfinite().all()) for x in grads[:3])


@pytest.mark.parametrize("softcap", [1e-320, 1e-40, 1e-38, 1e-30])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e6])
def test_a_score_of_0_has_a_gradient_under_every_softcap(softcap, scale):
    call = make_case(Sq=20, Sk=40, Hq=2, Hkv=1, softcap=softcap, scale=scale).fresh()
    q = call.query
    q = torch.zeros_like(q)
    out, lse = backend.forward(call._replace(query=q))
    call = call._replace(query=q, saved=Saved(torch.randn_like(out), None, out, lse))
    expected, found = reference.backward(call)[0], backend.backward(call)[0]
    assert expected.abs().max() > 0
    torch.testing.assert_close(found / scale, expected / scale, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": "bool"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_huge_scores(dtype, options):
    """Products of 1e12 with a scale that is no power of two; every key alike, and not."""
    case = make_case(B=1, Sq=20, Sk=70, Hq=2, Hkv=1, D=24, dtype=dtype, **options)
    for alike in (True, False):
        call = case.fresh()
        q, k = call[:2]
        size = 133120.0 if dtype == torch.float32 else 60000.0
        q, k = (torch.full_like(x, size) if alike else x * (size / 8) for x in (q, k))
        if dtype == torch.float16:
            call = call.changed(scale=40.0)
        expected = reference.forward(call._replace(query=q, key=k))
        out, lse = backend.forward(call._replace(query=q, key=k))
        rtol = 1e-3 if dtype == torch.float16 else 1e-5
        torch.testing.assert_close(out, expected[0], atol=rtol, rtol=rtol)
        torch.testing.assert_close(lse, expected[1], atol=0.0, rtol=1e-5)
        grads = backend.backward(
            call._replace(query=q, key=k, saved=Saved(torch.ones_like(out), None, out, lse))
        )
        assert not any(bool(x.isnan().any()) for x in grads[:3])


@pytest.mark.parametrize("lens", [None, (0, 30)])
@pytest.mark.parametrize("sink", [-INF, 3e38, -3e38, 1e10])
@pytest.mark.parametrize("decoding", [False, True])
def test_sinks(decoding, sink, lens):
    Sq, Sk = (3, 520) if decoding else (40, 30)
    call = make_case(Sq=Sq, Sk=Sk, Hq=2, Hkv=1).fresh()
    lens = None if lens is None else torch.tensor(lens, dtype=torch.int32)
    call = call.changed(sinks=torch.tensor([sink, 0.5]), kv_lens=lens)
    expected = reference.forward(call)
    out, lse = backend.forward(call)
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=1e-5)
    grad_lse = torch.ones_like(lse).masked_fill(lse == -INF, 0.0)
    grads = backend.backward(call._replace(saved=Saved(torch.ones_like(out), grad_lse, out, lse)))
    assert all(bool(x.isfinite().all()) for x in (*grads[:3], grads.sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_the_lowest_number(dtype):
    """A float mask whose row is full of `finfo.min` leaves the mean of the values."""
    q, k, v = make_case(B=1, Sq=10, Sk=70, dtype=dtype).fresh()[:3]
    mask = torch.zeros(10, 70, dtype=dtype)
    mask[3], mask[5, :60], mask[7] = torch.finfo(dtype).min, torch.finfo(dtype).min, -INF
    for bias in (mask, mask.float()):
        call = attention_call(q, k, v, attn_mask=bias)
        expected, expected_lse = reference.forward(call)
        out, lse = backend.forward(call)
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


def test_more_than_2_to_the_29_keys_are_refused():
    few, many = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16).expand(1, 1, MAX_LENGTH + 1, 16)
    packed = many[0].transpose(0, 1)
    for args in ((many, few, few), (few, many, many), (packed, few[0], few[0])):
        assert f"up to {MAX_LENGTH} queries and keys" in backend.support_error(
            attention_call(*args)
        )
    table = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**23)
    pages = torch.zeros(4, 128, 1, 16)
    too_long = backend.cache_error(
        attention_call(few, pages, pages, page_table=table, over_cache=True)
    )
    assert str(MAX_LENGTH) in too_long
    assert str(MAX_LENGTH) in backend.cache_error(attention_call(few, many, many, over_cache=True))
