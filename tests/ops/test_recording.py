"""Eager calls that record a gradient give the bits that the operators give, first and repeated."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.backends import cpu
from fa_ops.call import backend_option
from fa_ops.call.call import Plan
from fa_ops.ops import library
from fa_ops.plans import planning

INTS = torch.int32
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "window": {"window": (2, 1), "softcap": 3.0},
    "deterministic": {"is_causal": True, "deterministic": True},
    "reference": {"backend": "reference"},
    "lens": {"kv_lens": torch.tensor([3, 7], dtype=INTS)},
    "ranges": {"key_ranges": torch.tensor([1, 5], dtype=INTS).view(1, 1, 1, 2)},
    "slopes": {"alibi_slopes": torch.rand(4)},
    "keep": {"attn_mask": torch.rand(5, 7) > 0.3},
    "bias": {"attn_mask": torch.randn(4, 1, 7)},
    "sinks": {"sinks": torch.randn(4)},
    "all": {
        "attn_mask": torch.randn(2, 1, 5, 7), "sinks": torch.randn(4), "softcap": 2.0,
        "alibi_slopes": torch.rand(2, 4), "kv_lens": torch.tensor([7, 4], dtype=INTS),
    },
}  # fmt: skip


def forward_geometries():
    return [key for key, found in planning._prepared.items() if not is_backward(found)]


def is_backward(found):
    return "backward" in found.scalars


def qkv(requires_grad=True, **options):
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)
    return [torch.randn(shape, **options).requires_grad_(requires_grad) for shape in shapes]


def is_direct(out):
    """Whether autograd's node ran a plan without the dispatcher."""
    return not isinstance(out.grad_fn.recording.plan.run, partial)


def by_operator(*args, **options):
    """The operator's result, which a mode gets to see."""
    with BaseTorchDispatchMode():
        out = fa_ops.attention(*args, **options)
    assert not is_direct(out[0] if isinstance(out, tuple) else out)
    return out


def results(call, inputs, options, differentiable=()):
    out = call(*inputs, **options)
    wanted = (*inputs, *differentiable)
    return out, *torch.autograd.grad(out.sin().sum(), wanted)


