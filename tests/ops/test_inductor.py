"""Calls of the operators in the code that Inductor generates."""

import itertools
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import fa_ops
from fa_ops.ops.schemas import Schema
from fa_ops.plans import dispatch, planning, recognition
from tests.ops.cases import CASES, dense_call, packed_call, packed_case

FA = torch.ops.fa


@pytest.fixture(autouse=True)
def fresh_code():
    """No code from earlier runs, nor from earlier tests."""
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield


def compiled(function, *args, **options):
    """The result of the compiled function, and the code that it has, forward and backward."""
    function = torch.compile(function, fullgraph=True, **options)
    out, code = run_and_get_code(function, *args)
    return function, out, "\n".join(code)


def sites(code: str) -> list[str]:
    """What makes the call sites."""
    return [line.partition("call_site")[2] for line in code.splitlines() if "call_site(" in line]


def rand(*shape, **options):
    return torch.randn(shape, **options)


def qkv(requires_grad=False, keys=7):
    return [rand(2, 4, n, 8, requires_grad=requires_grad) for n in (5, keys, keys)]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def planned(monkeypatch):
    """Lists what the operators' kernels bind, and which geometries are described."""
    seen = []
    for owner, name in ((Schema, "bind"), (planning, "key_of")):
        original = getattr(owner, name)

        def spy(*args, original=original, name=name, **options):
            seen.append(name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, spy)
    return seen


CALLS = [(f"dense, {name}", FA.attention_with_lse, dense_call, name) for name in CASES]
CALLS += [
    (f"packed, {name}", FA.attention_varlen, packed_call, name)
    for name in filter(packed_case, CASES)
]


