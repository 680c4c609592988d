"""fa::attention and fa::attention_with_lse, and the operators of their derivatives."""

from __future__ import annotations

import torch

from fa_ops.call.call import DENSE
from fa_ops.ops import autograd, derivatives, library
from fa_ops.ops.schemas import Schema

ATTENTION = torch.ops.fa.attention.default
WITH_LSE = torch.ops.fa.attention_with_lse.default
BACKWARD = torch.ops.fa.attention_backward.default
JVP = torch.ops.fa.attention_jvp.default
BACKWARD_JVP = torch.ops.fa.attention_backward_jvp.default
OPERATORS = autograd.Operators(
    Schema(WITH_LSE, DENSE), Schema(BACKWARD, DENSE, 7), Schema(JVP, DENSE, 11),
    Schema(BACKWARD_JVP, DENSE, 17),
)  # fmt: skip
_FORWARD = OPERATORS.forward

library.register(
    "attention", *autograd.forward_functions(_FORWARD, with_lse=False),
    autograd.forward_kernel(OPERATORS, ATTENTION, with_lse=False),
)  # fmt: skip
library.register(
    "attention_with_lse", *autograd.forward_functions(_FORWARD),
    autograd.forward_kernel(OPERATORS, WITH_LSE),
)  # fmt: skip
derivatives.register(OPERATORS)
