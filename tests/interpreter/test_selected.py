"""Lists of blocks on the Triton kernels, in the interpreter."""

import pytest
import torch

import fa_ops
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.backends.triton import selected as host
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import assert_close_to_oracle, make_case

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    # log2(0) of dead rows, and what NaN and Inf are of
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SMALL = {"B": 1, "Hq": 16, "Hkv": 2, "Sq": 40, "Sk": 40, "D": 16, "Dv": 16, "is_causal": True}
CASES = {
    "a list for each query": {"lists": (16, 1, 2), "Hq": 2},
    "whole tiles": {"lists": (64, 1, 2), "B": 2, "Sk": 150},
    "tiles that blocks have several of": {"lists": (128, 32, 2), "Sq": 150, "Sk": 280},
    "lists with several parts": {"lists": (64, 70, 2), "Sq": 150, "Sk": 150},
    "single keys": {"lists": (1, 1, 9), "Sk": 70},
    "sizes that divide no tile": {"lists": (5, 7, 3), "B": 2, "Sq": 20, "Sk": 50, "Hq": 2},
    "ranges and sinks": {"lists": (24, 2, 3), "key_ranges": (1, 0, 1), "sinks": True, "seed": 3},
    "documents": {"lists": (16, 6, 3), "documents": 4, "Sq": 75, "Sk": 75},
    "a negative scale": {"lists": (16, 1, 2), "scale": -0.3},
    "a head that is not aligned": {"lists": (16, 4, 2), "D": 13, "Dv": 5},
    "all keys": {"lists": (16, 1, 2), "is_causal": False},
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name):
    dtype = torch.float16 if name in ("whole tiles", "a head that is not aligned") else None
    changed = {} if dtype is None else {"dtype": dtype}
    assert_close_to_oracle(make_case(**SMALL | CASES[name] | changed), "triton")


@pytest.mark.parametrize("poison", ["nan key", "-inf value", "nan query", "inf grad_out"])
@pytest.mark.parametrize("size, query_block", [(16, 1), (64, 64)])
def test_keys_that_no_list_names_change_nothing(poison, size, query_block):
    case = make_case(**SMALL | {"lists": (size, query_block, 2), "Sk": 75, "poison": poison})
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("size, query_block", [(16, 1), (64, 1), (64, 40)])
def test_invalid_entries_list_nothing(size, query_block):
    g = torch.Generator().manual_seed(0)
    shapes = (16, 24 if query_block == 1 else 70), (2, 70), (2, 70)
    q, k, v = (torch.randn(1, *shape, 16, generator=g) for shape in shapes)
    blocks, rows = -(-70 // size), -(-q.shape[2] // query_block)
    lists = torch.randint(-1, blocks, (1, 2, rows, 2), generator=g).int()
    bad = torch.tensor([-(2**31), blocks, blocks + 1, 2**31 - 1]).int()
    spoiled = torch.cat((lists, bad.expand(1, 2, rows, -1), lists), -1)  # and repeats
    found = []
    for one in (lists, spoiled):
        options = {"block_size": size, "query_block": query_block, "is_causal": query_block == 1}
        call = attention_call(q, k, v, block_indices=one, **options)
        out, lse = backend.selected_forward(call)
        saved = Saved(out.cos(), lse.cos(), out, lse)
        found.append((out, lse, *backend.selected_backward(call._replace(saved=saved))[:3]))
    for ours, expected in zip(*found):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def skewed(Sq: int = 100, Sk: int = 1300) -> tuple[torch.Tensor, ...]:
    """Lists of two blocks of 64 keys, one of which all queries have."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, S, 16, generator=g) for S in (Sq, Sk, Sk))
    own = torch.arange(Sq).view(1, 1, Sq, 1) % (Sk // 64)
    return q, k, v, torch.cat((own * 0 + 3, own), -1).int()


def test_blocks_that_all_queries_list_are_divided_and_repeat_bitwise(monkeypatch):
    q, k, v, lists = skewed()
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients(name):
        out = fa_ops.attention_selected(*leaves, lists, is_causal=False, backend=name)
        return torch.autograd.grad(out.cos().sum(), leaves)

    found, divide = [], host.inverse_of

    def watched(problem, block_n):
        found.append(divide(problem, block_n))
        return found[-1]

    monkeypatch.setattr(host, "inverse_of", watched)
    ours = gradients("triton")
    items = found[0].first_items.diff()
    assert items[3] > 2 and found[0].slots >= items[items > 1].sum()
    assert all(map(torch.equal, ours, gradients("triton")))
    for one, expected in zip(ours, gradients("cpu")):
        torch.testing.assert_close(one, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("size, query_block", [(1, 1), (16, 1), (64, 1), (128, 24)])
def test_memory_is_linear_in_the_lists(size, query_block):
    """Of the words of unions and of the inverse, for any number of keys."""
    words = []
    for Sk in (512, 4096):
        q, k = torch.randn(1, 2, 96, 16), torch.randn(1, 1, Sk, 16)
        lists = torch.arange(96 // query_block).view(1, 1, -1, 1).expand(1, 1, -1, 4).int()
        call = attention_call(
            q, k, k, block_indices=lists, block_size=size, query_block=query_block
        )
        problem = host.SelectedProblem(call)
        unions = host.unions_of(problem, 4, 0 if size < 64 else 64)
        words.append((unions.words.numel(), host.inverse_of(problem, 64).words.numel()))
    assert words[0] == words[1]


def test_heads_that_are_too_wide_are_refused():
    q = torch.randn(1, 1, 4, 300, requires_grad=True)
    lists = torch.zeros(1, 1, 4, 1, dtype=torch.int32)
    out = fa_ops.attention_selected(q, q, q, lists, backend="triton")
    with pytest.raises(NotImplementedError, match="head dimensions up to 256, got 300"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match="head dimensions up to 512, got 576"):
        q = torch.randn(1, 1, 4, 576)
        fa_ops.attention_selected(q, q, q, lists, backend="triton")
