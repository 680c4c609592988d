"""fa::attention_selected and its backward, fa::attention_selected_tokens: keys that lists name."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import backend_option, checks, selected_checks
from fa_ops.call.call import SELECTED, Call, attention_call
from fa_ops.ops import autograd, library
from fa_ops.ops.schemas import Schema
from fa_ops.plans import planning
from fa_ops.plans.outputs import packed_outputs
from fa_ops.tracing import is_capturing

BLOCKS = torch.ops.fa.attention_selected.default
BACKWARD = torch.ops.fa.attention_selected_backward.default
TOKENS = torch.ops.fa.attention_selected_tokens.default
OPERATORS = autograd.Operators(Schema(BLOCKS, SELECTED), Schema(BACKWARD, SELECTED, 7))

library.register(
    "attention_selected", *autograd.forward_functions(OPERATORS.forward),
    autograd.forward_kernel(OPERATORS, BLOCKS),
)  # fmt: skip
library.register(
    "attention_selected_backward", *autograd.backward_functions(OPERATORS.backward),
    autograd.backward_kernel(BACKWARD),
)  # fmt: skip


# Lists of tokens. A kernel for pages finds each token in a page of one key: the list is the page
# table. Elsewhere the lists are of blocks of one key.

_OF_PAGES = ("hopper", "triton")


def tokens_call(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, counts: Tensor | None = None,
    scale: float | None = None, sinks: Tensor | None = None, backend: str | None = None,
) -> Call:  # fmt: skip
    """The call that computes attention of (T, Hq, D) over lists of tokens."""
    name = backend or backend_option.chosen() or "auto"
    if name in _OF_PAGES or (name == "auto" and q.device.type == "cuda"):
        if counts is None:
            counts = torch.full_like(lists[:, 0], lists.shape[1])
        return attention_call(
            q.unsqueeze(2), k.unsqueeze(1), v.unsqueeze(1), kv_lens=counts, page_table=lists,
            sinks=sinks, scale=scale, backend=backend, over_cache=True,
        )  # fmt: skip
    rows = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return attention_call(
        *rows, block_indices=lists[None, None], block_size=1, sinks=sinks, scale=scale,
        counts=None if counts is None else counts[None, None], backend=backend,
    )  # fmt: skip


def _tokens(
    q, k, v, token_indices, counts=None, *, scale=None, sinks=None, backend=None
) -> tuple[Tensor, Tensor]:
    selected_checks.tokens(q, k, v, token_indices, counts, real=True)
    if q.device.type == "cpu" or (planning.DEBUG and not is_capturing(q.device)):
        selected_checks.token_values(k, token_indices, counts)
    if not token_indices.shape[1]:  # a list without entries
        token_indices = token_indices.new_full((len(q), 1), -1)
        counts = None if counts is None else torch.zeros_like(counts)
    call = tokens_call(q, k, v, token_indices, counts, scale, sinks, backend)
    scalars = call.signature.scalars(call.options)
    out, lse = planning.run(call.signature, *call[:3], call.operands, scalars)
    if call.is_cached:
        return out.squeeze(2), lse.squeeze(2).t().contiguous()
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0)


def _tokens_fake(q, k, v, token_indices, counts=None, *, scale=None, sinks=None, backend=None):
    selected_checks.tokens(q, k, v, token_indices, counts)
    options = attention_call(q.unsqueeze(2), k, v, sinks=sinks, scale=scale, backend=backend)
    checks.options(options, q.shape[0])
    return packed_outputs(q, v)


_NO_GRADIENT = (
    "attention_selected_tokens has no gradient; call it under torch.no_grad(), or use "
    "attention_selected with block_size=1, which has one"
)

library.register(
    "attention_selected_tokens", _tokens, _tokens_fake,
    autograd.without_gradient(TOKENS, _NO_GRADIENT),
)  # fmt: skip
