"""Eager calls are planned once, and run by their plan without the dispatcher where they may."""

from __future__ import annotations

import gc
import itertools
import logging
import re
import weakref
from fractions import Fraction

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.backends import cpu
from fa_ops.call.call import CACHED, Plan
from fa_ops.call.options import NO_OPERANDS, Operands, operand_set
from fa_ops.ops import kv_cache, library
from fa_ops.plans import planning

LENS = torch.tensor([3], dtype=torch.int32)
RANGES = torch.tensor([0, 3], dtype=torch.int32).view(1, 1, 1, 2)
SINKS = torch.zeros(2)


class Log:
    """What the CPU backend planned and ran, and how many calls went through an operator."""

    def __init__(self, monkeypatch):
        self.planned, self.ran, self.by_operator = [], [], 0
        plan, run = cpu.plan, planning.run

        def spy_plan(call):
            self.planned.append(call)
            planned = plan(call)

            def prepare(call):
                run = planned.prepare(call)
                return lambda *args: self.ran.append(args) or run(*args)

            return Plan(planned.kernel, prepare)

        def spy_operator(*args, **options):
            self.by_operator += 1
            return run(*args, **options)

        monkeypatch.setattr(cpu, "plan", spy_plan)
        monkeypatch.setattr(planning, "run", spy_operator)


@pytest.fixture(autouse=True)
def log(monkeypatch):
    return Log(monkeypatch)


def qkv(Sk=5, **options):
    return [torch.randn(1, 2, S, 8, **options) for S in (5, Sk, Sk)]


def is_direct(log, *args, **options):
    """Whether a call ran its plan without an operator."""
    before = log.by_operator
    fa_ops.attention(*args, **options)
    return log.by_operator == before


def is_another(*args, **options):
    """Whether no call before had this geometry."""
    before = len(planning._prepared)
    fa_ops.attention(*args, **options)
    return len(planning._prepared) > before


def test_a_call_and_its_repetitions_run_one_plan(log):
    for _ in range(3):
        assert is_direct(log, *qkv())
    assert len(log.planned) == 1 and len(log.ran) == 3
    for _ in range(2):
        assert is_direct(log, *qkv(), is_causal=True, window=(3, 0), softcap=2.0, scale=0.3)
        with torch.inference_mode():
            assert is_direct(log, *qkv())
    assert len(log.planned) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": SINKS},
        {"kv_lens": LENS},
        {"key_ranges": RANGES},
        {"key_ranges": RANGES.expand(1, 1, 5, 2)},
        {"alibi_slopes": SINKS},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool)},
        {"attn_mask": torch.zeros(5, 5)},
        {"return_lse": True},
        {"dropout_p": 0.5},
        {"dropout_p": 0.5, "return_lse": True, "sinks": SINKS},
    ],
    ids=lambda options: " and ".join(options),
)
def test_every_option_runs_a_plan(options, log):
    """With and without gradients."""
    for _ in range(2):
        assert is_direct(log, *qkv(), **options)
    for _ in range(2):
        assert is_direct(log, *qkv(requires_grad=True), **options)
    assert len(log.planned) == 1


def test_packed_calls_run_plans(log):
    q, ends = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    expected = torch.ops.fa.attention_varlen(q, q, q, ends, ends)
    log.by_operator = 0
    for lse, grad in itertools.product((False, True), repeat=2):
        x = q.clone().requires_grad_(grad)
        found = fa_ops.attention_varlen(x, x, x, ends, ends, return_lse=lse)
        out = found[0] if lse else found
        torch.testing.assert_close(out, expected[0])
        if grad:
            out.sum().backward()
    assert not log.by_operator and len(log.planned) == 2  # forward and backward
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cu_seqlens_k\[2\] is 7, but there are 6 tokens"):
            fa_ops.attention_varlen(q, q, q, ends, ends + (ends == 6).int())


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_packed_calls_without_borders_name_them(name):
    q, ends = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    borders = {"cu_seqlens_q": ends, "cu_seqlens_k": ends} | {name: None}
    for x in (q, q.clone().requires_grad_()):
        with pytest.raises(TypeError, match=f"{name} must be a Tensor, got NoneType"):
            fa_ops.attention_varlen(x, q, q, **borders)


