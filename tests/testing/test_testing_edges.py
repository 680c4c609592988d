"""`fa_ops.testing` finds planted defects: writes outside tensors, NaN leaks, missing refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.backends import cpu, reference
from fa_ops.call import cache_checks, checks
from fa_ops.call.call import Plan
from fa_ops.testing import Arena, CacheCase, PackedCase, assert_right, make_case
from fa_ops.testing import caches as broken_caches
from fa_ops.testing.inputs import GRAD_LAYOUTS, LAYOUTS, rearranged

CASE = make_case(is_causal=True)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 5, 8), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_placed_tensors_keep_values_and_strides(shape, dtype):
    arena, x = Arena(), torch.randint(2, shape).to(dtype)
    x = x.transpose(0, -1)
    y = arena.placed(x)
    assert torch.equal(x, y) and x.stride() == y.stride() and y._base is None
    assert y.data_ptr() % 16 == 0
    arena.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_placed_tensors_keep_overlapping_strides(layout):
    q = make_case(layout=layout).fresh().query
    placed = Arena().placed(q)
    assert torch.equal(q, placed) and q.stride() == placed.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_without_tokens(layout):
    call = make_case(layout=layout, Sq=0).fresh()
    q, k = call[:2]
    assert q.shape == (2, 4, 0, 16) and k.shape == (2, 2, 47, 16)


@pytest.mark.parametrize("layout", GRAD_LAYOUTS)
def test_layouts_of_gradients(layout):
    x = torch.randn(2, 3, 4, 5)
    y = rearranged(layout, x)
    assert y.shape == x.shape and y.flatten()[0] == x.flatten()[0]
    assert y.is_contiguous() == (layout == "bhsd")
    repeated = {"ones": (0, 0), "rows": (0, 1), "frames": (1, 1)}
    assert layout not in repeated or y.stride()[2:] == repeated[layout]


@pytest.mark.parametrize("where", ["before", "after", "inside"])
def test_an_arena_finds_overwritten_memory(where):
    arena = Arena()
    x = arena.placed(torch.zeros(4, 4))
    flat = torch.as_strided(x, (18,), (1,), x.storage_offset() - 1)
    flat[{"before": 0, "inside": 5, "after": 17}[where]] = 1.0
    words = {"inside": "of a tensor"}.get(where, f"{where} a tensor")
    with pytest.raises(AssertionError, match=rf"bytes {words} .* were overwritten"):
        arena.check()
    arena.check()  # the first check dropped all buffers


def run_otherwise(monkeypatch, change):
    """Forward passes of the CPU backend are run by `change(run)`."""
    plan_of = cpu.plan

    def plan(call):
        plan = plan_of(call)
        if call.is_backward:
            return plan
        return plan._replace(prepare=lambda call: change(plan.prepare(call)))

    monkeypatch.setattr(cpu, "plan", plan)


def test_writes_after_a_result_are_found(monkeypatch):
    def with_write(run):
        def forward(*args):
            out, lse = run(*args)
            placed = torch.empty_like(out).copy_(out)
            end = placed.storage_offset() + placed.numel()
            torch.as_strided(placed, (1,), (1,), end).fill_(1.0)
            return placed, lse

        return forward

    run_otherwise(monkeypatch, with_write)
    with pytest.raises(AssertionError, match="4 bytes after a tensor of .* were overwritten"):
        assert_right(CASE, "cpu", Arena())


@pytest.mark.parametrize("backend", ["hopper", "triton", "cpu"])
def test_every_allocation_function_is_replaced(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    arena = Arena()
    with arena.outputs(backend):
        if backend == "hopper":
            from fa_ops.backends.hopper import backward, decode
            from fa_ops.backends.hopper import forward as dense_forward
            from fa_ops.backends.hopper.runtime import launch

            for module in (backward, dense_forward, launch, decode):
                assert module.empty.__wrapped__ is not None
        if backend == "triton":
            from fa_ops.backends.triton.launch import empty

            empty((2, 3), (3, 1), torch.float32, -1)
        x = torch.zeros(3)
        new = torch.empty(2), torch.empty_like(x), x.new_empty(4), torch.empty_strided((2,), (1,))
        for y in new:
            assert y.storage_offset() > 0
    assert len(arena._buffers) == 4 + (backend == "triton")
    assert torch.empty(2).storage_offset() == 0


POISONED = [
    dataclasses.replace(CASE, poison=f"{number} {operand}", **more)
    for number in ("nan", "inf")
    for operand, more in {
        "query": {}, "key": {}, "value": {}, "grad_out": {}, "sinks": {"sinks": True},
        "alibi_slopes": {"alibi": "heads"}, "attn_mask": {"mask": "float"},
    }.items()
]  # fmt: skip


@pytest.mark.parametrize("case", POISONED, ids=lambda case: case.poison)
def test_nan_and_inf_affect_only_rows_that_attend_them(case):
    assert_right(case, "cpu")
    packed = dataclasses.replace(case, mask=None, seed=4)
    if "mask" not in case.poison:
        assert_right(PackedCase((5, 0, 17, 9), (9, 4, 0, 20), 2, packed), "cpu")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("margin", [0, 2])
def test_inf_in_the_slopes_of_a_sequence_affects_its_rows(seed, margin):
    options = {"alibi": "batch_heads", "kv_lens": True, "poison": "-inf alibi_slopes"}
    features = make_case(D=8, Dv=5, seed=seed, window=(13, -1), **options)
    assert_right(PackedCase((5, 12, 0, 3), (0, 9, 4, 7), margin, features), "cpu")


@pytest.mark.parametrize("operand", ["query", "key", "value"])
@pytest.mark.parametrize("page_size", [0, 8])
def test_nan_in_a_cache_affects_only_rows_that_attend_it(operand, page_size):
    fields = {"page_size": page_size, "is_causal": True, "new": 2, "Sq": 3}
    assert_right(CacheCase(**fields, poison=f"nan {operand}"), "cpu")


def test_leaks_of_nan_are_found(monkeypatch):
    def leaking(call):
        q, k, v = call[:3]
        products = q.double() @ k.double().repeat_interleave(2, 1).mT
        p, lse = reference.weights(reference.modify_scores(products, call), None)
        return (p @ v.double().repeat_interleave(2, 1)).to(q.dtype), lse.to(q.dtype)

    monkeypatch.setattr(cpu, "forward", leaking)
    case = make_case(Sq=40, Sk=40, window=(3, 0), poison="nan value")
    with pytest.raises(AssertionError, match="out: isnan differs"):
        assert_right(case, "cpu")


def test_suppressed_nan_is_found(monkeypatch):
    right = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda call: [x.nan_to_num() for x in right(call)])
    case = dataclasses.replace(CASE, poison="nan query")
    with pytest.raises(AssertionError, match="attends a NaN, but has none"):
        assert_right(case, "cpu")


PACKED = [
    PackedCase((5, 0, 17, 9), (9, 4, 0, 20), 2, make_case(broken=True, seed=seed))
    for seed in range(12)
]
CACHED = [
    CacheCase(broken=True, seed=seed, page_size=8 * (seed % 2), new=seed % 3) for seed in range(12)
]


def is_invalid(case) -> bool:
    """Whether any of the drawn values is invalid."""
    if isinstance(case, PackedCase):
        pairs = zip(case.packing(), case.meaning())
        return any(not torch.equal(x, y) for x, y in pairs)
    return broken_caches.first_invalid_value(case.fresh()) is not None


BROKEN = [case for case in (*PACKED, *CACHED) if is_invalid(case)]


def test_most_broken_cases_are_invalid():
    assert len(BROKEN) > 12


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_invalid_lengths_must_be_refused_on_the_cpu(case, monkeypatch):
    assert_right(case, "cpu")
    monkeypatch.setattr(checks, "cu_seqlens", lambda *_: None)
    monkeypatch.setattr(cache_checks, "values", lambda *_: None)
    run_otherwise(monkeypatch, lambda run: lambda q, *_: (q, q))
    with pytest.raises(AssertionError, match="accepted, although .* is wrong"):
        assert_right(case, "cpu")


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_meaning_is_a_valid_packing(case):
    for x, tokens in zip(case.meaning(), (35, 37)):
        assert (x.diff() >= 0).all() and x[0] >= 0 and x[-1] <= tokens
    fa_ops.attention_varlen(*case.fresh()[:3], *case.meaning())


@pytest.mark.parametrize("mask", [None, "float"])
def test_a_result_that_differs_when_repeated_is_found(mask, monkeypatch):
    case, plan, calls = make_case(mask=mask), cpu.plan, []

    def wrong(call):
        planned = plan(call)

        def prepare(call):
            run = planned.prepare(call)

            def later(*args):
                calls.append(args)
                out, lse = run(*args)
                return out + (len(calls) > 2), lse

            return run if call.saved else later

        return Plan(planned.kernel, prepare)

    assert_right(case, "cpu")
    monkeypatch.setattr(cpu, "plan", wrong)
    case = dataclasses.replace(case, Sq=34)
    with pytest.raises(AssertionError, match="differs when the call is repeated"):
        assert_right(case, "cpu")


@pytest.mark.parametrize("seed", range(6))
def test_the_spare_page_has_a_scale(seed):
    """The oracle reads the spare page instead of pages that do not exist."""
    case = CacheCase(
        S=130, new=3, page_size=16, fp8=True, page_scales=True, broken=True, seed=seed,
        dtype=torch.float16,
    )  # fmt: skip
    call, present = broken_caches.valid_call(case.fresh())
    call = broken_caches.with_spare_page(call)
    attend = broken_caches.attend_present(present, reference.dense)
    reference.cached(call, attend)
    t, pages = call.operands, len(call.key)
    assert int(t.page_table.max()) < pages == len(t.k_scale) == len(t.v_scale)


@pytest.mark.parametrize("operand", ["nan key", "inf value"])
def test_poison_fits_heads_whose_values_are_wider(operand):
    for seed in range(6):
        case = CacheCase(B=1, Hq=1, Hkv=1, S=20, D=8, Dv=32, seed=seed, poison=operand)
        assert_right(case, "cpu")


@pytest.mark.parametrize("page_size", [0, 16])
def test_new_keys_of_a_broken_case_are_rotated(page_size):
    case = CacheCase(S=130, new=3, rotary=8, broken=True, lens=(90, 20), page_size=page_size)
    changes = {"kv_lens": torch.tensor([90, 20], dtype=torch.int32)}
    if page_size:
        changes["page_table"] = torch.randperm(18).view(2, 9).int()
    first, second = (case.fresh().changed(**changes) for _ in range(2))
    broken_caches.valid_call(first)
    reference.cached(second)
    for found, expected in zip(first[1:3], second[1:3]):
        torch.testing.assert_close(found, expected, equal_nan=True)
