"""The batch and head axes of each tensor, for vmap and sharding."""

from __future__ import annotations

from torch._ops import OpOverload

BATCH, HEADS = 0, 1

# (batch axis, head axis). A result has the axes of the argument whose gradient it is.
_RESULTS = ("out", "lse", "max_scores", "grad_out", "grad_lse", "grad_dot")
_MASKS = ("attn_mask", "key_ranges", "mask_blocks", "block_indices", "counts")
SCALES = ("q_scale", "k_scale", "v_scale")  # below two dimensions of one element
DENSE = dict.fromkeys(("query", "key", "value", *_RESULTS, *_MASKS, *SCALES), (0, 1)) | {
    "alibi_slopes": (0, 1),
    "sinks": (None, 0),
    "kv_lens": (0, None),
}
PACKED = dict.fromkeys(("query", "key", "value", "grad_out", "out"), (None, 1)) | {
    "lse": (None, 0),
    "grad_lse": (None, 0),
    "grad_dot": (None, 0),
    "alibi_slopes": (None, 1),
    "sinks": (None, 0),
}

# of lists of tokens: queries, not batch elements, have rows of their own
TOKENS = {
    "query": (0, 1), "key": (None, 1), "value": (None, 1), "out": (0, 1), "lse": (1, 0),
    "token_indices": (0, None), "counts": (0, None), "sinks": (None, 0),
}  # fmt: skip

for _axes in (DENSE, PACKED):  # a tangent has the axes of what it is the tangent of
    _axes |= {f"{name}_t": both for name, both in _axes.items()}

# The axes above count from these ranks where a tensor may have fewer dimensions.
RANKS = {"attn_mask": 4, "attn_mask_t": 4, "alibi_slopes": 2}
# The axes on which a tensor may have size 1 and be broadcast.
BROADCAST = dict.fromkeys((*_MASKS, "attn_mask_t"), (BATCH, HEADS)) | {"alibi_slopes": (BATCH,)}

RESULTS = {
    "attention": ("out",),
    "attention_with_lse": ("out", "lse"),
    "attention_backward": ("query", "key", "value", "attn_mask", "sinks"),
    "attention_jvp": ("out", "lse", "grad_dot"),
    "attention_backward_jvp": ("query", "key", "value", "attn_mask", "sinks"),
    "attention_varlen": ("out", "lse"),
    "attention_programmed": ("out", "lse"),
    "attention_programmed_max": ("out", "lse", "max_scores"),
    "attention_programmed_backward": ("query", "key", "value", "attn_mask", "sinks", "term_values"),
    "quantized_attention": ("out", "lse"),
    "attention_varlen_backward": ("query", "key", "value", "sinks"),
    "attention_varlen_jvp": ("out", "lse", "grad_dot"),
    "attention_varlen_backward_jvp": ("query", "key", "value", "sinks"),
    "attention_selected": ("out", "lse"),
    "attention_selected_backward": ("query", "key", "value", "sinks"),
    "attention_selected_tokens": ("out", "lse"),
}


def bind(operator: OpOverload, args: tuple, options: dict) -> dict:
    """A call's arguments by name."""
    names = (argument.name for argument in operator._schema.arguments)
    return dict(zip(names, args, strict=False)) | options


def of(call: dict) -> dict:
    """The axes of the tensors in a call's arguments and results."""
    if "token_indices" in call:
        return TOKENS
    return PACKED if "cu_seqlens_q" in call else DENSE


def is_absent(name: str, gradient) -> bool:
    """Whether a result is a placeholder, for no gradient."""
    return (
        name in ("attn_mask", "sinks", "grad_dot")
        and gradient.dim() == 1
        and gradient.shape[0] == 0
    )
