"""Random attention calls of every kind, and the check of one call in full.

A call is drawn in two steps: first the properties that select a kernel, then a call with them.

`pick` chooses one element of a sequence: `random.Random(seed).choice`, or Hypothesis's
`sampled_from`, which shrinks to the first element.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_ops.call import selected_checks
from fa_ops.testing import caches, quantized
from fa_ops.testing.budget import NUMBERS, OPERANDS, assert_close_to_oracle, by_operator
from fa_ops.testing.caches import CacheCase, assert_cache_close
from fa_ops.testing.inputs import GRAD_LAYOUTS, LAYOUTS, Arena, Case, PackedCase, with_each
from fa_ops.testing.quantized import QuantizedCase, assert_quantized_right

# Random edge cases: extreme options, NaN and Inf, invalid lengths, unusual strides.

Pick = Callable[[Sequence], Any]
AnyCase = Case | PackedCase | CacheCase | QuantizedCase

KINDS = ("dense", "packed", "cached", "quantized", "selected")
HEAD_DIMS = (64, 128, 8, 16, 32, 1, 3, 37, 72, 80, 96, 192, 256, 264, 512)
CACHED_DIMS = (64, 128, 16, 32, 40, 96, 192, 256, 320, 512)
# lengths just below, at and above multiples of the tile sizes of the kernels
EDGES = (63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
LENGTHS = (range(1, 10), range(1, 151), EDGES)
KEYS = (*LENGTHS, (511, 513, 600))
MAX_SCORES = 2**19  # bounds the size of ordinary problems, to keep the fp64 oracle fast


@dataclasses.dataclass(frozen=True)
class Family:
    """Calls that share `fields` and differ in sizes, strides and values."""

    kind: str  # one of KINDS
    fields: dict[str, Any]
    sides: tuple[bool, bool] = (False, False)  # which sides of the window are bounded
    # or "decoding" (few queries, many keys), "many" (heads and batches), "prefill" (many queries),
    # "windows" (few tokens and a bias)
    sizes: str = "ordinary"

    def case(self, pick: Pick, device: str = "cpu") -> AnyCase:
        """Draw one call of the family."""
        if self.kind == "quantized":
            return quantized.draw(pick, self.fields, device)
        fields = self.fields | {"device": device, "seed": pick(range(2**16))}
        if "window" not in fields:
            fields["window"] = tuple(pick(range(71)) if side else -1 for side in self.sides)
        if self.kind == "cached":
            prefill = self.sizes == "prefill" and device == "cuda"
            return _prefill(pick, fields) if prefill else _cached(pick, fields)
        fields["layout"] = pick(("bhsd", "bshd", "packed", "expanded"))
        if fields.pop("strides", False):
            fields |= draw_layouts(pick)
        # with much larger scores, rounding alone can make the weights of a row wrong
        fields.setdefault("magnitude", rarely(pick, (0.0, 8.0), 1.0, 5))
        fields["Hkv"] = pick((2, 3) if self.sizes == "many" else (1, 2, 3))
        if self.sizes == "windows":
            return _windows(pick, fields)
        fields["Hq"] = fields["Hkv"] * pick((3, 4) if self.sizes == "many" else (1, 2, 3, 4))
        return (self._packed if self.kind == "packed" else self._dense)(pick, fields)

    def _dense(self, pick: Pick, fields: dict) -> Case:
        if self.kind == "selected":
            return _selected(pick, fields)
        if fields.pop("ranges", False):
            fields["key_ranges"] = bits(pick, 3)
        if fields.get("mask"):
            fields["mask_holes"] = pick((False, True))
        if self.sizes == "many":
            B = pick((24, 40))
            limit = max(1, MAX_SCORES // (B * fields["Hq"] * max(fields["D"], fields["Dv"])))
            Sq, Sk = pick(range(1, min(limit, 30) + 1)), pick(range(1, min(limit, 30) * 4))
            return Case(**fields, B=B, Sq=Sq, Sk=Sk)
        if self.sizes == "decoding":
            Sq, Sk = pick((1, 2, 5, 16)), pick(range(512, 1600))
        else:
            Sq, Sk = pick(pick(LENGTHS)), pick(pick(KEYS))
        limit = max(1, MAX_SCORES // (fields["Hq"] * Sq * Sk))
        return Case(**fields, B=pick(range(1, min(3, limit) + 1)), Sq=Sq, Sk=Sk)

    def _packed(self, pick: Pick, fields: dict) -> PackedCase:
        count = pick((16, 24)) if self.sizes == "many" else pick(range(1, 6))
        lengths = ((0,), range(10), range(10 if self.sizes == "many" else 151))
        pairs = [(pick(pick(lengths)), pick(pick(lengths))) for _ in range(count)]
        if pick((False, True)):
            pairs = pairs[:1] * count
        lengths_q, lengths_k = zip(*pairs)
        margin = pick((0, 0, 3))
        if margin == 0 and not (sum(lengths_q) and sum(lengths_k)):
            margin = 1  # the oracle does not support calls without tokens
        return PackedCase(lengths_q, lengths_k, margin, Case(**fields))


def family(
    pick: Pick, kind: str, dtypes: Sequence[torch.dtype], edges: bool | None = None
) -> Family:
    """Draw a family from the whole space of features.

    `edges` requires (True) or excludes (False) a hazard; None draws one sometimes.
    """
    if kind == "quantized":
        dtypes = [dtype for dtype in dtypes if dtype != torch.float64] or [torch.float32]
        return Family(kind, quantized.features(pick, pick(dtypes), bool(edges)))
    dtype = pick(dtypes)
    dims = CACHED_DIMS if kind == "cached" else HEAD_DIMS
    D = pick(dims)
    fields = {
        "dtype": dtype,
        "D": D,
        "Dv": rarely(pick, dims, D),
        "is_causal": pick((False, True)),
        "softcap": rarely(pick, (1.5, 20.0), 0.0),
        "scale": rarely(pick, (0.3, 1.0, 0.0, -0.5), None, 4),
        "alibi": rarely(pick, ("heads", "batch_heads"), None, 4),
        "sinks": rarely(pick, (True,), False),
    }
    sides = rarely(pick, ((True, False), (False, True), (True, True)), (False, False))
    edge = rarely(pick, (True,), False, 3) if edges is None else edges
    if kind == "selected":
        fields |= {"softcap": 0.0, "alibi": None, "ranges": rarely(pick, (True,), False, 4)}
        fields |= {"lse_grad": pick((False, True))}
        return Family(kind, fields | (draw_hazard(pick, kind, fields) if edge else {}))
    if kind == "cached":
        fields |= _cache_features(pick, dtype, D)
        if edge:
            fields |= draw_hazard(pick, kind, fields)
        if fields.get("broken"):
            fields |= {"rotary": 0, "interleaved": False}  # positions would be out of range
        return Family(kind, fields, sides, rarely(pick, ("prefill",), "ordinary"))
    fields |= {
        "kv_lens": rarely(pick, (True,), False),
        "dropout_p": rarely(pick, (0.1, 0.5, 0.9), 0.0, 5),
        "deterministic": rarely(pick, (True,), False, 4),
        "lse_grad": pick((False, True)),
    }
    if kind == "dense":
        fields |= _mask_features(pick)
        if dtype.itemsize == 2 and rarely(pick, (True,), False, 6):
            return Family(kind, fields | _window_features(pick, edge), sizes="windows")
    if edge:
        fields |= draw_hazard(pick, kind, fields)
    sizes = ("many",) if kind == "packed" else ("decoding", "many")
    return Family(kind, fields, sides, rarely(pick, sizes, "ordinary", 4))


def _mask_features(pick: Pick) -> dict:
    """Fields of masks; `ranges` requests key_ranges, which exclude a bool mask."""
    ranges = rarely(pick, (True,), False)
    mask = rarely(pick, ("float",) if ranges else ("float", "bool"), None)
    if mask is None:
        return {"ranges": ranges}
    grad = mask == "float" and pick((False, True))
    fields = {"ranges": ranges, "mask": mask, "mask_shape": bits(pick, 4), "mask_grad": grad}
    return fields | {"mask_blocks": rarely(pick, (True,), False, 2)}


def _selected(pick: Pick, fields: dict) -> Case:
    """Lists of blocks; sometimes of documents in one row."""
    if fields.pop("ranges"):
        fields["key_ranges"] = (pick((0, 1)), 0, pick((0, 1)))
    fields["lists"] = pick((1, 2, 5, 16, 64)), pick((1, 1, 2, 16, 70)), pick((1, 2, 3, 8))
    Sq, Sk = pick(pick(LENGTHS)), pick(pick(LENGTHS))
    if pick(range(4)) == 3 and not fields.get("broken"):
        return Case(**fields, B=1, Sq=Sk, Sk=Sk, documents=pick((1, 2, 5)))
    return Case(**fields, B=pick((1, 2, 3)), Sq=Sq, Sk=Sk)


def _window_features(pick: Pick, edge: bool) -> dict:
    """Fields of windows of an image: a bias for each head, that the batch shares or not.

    An `edge` has NaN or Inf, or unusual strides.
    """
    D, operands = pick((16, 32, 40, 64)), ("query", "key", "value", "grad_out", "attn_mask")
    fields = {
        "D": D, "Dv": rarely(pick, (24, 64), D), "is_causal": False, "softcap": 0.0, "alibi": None,
        "sinks": False, "kv_lens": False, "dropout_p": 0.0, "ranges": False, "mask": "float",
        "mask_shape": pick(((0, 1, 1, 1), (0, 1, 1, 1), (1, 1, 1, 1), (1, 0, 1, 1))),
        "mask_grad": pick((False, True)), "mask_blocks": False,
    }  # fmt: skip
    if edge and pick((False, True)):
        return fields | {"poison": f"{pick(NUMBERS)} {pick(operands)}"}
    return fields | {"strides": edge}


def _windows(pick: Pick, fields: dict) -> Case:
    """Windows of at most 64 tokens, and some longer ones, whose backward pass is another kernel."""
    fields.pop("ranges")
    H, lengths = fields["Hkv"], pick((range(1, 65), (16, 49, 64), (65, 100, 128)))
    sizes = {"Hq": H, "B": pick((1, 2, 5, 12)), "Sq": pick(lengths), "Sk": pick(lengths)}
    return Case(**fields | sizes, mask_holes=pick((False, True)))


def _cache_features(pick: Pick, dtype: torch.dtype, D: int) -> dict:
    fp8 = dtype.itemsize == 2 and rarely(pick, (True,), False)
    page_size = pick((0, 0, 1, 5, 8, 16, 64, 256))
    splits = rarely(pick, (1, 3), 0, 4)
    rotary = rarely(pick, (8, 16), 0, 4)
    return {
        "fp8": fp8,
        "page_size": page_size,
        "page_scales": fp8 and page_size > 0 and pick((False, True)),
        "token_scales": fp8 and pick((False, False, True)),
        "Sq": pick((1, 1, 2, 5, 16)),
        "new": rarely(pick, (1, 3), 0),
        "rotary": rotary if rotary <= D else 0,
        "interleaved": rotary > 0 and pick((False, True)),
        "num_splits": splits,
        "batch_invariant": splits == 0 and rarely(pick, (True,), False, 5),
        "unified_max": rarely(pick, (0.0, 2.0, -30.0), None, 4),
        "ranges": rarely(pick, (True,), False, 4),
    }


def _cached(pick: Pick, fields: dict) -> CacheCase:
    B, Hkv, group = pick((1, 2, 3, 5)), pick((1, 2, 3)), pick((1, 2, 4, 8))
    S = max(fields["new"], pick((1, 20, 130, 300, 700)))
    return CacheCase(**fields, B=B, Hkv=Hkv, Hq=Hkv * group, S=S, bshd=pick((False, True)))


def _prefill(pick: Pick, fields: dict) -> CacheCase:
    """A call over a cache with too many queries for the decoding kernels."""
    B, Hkv, group = pick((4, 6)), pick((2, 3)), pick((8, 12))
    fields |= {"Sq": pick((64, 65, 100, 130)), "bshd": pick((False, True))}
    return CacheCase(**fields, B=B, Hkv=Hkv, Hq=Hkv * group, S=pick((20, 130, 300)))


def rarely(pick: Pick, options: Sequence, default: Any, weight: int = 3) -> Any:
    """Draw one of `options` with probability 1 / `weight`; otherwise return `default`."""
    return pick(options) if pick(range(weight)) == weight - 1 else default


def bits(pick: Pick, n: int) -> tuple[int, ...]:
    """Draw n zeros and ones."""
    return tuple(pick((0, 1)) for _ in range(n))


def features(case: AnyCase) -> list[str]:
    """Names of the features of a call, for statistics."""
    plain = case.features if isinstance(case, PackedCase) else case
    if isinstance(case, QuantizedCase):
        plain = case.case
    cached = isinstance(case, CacheCase)
    words = {
        str(plain.dtype).removeprefix("torch."): True,
        f"head dim {plain.D}": True,
        "grouped heads": plain.Hq > plain.Hkv,
        "values of another width": plain.Dv != plain.D,
        "causal": plain.is_causal,
        "window": plain.window != (-1, -1),
        "softcap": plain.softcap > 0,
        "scale given": plain.scale is not None,
        "ALiBi": plain.alibi is not None,
        "sinks": plain.sinks,
        "sinks at the edge": isinstance(plain.sinks, str),
        "window at the edge": max(plain.window) >= 2**29,
        "softcap at the edge": plain.softcap in SOFTCAPS,
        "broken lengths": plain.broken,
        "NaN or Inf": plain.poison is not None,
    }
    if cached:
        words |= {
            "pages": case.page_size > 0,
            "fp8 cache": case.fp8,
            "fp8 scales of pages": case.page_scales,
            "fp8 scales of tokens": case.token_scales,
            "keys appended": case.new > 0,
            "rotary": case.rotary > 0,
            "splits given": case.num_splits > 0,
            "batch invariant": case.batch_invariant,
            "unified maximum": case.unified_max is not None,
            "key ranges": case.ranges,
        }
    elif isinstance(case, QuantizedCase):
        words |= _of_quantized(case)
    else:
        words |= {
            "kv_lens": plain.kv_lens,
            "key ranges": plain.key_ranges is not None,
            "bool mask": plain.mask == "bool",
            "float mask": plain.mask == "float",
            "gradient of the mask": plain.mask_grad,
            "blocks of the mask": plain.mask_blocks,
            "lists of blocks": plain.lists is not None,
            "dropout": plain.dropout_p > 0,
            "deterministic": plain.deterministic,
            "gradient of lse": plain.lse_grad,
            "strided": plain.layout != "bhsd",
            "overlapping": plain.layout in ("heads", "rows", "frames"),
            "strided grad_out": plain.grad_layout != "bhsd",
            "huge or tiny scores": plain.integers,
            "few queries, many keys": isinstance(case, Case) and case.Sq <= 16 and case.Sk >= 512,
        }
    return [word for word, there in words.items() if there]


def _of_quantized(case: QuantizedCase) -> dict[str, bool]:
    return {
        "kv_lens": case.case.kv_lens,
        "key ranges": case.case.key_ranges is not None,
        "strided": case.case.layout != "bhsd",
        "int8": case.scales is None and case.qk_dtype == torch.int8,
        "scales given": case.scales is not None,
        "rotated": case.rotate,
        "keys without their mean": case.scales is None and case.smooth_key,
        "NaN or Inf": case.poison,
    }


HAZARDS = ("extremes", "poison", "broken", "strides")
WINDOWS = (0, 2**29 + 1, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**40, sys.maxsize)
SOFTCAPS = (1e-40, 1e-3, 1e4, 1e6, 1e300)
SCALES = (0.0, 2.0**-120, -(2.0**-60), 2.0**20, -(2.0**40))
SINKS = ("-inf", "inf", "3e38", "-3e38", "80", "1e4")
MAGNITUDES = {torch.float16: 16640.0}  # factor of queries and keys for huge scores, by dtype
MAGNITUDE = 133120.0  # the factor for all other dtypes


def draw_hazard(pick: Pick, kind: str, fields: dict) -> dict:
    """Draw one of `HAZARDS`; return the fields of a family to replace."""
    hazard = pick(HAZARDS)
    if hazard == "extremes":
        return _extremes(pick, kind, fields)
    if hazard == "poison":
        return _poison(pick, kind, fields)
    if hazard == "broken":
        if kind == "selected":
            return {"broken": True}
        lens = {} if kind == "cached" else {"kv_lens": pick((False, True))}
        ranges = {} if kind == "packed" or fields.get("mask") == "bool" else {"ranges": True}
        return {"broken": True, **lens, **ranges}
    return {"strides": True} if kind != "cached" else {"broken": True}


def _extremes(pick: Pick, kind: str, fields: dict) -> dict:
    kinds = () if kind == "selected" else ("window", "softcap")
    what = pick((*kinds, "sinks", *(() if kind == "cached" else ("scale", "huge"))))
    if what == "window":
        return {"window": (pick((-1, *WINDOWS)), pick((-1, *WINDOWS)))}
    if what == "softcap":
        return {"softcap": pick(SOFTCAPS), "scale": None}
    if what == "sinks":
        return {"sinks": pick(SINKS)}
    # terms added to scores this large round away, so that the largest key would be arbitrary
    exact = {"integers": True, "alibi": None, "softcap": 0.0}
    if fields.get("mask") == "float":
        exact |= {"mask": None, "mask_grad": False}
    if what == "scale":
        return exact | {"scale": pick(SCALES), "magnitude": 1.0}
    # a power of two: products are exact whether the scale is applied to q, k or the score
    huge = MAGNITUDES.get(fields["dtype"], MAGNITUDE)
    return exact | {"scale": pick((0.125, 0.5)), "magnitude": huge}


def _poison(pick: Pick, kind: str, fields: dict) -> dict:
    number = pick(NUMBERS[:1] if fields.get("fp8") else NUMBERS)
    if kind == "cached":
        return {"poison": f"{number} {pick(OPERANDS[:3])}"}
    operand = pick(OPERANDS[:4] if kind == "selected" else OPERANDS)
    changes: dict = {"poison": f"{number} {operand}"}
    if operand == "attn_mask":
        if kind == "packed":
            return {"poison": f"{number} value"}
        changes |= {"mask": "float", "mask_shape": fields.get("mask_shape") or (1, 1, 1, 1)}
    if operand == "sinks":
        changes["sinks"] = True
    if operand == "alibi_slopes" and fields["alibi"] is None:
        changes["alibi"] = "heads"
    return changes


def draw_layouts(pick: Pick) -> dict:
    """Draw the layouts of a case's inputs and of its grad_out."""
    return {"layout": pick(LAYOUTS), "grad_layout": pick(GRAD_LAYOUTS)}


