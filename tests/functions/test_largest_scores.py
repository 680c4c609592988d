"""Largest scores of queries, by `return_aux` of flex_attention."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import fa_ops
from fa_ops.backends import reference
from fa_ops.call.call import DENSE
from fa_ops.call.options import Operands
from fa_ops.call.python_types import checked_call, sides
from tests.functions.test_flex import BACKENDS, tensors
from tests.programs import functions as f

LARGEST = {  # names of a score and of a mask, and options
    "options": ("alibi", "causal", {}),
    "a soft cap": ("softcap", None, {"window": (7, 3), "sinks": torch.full((f.H,), 50.0)}),
    "a program": ("gates", "documents of rows", {"enable_gqa": True}),
    "a bias": ("scaled bias of pairs", "ancestors", {}),
    "neither": (None, None, {"is_causal": True}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LARGEST)
def test_largest_scores(name, backend):
    """Of scores far apart, equal and tiny, without sinks, and -inf without keys."""
    score, mask, options = LARGEST[name]
    score_mod, mask_mod = f.SCORES.get(score), f.MASKS.get(mask)
    torch.manual_seed(0)
    q, k, v = tensors(torch.float32, kv_heads=2 if options.get("enable_gqa") else f.H)
    with torch.no_grad():
        q[:, :, 5] *= 1e6
        q[:, :, 6] = 0.0
        q[:, :, 7] *= 1e-6
    aux = torch_flex.AuxRequest(lse="sinks" not in options, max_scores=True)
    attend = fa_ops.flex_attention
    if name == "a program":
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    result = attend(
        q, k, v, score_mod, mask_mod=mask_mod, return_aux=aux, backend=backend, **options
    )
    s = q.double() @ k.double().repeat_interleave(f.H // k.shape[1], 1).mT / math.sqrt(8)
    s = s if score_mod is None else score_mod(s, *f.indices()).expand(s.shape)
    if mask_mod is not None:
        s = s.masked_fill(~f.dense_mask(mask_mod), -torch.inf)
    distance = torch.arange(f.S).view(-1, 1) - torch.arange(f.S)
    left, right = (f.S, 0) if "is_causal" in options else options.get("window", (f.S, f.S))
    s = s.masked_fill((distance > left) | (distance < -right), -torch.inf)
    largest = result[1].max_scores
    assert largest.dtype == torch.float32 and not largest.requires_grad
    torch.testing.assert_close(largest, s.amax(-1).float(), atol=1e-6, rtol=1e-6)
    assert (result[1].lse is not None) == aux.lse


def test_largest_scores_change_no_gradient():
    """Eager, compiled and mapped."""
    q, k, v = tensors(torch.float32)
    aux = torch_flex.AuxRequest(lse=True, max_scores=True)

    def attend(q, with_max=True):
        score_mod, mask_mod = f.SCORES["gates"], f.MASKS["tree"]
        given = {"return_aux": aux} if with_max else {"return_lse": True}
        return fa_ops.flex_attention(q, k, v, score_mod, mask_mod=mask_mod, **given)

    out, lse = attend(q, False)
    compiled = torch.compile(attend, fullgraph=True)
    expected = torch.autograd.grad(out.square().sum() + lse.sum(), [q, k, f.GATE])
    for run in (attend, compiled):
        out, found = run(q)
        grads = torch.autograd.grad(out.square().sum() + found.lse.sum(), [q, k, f.GATE])
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b)
        assert not found.max_scores.requires_grad
    several = torch.stack([q.detach(), 2 * q.detach()])
    mapped = torch.vmap(lambda q: attend(q)[1].max_scores)(several)
    torch.testing.assert_close(mapped[1], attend(several[1])[1].max_scores)
    empty = fa_ops.flex_attention(q, k[:, :, :0], v[:, :, :0], return_aux=aux)[1].max_scores
    assert empty.shape == q.shape[:3] and (empty == -torch.inf).all()


AUX = torch_flex.AuxRequest(lse=True, max_scores=True)
_TENSORS = "attn_mask", "alibi_slopes", "kv_lens", "key_ranges"


def largest(q, k, v, options):
    """The oracle's, from all scores in float64."""
    operands = Operands(**{name: options.get(name) for name in _TENSORS})
    scalars = (
        options["is_causal"], 0.0, options["scale"], *sides(options["window"]), options["softcap"],
        False, None,
    )  # fmt: skip
    call = checked_call(DENSE, q.double(), k.double(), v.double(), operands, scalars)
    return reference.max_scores(call).float()


