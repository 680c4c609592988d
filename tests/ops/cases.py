"""The feature sets that every rule of the operators is tried on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from fa_ops.call.call import Call
from fa_ops.ops import dense, varlen
from fa_ops.ops.schemas import Schema
from fa_ops.testing import Case, make_case

EQUAL = {"B": 2, "Hq": 4, "Hkv": 2, "Sq": 5, "Sk": 7, "D": 8, "Dv": 8}
SMALL = EQUAL | {"Dv": 4}
CASES = {
    "plain": make_case(**EQUAL),
    "causal": make_case(**EQUAL, is_causal=True, layout="bshd"),
    "bool mask": make_case(**SMALL, mask="bool", mask_shape=(1, 0, 1, 1)),
    "float mask": make_case(**SMALL, mask="float", mask_shape=(0, 1, 1, 1), mask_grad=True),
    "window": make_case(**SMALL, window=(3, 1), softcap=5.0, scale=0.4),
    "positions": make_case(**SMALL, alibi="batch_heads", sinks=True, kv_lens=True),
    "ranges": make_case(**SMALL, key_ranges=(1, 0, 1), alibi="heads"),
    "dropout": make_case(**SMALL, dropout_p=0.3),
}


def dense_call(case: Case, requires_grad: bool = False) -> tuple[tuple, dict]:
    """(args, keywords) of `fa::attention` and `fa::attention_with_lse`."""
    return arguments(dense.OPERATORS.forward, case.fresh(requires_grad=requires_grad))


def packed_call(case: Case, requires_grad: bool = False) -> tuple[tuple, dict]:
    """The same problem for `fa::attention_varlen`: batch elements packed, two tokens left over."""
    call = case.fresh()
    q, k, v = (_tokens(t).requires_grad_(requires_grad) for t in call[:3])
    if call.operands.sinks is not None:
        call.operands.sinks.requires_grad_(requires_grad)
    ends = torch.arange(case.B + 1, dtype=torch.int32)
    call = call.changed(
        query=q, key=k, value=v, attn_mask=None, key_ranges=None, cu_seqlens_q=ends * case.Sq,
        cu_seqlens_k=ends * case.Sk, packed=True,
    )  # fmt: skip
    return arguments(varlen.OPERATORS.forward, call)


def arguments(schema: Schema, call: Call) -> tuple[tuple, dict]:
    """The arguments of a call's operator."""
    args, options = schema.arguments(call)
    return (*call[:3], *args), options


def saved_by(operator: OpOverload, args: tuple, options: dict) -> tuple:
    """The arguments of an operator's backward after a call of it, with random gradients."""
    out, lse = operator(*args, **options)
    return (torch.randn_like(out), torch.randn_like(lse), *args[:3], out, lse, *args[3:])


def _tokens(x: Tensor) -> Tensor:
    B, H, S, D = x.shape
    packed = x.detach().transpose(1, 2).reshape(B * S, H, D)
    return torch.cat([packed, torch.randn(2, H, D, dtype=x.dtype, device=x.device)])


def packed_case(name: str) -> bool:
    return name not in ("bool mask", "float mask", "ranges")
