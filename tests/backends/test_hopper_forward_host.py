"""A forward call of the Hopper backend on the host: which kernels it has compiled."""

import pytest
import torch

from fa_ops.backends.hopper import compiler, dense_forward
from fa_ops.types import Spec


@pytest.fixture
def compiled(driver, monkeypatch):
    """The rows of each tile that was asked for, in order."""
    rows = []

    def program(source, entry, defines):
        rows.append(defines["BLOCK_M"])
        return entry

    monkeypatch.setattr(compiler, "program", program)
    return rows


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_left": 70}])
@pytest.mark.parametrize("D, rows", [(64, 256), (128, 128), (192, 128), (256, 128), (512, 128)])
def test_nothing_compiles_when_only_lengths_change(compiled, D, rows, options):
    for S in (100, 3000):
        q = torch.empty(1, 2, S, D, dtype=torch.bfloat16)
        dense_forward.forward(q, q, q, Spec(**options))
        assert compiled == [rows]


def test_wide_heads_have_a_cluster_of_two_ctas_for_each_tile(driver):
    q, k = (torch.empty(2, H, 300, 512, dtype=torch.bfloat16) for H in (6, 2))
    dense_forward.forward(q, k, k, Spec(is_causal=True))
    grid, _ = driver.last("forward_wide")
    assert grid[0] == 2 * 2 * 6 * 3


def test_masks_and_dropout_have_a_tile_of_their_own(compiled):
    q = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16)
    dense_forward.forward(
        q, q, q, Spec(attn_mask=torch.ones(100, 100, dtype=torch.bfloat16)[None, None])
    )
    assert compiled == [192]