# One call in full: results, NaN isolation, memory around tensors, repeated calls.

CALLS = 3  # of each case: the third call uses what the first and second prepared


def assert_right(
    case: Case | PackedCase | CacheCase | QuantizedCase,
    backend: str,
    arena: Arena | None = None,
    repeated: bool = True,
    gradients: bool = True,
) -> bool:
    """Compare a call with the oracle; if it is invalid, check that it is refused.

    The CPU backends must refuse invalid lengths, pages and cu_seqlens; elsewhere these have the
    meaning that docs/semantics.md defines. Returns whether gradients were compared.

    Args:
        arena: allocate inputs and results in it, and check that nothing outside them is written.
        repeated: whether to call the public functions several times as well.
        gradients: whether the backend has a backward pass for the call.

    Raises:
        AssertionError: the message begins with the case's repr.
    """
    checked = backend in ("cpu", "reference")
    if isinstance(case, CacheCase):
        call = case.fresh().changed(backend=backend)
        argument = caches.first_invalid_value(call) if case.broken and checked else None
        if argument is not None:
            _assert_refused(case, argument, lambda: by_operator(call))
        else:
            assert_cache_close(case, backend, arena, CALLS if repeated else 1)
        return False
    if isinstance(case, QuantizedCase):
        assert_quantized_right(case, backend, arena, CALLS if repeated else 1)
        return False
    features = getattr(case, "features", case)
    # with scores this large weights round to 0 or 1, and gradients are rounding errors
    gradients = gradients and not features.integers
    if isinstance(case, PackedCase):
        argument = _invalid_border(case)
        if argument is not None and checked:
            _assert_refused(case, argument, _public_call(case, backend, gradients=False))
            return False
    if features.lists is not None and features.broken and checked:
        call = case.fresh()
        try:
            selected_checks.block_values(call.options, *call[:3], call.operands)
        except ValueError as error:
            _assert_refused(case, str(error), _public_call(case, backend, gradients=False))
            return False
    assert_close_to_oracle(case, backend, gradients, arena)
    if repeated and not features.poison:
        _assert_repeats(case, backend, gradients, arena)
    return gradients