@pytest.mark.parametrize("operator, call, name", [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_calls_run_plans(planned, operator, call, name):
    """Forward and backward: the operator's results, from plans that are found by comparison."""
    args, options = call(CASES[name], requires_grad=True)
    leaves = [t for t in (*args, *options.values()) if getattr(t, "requires_grad", False)]

    def function(*args, **options):
        return operator(*args, **options)

    expected = operator(*args, **options)
    grads = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, leaves, grads)
    step = torch.compile(function, fullgraph=True)

    def train():
        out = step(*args, **options)
        return *out, *torch.autograd.grad(out, leaves, grads)

    actual, code = run_and_get_code(train)
    assert_close(actual, (*expected, *wanted))
    code = "\n".join(code)
    assert len(sites(code)) == 2 and "default(" not in code
    train()  # the first call of compiled code looks for results that alias each other
    planned.clear()
    assert_close(train(), (*expected, *wanted))
    assert planned == []


def test_only_results_that_are_read_are_made():
    args = qkv(requires_grad=True)
    step = torch.compile(lambda q, k, v: fa_ops.attention(q, k, v, is_causal=True), fullgraph=True)
    _, code = run_and_get_code(lambda: torch.autograd.grad(step(*args), args, rand(2, 4, 5, 8)))
    forward, backward = map(sites, code)
    assert forward == ["('attention_with_lse', 'query key value', is_causal=True)"]
    given = "grad_out grad_lse query key value out lse"
    assert backward == [f"('attention_backward', '{given}', results=3, is_causal=True)"]
    with torch.no_grad():
        _, _, code = compiled(lambda *args: fa_ops.attention(*args, return_lse=True)[0], *qkv())
    assert sites(code) == ["('attention_with_lse', 'query key value', results=1)"]


@pytest.mark.parametrize("mask_grad", [False, True])
def test_all_results_of_a_backward_operator(mask_grad):
    q, k, v = qkv()
    mask, sinks = rand(5, 7), rand(4)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    ends = [torch.arange(3, dtype=torch.int32) * x.shape[2] for x in (q, k)]
    options = {"sinks": sinks, "scale": 1}

    def run():
        out, lse = FA.attention_with_lse(q, k, v, mask, **options)
        given = out, lse, q, k, v, out, lse, mask
        grads = FA.attention_backward(*given, mask_grad=mask_grad, **options)
        out, lse = FA.attention_varlen(*packed, *ends, **options)
        given = out, None, *packed, out, lse, *ends
        return *grads, *FA.attention_varlen_backward(*given, **options)

    expected = run()
    function, actual, code = compiled(run)
    assert_close(actual, expected)
    assert_close(function(), expected)
    assert len(sites(code)) == 4


def test_gradients_that_there_are_none_of_are_empty():
    q, k, v = qkv()
    out, lse = FA.attention_with_lse(q, k, v)
    given = out, None, q, k, v, out, lse
    site = FA.call_site("attention_backward", "grad_out grad_lse query key value out lse")
    expected = FA.attention_backward(*given)
    assert_close(tuple(site(*given)), expected)
    assert [x.shape for x in site(*given)] == [x.shape for x in expected]


def test_numbers_that_change_are_given_in_each_call():
    def windowed(q, k, v, left):
        return fa_ops.attention(q, k, v, window=(left, left + 1), sinks=torch.ones(4))

    args = qkv()
    function, out, code = compiled(windowed, *args, 2, dynamic=True)
    (site,) = sites(code)
    assert site.startswith("('attention', 'query key value sinks window_left window_right'")
    for left, keys in itertools.product((1, 2, 4), (7, 8, 9, 7)):
        args = qkv(keys=keys)
        assert_close(function(*args, left), windowed(*args, left))


def test_settings_are_those_of_the_moment(monkeypatch):
    """The backend, and whether gradients are deterministic, in a graph that does not know them."""
    log = []
    for name in ("reference", "cpu"):
        module = dispatch.load(name)

        def plan(call, name=name, plan=module.plan):
            log.append((name, call.is_backward, call.options.deterministic))
            return plan(call)

        monkeypatch.setattr(module, "plan", plan)
    args = qkv()
    out, lse = fa_ops.attention(*args, return_lse=True)
    grad = torch.ones_like(out)
    planning.forget()
    log.clear()
    forward = FA.call_site("attention", "query key value")
    backward = FA.call_site("attention_backward", "grad_out grad_lse query key value out lse")
    for _ in range(2):
        for context in (nullcontext(), fa_ops.use_backend("reference")):
            with context:
                forward(*args)
                backward(grad, None, *args, out, lse)
    torch.use_deterministic_algorithms(True)
    try:
        backward(grad, None, *args, out, lse)
    finally:
        torch.use_deterministic_algorithms(False)
        planning.forget()
    assert log == [
        ("cpu", False, False), ("cpu", True, False), ("reference", False, False),
        ("reference", True, False), ("cpu", True, True),
    ]  # fmt: skip


def test_geometries_are_told_apart(monkeypatch):
    """Every geometry has a plan of its own, which returns its geometry."""
    q, k, v = qkv()
    lens, latent = torch.tensor([3, 5], dtype=torch.int32), rand(2, 4, 7, 12)
    every_second = lens.repeat_interleave(2)[::2]
    calls = [
        (q, k, v, lens), (q, k[:, :, 1:], v[:, :, 1:], lens), (q, k, latent[..., :8], lens),
        (q, k, k[..., :4], lens), (q, k, k.clone()[..., :4], lens), (q[:1], k[:1], v[:1], lens[:1]),
        (q.double(), k.double(), v.double(), lens), (q, k, v, every_second),
        tuple(x.bfloat16() for x in (q, k, v)) + (lens,),
    ]  # fmt: skip
    calls += [(*halves, halves[1][..., :4], lens) for halves in [[x.bfloat16() for x in (q, k)]]]
    plans = {}

    def prepared(key):
        run = lambda *_: (key,)  # noqa: E731
        return plans.setdefault(key, planning.Prepared(run, None, None, (), None))

    monkeypatch.setattr(planning, "prepared", prepared)
    key_of, found = planning.key_of, []
    monkeypatch.setattr(planning, "key_of", lambda *args: found.append(key_of(*args)) or found[-1])
    forward = FA.call_site("attention", "query key value kv_lens")
    names = "grad_out grad_lse query key value out lse kv_lens"
    backward = FA.call_site("attention_backward", names, results=3)

    def run(site, q, k, v, lens):
        if site is forward:
            return site(q, k, v, lens)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        return site(out, None, q, k, v, out, out[..., 0], lens)[0]

    for site in (forward, backward):
        keys = []
        for call in calls:
            recognition.last_calls.clear()
            keys.append(run(site, *call))
        assert len(set(keys)) == len(calls)
        for first, second in itertools.product(range(len(calls)), repeat=2):
            for at in (first, second, first):
                assert run(site, *calls[at]) == keys[at]
    recognition.last_calls.clear()


class Log(TorchDispatchMode):
    """Notes every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_watchers_see_operators():
    args = qkv(requires_grad=True)
    site = FA.call_site("attention", "query key value", is_causal=True)
    out = site(*args)  # records a gradient
    (grad,) = torch.autograd.grad(out.sum(), args[0])
    expected = fa_ops.attention(*args, is_causal=True)
    assert_close(out, expected)
    assert_close(grad, torch.autograd.grad(expected.sum(), args[0])[0])
    with torch.no_grad():
        assert not site(*args).requires_grad
        with Log() as log:
            site(*args)
        assert log.seen == ["fa::attention"]
        with torch.profiler.profile() as profile:
            site(*args)
        assert "fa::attention" in {event.name for event in profile.events()}
        assert_close(torch.vmap(site)(*[x.unsqueeze(0) for x in args])[0], expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert site(*args).dtype is torch.bfloat16
    assert site(*args).requires_grad


def test_errors_are_the_operators():
    q, k, v = qkv()
    site = FA.call_site("attention", "query key value")
    site(q, k, v)
    out, lse = FA.attention_with_lse(q, k, v)
    backward = FA.call_site("attention_backward", "grad_out grad_lse query key value out lse")
    backward(out, None, q, k, v, out, lse)
    for bad in ((q, k[..., :4], v), (q, k, v[:, :, 1:]), (q, k.double(), v), (q[0], k, v)):
        for call, operator, given in (
            (site, FA.attention, bad),
            (backward, FA.attention_backward, (out, None, *bad, out, lse)),
        ):
            messages = []
            for run in (call, call, operator):
                with pytest.raises((ValueError, TypeError)) as error:
                    run(*given)
                messages.append(str(error.value))
            assert len(set(messages)) == 1, messages


def test_a_cache_that_is_written_to():
    caches = [rand(2, 2, 16, 8) for _ in range(2)]
    new, q = [rand(2, 2, 1, 8) for _ in range(2)], rand(2, 4, 1, 8)

    def step(q, k_cache, v_cache, k, v, kv_lens):
        return fa_ops.attention_with_kv_cache(q, k_cache, v_cache, kv_lens, key=k, value=v)

    copies = [x.clone() for x in caches]
    run = None
    for length in (3, 4, 5):
        lens = torch.tensor([length, 2 * length], dtype=torch.int32)
        expected = step(q, *copies, *new, lens)
        version = caches[0]._version
        if run is None:
            run, out, code = compiled(step, q, *caches, *new, lens)
            given = "query key_cache value_cache key value kv_lens"
            assert sites(code) == [f"('attention_with_kv_cache_append', '{given}', results=1)"]
        else:
            out = run(q, *caches, *new, lens)
        assert_close(out, expected)
        assert_close(caches, copies)
        assert caches[0]._version > version
    site = FA.call_site("attention_with_kv_cache_append", given)
    for _ in range(2):
        versions = [x._version for x in caches]
        site(q, *caches, *new, lens)
        assert [x._version for x in caches] == [n + 1 for n in versions]


def test_reading_a_cache_and_products_of_8_bits():
    q, cache, lens = rand(2, 4, 1, 16), rand(2, 2, 9, 16), torch.tensor([3, 9], dtype=torch.int32)

    def run(q, cache, lens):
        out = fa_ops.attention_with_kv_cache(q, cache, cache, lens, num_splits=2)
        return out, fa_ops.quantized_attention(q, cache, cache, qk_dtype=torch.float8_e4m3fn)

    expected = run(q, cache, lens)
    function, out, code = compiled(run, q, cache, lens)
    assert_close(out, expected)
    assert_close(function(q, cache, lens), expected)
    assert [site.split("'")[1] for site in sites(code)] == [
        "attention_with_kv_cache", "quantized_attention",
    ]  # fmt: skip
    assert "qk_dtype=torch.float8_e4m3fn" in code


def test_subgraphs_define_their_sites_in_the_module():
    def model(choose, q, k, v):
        causal, full = (lambda *x, c=c: fa_ops.attention(*x, is_causal=c) for c in (True, False))
        return torch.cond(choose, causal, full, (q, k, v))

    args = qkv()
    function, out, code = compiled(model, torch.tensor(True), *args)
    assert_close(out, fa_ops.attention(*args, is_causal=True))
    assert_close(function(torch.tensor(False), *args), fa_ops.attention(*args))
    names = re.findall(r"^(\w+) = torch.ops.fa.call_site", code, re.MULTILINE)
    assert len(names) == len(set(names)) == 2 and "\nimport fa_ops\n" in code


# torch has no asserts in generated graphs, and fails where they are on
GRAPH = {"fx_wrapper": True, "alignment_asserts": False, "size_asserts": False}


@pytest.mark.parametrize("options", [GRAPH, {"generate_intermediate_hooks": True}])
def test_other_ways_to_write_code(options):
    """A generated graph calls the operator."""
    args = qkv()
    with config.patch(**options):
        function = torch.compile(lambda *args: fa_ops.attention(*args), fullgraph=True)
        function(*args)
        assert_close(function(*args), fa_ops.attention(*args))


def test_generated_cpp_calls_the_operator():
    args = qkv()
    with config.patch(cpp_wrapper=True):
        function, out, code = compiled(lambda *args: fa_ops.attention(*args), *args)
        assert_close(out, fa_ops.attention(*args))
        assert_close(function(*args), fa_ops.attention(*args))
    assert sites(code) == [] and re.search(r"\bfa(::|\.)attention\b", code)


def test_code_from_the_cache_runs_in_a_new_process(tmp_path):
    """Without a compilation, where the first process has left the code."""
    code = """
import torch, fa_ops
from torch._dynamo.utils import counters

@torch.compile(fullgraph=True)
def f(q, k, v):
    return fa_ops.attention(q, k, v, is_causal=True)

args = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
for _ in range(2):
    out = f(*args)
    grads = torch.autograd.grad(out, args, torch.ones_like(out))
out = fa_ops.attention(*args, is_causal=True)
torch.testing.assert_close(grads, torch.autograd.grad(out, args, torch.ones_like(out)))
found = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
print(found > 0, len([x for x in fa_ops.plans.recognition.last_calls
                      if type(x[0]).__name__.endswith("CallSite")]))
"""
    off = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
    env = {n: x for n, x in os.environ.items() if n != off} | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)
    }
    for expected in ("False 2\n", "True 2\n"):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.stdout == expected, done.stderr
