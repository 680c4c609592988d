"""Hypothesis strategies for attention problems. They shrink to plain small calls."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from fa_ops.testing import Case, PackedCase

# one side or the other of the CPU loop's and the GPU kernels' tile edges
EDGES = [63, 64, 65, 127, 128, 129, 255, 256, 257, 300]
LENGTHS = st.one_of(st.integers(1, 9), st.integers(1, 150), st.sampled_from(EDGES))
KEYS = st.one_of(LENGTHS, st.sampled_from([511, 513, 600]))
HEAD_DIMS = st.sampled_from([8, 16, 64, 32, 1, 3, 37, 80, 128])
SCORES = 2**19  # of one problem, to keep the fp64 oracle quick


def rarely(strategy: st.SearchStrategy, default, weight: int = 3) -> st.SearchStrategy:
    """`default` in all but one of `weight` draws."""
    return st.integers(0, weight - 1).flatmap(
        lambda n: strategy if n == weight - 1 else st.just(default)
    )


def bits(n: int) -> st.SearchStrategy:
    return st.tuples(*[st.integers(0, 1)] * n)


@st.composite
def features(draw, dtype: torch.dtype, device: str, dense: bool) -> Case:
    """Everything but lengths and batch size."""
    Hkv = draw(st.integers(1, 3))
    D = draw(HEAD_DIMS)
    windows = st.tuples(*[st.one_of(st.just(-1), st.integers(0, 70))] * 2)
    fields = {
        "Hq": Hkv * draw(st.sampled_from([1, 2, 3, 4])),
        "Hkv": Hkv,
        "D": D,
        "Dv": draw(rarely(HEAD_DIMS, D)),
        "dtype": dtype,
        "device": device,
        "seed": draw(st.integers(0, 2**16)),
        "layout": draw(st.sampled_from(["bhsd", "bshd", "packed", "expanded"])),
        "is_causal": draw(st.booleans()),
        "window": draw(rarely(windows, (-1, -1))),
        "softcap": draw(rarely(st.sampled_from([1.5, 20.0]), 0.0)),
        "scale": draw(rarely(st.sampled_from([0.3, 1.0, 0.0, -0.5]), None)),
        "alibi": draw(rarely(st.sampled_from(["heads", "batch_heads"]), None)),
        "sinks": draw(rarely(st.just(True), False)),
        "kv_lens": draw(rarely(st.just(True), False)),
        "dropout_p": draw(rarely(st.sampled_from([0.1, 0.5, 0.9]), 0.0, 5)),
        "deterministic": draw(st.booleans()),
        # much larger, rounding alone makes weights of one row or another wrong by chance
        "magnitude": draw(rarely(st.sampled_from([0.0, 8.0]), 1.0, 5)),
        "lse_grad": draw(st.booleans()),
    }
    if dense:
        fields["key_ranges"] = draw(rarely(bits(3), None))
        kinds = ["float"] if fields["key_ranges"] is not None else ["float", "bool"]
        fields["mask"] = draw(rarely(st.sampled_from(kinds), None))
        if fields["mask"] is not None:
            fields["mask_shape"] = draw(bits(4))
            fields["mask_holes"] = draw(st.booleans())
            fields["mask_grad"] = fields["mask"] == "float" and draw(st.booleans())
    return Case(**fields)


@st.composite
def cases(draw, dtype: torch.dtype, device: str = "cpu") -> Case:
    case = draw(features(dtype, device, dense=True))
    Sq, Sk = draw(LENGTHS), draw(KEYS)
    room = max(1, SCORES // (case.Hq * Sq * Sk))
    sizes = {"B": draw(st.integers(1, min(3, room))), "Sq": Sq, "Sk": Sk}
    return Case(**{**vars(case), **sizes})


@st.composite
def packed_cases(draw, dtype: torch.dtype, device: str = "cpu") -> PackedCase:
    lengths = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 150))
    pairs = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5))
    if draw(st.booleans()):
        pairs = [pairs[0]] * len(pairs)
    lengths_q, lengths_k = zip(*pairs)
    margin = draw(st.sampled_from([0, 0, 3]))
    if margin == 0 and not (sum(lengths_q) and sum(lengths_k)):
        margin = 1  # calls without tokens are the operators' own, and the oracle takes none
    return PackedCase(lengths_q, lengths_k, margin, draw(features(dtype, device, dense=False)))