def random_options(pick, B, Hq, Sq, Sk):
    """Options of a dense call, drawn by `pick`."""
    ranges = torch.randint(0, Sk, (1, 1, Sq, 2), dtype=torch.int32)
    bias, keep = torch.randn(Sq, Sk), torch.rand(B, 1, Sq, Sk) > 0.5
    mask, ranges = pick(((None, None), (bias, None), (keep, None), (None, ranges), (bias, ranges)))
    lens = torch.tensor([0, Sk - 1], dtype=torch.int32)
    return {
        "is_causal": pick((False, True)), "scale": pick((None, 0.3)), "softcap": pick((0.0, 2.0)),
        "window": pick((None, (3, None), (5, 2))), "sinks": pick((None, torch.randn(Hq))),
        "alibi_slopes": pick((None, torch.rand(Hq), torch.rand(B, Hq))),
        "kv_lens": pick((None, lens)), "attn_mask": mask, "key_ranges": ranges,
    }  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_largest_scores_of_dense_calls(backend):
    """With random options: those of the oracle, beside out and lse of calls without them."""
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(25):
        Hq, Sq, Sk = rng.choice((2, 4)), rng.choice((1, 5, 70)), rng.choice((3, 64, 90))
        q, k, v = (torch.randn(2, h, s, 8) for h, s in ((Hq, Sq), (2, Sk), (2, Sk)))
        options = random_options(rng.choice, 2, Hq, Sq, Sk)
        out, lse = fa_ops.attention(q, k, v, return_lse=True, backend=backend, **options)
        found, aux = fa_ops.attention(q, k, v, return_aux=AUX, backend=backend, **options)
        torch.testing.assert_close(aux.max_scores, largest(q, k, v, options), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close((found, aux.lse), (out, lse), atol=1e-5, rtol=1e-5)


def test_largest_scores_of_dense_calls_change_no_gradient():
    """Eager, compiled and mapped, with all that is a program."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8, requires_grad=True) for h in (4, 2, 2))
    mask = torch.randn(9, 9, requires_grad=True)
    lens = torch.tensor([9, 4], dtype=torch.int32)
    options = {
        "softcap": 2.0, "alibi_slopes": torch.rand(4), "kv_lens": lens, "is_causal": True,
        "scale": None, "window": None,
    }  # fmt: skip
    leaves = q, k, v, mask

    def attend(q, **wanted):
        return fa_ops.attention(q, k, v, mask, **options, **wanted)

    out, lse = attend(q, return_lse=True)
    expected = torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), leaves)
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)):
        out, aux = run(q, return_aux=AUX)
        loss = out.square().sum() + aux.lse[lse.isfinite()].sum()
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected)
        torch.testing.assert_close(
            aux.max_scores, largest(q, k, v, options | {"attn_mask": mask}), atol=1e-5, rtol=1e-5
        )
        assert not aux.max_scores.requires_grad
    several = torch.stack([q.detach(), 2 * q.detach()])
    mapped = torch.vmap(lambda q: attend(q, return_aux=AUX)[1].max_scores)(several)
    torch.testing.assert_close(mapped[1], attend(several[1], return_aux=AUX)[1].max_scores)
    with torch.autocast("cpu", torch.bfloat16):
        out, aux = attend(q, return_aux=AUX)
    assert out.dtype == torch.bfloat16 and aux.max_scores.dtype == torch.float32
    out, aux = attend(q, return_aux=torch_flex.AuxRequest(lse=True))
    assert torch.equal(aux.lse, lse) and aux.max_scores is None
    assert attend(q, return_aux=torch_flex.AuxRequest(max_scores=True))[1].lse is None
    assert fa_ops.explain(q, k, v, return_aux=AUX, **options).backend == "cpu"


def test_what_largest_scores_of_dense_calls_refuse():
    q = torch.randn(1, 2, 4, 8)
    one, nested = torch.ones(1), torch.nested.nested_tensor([q[0]], layout=torch.jagged)
    for error, message, options in (
        (TypeError, "return_aux must be an AuxRequest, got bool: pass", {"return_aux": True}),
        (ValueError, "pass return_aux alone", {"return_lse": True}),
        (NotImplementedError, "dropout_p=0.5: .* call once more with", {"dropout_p": 0.5}),
        (NotImplementedError, "q_scale, k_scale and v_scale: .* pass", {"q_scale": one}),
        (ValueError, "must not require grad", {"alibi_slopes": torch.ones(2, requires_grad=True)}),
        (ValueError, "alibi_slopes", {"alibi_slopes": torch.ones(3)}),
        (ValueError, "softcap", {"softcap": -1.0}),
        (TypeError, "query", {"query": None}),
        (NotImplementedError, "query must not be a NestedTensor .* pass", {"query": nested}),
    ):
        with pytest.raises(error, match=message):
            fa_ops.attention(**{"query": q, "key": q, "value": q, "return_aux": AUX} | options)
    with torch.no_grad():  # as without largest scores
        slopes = torch.ones(2, requires_grad=True)
        assert (
            fa_ops.attention(q, q, q, alibi_slopes=slopes, return_aux=AUX)[1].max_scores.dim() == 3
        )
    for message, options in (
        ("softcap must be finite and >= 0", {"softcap": -1.0}),
        ("alibi_slopes must be float32", {"alibi_slopes": torch.ones(2).double()}),
    ):
        compiled = torch.compile(fa_ops.attention, backend="aot_eager")
        with pytest.raises(Exception, match=message):
            compiled(q, q, q, return_aux=AUX, **options)
