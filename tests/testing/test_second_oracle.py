"""The reference against a second oracle that shares no code with it, on random cases.

FA_OPS_ORACLE_DRAWS=10000 pytest tests/testing/test_second_oracle.py            more cases
FA_OPS_ORACLE_DRAWS=10000 FA_OPS_ORACLE_SEED=7 pytest ...               other cases

A failure prints the number of the case: `random_small_case(number)` recreates it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.call.call import Call, attention_call
from fa_ops.testing import CacheCase, PackedCase, random_calls
from tests.testing import second_oracle

DRAWS = int(os.environ.get("FA_OPS_ORACLE_DRAWS", "150"))
SEED = os.environ.get("FA_OPS_ORACLE_SEED", "0")
PARTS = 10  # the draws are divided among so many tests, which run in parallel
KINDS = ("dense", "packed", "dense", "cached", "dense")
MAX_ROWS = 600  # rows of scores in a case, as the second oracle computes one at a time


def random_small_case(number: int) -> random_calls.AnyCase:
    """Case `number`, in float64 unless it is cached, with at most `MAX_ROWS` rows of scores."""
    kind = KINDS[number % len(KINDS)]
    dtypes = (torch.float32, torch.bfloat16) if kind == "cached" else (torch.float64,)
    for attempt in range(1000):
        pick = random.Random(f"{SEED}.{number}.{attempt}").choice
        case = random_calls.family(pick, kind, dtypes).case(pick)
        if isinstance(case, CacheCase):
            small = case.B * case.Hq * case.Sq <= MAX_ROWS and case.B * case.S <= MAX_ROWS
            if small and not case.broken:
                return dataclasses.replace(case, poison=None)
            continue
        rows = (
            case.Hq * case.B * case.Sq
            if kind == "dense"
            else case.features.Hq * sum(case.lengths_q)
        )
        if rows <= MAX_ROWS:
            return _without_poison(case)
    raise LookupError(f"found no small case for number {number}")


def _without_poison(case):
    """Remove NaN and Inf, as results of rows that attend them are not specified."""
    if isinstance(case, PackedCase):
        return dataclasses.replace(case, features=_without_poison(case.features))
    return dataclasses.replace(case, poison=None)


def solve(case, second: bool) -> dict[str, torch.Tensor]:
    """Results and gradients by name, by the second oracle or by the reference."""
    call = case.fresh(requires_grad=True)
    features, t = getattr(case, "features", case), call.operands
    inputs = dict(zip("qkv", call[:3]), attn_mask=t.attn_mask, sinks=t.sinks)
    if isinstance(case, PackedCase):
        ends_q, ends_k = case.meaning()
        call = call.changed(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
        lengths = zip(ends_q.diff().tolist(), ends_k.diff().tolist())
        if second:
            dropped = [_dropped((1, features.Hq, *n), call, b) for b, n in enumerate(lengths)]
            out, lse = second_oracle.packed(call, dropped)
        else:
            out, lse = reference.varlen(call)
    elif second:
        dropped = _dropped((case.B, case.Hq, case.Sq, case.Sk), call, 0)
        out, lse = second_oracle.dense(call, dropped)
    else:
        out, lse = reference.dense(call)
    wanted = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    grad_out, grad_lse = case.grad_outputs(out, lse)
    pairs = [(out, grad_out), (lse.masked_fill(lse == -math.inf, 0.0), grad_lse)]
    pairs = [(x, grad) for x, grad in pairs if x.requires_grad]  # some do not, if no row has keys
    options = {"allow_unused": True, "materialize_grads": True}
    outputs, seeds = zip(*pairs) if pairs else ((), ())
    grads = torch.autograd.grad(outputs, list(wanted.values()), seeds, **options)
    results = {"out": out, "lse": lse} | {f"grad_{n}": g for n, g in zip(wanted, grads)}
    return {name: x.detach() for name, x in results.items()}


def _dropped(shape: tuple, call: Call, first_batch: int):
    """The factors that dropout applies; docs/semantics.md does not specify which are zero."""
    if not call.options.dropout_p:
        return None
    *rows, Sk = shape
    dense = call._replace(query=torch.empty(*rows, 1), key=torch.empty(1, 1, Sk, 1))
    return reference.dropout_factor(dense, first_batch)


def solve_cached(case: CacheCase, second: bool) -> dict[str, torch.Tensor]:
    call = case.fresh()
    out, lse = (second_oracle if second else reference).cached(call)
    caches = {"key_cache": call.key.double(), "value_cache": call.value.double()}
    return {"out": out, "lse": lse} | caches


@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_two_oracles_agree(part):
    for number in range(part, DRAWS, PARTS):
        case = random_small_case(number)
        function = solve_cached if isinstance(case, CacheCase) else solve
        actual, expected = function(case, second=False), function(case, second=True)
        assert actual.keys() == expected.keys()
        for name, x in actual.items():
            y = expected[name]
            if name.startswith("grad") and getattr(case, "features", case).integers:
                continue  # with such large scores, gradients are rounding errors
            finite = y[torch.isfinite(y)].abs()
            size = max(1.0, float(finite.max())) if finite.numel() else 1.0
            torch.testing.assert_close(
                x, y, rtol=0, atol=1e-10 * size, equal_nan=True,
                msg=lambda text, name=name, number=number, case=case: (
                    f"draw {number}, {case}: {name}: {text}"
                ),
            )  # fmt: skip


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window_left": 2}, {}], ids=str)
def test_nan_and_inf_affect_only_rows_that_attend_them(number, options):
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    v[0, 1, 6, 2] = float(number)
    call = attention_call(q, k, v, **options)
    for out, _ in (reference.dense(call), second_oracle.dense(call)):
        out = out.isfinite().all(-1)
        attended = reference.keep_mask(call)[0, 0, :, 6]
        assert torch.equal(out[0, 1], ~attended) and out[0, 0].all()
