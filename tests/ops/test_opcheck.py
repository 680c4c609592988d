"""torch.library.opcheck on every operator: schema, autograd registration, fakes, AOT dispatch."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from fa_ops.ops import dense, merge, varlen
from tests.ops.cases import CASES, dense_call, packed_call, packed_case, saved_by

PACKED = {name: case for name, case in CASES.items() if packed_case(name)}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_attention(name, requires_grad):
    args, options = dense_call(CASES[name], requires_grad)
    opcheck(dense.ATTENTION, args, options)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_attention_with_lse(name, requires_grad):
    args, options = dense_call(CASES[name], requires_grad)
    opcheck(dense.WITH_LSE, args, options)


@pytest.mark.parametrize("name", CASES)
def test_attention_backward(name):
    args, options = dense_call(CASES[name])
    grad_out, grad_lse, *saved = saved_by(dense.WITH_LSE, args, options)
    if CASES[name].mask_grad:
        options["mask_grad"] = True
    opcheck(dense.BACKWARD, (grad_out, None if name == "causal" else grad_lse, *saved), options)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_attention_varlen(name, requires_grad):
    args, options = packed_call(PACKED[name], requires_grad)
    opcheck(varlen.VARLEN, args, options)


@pytest.mark.parametrize("name", PACKED)
def test_attention_varlen_backward(name):
    args, options = packed_call(PACKED[name])
    opcheck(varlen.BACKWARD, saved_by(varlen.VARLEN, args, options), options)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_merge_states(requires_grad):
    outs = torch.randn(3, 2, 4, 5, 8, requires_grad=requires_grad)
    lses = torch.randn(3, 2, 4, 5, requires_grad=requires_grad)
    opcheck(merge.MERGE, (outs, lses))
