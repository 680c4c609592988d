"""fa::attention_programmed and its backward: scores changed, and keys masked out, by a program."""

from __future__ import annotations

import torch

from fa_ops.call.call import PROGRAMMED
from fa_ops.ops import autograd, library
from fa_ops.ops.schemas import Schema

PROGRAMMED_ATTENTION = torch.ops.fa.attention_programmed.default
BACKWARD = torch.ops.fa.attention_programmed_backward.default
OPERATORS = autograd.Operators(
    Schema(PROGRAMMED_ATTENTION, PROGRAMMED), Schema(BACKWARD, PROGRAMMED, 7)
)

library.register(
    "attention_programmed", *autograd.forward_functions(OPERATORS.forward),
    autograd.forward_kernel(OPERATORS, PROGRAMMED_ATTENTION),
)  # fmt: skip
library.register(
    "attention_programmed_backward", *autograd.backward_functions(OPERATORS.backward),
    autograd.backward_kernel(BACKWARD),
)  # fmt: skip
