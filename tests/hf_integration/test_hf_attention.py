"""The attention function with every keyword that some model passes, against the oracle."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fa_ops
from fa_ops.backends import reference
from fa_ops.call.call import attention_call
from fa_ops.testing import make_case
from hf_integration import encodings, fa_ops_attention_forward, operators

CASE = make_case(B=2, Hq=4, Hkv=2, Sq=12, Sk=12, D=16, Dv=24)
CAUSAL = {"is_causal": True}


def inputs(case=CASE, **options):
    return case.fresh(**options)[:3]


def forward(q, k, v, mask=None, module=None, **options):
    return fa_ops_attention_forward(module or nn.Module(), q, k, v, mask, **options)


def check(ours, q, k, v, options):
    expected, _ = reference.dense(attention_call(q.double(), k.double(), v.double(), **options))
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, expected.transpose(1, 2).to(ours.dtype), atol=1e-5, rtol=1e-5)


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPE = (2, 1, 12, 12)
RANGES = torch.tensor([[0, 5], [3, 12]], dtype=torch.int32).view(2, 1, 1, 2)
BOOL = random(2, 1, 12, 12) > -0.5
FLOAT = random(2, 1, 12, 12)


def ranges(rows):
    return encodings.ranges(SHAPE, RANGES[-rows:, 0, :, 0], RANGES[-rows:, 0, :, 1])


MASKS = {
    "full": (encodings.full(SHAPE, "cpu"), {}),
    "causal": (encodings.causal(SHAPE, 12, "cpu"), CAUSAL),
    "ranges": (ranges(2), {"key_ranges": RANGES}),
    "bool": (BOOL, {"attn_mask": BOOL}),
    "float": (FLOAT, {"attn_mask": FLOAT}),
}
SINKS = random(4)
OPTIONS = {
    "scaling": ({"scaling": 0.5}, {"scale": 0.5}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "s_aux": ({"s_aux": SINKS}, {"sinks": SINKS}),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}),
    "ignored": ({"sliding_window": 2, "position_ids": None, "use_cache": True}, {}),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("form", MASKS)
def test_every_keyword_with_every_mask_matches_the_oracle(form, option):
    q, k, v = inputs()
    (mask, of_mask), (options, fields) = MASKS[form], OPTIONS[option]
    out, weights = forward(q, k, v, mask, **options)
    assert weights is None
    check(out, q, k, v, of_mask | fields)


@pytest.mark.parametrize("form", MASKS)
def test_position_bias_is_added_and_differentiated(form):
    q, k, v = inputs()
    mask, options = MASKS[form]
    bias = random(1, 4, 12, 12, seed=2).requires_grad_()
    out, _ = forward(q, k, v, mask, position_bias=bias)
    added = bias + FLOAT if form == "float" else bias
    if form == "bool":
        added = added.masked_fill(~BOOL, float("-inf"))
    options = options | {"attn_mask": added}
    check(out, q, k, v, options)
    (ours,) = torch.autograd.grad(out.square().sum(), bias)
    call = attention_call(q.double(), k.double(), v.double(), **options)
    oracle, _ = reference.dense(call.changed(attn_mask=added.double()))
    (expected,) = torch.autograd.grad(oracle.square().sum(), bias)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_weights_are_those_of_eager_attention(form, sinks):
    q, k, v = inputs()
    mask, options = MASKS[form]
    out, weights = forward(q, k, v, mask, s_aux=sinks, softcap=3.0, output_attentions=True)
    options = options | {"sinks": sinks, "softcap": 3.0}
    check(out, q, k, v, options)
    repeated = k.repeat_interleave(2, 1)
    products = q.double() @ repeated.double().transpose(-1, -2)
    expected, _ = reference.weights(
        reference.modify_scores(products, attention_call(q, k, v, **options)), sinks
    )
    torch.testing.assert_close(weights, expected.float(), atol=1e-5, rtol=1e-5)


def test_sinks_may_differ_by_query():
    q, k, v = inputs()
    sinks = random(2, 4, 12, 1).requires_grad_()
    out, _ = forward(q, k, v, MASKS["causal"][0], sinks=sinks)
    rows = []
    for b in range(2):
        for i in range(12):
            row = [
                t[b : b + 1].double()
                for t in (q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1])
            ]
            rows.append(reference.dense(attention_call(*row, sinks=sinks[b, :, i, 0]))[0])
    expected = torch.cat(rows, 2).view(1, 4, 2, 12, 24)[0].permute(1, 2, 0, 3)
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(out.sum(), sinks)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), sinks)[0].float())


@pytest.mark.parametrize(
    "argument, attribute, causal",
    [
        (None, None, True),
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (False, True, False),
    ],
)
def test_without_a_mask_causality_is_that_of_the_argument_or_else_of_the_module(
    argument, attribute, causal
):
    q, k, v = inputs()
    module = nn.Module()
    if attribute is not None:
        module.is_causal = attribute
    out, _ = forward(q, k, v, module=module, is_causal=argument)
    check(out, q, k, v, CAUSAL if causal else {})


def test_without_a_mask_the_unused_end_of_a_cache_is_not_attended():
    """Aligned at the top left, as in SDPA: query i attends keys 0 to i."""
    q, k, v = inputs(make_case(Sq=5, Sk=12))
    out, _ = forward(q, k, v)
    check(out, q, k[:, :, :5], v[:, :, :5], CAUSAL)
    out, _ = forward(q[:, :, :1], k, v)  # decoding: the whole cache
    check(out, q[:, :, :1], k, v, {})


def test_a_causal_mask_over_the_filled_part_of_a_cache():
    q, k, v = inputs(make_case(Sq=5, Sk=12))
    bias = random(1, 4, 5, 12)
    out, _ = forward(q, k, v, encodings.causal((2, 1, 5, 12), 9, "cpu"), position_bias=bias)
    check(out, q, k[:, :, :9], v[:, :, :9], CAUSAL | {"attn_mask": bias[..., :9]})


def packed(lengths=(5, 7)):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (t[:1] for t in inputs())
    return q, k, v, ends


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seq_lens_without_a_mask_give_a_packed_call(causal, dtype):
    q, k, v, ends = packed()
    lens = {"cu_seq_lens_q": ends.to(dtype), "cu_seq_lens_k": ends.to(dtype)}
    out, _ = forward(q, k, v, is_causal=causal, max_length_q=7, max_length_k=7, **lens)
    tokens = [t[0].transpose(0, 1).double() for t in (q, k, v)]
    expected, _ = reference.varlen(
        attention_call(*tokens, is_causal=causal, cu_seqlens_q=ends, cu_seqlens_k=ends)
    )
    torch.testing.assert_close(out[0], expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["causal", "ranges", "full"])
@pytest.mark.parametrize("bias", [False, True])
def test_cu_seq_lens_restrict_a_mask(form, bias):
    """The mask of transformers may not separate the documents."""
    q, k, v, ends = packed()
    mask, options = MASKS[form]
    mask = ranges(1) if form == "ranges" else mask
    extra = {"position_bias": random(1, 4, 12, 12)} if bias else {}
    out, _ = forward(q, k, v, mask, cu_seq_lens_q=ends, **extra)
    document = torch.bucketize(torch.arange(12), ends[1:], right=True)
    together = document[:, None] == document
    if form == "causal":
        together = together.tril()
    if form == "ranges":
        together[:, :3] = False
    added = torch.zeros(1, 1, 12, 12).masked_fill(~together, float("-inf"))
    check(out, q, k, v, {"attn_mask": added + extra.get("position_bias", 0.0)})


def test_indices_select_keys():
    q, k, v = inputs()
    indices = torch.full((2, 12, 4), -1, dtype=torch.int32)
    indices[:, :, 0], indices[:, :, 1] = 2, torch.arange(12, dtype=torch.int32)
    keep = torch.zeros(2, 1, 12, 12, dtype=torch.bool)
    keep[..., 2] = True
    keep |= torch.eye(12, dtype=torch.bool)
    for form in ("causal", "float"):
        mask, options = MASKS[form]
        out, _ = forward(q, k, v, mask, indices=indices)
        if form == "float":
            options = {"attn_mask": FLOAT.masked_fill(~keep, float("-inf"))}
        else:
            options = options | {"attn_mask": keep}
        check(out, q, k, v, options)


def test_mixed_dtypes_become_that_of_the_value_or_of_autocast():
    q, k, v = inputs()
    out, _ = forward(q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        out, _ = forward(q, k.bfloat16(), v)
        assert out.dtype == torch.float16
        assert forward(q, k, v)[0].dtype == torch.float16
    half = [t.half() for t in (q, k, v)]
    assert forward(*half, MASKS["float"][0].double())[0].dtype == torch.float16


def test_strides_that_the_operator_refuses_are_copied():
    q, k, v = inputs()
    out, _ = forward(q.mT.contiguous().mT, k, v, MASKS["causal"][0])
    check(out, q, k, v, CAUSAL)


def test_queries_of_batch_size_one_are_broadcast():
    q, k, v = inputs()
    out, _ = forward(q[:1], k, v, MASKS["full"][0])
    check(out, q[:1].expand_as(q), k, v, {})


def test_dropout_follows_the_seed_of_torch():
    q, k, v = inputs(make_case(B=1, Sq=64, Sk=64, Hq=8))
    torch.manual_seed(3)
    first = forward(q, k, v, dropout=0.5)[0]
    torch.manual_seed(3)
    assert torch.equal(forward(q, k, v, dropout=0.5)[0], first)
    assert not torch.allclose(forward(q, k, v)[0], first)


@pytest.mark.parametrize(
    "given, what",
    [
        ({"cache": SimpleNamespace()}, "`cache`, which Module passes; use 'sdpa' or 'eager'"),
        (
            {"write_index": 1, "indices": torch.zeros(2, 12, 1)},
            "keys that an indexer lists in continuous batching",
        ),
    ],
)
def test_unsupported_arguments_raise(given, what):
    with pytest.raises(NotImplementedError, match=f"does not support {what}"):
        forward(*inputs(), **given)


@pytest.mark.parametrize("D, lengths, cached", [(16, True, 1), (520, False, 1), (16, False, 0)])
def test_some_decoding_steps_run_the_cache_operator(D, lengths, cached, monkeypatch):
    """Lengths on the device, and head dimensions that other kernels do not support."""
    calls = []
    attend = fa_ops.attention_with_kv_cache
    monkeypatch.setattr(
        fa_ops, "attention_with_kv_cache", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    q, k, v = inputs(make_case(B=2, Hq=4, Hkv=1, Sq=1, Sk=9, D=D, Dv=16))
    lens = torch.tensor([5, 9]) if lengths else torch.tensor([9, 9])
    shape = (len(lens), 1, 1, 9)
    mask = encodings.lengths(shape, lens[:, None]) if lengths else encodings.full(shape, "cpu")
    with torch.no_grad():
        out, _ = forward(q, k, v, mask, s_aux=SINKS, softcap=2.0)
    assert len(calls) == cached
    check(out, q, k, v, {"kv_lens": lens.int(), "sinks": SINKS, "softcap": 2.0})
    if lengths:  # with gradients the lengths become key ranges
        q.requires_grad_()
        out, _ = forward(q, k, v, mask, s_aux=SINKS, softcap=2.0)
        assert torch.autograd.grad(out.sum(), q)[0].abs().max() > 0
        assert len(calls) == cached


@pytest.mark.parametrize("rows", [1, 2])
def test_a_decoding_step_with_left_padding_is_passed_contiguous_lengths(rows, monkeypatch):
    """The operator that is chosen on a GPU, here on the CPU."""
    passed, attend = [], fa_ops.attention_with_kv_cache
    monkeypatch.setattr(
        fa_ops, "attention_with_kv_cache", lambda *a, **k: passed.append(a[3]) or attend(*a, **k)
    )
    q, k, v = inputs(make_case(B=2, Hq=4, Hkv=2, Sq=1, Sk=9, D=16, Dv=16))
    lo, hi = torch.tensor([[3], [0]])[:rows], torch.tensor([[7], [9]])[:rows]
    mask, module = encodings.ranges((2, 1, 1, 9), lo, hi), torch.nn.Module()
    options = {"scale": None, "softcap": 0.0, "dropout_p": 0.0}
    call = operators.LayerCall(q, k, v, encodings.arguments(mask), None, options)
    with torch.no_grad():
        assert operators.is_step(call)
        outs = [operators.step(module, call) for _ in range(2)]
    check(outs[0][0], q, k, v, {"key_ranges": mask.ranges})
    assert passed[0] is passed[1] and passed[0].is_contiguous()
    assert passed[0].tolist() == [7, 9][:rows] * (2 // rows)


def test_lengths_are_expanded_to_a_batch_that_a_model_repeats():
    q, k, v = inputs(make_case(B=4, Hq=4, Hkv=1, Sq=1, Sk=9, D=16, Dv=16))
    mask = encodings.lengths((2, 1, 1, 9), torch.tensor([[5]]))
    with torch.no_grad():
        out, _ = forward(q, k, v, mask)
    check(out, q, k, v, {"kv_lens": torch.full((4,), 5, dtype=torch.int32)})


def test_heads_wider_than_any_gpu_kernel_run_eager_attention(monkeypatch):
    monkeypatch.setattr(operators, "is_too_wide", lambda call: True)
    monkeypatch.setattr(fa_ops, "attention", lambda *a, **k: pytest.fail("a kernel was called"))
    q, k, v = inputs()
    for form in MASKS:
        mask, options = MASKS[form]
        out, found = forward(q, k, v, mask, s_aux=SINKS)
        assert found is None
        check(out, q, k, v, options | {"sinks": SINKS})
