"""Which layers of a decoding step go the short way, and that both ways agree."""

import pytest
import torch
from torch import nn

import fa_ops
from fa_ops.backends import reference
from fa_ops.testing import make_case
from fa_ops.types import Spec
from hf_integration import encodings, fa_ops_attention_forward, steps

LENS = torch.tensor([5, 9])
SHAPE = (2, 1, 1, 9)


def ranges():
    return encodings.ranges(SHAPE, torch.tensor([[3], [0]]), torch.tensor([[7], [9]]))


def lengths(values=LENS):
    return encodings.lengths(SHAPE, values)


def full():
    return encodings.full(SHAPE, "cpu")


SINKS = torch.linspace(-1, 1, 4)
MASKS = {
    "full": (full, Spec()),
    "lengths": (lengths, Spec(kv_lens=LENS.int())),
    "ranges": (ranges, Spec(key_ranges=ranges().ranges)),
}


def inputs(B=2, Hq=4, Hkv=2, Sq=1, Sk=9, D=16, Dv=16):
    return make_case(B=B, Hq=Hq, Hkv=Hkv, Sq=Sq, Sk=Sk, D=D, Dv=Dv).fresh()[:3]


@pytest.fixture
def short(monkeypatch) -> list[bool]:
    """Whether each call went the short way."""
    found, attend = [], steps.attend

    def noted(*args):
        out = attend(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(steps, "attend", noted)
    return found


@pytest.fixture
def on_gpu(monkeypatch):
    """Ranges take the short way where the kernel that splits the keys has them."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def forward(q, k, v, mask, module=None, **options):
    with torch.no_grad():
        return fa_ops_attention_forward(module or nn.Module(), q, k, v, mask, **options)[0]


@pytest.mark.parametrize("options", [{}, {"s_aux": SINKS}, {"softcap": 2.0, "scaling": 0.5}])
@pytest.mark.parametrize("form", MASKS)
def test_both_ways_agree(form, options, short, on_gpu, monkeypatch):
    make, spec = MASKS[form]
    q, k, v = inputs()
    one = forward(q, k, v, make(), position_ids=torch.tensor([[8]]), **options)
    monkeypatch.setattr(steps, "attend", lambda *args: None)
    other = forward(q, k, v, make(), **options)
    assert short == [True] and one.is_contiguous() and torch.equal(one, other)
    spec = spec._replace(sinks=options.get("s_aux"), scale=options.get("scaling"))
    spec = spec._replace(softcap=options.get("softcap", 0.0))
    expected, _ = reference.dense(q.double(), k.double(), v.double(), spec)
    torch.testing.assert_close(one, expected.transpose(1, 2).float(), atol=1e-5, rtol=1e-5)


def test_lengths_follow_their_mask(short):
    q, k, v = inputs()
    mask = lengths()
    forward(q, k, v, mask)
    mask.lengths.fill_(2)
    out = forward(q, k, v, mask)
    assert short == [True, True]
    assert torch.equal(out, forward(q, k, v, lengths(torch.tensor([2, 2]))))


def test_a_copied_mask_is_still_a_compact_one(short):
    """As a mask is that was moved to another device, or saved by a checkpoint."""
    q, k, v = inputs()
    copies = [lengths().clone(), lengths().detach(), lengths().to("cpu", copy=True)]
    for copy in copies:
        assert torch.equal(forward(q, k, v, copy), forward(q, k, v, lengths()))
    assert short == [True] * 6


def others():
    q, k, v = inputs()
    lens, keep = lengths(), torch.ones(2, 1, 1, 9).bool()
    apart = torch.stack([k, k], -1)[..., 0]
    return {
        "ranges on the CPU": (q, k, v, ranges()),
        "a bool mask": (q, k, v, keep),
        "several queries": (*inputs(Sq=2), full()),
        "a single key": (*inputs(Sk=1), full()),
        "wide heads": (*inputs(D=264), full()),
        "wide values": (*inputs(Dv=264), full()),
        "other dtypes": (q, k.double(), v, lens),
        "rows apart": (q, apart, v, lens),
        "queries of the batch": (q[:1], k, v, lens),
        "a repeated batch": (*inputs(B=4), encodings.lengths(SHAPE, torch.tensor([5]))),
    }


@pytest.mark.parametrize("name", others())
def test_what_is_not_plainly_a_step_goes_the_long_way(name, short):
    q, k, v, mask = others()[name]
    assert forward(q, k, v, mask).shape == (k.shape[0], q.shape[2], 4, v.shape[3])
    assert short == [False]


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.5},
        {"output_attentions": True},
        {"position_bias": torch.zeros(1, 4, 1, 9)},
        {"indices": torch.zeros(2, 1, 3, dtype=torch.int64)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_few_models_ask_for_is_no_step(options, short):
    forward(*inputs(), full(), **options)
    assert short == []


def test_gradients_and_sinks_of_each_query_go_the_long_way(short):
    q, k, v = inputs()
    mask = lengths()
    q.requires_grad_()
    out, _ = fa_ops_attention_forward(nn.Module(), q, k, v, mask)
    assert torch.autograd.grad(out.sum(), q)[0].abs().max() > 0
    forward(q.detach(), k, v, mask, s_aux=torch.zeros(2, 4, 1, 1))
    assert short == [False, False]


def test_a_compiler_sees_the_long_way(short):
    def run(q, k, v, ends):
        return forward(q, k, v, encodings.lengths(SHAPE, ends))

    q, k, v = inputs()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, LENS), run(q, k, v, LENS))
    assert short == [True]


def test_the_operator_is_asked_with_the_lengths_themselves(monkeypatch):
    given = []
    attend = fa_ops.attention_with_kv_cache
    monkeypatch.setattr(
        fa_ops, "attention_with_kv_cache", lambda *a, **k: given.append(a[3]) or attend(*a, **k)
    )
    mask = lengths()
    for _ in range(2):
        forward(*inputs(), mask)
    assert given[0] is given[1] and given[0] is mask.lengths
