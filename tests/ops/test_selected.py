"""attention_selected and attention_selected_tokens: results, rules of torch, memory, errors."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.backends import selected as gathering
from fa_ops.ops import selected
from fa_ops.testing import assert_close_to_oracle, make_case

PLAIN = make_case(B=2, Hq=4, Hkv=2, Sq=60, Sk=75, D=16, Dv=8, lists=(16, 1, 3))
CASES = {
    "causal": {"is_causal": True},
    "all keys": {},
    "blocks of queries": {"lists": (16, 16, 3), "is_causal": True},
    "blocks of one key": {"lists": (1, 1, 24), "is_causal": True},
    "more entries than blocks": {"lists": (16, 4, 12)},
    "more keys than a block has": {"lists": (128, 1, 1), "is_causal": True},
    "ranges": {"key_ranges": (1, 0, 1), "lists": (5, 7, 4), "is_causal": True},
    "sinks": {"sinks": True, "is_causal": True, "seed": 3},
    "sink of +inf": {"sinks": "inf", "is_causal": True},
    "documents": {"B": 1, "Sq": 75, "documents": 4, "is_causal": True},
    "documents, blocks of queries": {"B": 1, "Sq": 75, "documents": 4, "lists": (8, 6, 3)},
    "one head": {"Hq": 3, "Hkv": 1, "lists": (8, 1, 2)},
    "counts": {"seed": 6, "lists": (8, 2, 5)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_results_and_gradients(name, dtype):
    changes = {f: getattr(PLAIN, f) for f in ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv", "lists")}
    case = make_case(**changes | {"dtype": dtype} | CASES[name])
    assert_close_to_oracle(case, "cpu")


@pytest.mark.parametrize("poison", ["nan key", "-inf value", "nan query", "inf grad_out"])
@pytest.mark.parametrize("query_block", [1, 16])
def test_keys_that_no_list_names_change_nothing(poison, query_block):
    case = make_case(B=2, Sq=60, Sk=75, lists=(16, query_block, 2), poison=poison, is_causal=True)
    assert_close_to_oracle(case, "cpu")


def tensors(S=64, Hq=4, Hkv=2, D=16, B=2, grad=False):
    g = torch.Generator().manual_seed(S)
    heads = (Hq, Hkv, Hkv)
    return [torch.randn(B, n, S, D, generator=g, requires_grad=grad) for n in heads]


def lists_of(rows):
    return torch.tensor(rows, dtype=torch.int32).view(1, 1, 1, -1)


def test_order_and_repeats_have_no_meaning_and_everything_is_attention():
    q, k, v = tensors()
    dense = fa_ops.attention(q, k, v, is_causal=True)
    for rows in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 0, 3, -1, 1, 0, -1]):
        out = fa_ops.attention_selected(q, k, v, lists_of(rows), block_size=16, query_block=64)
        torch.testing.assert_close(out, dense, rtol=0, atol=2e-6)


def test_a_query_without_keys_gives_zero_and_minus_infinity_or_its_sink():
    q, k, v = tensors(grad=True)
    nothing = torch.full((1, 1, 64, 2), -1, dtype=torch.int32)
    empty, none = nothing[..., :0], torch.zeros(1, 1, 64, dtype=torch.int32)
    for lists, counts in ((nothing, None), (empty, None), (nothing * 0, none)):
        sinks = torch.randn(4, requires_grad=True)
        for sink, expected in ((None, -torch.inf), (sinks, sinks.detach())):
            out, lse = fa_ops.attention_selected(
                q, k, v, lists, counts=counts, block_size=16, sinks=sink, return_lse=True
            )
            assert not out.any()
            assert bool((lse.transpose(1, 2) == expected).all())
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sinks))
        assert not any(g.any() for g in grads[:3])
        assert bool((grads[3] == 2 * 64).all())


def test_entries_behind_the_count_are_not_read():
    q, k, v = tensors()
    lists, counts = lists_of([1, 0]).expand(1, 1, 64, 2), torch.ones(1, 1, 64, dtype=torch.int32)
    expected = fa_ops.attention_selected(q, k, v, lists[..., :1], block_size=16)
    spoiled = lists.clone()
    spoiled[..., 1] = 2**31 - 1
    out = fa_ops.attention_selected(q, k, v, spoiled, counts=counts, block_size=16)
    assert torch.equal(out, expected)


def test_parts_of_lists_and_repeated_calls_give_the_same_bits(monkeypatch):
    lists = torch.randint(0, 8, (2, 2, 64, 3), dtype=torch.int32)
    found = []
    for limit in (2**21, 2**21, 2**12):
        monkeypatch.setitem(gathering.PART, "cpu", limit)
        q, k, v = tensors(grad=True)
        out = fa_ops.attention_selected(q, k, v, lists, block_size=8)
        found.append((out, *torch.autograd.grad(out.cos().sum(), (q, k, v))))
    assert all(map(torch.equal, *found[:2]))
    for whole, parts in zip(found[0], found[2]):
        torch.testing.assert_close(whole, parts)


def test_lists_that_change_before_the_backward_pass_raise():
    q, k, v = tensors(grad=True)
    lists = torch.zeros(1, 1, 64, 2, dtype=torch.int32)
    out = fa_ops.attention_selected(q, k, v, lists, block_size=16)
    lists += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# The definitions of libraries that have such attention, written down here.


def nsa(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int) -> Tensor:
    """fla-org's naive NSA: q (B, T, Hq, D), k and v (B, T, H, D), blocks (B, T, H, n)."""
    out, group = torch.zeros_like(q), q.shape[2] // k.shape[2]
    for b, t, h in torch.cartesian_prod(*map(torch.arange, blocks.shape[:3])).tolist():
        keys = sorted(
            {j for x in blocks[b, t, h].tolist() for j in range(x * size, x * size + size)}
        )
        keys = [j for j in keys if 0 <= j <= t]
        rows = q[b, t, h * group : h * group + group]
        weights = (rows @ k[b, keys, h].T * q.shape[3] ** -0.5).softmax(-1)
        out[b, t, h * group : h * group + group] = weights @ v[b, keys, h]
    return out


