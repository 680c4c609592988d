"""Repeated eager calls are recognised by comparing tensors with those of the last call."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import fa_ops
from fa_ops.call.call import DENSE
from fa_ops.call.options import NO_OPERANDS, Operands, operand_set
from fa_ops.functions.attention import DENSE_FUNCTION
from fa_ops.functions.kv_cache import _CACHED
from fa_ops.ops import eager, library
from fa_ops.ops.library import Route
from fa_ops.plans import planning, recognition

NO_SET = operand_set(NO_OPERANDS)
SCALARS = (False, 0.0, None, -1, -1, 0.0, False, None)


def rand(*shape, **options):
    return torch.randn(shape, **options)


Q, K, V = rand(2, 2, 5, 8), rand(2, 2, 7, 8), rand(2, 2, 7, 8)
LENS = torch.tensor([3, 7], dtype=torch.int32)
SOME = NO_OPERANDS._replace(kv_lens=LENS)
HALVES = [x.bfloat16() for x in (Q, K, V)]
# Calls of one kind that are not alike: query, key, value, optional tensors, scalars.
CALLS = {
    "plain": (Q, K, V, NO_OPERANDS, SCALARS),
    "other length": (Q, K[:, :, :6], V[:, :, :6], NO_OPERANDS, SCALARS),
    "other strides": (Q, K.transpose(1, 2).contiguous().transpose(1, 2), V, NO_OPERANDS, SCALARS),
    "other dtype": (*HALVES, NO_OPERANDS, SCALARS),
    "needs gradients": (Q.clone().requires_grad_(), K, V, NO_OPERANDS, SCALARS),
    "parameters": (torch.nn.Parameter(Q), K, V, NO_OPERANDS, SCALARS),
    "a tensor twice": (Q, K, K, NO_OPERANDS, SCALARS),
    "values in keys": (Q, K, K[..., :4], NO_OPERANDS, SCALARS),
    "narrow values": (Q, K, K.clone()[..., :4], NO_OPERANDS, SCALARS),
    "values in keys, bfloat16": (*HALVES[:2], HALVES[1][..., :4], NO_OPERANDS, SCALARS),
    "narrow values, bfloat16": (*HALVES[:2], HALVES[2][..., :4], NO_OPERANDS, SCALARS),
    "no strides": (Q, K.to_sparse(), V, NO_OPERANDS, SCALARS),
    "negated": (Q, K, torch.complex(V, V).conj().imag, NO_OPERANDS, SCALARS),
    "lengths": (Q, K, V, SOME, SCALARS),
    "sinks": (Q, K, V, NO_OPERANDS._replace(sinks=rand(2)), SCALARS),
    "lengths and sinks": (Q, K, V, SOME._replace(sinks=rand(2)), SCALARS),
    "causal": (Q, K, V, NO_OPERANDS, (True, *SCALARS[1:])),
    "1 for a bool": (Q, K, V, NO_OPERANDS, (1, *SCALARS[1:])),
    "an option of another type": (Q, K, V, NO_OPERANDS, (False, 0, *SCALARS[2:])),
    "an option that has no hash": (Q, K, V, NO_OPERANDS, ([], *SCALARS[1:])),
    "no tensor": (Q, None, V, NO_OPERANDS, SCALARS),
}  # fmt: skip


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Every geometry has a plan of its own."""
    plans = {}

    def prepared(key):
        if key is None or any(type(x) is list for x in key[14]):
            return None
        return plans.setdefault(key, planning.Prepared(None, DENSE, None, (), NO_SET))

    monkeypatch.setattr(planning, "prepared", prepared)
    return plans


def fresh(*call):
    """What is found without any earlier call."""
    recognition.last_calls.clear()
    return eager.find(DENSE_FUNCTION, *call)