def test_what_differs_is_another_call():
    q, k, v = qkv()
    assert is_another(q, k, v) and not is_another(q, k, v)
    for other in (q.double(), q.transpose(1, 2).contiguous().transpose(1, 2), q[:, :, :4]):
        others = (other, k.to(other.dtype), v.to(other.dtype))
        assert is_another(*others)
    assert is_another(q, k, v, is_causal=True)
    assert is_another(q, k, v, scale=0.5)
    with fa_ops.use_backend("reference"):
        assert is_another(q, k, v)
    assert is_another(q, k, v, backend="reference", scale=0.5)


def test_functions_and_operators_share_plans(log):
    q, k, v = qkv()
    fa_ops.attention(q, k, v, is_causal=True, sinks=SINKS, scale=0.5)
    torch.ops.fa.attention(q, k, v, is_causal=True, sinks=SINKS, scale=0.5)
    torch.ops.fa.attention_with_lse(q, k, v, is_causal=True, sinks=SINKS, scale=0.5)
    assert len(log.planned) == 1 and len(log.ran) == 3


@pytest.mark.parametrize(
    "small",
    [
        {"kv_lens": LENS},
        {"key_ranges": RANGES},
        {"sinks": SINKS},
        {"kv_lens": LENS, "key_ranges": RANGES, "sinks": SINKS},
    ],
    ids=" and ".join,
)
def test_small_tensors_repeat_with_other_values(small, log):
    q, k, v = qkv(512)
    fa_ops.attention(q, k, v, **small)
    others = {name: t + 1 for name, t in small.items()}
    fa_ops.attention(q, k, v, **others)
    tensors = log.ran[-1][3]
    assert all(found is others.get(name) for name, found in zip(tensors._fields, tensors))
    assert len(log.planned) == 1
    assert is_another(q, k, v)
    assert is_another(q, k, v, **small, is_causal=True)


def test_small_tensors_are_contiguous_to_a_plan(log):
    q, k, v = qkv()
    strided = torch.stack([RANGES, RANGES], -1)[..., 0]
    assert not strided.is_contiguous()
    expected = fa_ops.attention(q, k, v, key_ranges=RANGES)
    for _ in range(2):
        torch.testing.assert_close(fa_ops.attention(q, k, v, key_ranges=strided), expected)
        assert log.ran[-1][3].key_ranges.is_contiguous()


def test_bad_lengths_and_ranges_are_refused_every_time():
    q, k, v = qkv()
    for _ in range(2):
        with pytest.raises(TypeError, match="kv_lens must be int32"):
            fa_ops.attention(q, k, v, kv_lens=LENS.long())
        with pytest.raises(ValueError, match="key_ranges must have shape"):
            fa_ops.attention(q, k, v, key_ranges=RANGES[0])
        with pytest.raises(TypeError, match="kv_lens must be a Tensor"):
            fa_ops.attention(q, k, v, kv_lens=[3])
    assert not planning._prepared


def test_modes_and_transforms_are_given_the_operator(log):
    q, k, v = qkv()
    assert is_direct(log, q, k, v)
    with FlopCounterMode(display=False) as flops:
        assert not is_direct(log, q, k, v)
    assert flops.get_total_flops() > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert fa_ops.attention(q, k, v).dtype == torch.bfloat16
    with torch.profiler.profile() as profile:
        fa_ops.attention(q, k, v)
    assert "fa::attention" in {event.key for event in profile.key_averages()}
    batched = torch.func.vmap(fa_ops.attention)(*(t[None] for t in (q, k, v)))
    assert batched.shape == (1, *q.shape)
    compiled = torch.compile(fa_ops.attention, backend="eager", fullgraph=True)
    before = log.by_operator
    compiled(q, k, v)
    assert log.by_operator == before + 1


def test_lazily_negated_tensors_are_given_to_the_dispatcher():
    negated = torch.view_as_complex(torch.randn(1, 2, 8, 4, 2)).conj().imag
    same = negated.resolve_neg()
    assert negated.is_neg() and library.route_of(same, negated) is library.Route.DISPATCH
    assert library.route_of(same, same) is library.Route.DIRECT
    expected = torch.ops.fa.attention(same, same, same)
    torch.testing.assert_close(fa_ops.attention(negated, negated, negated), expected)