def test_nsa():
    B, T, H, group, D, size, n = 2, 40, 2, 4, 16, 8, 3
    q, k, v = (torch.randn(B, T, heads, D) for heads in (H * group, H, H))
    own = torch.arange(T).view(1, T, 1, 1) // size  # its own block is always among them
    others = (torch.rand(B, T, H, n - 1) * (own + 1)).long()
    blocks = torch.cat((own.expand(B, T, H, 1), others), -1)
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    out = fa_ops.attention_selected(*tensors, blocks.transpose(1, 2).int(), block_size=size)
    torch.testing.assert_close(out.transpose(1, 2), nsa(q, k, v, blocks, size), rtol=0, atol=2e-6)


def moba(q: Tensor, k: Tensor, v: Tensor, size: int, topk: int) -> tuple[Tensor, Tensor]:
    """MoBA's naive form for one sequence (S, H, D): out, and the selected chunks (H, S, n)."""
    S, H, D = q.shape
    chunks = -(-S // size)
    means = torch.stack([k[c * size : c * size + size].mean(0) for c in range(chunks)], 1)
    gate = torch.einsum("shd,hcd->hsc", q, means)
    own, chunk = torch.arange(S)[:, None] // size, torch.arange(chunks)
    gate = gate.masked_fill(chunk > own, -math.inf).masked_fill(chunk == own, math.inf)
    picked = gate.topk(min(topk, chunks), -1)
    picked = picked.indices.masked_fill(picked.values == -math.inf, -1)
    keep = (picked.unsqueeze(-1) == torch.arange(S) // size).any(2) & torch.ones(S, S).tril().bool()
    scores = torch.einsum("shd,thd->hst", q, k) * D**-0.5
    weights = scores.masked_fill(~keep, -math.inf).softmax(-1)
    return torch.einsum("hst,thd->shd", weights, v), picked


def test_moba():
    q, k, v = (torch.randn(70, 3, 16) for _ in range(3))
    expected, picked = moba(q, k, v, 16, 3)
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = fa_ops.attention_selected(*rows, picked[None].int(), block_size=16)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, rtol=0, atol=2e-6)


def sparse_mla(q, kv, indices, scale, Dv, lengths=None, sink=None):
    """FlashMLA's sparse attention of q (T, H, D) over kv (N, D) by indices (T, k), in float64.

    Invalid indices and those behind a length are no keys; a row without keys has out 0. A sink
    multiplies the output by exp(lse) / (exp(lse) + exp(sink)), and is no part of lse.
    """
    q, kv = q.double(), kv.double()
    valid = (indices >= 0) & (indices < len(kv))
    if lengths is not None:
        valid &= torch.arange(indices.shape[1]) < lengths[:, None]
    keys = kv[indices.clamp(0, len(kv) - 1).long()]
    keys = keys.masked_fill(~valid.unsqueeze(-1), 0.0)
    scores = torch.einsum("thd,tkd->thk", q, keys) * scale
    scores = scores.masked_fill(~valid.unsqueeze(1), -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    out = torch.einsum("thk,tkd->thd", weights, keys[..., :Dv])
    return out if sink is None else out * torch.sigmoid(lse - sink.double()).unsqueeze(-1), lse


@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sparse_latent_attention(backend, has_lengths):
    T, H, N, k, D, Dv = 9, 8, 60, 16, 72, 64
    q, latent = torch.randn(T, H, D), torch.randn(N, D)
    lists = torch.stack([torch.randperm(N)[:k] for _ in range(T)]).int()
    lists[torch.rand(T, k) < 0.2] = -1  # holes in the middle
    lists[3], lengths = -1, torch.randint(0, k + 1, (T,), dtype=torch.int32)
    used = set(lists.flatten().tolist())
    latent[[j for j in range(N) if j not in used]] = math.nan
    lengths, sink = lengths if has_lengths else None, torch.randn(H)
    arguments = q, latent[:, None], latent[:, None, :Dv], lists
    out, lse = fa_ops.attention_selected_tokens(
        *arguments, counts=lengths, scale=0.1, return_lse=True, backend=backend
    )
    clean = latent.nan_to_num()
    expected, expected_lse = sparse_mla(q, clean, lists, 0.1, Dv, lengths)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.t().double(), expected_lse, rtol=0, atol=3e-6)
    out = fa_ops.attention_selected_tokens(
        *arguments, counts=lengths, scale=0.1, sinks=sink, backend=backend
    )
    expected, _ = sparse_mla(q, clean, lists, 0.1, Dv, lengths, sink)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


def test_tokens_of_an_ordinary_cache_are_those_of_blocks_of_one_key():
    q, k, v = torch.randn(9, 4, 16), torch.randn(60, 2, 16), torch.randn(60, 2, 8)
    lists = torch.stack([torch.randperm(60)[:12] for _ in range(9)]).int()
    out, lse = fa_ops.attention_selected_tokens(q, k, v, lists, return_lse=True)
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected, expected_lse = fa_ops.attention_selected(
        *rows, lists[None, None], block_size=1, is_causal=False, return_lse=True
    )
    assert torch.equal(out, expected[0].transpose(0, 1)) and torch.equal(lse, expected_lse[0])
    assert out.is_contiguous() and out.shape == (9, 4, 8)


def test_no_list_at_all():
    q, k, v = torch.randn(3, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    lists = torch.empty(3, 0, dtype=torch.int32)
    out, lse = fa_ops.attention_selected_tokens(q, k, v, lists, return_lse=True)
    assert not out.any() and bool((lse == -math.inf).all())


# Branches merge by their lse.


def test_branches_merge():
    q, k, v = tensors()
    left, right = lists_of([0, 2]), lists_of([1, 3])
    parts = [
        fa_ops.attention_selected(
            q, k, v, lists, block_size=16, query_block=64, return_lse=True
        )
        for lists in (left, right)
    ]  # fmt: skip
    out, _ = fa_ops.merge_states(*zip(*parts))
    expected = fa_ops.attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


# Memory is linear in what is selected.


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that anything returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if type(x) in (Tensor, Parameter) and x.untyped_storage().nbytes():
                stored = x.untyped_storage().nbytes() // x.element_size()
                self.elements = max(self.elements, min(stored, x.numel()))
        return results


@pytest.mark.parametrize("query_block", [1, 64])
def test_no_tensor_has_an_element_for_each_query_and_key(query_block):
    S, size, n = 4096, 64, 2
    q, k, v = tensors(S, Hq=2, Hkv=1, B=1, D=8, grad=True)
    lists = torch.randint(0, S // size, (1, 1, S // query_block, n), dtype=torch.int32)
    call = selected.OPERATORS.forward.call(
        q.detach(), k.detach(), v.detach(), (lists, size, query_block), {}
    )
    with Largest() as largest:
        out, lse = gathering.forward(call)
        saved = fa_ops.call.call.Saved(torch.ones_like(out), None, out, lse)
        gathering.backward(call._replace(saved=saved))
    assert S * 8 <= largest.elements <= gathering.PART["cpu"] < S * S


# torch's own parts.


def call_of(grad: bool = False):
    q, k, v = tensors(40, grad=grad)
    lists = torch.randint(-1, 5, (2, 2, 40, 3), dtype=torch.int32)
    return (q, k, v, lists, 8), {"sinks": torch.randn(4, requires_grad=grad)}


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_of_blocks(grad):
    args, options = call_of(grad)
    opcheck(selected.BLOCKS, args, options)


def test_opcheck_of_the_backward_pass():
    args, options = call_of()
    out, lse = selected.BLOCKS(*args, **options)
    saved = torch.randn_like(out), torch.randn_like(lse), *args[:3], out, lse
    opcheck(selected.BACKWARD, (*saved, *args[3:]), options)


def tokens_call():
    q, k, v = torch.randn(9, 4, 16), torch.randn(60, 2, 16), torch.randn(60, 2, 16)
    return q, k, v, torch.randint(-1, 60, (9, 7), dtype=torch.int32)


def test_opcheck_of_tokens():
    counts = torch.full((9,), 5, dtype=torch.int32)
    opcheck(selected.TOKENS, (*tokens_call(), counts), {"scale": 0.2, "sinks": torch.randn(4)})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_are_eager_ones(dynamic):
    def function(q, k, v, lists):
        out, lse = fa_ops.attention_selected(q, k, v, lists, block_size=8, return_lse=True)
        return out * torch.sigmoid(lse).unsqueeze(-1)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    args, _ = call_of(grad=True)
    expected, out = function(*args[:4]), compiled(*args[:4])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    for x, y in zip(*(torch.autograd.grad(x.cos().sum(), args[:3]) for x in (out, expected))):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


def test_compiled_tokens():
    compiled = torch.compile(fa_ops.attention_selected_tokens, fullgraph=True)
    args = tokens_call()
    assert torch.equal(compiled(*args), fa_ops.attention_selected_tokens(*args))


@pytest.mark.parametrize(
    "mapped", [(0, 0, 0, 0), (0, None, None, 0), (0, 0, 0, None), (1, 0, 2, None)]
)
def test_vmap_of_blocks(mapped):
    given = [torch.stack([x, x.roll(1, -1)], d or 0) for x, d in zip(call_of()[0], mapped)]
    given = [x if d is not None else x.select(0, 0) for x, d in zip(given, mapped)]

    def function(q, k, v, lists):
        return fa_ops.attention_selected(q, k, v, lists, block_size=8)

    each = [
        function(*(x if d is None else x.select(d, i) for x, d in zip(given, mapped)))
        for i in range(2)
    ]
    folded = torch.vmap(function, mapped)(*given)
    torch.testing.assert_close(folded, torch.stack(each), rtol=0, atol=1e-6)


def test_gradients_of_samples():
    (q, k, v, lists, size), options = call_of()

    def loss(q, k, v, sinks):
        return fa_ops.attention_selected(q, k, v, lists, block_size=size, sinks=sinks).cos().sum()

    many = [torch.stack([x, x.flip(-1)]) for x in (q, k, v)]
    gradient = torch.func.grad(loss, (0, 1, 2, 3))
    mapped = torch.vmap(gradient, (0, 0, 0, None))(*many, options["sinks"])
    for i in range(2):
        for x, y in zip(mapped, gradient(*(x[i] for x in many), options["sinks"])):
            torch.testing.assert_close(x[i], y, rtol=0, atol=1e-5)


def test_vmap_of_tokens():
    many = [torch.stack([x, x.roll(1, -1)]) for x in tokens_call()]
    each = torch.stack([fa_ops.attention_selected_tokens(*one) for one in zip(*many)])
    assert torch.equal(torch.vmap(fa_ops.attention_selected_tokens)(*many), each)


def test_autocast_casts_query_key_and_value():
    (q, k, v, lists, size), _ = call_of()
    half = [x.bfloat16() for x in (q, k, v)]
    expected = fa_ops.attention_selected(*half, lists, block_size=size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fa_ops.attention_selected(q, k, v, lists, block_size=size), expected)
        q, k, v, tokens = tokens_call()
        out = fa_ops.attention_selected_tokens(q, k, v, tokens)
    half = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, fa_ops.attention_selected_tokens(*half, tokens))


def test_flops_are_those_of_the_selected_keys():
    (q, k, v, lists, _), _ = call_of(grad=True)
    with FlopCounterMode(display=False) as counter:
        fa_ops.attention_selected(q, k, v, lists, block_size=8).sum().backward()
        fa_ops.attention_selected_tokens(*tokens_call())
    pairs = 2 * 4 * 40 * 3 * 8
    assert counter.get_total_flops() == 2 * pairs * (7 * 16) + 2 * 4 * 9 * 7 * 32


def test_a_checkpoint_may_save_the_operator():
    assert selected.BLOCKS in fa_ops.SAC_OPS


def test_explain_names_the_kernel():
    (q, k, v, lists, _), _ = call_of()
    found = fa_ops.explain(q, k, v, block_indices=lists, block_size=8)
    assert (found.backend, found.kernel, found.route) == ("cpu", "forward over lists", "direct")
    q, k, v, tokens = tokens_call()
    assert fa_ops.explain(q, k, v, token_indices=tokens).kernel == "forward over lists"
    assert "key: 1 row, 2 heads, 60 tokens" in str(fa_ops.explain(q, k, v, token_indices=tokens))


# Errors.

Q = torch.zeros(2, 4, 40, 8)
LISTS = torch.zeros(1, 1, 40, 3, dtype=torch.int32)
BLOCKS = {"query": Q, "key": Q[:, :2], "value": Q[:, :2], "block_indices": LISTS, "block_size": 8}
ENDS = torch.tensor([0, 20, 40], dtype=torch.int32)
RANGES = torch.zeros(1, 4, 1, 2, dtype=torch.int32)


def with_entry(x: Tensor, at: tuple, number: int) -> Tensor:
    x = x.clone()
    x[at] = number
    return x


ONE_ROW = {name: BLOCKS[name][:1] for name in ("query", "key", "value")}
BAD_BLOCKS = {
    "no lists": ({"block_indices": None}, TypeError, "block_indices must be a Tensor, got None"),
    "int64": ({"block_indices": LISTS.long()}, TypeError,
              "block_indices must be int32, got int64: pass block_indices.int()"),
    "rank": ({"block_indices": LISTS[0]}, ValueError,
             "got (1, 40, 3): pass block_indices[:, None]"),
    "rows": ({"query_block": 2}, ValueError,
             "with (B, Hkv, ceil(Sq / query_block)) = (2, 2, 20), got (1, 1, 40, 3)"),
    "heads": ({"block_indices": LISTS.expand(1, 4, 40, 3)}, ValueError, "got (1, 4, 40, 3)"),
    "block_size": ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
    "a float": ({"block_size": 8.0}, TypeError, "block_size must be an int, got 8.0"),
    "too large": ({"query_block": 2**21}, ValueError, "query_block must be at most 1048576"),
    "out of range": (
        {"block_indices": with_entry(LISTS, (0, 0, 7, 2), 5)}, ValueError,
        "block_indices[0, 0, 7, 2] is 5, but there are 5 blocks of 8 keys: they are numbered from "
        "0, and -1 lists nothing",
    ),
    "negative": ({"block_indices": with_entry(LISTS, (0, 0, 7, 2), -2)}, ValueError,
                 "block_indices[0, 0, 7, 2] is -2"),
    "of another document": (
        {**ONE_ROW, "key": Q[:1], "value": Q[:1], "cu_seqlens": ENDS,
         "block_indices": with_entry(LISTS, (0, 0, 7, 2), 3)}, ValueError,
        "block_indices[0, 0, 7, 2] is 3, but there are 3 blocks of 8 keys",
    ),
    "counts": ({"counts": torch.full((1, 1, 40), 4, dtype=torch.int32)}, ValueError,
               "counts[0, 0, 0] is 4, but a list has 3 entries"),
    "shape of counts": ({"counts": torch.ones(1, 2, 40, dtype=torch.int32)}, ValueError,
                        "counts must have shape (1, 1, 40), got (1, 2, 40): pass "
                        "a number for each list"),
    "ranges of heads": ({"key_ranges": RANGES}, ValueError,
                        "key_ranges must have shape (B or 1, 1, Sq or 1, 2), got (1, 4, 1, 2)"),
    "documents of rows": ({"cu_seqlens": ENDS}, ValueError, "query has batch size 2"),
    "documents of a longer key": (
        {**ONE_ROW, "key": torch.zeros(1, 2, 50, 8), "value": torch.zeros(1, 2, 50, 8),
         "cu_seqlens": ENDS}, ValueError, "must have one length, got 40 and 50",
    ),
    "borders": ({**ONE_ROW, "cu_seqlens": ENDS.flip(0)}, ValueError, "cu_seqlens[1] is 20, but"),
    "unknown": ({"causal": True}, TypeError, "did you mean is_causal?"),
}  # fmt: skip
T = torch.zeros(9, 4, 8)
TOKENS = {"query": T, "key": T[:, :2], "value": T[:, :2],
          "token_indices": torch.zeros(9, 3, dtype=torch.int32)}  # fmt: skip
BAD_TOKENS = {
    "a latent cache": ({"key": T[:, 0]}, ValueError,
                       "key must have shape (N, Hkv, D), got (9, 8): pass key[:, None]"),
    "a batch": ({"query": T[None]}, ValueError, "pass query.transpose(1, 2).flatten(0, 1)"),
    "lists": ({"token_indices": TOKENS["token_indices"][:5]}, ValueError,
              "token_indices has 5 lists, but query has 9 tokens"),
    "rank": ({"token_indices": LISTS}, ValueError, "token_indices must have shape (T, k), got"),
    "none": ({"token_indices": None}, TypeError, "token_indices must be a Tensor, got None"),
    "out of range": (
        {"token_indices": with_entry(TOKENS["token_indices"], (4, 1), 9)}, ValueError,
        "token_indices[4, 1] is 9, but there are 9 tokens: they are numbered from 0, and -1 lists "
        "nothing",
    ),
    "counts": ({"counts": torch.full((9,), -1, dtype=torch.int32)}, ValueError,
               "counts[0] is -1, but a list has 3 entries"),
    "values": ({"value": T[:5, :2]}, ValueError, "value has 5 tokens, but key has 9"),
    "heads": ({"value": T[:, :1]}, ValueError, "value has 1 heads, but key has 2"),
    "scale": ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
    "gradient": ({"query": T.clone().requires_grad_()}, ValueError,
                 "use attention_selected with block_size=1, which has one"),
}  # fmt: skip
BAD = [(fa_ops.attention_selected, BLOCKS, *bad) for bad in BAD_BLOCKS.values()]
BAD += [(fa_ops.attention_selected_tokens, TOKENS, *bad) for bad in BAD_TOKENS.values()]


@pytest.mark.parametrize(
    "function, valid, change, error, message", BAD, ids=[*BAD_BLOCKS, *BAD_TOKENS]
)
def test_errors(function, valid, change, error, message):
    for _ in range(2):  # with a plan of a valid call too
        with pytest.raises(error, match=re.escape(message)):
            function(**valid | change)
        function(**valid)


def test_an_error_of_the_operator_names_the_argument_too():
    arguments = [BLOCKS[n] for n in ("query", "key", "value")]
    with pytest.raises(ValueError, match=re.escape("block_indices[0, 0, 7, 2] is 5, but")):
        selected.BLOCKS(*arguments, BAD_BLOCKS["out of range"][0]["block_indices"], 8)


def test_a_second_derivative_raises():
    q, k, v = tensors(grad=True)
    out = fa_ops.attention_selected(q, k, v, lists_of([0]).expand(1, 1, 64, 1))
    (grad,) = torch.autograd.grad(out.cos().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()
