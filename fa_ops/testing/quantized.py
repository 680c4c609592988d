"""Problems of attention with 8-bit products, and their comparison with the oracle.

Rounding in 8 bits is a step function: where a backend's float32 arithmetic puts a number on the
other side of a step than the oracle's float64 does, the number changes by a whole step. Such
numbers are rare, so results differ by a small part of the error that quantisation itself makes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_ops.backends import quantization, reference
from fa_ops.call.call import Call
from fa_ops.call.options import SCALE_BLOCK, Quantization, Spec, default_scale
from fa_ops.testing.allocators import Arena
from fa_ops.testing.inputs import Case, short_repr

SHARE = 0.25  # of the error of quantisation, by which a backend may differ from the oracle
FLOOR = 1e-3  # of a result's root mean square, where that error is small by chance
# Tensor cores of sm_89 and sm_90 cut products of e4m3 numbers off 13 bits below the largest, and
# their sums again with each 32 features: the error as a part of the sum of magnitudes. On an H200,
# the root mean square over many scores is up to 1.7 times 2**-12, for 256 features, and more where
# few scores count. Where it moves a weight across the border between two e4m3 numbers, the weight
# changes by up to STEP of itself; that one row does so is allowed.
ALIGNMENT = 2.0**-10
STEP = 2.0**-3


@dataclasses.dataclass(frozen=True)
class QuantizedCase:
    """A problem of `quantized_attention`, or of `attention` with e4m3 tensors if it has scales."""

    case: Case
    qk_dtype: torch.dtype = torch.int8
    smooth_key: bool = True
    rotate: bool = False
    # of each tensor "one", "heads", "blocks", "tokens" or "channels"
    scales: tuple[str, str, str] | None = None
    key_mean: float = 0.0  # the size of a vector that is added to all keys
    outlier: float = 0.0  # the factor of one channel of query and key, and of one token's key
    poison: bool = False  # keys and values beyond kv_lens are NaN
    # of packed sequences, with scales of one kind "one" or "heads": keys of a page; 0: no pages
    page: int | None = None

    def __repr__(self) -> str:
        return short_repr(self)

    def fresh(self) -> tuple[Tensor, Tensor, Tensor, Quantization, Spec]:
        """New tensors q, k, v, how they are quantised, and the spec; always the same values."""
        q, k, v, spec = self.case.fresh()
        g = torch.Generator().manual_seed(self.case.seed)
        if self.key_mean:
            mean = torch.randn(k.shape[3], generator=g).to(k.device)
            k.add_((mean * self.key_mean).to(k.dtype))
        if self.outlier:
            k[..., 0].mul_(self.outlier)
            q[..., 0].mul_(self.outlier)
            k[:, :, k.shape[2] // 2].mul_(self.outlier)
        if self.poison and spec.kv_lens is not None:
            beyond = torch.arange(k.shape[2], device=k.device) >= spec.kv_lens.view(-1, 1, 1)
            k.masked_fill_(beyond.unsqueeze(-1), float("nan"))
            v.masked_fill_(beyond.unsqueeze(-1), float("nan"))
        how = Quantization(None, None, None, self.qk_dtype, self.smooth_key, self.rotate)
        if self.scales is None:
            return q, k, v, how, spec
        q, k, v = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
        scales = [_scale(t, kind, g) for t, kind in zip((q, k, v), self.scales)]
        return q, k, v, Quantization(*scales, None, False, False), spec


def _scale(t: Tensor, kind: str, g: torch.Generator) -> Tensor:
    B, H, S, D = t.shape
    last = {"blocks": -(-S // SCALE_BLOCK), "tokens": S, "channels": D}
    shape = {"one": (), "heads": (B, H)}.get(kind) if kind not in last else (B, H, last[kind])
    return (0.5 + torch.rand(shape, generator=g)).to(t.device)


def features(pick: Callable[[Sequence], Any], dtype: torch.dtype, edges: bool) -> dict:
    """Draw what selects a kernel: fields of `QuantizedCase`, and of its `Case` under "case"."""
    D = pick((64, 128, 8, 16, 32, 40, 80, 256))
    case = {
        "dtype": dtype, "D": D, "Dv": pick((D, D, 16, 24, 64)), "is_causal": pick((False, True)),
        "window": pick(((-1, -1), (-1, -1), (9, 3), (70, -1), (-1, 0))),
        "softcap": pick((0.0, 0.0, 3.0)), "scale": pick((None, None, 0.2, -0.1)),
        "sinks": pick((False, False, True, "-inf")), "kv_lens": pick((False, True)),
        "key_ranges": pick((None, None, (1, 1, 1), (0, 0, 1), (1, 0, 0))),
        "magnitude": pick((1.0, 1.0, 4.0)), "broken": edges,
    }  # fmt: skip
    if pick((False, True, "packed")) == "packed":
        kinds = tuple(pick(("one", "heads")) for _ in range(3))
        case["key_ranges"] = None
        return {"case": case, "scales": kinds, "page": pick((0, 16, 64, 48))}
    if pick((False, True)):
        of_tokens = ("one", "heads", "blocks", "tokens")
        kinds = (pick(of_tokens), pick(of_tokens), pick(("one", "heads", "channels")))
        return {"case": case, "scales": kinds}
    return {
        "case": case, "qk_dtype": pick((torch.int8, torch.int8, torch.float8_e4m3fn)),
        "smooth_key": pick((True, True, False)), "rotate": pick((False, True)),
        "key_mean": pick((0.0, 3.0)), "outlier": pick((0.0, 0.0, 8.0)),
    }  # fmt: skip


def draw(pick: Callable[[Sequence], Any], chosen: dict, device: str) -> QuantizedCase:
    """Draw a call with these features: its sizes, its strides and its values."""
    Hkv = pick((1, 1, 2, 3))
    # several tiles of queries, and more keys than tensor cores add up at once
    longer = ((200, 391), (1100, 2305)) if device == "cuda" else ((), ())
    case = Case(
        **chosen["case"], B=pick((1, 2, 3)), Hkv=Hkv, Hq=Hkv * pick((1, 1, 2, 4)),
        Sq=pick((1, 2, 17, 63, 64, 65, 130, *longer[0])),
        Sk=pick((1, 3, 31, 64, 65, 100, 129, 200, *longer[1])),
        layout=pick(("bhsd", "bshd")), device=device, seed=pick(range(2**16)),
    )  # fmt: skip
    return QuantizedCase(**(chosen | {"case": case}), poison=pick((False, True)))


def random_quantized_case(
    seed: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> QuantizedCase:
    """A random problem: small shapes, every option, both entry points."""
    pick = random.Random(seed).choice
    dtype = dtype or pick((torch.float16, torch.bfloat16, torch.float32))
    return draw(pick, features(pick, dtype, False), device)


def exact(q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec) -> tuple[Tensor, Tensor]:
    """out and lse in fp64 of what the 8-bit numbers stand for, with exact weights."""
    if how.q_scale is not None:
        eight = quantization.quantised(Call.of(q, k, v, spec, quantization=how), torch.float64)
        q, k = eight.query * eight.q_scale, eight.key * eight.k_scale
        v = eight.value * eight.v_scale
    return reference.dense(Call.of(q.double(), k.double(), v.double(), spec))


def call(q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec) -> tuple[Tensor, Tensor]:
    """Call the operator; return (out, lse)."""
    names = "scale", "window_left", "window_right", "softcap", "sinks", "kv_lens", "key_ranges"
    options = {name: getattr(spec, name) for name in (*names, "backend")}
    options |= dict(zip(how._fields[3:], how[3:]))
    return torch.ops.fa.quantized_attention(q, k, v, *how[:3], spec.is_causal, **options)


def assert_quantized_right(
    case: QuantizedCase, backend: str, arena: Arena | None = None, calls: int = 1
) -> None:
    """Compare a call with the oracle.

    Args:
        arena: allocate inputs and results in it, and check that nothing outside them is written.
        calls: how often to call; all results must be bitwise equal.
    """
    q, k, v, how, spec = case.fresh()
    if arena is not None:
        put = lambda x: arena.placed(x) if isinstance(x, Tensor) else x  # noqa: E731
        q, k, v = map(put, (q, k, v))
        how, spec = Quantization(*map(put, how)), Spec(*map(put, spec))
    with contextlib.nullcontext() if arena is None else arena.outputs(backend):
        results = [_call(case, q, k, v, how, spec._replace(backend=backend)) for _ in range(calls)]
    if arena is not None:
        arena.check()
    for repeated in results[1:]:
        for name, x, y in zip(("out", "lse"), results[0], repeated):
            assert torch.equal(x, y), f"{name} differs when the call is repeated: {case}"
    assert_quantized_close(*results[0], case)


def _call(
    case: QuantizedCase, q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec
) -> tuple[Tensor, Tensor]:
    """out and lse of the case; of packed sequences the oracle's for queries that are left out."""
    if case.page is None:
        return call(q, k, v, how, spec)
    out, lse, there = packed_call(q, k, v, how, spec, case.page, case.case.seed)
    wanted, wanted_lse = reference.quantized(Call.of(q, k, v, spec, quantization=how))
    out = out.where(there.unsqueeze(-1), wanted.to(out.dtype))
    return out, lse.where(there, wanted_lse.to(lse.dtype))


