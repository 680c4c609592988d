"""The quick check of dense calls accepts usual calls, and nothing that the full check refuses."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa_ops.call import checks
from fa_ops.call.call import Call
from tests.call.test_errors import valid

QUICK = {
    "query": lambda q, k, v: (q, k, v),
    "heads": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "Dv": lambda q, k, v: (q, k, v[..., :3]),
    "no queries": lambda q, k, v: (q[:, :, :0], k, v),
    "no keys": lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
    "no batch": lambda q, k, v: (q[:0], k[:0], v[:0]),
    "strides": lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    "half": lambda q, k, v: (q.half(), k.half(), v.half()),
}


@pytest.mark.parametrize("name", QUICK)
def test_the_quick_check_accepts_usual_calls(name):
    given = valid()
    tensors = QUICK[name](*(given[name] for name in ("query", "key", "value")))
    assert checks._obviously_fit(*tensors)
    checks.dense(Call(*tensors))


@pytest.mark.parametrize("at", range(3), ids=("query", "key", "value"))
@pytest.mark.parametrize("legal", QUICK)
def test_the_quick_check_accepts_only_what_the_full_check_accepts(legal, at):
    given = valid()
    tensors = list(QUICK[legal](*(given[name] for name in ("query", "key", "value"))))
    x, accepted = tensors[at], 0
    changed = [
        x.flatten(0, 1),
        x[None],
        x.double(),
        x.int(),
        x.to("meta"),
        x.mT,
        x.to(torch.float8_e4m3fn),
    ]
    changed.append(torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0])  # rows apart
    for axis, size in itertools.product(range(4), range(9)):
        shape = list(x.shape)
        shape[axis] = size
        changed.append(torch.zeros(shape, dtype=x.dtype))
    for other in (*changed, None):
        tensors[at] = other
        if checks._obviously_fit(*tensors):
            accepted += 1
            checks.dense(Call(*tensors))
            checks.contiguous_rows(**dict(zip(("query", "key", "value"), tensors)))
    assert 1 <= accepted < len(changed)
