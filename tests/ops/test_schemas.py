"""The operators' schemas are a promise to saved graphs."""

from __future__ import annotations

import re
import textwrap

import expecttest
import torch

from fa_ops.call.options import Spec
from fa_ops.ops.library import SCHEMAS


def wrapped(schema: str) -> str:
    """A schema in lines of up to 98 columns, which end between arguments."""
    text = re.sub(r"(?<!,) ", "\xa0", schema)
    return textwrap.fill(text, 98, subsequent_indent="  ").replace("\xa0", " ")


class TestSchemas(expecttest.TestCase):
    def test_schemas(self):
        schemas = [str(getattr(torch.ops.fa, name).default._schema) for name in SCHEMAS]
        self.assertExpectedInline(
            "\n".join(map(wrapped, schemas)),
            """\
fa::attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.,
  bool is_causal=False, *, float? scale=None, SymInt window_left=-1, SymInt window_right=-1,
  float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? kv_lens=None,
  Tensor? key_ranges=None, Tensor? dropout_seed=None, bool deterministic=False, str? backend=None,
  Tensor? mask_blocks=None) -> Tensor
fa::attention_with_lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None,
  float dropout_p=0., bool is_causal=False, *, float? scale=None, SymInt window_left=-1,
  SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None,
  Tensor? kv_lens=None, Tensor? key_ranges=None, Tensor? dropout_seed=None,
  bool deterministic=False, str? backend=None, Tensor? mask_blocks=None) -> (Tensor, Tensor)
fa::attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value,
  Tensor out, Tensor lse, Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *,
  float? scale=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.,
  Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? kv_lens=None, Tensor? key_ranges=None,
  Tensor? dropout_seed=None, bool deterministic=False, str? backend=None,
  Tensor? mask_blocks=None, bool mask_grad=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
fa::attention_averaging_rows(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None,
  float dropout_p=0., bool is_causal=False, *, float? scale=None, SymInt window_left=-1,
  SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None,
  Tensor? kv_lens=None, Tensor? key_ranges=None, Tensor? dropout_seed=None,
  bool deterministic=False, str? backend=None, Tensor? mask_blocks=None, Tensor averaging_rows,
  Tensor? filled_keys=None, float grad_share=1.) -> (Tensor, Tensor)
fa::attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,
  Tensor cu_seqlens_k, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float dropout_p=0.,
  bool is_causal=False, *, float? scale=None, SymInt window_left=-1, SymInt window_right=-1,
  float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? kv_lens=None,
  Tensor? dropout_seed=None, bool deterministic=False, str? backend=None) -> (Tensor, Tensor)
fa::attention_varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key,
  Tensor value, Tensor out, Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
  SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float dropout_p=0., bool is_causal=False,
  *, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.,
  Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? kv_lens=None, Tensor? dropout_seed=None,
  bool deterministic=False, str? backend=None) -> (Tensor, Tensor, Tensor, Tensor)
fa::attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor kv_lens,
  Tensor? page_table=None, bool is_causal=False, *, float? scale=None, SymInt window_left=-1,
  SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None,
  Tensor? k_scale=None, Tensor? v_scale=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None,
  bool rotary_interleaved=False, SymInt num_splits=0, bool batch_invariant=False,
  str? backend=None, Tensor? key_ranges=None, Tensor? unified_max=None) -> (Tensor, Tensor)
fa::attention_with_kv_cache_append(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache,
  Tensor key, Tensor value, Tensor kv_lens, Tensor? page_table=None, bool is_causal=False, *,
  float? scale=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.,
  Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None,
  Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False,
  SymInt num_splits=0, bool batch_invariant=False, str? backend=None, Tensor? key_ranges=None,
  Tensor? unified_max=None) -> (Tensor, Tensor)
fa::quantized_attention(Tensor query, Tensor key, Tensor value, Tensor? q_scale=None,
  Tensor? k_scale=None, Tensor? v_scale=None, bool is_causal=False, *, float? scale=None,
  SymInt window_left=-1, SymInt window_right=-1, float softcap=0., Tensor? sinks=None,
  Tensor? kv_lens=None, Tensor? key_ranges=None, ScalarType? qk_dtype=None, bool smooth_key=True,
  bool rotate=False, str? backend=None) -> (Tensor, Tensor)
fa::mask_blocks(Tensor attn_mask) -> Tensor
fa::merge_states(Tensor outs, Tensor lses) -> (Tensor, Tensor)
fa::dropout_seed(Tensor like, SymInt count=1) -> Tensor""",
        )


def test_every_dense_operator_takes_a_spec_in_order():
    for name in ("attention", "attention_with_lse", "attention_backward"):
        arguments = [a.name for a in getattr(torch.ops.fa, name).default._schema.arguments]
        first = arguments.index("attn_mask")
        assert tuple(arguments[first : first + len(Spec._fields)]) == Spec._fields


def test_schema_defaults_are_the_specs():
    arguments = torch.ops.fa.attention.default._schema.arguments[3:]
    assert {a.name: a.default_value for a in arguments} == Spec()._asdict()


def test_every_operator_is_tagged_for_the_compiler():
    for name in SCHEMAS:
        assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.fa, name).default.tags
