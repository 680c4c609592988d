"""Calls that repeat are refused with the same messages as first calls, once plans exist."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

import fa_ops
from fa_ops.backends import cpu
from fa_ops.call import cache_checks
from fa_ops.call.call import Plan
from fa_ops.plans import planning
from tests.call.test_errors import (
    DENSE,
    FUNCTION_ONLY,
    VARLEN,
    VARLEN_FUNCTION_ONLY,
    ids,
    ints,
    packed,
    rand,
    valid,
)
from tests.ops import test_kv_cache as caches

GOOD = {
    "attn_mask": [rand(5, 7), torch.ones(5, 7, dtype=torch.bool)],
    "is_causal": [True],
    "scale": [1.0, 0.5],
    "window": [(1, 2), (0, None), (None, 0)],
    "softcap": [1.0],
    "alibi_slopes": [rand(4), rand(2, 4)],
    "sinks": [rand(4)],
    "kv_lens": [ints(2)],
    "key_ranges": [ints(1, 1, 5, 2), ints(1, 1, 1, 2)],
    "deterministic": [True],
    "backend": ["cpu", "auto"],
    "dropout_p": [0.5],
}
SINGLE = [{}] + [{name: value} for name, values in GOOD.items() for value in values]
COMBINED = [{"is_causal": True, "scale": 1.0, "softcap": 1.0, "deterministic": True}]


@pytest.fixture(autouse=True)
def nothing_is_computed(monkeypatch):
    """Nothing is computed, and lengths and pages are not read, as on a GPU."""
    result = torch.zeros(1)
    run = lambda *args: (result, result)  # noqa: E731
    monkeypatch.setattr(cpu, "plan", lambda call: Plan("nothing", lambda call: run))
    monkeypatch.setattr(cache_checks, "values", lambda *args: None)


def error_of(call, arguments: dict) -> Exception | None:
    try:
        call(**arguments)
    except Exception as error:
        return error
    return None


def compact(change: dict) -> dict:
    """The change with contiguous tensors."""
    return {n: x.detach().clone(memory_format=torch.contiguous_format) if torch.is_tensor(x) else x
            for n, x in change.items()}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("bad", **ids(DENSE | FUNCTION_ONLY))
def test_attention(bad, grad):
    def call(**arguments):
        for name in ("query", "key", "value"):
            x = arguments[name]
            if torch.is_tensor(x) and x.is_floating_point() and x.dtype.itemsize > 1:
                arguments[name] = x.detach().requires_grad_(grad)
        return fa_ops.attention(**arguments)

    first = error_of(call, valid() | bad.change)
    assert first is not None and not planning._prepared
    for like in (*SINGLE, *COMBINED, compact(bad.change)) * 2:
        error_of(call, valid() | like)
    assert any(planning._prepared.values())
    again = error_of(call, valid() | bad.change)
    assert type(again) is type(first) and str(again) == str(first)
    for like in (*SINGLE, *COMBINED):
        assert error_of(call, valid() | like | bad.change) is not None


GOOD_FOR_PACKED = [
    {}, {"is_causal": True}, {"scale": 1.0}, {"softcap": 1.0}, {"alibi_slopes": rand(2, 4)},
    {"sinks": rand(4)}, {"kv_lens": ints(2)}, {"max_seqlen_q": 1}, {"max_seqlen_k": 2},
    {"deterministic": True}, {"backend": "cpu"},
]  # fmt: skip


def assert_refused_again(call, bad):
    """The same error before and after calls that are legal."""
    first = error_of(call, packed(**bad.change))
    assert first is not None and not planning._prepared
    for like in (*GOOD_FOR_PACKED, compact(bad.change)) * 2:
        error_of(call, packed(**like))
    assert any(planning._prepared.values())
    again = error_of(call, packed(**bad.change))
    assert type(again) is type(first) and str(again) == str(first)
    for like in GOOD_FOR_PACKED:
        assert error_of(call, packed(**like) | bad.change) is not None


@pytest.mark.parametrize("bad", **ids(VARLEN | VARLEN_FUNCTION_ONLY))
def test_attention_varlen(bad):
    assert_refused_again(fa_ops.attention_varlen, bad)


@pytest.mark.parametrize("bad", **ids(VARLEN))
def test_the_operator_of_packed_calls(bad):
    assert_refused_again(torch.ops.fa.attention_varlen, bad)


VALUES = ("page_table[1, 0] is", "kv_lens[", "rotary_cos has 9 positions")  # not checked on a GPU
REFUSED = {
    message: change
    for message, change in (caches.WRONG | caches.WRONG_TYPES).items()
    if not message.startswith(VALUES)
}
GOOD_FOR_CACHES = [
    {}, {"is_causal": True}, {"scale": 1.0}, {"window": (1, 2)}, {"softcap": 1.0},
    {"sinks": rand(4)}, {"alibi_slopes": rand(4)}, {"num_splits": 2}, {"batch_invariant": True},
    {"key": None, "value": None}, {"unified_max": torch.zeros(4)}, {"backend": "cpu"},
]  # fmt: skip


@pytest.mark.parametrize("entry_point", ["function", "operator"])
@pytest.mark.parametrize("message", REFUSED)
def test_attention_with_kv_cache(message, entry_point):
    change = REFUSED[message]
    mode = BaseTorchFunctionMode if entry_point == "operator" else contextlib.nullcontext
    with mode():
        first = error_of(caches.by_function, change)
        assert message in str(first) and not planning._prepared
        case = {"case": change["case"]} if "case" in change else {}
        for like, _ in itertools.product((*GOOD_FOR_CACHES, compact(change)), range(2)):
            error_of(caches.by_function, case | like)
        assert any(planning._prepared.values())
        again = error_of(caches.by_function, change)
    assert type(again) is type(first) and str(again) == str(first)
