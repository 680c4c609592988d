"""Lists of blocks on the Triton kernels, on a GPU."""

from __future__ import annotations

import pytest
import torch

import fa_ops
from fa_ops.testing import assert_close_to_oracle, make_case

SMALL = {"B": 2, "Hq": 32, "Hkv": 2, "Sq": 500, "Sk": 500, "D": 128, "Dv": 128, "is_causal": True}
CASES = {
    "NSA": {"lists": (64, 1, 6)},
    "MoBA": {"lists": (128, 64, 4), "Hq": 8, "Hkv": 4, "Sq": 700, "Sk": 700},
    "a list for each head": {"lists": (64, 128, 3), "Hq": 4, "Hkv": 4, "is_causal": False},
    "blocks of 32": {"lists": (32, 1, 6), "Hq": 8, "Sk": 600, "D": 64, "Dv": 64},
    "single keys": {"lists": (1, 1, 64), "B": 1, "Hq": 16, "Hkv": 1, "Sq": 200, "D": 192},
    "one query head": {"lists": (16, 1, 8), "Hq": 2, "D": 64, "Dv": 64, "sinks": True},
    "ranges": {"lists": (40, 7, 3), "Hq": 6, "D": 80, "Dv": 40, "key_ranges": (1, 0, 1)},
    "documents": {"lists": (64, 1, 4), "B": 1, "documents": 4},
    "wide heads": {"lists": (64, 1, 3), "B": 1, "Sq": 200, "Sk": 200, "D": 256, "Dv": 256},
    "invalid entries": {"lists": (64, 1, 6), "broken": True},
    "a NaN that few attend": {"lists": (64, 1, 2), "Sq": 200, "Sk": 200, "poison": "nan key"},
    "values of -inf": {"lists": (64, 1, 2), "Sq": 200, "Sk": 200, "poison": "-inf value"},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, dtype):
    case = make_case(**SMALL | CASES[name] | {"dtype": dtype, "device": "cuda"})
    assert_close_to_oracle(case, "triton")


def test_gradients_of_blocks_that_all_list_repeat_bitwise():
    q, k, v = (torch.randn(1, heads, 4096, 64, device="cuda").bfloat16() for heads in (8, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    own = torch.arange(4096, device="cuda").view(1, 1, -1, 1) // 64
    lists = torch.cat((own * 0, own - 1, own), -1).int()

    def gradients():
        out = fa_ops.attention_selected(*leaves, lists)
        return torch.autograd.grad(out.float().cos().sum(), leaves)

    first = gradients()
    assert all(all(map(torch.equal, first, gradients())) for _ in range(5))


def test_memory_is_linear_in_what_is_selected():
    """A dense mask would have 4 GiB."""
    S = 2**16
    q, k, v = (
        torch.randn(1, heads, S, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 1, 1)
    )
    own = torch.arange(S, device="cuda").view(1, 1, -1, 1) // 64
    lists = torch.cat((own * 0, own // 2, own), -1).int()
    out = fa_ops.attention_selected(q, k, v, lists)
    out.sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fa_ops.attention_selected(q, k, v, lists).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 512 * 2**20
