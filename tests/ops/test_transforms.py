"""torch.func: grad, vmap and their compositions are exact."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jacrev, vjp, vmap

import fa_ops
from fa_ops.ops import dense, merge, varlen
from tests.ops.cases import CASES, dense_call, packed_call, packed_case

N = 3
PACKED = {name: case for name, case in CASES.items() if packed_case(name)}
TENSORS = ("attn_mask", "alibi_slopes", "sinks", "kv_lens", "key_ranges", "dropout_seed")


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def samples_of(t: torch.Tensor) -> torch.Tensor:
    """N different tensors of the same kind, the first being `t`."""
    if t.dtype.is_floating_point:
        return torch.stack([t, *torch.randn(N - 1, *t.shape).to(t).abs()])
    return torch.stack([t, *(t.roll(n + 1) for n in range(N - 1))])


def dense_arguments(name: str) -> dict[str, torch.Tensor]:
    """Every tensor argument of the case, and its other arguments under 'plain'."""
    call = CASES[name].fresh()
    (mask, dropout_p, is_causal), options = dense.OPERATORS.forward.arguments(call)
    given = {"query": call.query, "key": call.key, "value": call.value, "attn_mask": mask} | options
    tensors = {n: t for n, t in given.items() if torch.is_tensor(t)}
    plain = {n: x for n, x in given.items() if x is not None and n not in tensors}
    return tensors, plain | {"dropout_p": dropout_p, "is_causal": is_causal}


def compare_vmap(function, tensors: dict, mapped: set[str], dims: dict[str, int]):
    """`function` under vmap over `mapped`, with samples in dimension `dims`, against a loop."""
    given = {n: samples_of(t) if n in mapped else t for n, t in tensors.items()}
    placed = {n: t.movedim(0, dims.get(n, 0)) if n in mapped else t for n, t in given.items()}
    in_dims = ({n: dims.get(n, 0) if n in mapped else None for n in given},)
    actual = vmap(function, in_dims)(placed)
    loop = [function({n: t[i] if n in mapped else t for n, t in given.items()}) for i in range(N)]
    assert_same(actual, tuple(torch.stack(x) for x in zip(*loop)))


@pytest.mark.parametrize("which", ["query", "key and value", "all", "all but query"])
@pytest.mark.parametrize("name", CASES)
def test_vmap_forward(name, which):
    tensors, plain = dense_arguments(name)
    mapped = {
        "query": {"query"},
        "key and value": {"key", "value"},
        "all": set(tensors),
        "all but query": set(tensors) - {"query"},
    }[which]
    dims = {"query": 1, "value": 3, "attn_mask": 2}
    compare_vmap(lambda t: dense.WITH_LSE(**t, **plain), tensors, mapped, dims)


@pytest.mark.parametrize("name", CASES)
def test_vmap_without_lse(name):
    tensors, plain = dense_arguments(name)
    compare_vmap(lambda t: (dense.ATTENTION(**t, **plain),), tensors, {"query", "key"}, {})


@pytest.mark.parametrize("which", ["query", "all"])
@pytest.mark.parametrize("name", CASES)
def test_vmap_backward(name, which):
    tensors, plain = dense_arguments(name)
    mask_grad = CASES[name].mask_grad

    def gradients(t):
        out, lse = dense.WITH_LSE(**t, **plain)
        saved = {"grad_out": out.sin(), "grad_lse": lse.cos().nan_to_num(), "out": out, "lse": lse}
        return dense.BACKWARD(**saved, **t, **plain, mask_grad=mask_grad)[: 5 if mask_grad else 3]

    compare_vmap(gradients, tensors, {"query"} if which == "query" else set(tensors), {})


@pytest.mark.parametrize("shape", [(7,), (5, 1), (4, 5, 7), (1, 1, 5, 7), (2, 1, 1, 7)])
@pytest.mark.parametrize("mapped", [{"query"}, {"attn_mask"}, {"query", "attn_mask", "sinks"}])
def test_vmap_of_masks_that_broadcast(shape, mapped):
    """The gradient of a mask is one per sample even where the mask is shared."""
    tensors, plain = dense_arguments("plain")
    tensors |= {"attn_mask": torch.randn(shape), "sinks": torch.randn(4)}

    def gradients(t):
        out, lse = dense.WITH_LSE(**t, **plain)
        saved = {"grad_out": out.sin(), "grad_lse": lse.cos(), "out": out, "lse": lse}
        return dense.BACKWARD(**saved, **t, **plain, mask_grad=True)

    compare_vmap(gradients, tensors, mapped, {})
    del tensors["sinks"]
    without = lambda t: gradients(t)[:4]  # noqa: E731
    compare_vmap(without, tensors, mapped - {"sinks"}, {})


@pytest.mark.parametrize("name", CASES)
def test_gradients_per_sample(name):
    """vmap(grad): shared arguments get a gradient per sample."""
    tensors, plain = dense_arguments(name)
    floats = [n for n in ("query", "key", "value", "sinks") if n in tensors]
    if CASES[name].mask_grad:
        floats.append("attn_mask")
    fixed = {n: t for n, t in tensors.items() if n not in floats}

    def loss(wanted, query):
        out, lse = dense.WITH_LSE(**(wanted | {"query": query * wanted["query"]}), **fixed, **plain)
        return out.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum()

    wanted = {n: tensors[n] for n in floats}
    queries = samples_of(tensors["query"])
    actual = vmap(grad(loss), (None, 0))(wanted, queries)
    loop = [grad(loss)(wanted, query) for query in queries]
    for n in floats:
        assert_same(actual[n], torch.stack([one[n] for one in loop]))


@pytest.mark.parametrize("which", ["query", "all"])
@pytest.mark.parametrize("name", PACKED)
def test_vmap_varlen(name, which):
    args, options = packed_call(PACKED[name])
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    tensors = dict(zip(names, args)) | {n: options.pop(n) for n in TENSORS if n in options}
    plain = options | {"dropout_p": args[7], "is_causal": args[8]}
    shared = {"cu_seqlens_q", "cu_seqlens_k", "kv_lens"}
    mapped = {"query"} if which == "query" else set(tensors) - shared
    compare_vmap(lambda t: varlen.VARLEN(**t, **plain), tensors, mapped, {"query": 2})


@pytest.mark.parametrize("name", ["plain", "positions", "dropout"])
def test_vmap_varlen_over_lengths(name):
    (q, k, v, ends_q, *rest), options = packed_call(PACKED[name])
    many = torch.stack([(ends_q - n).clamp(min=0) for n in range(N)])
    actual = vmap(lambda ends: varlen.VARLEN(q, k, v, ends, *rest, **options))(many)
    loop = [varlen.VARLEN(q, k, v, ends, *rest, **options) for ends in many]
    assert_same(actual, tuple(torch.stack(x) for x in zip(*loop)))


@pytest.mark.parametrize("name", PACKED)
def test_varlen_gradients_per_sample(name):
    args, options = packed_call(PACKED[name])
    q, k, v, *rest = args
    sinks = options.pop("sinks", None)

    def loss(k, sinks, query):
        given = {} if sinks is None else {"sinks": sinks}
        out, lse = varlen.VARLEN(query, k, v, *rest, **options, **given)
        return out.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum()

    wanted = (0,) if sinks is None else (0, 1)
    queries = samples_of(q)
    actual = vmap(grad(loss, wanted), (None, None, 0))(k, sinks, queries)
    loop = [grad(loss, wanted)(k, sinks, query) for query in queries]
    assert_same(actual, tuple(torch.stack(x) for x in zip(*loop)))


@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0)])
def test_vmap_over_a_seed_without_dropout(in_dims):
    q, k, v = (torch.randn(3, 2, heads, 5, 8) for heads in (4, 2, 2))
    q = q if in_dims[0] == 0 else q[0]
    call = lambda q, seed: dense.ATTENTION(q, k[0], v[0], dropout_seed=seed)  # noqa: E731
    actual = vmap(call, in_dims)(q, torch.arange(3).view(3, 1))
    each = q if in_dims[0] == 0 else [q] * 3
    torch.testing.assert_close(actual, torch.stack([call(x, None) for x in each]))


@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0), (0, None)])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_vmap_of_packed_slopes(in_dims, shape):
    """Of all sequences, or of each."""
    q, slopes = torch.randn(3, 7, 4, 8), torch.rand(3, *shape)
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)

    def call(q, slopes):
        return fa_ops.attention_varlen(q, q, q, ends, ends, alibi_slopes=slopes)

    given = [x if dim == 0 else x[0] for x, dim in zip((q, slopes), in_dims)]
    each = zip(*(x if dim == 0 else [x] * 3 for x, dim in zip(given, in_dims)))
    torch.testing.assert_close(vmap(call, in_dims)(*given), torch.stack([call(*x) for x in each]))


def test_vmap_of_vmap():
    tensors, plain = dense_arguments("positions")
    x = torch.randn(2, N, *tensors.pop("query").shape)
    actual = vmap(vmap(lambda q: dense.ATTENTION(query=q, **tensors, **plain)))(x)
    loop = [[dense.ATTENTION(query=q, **tensors, **plain) for q in row] for row in x]
    assert_same(actual, torch.stack([torch.stack(row) for row in loop]))


def test_vmap_over_no_samples():
    q, k, v = CASES["plain"].fresh()[:3]
    lens = torch.full(q.shape[:1], 3, dtype=torch.int32)
    sinks = torch.zeros(q.shape[1])
    packed, ends = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    outs, lses = torch.randn(3, 2, 8), torch.randn(3, 2)
    loss = lambda *tensors: fa_ops.attention(*tensors[:3], sinks=tensors[3]).sum()  # noqa: E731
    for function, tensors in (
        (lambda *x: fa_ops.attention(*x, return_lse=True), (q, k, v)),
        (lambda *x: (fa_ops.attention(*x, sinks=sinks),), (q, k, v)),
        (grad(loss, (0, 1, 2, 3)), (q, k, v, sinks)),
        (lambda x: fa_ops.attention_varlen(x, x, x, ends, ends, return_lse=True), (packed,)),
        (lambda *x: fa_ops.attention_with_kv_cache(*x, lens, return_lse=True), (q, k, v)),
        (lambda *x: fa_ops.quantized_attention(*x, return_lse=True), (q, k, v)),
        (fa_ops.merge_states, (outs, lses)),
    ):
        one = function(*tensors)
        none = vmap(function)(*(x.new_empty(0, *x.shape) for x in tensors))
        assert [(x.shape[1:], x.dtype) for x in none] == [(x.shape, x.dtype) for x in one]
        assert all(x.shape[0] == 0 for x in none)


def test_vmap_dropout_randomness_is_vmaps():
    q = torch.randn(N, 1, 2, 16, 8)
    same = q[:1].expand_as(q)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda q: fa_ops.attention(q, q, q, dropout_p=0.5))(q)
    for randomness, equal in (("same", True), ("different", False)):
        out = vmap(lambda q: fa_ops.attention(q, q, q, dropout_p=0.5), randomness=randomness)(same)
        assert torch.equal(out[0], out[1]) == equal


def test_vmap_merge_states():
    outs, lses = torch.randn(N, 4, 2, 5, 8), torch.randn(4, 2, 5)
    actual = vmap(merge.MERGE, (0, None))(outs, lses)
    assert_same(actual, tuple(torch.stack(x) for x in zip(*(merge.MERGE(o, lses) for o in outs))))


@pytest.mark.parametrize("name", CASES)
def test_grad_is_autograds(name):
    args, options = dense_call(CASES[name], requires_grad=True)
    floats = [t for t in (*args, *options.values()) if getattr(t, "requires_grad", False)]
    expected = torch.autograd.grad(dense.ATTENTION(*args, **options).sin().sum(), floats)
    (q, k, v, *rest), options = dense_call(CASES[name])
    got = grad(lambda q, k, v: dense.ATTENTION(q, k, v, *rest, **options).sin().sum(), (0, 1, 2))(
        q, k, v
    )
    assert_same(got, expected[:3])


def test_vjp_and_jacrev():
    (q, k, v, *rest), options = dense_call(CASES["causal"])
    out, pull = vjp(lambda q: dense.ATTENTION(q, k, v, *rest, **options), q)
    jacobian = jacrev(lambda q: dense.ATTENTION(q, k, v, *rest, **options))(q)
    cotangent = torch.randn_like(out)
    assert_same(pull(cotangent)[0], torch.tensordot(cotangent, jacobian, 4))


def test_compiled_grad_of_vmap():
    (q, k, v, *rest), options = dense_call(CASES["positions"])

    def loss(q):
        return vmap(lambda q: dense.ATTENTION(q, k, v, *rest, **options))(q).sin().sum()

    x = torch.randn(N, *q.shape)
    assert_same(torch.compile(grad(loss), backend="aot_eager", fullgraph=True)(x), grad(loss)(x))
