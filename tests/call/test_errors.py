"""Invalid arguments raise the same error from the function and the operator, before any work."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

import expecttest
import numpy as np
import pytest
import torch

import fa_ops
from fa_ops.call import backend_option, checks
from fa_ops.call.call import Call
from fa_ops.call.python_types import checked_packing
from fa_ops.ops import dense, merge, varlen
from fa_ops.plans import dispatch
from fa_ops.testing import make_case

INT = torch.int32


@dataclass
class Bad:
    """Changes that make a valid call fail, the error, and the entry points that raise it."""

    change: dict
    error: type
    message: str
    entry_points: tuple[str, ...] = field(default=("function", "operator", "fake"))


def valid() -> dict:
    q, k, v = make_case(B=2, Hq=4, Hkv=2, Sq=5, Sk=7, D=8, Dv=8).fresh()[:3]
    return {"query": q, "key": k, "value": v}


def rand(*shape, **options) -> torch.Tensor:
    return torch.randn(shape, **options)


def ints(*shape, dtype=INT, device=None) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


REAL = ("function", "operator")  # fake tensors have other strides and devices
Q, K = (2, 4, 5, 8), (2, 2, 7, 8)
MASKS = "attn_mask must broadcast to (B, Hq, Sq, Sk) = (2, 4, 5, 7), got shape "
BLOCKS = "mask_blocks must be those of the attn_mask, of shape (1, 1, 4), got "
RANGES = (
    "key_ranges must have shape (B or 1, Hq or 1, Sq or 1, 2) with (B, Hq, Sq) = (2, 4, 5), got "
)
HALF = {n: t.half() for n, t in valid().items()}
FP8 = {n: t.to(torch.float8_e4m3fn) for n, t in valid().items()}
DOUBLE_META = {n: t.double().to("meta") for n, t in valid().items()}
KNOWN = f"backend must be 'auto' or one of {', '.join(map(repr, backend_option.BACKENDS))}, got "
V = ValueError
DROPPED = "dropout_p must be in [0, 1), got {}: pass the share of weights to drop, 0 for none"
T = TypeError

LENS = "kv_lens must have shape (2,), got (3,): pass a number of keys for each row or sequence"
A_SINK, A_SLOPE = (f": pass a {what} for each query head" for what in ("sink", "slope"))
DENSE = {
    "3-D query": Bad(
        {"query": rand(4, 5, 8)},
        V,
        "query must have shape (B, H, S, D), got (4, 5, 8)"
        ": pass query[None], or tokens (T, H, D) to attention_varlen",
    ),
    "5-D key": Bad(
        {"key": rand(1, *K)},
        V,
        "key must have shape (B, H, S, D), got (1, 2, 2, 7, 8): pass key.flatten(0, -4)",
    ),
    "batch of key": Bad(
        {"key": rand(3, 2, 7, 8)},
        V,
        "key has batch size 3, but query's is 2"
        ": tensors are (B, H, S, D); from (B, S, H, D) pass .transpose(1, 2)",
    ),
    "batch of value": Bad(
        {"value": rand(1, 2, 7, 8)},
        V,
        "value has batch size 1, but query's is 2: pass value.expand(2, -1, -1, -1)",
    ),
    "lengths": Bad(
        {"value": rand(2, 2, 6, 8)},
        V,
        "value has length 6, but key's is 7"
        ": tensors are (B, H, S, D); from (B, S, H, D) pass .transpose(1, 2)",
    ),
    "head dimensions": Bad(
        {"key": rand(2, 2, 7, 6)},
        V,
        "key has head dimension 6, but query's is 8: value alone may have another one",
    ),
    "heads of value": Bad(
        {"value": rand(2, 1, 7, 8)},
        V,
        "value has 1 heads, but key has 2"
        ": tensors are (B, H, S, D); from (B, S, H, D) pass .transpose(1, 2)",
    ),
    "grouped heads": Bad(
        {"key": rand(2, 3, 7, 8), "value": rand(2, 3, 7, 8)},
        V,
        "key has 3 heads, which does not divide query's 4"
        ": tensors are (B, H, S, D); from (B, S, H, D) pass .transpose(1, 2)",
    ),
    "no heads": Bad(
        {"key": rand(2, 0, 7, 8), "value": rand(2, 0, 7, 8)},
        V,
        "key has no heads: tensors are (B, H, S, D); from (B, S, H, D) pass .transpose(1, 2)",
    ),
    "no query heads": Bad(
        {"query": rand(2, 0, 5, 8)},
        V,
        "key has 2 heads, which does not divide query's 0"
        ": tensors are (B, H, S, D); from (B, S, H, D) pass .transpose(1, 2)",
    ),
    "strides of query": Bad(
        {"query": rand(2, 4, 8, 5).mT},
        V,
        "query must be contiguous in its last dimension, got strides (160, 40, 1, 5): "
        "pass query.contiguous()",
        REAL,
    ),
    "strides of value": Bad(
        {"value": rand(2, 2, 7, 16)[..., ::2]},
        V,
        "value must be contiguous in its last dimension, got strides (224, 112, 16, 2): "
        "pass value.contiguous()",
        REAL,
    ),
    "int inputs": Bad(
        {n: ints(*s) for n, s in (("query", Q), ("key", K), ("value", K))},
        T,
        "query must be float16, bfloat16, float32 or float64, got int32"
        ": cast query, key and value, as by query.float()",
    ),
    "complex inputs": Bad(
        {n: rand(*s, dtype=torch.complex64) for n, s in (("query", Q), ("key", K), ("value", K))},
        T,
        "query must be float16, bfloat16, float32 or float64, got complex64"
        ": cast query, key and value, as by query.float()",
    ),
    "mixed dtypes": Bad(
        {"key": rand(*K).half()},
        T,
        "key is float16, but query is float32: pass key.to(query.dtype)",
    ),
    "fp8": Bad(
        FP8,
        T,
        "query is float8_e4m3fn; attention takes it with q_scale, k_scale and v_scale; else cast "
        "to bfloat16",
        REAL,
    ),
    "mixed devices": Bad(
        {"value": rand(*K, device="meta")},
        V,
        "value is on meta, but query is on cpu: pass value.to(query.device)",
        REAL,
    ),
    "shape of mask": Bad(
        {"attn_mask": rand(5, 6)}, V, MASKS + "(5, 6): each of its sizes is 1 or that of the scores"
    ),
    "heads of mask": Bad(
        {"attn_mask": rand(2, 2, 5, 7)},
        V,
        MASKS + "(2, 2, 5, 7): each of its sizes is 1 or that of the scores",
    ),
    "5-D mask": Bad(
        {"attn_mask": rand(1, 2, 4, 5, 7)},
        V,
        MASKS + "(1, 2, 4, 5, 7): each of its sizes is 1 or that of the scores",
    ),
    "device of mask": Bad(
        {"attn_mask": rand(5, 7, device="meta")},
        V,
        "attn_mask is on meta, but query is on cpu: pass attn_mask.to(query.device)",
        REAL,
    ),
    "blocks without a mask": Bad(
        {"attn_mask": None, "mask_blocks": ints(1, 1, 4)},
        V,
        "mask_blocks describe an attn_mask: pass both or neither",
    ),
    "blocks of another mask": Bad(
        {"attn_mask": rand(5, 7), "mask_blocks": ints(1, 1, 12)},
        V,
        BLOCKS + "(1, 1, 12): pass fa_ops.mask_blocks(attn_mask)",
    ),
    "blocks of other heads": Bad(
        {"attn_mask": rand(5, 7), "mask_blocks": ints(1, 2, 4)},
        V,
        BLOCKS + "(1, 2, 4): pass fa_ops.mask_blocks(attn_mask)",
    ),
    "2-D blocks": Bad(
        {"attn_mask": rand(5, 7), "mask_blocks": ints(1, 4)},
        V,
        BLOCKS + "(1, 4): pass fa_ops.mask_blocks(attn_mask)",
    ),
    "long blocks": Bad(
        {"attn_mask": rand(5, 7), "mask_blocks": ints(1, 1, 4, dtype=torch.int64)},
        T,
        "mask_blocks must be int32, got int64: pass mask_blocks.int()",
    ),
    "int mask": Bad(
        {"attn_mask": ints(5, 7)},
        T,
        "attn_mask must be bool or float32, got int32"
        ": pass attn_mask.bool(), True where a key is attended",
    ),
    "wide mask": Bad(
        HALF | {"attn_mask": rand(5, 7).double()},
        T,
        "attn_mask must be bool or float16 or float32, got float64: pass attn_mask.float()",
    ),
    "other half mask": Bad(
        HALF | {"attn_mask": rand(5, 7).bfloat16()},
        T,
        "attn_mask must be bool or float16 or float32, got bfloat16: pass attn_mask.float()",
    ),
    "padding mask of a tokenizer": Bad(
        {"attn_mask": ints(2, 7, dtype=torch.int64)},
        T,
        "attn_mask must be bool or float32, got int64: a padding mask (B, Sk) is "
        "attn_mask[:, None, None, :].bool(), or kv_lens=attn_mask.sum(1).int() where the padding "
        "is at the end",
    ),
    "bool padding mask": Bad(
        {"attn_mask": torch.ones(2, 7, dtype=torch.bool)},
        V,
        MASKS + "(2, 7): a padding mask (B, Sk) is attn_mask[:, None, None, :], or "
        "kv_lens=attn_mask.sum(1).int() where the padding is at the end",
    ),
    "float padding mask": Bad(
        {"attn_mask": rand(2, 7)},
        V,
        MASKS + "(2, 7): a padding mask (B, Sk) is attn_mask[:, None, None, :]",
    ),
    "mask of rows": Bad(
        {"attn_mask": rand(2, 5, 7)},
        V,
        MASKS + "(2, 5, 7): a mask of rows (B, Sq, Sk) is attn_mask[:, None]",
    ),
    "bool mask and ranges": Bad(
        {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "key_ranges": ints(1, 1, 5, 2)},
        V,
        "a bool attn_mask and key_ranges both say which keys are kept: pass one of them",
    ),
    "3-D ranges": Bad(
        {"key_ranges": ints(1, 5, 2)}, V, RANGES + "(1, 5, 2): pass key_ranges[:, None]"
    ),
    "shape of ranges": Bad({"key_ranges": ints(1, 1, 4, 2)}, V, RANGES + "(1, 1, 4, 2)"),
    "triples in ranges": Bad({"key_ranges": ints(1, 1, 5, 3)}, V, RANGES + "(1, 1, 5, 3)"),
    "dtype of ranges": Bad(
        {"key_ranges": ints(1, 1, 5, 2, dtype=torch.int64)},
        T,
        "key_ranges must be int32, got int64: pass key_ranges.int()",
    ),
    "dtype of kv_lens": Bad(
        {"kv_lens": ints(2, dtype=torch.int64)},
        T,
        "kv_lens must be int32, got int64: pass kv_lens.int()",
    ),
    "shape of kv_lens": Bad({"kv_lens": ints(3)}, V, LENS),
    "rank of kv_lens": Bad(
        {"kv_lens": ints(2, 1)},
        V,
        "kv_lens must have shape (2,), got (2, 1): pass kv_lens.reshape(2,)",
    ),
    "device of kv_lens": Bad(
        {"kv_lens": ints(2, device="meta")},
        V,
        "kv_lens is on meta, but query is on cpu: pass kv_lens.to(query.device)",
        REAL,
    ),
    "shape of sinks": Bad({"sinks": rand(2)}, V, "sinks must have shape (4,), got (2,)" + A_SINK),
    "dtype of sinks": Bad(
        {"sinks": ints(4)}, T, "sinks must be float32, got int32: pass sinks.float()"
    ),
    "dtype of slopes": Bad(
        {"alibi_slopes": rand(4).half()},
        T,
        "alibi_slopes must be float32, got float16: pass alibi_slopes.float()",
    ),
    "shape of slopes": Bad(
        {"alibi_slopes": rand(2)}, V, "alibi_slopes must have shape (4,), got (2,)" + A_SLOPE
    ),
    "rank of slopes": Bad(
        {"alibi_slopes": rand(1, 4)},
        V,
        "alibi_slopes must have shape (2, 4), got (1, 4): pass alibi_slopes.expand(2, 4)",
    ),
    "slopes with gradient": Bad(
        {"alibi_slopes": rand(4).requires_grad_()},
        V,
        "alibi_slopes must not require grad: attention has no gradient for them; "
        "pass alibi_slopes.detach()",
    ),
    "negative softcap": Bad(
        {"softcap": -1.0}, V, "softcap must be finite and >= 0 (0 is off), got -1.0"
    ),
    "infinite softcap": Bad(
        {"softcap": float("inf")}, V, "softcap must be finite and >= 0 (0 is off), got inf"
    ),
    "infinite scale": Bad(
        {"scale": float("inf")}, V, "scale must be finite, got inf: None is 1 / sqrt(D)"
    ),
    "NaN scale": Bad(
        {"scale": float("nan")}, V, "scale must be finite, got nan: None is 1 / sqrt(D)"
    ),
    "negative dropout": Bad({"dropout_p": -0.1}, V, DROPPED.format(-0.1)),
    "full dropout": Bad({"dropout_p": 1.0}, V, DROPPED.format(1.0)),
    "unknown backend": Bad(
        {"backend": "gpu"},
        V,
        KNOWN + "'gpu'",
    ),
}

# Errors that only one of the entry points can raise.
FUNCTION_ONLY = {
    "negative window": Bad(
        {"window": (-2, None)},
        V,
        "the left side of window (window_left) must be -1 (unbounded) or more, got -2",
    ),
    "negative right window": Bad(
        {"window": (0, -5)},
        V,
        "the right side of window (window_right) must be -1 (unbounded) or more, got -5",
    ),
    "window of one": Bad(
        {"window": 5},
        T,
        "window must be a pair (left, right), got 5: as (5, 0) for the 5 keys before each query",
    ),
    "window of three": Bad(
        {"window": (1, 2, 3)},
        T,
        "window must be a pair (left, right), got (1, 2, 3)"
        ": as (5, 0) for the 5 keys before each query",
    ),
    "fractional window": Bad(
        {"window": (1.5, 2)}, T, "window must hold ints or None, got (1.5, 2): None is unbounded"
    ),
    "window of bools": Bad(
        {"window": (True, False)},
        T,
        "window must hold ints or None, got (True, False): None is unbounded",
    ),
    "window of more than 64 bits": Bad(
        {"window": (-(2**64), 0)},
        V,
        f"window must hold integers of 64 bits, got -{2**64}: None is unbounded",
        ("function",),
    ),
    "scale beyond floats": Bad(
        {"scale": 10**400}, V, "scale must fit a float, got an integer of 1329 bits", ("function",)
    ),
    "list as query": Bad(
        {"query": [[1.0]]}, T, "query must be a Tensor, got list: pass torch.tensor(query)"
    ),
    "no query": Bad({"query": None}, T, "query must be a Tensor, got NoneType"),
    "no key": Bad({"key": None}, T, "key must be a Tensor, got NoneType"),
    "no value": Bad({"value": None}, T, "value must be a Tensor, got NoneType"),
    "word as deterministic": Bad(
        {"deterministic": "yes"}, T, "deterministic must be a bool, got 'yes': pass True or False"
    ),
    "number as mask": Bad({"attn_mask": 0.0}, T, "attn_mask must be a Tensor, got float"),
    "list as kv_lens": Bad(
        {"kv_lens": [3, 5]},
        T,
        "kv_lens must be a Tensor, got list: pass torch.tensor(kv_lens, dtype=torch.int32)",
    ),
    "int as kv_lens": Bad(
        {"kv_lens": 5},
        T,
        "kv_lens must be a Tensor, got int: pass torch.full((B,), kv_lens, dtype=torch.int32)",
    ),
    "array as kv_lens": Bad(
        {"kv_lens": np.array([3, 5])},
        T,
        "kv_lens must be a Tensor, got ndarray: pass torch.tensor(kv_lens, dtype=torch.int32)",
    ),
    "list as ranges": Bad(
        {"key_ranges": [3, 5]},
        T,
        "key_ranges must be a Tensor, got list: pass torch.tensor(key_ranges, dtype=torch.int32)",
    ),
    "list as slopes": Bad(
        {"alibi_slopes": [1.0]},
        T,
        "alibi_slopes must be a Tensor, got list: pass torch.tensor(alibi_slopes)",
    ),
    "number as sinks": Bad({"sinks": 1.0}, T, "sinks must be a Tensor, got float"),
    "tensor as scale": Bad(
        {"scale": torch.ones(1)},
        T,
        "scale must be a number, or a tensor with one and without dimensions, got one of shape "
        "(1,) and float32"
        ": pass scale.item(), or multiply query by it",
    ),
    "scale with gradient": Bad(
        {"scale": torch.ones((), requires_grad=True)},
        T,
        "scale must not require grad, as attention has no gradient by it: multiply query by it, "
        "and pass scale=1.0",
    ),
    "word as dropout": Bad({"dropout_p": "0.1"}, T, "dropout_p must be a number, got '0.1'"),
    "None as softcap": Bad({"softcap": None}, T, "softcap must be a number, got None"),
    "number as causal": Bad(
        {"is_causal": 1}, T, "is_causal must be a bool, got 1: pass True or False"
    ),
    "number as enable_gqa": Bad(
        {"enable_gqa": 1}, T, "enable_gqa must be a bool, got 1: pass True or False"
    ),
    "number as backend": Bad({"backend": 3}, V, KNOWN + "3"),
}
OPERATOR_ONLY = {
    "negative window": Bad(
        {"window_left": -2},
        V,
        "the left side of window (window_left) must be -1 (unbounded) or more, got -2",
    ),
    "dropout without seed": Bad(
        {"dropout_p": 0.5},
        V,
        "dropout_p > 0 needs dropout_seed, an int64 tensor of one element"
        ", got None: pass torch.randint(2**63 - 1, (1,), device=query.device)",
    ),
    "dtype of seed": Bad(
        {"dropout_p": 0.5, "dropout_seed": ints(1)},
        T,
        "dropout_seed must be int64, got int32: pass dropout_seed.long()",
    ),
    "two seeds": Bad(
        {"dropout_p": 0.5, "dropout_seed": ints(2, dtype=torch.int64)},
        V,
        "dropout_seed must have one element, got shape (2,): pass dropout_seed[:1]",
    ),
}


@pytest.fixture(autouse=True)
def nothing_is_computed(monkeypatch):
    def choose(call):
        raise AssertionError("a backend was chosen")

    monkeypatch.setattr(dispatch, "choose", choose)


def check(bad: Bad, call, arguments: dict):
    state = torch.get_rng_state()
    with pytest.raises(bad.error) as caught:
        call(**arguments)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(caught.value) is bad.error
    assert str(caught.value) == bad.message


def to_meta(arguments: dict) -> dict:
    return {
        n: x.detach().to("meta").requires_grad_(x.requires_grad) if torch.is_tensor(x) else x
        for n, x in arguments.items()
    }


def ids(table: dict) -> dict:
    return {"argvalues": table.values(), "ids": table.keys()}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("bad", **ids(DENSE | FUNCTION_ONLY))
def test_function(bad, return_lse):
    check(bad, fa_ops.attention, valid() | bad.change | {"return_lse": return_lse})


@pytest.mark.parametrize("operator", [dense.ATTENTION, dense.WITH_LSE], ids=str)
@pytest.mark.parametrize("bad", **ids(DENSE | OPERATOR_ONLY))
def test_operator(bad, operator):
    check(bad, operator, valid() | bad.change)
    if "fake" in bad.entry_points:
        check(bad, operator, to_meta(valid() | bad.change))


@pytest.mark.parametrize("bad", **ids(DENSE))
def test_operator_in_inference_mode(bad):
    """All errors but those about gradients are raised below autograd too."""
    if "require grad" in bad.message:
        return
    with torch.inference_mode():
        check(bad, dense.ATTENTION, valid() | bad.change)


def backward_arguments(**change) -> dict:
    given = valid()
    saved = {"grad_out": rand(*Q), "grad_lse": rand(*Q[:3]), "out": rand(*Q), "lse": rand(*Q[:3])}
    return given | saved | change


BACKWARD = {
    "grad_out's dtype": Bad(
        {"grad_out": rand(*Q).half()},
        T,
        "grad_out must be float32, got float16: pass grad_out.float()",
    ),
    "grad_out's device": Bad(
        {"grad_out": rand(*Q, device="meta")},
        V,
        "grad_out is on meta, but query is on cpu: pass grad_out.to(query.device)",
        REAL,
    ),
    "lse's dtype": Bad(
        {"lse": rand(*Q[:3]).double()}, T, "lse must be float32, got float64: pass lse.float()"
    ),
    "mask_grad without mask": Bad(
        {"mask_grad": True},
        V,
        "mask_grad needs a floating point attn_mask, got None: pass mask_grad=False",
    ),
    "mask_grad of a bool mask": Bad(
        {"mask_grad": True, "attn_mask": torch.ones(5, 7, dtype=torch.bool)},
        V,
        "mask_grad needs a floating point attn_mask, got bool: pass mask_grad=False",
    ),
    "a wrong input": DENSE["grouped heads"],
    "a wrong option": DENSE["shape of sinks"],
    "strides": DENSE["strides of query"],
}
BACKWARD |= {
    f"{name}'s shape": Bad(
        {name: rand(*shape)}, V, f"{name} must have shape {Q[:3] if 'lse' in name else Q}, "
        f"got {shape}: it is of the call with this query and value",
    )
    for name, shape in (
        ("grad_out", (2, 4, 5, 7)), ("out", (4, 5, 8)), ("lse", (2, 4, 1)), ("grad_lse", (2, 4))
    )
}  # fmt: skip


@pytest.mark.parametrize("bad", **ids(BACKWARD))
def test_backward(bad):
    check(bad, dense.BACKWARD, backward_arguments(**bad.change))
    if "fake" in bad.entry_points:
        check(bad, dense.BACKWARD, to_meta(backward_arguments(**bad.change)))


ENDS = torch.tensor([0, 2, 5], dtype=INT)
VARLEN = {
    "4-D query": Bad(
        {"query": rand(1, 5, 4, 8)},
        V,
        "query must have shape (T, H, D), got (1, 5, 4, 8)"
        ": pass query.flatten(0, 1) of (B, S, H, D), or batches to attention",
    ),
    "tokens": Bad(
        {"value": rand(6, 2, 8)}, V, "value has 6 tokens, but key has 7: each key needs its value"
    ),
    "grouped heads": Bad(
        {"key": rand(7, 3, 8), "value": rand(7, 3, 8)},
        V,
        "key has 3 heads, which does not divide query's 4: key is (T, H, D)",
    ),
    "strides": Bad(
        {"key": rand(7, 8, 2).mT},
        V,
        "key must be contiguous in its last dimension, got strides (16, 1, 2): "
        "pass key.contiguous()",
        REAL,
    ),
    "dtype of ends": Bad(
        {"cu_seqlens_q": ENDS.long()},
        T,
        "cu_seqlens_q must be int32, got int64: pass cu_seqlens_q.int()",
    ),
    "rank of ends": Bad(
        {"cu_seqlens_k": ENDS[None]},
        V,
        "cu_seqlens_k must have shape (B + 1,), got (1, 3): pass cu_seqlens_k.flatten()",
    ),
    "no ends": Bad(
        {"cu_seqlens_q": ENDS[:0]},
        V,
        "cu_seqlens_q must have at least one element, got none: it begins with 0",
    ),
    "lengths of ends": Bad(
        {"cu_seqlens_q": ENDS[:2]},
        V,
        "cu_seqlens_q and cu_seqlens_k must be of one length, got 2 and 3"
        ": both are of the same sequences, of which some may be empty",
    ),
    "device of ends": Bad(
        {"cu_seqlens_k": ENDS.to("meta")},
        V,
        "cu_seqlens_k is on meta, but query is on cpu: pass cu_seqlens_k.to(query.device)",
        REAL,
    ),
    "ends that decrease": Bad(
        {"cu_seqlens_q": torch.tensor([0, 4, 3], dtype=INT)},
        V,
        "cu_seqlens_q[2] is 3, but must not be less than 4"
        ": if cu_seqlens_q holds lengths, pass "
        "torch.nn.functional.pad(cu_seqlens_q.cumsum(0), (1, 0)).int()",
        REAL,
    ),
    "ends before the tokens": Bad(
        {"cu_seqlens_k": ENDS - 1},
        V,
        "cu_seqlens_k[0] is -1, but must not be less than 0"
        ": if cu_seqlens_k holds lengths, pass "
        "torch.nn.functional.pad(cu_seqlens_k.cumsum(0), (1, 0)).int()",
        REAL,
    ),
    "ends beyond the tokens": Bad(
        {"cu_seqlens_k": ENDS + 3},
        V,
        "cu_seqlens_k[2] is 8, but there are 7 tokens"
        ": if cu_seqlens_k holds lengths, pass "
        "torch.nn.functional.pad(cu_seqlens_k.cumsum(0), (1, 0)).int()",
        REAL,
    ),
    "small max_seqlen_q": Bad(
        {"max_seqlen_q": 2},
        V,
        "max_seqlen_q is 2, but a sequence has 3 queries: pass at least that, or None",
        REAL,
    ),
    "negative max_seqlen": Bad(
        {"max_seqlen_q": -1},
        V,
        "max_seqlen_q must not be negative, got -1: pass None where it is not known",
    ),
    "shape of kv_lens": DENSE["shape of kv_lens"],
    "shape of slopes": Bad(
        {"alibi_slopes": rand(3, 4)}, V, "alibi_slopes must have shape (2, 4), got (3, 4)" + A_SLOPE
    ),
    "slopes with gradient": DENSE["slopes with gradient"],
    "unknown backend": DENSE["unknown backend"],
    "negative softcap": DENSE["negative softcap"],
    "full dropout": DENSE["full dropout"],
}
VARLEN_FUNCTION_ONLY = {
    "list as ends": Bad(
        {"cu_seqlens_q": [0, 5]},
        T,
        "cu_seqlens_q must be a Tensor, got list"
        ": pass torch.tensor(cu_seqlens_q, dtype=torch.int32)",
    ),
    "tensor as max_seqlen": Bad(
        {"max_seqlen_k": ENDS[1]},
        T,
        "max_seqlen_k must be an int or None, got tensor(2, dtype=torch.int32)"
        ": pass max_seqlen_k.item()",
    ),
    "max_seqlen beyond 64 bits": Bad(
        {"max_seqlen_q": 2**64},
        V,
        "max_seqlen_q must be an integer of 64 bits, got 18446744073709551616",
    ),
    "list as value": Bad(
        {"value": [1]}, T, "value must be a Tensor, got list: pass torch.tensor(value)"
    ),
}


def packed(**change) -> dict:
    tokens = {"query": rand(5, 4, 8), "key": rand(7, 2, 8), "value": rand(7, 2, 8)}
    return tokens | {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS + 2} | change


@pytest.mark.parametrize("bad", **ids(VARLEN | VARLEN_FUNCTION_ONLY))
def test_varlen_function(bad):
    check(bad, fa_ops.attention_varlen, packed(**bad.change))


@pytest.mark.parametrize("bad", **ids(VARLEN))
def test_varlen_operators(bad):
    check(bad, varlen.VARLEN, packed(**bad.change))
    if "fake" in bad.entry_points:
        check(bad, varlen.VARLEN, to_meta(packed(**bad.change)))
    if "require grad" not in bad.message:
        saved = {
            "grad_out": rand(5, 4, 8),
            "out": rand(5, 4, 8),
            "lse": rand(4, 5),
            "grad_lse": None,
        }
        check(bad, varlen.BACKWARD, packed(**bad.change) | saved)


@pytest.mark.parametrize(
    "name, shape", [("lse", (5, 4)), ("grad_out", (4, 5, 8)), ("out", (5, 4, 4))]
)
def test_varlen_backward(name, shape):
    saved = {"grad_out": rand(5, 4, 8), "out": rand(5, 4, 8), "lse": rand(4, 5), "grad_lse": None}
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        varlen.BACKWARD(**packed(), **(saved | {name: rand(*shape)}))


MERGE = {
    "shapes": Bad(
        {"outs": rand(3, 5, 8), "lses": rand(3, 4)},
        V,
        "lses must have shape (3, 5), got (3, 4): pass the lse of each of outs",
    ),
    "no states": Bad(
        {"outs": rand(0, 5, 8), "lses": rand(0, 5)},
        V,
        "outs must hold at least one state, got shape (0, 5, 8): there is nothing to merge",
    ),
    "1-D outs": Bad(
        {"outs": rand(3), "lses": rand(3)},
        V,
        "outs must have shape (N, ..., Dv), got (3,): stack the results of N sets of keys",
    ),
    "dtype of lses": Bad(
        {"outs": rand(3, 8), "lses": rand(3).half()},
        T,
        "lses must be float32, got float16: pass lses.float()",
    ),
    "dtype of outs": Bad(
        {"outs": ints(3, 8), "lses": rand(3)},
        T,
        "outs must be float16, bfloat16, float32 or float64, got int32: pass outs.float()",
    ),
    "device": Bad(
        {"outs": rand(3, 8), "lses": rand(3, device="meta")},
        V,
        "lses is on meta, but outs is on cpu: pass lses.to(outs.device)",
        REAL,
    ),
}


@pytest.mark.parametrize("bad", **ids(MERGE))
def test_merge(bad):
    check(bad, fa_ops.merge_states, bad.change)
    check(bad, merge.MERGE, bad.change)
    if "fake" in bad.entry_points:
        check(bad, merge.MERGE, to_meta(bad.change))


@pytest.mark.parametrize(
    "outs, error, message",
    [
        (3, T, "outs must be a Tensor or a sequence of Tensors, got int"),
        (["a", "b"], T, "outs must be a Tensor, got str"),
        ([torch.ones(2, 8), torch.ones(1, 8)], V, "outs must hold states of one shape, got (2, 8)"),
        ([torch.ones(8), torch.ones(8).half()], T, "outs must hold one dtype, got float32"),
    ],
)
def test_states_to_merge_must_have_one_shape_and_dtype(outs, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fa_ops.merge_states(outs, torch.ones(2))


def test_merge_states_refuses_numbers_and_empty_lists():
    with pytest.raises(TypeError, match="outs must be a Tensor, got float"):
        fa_ops.merge_states([1.0], [2.0])
    with pytest.raises(ValueError, match="outs must hold at least one state"):
        fa_ops.merge_states([], [])


def test_float64_on_a_gpu_is_refused():
    q = valid()["query"].double()
    with pytest.raises(TypeError, match="float64, which is supported on CPU only"):
        checks.dense(Call(_OnGpu(q), _OnGpu(q), _OnGpu(q)))


class _OnGpu:
    """A CPU tensor that claims to be on a GPU."""

    def __init__(self, t: torch.Tensor) -> None:
        self.t, self.device, self.is_cuda = t, torch.device("cuda"), True

    def __getattr__(self, name: str):
        return getattr(self.t, name)


class TestCompiled(expecttest.TestCase):
    """Under torch.compile, tracing raises the same errors."""

    def test_shapes(self):
        compiled = torch.compile(fa_ops.attention, backend="eager", fullgraph=True)
        given = valid() | {"key": rand(2, 3, 7, 8), "value": rand(2, 3, 7, 8)}
        with pytest.raises(Exception) as error:
            compiled(**given)
        assert "key has 3 heads, which does not divide query's 4" in str(error.value)


def test_packing_has_the_arguments_of_the_operators():
    borders = inspect.signature(checked_packing).parameters
    assert tuple(borders) == tuple(a.name for a in varlen.VARLEN._schema.arguments[3:7])
