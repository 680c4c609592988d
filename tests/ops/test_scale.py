"""`scale` as a tensor: its value is read, or an error says what to pass instead."""

from __future__ import annotations

import pytest
import torch

import fa_ops
from fa_ops.plans import planning, recognition
from tests.call.test_python_types import cache, dense, packed, pages

E4M3 = torch.float8_e4m3fn
SCALES = {f"{name}_scale": torch.ones(1) for name in "qkv"}


def eight_bit(given: dict) -> dict:
    return given | {name: given[name].to(E4M3) for name in ("query", "key", "value")} | SCALES


CALLS = {
    "attention": (fa_ops.attention, dense()),
    "attention of e4m3": (fa_ops.attention, eight_bit(dense())),
    "varlen": (fa_ops.attention_varlen, packed()),
    "varlen over pages": (fa_ops.attention_varlen, pages()),
    "varlen of e4m3": (fa_ops.attention_varlen, eight_bit(packed())),
    "cache": (fa_ops.attention_with_kv_cache, cache()),
    "quantized": (fa_ops.quantized_attention, dense()),
}
REMEDY = "multiply query by it, and pass scale=1.0"
DERIVATIVE = f"scale must not require grad, as attention has no gradient by it: {REMEDY}"
UNREADABLE = f"scale must be a number where the value of a tensor cannot be read, .*: {REMEDY}"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_warm", [False, True])
def test_its_value_is_read(name, is_warm):
    function, given = CALLS[name]
    planning.forget()
    wanted = [function(**given, scale=scale) for scale in (0.25, 2.0)]
    assert not torch.equal(*wanted)
    if not is_warm:
        planning.forget()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scale = torch.tensor(0.25, dtype=dtype)
        assert torch.equal(function(**given, scale=scale), wanted[0])
        assert torch.equal(function(**given, scale=scale.fill_(2.0)), wanted[1])
    parameter = torch.nn.Parameter(torch.tensor(2.0))
    with torch.no_grad():
        assert torch.equal(function(**given, scale=parameter), wanted[1])
    assert torch.equal(function(**given, scale=torch.tensor(2)), wanted[1])
    held = [key for key in (*planning._prepared, *recognition.last_calls) if holds_tensor(key)]
    assert held == []


def holds_tensor(key: object) -> bool:
    return torch.is_tensor(key) or (isinstance(key, tuple) and any(map(holds_tensor, key)))


@pytest.mark.parametrize("name", CALLS)
def test_other_tensors_are_refused(name):
    function, given = CALLS[name]
    needs_grad = torch.tensor(0.5, requires_grad=True)
    wrong = "scale must be a number, or a tensor with one and without dimensions, got one of shape "
    for _ in range(2):
        for scale, message in (
            (needs_grad, DERIVATIVE),
            (needs_grad * 2, DERIVATIVE),
            (torch.ones(1), wrong + r"\(1,\) and float32"),
            (torch.tensor(True), wrong + r"\(\) and bool"),
            (torch.tensor(0.5, device="meta"), UNREADABLE),
        ):
            with pytest.raises(TypeError, match=message):
                function(**given, scale=scale)
        with pytest.raises(ValueError, match="scale must be finite, got inf"):
            function(**given, scale=torch.tensor(float("inf")))
        function(**given, scale=torch.tensor(0.5))  # the next round is warm


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_cannot_read_it(name):
    function, given = CALLS[name]
    compiled = torch.compile(
        lambda scale: function(**given, scale=scale), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=UNREADABLE):
        compiled(torch.tensor(0.5))


def test_transforms():
    given, one = dense(), torch.tensor(0.5)

    def call(scale):
        return fa_ops.attention(**given, scale=scale).sum()

    with pytest.raises(TypeError, match=UNREADABLE):
        torch.vmap(call)(torch.rand(3))
    with pytest.raises(TypeError, match=DERIVATIVE):
        torch.func.grad(call)(one)
    with pytest.raises(TypeError, match=DERIVATIVE):
        torch.func.jvp(call, (one,), (one,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(TypeError, match=DERIVATIVE):
        call(torch.autograd.forward_ad.make_dual(one, one))

    def with_own_scale(query):
        return fa_ops.attention(**given | {"query": query}, scale=one.clone()).sum()

    grad = torch.func.grad(with_own_scale)(given["query"])
    query = given["query"].requires_grad_()
    wanted = torch.autograd.grad(fa_ops.attention(**given, scale=0.5).sum(), query)
    torch.testing.assert_close(grad, *wanted)


def test_the_remedy_has_the_gradient():
    given, scale = dense(), torch.tensor(0.5, requires_grad=True)
    query = given.pop("query")
    out = fa_ops.attention(query * scale, **given, scale=1.0)
    key, value = (x.repeat_interleave(2, 1) for x in given.values())
    wanted = (query @ key.mT * scale).softmax(-1) @ value
    torch.testing.assert_close(out, wanted)
    grads = (torch.autograd.grad(x.square().sum(), scale)[0] for x in (out, wanted))
    torch.testing.assert_close(*grads)


def test_explanation_reads_it():
    given = dense().values()
    with_tensor = fa_ops.explain(*given, scale=torch.tensor(0.5))
    assert with_tensor == fa_ops.explain(*given, scale=0.5)
