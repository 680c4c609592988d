"""Largest scores of queries, by `return_aux` of flex_attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import fa_ops
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