def assert_quantized_close(out: Tensor, lse: Tensor, case: QuantizedCase) -> None:
    """Raise AssertionError unless out and lse are those of the oracle but for rare steps."""
    q, k, v, how, spec = case.fresh()
    wanted, wanted_lse = reference.quantized(Call.of(q, k, v, spec, quantization=how))
    true, true_lse = exact(q, k, v, how, spec)
    eps, smallest = torch.finfo(out.dtype).eps, torch.finfo(out.dtype).tiny
    tiny = max(smallest * eps, 1e-30)
    of_scores = _error_of_products(q, k, v, how, spec) if q.is_cuda else 0.0
    # one weight at the border between two e4m3 numbers
    of_scores += STEP / max(lse.numel(), 1) ** 0.5 if q.is_cuda else 0.0
    _assert_close("out", out.double(), wanted, true, (FLOOR + eps + of_scores, tiny), case)
    dead = wanted_lse == float("-inf")
    assert bool(((lse == float("-inf")) == dead).all()), f"lse is -inf in other rows: {case}"
    lse, wanted_lse, true_lse = (x.double().masked_fill(dead, 0.0) for x in
                                 (lse, wanted_lse, true_lse))  # fmt: skip
    _assert_close("lse", lse, wanted_lse, true_lse, (1e-4, 1e-30 + of_scores), case)


