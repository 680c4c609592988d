"""fa::quantized_attention: products of 8-bit numbers, of 16-bit tensors or of e4m3 ones."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.call import QUANTIZED
from fa_ops.call.options import Operands
from fa_ops.ops import autograd, library
from fa_ops.ops.schemas import Schema

QUANTIZED_ATTENTION = torch.ops.fa.quantized_attention.default
SCHEMA = Schema(QUANTIZED_ATTENTION, QUANTIZED)
_TENSORS = ("query", "key", "value", *Operands._fields)
_NO_GRADIENT = (
    "attention with 8-bit products has no gradient; call it under torch.no_grad(), or use "
    "attention with 16-bit tensors, which has one"
)


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise ValueError where a gradient of query, key, value or an operand would be recorded."""
    checks.no_gradients(dict(zip(_TENSORS, tensors)), _NO_GRADIENT)


library.register(
    "quantized_attention", *autograd.forward_functions(SCHEMA),
    autograd.without_gradient(QUANTIZED_ATTENTION, _NO_GRADIENT),
)  # fmt: skip
