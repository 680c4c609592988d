"""fa::quantized_attention: products of 8-bit numbers, of 16-bit tensors or of e4m3 ones."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.call import QUANTIZED
from fa_ops.call.options import Operands
from fa_ops.ops import axes, library
from fa_ops.ops.schemas import Schema
from fa_ops.plans import planning
from fa_ops.plans.outputs import dense_outputs

QUANTIZED_ATTENTION = torch.ops.fa.quantized_attention.default
_TENSORS = ("query", "key", "value", *Operands._fields)


SCHEMA = Schema(QUANTIZED_ATTENTION, QUANTIZED)


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise ValueError where a gradient of query, key, value or an operand would be recorded."""
    reason = (
        "attention with 8-bit products has no gradient; call it under torch.no_grad(), or use "
        "attention with 16-bit tensors, which has one"
    )
    checks.no_gradients(dict(zip(_TENSORS, tensors)), reason)


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    return planning.run(QUANTIZED, q, k, v, *SCHEMA.bind(args, options))


def _fake(q, k, v, *args, **options):
    planning.check(SCHEMA.call(q, k, v, args, options), real=False)
    return dense_outputs(q, v)


def _autograd(keyset, *args, **options):
    arguments = axes.bind(QUANTIZED_ATTENTION, args, options)
    tensors = [arguments.get(name) for name in _TENSORS]
    library.reject_forward_ad(QUANTIZED_ATTENTION, *tensors)
    refuse_gradients(*tensors)
    return library.redispatch(QUANTIZED_ATTENTION, keyset, *args, **options)


library.register("quantized_attention", _forward, _fake, _autograd)
