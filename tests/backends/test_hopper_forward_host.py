"""A forward call of the Hopper tier on the host: which kernels it has compiled."""

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


@pytest.mark.parametrize("D, tiles", [(64, [128, 192]), (128, [128])])
def test_the_first_causal_call_has_kernels_of_all_lengths(compiled, D, tiles):
    for S in (100, 3000):
        q = torch.empty(1, 2, S, D, dtype=torch.bfloat16)
        dense_forward.forward(q, q, q, Spec(is_causal=True))
        assert compiled == tiles  # by the first call; the second finds them


def test_others_have_one(compiled):
    q = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16)
    dense_forward.forward(q, q, q, Spec())
    assert compiled == [192]
