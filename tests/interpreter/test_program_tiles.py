"""Tiles of masks by Triton's kernel, in the interpreter: those that the host finds, and sound."""

from __future__ import annotations

import math

import pytest
import torch

import fa_ops
from fa_ops.backends.triton import launch
from fa_ops.functions import flex, tile_cache
from fa_ops.plans import dispatch
from fa_ops.programs import tiles
from fa_ops.programs.program import MAX_RUNS
from tests.programs import functions as f

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of floats that overflow
]

if launch.INTERPRETED:
    from fa_ops.backends.triton.tiles import program_tiles

CPU = torch.device("cpu")


def both(mask_mod, sizes):
    """(found, the host's) runs, or None where a mask has no program."""
    program, packed = flex.packed_mask(mask_mod, (), sizes, CPU)
    if program is None:
        return None
    found = program_tiles(str(program), *packed, sizes, CPU)
    return found, tiles.tile_runs(program, program.views(*packed, *sizes), sizes)


def classes(runs, sizes):
    """The classes that rows list, and that columns list."""
    m, n = (-(-size // 128) for size in sizes[2:])
    return tiles.states_of_runs(runs, m, n), tiles.states_of_runs(runs[:, :, m:], n, m).mT


def assert_sound(runs, mask_mod, sizes):
    B, H, Sq, Sk = sizes
    b, h = torch.arange(B).view(B, 1, 1, 1), torch.arange(H).view(H, 1, 1)
    dense = torch.broadcast_to(
        mask_mod(b, h, torch.arange(Sq).view(-1, 1), torch.arange(Sk)), sizes
    )
    m, n = -(-Sq // 128), -(-Sk // 128)
    parts = [
        torch.nn.functional.pad(dense, (0, n * 128 - Sk, 0, m * 128 - Sq), value=value)
        .unflatten(3, (n, 128)).unflatten(2, (m, 128))
        for value in (False, True)
    ]  # fmt: skip
    some, every = parts[0].any(5).any(3), parts[1].all(5).all(3)
    for states in classes(runs, sizes):
        assert not (some & (states == tiles.EMPTY)).any()
        assert not (~every & (states == tiles.FULL)).any()


L = 4500  # more than a box of tiles
DOCUMENTS = torch.arange(L) // 333
PARENT = (torch.arange(L) - 1 - torch.arange(L) % 5).clamp(min=0)
LENGTHS = torch.tensor([100, 3000])
TABLE = (torch.arange(2 * L) // 900) % 2 == 0
PAIRS = torch.rand(2, 36, 36, generator=torch.Generator().manual_seed(0)) < 0.1
TIMES = torch.arange(L) * 0.5
TIMES[700] = float("nan")

# name: (mask, shape, tiles of which the host's class may be another)
MASKS = {
    "documents": (lambda b, h, i, j: (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j]), (1, 1, 1000, L), 0),
    "sinks": (lambda b, h, i, j: (i >= j) & ((i - j < 512) | (j < 4)), (1, 1, 300, L), 0),
    "stripes": (lambda b, h, i, j: (j // 128) % 2 == h, (1, 2, 300, 4992), 0),
    "stripes of columns": (lambda b, h, i, j: (i // 128) % 2 == 0, (1, 1, 4864, 130), 0),
    "tree": (lambda b, h, i, j: (j == i) | (j == PARENT[PARENT[i]]), (1, 1, 900, 900), 0),
    "lengths": (lambda b, h, i, j: (j < LENGTHS[b]) & ((i - j) % 2 == 0), (2, 1, 200, 2000), 0),
    "table": (lambda b, h, i, j: TABLE[i - j + L] & ((i * j) % 3 < 2), (1, 1, 200, L), 8),
    "blocks": (lambda b, h, i, j: PAIRS[h, i // 128, j // 128] & (i >= j), (1, 2, 520, 900), 0),
    "larger blocks": (lambda b, h, i, j: PAIRS[h, i // 300, j // 140], (1, 2, 520, 900), 60),
    "smaller blocks": (lambda b, h, i, j: PAIRS[h, i // 16, j // 64], (1, 2, 300, 600), 0),
    "NaN": (lambda b, h, i, j: TIMES[i] > TIMES[j], (1, 1, 1200, 600), 0),
    "functions": (
        lambda b, h, i, j: torch.tanh(i.float() - j).abs() * (i * 1e-3).exp()
        + torch.log1p(torch.sqrt(j * 0.5)) - torch.expm1(-TIMES[j]).abs() < torch.log2(i + 30.0),
        (1, 1, 600, 600), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_those_of_the_host(name):
    mask_mod, sizes, differ = MASKS[name]
    found, expected = both(mask_mod, sizes)
    assert_sound(found, mask_mod, sizes)
    assert (found[..., 0] > 0).any()
    if not differ:
        assert torch.equal(found, expected)
    for a, b in zip(classes(found, sizes), classes(expected, sizes), strict=True):
        assert int((a != b).sum()) <= differ
    if "stripes" in name:  # of more runs than are listed, neighbours are one
        assert int(found[..., 0].max()) == MAX_RUNS


@pytest.mark.parametrize("name", f.MASKS)
def test_masks_that_people_use(name):
    sizes = f.B, f.H, f.S, f.S
    found = both(f.MASKS[name], sizes)
    if found is None:
        assert name == "ancestors" or name == "nothing"
    else:
        assert torch.equal(*found)


def test_random_masks():
    sizes, tried = (1, 1, 300, 500), 0
    for seed in range(8):
        torch.manual_seed(seed)
        mask_mod = f.random_function(seed, False, sizes)
        runs = both(mask_mod, sizes)
        if runs is not None:
            assert_sound(runs[0], mask_mod, sizes)
            assert torch.equal(*runs), seed
            tried += 1
    assert tried > 4


def test_calls_find_their_tiles(monkeypatch):
    """As on a GPU: in each call, whatever is written to what the mask captures."""
    made, triton = [], dispatch.load("triton")
    find = triton.program_tiles
    monkeypatch.setattr(triton, "program_tiles", lambda *a: made.append(a[0]) or find(*a))
    monkeypatch.setattr(dispatch, "tile_finder", lambda device, sizes: triton)
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    documents = torch.arange(300) // 130
    mask_mod = lambda b, h, i, j: documents[i] == documents[j]  # noqa: E731

    def attend():
        return fa_ops.flex_attention(q, k, v, mask_mod=mask_mod, backend="triton")

    monkeypatch.setattr(tile_cache, "_OF_KERNEL", 1.0)  # longer than so small a call takes
    attend()
    assert not made
    told = str(fa_ops.explain(q, k, v, mask_mod=mask_mod))
    assert "to find empty ones takes longer than the call may take less" in told
    for name in ("_OF_KERNEL", "_OF_TILE"):
        monkeypatch.setattr(tile_cache, name, 0.0)
    told = str(fa_ops.explain(q, k, v, mask_mod=mask_mod))
    assert "empty tiles are skipped: they are found in each call, on the GPU" in told
    for calls in (1, 2):
        scores = (q @ k.mT / 4.0).masked_fill(documents.view(-1, 1) != documents, -math.inf)
        torch.testing.assert_close(attend(), torch.softmax(scores, -1) @ v)
        assert len(made) == calls
        documents.numpy()[:] = torch.arange(300).numpy() // 70  # of which no counter tells
    mapped = torch.func.grad(lambda q: fa_ops.flex_attention(q, k, v, mask_mod=mask_mod).sum())
    mapped(q)
    assert len(made) == 2
    for n in range(1, tile_cache._MOST_NUMBERS + 3):  # nothing is compiled for the last ones
        runs = fa_ops.mask_tiles(lambda b, h, i, j: (i >= j) & (i - j < n), 1, 1, 300, 300)  # noqa: B023
        assert runs[0, 0, 0].tolist()[:3] == [1, 0, 3]
    assert len(set(made)) == 1 + tile_cache._MOST_NUMBERS