def assert_equal(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype


def assert_same(call, *given):
    assert_equal(results(call, *given), results(by_operator, *given))


def with_gradients(options):
    """The options, their float masks and sinks requiring grad, and these."""
    options = dict(options)
    for name in ("attn_mask", "sinks"):
        if name in options and options[name].is_floating_point():
            options[name] = options[name].clone().requires_grad_()
    wanted = [t for t in options.values() if torch.is_tensor(t) and t.requires_grad]
    return options, wanted


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_the_operators(name):
    """Again with other values, and after a call with other options."""
    options, differentiable = with_gradients(OPTIONS[name])
    assert_same(fa_ops.attention, qkv(), options, differentiable)
    (key, *_) = forward_geometries()
    fa_ops.attention(*qkv(), scale=0.7)
    others = {n: t.clone() if torch.is_tensor(t) else t for n, t in options.items()}
    assert_same(fa_ops.attention, qkv(), options, differentiable)
    assert is_direct(fa_ops.attention(*qkv(), **others))
    assert key in forward_geometries()


def test_calls_that_differ_are_not_taken_for_each_other():
    inputs = qkv()
    for name in (*OPTIONS, *reversed(OPTIONS)):
        options, differentiable = with_gradients(OPTIONS[name])
        assert_same(fa_ops.attention, inputs, options, differentiable)
    planning.forget()
    for name in (*OPTIONS, *reversed(OPTIONS)):
        fa_ops.attention(*inputs, **OPTIONS[name])
    assert len(forward_geometries()) == len(OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lay_out", [lambda t: t, lambda t: t.transpose(1, 2).clone().mT.mT])
def test_dtypes_and_layouts(dtype, lay_out):
    inputs = [t.to(dtype).detach() for t in qkv()]
    inputs = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs]
    for _ in range(2):
        assert_same(fa_ops.attention, inputs, {"is_causal": True})


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_some_inputs_require_grad(which):
    for _ in range(2):
        inputs = qkv(requires_grad=False)
        for i in which:
            inputs[i].requires_grad_()
        wanted = [inputs[i] for i in which]
        grads = [
            torch.autograd.grad(call(*inputs).sin().sum(), wanted)
            for call in (fa_ops.attention, by_operator)
        ]
        assert_equal(*grads)
        fa_ops.attention(*inputs).sum().backward()
        assert [t.grad is not None for t in inputs] == [i in which for i in range(3)]


@pytest.mark.parametrize("name", ["sinks", "bias"])
def test_sinks_or_a_mask_alone(name):
    inputs = qkv(requires_grad=False)
    assert not fa_ops.attention(*inputs, **OPTIONS[name]).requires_grad
    options, wanted = with_gradients(OPTIONS[name])
    for _ in range(2):
        grads = [
            torch.autograd.grad(call(*inputs, **options).sin().sum(), wanted)
            for call in (fa_ops.attention, by_operator)
        ]
        assert_equal(*grads)


def test_one_tensor_for_all_three():
    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    grads = [
        torch.autograd.grad(call(x, x, x, is_causal=True).sin().sum(), x)
        for call in (fa_ops.attention, fa_ops.attention, by_operator)
    ]
    assert_equal(grads[0], grads[2])
    assert_equal(grads[1], grads[2])


def test_inputs_that_were_computed_and_hooks():
    x = qkv()
    seen = []

    def gradients(call):
        inputs = [t.sin() for t in x]
        inputs[0].register_hook(lambda g: seen.append(g) or 2 * g)
        out = call(*inputs, is_causal=True)
        out.register_hook(lambda g: 3 * g)
        out.grad_fn.register_hook(lambda grads, _: seen.append(len(grads)) and None)
        return torch.autograd.grad(out.sin().sum(), x)

    for _ in range(2):
        assert_equal(gradients(fa_ops.attention), gradients(by_operator))
    assert torch.is_tensor(seen[-1]) and 3 in seen[:2] and len(seen) == 8


@pytest.mark.parametrize(
    "loss",
    [
        torch.Tensor.sum,
        lambda out: out.transpose(2, 3).contiguous().sin().sum(),
        lambda out: out[:, :, ::2].sin().sum(),
        lambda out: (out * torch.ones(1).expand_as(out)).permute(3, 1, 0, 2).flatten().norm(),
    ],
)
def test_gradients_of_every_layout(loss):
    inputs = qkv()
    for _ in range(2):
        grads = [
            torch.autograd.grad(loss(f(*inputs)), inputs) for f in (fa_ops.attention, by_operator)
        ]
        assert_equal(*grads)


def test_backends_are_given_rows(monkeypatch):
    strides, backward = [], cpu.backward

    def spy(call):
        strides.append((call.saved.grad_out.stride(-1), call.saved.out.stride(-1)))
        return backward(call)

    monkeypatch.setattr(cpu, "backward", spy)
    for _ in range(2):
        fa_ops.attention(*qkv()).sum().backward()
    assert strides == [(1, 1)] * 2


class Nothing(torch.autograd.Function):
    """Has no gradient to give."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_is_zero():
    inputs = qkv()
    Nothing.apply(fa_ops.attention(*inputs)).sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in inputs)


def test_changed_inputs_and_graphs_that_are_gone():
    for changed in range(4):
        x = qkv()
        inputs = [t.clone() for t in x]
        out = fa_ops.attention(*inputs)
        loss = out.sum()
        with torch.no_grad():
            (*inputs, out)[changed].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, x)
    inputs = qkv()
    out = fa_ops.attention(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert_equal(torch.autograd.grad(out.sum(), inputs), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), inputs)


def test_without_gradients_nothing_is_recorded():
    inputs = qkv()
    fa_ops.attention(*inputs)
    with torch.no_grad():
        assert fa_ops.attention(*inputs).grad_fn is None
    with torch.inference_mode():
        assert fa_ops.attention(*inputs).is_inference()
        made = [t.clone() for t in inputs]
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        fa_ops.attention(inputs[0], *made[1:])
    assert not fa_ops.attention(*(t.detach() for t in inputs)).requires_grad


def test_lse_carries_a_gradient():
    inputs = qkv()
    fa_ops.attention(*inputs)

    def gradients(call):
        out, lse = call(*inputs, return_lse=True)
        return torch.autograd.grad(out.sin().sum() + lse.sin().sum(), inputs)

    call = lambda *args, **options: fa_ops.attention(*args, **options)  # noqa: E731
    assert_equal(gradients(call), gradients(partial(fa_ops.attention, is_causal=False)))
    assert not torch.equal(gradients(call)[0], results(call, inputs, {})[1])


def test_threads_record_at_the_same_time():
    inputs = [qkv() for _ in range(4)]
    expected = [results(by_operator, x, {"is_causal": True}) for x in inputs]
    failures = []

    def work(x, want):
        try:
            for _ in range(10):
                assert_equal(results(fa_ops.attention, x, {"is_causal": True}), want)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=one) for one in zip(inputs, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_saved_tensors_may_come_back_laid_out_otherwise():
    kept = []

    def pack(t):
        kept.append(t)
        return t.transpose(1, 2).contiguous() if t.dim() == 4 else t

    def unpack(t):
        return t.transpose(1, 2) if t.dim() == 4 else t

    inputs = qkv()
    given = inputs, OPTIONS["all"]
    expected = results(by_operator, *given)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            actual = results(fa_ops.attention, *given)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)
    pointers = {t.data_ptr() for t in kept}
    assert {t.data_ptr() for t in inputs} <= pointers
    assert {t.data_ptr() for t in OPTIONS["all"].values() if torch.is_tensor(t)} <= pointers


# Who else may want to see the backward pass


def test_double_backward_and_forward_mode():
    inputs = qkv()
    for options in ({}, OPTIONS["sinks"]):
        found = []
        for attend in (fa_ops.attention, by_operator):
            out = attend(*inputs, **options)
            (first, *_) = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
            with torch.autograd.forward_ad.dual_level():
                q = torch.autograd.forward_ad.make_dual(inputs[0], inputs[0].flip(3))
                tangent = torch.autograd.forward_ad.unpack_dual(attend(q, *inputs[1:], **options))
            found.append((*torch.autograd.grad(first.sum(), inputs), tangent.tangent))
        torch.testing.assert_close(*found)


def test_batched_gradients():
    inputs = qkv()
    out = fa_ops.attention(*inputs, is_causal=True)
    many = torch.randn(3, *out.shape)
    take = partial(torch.autograd.grad, out, inputs, retain_graph=True)
    loop = tuple(torch.stack(grads) for grads in zip(*map(take, many)))
    torch.testing.assert_close(take(many, is_grads_batched=True), loop)
    take = partial(torch.autograd.grad, by_operator(*inputs, is_causal=True), inputs)
    torch.testing.assert_close(take(many, is_grads_batched=True), loop)


def test_watchers_of_the_backward_pass_alone():
    inputs = qkv()
    out = fa_ops.attention(*inputs)
    take = partial(torch.autograd.grad, out.sum(), inputs, retain_graph=True)
    expected = take()
    with FlopCounterMode(display=False) as flops:
        assert_equal(take(), expected)
    assert flops.get_total_flops() == 2 * 2 * 4 * 5 * 7 * (3 * 8 + 2 * 6)
    with torch.profiler.profile() as profile:
        assert_equal(take(), expected)
    assert "fa::attention_backward" in {event.name for event in profile.events()}
    with torch.autograd.set_detect_anomaly(True):
        assert_equal(take(), expected)


def test_a_subclass_sees_the_operator():
    class Seeing(torch.Tensor):
        seen = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    inputs = qkv()
    fa_ops.attention(*inputs)
    fa_ops.attention(inputs[0].as_subclass(Seeing), *inputs[1:])
    assert torch.ops.fa.attention.default in Seeing.seen


@pytest.mark.parametrize("options", [{"return_lse": True}, {"dropout_p": 0.5}], ids=str)
def test_a_mask_that_is_a_subclass_sees_every_operator(options):
    class Seeing(torch.Tensor):
        seen = set()

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            cls.seen.add(function)
            given = (args, kwargs or {})
            args, kwargs = tree_map_only(Seeing, lambda x: x.inner, given)
            return function(*args, **kwargs)

    inputs, mask, found = qkv(), torch.randn(5, 7), []
    for given in (mask, Seeing(mask)):
        torch.manual_seed(0)
        out = fa_ops.attention(*inputs, given, **options)
        out = out[0] if isinstance(out, tuple) else out
        found.append((out, *torch.autograd.grad(out.sum(), inputs)))
    assert_equal(*found)
    names = {function._opname for function in Seeing.seen}
    assert names == {"attention_with_lse", "attention_backward"}


# What a backend prepares


@pytest.fixture
def log(monkeypatch):
    """What the CPU backend plans and runs, in this order."""
    log, plan = [], cpu.plan

    def spy(call):
        name = "forward" if call.saved is None else "backward"
        log.append(f"plan {name}")
        planned = plan(call)

        def prepare(call):
            run = planned.prepare(call)
            return lambda *args: log.append(name) or run(*args)

        return Plan(planned.kernel, prepare)

    monkeypatch.setattr(cpu, "plan", spy)
    return log


@pytest.mark.parametrize("name", ["causal", "lens", "ranges", "slopes", "sinks", "bias"])
def test_a_call_is_planned_once(log, name):
    for _ in range(2):
        options, differentiable = with_gradients(OPTIONS[name])
        options = {n: t.clone() if n == "kv_lens" else t for n, t in options.items()}
        results(fa_ops.attention, qkv(), options, differentiable)
    assert log == ["plan forward", "forward", "plan backward", "backward", "forward", "backward"]


def test_another_layout_of_what_was_saved_is_planned_anew(log):
    lay_out = lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t  # noqa: E731
    inputs = qkv()
    expected = results(by_operator, inputs, {})
    log.clear()
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lay_out, lambda t: t):
            actual = results(fa_ops.attention, inputs, {})
        torch.testing.assert_close(actual, expected)
    assert log.count("plan backward") == 1 and log.count("backward") == 2
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        assert_equal(results(fa_ops.attention, inputs, {}), expected)
    assert log.count("plan backward") == 1 and log.count("backward") == 3


def test_the_global_switches_hold_in_the_backward_pass(monkeypatch):
    calls, backward = [], cpu.backward

    def spy(call):
        calls.append(call)
        return backward(call)

    monkeypatch.setattr(cpu, "backward", spy)
    inputs = qkv()
    out = fa_ops.attention(*inputs)
    take = partial(torch.autograd.grad, out.sum(), inputs, retain_graph=True)
    expected = take()
    torch.use_deterministic_algorithms(True)
    try:
        assert_equal(take(), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call.options.deterministic for call in calls] == [False, True]
    with fa_ops.use_backend("reference"):
        torch.testing.assert_close(take(), expected)
    assert len(calls) == 2
    assert backend_option.chosen() is None


def test_bad_calls_are_refused_every_time():
    q, k, v = qkv()
    slopes = torch.rand(4, requires_grad=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="no gradient"):
            fa_ops.attention(q, k, v, alibi_slopes=slopes)
        with pytest.raises(ValueError, match="head dimension"):
            fa_ops.attention(q, k[..., :4], v)
        with pytest.raises(TypeError, match="key_ranges must be int32"):
            fa_ops.attention(q, k, v, key_ranges=torch.ones(1, 1, 1, 2))
        with pytest.raises(TypeError, match="attn_mask must be a Tensor"):
            fa_ops.attention(q, k, v, [1])
        with pytest.raises(NotImplementedError, match="hopper"):
            fa_ops.attention(q, k, v, backend="hopper")
    assert not planning._prepared
    with pytest.raises(TypeError, match="query must be a strided Tensor"):
        fa_ops.attention(q.to_sparse(), k, v)
    negated = torch.complex(q, q).conj().imag
    assert library.route_of(negated, k, v) is library.Route.DISPATCH
    fa_ops.attention(*(t.detach().to("meta") for t in (q, k, v)))
    assert not planning._prepared


def test_small_tensors_that_are_not_contiguous():
    lens, strided = torch.tensor([3, 7], dtype=INTS), torch.tensor([3, 0, 7, 0], dtype=INTS)[::2]
    inputs = qkv()
    for _ in range(2):
        expected = results(by_operator, inputs, {"kv_lens": lens})
        assert_equal(results(fa_ops.attention, inputs, {"kv_lens": strided}), expected)
