"""The benchmark problems, and the operation count on which the TFLOP/s in the docs are based."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fa_ops.bench.problems import BIASED, PRESETS, Problem


def test_flops_are_those_of_two_matmuls_and_half_if_causal():
    full = Problem(B=2, Hq=4, Hkv=1, S=128, D=64, causal=False)
    q, k = torch.empty(4 * 2, 128, 64, device="meta"), torch.empty(4 * 2, 64, 128, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.bmm(torch.bmm(q, k), q)
    assert full.flops() == counter.get_total_flops()
    causal = Problem(B=2, Hq=4, Hkv=1, S=128, D=64, causal=True)
    assert causal.flops() * 2 == full.flops()
    assert causal.flops(backward=True) == 2.5 * causal.flops()


def test_flops_of_cross_attention_depend_on_the_number_of_keys():
    cross = Problem(B=1, Hq=2, Hkv=1, S=128, D=64, causal=False, cross=32)
    assert str(cross) == "D64 full S128x32 B1 H2/1"
    assert cross.flops() * 4 == Problem(B=1, Hq=2, Hkv=1, S=128, D=64, causal=False).flops()
    q, k, v = cross.inputs("cpu", "bshd")
    assert (q.shape, k.shape, v.shape) == ((1, 2, 128, 64), (1, 1, 32, 64), (1, 1, 32, 64))


def test_the_standard_grid_has_constant_tokens_and_width():
    grid = PRESETS["standard"]()
    assert {(p.D, p.causal, p.S) for p in grid} == {
        (D, causal, S) for D in (64, 128, 256) for causal in (False, True) for S in (2048, 8192)
    }
    assert len(grid) == 12
    assert {(p.B * p.S, p.Hq * p.D, p.Hq == p.Hkv) for p in grid} == {(16384, 2048, True)}


@pytest.mark.parametrize("preset", PRESETS | BIASED)
def test_presets_hold_valid_problems(preset):
    for problem in (PRESETS | BIASED)[preset]():
        assert min(problem.B, problem.Hkv) >= 1
        assert problem.Hq % problem.Hkv == 0 and problem.biases in (0, 1, problem.B)


def test_inputs_have_equal_values_in_both_layouts():
    problem = PRESETS["tiny"]()[0]
    bhsd, bshd = problem.inputs("cpu", "bhsd"), problem.inputs("cpu", "bshd")
    for a, b in zip(bhsd, bshd):
        assert torch.equal(a, b)
        assert a.is_contiguous()
        assert b.transpose(1, 2).is_contiguous() and not b.is_contiguous()
