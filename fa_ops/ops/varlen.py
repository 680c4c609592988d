"""fa::attention_varlen and its derivatives: sequences packed along the token dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call.call import PACKED
from fa_ops.ops import autograd, derivatives, library
from fa_ops.ops.schemas import Schema
from fa_ops.plans import planning
from fa_ops.plans.outputs import packed_outputs

VARLEN = torch.ops.fa.attention_varlen.default
BACKWARD = torch.ops.fa.attention_varlen_backward.default
JVP = torch.ops.fa.attention_varlen_jvp.default
BACKWARD_JVP = torch.ops.fa.attention_varlen_backward_jvp.default
OPERATORS = autograd.Operators(
    Schema(VARLEN, PACKED), Schema(BACKWARD, PACKED, 7), Schema(JVP, PACKED, 10),
    Schema(BACKWARD_JVP, PACKED, 16),
)  # fmt: skip
_FORWARD, _GRADIENT = OPERATORS[:2]


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    return planning.run(PACKED, q, k, v, *_FORWARD.bind(args, options))


def _fake(q, k, v, *args, **options):
    planning.check(_FORWARD.call(q, k, v, args, options), real=False)
    return packed_outputs(q, v)


def _autograd(keyset, q, k, v, *args, **options):
    return autograd.forward(OPERATORS, VARLEN, keyset, q, k, v, args, options)


library.register("attention_varlen", _forward, _fake, _autograd)
derivatives.register(OPERATORS, *autograd.backward_functions(_GRADIENT))