def test_bad_calls_are_never_kept():
    q, k, v = qkv()
    for _ in range(2):
        with pytest.raises(ValueError, match="head dimension"):
            fa_ops.attention(q, k[..., :4], v)
    with pytest.raises(TypeError, match="window"):
        fa_ops.attention(q, k, v, window=[[], 1])
    with pytest.raises(TypeError, match="scale must be a number"):
        fa_ops.attention(q, k, v, scale=[])
    assert not planning._prepared


@pytest.mark.parametrize(
    "good, bad",
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({}, {"is_causal": 0}),
        ({"window": (3, 0)}, {"window": (3.0, 0)}),
        ({"scale": 1.0}, {"scale": Fraction(1)}),
        ({"softcap": 2.0}, {"softcap": Fraction(2)}),
        ({}, {"dropout_p": None}),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_also_where_it_equals_the_last_calls(good, bad):
    q, k, v = qkv()
    fa_ops.attention(q, k, v, **good)
    (name,) = bad
    with pytest.raises(TypeError, match=name):
        fa_ops.attention(q, k, v, **bad)


def test_windows_are_told_apart_by_what_they_mean():
    q, k, v = qkv()
    assert is_another(q, k, v, window=(3, None))
    assert not is_another(q, k, v, window=[3, -1])
    assert is_another(q, k, v, window=(None, 3))
    for bad in ((), (3,), "3-", 3):
        with pytest.raises(TypeError, match="window must be a pair"):
            fa_ops.attention(q, k, v, window=bad)


def test_layouts_without_sizes_are_refused():
    rows = [torch.randn(2, n, 8) for n in (3, 4)]
    q = torch.nested.nested_tensor(rows, layout=torch.strided)
    with pytest.raises(TypeError, match="query must be a Tensor, or a nested one with"):
        fa_ops.attention(q, q, q)
    with pytest.raises(TypeError, match="kv_lens must be a Tensor, or a nested one with"):
        fa_ops.attention(*qkv(), kv_lens=q)
    with pytest.raises(NotImplementedError, match="fa::attention"):
        torch.ops.fa.attention(q, q, q)


def test_empty_calls_have_a_plan_without_a_backend(log):
    q, k, v = qkv()
    for _ in range(2):
        assert fa_ops.attention(q[:, :, :0], k, v).shape == (1, 2, 0, 8)
        assert not fa_ops.attention(q, k[:, :, :0], v[:, :, :0]).any()
    assert not log.planned and not log.by_operator


def test_only_so_many_plans_are_kept(monkeypatch):
    q, k, v = qkv()
    monkeypatch.setattr(planning, "_LIMIT", 2)
    for n in range(1, 5):
        fa_ops.attention(q[:, :, :n], k, v)
    assert len(planning._prepared) <= 2 and len(planning._plans) <= 2


def test_meta_tensors_have_a_result_and_no_plan():
    for _ in range(2):
        assert fa_ops.attention(*qkv(device="meta")).shape == (1, 2, 5, 8)
    assert not planning._prepared


# Calls over caches

READ, APPEND = kv_cache.READ, kv_cache.APPEND


@pytest.fixture
def cached_calls(monkeypatch):
    """Arguments of runs over caches, and the keys that plans are looked up by."""
    calls, keys = [], []

    def prepared(key):
        keys.append(key)
        return planning.Prepared(
            lambda *args: calls.append(args) or ("out", "lse"), CACHED, None, (),
            operand_set(NO_OPERANDS),
        )  # fmt: skip

    monkeypatch.setattr(planning, "prepared", prepared)
    return calls, keys


OF_OPERANDS = {"key": "new_key", "value": "new_value"}


def test_a_cached_call_hands_its_tensors_over(cached_calls):
    calls, _ = cached_calls
    q, k, v = qkv(512)
    call = fa_ops.attention_with_kv_cache
    assert call(q, k, v, LENS) == "out"
    table = torch.zeros(1, 4, dtype=torch.int32)
    assert call(q, k, v, LENS, table, return_lse=True) == ("out", "lse")
    assert calls == [
        (q, k, v, Operands(kv_lens=LENS), False),
        (q, k, v, Operands(kv_lens=LENS, page_table=table), True),
    ]
    others = "key_ranges", "alibi_slopes", "sinks", "k_scale", "v_scale", "rotary_cos", "rotary_sin"
    for name in (*others, "unified_max", "key", "value"):
        given = torch.ones(1)
        before = k._version
        call(q, k, v, LENS, **{name: given})
        assert calls[-1] == (
            q,
            k,
            v,
            Operands(kv_lens=LENS, **{OF_OPERANDS.get(name, name): given}),
            False,
        )
        assert k._version == v._version == before + (name == "key")


def test_cached_calls_that_differ_have_keys_of_their_own(cached_calls):
    _, keys = cached_calls
    q, k, v = qkv(512)
    other, call = torch.ones(2, 2), fa_ops.attention_with_kv_cache
    tables = [torch.zeros(1, n, dtype=torch.int32) for n in (4, 5)]
    options = (
        {}, *({"page_table": table} for table in tables), {"page_table": tables[0].long()},
        {"sinks": other}, {"sinks": other.t()[:1]}, {"alibi_slopes": other}, {"key": other},
        {"value": other}, {"sinks": other, "alibi_slopes": other}, {"is_causal": True},
        {"scale": 2.0}, {"window": (1, 2)}, {"softcap": 1.0}, {"num_splits": 2},
        {"batch_invariant": True}, {"rotary_interleaved": True}, {"backend": "cpu"},
        {"is_causal": 1}, {"num_splits": 2.0}, {"batch_invariant": 1}, {"rotary_interleaved": 1},
        {"scale": Fraction(2)}, {"softcap": Fraction(1)},
    )  # fmt: skip
    for one in options:
        call(q, k, v, LENS, **one)
    assert len(set(keys)) == len(keys) == len(options)
    call(q, k, v, LENS + 1, tables[0] + 1)
    assert keys[-1] == keys[1]
    call(q, k, v, LENS, window=[1, 2])
    assert keys[-1] in keys[:-1]
    with pytest.raises(TypeError, match="window must hold ints"):
        call(q, k, v, LENS, window=(1.0, 2))


def test_values_in_keys_are_part_of_a_key(cached_calls):
    _, keys = cached_calls
    q, k, _ = qkv(512)
    call = fa_ops.attention_with_kv_cache
    call(q, k, k[..., :4], LENS)
    call(q, k, k.clone()[..., :4], LENS)
    assert len(set(keys)) == 2


def test_cached_calls_that_require_grad_or_hold_no_tensor_have_no_key(cached_calls):
    _, keys = cached_calls
    q, k, v = qkv(512)
    call = fa_ops.attention_with_kv_cache
    sinks = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="has no gradient"):
        call(q, k, v, LENS, sinks=sinks)
    with pytest.raises(TypeError, match="kv_lens must be a Tensor"):
        call(q, k, v, [3])
    assert not keys and not planning._prepared


