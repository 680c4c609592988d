"""A forward call of the Hopper backend on the host: which kernels it has compiled."""

import struct

import pytest
import torch

from fa_ops.backends import mask_blocks
from fa_ops.backends.hopper import forward
from fa_ops.backends.hopper.problem import UNBOUNDED, window_sides
from fa_ops.backends.hopper.runtime import nvrtc, structs
from fa_ops.call.options import Spec


@pytest.fixture
def compiled(driver, monkeypatch):
    """The rows of each tile that was asked for, in order."""
    rows = []

    def program(source, entry, defines):
        if "BLOCK_M" in defines:
            rows.append(defines["BLOCK_M"])
        return entry

    monkeypatch.setattr(nvrtc, "program", program)
    return rows


@pytest.mark.parametrize(
    "is_causal, left, right, sides, is_bounded",
    [
        (False, -1, -1, (UNBOUNDED, UNBOUNDED), False),
        (False, 0, -1, (0, UNBOUNDED), True),
        (False, 0, 5, (0, 5), True),
        (False, 7, 0, (7, 0), True),
        (False, 2**31 - 1, 2**31 - 1, (UNBOUNDED, UNBOUNDED), False),
        (True, -1, -1, (UNBOUNDED, 0), True),
        (True, 0, 5, (0, 0), True),
    ],
)
def test_window_sides(is_causal, left, right, sides, is_bounded):
    assert window_sides(is_causal, left, right) == (*sides, is_bounded)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_left": 70}])
@pytest.mark.parametrize("D, rows", [(64, 256), (128, 128), (192, 128), (256, 128), (512, 128)])
def test_nothing_compiles_when_only_lengths_change(compiled, D, rows, options):
    for S in (100, 3000):
        q = torch.empty(1, 2, S, D, dtype=torch.bfloat16)
        forward.forward(q, q, q, Spec(**options))
        assert compiled == [rows]


def test_wide_heads_have_a_cluster_of_two_ctas_for_each_tile(driver):
    q, k = (torch.empty(2, H, 300, 512, dtype=torch.bfloat16) for H in (6, 2))
    forward.forward(q, k, k, Spec(is_causal=True))
    grid, _ = driver.last("forward_wide")
    assert grid[0] == 2 * 2 * 6 * 3


def test_masks_and_dropout_have_a_tile_of_their_own(compiled):
    q = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16)
    forward.forward(q, q, q, Spec(attn_mask=torch.ones(100, 100, dtype=torch.bfloat16)[None, None]))
    assert compiled == [192]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_tiles_are_skipped_by_the_lists_of_a_mask(dtype, driver, compiled, monkeypatch):
    layout = structs.struct_layout("forward_rows.cuh", "ForwardParams")
    read = driver.read
    monkeypatch.setattr(driver, "read", lambda name, at: read(name, at) if name == "forward" else 0)
    driver.struct_bytes = layout.size
    q, mask = torch.empty(2, 4, 200, 64).bfloat16(), torch.ones(2, 1, 200, 200, dtype=dtype)
    blocks = mask_blocks.mask_blocks(mask)
    spec = Spec(attn_mask=mask, mask_blocks=blocks)
    at = layout.fields["blocks"].offset
    if dtype != torch.bool:
        bias = structs.struct_layout("masks.cuh", "Bias")
        at = layout.fields["bias"].offset + bias.fields["blocks"].offset
    for lists, expected in (
        (None, (0, 0, 0, 0, 0)),
        (blocks, (blocks.data_ptr(), 4 * blocks.shape[2], 0, 2, 2)),
    ):
        forward.forward(q, q, q, spec._replace(mask_blocks=lists))
        _, data = driver.last("forward")
        assert struct.unpack_from("<Q2q2i", data, at) == expected
    assert compiled[-2:] == [192, 128]
