"""Derivatives of the first and second order, in every way in which torch asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, func
from torch.autograd import functional, gradcheck, gradgradcheck
from torch.library import opcheck
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.backends import reference
from fa_ops.call.call import Call, attention_call
from fa_ops.ops import dense, library, varlen
from fa_ops.ops import derivatives as operators
from fa_ops.testing import make_case, naive
from fa_ops.testing.tangents import (
    assert_tangents_close,
    derivatives,
    drawn_tangents,
    error,
    with_saved,
)
from tests.ops.cases import CASES, dense_call, packed_call, packed_case, saved_by

SEED = torch.tensor([12345])
SIZES = {"q": (1, 2, 4, 3), "k": (1, 1, 5, 3), "v": (1, 1, 5, 2), "bias": (1, 1, 4, 5), "s": (2,)}
# of float64 calls with a bias and sinks that are differentiated too
OPTIONS = {
    "plain": {},
    "causal, softcap, dropout": {
        "is_causal": True, "softcap": 1.7, "dropout_p": 0.2, "dropout_seed": SEED,
    },
    "window, lengths, slopes": {
        "window_left": 2, "window_right": 1, "kv_lens": torch.tensor([4], dtype=torch.int32),
        "alibi_slopes": torch.tensor([0.5, 0.1]), "scale": 0.7,
    },
}  # fmt: skip


def inputs(seed: int = 0, grad: bool = False) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = SIZES.values()
    x = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    return [t.requires_grad_() for t in x] if grad else x


def by_operator(options: dict) -> Callable:
    """(q, k, v, bias, sinks) -> (out, lse)"""
    return lambda q, k, v, bias, sinks: dense.WITH_LSE(q, k, v, bias, sinks=sinks, **options)


def by_hand(options: dict) -> Callable:
    """The same as dense torch code, which torch differentiates to every order."""

    def attend(q, k, v, bias, sinks):
        group = q.shape[1] // k.shape[1]
        call = attention_call(q, k, v, attn_mask=bias, sinks=sinks, **options)
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = reference.modify_scores(q @ keys.transpose(-1, -2), call)
        p, lse = reference.weights(s, sinks)
        if call.options.dropout_p:
            p = p * reference.dropout_factor(call)
        return p @ values, lse

    return attend


def assert_same(actual: object, expected: object, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def loss(attend: Callable) -> Callable:
    def total(*x):
        out, lse = attend(*x)
        return out.square().sum() + lse.sin().sum()

    return total


ALL = tuple(range(5))
X, T = inputs(), inputs(1)


def some(attend: Callable, count: int = 1) -> Callable:
    """Of the first inputs alone."""
    return lambda *x: attend(*x, *X[count:])


def dual(attend: Callable) -> tuple:
    with fwAD.dual_level():
        results = attend(*map(fwAD.make_dual, X, T))
        return tuple(fwAD.unpack_dual(r).tangent.clone() for r in results)


def dual_of_one(attend: Callable) -> Tensor:
    """Of a query that requires grad as well, without recording."""
    with fwAD.dual_level(), torch.no_grad():
        q = fwAD.make_dual(X[0].clone().requires_grad_(), T[0])
        return fwAD.unpack_dual(attend(q, *X[1:])[0]).tangent


def trained(attend: Callable) -> tuple:
    """Training through a tangent, as MeanFlow does."""

    def total(*x):
        (out, _), (out_t, lse_t) = func.jvp(attend, x, tuple(T))
        return (out * out_t).sum() + lse_t.square().sum()

    return func.grad(total, ALL)(*X)


def trained_by_tangents(attend: Callable) -> tuple:
    return func.grad(lambda *t: func.jvp(attend, tuple(X), t)[1][0].square().sum(), ALL)(*T)


def penalty(attend: Callable, wanted: int = 5) -> tuple:
    """A gradient penalty by create_graph."""
    x = [t.clone().requires_grad_(i < wanted) for i, t in enumerate(X)]
    grads = torch.autograd.grad(loss(attend)(*x), x[:wanted], create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), x[:wanted])


def checkpointed(attend: Callable) -> tuple:
    return penalty(partial(checkpoint, attend, use_reentrant=False))


def dual_backward(attend: Callable) -> tuple:
    """The tangent of `.grad` by dual numbers in place of a transform."""
    with fwAD.dual_level():
        x = [fwAD.make_dual(t.clone().requires_grad_(), u) for t, u in zip(X, T)]
        grads = torch.autograd.grad(loss(attend)(*x), x, create_graph=True)
        return tuple(fwAD.unpack_dual(g).tangent.detach().clone() for g in grads)


def per_sample_penalty(attend: Callable) -> Tensor:
    total = loss(some(attend))
    one = func.grad(lambda q: func.grad(total)(q).square().sum())
    return func.vmap(one)(torch.stack([X[0], T[0]]))


def squared_gradients(attend: Callable) -> tuple:
    grads = func.grad(loss(attend), ALL)
    return func.grad(lambda *x: sum(g.square().sum() for g in grads(*x)), ALL)(*X)


WAYS = {
    "dual numbers": dual,
    "dual numbers without grad": dual_of_one,
    "dual numbers through autograd.grad": dual_backward,
    "func.jvp": lambda f: func.jvp(f, tuple(X), tuple(T)),
    "func.jvp of query": lambda f: func.jvp(some(f), tuple(X[:1]), tuple(T[:1])),
    "func.jvp of jvp by tangents": lambda f: func.jvp(
        lambda t: func.jvp(some(f), (X[0],), (t,))[1], (T[0],), (X[0],)
    ),
    "func.linearize": lambda f: func.linearize(f, *X)[1](*T),
    "func.jacfwd": lambda f: func.jacfwd(f, ALL)(*X),
    "func.jvp of grad": lambda f: func.jvp(func.grad(loss(f), ALL), tuple(X), tuple(T)),
    "func.grad of grad": squared_gradients,
    "func.grad of jvp": trained,
    "func.grad of jvp by tangents": trained_by_tangents,
    "func.hessian": lambda f: func.hessian(loss(some(f, 2)), (0, 1))(*X[:2]),
    "func.jacrev of jacrev": lambda f: func.jacrev(func.jacrev(loss(some(f))))(X[0]),
    "func.jacrev of jacfwd": lambda f: func.jacrev(func.jacfwd(loss(some(f))))(X[0]),
    "func.vmap of jvp": lambda f: func.vmap(
        lambda q: func.jvp(some(f), (q,), (T[0],))
    )(torch.stack([X[0], T[0]])),
    "func.vmap of grad of grad": per_sample_penalty,
    "create_graph": penalty,
    "create_graph of query": partial(penalty, wanted=1),
    "create_graph, checkpoint": checkpointed,
    "functional.jvp": lambda f: functional.jvp(f, tuple(X), tuple(T)),
    "functional.vhp": lambda f: functional.vhp(loss(f), tuple(X), tuple(T)),
    "functional.hvp": lambda f: functional.hvp(loss(f), tuple(X), tuple(T)),
    "functional.hessian": lambda f: functional.hessian(loss(some(f)), X[0]),
    "functional.hessian, forward": lambda f: functional.hessian(
        loss(some(f)), X[0], vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_ways(way):
    """Each way in which torch asks for a derivative gives what it gives for dense code."""
    options = OPTIONS["causal, softcap, dropout"]
    assert_same(WAYS[way](by_operator(options)), WAYS[way](by_hand(options)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options):
    for way in ("func.jvp", "func.jvp of grad", "func.grad of jvp", "create_graph"):
        assert_same(WAYS[way](by_operator(options)), WAYS[way](by_hand(options)))


def assert_gradchecks(attend: Callable, x: list[Tensor], **mode: bool) -> None:
    """First derivatives in both directions, batched too, and gradients of gradients in both."""
    checks = {"check_forward_ad": True, "check_batched_grad": True}
    assert gradcheck(attend, x, **checks, check_batched_forward_grad=True, **mode)
    assert gradgradcheck(attend, x, **mode)
    both = {"check_fwd_over_rev": True, "check_rev_over_rev": False, "check_undefined_grad": False}
    assert gradgradcheck(attend, x, **both, **mode)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name):
    """Element by element where no option is given, else along random directions."""
    fast = name != "plain"
    assert_gradchecks(by_operator(OPTIONS[name]), inputs(grad=True), fast_mode=fast)


def test_gradcheck_of_packed_sequences():
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2, 5], [0, 3, 4, 7]))
    random = torch.Generator().manual_seed(0)
    shapes = (5, 4, 3), (7, 2, 3), (7, 2, 2), (4,)
    x = [torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes]

    def attend(q, k, v, sinks):
        options = {"dropout_p": 0.3, "dropout_seed": SEED, "softcap": 2.0}
        return varlen.VARLEN(q, k, v, ends_q, ends_k, is_causal=True, sinks=sinks, **options)

    assert_gradchecks(attend, x, fast_mode=True)


def samples(info, device, dtype, requires_grad, **kwargs):
    """Sample inputs of torch's own tests of operators."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

    for Hq, options in ((1, {}), (2, {"is_causal": True}), (2, {"window": (2, 1), "softcap": 2.0})):
        args = draw(2, 1, 5, 3), draw(2, 1, 5, 2)
        yield SampleInput(draw(2, Hq, 4, 3), args=args, kwargs=options)
    bias, sinks = draw(1, 1, 4, 5), draw(2)
    yield SampleInput(
        draw(2, 2, 4, 3), args=(draw(2, 1, 5, 3), draw(2, 1, 5, 2), bias), kwargs={"sinks": sinks}
    )