def _invalid_border(case: PackedCase) -> str | None:
    """The beginning of the error for the first invalid element of cu_seqlens."""
    tokens = (sum(x) + 2 * case.margin for x in (case.lengths_q, case.lengths_k))
    names = ("cu_seqlens_q", "cu_seqlens_k")
    for name, ends, count in zip(names, case.packing(), tokens):
        previous = 0
        for b, end in enumerate(ends.tolist()):
            if not previous <= end <= count:
                return f"{name}[{b}] is {end}, but"
            previous = end
    return None


def _assert_refused(case: object, argument: str, run) -> None:
    for _ in range(CALLS):
        try:
            run()
        except ValueError as error:
            assert argument in str(error), f"{case}: {argument!r} is not in {error}"
        else:
            raise AssertionError(f"{case}: accepted, although {argument} is wrong")


def _public_call(case: Case | PackedCase, backend: str, gradients: bool, wrap=lambda x: x):
    """The case as a call of the public function: () -> (out, *gradients of q, k, v)."""
    import fa_ops  # not at the top: fa_ops.testing may depend on types and reference only

    call = with_each(case.fresh(requires_grad=gradients), lambda name, t: wrap(t))
    (q, k, v), t, o = call[:3], call.operands, call.options
    options = {
        "dropout_p": o.dropout_p, "is_causal": o.is_causal, "scale": o.scale,
        "window": (o.window_left, o.window_right), "softcap": o.softcap,
        "alibi_slopes": t.alibi_slopes, "sinks": t.sinks, "kv_lens": t.kv_lens,
        "deterministic": o.deterministic, "backend": backend,
    }  # fmt: skip
    function, args = fa_ops.attention, ()
    if call.is_selected:
        function, args = fa_ops.attention_selected, (t.block_indices,)
        names = "block_size", "query_block", "is_causal", "scale", "deterministic"
        options = {name: getattr(o, name) for name in names} | {"backend": backend}
        names = "sinks", "key_ranges", "counts", "cu_seqlens"
        options |= {name: getattr(t, name) for name in names}
    elif isinstance(case, PackedCase):
        function, args = fa_ops.attention_varlen, (t.cu_seqlens_q, t.cu_seqlens_k)
    else:
        names = "attn_mask", "key_ranges", "mask_blocks"
        options |= {name: getattr(t, name) for name in names}

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(0)  # for dropout
        out = function(q, k, v, *args, **options)
        if not gradients:
            return (out,)
        grad_out = case.grad_outputs(out.detach(), out.detach())[0]
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)

    return run


def _assert_repeats(case: Case | PackedCase, backend: str, gradients: bool, arena: Arena | None):
    """Call the public function three times: outputs must be bitwise equal.

    Gradients may be summed in another order, so they are compared to within rounding.
    """
    arena = arena or Arena()
    for recorded in (False, True) if gradients else (False,):
        run = _public_call(case, backend, recorded, arena.placed)
        with arena.outputs(backend):
            first, *others = (run() for _ in range(CALLS))
        arena.check()
        for other in others:
            for name, x, y in zip(("out", "grad_q", "grad_k", "grad_v"), first, other):
                text = f"{case}: {name} differs when the call is repeated"
                if name == "out":
                    assert torch.equal(x, y), text
                    continue
                tolerance = 64 * torch.finfo(x.dtype).eps * max(1.0, float(x.abs().max()))
                assert float((x.double() - y.double()).abs().max()) <= tolerance, text