def test_functions_and_operators_over_caches_share_plans(log):
    q, k, v = qkv(512)
    new = torch.randn(1, 2, 1, 8)
    before = k._version
    READ(q, k, v, LENS)
    APPEND(q, k, v, new, new, LENS)
    assert k._version == v._version == before + 1
    fa_ops.attention_with_kv_cache(q, k, v, LENS + 1)
    fa_ops.attention_with_kv_cache(q, k, v, LENS + 1, key=new, value=new + 1)
    assert k._version == v._version == before + 2
    assert len(log.planned) == 2 and len(log.ran) == 4
    tensors = log.ran[-1][3]
    assert torch.equal(tensors.kv_lens, LENS + 1) and tensors.new_key is new
    assert torch.equal(k[:, :, 4:5], new) and torch.equal(v[:, :, 4:5], new + 1)


def test_new_keys_without_tokens_are_none_to_a_backend(log):
    q, k, v = qkv(512)
    empty = torch.randn(1, 2, 0, 8)
    expected = fa_ops.attention_with_kv_cache(q, k, v, LENS)
    for _ in range(2):
        found = fa_ops.attention_with_kv_cache(q, k, v, LENS, key=empty, value=empty)
        torch.testing.assert_close(found, expected)
        assert log.ran[-1][3].new_key is None


