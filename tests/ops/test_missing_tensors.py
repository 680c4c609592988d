"""Operators name a tensor that is None, which the dispatcher takes in place of every tensor."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fa_ops.ops import dense, varlen
from fa_ops.testing.caches import CacheCase, arguments
from tests.ops.cases import CASES, dense_call, packed_call, saved_by


def calls() -> dict[str, tuple]:
    """Each operator with the positional arguments of a call."""
    plain, (q, k, v, _, spec) = CASES["plain"], CacheCase(S=20, new=2, Sq=2).fresh()
    args, _ = dense_call(plain)
    packed, _ = packed_call(plain)
    (key, value, lens, *_), _ = arguments(CacheCase(S=20, new=2, Sq=2).fresh()[3], spec)
    rows = torch.zeros(1, 1, 1, dtype=torch.bool)
    states = torch.randn(3, 5, 8), torch.randn(3, 5)
    return {
        "attention": args,
        "attention_with_lse": args,
        "attention_backward": saved_by(dense.WITH_LSE, args, {}),
        "attention_averaging_rows": (*args, {"averaging_rows": rows}),
        "attention_varlen": packed,
        "attention_varlen_backward": saved_by(varlen.VARLEN, packed, {}),
        "attention_with_kv_cache": (q, k, v, lens),
        "attention_with_kv_cache_append": (q, k, v, key, value, lens),
        "quantized_attention": args[:3],
        "merge_states": states,
    }


def required(name: str) -> list[str]:
    schema = getattr(torch.ops.fa, name).default._schema
    return [argument.name for argument in schema.arguments if str(argument.type) == "Tensor"]


MISSING = [(name, argument) for name in calls() for argument in required(name)]
MODES = {
    "plain": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "fake": FakeTensorMode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, argument", MISSING, ids=map("{0[0]}-{0[1]}".format, MISSING))
def test_missing_tensors_are_named(name, argument, mode):
    operator, given = getattr(torch.ops.fa, name), calls()[name]
    *given, options = given if isinstance(given[-1], dict) else (*given, {})
    names = [x.name for x in operator.default._schema.arguments]
    arguments = dict(zip(names, given)) | options
    with MODES[mode]() as fake:
        if mode == "fake":
            arguments = {
                n: fake.from_tensor(x) if isinstance(x, torch.Tensor) else x
                for n, x in arguments.items()
            }
        operator(**arguments)  # so that there is a plan
        with pytest.raises(TypeError, match=f"^{argument} must be a Tensor, got None$"):
            operator(**arguments | {argument: None})


def test_tensors_of_an_append_that_require_grad_are_named_first():
    q, k, v, key, value, lens = calls()["attention_with_kv_cache_append"]
    with pytest.raises(ValueError, match="query must not require grad"):
        torch.ops.fa.attention_with_kv_cache_append(q.requires_grad_(), k, v, None, value, lens)