INFO = OpInfo(
    "fa_ops.attention", op=fa_ops.attention, aten_name="attention", dtypes={torch.float64},
    sample_inputs_func=samples, supports_out=False, supports_forward_ad=True,
    supports_fwgrad_bwgrad=True, supports_gradgrad=True,
)  # fmt: skip


def test_samples_of_an_opinfo():
    """As torch's tests of gradients run them."""
    assert INFO.supports_forward_ad and INFO.supports_fwgrad_bwgrad and INFO.supports_gradgrad
    found = list(INFO.sample_inputs("cpu", torch.float64, requires_grad=True))
    assert len(found) == 4
    for sample in found:
        given = [x for x in (sample.input, *sample.args) if isinstance(x, Tensor)]
        assert_gradchecks(partial(fa_ops.attention, **sample.kwargs), given, fast_mode=True)


def test_public_functions():
    """attention, attention_varlen and merge_states, with and without lse."""
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    t = torch.randn_like(q)
    hand = by_hand({"is_causal": True})
    truth = func.jvp(lambda q: hand(q, k, v, None, None), (q,), (t,))[1]
    assert_same(
        func.jvp(lambda q: fa_ops.attention(q, k, v, is_causal=True), (q,), (t,))[1], truth[0]
    )
    ends = torch.tensor([0, 6], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k, v, t)]

    def attend(q):
        given = q, *packed[1:3], ends, ends
        return fa_ops.attention_varlen(*given, is_causal=True, return_lse=True)

    out_t, lse_t = func.jvp(attend, (packed[0],), (packed[3],))[1]
    assert_same((out_t.transpose(0, 1)[None], lse_t[None]), truth)