def test_operator_calls_that_differ_are_not_taken_for_each_other(log):
    q, k, v = qkv(512)
    options = (
        {}, {"scale": 0.5}, {"window_left": 3}, {"window_right": 3}, {"softcap": 2.0},
        {"num_splits": 2}, {"batch_invariant": True}, {"is_causal": True}, {"backend": "cpu"},
        {"sinks": torch.zeros(2)}, {"alibi_slopes": torch.zeros(2)}, {"key_ranges": RANGES},
    )  # fmt: skip
    for one in options * 2:
        READ(q, k, v, LENS, **one)
    assert len(log.planned) == len(options) and len(log.ran) == 2 * len(options)
    with fa_ops.use_backend("reference"):
        READ(q, k, v, LENS)
    assert len(log.ran) == 2 * len(options)


def test_a_kept_operator_call_still_has_no_gradient():
    q, k, v = qkv(512)
    for _ in range(2):
        READ(q, k, v, LENS)
    with pytest.raises(ValueError, match="has no gradient"):
        READ(q.detach().requires_grad_(), k, v, LENS)
    with pytest.raises(ValueError, match="batch size"):
        READ(q, k[:, :, :], v[:0], LENS)


def test_lengths_on_the_cpu_are_checked_every_time():
    q, k, v = qkv(512)
    for _ in range(2):
        for call in (READ, fa_ops.attention_with_kv_cache):
            call(q, k, v, LENS)
            with pytest.raises(ValueError, match="past the"):
                call(q, k, v, LENS + 512)


def test_plans_keep_no_tensor(log):
    """Of the calls that they were made for."""
    q, k, v = qkv()
    mask = torch.zeros(5, 5)
    kept = [weakref.ref(t) for t in (q, k, v, mask)]
    fa_ops.attention(q, k, v, mask)
    fa_ops.attention_with_kv_cache(q, k, v, LENS)
    del q, k, v, mask
    log.planned.clear(), log.ran.clear()
    gc.collect()
    assert planning._prepared and all(ref() is None for ref in kept)


