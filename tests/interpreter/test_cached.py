"""Many queries against a cache in the interpreter (TRITON_INTERPRET=1): who attends them."""

import importlib

import pytest
import torch

from fa_ops import dispatch
from fa_ops.backends import cpu, reference, triton
from fa_ops.backends.triton import launch
from fa_ops.ops import prepared
from fa_ops.testing.caches import CacheCase, assert_cache_close, call
from fa_ops.types import writes

cached = importlib.import_module("fa_ops.backends.triton.cached")

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]

MANY = {"B": 2, "Hq": 32, "Hkv": 2, "Sq": 64, "S": 90}
FEATURES = {
    "full": {"lens": (90, 20)},
    "causal, a row of fewer keys than queries": {"is_causal": True, "lens": (90, 20)},
    "no keys": {"lens": (0, 3), "sinks": True},
    "append": {"new": 64, "is_causal": True, "lens": (26, 0)},
    "append and turn": {"new": 20, "is_causal": True, "rotary": 8, "lens": (70, 30)},
    "options": {
        "new": 5, "is_causal": True, "window": (30, 2), "softcap": 3.0, "alibi": "batch_heads",
        "sinks": True, "scale": 0.4, "D": 40, "Dv": 24, "bshd": False,
    },
}  # fmt: skip


@pytest.fixture
def dense(monkeypatch):
    """Calls of the forward kernel."""
    calls, real = [], cached.forward
    monkeypatch.setattr(cached, "forward", lambda *args: calls.append(args) or real(*args))
    return calls


@pytest.mark.parametrize("name", FEATURES)
def test_a_contiguous_cache_is_attended_by_the_forward_kernel(name, dense):
    assert_cache_close(CacheCase(**MANY | FEATURES[name]), "triton")
    assert len(dense) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"Sq": 16}, {"Sq": 63}, {"Hq": 30}, {"page_size": 16}, {"num_splits": 2},
        {"batch_invariant": True}, {"unified_max": 1.0}, {"ranges": True},
        {"fp8": True, "dtype": torch.float16},
    ],
    ids=str,
)  # fmt: skip
def test_other_caches_use_the_decoding_kernels(changes, dense, monkeypatch):
    other = object()
    monkeypatch.setattr(cached.decode, "cache_forward", lambda *args: other)
    assert cached.cache_forward(*CacheCase(**MANY | changes).fresh()) is other and not dense


@pytest.mark.parametrize("changes", [{}, {"rotary": 8, "interleaved": True}, {"page_size": 8}])
def test_one_backend_writes_and_another_attends(changes, monkeypatch):
    """As on Hopper, whose own kernels do not write."""
    case = CacheCase(**MANY | {"new": 20, "is_causal": True, "lens": (70, 30)} | changes)
    asked, real = [], triton.cache_write

    def select(q, k, v, cache, spec):
        return triton if writes(cache) else cpu

    monkeypatch.setattr(dispatch, "select_cache", select)
    monkeypatch.setattr(triton, "cache_write", lambda *args: asked.append(args) or real(*args))
    monkeypatch.setattr(triton, "cache_forward", lambda *args: pytest.fail("attended too"))
    prepared._runs.clear(), prepared._ways.clear()
    for times in (1, 2):
        q, k, v, cache, spec = case.fresh()
        out, lse = call(q, k, v, cache, spec)
        q2, k2, v2, cache2, spec2 = case.fresh()
        expected = reference.cached(q2, k2, v2, cache2, spec2)
        torch.testing.assert_close(out, expected[0].float(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse, expected[1].float(), atol=1e-4, rtol=1e-4)
        for found, wanted in ((k, k2), (v, v2)):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)
        assert len(asked) == times


def test_calls_without_writes_call_no_writer(monkeypatch):
    monkeypatch.setattr(dispatch, "select_cache", lambda *_: pytest.fail("asked"))
    assert dispatch.select_writer(*CacheCase(**MANY).fresh()) is None
    assert dispatch.select_writer(*CacheCase(new=1, lens=(3, 4)).fresh()) is None
