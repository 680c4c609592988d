"""Autocast: what is cast, by operators and by eager calls, which leave the dispatcher out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fa_ops
from fa_ops.ops import library, varlen
from fa_ops.plans import planning
from tests.ops.cases import CASES, dense_call, packed_call

ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)
LENS = torch.tensor([3, 7], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(dtype, compiled):
    (q, k, v, *_), _ = dense_call(CASES["plain"], requires_grad=True)

    def function(q, k, v):
        return fa_ops.attention(q, k.bfloat16(), v, return_lse=True)

    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    with torch.autocast("cpu", dtype):
        out, lse = run(q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    expected = fa_ops.attention(q.to(dtype), k.bfloat16().to(dtype), v.to(dtype))
    torch.testing.assert_close(out, expected)
    out.float().sin().sum().backward()
    assert q.grad.dtype == torch.float32 and k.grad.abs().sum() > 0


def test_autocast_of_masks_and_sinks():
    (q, k, v, *_), _ = dense_call(CASES["plain"])
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float16, torch.float32, torch.bool):
            mask = torch.ones(5, 7).to(dtype)
            out = fa_ops.attention(q, k, v, mask, sinks=torch.zeros(4, dtype=torch.half))
            assert out.dtype == torch.bfloat16
        lens = torch.tensor([3, 7], dtype=torch.int32)
        assert fa_ops.attention(q, k, v, kv_lens=lens).dtype == torch.bfloat16
        doubles = [t.double() for t in (q, k, v)]
        assert fa_ops.attention(*doubles).dtype == torch.float64


def test_autocast_of_varlen_and_of_disabled_regions():
    args, options = packed_call(CASES["positions"])
    with torch.autocast("cpu", torch.bfloat16):
        assert varlen.VARLEN(*args, **options)[0].dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert varlen.VARLEN(*args, **options)[0].dtype == torch.float32


def test_autocast_reaches_no_int():
    ints = torch.ones(1, 1, 2, 4, dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="int32"):
        fa_ops.attention(ints, ints, ints)


def error_of(call, *args, **options) -> tuple[type, str]:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        call(*args, **options)
    return error.type, str(error.value)


FP8, NEW = torch.float8_e4m3fn, torch.ones(2, 2, 1, 16)
REFUSED = {  # call, dtypes of its tensors, options
    "dense": ("dense", (FP8, FP8, FP8), {}),
    "dense, one tensor": ("dense", (torch.bfloat16, torch.bfloat16, FP8), {}),
    "dense, e5m2": ("dense", (torch.float8_e5m2,) * 3, {}),
    "mask": ("dense", (torch.bfloat16,) * 3, {"attn_mask": torch.ones(7, 7).to(FP8)}),
    "sinks": ("dense", (torch.bfloat16,) * 3, {"sinks": torch.ones(4).to(FP8)}),
    "packed": ("packed", (FP8, FP8, FP8), {}),
    "query of a cache": ("cached", (FP8, torch.bfloat16, torch.bfloat16), {}),
    "ints over a cache": ("cached", (torch.int32, torch.bfloat16, torch.bfloat16), {}),
    "doubles over a cache": ("cached", (torch.float64, torch.bfloat16, torch.bfloat16), {}),
    "new keys": (
        "cached", (torch.bfloat16,) * 3, dict.fromkeys(("key", "value"), NEW.to(FP8)),
    ),
    "new ints": (
        "cached", (torch.bfloat16,) * 3, dict.fromkeys(("key", "value"), NEW.int()),
    ),
    "quantized ints": ("quantized", (torch.int32,) * 3, {}),
    "quantized doubles": ("quantized", (torch.float64,) * 3, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_calls_outside_refuse_is_refused_in_a_region(name):
    """Tensors that autocast leaves alone elsewhere, such as those of 8 bits, are not cast."""
    of, dtypes, options = REFUSED[name]
    call = {"dense": dense, "packed": packed, "cached": cached, "quantized": quantized}[of]
    inputs = [t.to(dtype) for t, dtype in zip(qkv(), dtypes)]
    outside = error_of(call, *inputs, **options)
    with bf16():
        assert error_of(call, *inputs, **options) == outside
        with torch.profiler.profile():  # which the dispatcher has to show the operator
            assert error_of(call, *inputs, **options) == outside


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def dense(q, k, v, **options):
    return fa_ops.attention(q, k, v, return_lse=True, **options)


def packed(q, k, v, **options):
    q, k, v = (t.transpose(1, 2).flatten(0, 1)[:7] for t in (q, k, v))
    return fa_ops.attention_varlen(q, k, v, ENDS, ENDS, return_lse=True, **options)


def cached(q, k, v, **options):
    return fa_ops.attention_with_kv_cache(q, k, v, LENS, return_lse=True, **options)


def quantized(q, k, v, **options):
    return fa_ops.quantized_attention(q, k, v, return_lse=True, **options)


SINKS, HALF_SINKS = torch.rand(4), torch.rand(4, dtype=torch.half)
CALLS = {
    "dense": (dense, {}),
    "bool mask": (dense, {"attn_mask": torch.rand(7, 7) > 0.3, "is_causal": True}),
    "float mask": (dense, {"attn_mask": torch.rand(7, 7), "is_causal": True}),
    "half sinks": (dense, {"sinks": HALF_SINKS, "kv_lens": LENS}),
    "packed": (packed, {"sinks": SINKS}),
    "cached": (cached, {"sinks": SINKS}),
    "quantized": (quantized, {"sinks": HALF_SINKS}),
}


def qkv(dtype=torch.float32, requires_grad=False):
    """(2, 4 or 2, 7, 16) tensors."""
    options = {"dtype": dtype, "requires_grad": requires_grad}
    return [torch.randn(2, heads, 7, 16, **options) for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_eager_calls_cast_what_operators_cast(name, dtype):
    call, options = CALLS[name]
    inputs = qkv(dtype)
    with bf16():
        eager = call(*inputs, **options)
        with torch.profiler.profile():  # which the dispatcher has to show the operator
            dispatched = call(*inputs, **options)
    for a, b in zip(eager, dispatched, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert eager[0].dtype == (dtype if call is cached else torch.bfloat16)


@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_autocasts_dtype_share_plans_with_calls_outside(name):
    call, options = CALLS[name]
    options = {n: x.bfloat16() if x is HALF_SINKS else x for n, x in options.items()}
    inputs = qkv(torch.bfloat16)
    expected = call(*inputs, **options)
    before = set(planning._prepared)
    with bf16():
        found = call(*inputs, **options)
    assert set(planning._prepared) == before
    assert all(map(torch.equal, found, expected))


def test_regions_may_be_nested_and_switched_off():
    q, k, v = qkv()
    dtypes = []
    with bf16():
        with torch.autocast("cpu", torch.float16):
            dtypes.append(fa_ops.attention(q, k, v).dtype)
        with torch.autocast("cpu", enabled=False):
            dtypes.append(fa_ops.attention(q, k, v).dtype)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            dtypes.append(fa_ops.attention(q, k, v).dtype)
        dtypes.append(fa_ops.attention(q, k, v).dtype)
        assert torch.is_autocast_enabled("cpu")
    assert dtypes == [torch.float16, torch.float32, torch.bfloat16, torch.bfloat16]


def test_autocast_of_other_devices_casts_nothing():
    inputs = qkv(requires_grad=True)
    expected = fa_ops.attention(*inputs)
    torch.set_autocast_enabled("xpu", True)
    try:
        assert library.route_of(*inputs) is library.Route.AUTOCAST
        found = fa_ops.attention(*inputs)
        gradients = torch.autograd.grad(found.sum(), inputs)
    finally:
        torch.set_autocast_enabled("xpu", False)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients, torch.autograd.grad(expected.sum(), inputs)))


@pytest.mark.parametrize("call", [dense, packed])
def test_gradients_do_not_depend_on_where_the_backward_pass_runs(call):
    """In an autocast region nothing of it is computed in fewer bits."""
    inputs, mask = qkv(requires_grad=True), torch.rand(7, 7, requires_grad=True)
    options, leaves = ({"attn_mask": mask}, [*inputs, mask]) if call is dense else ({}, inputs)
    with bf16():
        out = call(*inputs, **options)[0]
        inside = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    for _ in range(2):  # planned, and repeated
        outside = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
        assert all(map(torch.equal, inside, outside))
        assert all(t.dtype == torch.float32 for t in inside)


def test_repeated_backward_passes_in_a_region_run_their_last_plan(monkeypatch):
    inputs = qkv(torch.bfloat16, requires_grad=True)
    with bf16():
        for _ in range(2):
            fa_ops.attention(*inputs).sum().backward()
        before = [x.grad.clone() for x in inputs]
        monkeypatch.setattr(planning, "prepared_backward", None)
        fa_ops.attention(*inputs).sum().backward()
    for x, twice in zip(inputs, before):  # what two passes added up to
        torch.testing.assert_close(x.grad, 1.5 * twice)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_with_the_dtype_of_their_region(reentrant):
    q, k, v = qkv(requires_grad=True)
    with bf16():
        expected = torch.autograd.grad(fa_ops.attention(q, k, v).float().sum(), (q, k, v))
        out = checkpoint(fa_ops.attention, q, k, v, use_reentrant=reentrant)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(map(torch.equal, (q.grad, k.grad, v.grad), expected))


def test_dropout_draws_what_it_draws_outside():
    inputs = qkv(torch.bfloat16)
    torch.manual_seed(0)
    expected = fa_ops.attention(*inputs, dropout_p=0.5), torch.rand(1)
    torch.manual_seed(0)
    with bf16():
        found = fa_ops.attention(*inputs, dropout_p=0.5), torch.rand(1)
    assert all(map(torch.equal, found, expected))


def test_new_keys_have_the_dtype_of_the_cache():
    q, k, v = qkv(torch.float16)
    new = torch.rand(2, 2, 1, 16)
    with bf16():
        lens = LENS - 1
        out = fa_ops.attention_with_kv_cache(q.float(), k, v, lens, key=new, value=new)
    assert out.dtype == torch.float16 and torch.equal(k[0, :, 2], new[0, :, 0].half())


@pytest.mark.parametrize("backend", ["reference", None])
def test_errors_name_the_argument(backend):
    q, k, v = qkv()
    with bf16():
        with pytest.raises(ValueError, match="head dimension"):
            fa_ops.attention(q, k[..., :4], v, backend=backend)
        with pytest.raises(TypeError, match="kv_lens must be a Tensor"):
            fa_ops.attention(q, k, v, kv_lens=[3], backend=backend)
        with pytest.raises(ValueError, match="alibi_slopes must not require grad"):
            slopes = torch.ones(4, requires_grad=True)
            fa_ops.attention(q, k, v, alibi_slopes=slopes, backend=backend)


MISSING = {
    "query": lambda q: fa_ops.attention(None, q, q),
    "value": lambda q: fa_ops.attention(q, q, None),
    "key": lambda q: fa_ops.attention_varlen(q[0], None, q[0], ENDS, ENDS),
    "key_cache": lambda q: fa_ops.attention_with_kv_cache(q, None, q, LENS),
    "value_cache": lambda q: fa_ops.attention_with_kv_cache(q, q, None, LENS),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_tensors_are_named_in_a_region(name):
    message = f"{name} must be a Tensor, got NoneType"
    with torch.autocast("cpu"), pytest.raises(TypeError, match=message):
        MISSING[name](torch.randn(2, 2, 7, 8))


def test_averaging_rows_are_cast_as_other_attention():
    operator = torch.ops.fa.attention_averaging_rows
    q, k, v = qkv()
    mask, sinks = torch.randn(q.shape[2], k.shape[2]), torch.zeros(q.shape[1]).half()
    rows = torch.arange(q.shape[2]).view(1, 1, -1) % 2 == 0
    with bf16():
        out, lse = operator(q, k, v, mask.half(), sinks=sinks, averaging_rows=rows)
    cast = (x.bfloat16() for x in (q, k, v, mask.half()))
    wanted = operator(*cast, sinks=sinks.bfloat16(), averaging_rows=rows)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