def test_explain_plans_without_running(log):
    q, k, v = qkv(600)
    found = fa_ops.explain(q, k, v, is_causal=True, window=(3, None), dropout_p=0.1)
    assert (found.backend, found.kernel, found.route) == ("cpu", "forward", "direct")
    assert fa_ops.explain(q.clone().requires_grad_(), k, v).route == "record"
    assert fa_ops.explain(q, k, v, kv_lens=LENS, page_table=None).kernel == "cache"
    ends = torch.tensor([0, 5], dtype=torch.int32)
    tokens = [t[0].transpose(0, 1) for t in (q, q, q)]
    assert fa_ops.explain(*tokens, cu_seqlens_q=ends, cu_seqlens_k=ends).backend == "cpu"
    assert not log.ran and not planning._prepared
    new = q[:, :, :1]
    assert fa_ops.explain(q, k, v, kv_lens=LENS, key=new, value=new).kernel == "cache"
    assert fa_ops.explain(q, k, v, backend="triton").backend is None
    assert fa_ops.explain(q[:, :, :0], k, v).kernel == "empty"
    state = torch.get_rng_state()
    fa_ops.explain(q, k, v, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_explain_takes_packed_e4m3_tensors(log):
    q, k, v = (torch.zeros(9, heads, 16, dtype=torch.float8_e4m3fn) for heads in (4, 2, 2))
    ends, one = torch.tensor([0, 4, 9], dtype=torch.int32), torch.ones(())
    scales = dict(q_scale=one, k_scale=one, v_scale=one)
    options = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=5, max_seqlen_k=5) | scales
    found = fa_ops.explain(q, k, v, **options)
    assert (found.backend, found.kernel) == ("cpu", "8-bit forward") and not log.ran
    assert found.reasons["cpu"] is None and found.reasons["hopper"] == "needs a CUDA device"
    pages = torch.zeros(4, 8, 2, 16, dtype=torch.float8_e4m3fn)
    lens, table = torch.tensor([5, 7], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    options |= dict(kv_lens=lens, page_table=table, cu_seqlens_k=None)
    assert fa_ops.explain(q, pages, pages, **options).kernel == "8-bit forward"
    for wrong in (dict(dropout_p=0.5), dict(q_scale=None), dict(kv_lens=None)):
        raised = []
        for call in (fa_ops.explain, fa_ops.attention_varlen):
            with pytest.raises(ValueError) as error:
                call(q, pages, pages, **options | wrong)
            raised.append(str(error.value))
        assert raised[0] == raised[1]


def test_new_plans_are_logged_once_in_the_words_of_explain(caplog):
    caplog.set_level(logging.DEBUG, "fa_ops")
    planning.forget()
    q, k = torch.randn(1, 4, 3, 16, requires_grad=True), torch.randn(1, 2, 9, 16)
    for _ in range(3):
        fa_ops.attention(q, k, k, is_causal=True).sum().backward()
    forward, backward = [record.getMessage().splitlines() for record in caplog.records]
    explained = str(fa_ops.explain(q, k, k, is_causal=True)).splitlines()
    assert forward[0] == "new plan" and set(forward[1:]) < set(explained)
    assert forward[-1] == LAST + "attends keys 0 to 6"
    assert backward == [*forward[:2], "kernel: backward", *forward[3:]]


LAST = "causal, bottom right: query 0 "


@pytest.mark.parametrize(
    "queries, keys, options, last",
    [
        ((2, 8, 4, 16), (2, 2, 16, 16), {"is_causal": True}, LAST + "attends keys 0 to 12"),
        ((2, 8, 4, 16), (2, 2, 4, 16), {"is_causal": True}, LAST + "attends key 0"),
        (
            (1, 2, 5, 16), (1, 2, 2, 16), {"is_causal": True},
            "causal, bottom right: the first 3 of 5 queries attend no key",
        ),
        (
            (1, 4, 3, 16), (1, 2, 9, 16), {"is_causal": True, "kv_lens": LENS},
            LAST + "of a row of n keys attends keys 0 to n - 3",
        ),
        (
            (1, 100, 8, 16), (1, 128, 8, 16), None,
            "hint: 128 heads of 8 tokens: tensors are (B, H, S, D); from (B, S, H, D) pass "
            ".transpose(1, 2)",
        ),
        ((1, 128, 1, 16), (1, 1, 64, 16), {}, "value: 1 row, 1 head, 64 tokens, 16 features"),
    ],
)  # fmt: skip
def test_explain_says_what_dimensions_and_causality_mean(queries, keys, options, last):
    """A layout (B, S, H, D) is hinted at, and decoding with many heads of one latent is not."""
    q, k = torch.randn(queries), torch.randn(keys)
    if options is None:  # as many heads in all, so that the call is legal
        q, options = k, {}
    found = fa_ops.explain(q, k, k, **options)
    assert found.notes[-1] == last and f"\n{last}\n" in str(found)


def test_explain_says_what_packed_tensors_and_pages_are():
    q, ends = torch.randn(9, 4, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    found = fa_ops.explain(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, is_causal=True)
    assert found.notes[0] == "query: 9 tokens, 4 heads, 16 features"
    assert found.notes[-1] == (
        LAST + "of m queries and n keys of a sequence attends keys 0 to n - m"
    )
    pages, table = torch.randn(3, 8, 2, 16), torch.zeros(1, 1, dtype=torch.int32)
    rows = torch.randn(1, 4, 1, 16)
    found = fa_ops.explain(rows, pages, pages, kv_lens=LENS, page_table=table)
    assert found.notes[1] == "key: 3 pages, 8 tokens, 2 heads, 16 features"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"query": None}, TypeError, "query must be a Tensor, got NoneType"),
        ({"key": torch.zeros(1, 2, 5, 4)}, ValueError, "key has head dimension 4"),
        ({"window": 5}, TypeError, "window must be a pair (left, right), got 5"),
        ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
        ({"page": 1}, TypeError, "attention() got an unexpected keyword argument 'page'"),
        ({"cu_seqlens_q": LENS}, TypeError, "attention_varlen: missing a required argument"),
        ({"page_table": None}, TypeError, "attention_with_kv_cache: missing a required argument"),
        ({"kv_lens": LENS, "num_splits": 0.5}, TypeError, "num_splits must be an int, got 0.5"),
        ({"backend": "cuda"}, ValueError, "backend must be 'auto' or one of"),
    ],
    ids=str,
)
def test_explain_raises_what_the_call_would_raise(options, error, message):
    q, k, v = qkv()
    q, k = options.get("query", q), options.get("key", k)
    options = {name: x for name, x in options.items() if name not in ("query", "key")}
    with pytest.raises(error, match=re.escape(message)):
        fa_ops.explain(q, k, v, **options)