def merged_by_hand(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(lses, 0)
    return (weights.unsqueeze(-1) * outs).sum(0), torch.logsumexp(lses, 0)


def test_merge_states():
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    t = tuple(torch.randn_like(s) for s in x)
    merge, hand = fa_ops.merge_states, merged_by_hand
    assert_same(func.jvp(merge, x, t), func.jvp(hand, x, t))
    total = lambda f: lambda *x: f(*x)[0].square().sum() + f(*x)[1].sin().sum()  # noqa: E731
    second = lambda f: func.jvp(func.grad(total(f), (0, 1)), x, t)  # noqa: E731
    assert_same(second(merge), second(hand))
    trained = lambda f: func.grad(  # noqa: E731
        lambda *x: func.jvp(f, x, t)[1][0].square().sum(), (0, 1)
    )(*x)
    assert_same(trained(merge), trained(hand))
    no_keys = x[0].clone(), x[1].clone()
    no_keys[0][0], no_keys[1][0] = math.nan, -math.inf
    expected = func.jvp(merge, tuple(s[1:] for s in x), tuple(s[1:] for s in t))
    assert_same(func.jvp(merge, no_keys, t), expected)


# Backends


DRAWN = {
    "heads, dead rows": make_case(Sq=40, Sk=300, mask="float", mask_holes=True, sinks=True, Dv=8),
    "all": make_case(
        Sq=150, Sk=290, is_causal=True, softcap=2.0, alibi="batch_heads", kv_lens=True, sinks=True,
        dropout_p=0.3, mask="float", mask_shape=(1, 0, 1, 1), mask_grad=True,
    ),
    "ranges": make_case(Sq=70, Sk=530, key_ranges=(1, 1, 1), window=(100, 3)),
    "blocks": make_case(B=1, Sq=300, Sk=300, mask="float", mask_blocks=True, mask_grad=True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DRAWN)
def test_cpu_against_the_oracle(name, dtype):
    case = DRAWN[name]
    assert_tangents_close(make_case(**{**vars(case), "dtype": dtype}), "cpu")


@pytest.mark.parametrize("name", CASES)
def test_cases_against_the_oracle(name):
    case = make_case(**{**vars(CASES[name]), "dtype": torch.float64})
    assert_tangents_close(case, "cpu")


def with_mean(dtype: torch.dtype, mean: float, factor: float = 1.0) -> Call:
    """A causal call whose keys have a mean, as those of real models do."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(s, generator=random)  # noqa: E731
    q, k, v = (draw(1, 2, 256, 64) for _ in range(3))
    k = k * factor + mean * draw(1, 1, 1, 64).sign()
    return attention_call(*((x).to(dtype) for x in (q * factor, k, v)), is_causal=True)


@pytest.mark.parametrize("mean, factor", [(0.0, 1.0), (3.0, 1.0), (0.0, 3.0)])
def test_accuracy_where_keys_have_a_mean(mean, factor):
    """Errors in bfloat16: at most twice those of dense code, and three times those of backward."""
    call = with_saved(with_mean(torch.bfloat16, mean, factor).changed(backend="cpu"))
    t = drawn_tangents(call)
    (out_t, lse_t, dot), grads = derivatives(call, t, None)
    whole = call._replace(tangents=t)
    oracle, rough = reference.tangents(whole), reference.tangents(whole, naive)
    assert error(out_t, oracle[0]) <= 2 * error(rough[0], oracle[0])
    whole = call._replace(tangents=t._replace(out=out_t, lse=lse_t))
    oracle, rough = reference.tangents(whole), reference.tangents(whole, naive)
    first = reference.backward(call)
    plain = dense.BACKWARD(*call.saved[:2], *call[:3], *call.saved[2:4], None, 0.0, True)
    for name in ("query", "key", "value"):
        found, exact = getattr(grads, name), getattr(oracle, name)
        assert error(found, exact) <= 2 * error(getattr(rough, name), exact)
        of_backward = error(plain[("query", "key", "value").index(name)], getattr(first, name))
        assert error(found, exact) <= 3 * max(of_backward, 4e-3)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nan_affects_only_what_attends_it(backend):
    """A NaN of a masked key, or of its tangent, reaches no row that does not attend it."""
    case = make_case(Sq=40, Sk=300, is_causal=True, dtype=torch.float64)
    call = with_saved(case.fresh().changed(backend=backend))
    t = drawn_tangents(call)
    clean, of_grads = derivatives(call, t, None)
    for name in ("key", "value"):
        for x in (getattr(call, name), getattr(t, name)):
            x[:, :, -1] = math.nan  # which the last query alone attends
    call = with_saved(call)
    found, grads = derivatives(call, t, None)
    for actual, expected in zip(found, clean):
        assert_same(actual[:, :, :-1], expected[:, :, :-1])
        assert actual[:, :, -1].isnan().all()
    assert_same(grads.query[:, :, :-1], of_grads.query[:, :, :-1])
    assert grads.query[:, :, -1].isnan().all() and grads.key.isnan().any()


@pytest.mark.parametrize("size", ["Sq", "Sk", "D", "Dv"])
def test_sizes_of_zero(size):
    """Tangents of calls with nothing to compute are those of the oracle."""
    sizes = {"Sq": 3, "Sk": 4, "D": 8, "Dv": 8} | {size: 0}
    call = with_saved(make_case(**sizes, sinks=True, mask="float", dtype=torch.float64).fresh())
    t = drawn_tangents(call)
    y_t = tuple(map(torch.randn_like, call.saved[:2]))
    found = [derivatives(call.changed(backend=name), t, y_t) for name in ("cpu", "reference")]
    assert_same(*found)
    if size == "Sk":  # lse is the sink
        (_, lse_t, dot), _ = found[0]
        assert_same(lse_t, t.sinks.view(-1, 1).expand_as(lse_t).contiguous())
        assert not dot.any()


def test_memory_is_linear():
    """No tensor that the CPU backend makes has the size of the scores."""
    sizes = {}
    for length in (2048, 4096):
        call = make_case(B=1, Hq=1, Hkv=1, Sq=length, Sk=length, D=16, Dv=16).fresh()
        call = with_saved(call)
        largest = 0

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                nonlocal largest
                results = function(*args, **kwargs or {})
                for x in torch.utils._pytree.tree_leaves(results):
                    if isinstance(x, Tensor):
                        largest = max(largest, x.untyped_storage().size())
                return results

        with Sizes():
            derivatives(call, drawn_tangents(call), call.saved[:2])
        sizes[length] = largest
    assert sizes[4096] <= 2.2 * sizes[2048], sizes
    assert sizes[4096] < 4096 * 4096


# Contracts of the operators


def tangent_arguments(name: str, packed: bool) -> tuple[tuple, tuple, dict]:
    """Arguments of the operators of tangents, and of tangents of gradients."""
    case = CASES[name]
    args, options = (packed_call if packed else dense_call)(case)
    operator = varlen.VARLEN if packed else dense.WITH_LSE
    grad_out, grad_lse, *x, out, lse = saved_by(operator, args, options)[:7]
    r = lambda s: None if s is None or not s.is_floating_point() else torch.randn_like(s)  # noqa: E731
    mask, sinks = () if packed else (args[3],), options.get("sinks")
    t = (*map(r, (*x, *mask)), r(sinks))
    y_t = (r(grad_out), None if name == "causal" else r(grad_lse))
    saved = (grad_out, grad_lse, *x, out, lse)
    rest = args[3:]
    of_jvp = (*x, out, lse, *t, None if name == "causal" else grad_out, *rest)
    return of_jvp, (*saved, *t, *y_t, r(out), r(lse), None, *rest), options


PACKED = [name for name in CASES if packed_case(name)]
BOTH = [(name, False) for name in CASES] + [(name, True) for name in PACKED]


CHECKED = [("causal", False), ("float mask", False), ("dropout", False), ("positions", True)]


@pytest.mark.parametrize("name, packed", CHECKED)
def test_opcheck(name, packed):
    of_jvp, of_backward, options = tangent_arguments(name, packed)
    module = varlen if packed else dense
    grad = {"mask_grad": True} if CASES[name].mask_grad else {}
    for operator, args, given in (
        (module.JVP, of_jvp, options), (module.BACKWARD_JVP, of_backward, options | grad)
    ):  # fmt: skip
        opcheck(operator, args, given)
    recorded = [x.clone().requires_grad_() if i < 3 else x for i, x in enumerate(of_jvp)]
    opcheck(module.JVP, tuple(recorded), options)


@pytest.mark.parametrize("name, packed", BOTH)
def test_vmap(name, packed):
    """Of tangents alone, as jacfwd maps them, and of all floating point tensors."""
    of_jvp, of_backward, options = tangent_arguments(name, packed)
    module = varlen if packed else dense
    for operator, args in ((module.JVP, of_jvp), (module.BACKWARD_JVP, of_backward)):
        names = [x.name for x in operator._schema.arguments]
        floats = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
        for mapped in (floats, [i for i in floats if names[i].endswith("_t")]):
            # alike but for a factor, so that what is saved belongs to the call
            many = [torch.stack([x, x, x * 2]) if i in mapped else x for i, x in enumerate(args)]
            if mapped == floats:
                many = [torch.stack([x, x]) if i in mapped else x for i, x in enumerate(args)]
            dims = tuple(0 if i in mapped else None for i in range(len(args)))
            call = lambda *given: operator(*given, **options)[:3]  # noqa: E731, B023
            found = func.vmap(call, dims)(*many)
            size = len(many[mapped[0]])
            each = [
                call(*(x[n] if i in mapped else x for i, x in enumerate(many))) for n in range(size)
            ]
            expected = tuple(torch.stack(x) for x in zip(*each))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_flops():
    q, t = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
    unit = 2 * (2 * 4) * 8 * 8 * 16
    with FlopCounterMode(display=False) as counter:
        func.jvp(lambda q: fa_ops.attention(q, q, q), (q,), (t,))
    assert counter.get_total_flops() == (2 + 5) * unit
    x = q.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        (g,) = torch.autograd.grad(fa_ops.attention(x, q, q).sum(), x, create_graph=True)
        torch.autograd.grad(g.sum(), x)
    assert counter.get_total_flops() == (2 + 5 + 5 + 10) * unit
    ends = torch.tensor([0, 8, 16], dtype=torch.int32)
    packed = [s.transpose(1, 2).flatten(0, 1) for s in (q, t)]
    with FlopCounterMode(display=False) as counter:
        f = lambda q: fa_ops.attention_varlen(q, q, q, ends, ends).sum()  # noqa: E731
        func.jvp(func.grad(f), (packed[0],), (packed[1],))
    assert counter.get_total_flops() == (2 + 5 + 5 + 10) * unit


def test_autocast():
    """Tangents follow the cast; products of the derivatives are not cast again."""
    q, t = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = func.jvp(lambda q: fa_ops.attention(q, q, q), (q,), (t,))
        x = q.clone().requires_grad_()
        (g,) = torch.autograd.grad(fa_ops.attention(x, x, x).float().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(g.square().sum(), x)
    low = lambda q: fa_ops.attention(q.bfloat16(), q.bfloat16(), q.bfloat16())  # noqa: E731
    assert_same(found, func.jvp(low, (q,), (t,)))
    assert second.dtype == torch.float32 and bool(second.isfinite().all())


@pytest.mark.parametrize("of", ["jvp", "jvp of grad", "backward of jvp"])
def test_compiled(of):
    options = OPTIONS["causal, softcap, dropout"]
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)

    def of_grad(attend):
        return lambda *x: func.jvp(func.grad(loss(attend), ALL), x, tuple(T))

    def backward(function):
        x = [t.clone().requires_grad_() for t in X]
        return torch.autograd.grad(function(*x)[1][0].square().sum(), x)

    mine, hand = by_operator(options), by_hand(options)
    of_jvp = lambda attend: lambda *x: func.jvp(attend, x, tuple(T))  # noqa: E731
    if of == "backward of jvp":
        assert_same(backward(compiled(of_jvp(mine))), backward(of_jvp(hand)))
        return
    function = of_jvp if of == "jvp" else of_grad
    assert_same(compiled(function(mine))(*X), function(hand)(*X))


def test_compiled_functions_refuse_create_graph():
    """By torch's own error, which docs/derivatives.md explains."""
    compiled = torch.compile(by_operator({}), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        penalty(compiled)


def test_calls_without_derivatives_save_nothing_more(monkeypatch):
    """A call outside of forward mode neither looks for tangents nor saves for them."""
    asked = []
    monkeypatch.setattr(fwAD, "unpack_dual", lambda *x, **_: asked.append(x))
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    fa_ops.attention(q, q, q).sum().backward()
    dense.ATTENTION(q, q, q).sum().backward()
    fa_ops.attention(*[q.detach()] * 3)
    assert asked == []


# Refusals


def third(x: Tensor) -> Tensor:
    first = func.grad(lambda q: fa_ops.attention(q, X[1], X[2]).square().sum())
    second = func.grad(lambda q: first(q).square().sum())
    return func.grad(lambda q: second(q).square().sum())(x)


def test_refusals():
    q, k, v = X[:3]
    attend = lambda q: fa_ops.attention(q, k, v)  # noqa: E731
    order = "^fa::attention_backward_jvp has no derivative: attention has derivatives of the first"
    forward = (
        "^fa::attention_jvp has no forward-mode derivative: use jvp of grad, or jacfwd of jacrev, "
        "for second derivatives$"
    )
    with pytest.raises(NotImplementedError, match=forward):
        func.jvp(lambda x: func.jvp(attend, (x,), (q,))[1], (q,), (q,))
    with pytest.raises(NotImplementedError, match=forward):
        func.jacfwd(func.jacfwd(attend))(q)
    with pytest.raises(NotImplementedError, match=order):
        third(q)
    with pytest.raises(NotImplementedError, match=order):
        squared = func.grad(lambda q: func.grad(loss(lambda q: (attend(q), q)))(q).square().sum())
        func.jvp(squared, (q,), (q,))
    with pytest.raises(NotImplementedError, match=order):
        total = lambda q: attend(q).square().sum()  # noqa: E731
        x = q.clone().requires_grad_()
        functional.hvp(total, x, q, create_graph=True)[1].sum().backward()
    slopes = torch.ones(2)
    for refused in (
        lambda s: fa_ops.attention(q, k, v, alibi_slopes=s),
        lambda s: dense.JVP(q, k, v, *dense.WITH_LSE(q, k, v), q, *[None] * 5, alibi_slopes=s),
    ):
        with pytest.raises(
            NotImplementedError, match="^alibi_slopes have no derivative; pass alibi"
        ):
            func.jvp(refused, (slopes,), (slopes,))


def test_other_operators_refuse_tangents():
    q = torch.randn(1, 2, 8, 16)
    lens = torch.tensor([8], dtype=torch.int32)
    for refused in (
        lambda q: fa_ops.quantized_attention(q, q, q),
        lambda q: fa_ops.attention_with_kv_cache(q, q, q, lens),
    ):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            func.jvp(refused, (q,), (q,))


@pytest.mark.parametrize(
    "argument, change, error, message",
    [
        ("query_t", lambda t: t[..., :2], ValueError, "query_t must have shape (2, 4, 5, 8), got"),
        ("key_t", lambda t: t.double(), TypeError, "key_t must be float32, got float64"),
        ("lse", lambda t: t[0], ValueError, "lse must have shape"),
        ("attn_mask_t", lambda t: torch.ones(1), ValueError, "attn_mask_t is given without attn_m"),
        ("sinks_t", lambda t: torch.ones(1), ValueError, "sinks_t is given without sinks: pass"),
    ],
)
def test_errors(argument, change, error, message):
    of_jvp, *_ = tangent_arguments("plain", False)
    names = [x.name for x in dense.JVP._schema.arguments]
    args = {n: change(x) if n == argument else x for n, x in zip(names, of_jvp)}
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), pytest.raises(error) as raised:
            dense.JVP(**args)
        assert str(raised.value).startswith(message)


def test_a_tangent_of_a_bool_mask_is_refused():
    of_jvp, _, options = tangent_arguments("bool mask", False)
    names = [x.name for x in dense.JVP._schema.arguments]
    args = dict(zip(names, of_jvp)) | {"attn_mask_t": torch.ones(2, 1, 5, 7)}
    with pytest.raises(
        ValueError, match="attn_mask_t is the tangent of a floating point attn_mask"
    ):
        dense.JVP(**args, **options)


def test_autograd_functions_are_of_one_level():
    """Otherwise transforms would be told of each operator twice."""
    for name in ("AttentionBackward", "AttentionJvp", "AttentionBackwardJvp"):
        function = getattr(operators, name)
        assert issubclass(function, library.SingleLevelFunction)
