"""Head dimensions of 0: all scores are 0 then, so weights follow from masks and biases alone."""

from __future__ import annotations

import functools

import pytest
import torch

import fa_ops

INT = torch.int32
DIMS = [(0, 3), (0, 0), (5, 0)]
BACKENDS = [None, "reference"]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def inputs(D: int, Dv: int, B: int = 2, Sq: int = 4, Sk: int = 6) -> list[torch.Tensor]:
    return [draw(B, 4, Sq, D), draw(B, 2, Sk, D), draw(B, 2, Sk, Dv)]


def expected(q, k, v, bias=0.0, is_causal=False):
    """out and lse where D is 0, or of values without features by the scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT / max(q.shape[-1], 1) ** 0.5 + bias
    if is_causal:
        s = s.masked_fill(
            ~torch.ones_like(s, dtype=torch.bool).tril(k.shape[2] - q.shape[2]), -torch.inf
        )
    return s.softmax(-1) @ v, s.logsumexp(-1)


def assert_equal(actual, wanted):
    for x, y in zip(actual, wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D, Dv", DIMS)
@pytest.mark.parametrize("call", ["eager", "operator", "compiled"])
def test_dense(D, Dv, backend, call):
    q, k, v = leaves = inputs(D, Dv)
    bias = draw(1, 4, 4, 6)
    function = functools.partial(fa_ops.attention, return_lse=True, backend=backend)
    if call == "operator":
        function = functools.partial(torch.ops.fa.attention_with_lse, backend=backend)
    elif call == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True)
    out, lse = function(q, k, v, bias, is_causal=True)
    assert out.transpose(1, 2).is_contiguous()
    wanted = expected(q, k, v, bias, is_causal=True)
    assert_equal((out, lse), wanted)
    weights = torch.randn_like(out), torch.randn_like(lse)
    leaves.append(bias)
    assert_equal(
        torch.autograd.grad((out, lse), leaves, weights),
        torch.autograd.grad(wanted, leaves, weights),
    )


@pytest.mark.parametrize("D, Dv", DIMS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layout_is_that_of_a_fake_call(D, Dv, device):
    q, k, v = (x.to(device) for x in inputs(D, Dv))
    out, lse = fa_ops.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 4, Dv) and lse.shape == (2, 4, 4)
    assert out.stride() == torch.empty_permuted((2, 4, 4, Dv), (0, 2, 1, 3)).stride()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D, Dv", DIMS)
def test_varlen(D, Dv, backend):
    q, k, v = leaves = [draw(7, 4, D), draw(9, 2, D), draw(9, 2, Dv)]
    ends_q, ends_k = torch.tensor([0, 3, 7], dtype=INT), torch.tensor([0, 5, 9], dtype=INT)
    call = functools.partial(fa_ops.attention_varlen, return_lse=True, backend=backend)
    actual = call(q, k, v, ends_q, ends_k)
    parts = [
        expected(q[None, a:b].transpose(1, 2), *(x[None, c:d].transpose(1, 2) for x in (k, v)))
        for a, b, c, d in ((0, 3, 0, 5), (3, 7, 5, 9))
    ]
    wanted = (
        torch.cat([out[0].transpose(0, 1) for out, _ in parts]),
        torch.cat([lse[0] for _, lse in parts], 1),
    )
    assert_equal(actual, wanted)
    weights = [torch.randn_like(x) for x in wanted]
    assert_equal(*(torch.autograd.grad(x, leaves, weights) for x in (actual, wanted)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D, Dv", DIMS)
@pytest.mark.parametrize("page", [None, 2])
@pytest.mark.parametrize("appends", [False, True])
def test_cache(D, Dv, backend, page, appends):
    q, k, v = (x.detach() for x in inputs(D, Dv))
    lens, options = torch.full((2,), 5 if appends else 6, dtype=INT), {}
    caches = [k.clone(), v.clone()]
    if appends:
        options = {"key": k[:, :, 5:], "value": v[:, :, 5:]}
        options |= {name: torch.rand(6, 0) for name in ("rotary_cos", "rotary_sin")}
        for cache in caches:
            cache[:, :, 5:] = 7.0
    if page:
        table = torch.arange(6, dtype=INT).view(2, 3)
        caches = [x.transpose(1, 2).reshape(6, 2, 2, x.shape[3]) for x in caches]
        options["page_table"] = table
    call = functools.partial(fa_ops.attention_with_kv_cache, return_lse=True, backend=backend)
    assert_equal(call(q, *caches, lens, is_causal=True, **options), expected(q, k, v, 0.0, True))
    if page:
        caches = [x.reshape(2, 6, 2, x.shape[3]).transpose(1, 2) for x in caches]
    assert_equal(caches, (k, v))


@pytest.mark.parametrize("D, Dv", DIMS)
def test_varlen_pages(D, Dv):
    q, k, v = (x.detach() for x in inputs(D, Dv, B=1))
    pages = [x.transpose(1, 2).reshape(3, 2, 2, x.shape[3]) for x in (k, v)]
    ends, lens = torch.tensor([0, 4], dtype=INT), torch.tensor([6], dtype=INT)
    table = torch.arange(3, dtype=INT).view(1, 3)
    actual = fa_ops.attention_varlen(
        q[0].transpose(0, 1), *pages, ends, None, kv_lens=lens, page_table=table, return_lse=True
    )
    out, lse = expected(q, k, v)
    assert_equal(actual, (out[0].transpose(0, 1), lse[0]))


@pytest.mark.parametrize("D, Dv", DIMS)
@pytest.mark.parametrize("qk_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rotate", [False, True])
def test_quantized(D, Dv, qk_dtype, rotate):
    q, k, v = (x.detach() for x in inputs(D, Dv))
    actual = fa_ops.quantized_attention(q, k, v, qk_dtype=qk_dtype, rotate=rotate, return_lse=True)
    for x, y in zip(actual, expected(q, k, v), strict=True):
        torch.testing.assert_close(x, y, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("D, Dv", DIMS)
@pytest.mark.parametrize("packed", [False, True])
def test_e4m3_tensors(D, Dv, packed):
    q, k, v = (x.detach().to(torch.float8_e4m3fn) for x in inputs(D, Dv, B=1))
    scales = {f"{name}_scale": torch.ones(1) for name in "qkv"}
    wanted = expected(q.float(), k.float(), v.float())
    if packed:
        ends = torch.tensor([0, 4], dtype=INT), torch.tensor([0, 6], dtype=INT)
        out, lse = fa_ops.attention_varlen(
            *(x[0].transpose(0, 1).contiguous() for x in (q, k, v)),
            *ends,
            return_lse=True,
            **scales,
        )
        out, lse = out.transpose(0, 1)[None], lse[None]
    else:
        scales["v_scale"] = torch.ones(1, 2, Dv)
        out, lse = fa_ops.attention(q, k, v, return_lse=True, **scales)
    assert out.dtype == torch.bfloat16
    for x, y in zip((out.float(), lse), wanted, strict=True):
        torch.testing.assert_close(x, y, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("D, Dv", DIMS)
def test_transforms(D, Dv):
    q, k, v = (torch.stack([x, x + 1]).detach().requires_grad_() for x in inputs(D, Dv))
    out, _ = expected(*(x.flatten(0, 1) for x in (q, k, v)))
    torch.testing.assert_close(torch.vmap(fa_ops.attention)(q, k, v).flatten(0, 1), out)
    grad = torch.vmap(torch.func.grad(lambda v: fa_ops.attention(q[0], k[0], v).sum()))(v)
    torch.testing.assert_close(grad, torch.autograd.grad(out[:2].sum(), v)[0][:1].expand(v.shape))


@pytest.mark.parametrize("D, Dv", DIMS)
def test_averaging_rows(D, Dv):
    q, k, v = inputs(D, Dv)
    rows = torch.tensor([True, False, True, False]).view(1, 1, 4)
    actual = torch.ops.fa.attention_averaging_rows(q, k, v, averaging_rows=rows)
    wanted = expected(q.masked_fill(rows[..., None], 0.0), k, v)
    assert_equal(actual, wanted)


def test_explanation():
    q, k, v = inputs(0, 3)
    assert fa_ops.explain(q, k, v).backend == "cpu"
