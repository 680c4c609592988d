"""The one Library, the schemas, and every private torch name the operators need."""

from __future__ import annotations

from torch import Tag
from torch.library import Library

lib = Library("fa", "DEF")

TAGS = (Tag.pt2_compliant_tag,)

# The keyword-only tail of every operator, in the order of `fa_ops.types.Spec` after its first three fields.
_OPTIONS = (
    "*, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? kv_lens=None, {ranges}Tensor? dropout_seed=None, bool deterministic=False, str? backend=None"
)
_DENSE = "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, " + _OPTIONS.format(ranges="Tensor? key_ranges=None, ")
_PACKED = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float dropout_p=0.0, "
    "bool is_causal=False, " + _OPTIONS.format(ranges="")
)
_QKV = "Tensor query, Tensor key, Tensor value"
_SAVED = f"Tensor grad_out, Tensor? grad_lse, {_QKV}, Tensor out, Tensor lse"

SCHEMAS = {
    "attention": f"({_QKV}, {_DENSE}) -> Tensor",
    "attention_with_lse": f"({_QKV}, {_DENSE}) -> (Tensor, Tensor)",
    # gradients of query, key, value, attn_mask, sinks; the last two have no elements where they do not apply
    "attention_backward": f"({_SAVED}, {_DENSE}, bool mask_grad=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "attention_varlen": f"({_QKV}, {_PACKED}) -> (Tensor, Tensor)",
    # gradients of query, key, value, sinks
    "attention_varlen_backward": f"({_SAVED}, {_PACKED}) -> (Tensor, Tensor, Tensor, Tensor)",
    "merge_states": "(Tensor outs, Tensor lses) -> (Tensor, Tensor)",
}
for _name, _schema in SCHEMAS.items():
    lib.define(_name + _schema, tags=TAGS)