def _error_of_products(q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec) -> float:
    """A limit of the error of scores that are sums of products of e4m3 numbers on a GPU."""
    if torch.float8_e4m3fn not in (q.dtype, how.qk_dtype):
        return 0.0
    eight = quantization.quantised(Call.of(q, k, v, spec, quantization=how), torch.float64)
    q, k = (eight.query * eight.q_scale).abs(), (eight.key * eight.k_scale).abs()
    sums = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    return ALIGNMENT * abs(default_scale(spec, q.shape[3])) * _rms(sums)


def _assert_close(
    name: str, actual: Tensor, wanted: Tensor, true: Tensor, floors: tuple[float, float],
    case: QuantizedCase,
) -> None:  # fmt: skip
    difference, error, size = (_rms(x) for x in (actual - wanted, wanted - true, wanted))
    limit = SHARE * error + floors[0] * size + floors[1]
    ok = difference <= limit  # False for NaN
    assert ok, f"{name} differs by {difference:.3g} from the oracle, more than {limit:.3g}: {case}"


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


# The sequences of a problem with 8-bit products, packed: their results are those of its rows.

GAP = 2  # tokens before the first sequence and after the last


def packed_call(
    q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec, page: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend the last queries of each row, as many as are drawn, by attention_varlen.

    Args:
        page: keys of a page; 0: keys follow one another.
        seed: of the numbers of queries and of the order of pages.

    Returns:
        out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), unset where a query is left out, and which are
        there, bool (B, 1, Sq).
    """
    import fa_ops

    g = torch.Generator().manual_seed(seed)
    (B, Hq, Sq, _), Sk = q.shape, k.shape[2]
    lens = [Sk] * B if spec.kv_lens is None else spec.kv_lens.clamp(0, Sk).tolist()
    counts = [Sq, *torch.randint(0, Sq + 1, (B - 1,), generator=g).tolist()]
    gap = q.new_zeros(GAP, Hq, q.shape[3])
    query = _joined([gap, *(q[b, :, Sq - n :].transpose(0, 1) for b, n in enumerate(counts)), gap])
    ends_q = _ends(counts, q.device) + GAP
    if page:
        key, value, table = _pages(k, v, page, g)
        keys = {"kv_lens": torch.tensor(lens, dtype=torch.int32, device=q.device)}
        ends_k, keys = None, keys | {"page_table": table}
    else:
        key, value = (
            _joined([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lens)]) for x in (k, v)
        )
        ends_k, keys = _ends(lens, q.device), {}
    found, found_lse = fa_ops.attention_varlen(
        query, key, value, ends_q, ends_k, max(counts), Sk, is_causal=spec.is_causal,
        scale=spec.scale, window=(spec.window_left, spec.window_right), softcap=spec.softcap,
        sinks=spec.sinks, return_lse=True, backend=spec.backend, **keys,
        **dict(zip(how._fields, how[:3])),
    )  # fmt: skip
    assert not found[:GAP].any() and not found[len(found) - GAP :].any(), "tokens of no sequence"
    out, lse = found.new_empty(B, Hq, Sq, v.shape[3]), found_lse.new_empty(B, Hq, Sq)
    there = torch.zeros(B, 1, Sq, dtype=torch.bool, device=q.device)
    for b, (begin, n) in enumerate(zip(ends_q.tolist(), counts)):
        out[b, :, Sq - n :] = found[begin : begin + n].transpose(0, 1)
        lse[b, :, Sq - n :] = found_lse[:, begin : begin + n]
        there[b, :, Sq - n :] = True
    return out, lse, there


def _ends(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0).int()


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([x.view(torch.uint8) for x in parts]).view(parts[0].dtype)


def _pages(k: Tensor, v: Tensor, page: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pages in a random order with unused ones among them, and their table."""
    B, _, Sk, _ = k.shape
    width = -(-Sk // page)
    order = torch.randperm(B * width + 3, generator=g)[: B * width].to(k.device)
    made = []
    for x in (k, v):
        rows = x.view(torch.uint8).transpose(1, 2)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, width * page - Sk), value=127)
        pages = rows.new_full((B * width + 3, page, *rows.shape[2:]), 127)  # NaN
        pages[order] = rows.reshape(B * width, page, *rows.shape[2:])
        made.append(pages.view(x.dtype))
    return *made, order.view(B, width).int()
