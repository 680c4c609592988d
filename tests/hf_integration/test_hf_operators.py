"""The operator of a layer, and decoding steps that replay the decisions of the general path."""

import random

import pytest
import torch
from torch import nn

import fa_ops
from fa_ops.backends import reference
from fa_ops.call.call import attention_call
from fa_ops.testing import make_case
from hf_integration import attention, encodings, fa_ops_attention_forward, operators

LENS = torch.tensor([5, 9])
SINKS = torch.linspace(-1, 1, 4)
SHAPE = (2, 1, 1, 9)
LO, HI = torch.tensor([[3], [0]]), torch.tensor([[7], [9]])
KEPT = torch.arange(18).view(2, 9) % 4 > 0


def ranges():
    return encodings.ranges(SHAPE, LO, HI)


def lengths(values=LENS):
    return encodings.lengths(SHAPE, values)


def full():
    return encodings.full(SHAPE, "cpu")


def kept():
    return encodings.keys(SHAPE, KEPT)


MASKS = {
    "full": (full, {}),
    "lengths": (lengths, {"kv_lens": LENS.int()}),
    "ranges": (ranges, {"key_ranges": ranges().ranges}),
}


def inputs(B=2, Hq=4, Hkv=2, Sq=1, Sk=9, D=16, Dv=16):
    return make_case(B=B, Hq=Hq, Hkv=Hkv, Sq=Sq, Sk=Sk, D=D, Dv=Dv).fresh()[:3]


@pytest.fixture
def remembered(monkeypatch) -> dict[tuple, attention.Decisions]:
    """The decisions that are remembered, none at first."""
    monkeypatch.setattr(attention, "_remembered", {})
    return attention._remembered


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes decoding steps with key ranges run the operator that is chosen on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def forward(q, k, v, mask, module=None, **options):
    with torch.no_grad():
        return fa_ops_attention_forward(module or nn.Module(), q, k, v, mask, **options)[0]


@pytest.mark.parametrize("options", [{}, {"s_aux": SINKS}, {"softcap": 2.0, "scaling": 0.5}])
@pytest.mark.parametrize("form", MASKS)
def test_remembered_decisions_give_the_same_result(form, options, remembered, on_gpu):
    make, of_mask = MASKS[form]
    q, k, v = inputs()
    first = forward(q, k, v, make(), position_ids=torch.tensor([[8]]), **options)
    operator = operators.dense if form == "full" else operators.step
    assert [known.operator for known in remembered.values()] == [operator]
    again = forward(q, k, v, make(), **options)
    assert len(remembered) == 1
    assert first.is_contiguous() and torch.equal(first, again)
    q, k, v = (x.double() for x in (q, k, v))
    named = {"s_aux": "sinks", "scaling": "scale", "softcap": "softcap"}
    given = {named[name]: value for name, value in options.items()}
    expected, _ = reference.dense(attention_call(q, k, v, **of_mask, **given))
    torch.testing.assert_close(first, expected.transpose(1, 2).float(), atol=1e-5, rtol=1e-5)


def test_lengths_follow_their_mask(remembered):
    q, k, v = inputs()
    mask = lengths()
    forward(q, k, v, mask)
    mask.lengths.fill_(2)
    out = forward(q, k, v, mask)
    assert torch.equal(out, forward(q, k, v, lengths(torch.tensor([2, 2]))))


def test_copied_masks_share_remembered_decisions(remembered):
    """A mask is copied when it is moved to another device, or saved by a checkpoint."""
    q, k, v = inputs()
    for copy in (lengths().clone(), lengths().detach(), lengths().to("cpu", copy=True)):
        assert torch.equal(forward(q, k, v, copy), forward(q, k, v, lengths()))
    assert len(remembered) == 1


class OtherLayer(nn.Module):
    """Another class of layer."""


def calls():
    """Calls that differ from a plain decoding step in one respect."""
    q, k, v = inputs()
    apart = torch.stack([k, k], -1)[..., 0]
    repeated = encodings.lengths((2, 1, 1, 9), torch.tensor([5]))
    return {
        "full": ((q, k, v, full()), {}),
        "lengths": ((q, k, v, lengths()), {}),
        "ranges": ((q, k, v, ranges()), {}),
        "kept keys": ((q, k, v, kept()), {}),
        "causal over all": ((q, k, v, encodings.causal(SHAPE, 9, "cpu")), {}),
        "causal over some": ((q, k, v, encodings.causal(SHAPE, 6, "cpu")), {}),
        "causal over one": ((q, k, v, encodings.causal(SHAPE, 1, "cpu")), {}),
        "a step over all": ((q, k, v, encodings.step(SHAPE, 9, None, "cpu")), {}),
        "a step over some": ((q, k, v, encodings.step(SHAPE, 6, None, "cpu")), {}),
        "a step over kept keys": ((q, k, v, encodings.step(SHAPE, 6, KEPT, "cpu")), {}),
        "a bool mask of all keys": ((q, k, v, torch.tensor([[[[True]]], [[[False]]]])), {}),
        "kept causal keys": ((q, k, v, encodings.causal_keys(SHAPE, KEPT[:, :6])), {}),
        "kept keys in ranges": ((q, k, v, encodings.ranges(SHAPE, LO, HI, KEPT)), {}),
        "a bool mask": ((q, k, v, torch.ones(2, 1, 1, 9).bool()), {}),
        "no mask": ((q, k, v, None), {}),
        "several queries": ((*inputs(Sq=2), encodings.full((2, 1, 2, 9), "cpu")), {}),
        "a single key": ((*inputs(Sk=1), encodings.full((2, 1, 1, 1), "cpu")), {}),
        "wide heads": ((*inputs(D=520), full()), {}),
        "wide values": ((*inputs(Dv=520), full()), {}),
        "other dtypes": ((q, k.double(), v, lengths()), {}),
        "rows apart": ((q, apart, v, lengths()), {}),
        "queries shared by the batch": ((q[:1], k, v, lengths()), {}),
        "a repeated batch": ((*inputs(B=4), repeated), {}),
        "sinks": ((q, k, v, lengths()), {"s_aux": SINKS}),
        "sinks of each query": ((q, k, v, lengths()), {"s_aux": torch.zeros(2, 4, 1, 1)}),
        "another layer": ((q, k, v, lengths()), {"module": OtherLayer()}),
        "weights": ((q, k, v, full()), {"output_attentions": True}),
        "a bias": ((q, k, v, full()), {"position_bias": torch.randn(1, 4, 1, 9)}),
        "indices": ((q, k, v, full()), {"indices": torch.zeros(2, 1, 3, dtype=torch.int64)}),
    }


