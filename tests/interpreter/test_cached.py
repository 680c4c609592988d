"""Many queries against a cache in the interpreter (TRITON_INTERPRET=1), and what attends them."""

import importlib

import pytest
import torch

from fa_ops.backends import cpu, quantization, reference, triton
from fa_ops.backends.triton import launch
from fa_ops.call.call import attention_call
from fa_ops.plans import dispatch
from fa_ops.testing import caches as broken_caches
from fa_ops.testing.budget import by_operator
from fa_ops.testing.caches import CacheCase, assert_cache_close

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


def kernel_of(call):
    return triton.plan(call).kernel


@pytest.fixture
def dense(monkeypatch):
    """Calls of the forward kernel."""
    calls = []
    for name in ("forward", "paged_forward"):
        real = getattr(cached, name)
        call = lambda *args, real=real: calls.append(args) or real(*args)  # noqa: E731
        monkeypatch.setattr(cached, name, call)
    return calls


# blocks of 32 keys are parts of pages of 64, and have several smaller ones
PAGES = [("full", 16), ("no keys", 64), ("append", 64), ("append and turn", 5), ("options", 64)]
PAGES += [("causal, a row of fewer keys than queries", 5)]


@pytest.mark.parametrize("name, page_size", [(name, 0) for name in FEATURES] + PAGES)
def test_a_cache_is_attended_by_the_forward_kernel(name, page_size, dense):
    case = CacheCase(**MANY | FEATURES[name], page_size=page_size)
    assert_cache_close(case, "triton")
    assert len(dense) == 1 and kernel_of(case.fresh()).endswith("forward")


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"token_scales": True}, {"page_size": 32}, {"page_size": 8, "page_scales": True},
        {"page_size": 64, "token_scales": True},
        {"page_size": 5, "D": 24, "lens": (9, 60)},
    ],
    ids=str,
)  # fmt: skip
def test_e4m3_caches_are_converted(changes, dense):
    case = CacheCase(**MANY | {"fp8": True, "is_causal": True} | changes)
    call = case.fresh()
    expected = reference.cached(call)
    # queries in float32, as the interpreter has no bfloat16; the operator takes no such call
    for x, y in zip(cached.cache_forward(case.fresh()), expected):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-4)
    assert len(dense) == 1


def test_large_e4m3_caches_are_not_converted(monkeypatch):
    call = attention_call(*CacheCase(**MANY, fp8=True).fresh()[:3], over_cache=True)
    assert cached.attends_whole_rows(call)
    # 90 keys of 2 rows with 2 heads of 32 numbers; the limit is 64 keys, a power of two
    monkeypatch.setattr(quantization, "MAX_CONVERTED_BYTES", 2 * 2 * 90 * 32 * 4)
    assert not cached.attends_whole_rows(call)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("page_size", [32, 8])
def test_pages_that_do_not_exist_are_not_attended(page_size, fp8):
    case = CacheCase(**MANY, page_size=page_size, is_causal=True, lens=(90, 70), fp8=fp8)
    call = case.fresh()
    call.operands.page_table[0, 1], call.operands.page_table[1, 0] = -1, 10**6
    valid, present = broken_caches.valid_call(call)
    attend = broken_caches.attend_present(present, reference.dense)
    expected = reference.cached(broken_caches.with_spare_page(valid), attend)
    for x, y in zip(cached.cache_forward(call), expected):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("poison", ["nan key", "inf value", "nan value"])
@pytest.mark.parametrize("page_size", [64, 16])
def test_invalid_numbers_in_pages_change_only_what_attends_them(page_size, poison, dense):
    case = CacheCase(**MANY, page_size=page_size, is_causal=True, poison=poison)
    assert_cache_close(case, "triton")
    assert len(dense) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"Sq": 16}, {"Sq": 63}, {"Hq": 30}, {"num_splits": 2},
        {"batch_invariant": True}, {"unified_max": 1.0}, {"ranges": True},
        {"fp8": True, "dtype": torch.float16},  # whose products with scales may overflow
        {"page_size": 16, "D": 20, "dtype": torch.float16},  # rows of 40 bytes
    ],
    ids=str,
)  # fmt: skip
def test_other_caches_use_the_decoding_kernels(changes, dense, monkeypatch):
    other = object()
    monkeypatch.setattr(cached.decode, "cache_forward", lambda *args: other)
    case = CacheCase(**MANY | changes)
    assert cached.cache_forward(case.fresh()) is other and not dense
    assert kernel_of(case.fresh()) == "split-KV decoding"


@pytest.fixture
def reader(monkeypatch):
    """The triton backend writes to caches, another one attends: as on Hopper."""
    monkeypatch.setattr(dispatch, "choose", lambda call: triton if call.writes_cache else cpu)


def assert_as_reference(case):
    """Results, and the caches after the call."""
    call, other = case.fresh(), case.fresh()
    for found, wanted in zip(by_operator(call), reference.cached(other)):
        torch.testing.assert_close(found, wanted.float(), atol=1e-4, rtol=1e-4)
    for found, wanted in zip(call[1:3], other[1:3]):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("changes", [{}, {"rotary": 8, "interleaved": True}, {"page_size": 8}])
def test_one_backend_writes_and_another_attends(changes, reader, monkeypatch):
    case = CacheCase(**MANY | {"new": 20, "is_causal": True, "lens": (70, 30)} | changes)
    written, prepare = [], triton.prepare_append

    def prepare_and_note(call):
        write = prepare(call)
        return lambda *args: written.append(args) or write(*args)

    monkeypatch.setattr(triton, "prepare_append", prepare_and_note)
    for name in ("cache_forward", "prepare_cached"):
        monkeypatch.setattr(triton, name, lambda *_: pytest.fail("attended too"))
    for times in (1, 2):
        assert_as_reference(case)
        assert len(written) == times


@pytest.mark.parametrize("changes", [MANY, {"new": 1, "lens": (3, 4)}], ids=["many", "append"])
def test_calls_that_one_backend_runs_are_not_split(changes, reader, monkeypatch):
    monkeypatch.setattr(triton, "prepare_append", lambda call: pytest.fail("split"))
    assert_as_reference(CacheCase(**changes))
