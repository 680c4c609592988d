"""Random attention, written by hand or as a call of SDPA or FlexAttention: masks of known and unknown
content, fills, windows, rows without keys, ALiBi, scales before and after them, layouts, repeated
heads, guards and gates. Fused or not, results and gradients are those of eager mode.

FA_OPS_ATTENTION_PROGRAMS=2000 runs that many instead of the default 24.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.compile_passes.helpers import Fusion, fuse, results

INF = float("inf")
MIN = torch.finfo(torch.float32).min
B, H, D = 2, 4, 8
PROGRAMS = int(os.environ.get("FA_OPS_ATTENTION_PROGRAMS", "24"))
CHUNK = 12
# The reasons for which a program written by hand may stay.
EXPECTED = (
    "the softmax runs over a dimension of size 1",
    "they are masked, and enlarged after their maximum was subtracted",
    "a number replaces them after a bias or mask and a shift by their maximum",
    "the attention weights are masked after the softmax, not as the scores were",
    "a bias that requires grad is added after a finite fill value",
    "several masks with different fill values: rows without keys would differ",
)
Mask = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]  # of query and key positions

PARTS: dict[str, Mask] = {
    "causal": lambda i, j, given: j <= i,
    "causal to the last key": lambda i, j, given: j <= i + given["surplus"],
    "window": lambda i, j, given: (j > i - 3) & (j <= i),
    "symmetric": lambda i, j, given: (i - j).abs() <= 2,
    "chunks": lambda i, j, given: i // 4 == j // 4,
    "prefix": lambda i, j, given: (j <= i) | (j < 3),
    "future": lambda i, j, given: j > i,
    "lengths": lambda i, j, given: j < given["lengths"][:, None, None, None],
    "padding": lambda i, j, given: given["tokens"].bool()[:, None, None, :],
    "padding of rows": lambda i, j, given: given["rows"][:, None, :, None],
    "random": lambda i, j, given: given["random"],
    "documents": lambda i, j, given: _same_document(given),
}


def _added(rng: random.Random, shape: tuple, generator: torch.Generator) -> Tensor:
    """A mask whose contents are not known when the program is compiled, with rows without keys."""
    keep = torch.rand(shape, generator=generator) > 0.4
    keep &= torch.rand(shape[:-1], generator=generator)[..., None] > 0.3
    return torch.zeros(shape).masked_fill(~keep, rng.choice((-INF, MIN, -1e9, -1e9)))


def _same_document(given: dict[str, Tensor]) -> Tensor:
    numbers = given["starts"].cumsum(-1)
    of_queries = numbers[:, : given["rows"].shape[1]]
    return (of_queries[:, :, None] == numbers[:, None, :])[:, None]


def inputs(rng: random.Random, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    Sq = rng.choice((1, 7, 12, 12, 12))
    Sk = Sq if rng.random() < 0.6 else rng.choice((5, 12, 15))
    Hkv = rng.choice((H, H, 2, 1))
    q, k, v = (
        torch.randn(B, h, s, D, generator=generator) for h, s in ((H, Sq), (Hkv, Sk), (Hkv, Sk))
    )
    return {
        "q": q,
        "k": k,
        "v": v,
        "bias": torch.randn(H, Sq, Sk, generator=generator),
        "slopes": torch.rand(H, generator=generator),
        "lengths": torch.randint(0, Sk + 2, (B,), generator=generator),
        "tokens": torch.randint(0, 2, (B, Sk), generator=generator),
        "rows": torch.rand(B, Sq, generator=generator) > 0.3,
        "random": torch.rand(B, 1, Sq, Sk, generator=generator) > 0.4,
        "added": _added(rng, (B, 1, Sq, Sk), generator),
        "starts": torch.rand(B, max(Sk, Sq), generator=generator)[:, :Sk] > 0.7,
        "gate": torch.rand(B, 1, 1, Sk, generator=generator),
    }


@dataclasses.dataclass(frozen=True)
class ByHand:
    """How the scores and weights of a program are written."""

    form: str  # of the mask
    fill: float
    scale: float
    bias: str  # where it is added
    softcap: bool
    rescale: float  # after masks and bias
    second: str  # another mask, after the rescaling
    late: float  # a scale after the maximum is subtracted, or 0
    guard: str  # of the weights
    centred: bool = False  # the maximum is subtracted before the masks

    def scores(self, q: Tensor, k: Tensor, keep: Tensor | None, given: dict[str, Tensor]) -> Tensor:
        s = q @ k.mT * self.scale
        s = torch.tanh(s / 4) * 4 if self.softcap else s
        s = s - s.amax(-1, keepdim=True) if self.centred else s
        s = s + given["bias"] if self.bias == "first" else s
        if self.bias == "alibi":
            far = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
            s = s + given["slopes"].detach().view(-1, 1, 1) * far
        if self.form == "given":
            s = s + given["added"]
        elif keep is not None:
            s = self.masked(s, keep)
        s = s + given["bias"] if self.bias == "last" else s
        s = s * self.rescale if self.rescale > 0 else s / -self.rescale
        if self.second == "added":
            s = s + given["added"]
        elif self.second == "filled":
            s = s.masked_fill(given["random"], self.fill)
        return (s - s.amax(-1, keepdim=True)) * self.late if self.late else s

    def masked(self, s: Tensor, keep: Tensor) -> Tensor:
        if self.form == "bool-filled":
            return s.masked_fill(~keep, self.fill)
        if self.form == "bool-where":
            return torch.where(keep, s, self.fill)
        if self.form == "written":
            s[(~keep).expand(s.shape)] = self.fill
            return s
        added = torch.zeros(keep.shape).masked_fill(~keep, self.fill)
        return s + added + (added if self.form == "added-twice" and self.fill == -INF else 0.0)

    def weights(self, s: Tensor, keep: Tensor | None, gate: Tensor) -> Tensor:
        w = s.softmax(-1)
        w = F.dropout(w, 0.3, training=False) if self.scale == 0.3 else w
        if self.guard == "nan":
            return w.masked_fill(w.isnan(), 0.0)
        if self.guard == "rows":
            return w.masked_fill((torch.arange(w.shape[-2]) % 3 == 0)[:, None], 0.0)
        if self.guard == "masked" and keep is not None:
            return w.masked_fill(~keep, 0.0)
        if self.guard == "normalised":
            return w / w.sum(-1, keepdim=True)
        if self.guard.startswith("gated"):
            w = w * gate
            return w if self.guard == "gated" else w / (w.sum(-1, keepdim=True) + 1e-3)
        return w


def by_hand(rng: random.Random) -> ByHand:
    return ByHand(
        form=rng.choice("bool-filled bool-where written added added-twice given".split()),
        fill=rng.choice((-INF, -INF, MIN, -1e9)),
        scale=rng.choice((D**-0.5, 0.3, 1.0)),
        bias=rng.choice("none none none none first last alibi".split()),
        softcap=rng.random() < 0.2,
        rescale=rng.choice((1.0, 1.0, 1.0, 0.3, 2.0, -3.0)),
        second=rng.choice("none none none none added filled".split()),
        late=rng.choice((0, 0, 0, 0, 0, 0.5, 1.5)),
        guard=rng.choice(GUARDS),
    )


GUARDS = "none none none none nan rows masked normalised gated gated-normalised".split()
FLEX_MASKS = {
    "causal": lambda given, b, i, j: i >= j,
    "window": lambda given, b, i, j: (i - j < 3) & (i >= j),
    "chunks": lambda given, b, i, j: i // 4 == j // 4,
    "prefix": lambda given, b, i, j: (i >= j) | (j < 3),
    "lengths": lambda given, b, i, j: j < given["lengths"][b],
    "tokens": lambda given, b, i, j: given["tokens"][b, j] > 0,
    "random": lambda given, b, i, j: given["random"][b, 0, i, j],
}
FLEX_SCORES = {
    "none": lambda given, s, h, i, j: s,
    "softcap": lambda given, s, h, i, j: 4 * torch.tanh(s / 4),
    "bias": lambda given, s, h, i, j: s * 0.5 + given["bias"][h, i, j],
    "alibi": lambda given, s, h, i, j: s + given["slopes"][h] * (j - i),
    "distance": lambda given, s, h, i, j: s - given["slopes"][h] * (i - j).abs(),
}
# torch refuses a fill in a variable where shapes are dynamic
FLEX_FILLS = (
    lambda keep, s: torch.where(keep, s, -float("inf")),
    lambda keep, s: torch.where(keep, s, -1e9),
)


def flex(rng: random.Random) -> Callable:
    names = rng.sample(list(FLEX_MASKS), rng.choice((0, 1, 1, 2)))
    change = rng.choice(list(FLEX_SCORES))
    fill = rng.choice((FLEX_FILLS[0], FLEX_FILLS[0], *FLEX_FILLS))
    scale = rng.choice((None, 0.3))

    def function(q, k, v, **given):
        def score_mod(s, b, h, i, j):
            s = FLEX_SCORES[change](given, s, h, i, j)
            for name in names:
                s = fill(FLEX_MASKS[name](given, b, i, j), s)
            return s

        grouped = k.shape[1] != q.shape[1]
        return flex_attention(q, k, v, score_mod, scale=scale, enable_gqa=grouped)

    return function


def program(rng: random.Random) -> Callable:
    if rng.random() < 0.15:
        return flex(rng)
    names = rng.sample(list(PARTS), rng.choice((0, 1, 1, 2, 2, 3)))
    written = None if rng.random() < 0.3 else by_hand(rng)  # None: a call of SDPA
    fill, scale = rng.choice((-INF, -INF, MIN, -1e9)), rng.choice((None, 0.3, 1.0))
    layout, biased = rng.choice("heads projected three".split()), rng.random() < 0.25
    causal, repeat = rng.random() < 0.2, rng.choice(("interleave", "expand", "gqa"))
    if written and not written.late and rng.random() < 0.25:
        written = dataclasses.replace(written, centred=True)

    def mask(given: dict[str, Tensor]) -> Tensor | None:
        i = torch.arange(given["q"].shape[2])[:, None]
        j = torch.arange(given["k"].shape[2])
        given = {**given, "surplus": given["k"].shape[2] - given["q"].shape[2]}
        kept = [PARTS[name](i, j, given) for name in names if _fits(name, given)]
        total = None
        for part in kept:
            total = part if total is None else total & part
        return total

    def call(q, k, v, keep, bias):
        added = None if keep is None else keep
        if biased:
            base = bias if keep is None else bias.masked_fill(~keep, fill)
            added = base.expand(B, -1, -1, -1)
        return F.scaled_dot_product_attention(
            q, k, v, added, is_causal=causal and added is None, scale=scale,
            enable_gqa=repeat == "gqa",
        )  # fmt: skip

    def function(q, k, v, **given):
        keep = mask({"q": q, "k": k, "v": v, **given})
        if layout == "projected":  # as a view of (B, S, H, D)
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        if written or repeat != "gqa":
            k, v = (_repeated(x, H // k.shape[1], repeat) for x in (k, v))
        if written:
            out = written.weights(written.scores(q, k, keep, given), keep, given["gate"]) @ v
        else:
            out = call(q, k, v, keep, given["bias"])
        if layout == "projected":
            return out.transpose(1, 2).reshape(B, q.shape[2], -1)
        return out

    return function


def _fits(name: str, given: dict[str, Tensor]) -> bool:
    longer = given["q"].shape[2] > given["k"].shape[2]
    return not (name == "documents" and longer)


def _repeated(x: Tensor, times: int, how: str) -> Tensor:
    if how == "interleave":
        return x.repeat_interleave(times, 1)
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def compare(seed: int) -> Fusion:
    rng = random.Random(seed)
    given = inputs(rng, seed)
    run = program(rng)
    names = list(given)

    def function(*tensors):
        return run(**dict(zip(names, tensors, strict=True)))

    fusion = fuse(function, dynamic=seed % 4 == 0 or None)
    train = seed % 2 == 1 and "flex" not in run.__qualname__  # which has no backward on a CPU
    expected = results(function, tuple(given.values()), train)
    actual = results(fusion.run, tuple(given.values()), train)
    names_of_results = ["out", *(f"gradient {i}" for i in range(len(expected) - 1))]
    finite = all(x.isfinite().all() for x in expected)  # eager gradients are NaN beside NaN rows
    for name, a, e in zip(names_of_results, actual, expected, strict=True):
        if name != "out" and not finite:
            continue
        error = torch.where(e.isfinite(), a - e, 0).abs().max()
        where = [str(f) for f in fusion.findings]
        assert error < 2e-5 * max(
            1.0, e[e.isfinite()].abs().max().item() if e.isfinite().any() else 1.0
        ), f"seed {seed}: {name} differs by {error}, {where}\n{fusion.code}"
    return fusion


@pytest.mark.parametrize("start", range(0, PROGRAMS, CHUNK))
def test_random_attention_matches_eager(start: int) -> None:
    findings = [f for seed in range(start, start + CHUNK) for f in compare(seed).findings]
    assert len(findings) == CHUNK, "every program is one softmax or call"
    by_hand = [f for f in findings if f.operation == "softmax"]
    unexpected = [f for f in by_hand if not f.fused and not f.reason.endswith(EXPECTED)]
    assert not unexpected, [str(f) for f in unexpected]
    assert any(f.fused for f in findings)
