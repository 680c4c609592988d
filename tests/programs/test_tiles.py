"""Classes of tiles are sound, and runs of tiles list them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import fa_ops
from fa_ops.functions import flex
from fa_ops.programs import tiles
from fa_ops.programs.program import MAX_RUNS
from tests.programs import functions as f
from tests.programs.test_programs import split_of

RANDOM = int(os.environ.get("FA_OPS_PROGRAMS", "60"))
SIZES = (f.B, f.H, f.S, f.S)


def classes_of(mask_mod, block: int):
    """(found, true) classes of tiles, (B, H, n, n) each, or None without a program."""
    found, prologue = split_of(mask_mod, score=False, whole=True)
    if found.program is None or found.dense_mask is not None:
        return None
    program, n = found.program, f.S // block
    terms = program.views(*prologue.packed_terms(), *SIZES)
    dense = f.dense_mask(mask_mod).unflatten(3, (n, block)).unflatten(2, (n, block))
    some, every = dense.transpose(3, 4).flatten(4).any(-1), dense.transpose(3, 4).flatten(4).all(-1)
    true = np.where(every, tiles.FULL, np.where(some, tiles.MIXED, tiles.EMPTY))
    one = lambda b, h: tiles.classes(  # noqa: E731
        tiles.MaskIntervals(program, terms, b, h, SIZES), (block, block)
    )
    return np.stack([[one(b, h) for h in range(f.H)] for b in range(f.B)]), true


# masks of which intervals lose a class at 16 x 16, of how many of 288 tiles at most
LOSSES = {"tree": 60, "dilated": 40, "natten": 40, "images": 80, "block diffusion": 40, "times": 40}


@pytest.mark.parametrize("name", f.MASKS)
def test_classes(name):
    both = classes_of(f.MASKS[name], 16)
    if both is None:
        assert name == "ancestors" or name == "nothing"
        return
    found, true = both
    assert ((found == true) | (found == tiles.MIXED)).all()
    assert (found != true).sum() <= LOSSES.get(name, 0)


def test_classes_of_random_masks_are_sound():
    decided = 0
    for seed in range(RANDOM):
        torch.manual_seed(seed)
        both = classes_of(f.random_function(seed, False), 12)
        if both is not None:
            found, true = both
            assert ((found == true) | (found == tiles.MIXED)).all(), seed
            decided += (found != tiles.MIXED).any()
    assert decided > RANDOM // 4


# Runs, of tiles of 128.

S = 128 * 40
DOCUMENTS = torch.arange(S) // 700
CASES = {
    "causal": (lambda b, h, i, j: i >= j, 2),
    "window": (lambda b, h, i, j: (i - j).abs() < 500, 3),
    "documents": (lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j], 3),
    "stripes": (lambda b, h, i, j: (j // 128) % 2 == 0, MAX_RUNS),
    "heads": (lambda b, h, i, j: (i >= j) & (h < 1), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_runs(name):
    mask_mod, most = CASES[name]
    runs = fa_ops.mask_tiles(mask_mod, 1, 2, S, S)
    n = S // 128
    assert runs.shape == (1, 2 if name == "heads" else 1, 2 * n, 1 + 2 * MAX_RUNS)
    assert int(runs[..., :n, 0].max()) == most
    b = h = torch.zeros((), dtype=torch.int64)
    dense = mask_mod(b, h, torch.arange(S).view(-1, 1), torch.arange(S))
    blocks = dense.expand(S, S).unflatten(1, (n, 128)).unflatten(0, (n, 128)).transpose(1, 2)
    some, every = blocks.flatten(2).any(-1), blocks.flatten(2).all(-1)
    columns = tiles.states_of_runs(runs[:, :, n:], n, n)[0, 0].T
    for states in (tiles.states_of_runs(runs, n, n)[0, 0], columns):
        assert not (some & (states == tiles.EMPTY)).any()
        assert not (~every & (states == tiles.FULL)).any()
        if name != "stripes":
            assert ((states == tiles.EMPTY) == ~some).all() and (
                (states == tiles.FULL) == every
            ).all()


def _indexed(table, pairs, lengths):
    """Masks that read each kind of term, at lengths that are no multiples of tiles."""
    return {
        **{name: mask_mod for name, (mask_mod, _) in CASES.items() if name != "stripes"},
        "table": lambda b, h, i, j: table[i - j + 5119] & ((i * j) % 3 < 2),
        "blocks of heads": lambda b, h, i, j: pairs[h, i // 128, j // 128] & (i >= j),
        "larger blocks": lambda b, h, i, j: pairs[h, i // 300, j // 140],
        "lengths": lambda b, h, i, j: (j < lengths[b]) & (i < lengths[b]) & ((i - j) % 2 == 0),
        "floats": lambda b, h, i, j: torch.tanh(i.float() - j).abs() * (i * 1e-3).exp() < 2.0,
    }


@pytest.mark.parametrize("Sq, Sk", [(5120, 5120), (5000, 3333)])
def test_operations_of_torch_find_the_same_tiles(Sq, Sk):
    g = torch.Generator().manual_seed(0)
    table = (torch.arange(2 * 5120) // 900) % 2 == 0
    pairs = torch.rand(2, 40, 40, generator=g) < 0.1
    lengths = torch.tensor([100, 3000])
    sizes, cpu = (2, 2, Sq, Sk), torch.device("cpu")
    m, n = -(-Sq // 128), -(-Sk // 128)
    for name, mask_mod in _indexed(table, pairs, lengths).items():
        program, terms = flex._whole_mask(mask_mod, (), sizes, cpu)
        expected = tiles.tile_states(program, terms, sizes)
        runs = tiles.tile_runs_on(cpu, program, terms, sizes)
        assert (expected != tiles.MIXED).any(), name
        for found in (
            tiles.states_of_runs(runs, m, n),
            tiles.states_of_runs(runs[:, :, m:], n, m).mT,
        ):
            decided = (found != tiles.MIXED) & (expected != tiles.MIXED)
            assert torch.equal(found[decided], expected[decided]), name
            # tables of distances are of other blocks; lines of more runs merge others
            differ = int((found != expected).sum())
            assert differ <= found.numel() * 0.05 * (name in ("table", "larger blocks")), (
                name,
                differ,
            )


def test_a_million_tokens():
    """Without anything that grows with the number of pairs."""
    n = 2**20
    runs = fa_ops.mask_tiles(lambda b, h, i, j: (i >= j) & (i - j < 4096), None, None, n, n)
    assert runs.numel() * runs.element_size() < 10 * 2**20
    rows = runs[0, 0, : n // 128]
    assert rows[-1].tolist()[:7] == [3, n // 128 - 33, 3, n // 128 - 32, 62, n // 128 - 1, 3]


def test_a_mask_of_pairs_has_no_runs():
    with pytest.raises(NotImplementedError, match="reads a tensor by query and key"):
        fa_ops.mask_tiles(f.MASKS["ancestors"], 1, 1, f.S, f.S)


@pytest.mark.parametrize("block", [(128, 128), (32, 64), (256, 16), (2**30, 128)])
def test_runs_of_blocks_are_those_of_their_tiles(block):
    """Lines with more than are listed have merged ones; all others are exact."""
    g = torch.Generator().manual_seed(0)
    for Sq, Sk in ((700, 1000), (129, 5000)):
        m, n = -(-Sq // 128), -(-Sk // 128)
        shape = 2, 1, -(-Sq // block[0]), -(-Sk // block[1])
        states = torch.randint(0, 3, shape, generator=g, dtype=torch.int8)
        elements = states[:, :, torch.arange(Sq) // block[0]][..., torch.arange(Sk) // block[1]]
        tiles_of = elements[:, :, (torch.arange(m * 128)).clamp(max=Sq - 1)]
        tiles_of = tiles_of[..., (torch.arange(n * 128)).clamp(max=Sk - 1)]
        tiles_of = tiles_of.unflatten(3, (n, 128)).unflatten(2, (m, 128))
        least, most = tiles_of.amin((3, 5)), tiles_of.amax((3, 5))
        for keep_full in (True, False):
            runs = tiles.runs_of_blocks(states, block, (2, 4, Sq, Sk), keep_full)
            full = tiles.FULL if keep_full else tiles.MIXED
            kinds = torch.where(least == 2, full, tiles.MIXED)
            kinds = torch.where(most == 0, tiles.EMPTY, kinds).to(torch.uint8)
            turned = torch.cat((runs[:, :, m:], runs[:, :, :m]), 2)
            for found, expected in (
                (tiles.states_of_runs(runs, m, n), kinds),
                (tiles.states_of_runs(turned, n, m), kinds.transpose(2, 3)),
            ):
                before = torch.nn.functional.pad(expected, (1, 0))[..., :-1]
                few = ((expected != before) & (expected > 0)).sum(-1) <= MAX_RUNS
                assert torch.equal(found[few], expected[few])
                assert not (found[~few] == tiles.EMPTY)[expected[~few] > 0].any()
                assert (expected[~few] == tiles.FULL)[found[~few] == tiles.FULL].all()
    assert tiles.runs_of_blocks(states, (48, 128), (2, 4, Sq, Sk), True) is None
