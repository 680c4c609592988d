"""The operators' schemas: a promise to saved graphs, what opcheck asks, tensors that are None."""

from __future__ import annotations

import re
import textwrap

import expecttest
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from fa_ops.call.options import NO_OPERANDS, Options
from fa_ops.ops import dense, merge, selected, varlen
from fa_ops.ops.library import SCHEMAS
from fa_ops.programs.program import parse
from fa_ops.testing.caches import CacheCase
from tests.ops.cases import CASES, dense_call, packed_call, packed_case, saved_by


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
fa::attention_jvp(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? query_t,
  Tensor? key_t, Tensor? value_t, Tensor? attn_mask_t, Tensor? sinks_t, Tensor? grad_out,
  Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *, float? scale=None,
  SymInt window_left=-1, SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None,
  Tensor? sinks=None, Tensor? kv_lens=None, Tensor? key_ranges=None, Tensor? dropout_seed=None,
  bool deterministic=False, str? backend=None, Tensor? mask_blocks=None) -> (Tensor, Tensor,
  Tensor)
fa::attention_backward_jvp(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key,
  Tensor value, Tensor out, Tensor lse, Tensor? query_t, Tensor? key_t, Tensor? value_t,
  Tensor? attn_mask_t, Tensor? sinks_t, Tensor? grad_out_t, Tensor? grad_lse_t, Tensor out_t,
  Tensor lse_t, Tensor? grad_dot, Tensor? attn_mask=None, float dropout_p=0.,
  bool is_causal=False, *, float? scale=None, SymInt window_left=-1, SymInt window_right=-1,
  float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? kv_lens=None,
  Tensor? key_ranges=None, Tensor? dropout_seed=None, bool deterministic=False, str? backend=None,
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
fa::attention_varlen_jvp(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,
  Tensor? query_t, Tensor? key_t, Tensor? value_t, Tensor? sinks_t, Tensor? grad_out,
  Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None,
  float dropout_p=0., bool is_causal=False, *, float? scale=None, SymInt window_left=-1,
  SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None,
  Tensor? kv_lens=None, Tensor? dropout_seed=None, bool deterministic=False,
  str? backend=None) -> (Tensor, Tensor, Tensor)
fa::attention_varlen_backward_jvp(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key,
  Tensor value, Tensor out, Tensor lse, Tensor? query_t, Tensor? key_t, Tensor? value_t,
  Tensor? sinks_t, Tensor? grad_out_t, Tensor? grad_lse_t, Tensor out_t, Tensor lse_t,
  Tensor? grad_dot, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt? max_seqlen_q=None,
  SymInt? max_seqlen_k=None, float dropout_p=0., bool is_causal=False, *, float? scale=None,
  SymInt window_left=-1, SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None,
  Tensor? sinks=None, Tensor? kv_lens=None, Tensor? dropout_seed=None, bool deterministic=False,
  str? backend=None) -> (Tensor, Tensor, Tensor, Tensor)
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
fa::attention_programmed(Tensor query, Tensor key, Tensor value, str program,
  Tensor? attn_mask=None, bool is_causal=False, *, float? scale=None, SymInt window_left=-1,
  SymInt window_right=-1, Tensor? sinks=None, Tensor? kv_lens=None, Tensor? key_ranges=None,
  Tensor? term_values=None, Tensor? term_indices=None, Tensor? tile_runs=None,
  bool deterministic=False, str? backend=None) -> (Tensor, Tensor)
fa::attention_programmed_max(Tensor query, Tensor key, Tensor value, str program,
  Tensor? attn_mask=None, bool is_causal=False, *, float? scale=None, SymInt window_left=-1,
  SymInt window_right=-1, Tensor? sinks=None, Tensor? kv_lens=None, Tensor? key_ranges=None,
  Tensor? term_values=None, Tensor? term_indices=None, Tensor? tile_runs=None,
  bool deterministic=False, str? backend=None) -> (Tensor, Tensor, Tensor)
fa::attention_programmed_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key,
  Tensor value, Tensor out, Tensor lse, str program, Tensor? attn_mask=None, bool is_causal=False,
  *, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, Tensor? sinks=None,
  Tensor? kv_lens=None, Tensor? key_ranges=None, Tensor? term_values=None,
  Tensor? term_indices=None, Tensor? tile_runs=None, bool deterministic=False, str? backend=None,
  bool mask_grad=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
fa::program_tiles(Tensor like, str program, SymInt B, SymInt Hq, SymInt Sq, SymInt Sk,
  Tensor? term_values=None, Tensor? term_indices=None) -> Tensor
fa::attention_selected(Tensor query, Tensor key, Tensor value, Tensor block_indices,
  SymInt block_size, SymInt query_block=1, Tensor? counts=None, bool is_causal=True, *,
  float? scale=None, Tensor? sinks=None, Tensor? key_ranges=None, Tensor? cu_seqlens=None,
  bool deterministic=False, str? backend=None) -> (Tensor, Tensor)
fa::attention_selected_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key,
  Tensor value, Tensor out, Tensor lse, Tensor block_indices, SymInt block_size,
  SymInt query_block=1, Tensor? counts=None, bool is_causal=True, *, float? scale=None,
  Tensor? sinks=None, Tensor? key_ranges=None, Tensor? cu_seqlens=None, bool deterministic=False,
  str? backend=None) -> (Tensor, Tensor, Tensor, Tensor)