@pytest.mark.parametrize("first", CALLS)
def test_calls_that_are_not_alike_are_told_apart(first):
    for second in CALLS:
        expected = fresh(*CALLS[second])
        recognition.last_calls.clear()
        for name in (first, first, second, second, first, second):
            found = eager.find(DENSE_FUNCTION, *CALLS[name])
            if name == second:
                assert found.route is expected.route and found.plan is expected.plan, second


def test_settings_tell_calls_apart(monkeypatch):
    call = CALLS["needs gradients"]

    def found():
        return [eager.find(DENSE_FUNCTION, *call) for _ in range(3)]

    recorded = found()
    with torch.no_grad():
        direct = found()
    assert [x.route for x in recorded + direct] == [Route.RECORD] * 3 + [Route.DIRECT] * 3
    with torch.autocast("cpu", torch.bfloat16):
        assert {x.route for x in found()} == {Route.AUTOCAST}
        with library.without_autocast():
            assert {x.route for x in found()} == {Route.RECORD}
    with torch.profiler.profile():
        assert {x.route for x in found()} == {Route.DISPATCH}
    with fa_ops.use_backend("cpu"):
        chosen = found()
    plans = [recorded[0].plan, chosen[0].plan]
    assert plans[0] is not plans[1] and found()[0].plan is plans[0]


def test_the_precision_of_products_tells_calls_apart_but_on_cpus(monkeypatch):
    for device, plans in (("meta", 2), ("cpu", 1)):
        call = DENSE_FUNCTION, *(x.to(device) for x in (Q, K, V)), NO_OPERANDS, SCALARS
        found = [eager.find(*call).plan for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="other"))
            found += [eager.find(*call).plan for _ in range(2)]
        assert len(set(map(id, found))) == plans, device


def test_calls_without_gradients_have_no_plan_that_records():
    found = eager.find(_CACHED, *CALLS["needs gradients"][:3], Operands(kv_lens=LENS), SCALARS)
    assert found == (Route.RECORD, None, None)


@pytest.mark.parametrize(
    "names",
    [("plain",), ("a tensor twice",), ("values in keys, bfloat16",), ("lengths and sinks",),
     ("needs gradients",), ("plain", "causal"), ("plain", "lengths")],
)  # fmt: skip
def test_repeated_calls_describe_no_geometry(monkeypatch, names):
    calls = [CALLS[name] for name in names]
    for call in calls:
        eager.find(DENSE_FUNCTION, *call)
    monkeypatch.setattr(planning, "key_of", None)
    for call in calls * 2:
        again = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad)
                 for t in call[3]]  # fmt: skip
        tensors = call[3] if call[3] is NO_OPERANDS else type(call[3])(*again)
        assert eager.find(DENSE_FUNCTION, *call[:3], tensors, call[4]).plan is not None


def test_tensors_of_another_type_are_recognised_after_two_calls(monkeypatch):
    for name in ("needs gradients", "needs gradients", "parameters", "parameters"):
        eager.find(DENSE_FUNCTION, *CALLS[name])
    monkeypatch.setattr(planning, "key_of", None)
    assert eager.find(DENSE_FUNCTION, *CALLS["parameters"]).route is Route.RECORD


def test_alternating_geometries_are_compared_with_tests_that_exist(monkeypatch):
    made, like = [], recognition.like_call
    monkeypatch.setattr(
        recognition, "like_call", lambda *tensors: made.append(tensors) or like(*tensors)
    )
    names = itertools.islice(itertools.cycle(("plain", "other length")), 10)
    for name in names:
        eager.find(DENSE_FUNCTION, *CALLS[name])
    assert len(made) == 2


def test_a_test_of_tensors_given_several_times():
    x, y, z = rand(3), rand(3), rand(4)
    matches = recognition.like(x, y, x, None, x)
    assert matches(x, y, x, None, x) and matches(y, x, y, None, x)
    for others in ((z, y, x, None, x), (x, y, z, None, x), (x, y, x, None, z), (x, y, x, x, x),
                   (x, y, x, None, None)):  # fmt: skip
        assert not matches(*others)
