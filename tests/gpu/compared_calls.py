"""The calls by which checkouts are compared; they use public functions only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_ops.bench.peers import E4M3, per_tensor
from fa_ops.bench.problems import PRESETS, Problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOST_SHAPE = (1, 8, 64, 64)
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Call(NamedTuple):
    """`run(prepare())`, of which only `run` is timed; `records` enables gradients."""

    run: Callable[[object], object]
    prepare: Callable[[], object] = lambda: None
    records: bool = False


Make = Callable[[ModuleType], Call]  # takes a checkout's package


def rows(group: str, preset: str, only: str) -> Iterator[tuple[str, Make]]:
    """Yield names and functions that create the call of a checkout.

    `only` holds comma-separated alternatives: a problem must contain all words of one of them.
    """
    if group == "host":
        yield from HOST.items()
        return
    wanted = [set(words.split()) for words in only.split(",")]
    problems = OWN_PROBLEMS[group]() if group in OWN_PROBLEMS else PRESETS[preset]()
    for problem in problems:
        if any(words <= {*str(problem).split()} for words in wanted):
            yield str(problem), lambda fa, problem=problem: GROUPS[group](fa, problem)


def _forward(fa: ModuleType, p: Problem, alibi: bool = False) -> Call:
    (q, k, v), options = p.inputs(DEVICE, "bhsd"), _options(p, alibi)
    return Call(lambda _: fa.attention(q, k, v, **options))


def _backward(fa: ModuleType, p: Problem, alibi: bool = False) -> Call:
    leaves, options = p.inputs(DEVICE, "bhsd", requires_grad=True), _options(p, alibi)
    return _gradients(lambda: fa.attention(*leaves, **options), leaves)


def _varlen(fa: ModuleType, p: Problem, alibi: bool = False) -> Call:
    (inputs, packing), options = _packed(p, False), _options(p, alibi)
    return Call(lambda _: fa.attention_varlen(*inputs, *packing, **options))


def _varlen_backward(fa: ModuleType, p: Problem, alibi: bool = False) -> Call:
    (leaves, packing), options = _packed(p, True), _options(p, alibi)
    return _gradients(lambda: fa.attention_varlen(*leaves, *packing, **options), leaves)


def _options(p: Problem, alibi: bool) -> dict[str, object]:
    if not alibi:
        return {"is_causal": p.causal}
    slopes = torch.exp2(-8 * torch.arange(1, p.Hq + 1, device=DEVICE) / p.Hq)
    return {"is_causal": p.causal, "alibi_slopes": slopes}


def _packed(p: Problem, requires_grad: bool) -> tuple[tuple[Tensor, ...], tuple]:
    """All tokens of a problem in four sequences: two eighths, a quarter and a half."""

    def tokens(x: Tensor) -> Tensor:
        flat = x.transpose(1, 2).flatten(0, 1).contiguous()
        return flat.detach().requires_grad_(requires_grad)

    inputs = tuple(map(tokens, p.inputs(DEVICE, "bhsd")))
    ends = [
        torch.tensor([x.shape[0] * n // 8 for n in (0, 1, 2, 4, 8)], dtype=torch.int32).to(DEVICE)
        for x in inputs[:2]
    ]
    return inputs, (*ends, *((x.shape[0] + 1) // 2 for x in inputs[:2]))


def _gradients(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Call:
    """The backward pass alone, with a forward pass before each."""
    grad = _grad_of(forward())
    return Call(lambda out: torch.autograd.grad(out, leaves, grad), forward, records=True)


def _grad_of(out: Tensor) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.empty_like(out.detach()).normal_(generator=generator)


class Cached(NamedTuple):
    """B rows of queries against S cached keys; with `append` a new key is written."""

    B: int
    S: int
    page: int = 0
    append: bool = False
    heads: tuple[int, int, int] = (32, 8, 128)  # of queries, of keys, dimension
    queries: int = 1
    heads_first: bool = False  # the cache is (B, H, S, D) in memory
    e4m3: bool = False  # with a scale for each head

    def __str__(self) -> str:
        words = [f"B{self.B} S{self.S} H{self.heads[0]}/{self.heads[1]} D{self.heads[2]}"]
        words += [f"Q{self.queries}"] * (self.queries > 1) + [f"page{self.page}"] * (self.page > 0)
        names = {"append": self.append, "bhsd": self.heads_first, "e4m3": self.e4m3}
        return " ".join(words + [name for name, given in names.items() if given])


def decodes() -> list[Cached]:
    if DEVICE == "cpu":
        return [Cached(2, 128, page, append) for page in (0, 64) for append in (False, True)]
    sizes = ((1, 1024), (1, 16384), (8, 8192), (64, 4096))
    plain = [Cached(B, S, page) for page in (0, 64) for B, S in sizes]
    narrow = [
        Cached(B, S, page, heads=(64, 8, 64), heads_first=heads_first)
        for B, S in ((64, 4096), (16, 8192))
        for page, heads_first in ((0, False), (0, True), (64, False))
    ]
    sizes = ((8, 8192, 64), (1, 1024, 0), (1, 16384, 64), (64, 4096, 0))
    appends = [Cached(*size, append=True) for size in sizes]
    small = [Cached(B, S, page) for page in (1, 8) for B, S in ((8, 8192), (64, 4096))]
    latent = [Cached(8, 8192, page, heads=(32, 1, 576)) for page in (0, 1)]
    sizes = ((32, 8192, 16), (32, 8192, 64), (32, 8192, 128), (128, 2048, 128))
    latent += [Cached(B, S, 64, heads=(heads, 1, 576)) for B, S, heads in sizes]
    return [*plain, *narrow, *appends, *small, *latent]


def prompts() -> list[Cached]:
    """Long prompts, and chunks of a few queries, over contiguous caches and over pages."""
    if DEVICE == "cpu":
        return [Cached(2, 128, page, queries=16) for page in (0, 16)]
    sizes = ((1, 8192, 8192), (1, 2048, 32768), (8, 512, 8192), (8, 64, 8192), (64, 32, 4096))
    plain = [Cached(B, S, page, queries=Q) for page in (0, 16, 64) for B, Q, S in sizes]
    # speculative decoding and small chunks of prompts: as many rows are too few for the device
    few = (
        (8, 32, 8192),
        (4, 64, 8192),
        (1, 64, 8192),
        (1, 32, 32768),
        (1, 17, 2048),
        (2, 200, 32768),
    )
    few += ((64, 5, 4096), (8, 8, 8192), (1, 8, 32768))
    plain += [Cached(B, S, page, queries=Q) for page in (0, 64) for B, Q, S in few]
    narrow = [
        Cached(8, 8192, heads=(64, 8, 64), queries=64),
        Cached(64, 77, heads=(32, 8, 64), queries=77),
        Cached(8, 8192, heads=(64, 8, 64), queries=17, heads_first=True),
        Cached(1, 32768, heads=(64, 8, 64), queries=32),
        Cached(1, 32768, heads=(8, 1, 128), queries=32),
        Cached(8, 8192, heads=(32, 8, 128), queries=32, heads_first=True),
        Cached(8, 8192, 64, append=True, queries=32),
        Cached(1, 32768, heads=(8, 4, 256), queries=32),
    ]
    e4m3 = [Cached(8, 8192, page, queries=512, e4m3=True) for page in (0, 16, 64)]
    e4m3 += [Cached(8, 8192, 64, queries=64, e4m3=True)]
    return [*plain, *narrow, Cached(8, 8192, heads=(8, 4, 256), queries=64), *e4m3]


class Mixed(NamedTuple):
    """A packed batch over pages: prompts of Q queries with S keys, and steps of one with `keys`."""

    prompts: int
    Q: int
    S: int
    steps: int
    keys: int
    page: int = 64
    heads: tuple[int, int, int] = (32, 8, 128)

    def __str__(self) -> str:
        return (
            f"{self.prompts}x{self.Q} S{self.S} {self.steps}x1 S{self.keys} "
            f"H{self.heads[0]}/{self.heads[1]} D{self.heads[2]} page{self.page}"
        )


def mixes() -> list[Mixed]:
    if DEVICE == "cpu":
        return [Mixed(1, 20, 64, 3, 40, 16, (4, 2, 16))]
    sizes = ((1, 512, 512, 63, 4096), (2, 2048, 8192, 62, 4096), (8, 512, 512, 8, 8192))
    found = [Mixed(*size, page) for size in sizes for page in (16, 64)]
    found += [Mixed(2, 2048, 2048, 30, 4096, 64, (64, 8, 64)), Mixed(4, 2048, 2048, 0, 1)]
    return [*found, Mixed(0, 1, 1, 64, 4096), Mixed(0, 1, 1, 256, 512), Mixed(1, 64, 200, 7, 32768)]


def _mixed(fa: ModuleType, p: Mixed) -> Call:
    g = torch.Generator(DEVICE).manual_seed(0)
    Hq, Hkv, D = p.heads
    queries = torch.tensor([p.Q] * p.prompts + [1] * p.steps)
    keys = torch.tensor([p.S] * p.prompts + [p.keys] * p.steps, dtype=torch.int32).to(DEVICE)
    rows, width = len(queries), -(-max(p.S, p.keys) // p.page)
    draw = lambda *s: torch.randn(s, generator=g, device=DEVICE, dtype=HALF)  # noqa: E731
    q, (k, v) = draw(int(queries.sum()), Hq, D), (draw(rows * width, p.page, Hkv, D) for _ in "kv")
    table = torch.randperm(rows * width, generator=g, device=DEVICE, dtype=torch.int32)
    ends = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int().to(DEVICE)
    return Call(
        lambda _: fa.attention_varlen(
            q, k, v, ends, None, p.Q, is_causal=True, kv_lens=keys, page_table=table.view(rows, -1)
        )
    )


def _cached(fa: ModuleType, p: Cached) -> Call:
    g = torch.Generator(DEVICE).manual_seed(0)
    Hq, Hkv, D = p.heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=DEVICE, dtype=HALF)

    q, table = draw(p.B, Hq, p.queries, D), None
    if p.page:
        pages = p.B * p.S // p.page
        table = torch.randperm(pages, generator=g, device=DEVICE, dtype=torch.int32).view(p.B, -1)
        caches = [draw(pages, p.page, Hkv, D) for _ in range(2)]
    elif p.heads_first:
        caches = [draw(p.B, Hkv, p.S, D) for _ in range(2)]
    else:
        caches = [draw(p.B, p.S, Hkv, D).transpose(1, 2) for _ in range(2)]
    if D == 576:  # latents: values are the first features of the keys
        caches[1] = caches[0][..., :512]
    scales = {}
    if p.e4m3:
        caches = [x.to(E4M3) for x in caches]
        scales = {name: torch.ones(p.B, Hkv, device=DEVICE) for name in ("k_scale", "v_scale")}
    lens = torch.full((p.B,), p.S - p.append, device=DEVICE, dtype=torch.int32)
    new = {"key": draw(p.B, Hkv, 1, D), "value": draw(p.B, Hkv, 1, D)} if p.append else {}
    options = new | scales | ({"is_causal": True} if p.queries > 1 else {})
    return Call(
        lambda _: fa.attention_with_kv_cache(q, *caches, kv_lens=lens, page_table=table, **options)
    )


_QK_DTYPES = {torch.int8: "int8", E4M3: "e4m3", None: "e4m3-tensors"}


class Quantized(NamedTuple):
    """A problem with 8-bit products: of 16-bit tensors that the call quantises, or of others."""

    problem: Problem
    qk_dtype: torch.dtype | None  # None: the tensors are e4m3, with a scale each

    def __str__(self) -> str:
        return f"{self.problem} {_QK_DTYPES[self.qk_dtype]}"


def quantized() -> list[Quantized]:
    if DEVICE == "cpu":
        return [Quantized(*each) for each in itertools.product(PRESETS["tiny"](), _QK_DTYPES)]
    shapes = [
        *((2, 32, 8, 8192, D, causal) for D in (64, 128, 256) for causal in (False, True)),
        *((1, 32, 8, 16384, 128, causal) for causal in (False, True)),
        *((2, 16, 16, 8192, 128, causal) for causal in (False, True)),
        *((tokens // S, 32, 8, S, 128, True) for tokens, S in ((8192, 512), (16384, 2048))),
    ]
    return [Quantized(Problem(*shape), qk_dtype) for shape in shapes for qk_dtype in _QK_DTYPES]


def _quantized(fa: ModuleType, p: Quantized) -> Call:
    causal, qk_dtype = p.problem.causal, p.qk_dtype
    tensors = p.problem.inputs(DEVICE, "bhsd")
    if qk_dtype is not None:
        return Call(lambda _: fa.quantized_attention(*tensors, causal, qk_dtype=qk_dtype))
    numbers, scales = zip(*map(per_tensor, tensors))
    options = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
    return Call(lambda _: fa.attention(*numbers, is_causal=causal, **options))


# The problems of groups that no preset is for.
OWN_PROBLEMS = {"decode": decodes, "prompts": prompts, "mixed": mixes, "quantized": quantized}
GROUPS = {
    "forward": _forward,
    "backward": _backward,
    "varlen": _varlen,
    "varlen backward": _varlen_backward,
    "decode": _cached,
    "prompts": _cached,
    "mixed": _mixed,
    "quantized": _quantized,
}
for _name in ("forward", "backward", "varlen", "varlen backward"):
    GROUPS[f"{_name} ALiBi"] = functools.partial(GROUPS[_name], alibi=True)


def _small(requires_grad: bool = False) -> list[Tensor]:
    g = torch.Generator(DEVICE).manual_seed(0)
    draw = lambda: torch.randn(HOST_SHAPE, generator=g, device=DEVICE, dtype=HALF)  # noqa: E731
    return [draw().requires_grad_(requires_grad) for _ in range(3)]


def _host_operator(fa: ModuleType) -> Call:
    operator, inputs = getattr(torch.ops, _namespace(fa)).attention, _small()
    return Call(lambda _: operator(*inputs))


def _namespace(fa: ModuleType) -> str:
    return "fa" if fa.__name__ == "fa_ops" else fa.__name__


def _host_call(**options) -> Make:
    def make(fa: ModuleType) -> Call:
        inputs = _small()
        return Call(lambda _: fa.attention(*inputs, **options))

    return make


def _host_varlen(fa: ModuleType) -> Call:
    inputs = [x[0].transpose(0, 1).contiguous() for x in _small()]
    ends = torch.tensor([0, 16, 40, 64], dtype=torch.int32, device=DEVICE)
    return Call(lambda _: fa.attention_varlen(*inputs, ends, ends, 24, 24))


def _host_varlen_training(fa: ModuleType) -> Call:
    leaves = [x[0].transpose(0, 1).contiguous() for x in _small()]
    leaves = [x.requires_grad_() for x in leaves]
    ends = torch.tensor([0, 16, 40, 64], dtype=torch.int32, device=DEVICE)
    return _host_gradients(lambda *x: fa.attention_varlen(*x, ends, ends, 24, 24), leaves)


def _host_cached(append: bool = False, paged: bool = False, latent: bool = False) -> Make:
    """A decoding step of four rows, with room for 2048 keys each."""

    def make(fa: ModuleType) -> Call:
        g = torch.Generator(DEVICE).manual_seed(0)
        draw = lambda *s: torch.randn(s, generator=g, device=DEVICE, dtype=HALF)  # noqa: E731
        (Hq, Hkv), D = ((64, 1), 576) if latent else ((32, 8), 128)
        k, v = (draw(128, 64, Hkv, D) if paged else draw(4, Hkv, 2048, D) for _ in "kv")
        new = {"key": draw(4, Hkv, 1, D), "value": draw(4, Hkv, 1, D)} if append else {}
        if latent:  # values are the first features of the keys
            v = k[..., :512]
            new |= {"value": new["key"][..., :512]} if append else {}
        table = torch.arange(128, dtype=torch.int32, device=DEVICE).view(4, 32) if paged else None
        lens = torch.full((4,), 600, dtype=torch.int32, device=DEVICE)
        q = draw(4, Hq, 1, D)
        return Call(lambda _: fa.attention_with_kv_cache(q, k, v, lens, table, **new))

    return make


def _host_training(attention: Callable) -> Call:
    return _host_gradients(attention, _small(requires_grad=True))


def _host_gradients(attention: Callable, leaves: list[Tensor]) -> Call:
    grad = _grad_of(attention(*leaves))
    step = lambda _: torch.autograd.grad(attention(*leaves), leaves, grad)  # noqa: E731
    return Call(step, records=True)


_MASK = torch.ones(HOST_SHAPE[2], HOST_SHAPE[2], dtype=torch.bool, device=DEVICE).tril()

# Repeated eager calls, of shape (1, 8, 64, 64) and over caches, whose host time is measured.
HOST: dict[str, Make] = {
    "attention": _host_call(),
    "attention, return_lse": _host_call(return_lse=True),
    "torch.ops.fa.attention": _host_operator,
    "attention_varlen": _host_varlen,
    "attention, bool mask": _host_call(attn_mask=_MASK),
    "attention, forward + backward": lambda fa: _host_training(fa.attention),
    "attention_varlen, forward + backward": _host_varlen_training,
    "cache": _host_cached(),
    "cache, append": _host_cached(append=True),
    "pages": _host_cached(paged=True),
    "pages, append": _host_cached(append=True, paged=True),
    "MLA": _host_cached(latent=True),
    "MLA, append": _host_cached(append=True, latent=True),
}


def host_sdpa() -> dict[str, Call]:
    """SDPA's calls, which are measured in the same run."""
    inputs = _small()
    return {
        "SDPA": Call(lambda _: F.scaled_dot_product_attention(*inputs)),
        "SDPA, forward + backward": _host_training(F.scaled_dot_product_attention),
    }