fa::attention_selected_tokens(Tensor query, Tensor key, Tensor value, Tensor token_indices,
  Tensor? counts=None, *, float? scale=None, Tensor? sinks=None, str? backend=None) -> (Tensor,
  Tensor)
fa::select_tokens(Tensor query, Tensor key, Tensor weights, SymInt count, bool is_causal=True, *,
  float? scale=None, Tensor? kv_lens=None, Tensor? key_ranges=None,
  Tensor? attn_mask=None) -> Tensor
fa::quantized_attention(Tensor query, Tensor key, Tensor value, Tensor? q_scale=None,
  Tensor? k_scale=None, Tensor? v_scale=None, bool is_causal=False, *, float? scale=None,
  SymInt window_left=-1, SymInt window_right=-1, float softcap=0., Tensor? sinks=None,
  Tensor? kv_lens=None, Tensor? key_ranges=None, ScalarType? qk_dtype=None, bool smooth_key=True,
  bool rotate=False, str? backend=None) -> (Tensor, Tensor)
fa::mask_blocks(Tensor attn_mask) -> Tensor
fa::merge_states(Tensor outs, Tensor lses) -> (Tensor, Tensor)
fa::dropout_seed(Tensor like, SymInt count=1) -> Tensor""",
        )


def test_schema_defaults_are_those_of_calls():
    defaults = NO_OPERANDS._asdict() | Options()._asdict()
    for argument in torch.ops.fa.attention.default._schema.arguments[3:]:
        assert argument.default_value == defaults[argument.name], argument.name


def test_every_operator_is_tagged_for_the_compiler():
    for name in SCHEMAS:
        assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.fa, name).default.tags


# torch.library.opcheck on every operator: schema, autograd registration, fakes, AOT dispatch.

PACKED = {name: case for name, case in CASES.items() if packed_case(name)}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_attention(name, requires_grad):
    args, options = dense_call(CASES[name], requires_grad)
    opcheck(dense.ATTENTION, args, options)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_attention_with_lse(name, requires_grad):
    args, options = dense_call(CASES[name], requires_grad)
    opcheck(dense.WITH_LSE, args, options)


@pytest.mark.parametrize("name", CASES)
def test_attention_backward(name):
    args, options = dense_call(CASES[name])
    grad_out, grad_lse, *saved = saved_by(dense.WITH_LSE, args, options)
    if CASES[name].mask_grad:
        options["mask_grad"] = True
    opcheck(dense.BACKWARD, (grad_out, None if name == "causal" else grad_lse, *saved), options)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_attention_varlen(name, requires_grad):
    args, options = packed_call(PACKED[name], requires_grad)
    opcheck(varlen.VARLEN, args, options)


@pytest.mark.parametrize("name", PACKED)
def test_attention_varlen_backward(name):
    args, options = packed_call(PACKED[name])
    opcheck(varlen.BACKWARD, saved_by(varlen.VARLEN, args, options), options)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_merge_states(requires_grad):
    outs = torch.randn(3, 2, 4, 5, 8, requires_grad=requires_grad)
    lses = torch.randn(3, 2, 4, 5, requires_grad=requires_grad)
    opcheck(merge.MERGE, (outs, lses))


MASK = "fa1\nt0 int row -\nx0 lt(k, t0)\nmask x0\n"
ENDS = torch.full((parse(MASK).places("int", 1, 1, 300, 400)[1],), 129, dtype=torch.int32)


def test_program_tiles():
    opcheck(torch.ops.fa.program_tiles.default, (ENDS, MASK, 1, 1, 300, 400, None, ENDS))


# Operators name a tensor that is None, which the dispatcher takes in place of every tensor.


def calls() -> dict[str, tuple]:
    """Each operator with the positional arguments of a call."""
    plain, cached = CASES["plain"], CacheCase(S=20, new=2, Sq=2).fresh()
    (q, k, v), t = cached[:3], cached.operands
    args, _ = dense_call(plain)
    packed, _ = packed_call(plain)
    key, value, lens = t.new_key, t.new_value, t.kv_lens
    rows = torch.zeros(1, 1, 1, dtype=torch.bool)
    states = torch.randn(3, 5, 8), torch.randn(3, 5)
    lists = torch.zeros(1, 1, args[0].shape[2], 2, dtype=torch.int32)
    return {
        "attention": args,
        "attention_with_lse": args,
        "attention_backward": saved_by(dense.WITH_LSE, args, {}),
        "attention_averaging_rows": (*args, {"averaging_rows": rows}),
        "attention_varlen": packed,
        "attention_varlen_backward": saved_by(varlen.VARLEN, packed, {}),
        "attention_with_kv_cache": (q, k, v, lens),
        "attention_with_kv_cache_append": (q, k, v, key, value, lens),
        "attention_selected": (*args[:3], lists, 8),
        "attention_selected_backward": (*saved_by(selected.BLOCKS, (*args[:3], lists, 8), {}),),
        "attention_selected_tokens": (*(x[0].transpose(0, 1) for x in args[:3]), lists[0, 0]),
        "select_tokens": (args[0], args[1][:, :1], args[0][..., 0], 2),
        "program_tiles": (ENDS, MASK, 1, 1, 300, 400, None, ENDS),
        "quantized_attention": args[:3],
        "merge_states": states,
    }


def required(name: str) -> list[str]:
    schema = getattr(torch.ops.fa, name).default._schema
    return [argument.name for argument in schema.arguments if str(argument.type) == "Tensor"]


MISSING = [(name, argument) for name in calls() for argument in required(name)]
MODES = {
    "plain": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "fake": FakeTensorMode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, argument", MISSING, ids=map("{0[0]}-{0[1]}".format, MISSING))
def test_missing_tensors_are_named(name, argument, mode):
    operator, given = getattr(torch.ops.fa, name), calls()[name]
    *given, options = given if isinstance(given[-1], dict) else (*given, {})
    names = [x.name for x in operator.default._schema.arguments]
    arguments = dict(zip(names, given)) | options
    with MODES[mode]() as fake:
        if mode == "fake":
            arguments = {
                n: fake.from_tensor(x) if isinstance(x, torch.Tensor) else x
                for n, x in arguments.items()
            }
        operator(**arguments)  # so that there is a plan
        with pytest.raises(TypeError, match=f"^{argument} must be a Tensor, got None$"):
            operator(**arguments | {argument: None})


def test_tensors_of_an_append_that_require_grad_are_named_first():
    q, k, v, key, value, lens = calls()["attention_with_kv_cache_append"]
    with pytest.raises(ValueError, match="query must not require grad"):
        torch.ops.fa.attention_with_kv_cache_append(q.requires_grad_(), k, v, None, value, lens)
