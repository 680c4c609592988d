"""The primitives of the Triton kernels against brute force, in the interpreter."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl

from fa_ops.backends import dropout
from fa_ops.backends.triton import launch
from fa_ops.backends.triton import primitives as P

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1")


@triton.jit
def bounds_kernel(out, start, Sq, shift, limit, left, right, ranges, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip  # noqa: E501
    if ROWS:
        a, b, c, d = P.row_bounds(start, Sq, shift, limit, left, right, BM, BN)
    else:
        first, last = None, None
        if ranges is not None:
            first, last = P.load_ranges(ranges, 2, start + tl.arange(0, BM)[:, None], Sq)
        a, b, c, d = P.key_bounds(start, Sq, shift, limit, left, right, first, last, BM, BN)
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)
    tl.store(out + 3, d)


def attended(Sq, Sk, lens, left, right, ranges):
    """Bool (Sq, Sk): what the oracle lets every row see."""
    i, j = torch.arange(Sq).view(-1, 1), torch.arange(Sk).view(1, -1)
    diagonal = i + lens - Sq
    keep = (j < lens).expand(Sq, Sk)
    if right is not None:
        keep = keep & (j <= diagonal + right)
    if left is not None:
        keep = keep & (j >= diagonal - left)
    if ranges is not None:
        keep = keep & (j >= ranges[:, :1]) & (j < ranges[:, 1:])
    return keep


def check_bounds(found, visible, every, size, block):
    """visible, every (size,): whether a position matters at all, and whether nothing masks it."""
    lo, full_lo, full_hi, hi = found
    assert lo % block == full_lo % block == full_hi % block == 0
    assert 0 <= lo <= full_lo <= full_hi <= -(-max(hi, 0) // block) * block
    assert not visible[:lo].any() and not visible[max(hi, 0) :].any()
    assert bool(every[full_lo:full_hi].all())
    if visible.any():  # nothing is visited that could be left out
        where = visible.nonzero().flatten()
        assert lo == where[0] // block * block and hi == where[-1] + 1


@pytest.mark.parametrize("seed", range(40))
def test_bounds(seed):
    r = random.Random(seed)
    Sq, Sk = r.choice([1, 5, 16, 40]), r.choice([1, 7, 32, 70])
    lens = r.choice([Sk, Sk, r.randint(0, Sk)])
    left, right = r.choice([None, 0, 3, 25]), r.choice([None, 0, 3, 25])
    BM, BN = 16, 8
    ranges = None
    if r.random() < 0.4:
        ranges = torch.randint(0, Sk + 1, (Sq, 2), dtype=torch.int32).sort(-1).values
    seen = attended(Sq, Sk, lens, left, right, ranges)
    without = attended(Sq, Sk, lens, left, right, None)
    out = torch.zeros(4, dtype=torch.int32)
    args = (Sq, lens - Sq, min(lens, Sk), left, right)
    for m0 in range(0, Sq, BM):
        bounds_kernel[(1,)](out, m0, *args, ranges, False, BM, BN)
        tile = seen[m0 : m0 + BM]
        lo, full_lo, full_hi, hi = out.tolist()
        if ranges is None:
            check_bounds((lo, full_lo, full_hi, hi), tile.any(0), tile.all(0), Sk, BN)
        else:  # the least and the largest key of the rows' ranges need not be attended by the rows
            assert bool(tile.all(0)[full_lo:full_hi].all())
            assert not tile[:, :lo].any() and not tile[:, max(hi, 0) :].any()
    for n0 in range(0, Sk, BN):
        bounds_kernel[(1,)](out, n0, *args, None, True, BM, BN)
        tile = without[:, n0 : n0 + BN]
        lo, full_lo, full_hi, hi = out.tolist()
        assert not tile[:lo].any() and not tile[max(hi, 0) :].any()
        every = tile.all(1) if tile.shape[1] == BN else torch.zeros(Sq, dtype=torch.bool)
        assert bool(every[full_lo:full_hi].all()) and full_hi % BM == full_lo % BM == lo % BM == 0


@triton.jit
def sequences_kernel(ends, other, batch, total, other_total, out, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    found = P.find_sequence(ends, other, batch, total, other_total, pid, BLOCK)
    for n in tl.static_range(6):
        tl.store(out + pid * 6 + n, found[n])


def assert_every_token_has_one_program(ends, other, total, other_total, block=16):
    """Against borders that are clamped and then raised to the largest before them."""
    batch = len(ends) - 1
    programs = total // block + batch + 2
    out = torch.zeros(programs, 6, dtype=torch.int32)
    sequences_kernel[(programs,)](ends.int(), other.int(), batch, total, other_total, out, block)
    ends, other = (
        x.clamp(0, n).cummax(0).values.tolist() for x, n in ((ends, total), (other, other_total))
    )
    owner = torch.full((total,), -2)
    for b, tile, start, length, other_start, other_length in out.tolist():
        first, last = start + tile * block, min(start + (tile + 1) * block, start + length)
        if first < last:
            assert first >= 0 and last <= total and bool((owner[first:last] == -2).all())
            owner[first:last] = b
            if 0 <= b < batch:
                assert (start, start + length) == (ends[b], ends[b + 1])
                assert (other_start, other_start + other_length) == (other[b], other[b + 1])
            else:
                assert other_length == 0
    expected = torch.searchsorted(torch.tensor(ends), torch.arange(total), right=True) - 1
    assert torch.equal(owner, expected)


@pytest.mark.parametrize("batch", [1, 3, 126, 127, 260])
@pytest.mark.parametrize("gaps", [(0, 0), (33, 40)])
def test_every_token_has_one_program(batch, gaps):
    g = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 20, (batch,), generator=g) * torch.randint(
        0, 2, (batch,), generator=g
    )
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]) + gaps[0]
    total = int(ends[-1]) + gaps[1]
    assert_every_token_has_one_program(ends, ends // 2, total, total)


@pytest.mark.parametrize("seed", range(12))
def test_borders_that_decrease_or_lie_outside_of_the_tokens_are_clamped(seed):
    g = torch.Generator().manual_seed(seed)
    total, other_total, batch = 150, 90, (1, 4, 140)[seed % 3]
    extremes = torch.tensor([-(2**31), -1, 0, 151, 2**31 - 1])
    ends, other = (torch.randint(-40, 200, (batch + 1,), generator=g) for _ in range(2))
    for x in (ends, other):
        some = torch.rand(batch + 1, generator=g) < 0.1 * (seed % 4)
        x[some] = extremes[torch.randint(0, 5, (int(some.sum()),), generator=g)]
    assert_every_token_has_one_program(ends, other, total, other_total)


@triton.jit
def dropout_kernel(out, seed, threshold, HEAD: tl.constexpr, I0: tl.constexpr, J0: tl.constexpr):
    i = I0 + tl.arange(0, 16)[:, None]
    j = J0 + tl.arange(0, 32)[None, :]
    rows = P.dropout_rows(seed, tl.program_id(0) + HEAD, i, 1 << 30)
    keep = P.dropout_keep(rows, j, threshold)
    at = tl.program_id(0) * 512 + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + at, keep.to(tl.int32))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0])
def test_dropout_matches_the_shared_rule(p):
    for seed, place in itertools.product(
        (0, -1, 0x123456789ABCDEF), ((0, 0, 0), (77, 9999, 123456))
    ):
        seed = torch.tensor([seed])
        head, i0, j0 = place
        bits = dropout.threshold(p)
        out = torch.zeros(3, 16, 32, dtype=torch.int32)
        dropout_kernel[(3,)](out, seed, bits - (1 << 32) if bits >> 31 else bits, head, i0, j0)
        heads, i, j = torch.arange(3) + head, torch.arange(16) + i0, torch.arange(32) + j0
        expected = dropout.keep_mask(seed, heads.view(3, 1, 1), i.view(16, 1), j, p)
        assert torch.equal(out.bool(), expected)


@triton.jit
def tanh_kernel(x, out, SMALL: tl.constexpr):
    at = tl.arange(0, 64)
    tl.store(out + at, P.tanh(tl.load(x + at), SMALL))


@pytest.mark.parametrize("small", [False, True])
def test_tanh(small):
    x = torch.cat([torch.linspace(-12, 12, 60), torch.tensor([-1e9, 1e9, 0.0, float("nan")])])
    out = torch.zeros(64)
    tanh_kernel[(1,)](x, out, small)
    torch.testing.assert_close(out, torch.tanh(x), atol=3e-7, rtol=0, equal_nan=True)


def test_tanh_of_small_arguments():
    x = 2.0 ** torch.linspace(-40, 0, 64)
    out = torch.zeros(64)
    tanh_kernel[(1,)](x, out, True)
    torch.testing.assert_close(out, torch.tanh(x.double()).float(), atol=0, rtol=4e-7)
