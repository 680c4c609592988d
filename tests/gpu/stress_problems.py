"""The problems of `tests.gpu.stress`: random shapes, a few for each kernel family."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

import fa_ops
from fa_ops.testing import (
    CacheCase,
    Case,
    PackedCase,
    assert_cache_close,
    assert_close_to_oracle,
)

BACKEND, DEVICE = "hopper", "cuda"
SHAPES = 4  # problems of each family
MAX_SCORES, MAX_QUERY_ELEMENTS = 2**27, 2**23  # limits for the size of a problem

Results = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Calls of one shape, with a backward pass if `gradients` is set."""

    kind: str
    case: Case | PackedCase | CacheCase
    gradients: bool = False

    def check(self) -> None:
        """Compare with the oracle; raises AssertionError."""
        if isinstance(self.case, CacheCase):
            assert_cache_close(self.case, BACKEND)
        else:
            assert_close_to_oracle(self.case, BACKEND, self.gradients)

    def call(self) -> Callable[[], Results]:
        """Create the inputs, and return a function that repeats the same call."""
        call = self.case.fresh()
        (q, k, v), t, o = call[:3], call.operands, call.options
        if call.is_cached:
            args = q, k, v, t.kv_lens, t.page_table, o.is_causal
            return lambda: (fa_ops.attention_with_kv_cache(*args, backend=BACKEND),)
        options = {"is_causal": o.is_causal, "deterministic": o.deterministic, "backend": BACKEND}
        if call.is_packed:
            attend = functools.partial(fa_ops.attention_varlen, **options)
            inputs = q, k, v, t.cu_seqlens_q, t.cu_seqlens_k
        else:
            attend, inputs = functools.partial(fa_ops.attention, **options), (q, k, v)
        if not self.gradients:
            return lambda: (attend(*inputs),)
        out = attend(*inputs)
        grad, _ = self.case.grad_outputs(out, out)

        def both() -> Results:
            # new leaves for every call: autograd synchronises streams that share a leaf
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = attend(*leaves, *inputs[3:])
            return out.detach(), *torch.autograd.grad(out, leaves, grad)

        return both

    def exact(self) -> int:
        """The number of leading results that are deterministic; the others are gradients."""
        features = getattr(self.case, "features", self.case)
        return 4 if not self.gradients or features.deterministic else 1


def problems(seed: int) -> list[Problem]:
    """`SHAPES` problems of each family, for which different kernels are compiled."""
    r = random.Random(seed)
    half = {"dtype": torch.bfloat16, "device": DEVICE}
    whole = half | {"dtype": torch.float16}
    causal = {"is_causal": True} | half
    dense = [
        *((causal | {"D": D, "Dv": D}, gradients) for D in (64, 128, 256) for gradients in (0, 1)),
        *(
            (whole | {"D": 128, "Dv": 128, "deterministic": True}, gradients)
            for gradients in (0, 1)
        ),
        (causal | {"D": 64, "Dv": 64, "deterministic": True}, 1),
    ]
    drawn = []
    for _ in range(SHAPES):
        for fields, gradients in dense:
            kind = "forward and backward" if gradients else "forward"
            drawn.append(Problem(kind, _dense(r, fields), bool(gradients)))
        for D, gradients in ((64, True), (128, False)):
            drawn.append(Problem("packed", _packed(r, causal | {"D": D, "Dv": D}), gradients))
        for D, page in ((64, 0), (128, 0), (128, 16), (128, 64)):
            fields = {"Hkv": 8, "D": D, "Dv": D, "bshd": r.random() < 0.5}
            kind = "decode, paged" if page else "decode"
            drawn.append(Problem(kind, _cached(r, page, r.choice((8, 32)), half | fields)))
        for page in (0, 64):
            fields = {"Hkv": 1, "D": 576, "Dv": 512, "shared": True}
            heads = r.choice((16, 64, 128))
            drawn.append(Problem("latent decode", _cached(r, page, heads, half | fields)))
    return drawn


def _dense(r: random.Random, fields: dict) -> Case:
    """Draw lengths, then as large a batch and as many heads as the oracle can handle quickly."""
    Sq = r.choice((17, 65, 200, 512, 1000, 1537, 2048, 3000))
    Sk = Sq if r.random() < 0.7 else r.choice((64, 333, 1024))
    limit = min(MAX_SCORES // (Sq * Sk), MAX_QUERY_ELEMENTS // (max(Sq, Sk) * fields["D"]))
    heads = itertools.product((1, 2, 5), (1, 4, 8), (1, 2, 4))
    fitting = sorted((h for h in heads if math.prod(h) <= limit), key=math.prod)
    B, Hkv, group = r.choice(fitting[len(fitting) * 2 // 3 :])  # prefer many tiles
    return Case(
        B=B, Hq=Hkv * group, Hkv=Hkv, Sq=Sq, Sk=Sk, layout=r.choice(("bhsd", "bshd")),
        seed=r.randrange(2**31), **fields,
    )  # fmt: skip


def _packed(r: random.Random, fields: dict) -> PackedCase:
    Hkv = r.choice((2, 8))
    lengths = tuple(r.choice((1, 0, 63, 300, 777, 1200)) for _ in range(r.randrange(2, 6)))
    case = Case(Hq=Hkv * r.choice((1, 2)), Hkv=Hkv, seed=r.randrange(2**31), **fields)
    return PackedCase((500, *lengths), (500, *lengths), 0, case)


def _cached(r: random.Random, page: int, heads: int, fields: dict) -> CacheCase:
    B, S = r.choice((1, 3, 4)), r.choice((100, 512, 1200))
    lens = tuple(r.randint(0, S) for _ in range(B - 1)) + (S,)
    return CacheCase(
        B=B, Hq=heads, S=S, lens=lens, page_size=page, seed=r.randrange(2**31), **fields
    )  # fmt: skip