@pytest.mark.parametrize("seed", range(6))
def test_families_do_not_share_decisions(seed, monkeypatch):
    """In any order, each call gives the result that it gives without remembered decisions."""
    known, alone = calls(), {}
    for name, (inputs, options) in known.items():
        monkeypatch.setattr(attention, "_remembered", {})
        alone[name] = forward(*inputs, **options)
    monkeypatch.setattr(attention, "_remembered", {})
    names = list(known) * 3
    random.Random(seed).shuffle(names)
    for name in names:
        inputs, options = known[name]
        assert torch.equal(forward(*inputs, **options), alone[name]), name


def test_a_gpu_has_the_results_of_other_operators(request):
    known = calls()
    expected = {name: forward(*inputs, **options) for name, (inputs, options) in known.items()}
    request.getfixturevalue("remembered")
    request.getfixturevalue("on_gpu")
    for name, (inputs, options) in known.items():
        out = forward(*inputs, **options)
        torch.testing.assert_close(out, expected[name], atol=1e-5, rtol=1e-5, msg=name)


def test_decisions_with_dropout_or_gradients_are_not_remembered(remembered):
    q, k, v = inputs()
    mask = lengths()
    q.requires_grad_()
    out, _ = fa_ops_attention_forward(nn.Module(), q, k, v, mask)
    assert torch.autograd.grad(out.sum(), q)[0].abs().max() > 0
    forward(q.detach(), k, v, full(), dropout=0.5)
    assert remembered == {}
    forward(q.detach(), k, v, mask)  # this one is remembered, but not used with a gradient
    out, _ = fa_ops_attention_forward(nn.Module(), q, k, v, mask)
    assert torch.autograd.grad(out.sum(), q)[0].abs().max() > 0


def test_the_number_of_remembered_decisions_is_bounded(remembered, monkeypatch):
    monkeypatch.setattr(attention, "MAX_REMEMBERED", 3)
    for Sk in range(2, 8):
        forward(
            *inputs(Hkv=1 if Sk % 2 else 2, D=8 * Sk, Sk=Sk), encodings.full((2, 1, 1, Sk), "cpu")
        )
        assert len(remembered) <= 3


def test_compiled_code_runs_the_general_path(remembered):
    def run(q, k, v, ends):
        return forward(q, k, v, encodings.lengths(SHAPE, ends))

    q, k, v = inputs()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    out = compiled(q, k, v, LENS)
    assert remembered == {}
    torch.testing.assert_close(out, run(q, k, v, LENS))


@pytest.mark.parametrize("kept", [None, KEPT], ids=["plain", "holes"])
def test_a_step_of_a_known_length_reads_no_later_keys(kept, remembered, monkeypatch):
    """In an eager call, also after one of another length; compiled, all lengths are one graph."""
    seen, attend = [], fa_ops.attention
    q, k, v = inputs()
    forward(q, k, v, lengths() if kept is None else encodings.keys(SHAPE, KEPT))
    with monkeypatch.context() as patch:
        patch.setattr(
            fa_ops, "attention", lambda *a, **k: seen.append(a[1].shape[2]) or attend(*a, **k)
        )
        outs = [forward(q, k, v, encodings.step(SHAPE, end, kept, "cpu")) for end in (9, 6, 8)]
    assert seen == [9, 6, 8]
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(
        forward, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True
    )
    for end, out in zip((9, 6, 8), outs, strict=True):
        ours = compiled(q, k, v, encodings.step(SHAPE, end, kept, "cpu"))
        torch.testing.assert_close(ours, out)
    assert len(graphs) == 1


def test_lengths_are_passed_without_a_copy(monkeypatch):
    passed = []
    attend = fa_ops.attention_with_kv_cache
    monkeypatch.setattr(
        fa_ops, "attention_with_kv_cache", lambda *a, **k: passed.append(a[3]) or attend(*a, **k)
    )
    mask = lengths()
    for _ in range(2):
        forward(*inputs(), mask)
    assert passed[0] is passed[1] and passed[0] is mask.lengths
