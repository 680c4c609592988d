"""Symbolic sizes with divisions, as windows have them."""

from __future__ import annotations

import pytest
import torch

from compile_passes.ir import axes
from compile_passes.ir.graph import example
from tests.compile_passes.helpers import check, qkv


def shifted_windows(q, k, v, mask):
    """As in timm's Swin: windows of all images in one batch, and a mask for each window."""
    batch, heads, n, _ = q.shape
    scores = q @ k.mT * 0.3
    scores = scores.view(-1, mask.shape[0], heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
    out = scores.view(-1, heads, n, n).softmax(-1) @ v
    return out.transpose(1, 2).reshape(batch, n, -1)


def test_shifted_windows_of_dynamic_number_are_fused():
    mask = torch.zeros(3, 12, 12)
    mask[1, :, :4], mask[2, 5:, 6:] = -100.0, -100.0
    fusion = check(shifted_windows, (*qkv(B=6), mask), dynamic=True)
    assert fusion.code.count("fa.attention") == 1


@pytest.mark.parametrize("divided", [False, True])
def test_a_division_is_exact_only_where_a_guard_says_so(divided):
    found = {}

    def backend(gm, _):
        given = [example(node) for node in gm.graph.nodes if node.op == "placeholder"]
        (m,), (n,) = [x.shape for x in given if isinstance(x, torch.Tensor)]
        found["equal"] = axes.sizes_equal(n * (m // n), m)
        found["divides"] = axes.divides(m // n, m)
        found["other"] = axes.sizes_equal(n * (m // n), m + n) or axes.divides(m, n)
        found["negative"] = axes.sizes_equal(-m // n + 7, 1)  # 3, which no guard says
        return gm.forward

    def function(x, y):
        if divided and len(x) % len(y) != 0:
            return x
        return x * 2, y + 1

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True)(torch.ones(12), torch.ones(3))
    assert found == {"equal": divided, "divides": divided, "other": False, "negative": False}
