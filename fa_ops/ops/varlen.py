"""fa::attention_varlen and its derivatives: sequences packed along the token dimension."""

from __future__ import annotations

import torch

from fa_ops.call.call import PACKED
from fa_ops.ops import autograd, derivatives, library
from fa_ops.ops.schemas import Schema

VARLEN = torch.ops.fa.attention_varlen.default
BACKWARD = torch.ops.fa.attention_varlen_backward.default
JVP = torch.ops.fa.attention_varlen_jvp.default
BACKWARD_JVP = torch.ops.fa.attention_varlen_backward_jvp.default
OPERATORS = autograd.Operators(
    Schema(VARLEN, PACKED), Schema(BACKWARD, PACKED, 7), Schema(JVP, PACKED, 10),
    Schema(BACKWARD_JVP, PACKED, 16),
)  # fmt: skip

library.register(
    "attention_varlen", *autograd.forward_functions(OPERATORS.forward),
    autograd.forward_kernel(OPERATORS, VARLEN),
)  # fmt: skip
derivatives.register(OPERATORS)
