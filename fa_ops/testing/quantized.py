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
from fa_ops.call.options import SCALE_BLOCK
from fa_ops.testing.budget import by_operator
from fa_ops.testing.inputs import Arena, Case, short_repr, with_each

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

    def fresh(self) -> Call:
        """The call with new tensors, always with the same values."""
        call = self.case.fresh()
        (q, k, v), kv_lens = call[:3], call.operands.kv_lens
        g = torch.Generator().manual_seed(self.case.seed)
        if self.key_mean:
            mean = torch.randn(k.shape[3], generator=g).to(k.device)
            k.add_((mean * self.key_mean).to(k.dtype))
        if self.outlier:
            k[..., 0].mul_(self.outlier)
            q[..., 0].mul_(self.outlier)
            k[:, :, k.shape[2] // 2].mul_(self.outlier)
        if self.poison and kv_lens is not None:
            beyond = torch.arange(k.shape[2], device=k.device) >= kv_lens.view(-1, 1, 1)
            k.masked_fill_(beyond.unsqueeze(-1), float("nan"))
            v.masked_fill_(beyond.unsqueeze(-1), float("nan"))
        if self.scales is None:
            return call.changed(
                eight_bits=True, qk_dtype=self.qk_dtype, smooth_key=self.smooth_key,
                rotate=self.rotate,
            )  # fmt: skip
        q, k, v = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
        q_scale, k_scale, v_scale = (_scale(t, x, g) for t, x in zip((q, k, v), self.scales))
        return call.changed(
            query=q, key=k, value=v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            eight_bits=True, smooth_key=False,
        )  # fmt: skip


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


def exact(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse in fp64 of what the 8-bit numbers stand for, with exact weights."""
    q, k, v = (t.double() for t in call[:3])
    if call.operands.q_scale is not None:
        eight = quantization.quantised(call, torch.float64)
        q, k = eight.query * eight.q_scale, eight.key * eight.k_scale
        v = eight.value * eight.v_scale
    return reference.dense(call._replace(query=q, key=k, value=v))


def assert_quantized_right(
    case: QuantizedCase, backend: str, arena: Arena | None = None, calls: int = 1
) -> None:
    """Compare a call with the oracle.

    Args:
        arena: allocate inputs and results in it, and check that nothing outside them is written.
        calls: how often to call; all results must be bitwise equal.
    """
    call = case.fresh().changed(backend=backend)
    if arena is not None:
        call = with_each(call, lambda name, t: arena.placed(t))
    with contextlib.nullcontext() if arena is None else arena.outputs(backend):
        results = [_results(case, call) for _ in range(calls)]
    if arena is not None:
        arena.check()
    for repeated in results[1:]:
        for name, x, y in zip(("out", "lse"), results[0], repeated):
            assert torch.equal(x, y), f"{name} differs when the call is repeated: {case}"
    assert_quantized_close(*results[0], case)


def _results(case: QuantizedCase, call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of the case; of packed sequences the oracle's for queries that are left out."""
    if case.page is None:
        return by_operator(call)
    out, lse, there = packed_call(call, case.page, case.case.seed)
    wanted, wanted_lse = reference.quantized(call)
    out = out.where(there.unsqueeze(-1), wanted.to(out.dtype))
    return out, lse.where(there, wanted_lse.to(lse.dtype))


def assert_quantized_close(out: Tensor, lse: Tensor, case: QuantizedCase) -> None:
    """Raise AssertionError unless out and lse are those of the oracle but for rare steps."""
    call = case.fresh()
    wanted, wanted_lse = reference.quantized(call)
    true, true_lse = exact(call)
    eps, smallest = torch.finfo(out.dtype).eps, torch.finfo(out.dtype).tiny
    tiny = max(smallest * eps, 1e-30)
    of_scores = _error_of_products(call) if out.is_cuda else 0.0
    # one weight at the border between two e4m3 numbers
    of_scores += STEP / max(lse.numel(), 1) ** 0.5 if out.is_cuda else 0.0
    _assert_close("out", out.double(), wanted, true, (FLOOR + eps + of_scores, tiny), case)
    dead = wanted_lse == float("-inf")
    assert bool(((lse == float("-inf")) == dead).all()), f"lse is -inf in other rows: {case}"
    lse, wanted_lse, true_lse = (x.double().masked_fill(dead, 0.0) for x in
                                 (lse, wanted_lse, true_lse))  # fmt: skip
    _assert_close("lse", lse, wanted_lse, true_lse, (1e-4, 1e-30 + of_scores), case)


def _error_of_products(call: Call) -> float:
    """A limit of the error of scores that are sums of products of e4m3 numbers on a GPU."""
    if torch.float8_e4m3fn not in (call.query.dtype, call.options.qk_dtype):
        return 0.0
    eight = quantization.quantised(call, torch.float64)
    q, k = (eight.query * eight.q_scale).abs(), (eight.key * eight.k_scale).abs()
    sums = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    return ALIGNMENT * abs(call.scale) * _rms(sums)


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


def packed_call(call: Call, page: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
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
    (q, k, v), t, o = call[:3], call.operands, call.options
    (B, Hq, Sq, _), Sk = q.shape, k.shape[2]
    lens = [Sk] * B if t.kv_lens is None else t.kv_lens.clamp(0, Sk).tolist()
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
        query, key, value, ends_q, ends_k, max(counts), Sk, is_causal=o.is_causal,
        scale=o.scale, window=(o.window_left, o.window_right), softcap=o.softcap,
        sinks=t.sinks, return_lse=True, backend=o.backend, q_scale=t.q_scale, k_scale=t.k_scale,
        v_scale=t.v_scale, **keys,
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
