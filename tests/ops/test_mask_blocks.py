"""fa::mask_blocks, and attention that skips by what it returns, on the CPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import fa_ops
from fa_ops.call.options import MASK_BLOCK, mask_blocks_shape, mask_tiles
from fa_ops.ops import masks
from fa_ops.testing import assert_close_to_oracle, make_case

SHAPES = {
    "one tile": (1, 1, 5, 7),
    "several tiles": (1, 1, 300, 400),
    "whole tiles": (2, 1, 128, 256),
    "of heads": (2, 3, 129, 130),
    "shared by queries": (2, 1, 1, 300),
    "shared by keys": (1, 2, 300, 1),
    "two dimensions": (130, 257),
    "no dimensions": (),
    "no queries": (1, 1, 0, 130),
    "no keys": (1, 1, 130, 0),
}
MIXED, FULL, EMPTY = "mixed", "full", "empty"


def draw(shape: tuple, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A mask with tiles of all kinds, NaN, -inf, fills, and rows that keep nothing."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=g) < 0.5
    if dtype != torch.bool:
        numbers = torch.tensor([0.0, -0.0, -math.inf, math.nan, math.inf, -1e4, 1.0])
        mask = numbers[torch.randint(len(numbers), shape, generator=g)].to(dtype)
    if len(shape) == 4:
        lowest, highest = (False, True) if dtype == torch.bool else (-math.inf, 0.0)
        mask[:, :, :MASK_BLOCK, MASK_BLOCK:] = lowest
        mask[:, :, MASK_BLOCK:, :MASK_BLOCK] = highest
        mask[:, :, 3:5] = lowest
    return mask


def kind_of(tile: Tensor) -> str:
    """What the definition says of one tile."""
    numbers = tile.flatten().tolist()
    lowest, highest = (False, True) if tile.dtype == torch.bool else (-math.inf, 0.0)
    if all(x == lowest for x in numbers):
        return EMPTY
    return FULL if all(x == highest for x in numbers) else MIXED


def lists_of(mask: Tensor) -> Tensor:
    """`mask_blocks` of a mask by its definition, tile by tile."""
    B, H, m, n = mask_tiles(mask)
    mask = mask[(None,) * (4 - mask.dim())]
    blocks = torch.zeros(mask_blocks_shape(mask), dtype=torch.int32)
    for b, h in itertools.product(range(B), range(H)):
        parts = [row.split(MASK_BLOCK, 1) for row in mask[b, h].split(MASK_BLOCK, 0)]
        kinds = [[kind_of(parts[i][j]) for j in range(n)] for i in range(m)]
        lines = [*kinds, *zip(*kinds)] if m and n else [[]] * (m + n)
        numbers = []
        for line, length in zip(lines, [n] * m + [m] * n):
            entries = [2 * i + (kind == MIXED) for i, kind in enumerate(line) if kind != EMPTY]
            numbers += [len(entries), *entries, *[0] * (length - len(entries))]
        blocks[b, h] = torch.tensor(numbers, dtype=torch.int32)
    return blocks


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_lists_are_those_of_the_definition(shape, dtype):
    mask = draw(shape, dtype)
    assert torch.equal(fa_ops.mask_blocks(mask), lists_of(mask))


@pytest.mark.parametrize("function", [fa_ops.mask_blocks, masks.MASK_BLOCKS])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_errors(function, device):
    message = r"^attn_mask must be bool, .* or float64, got int32: pass attn_mask\.bool\(\)$"
    with pytest.raises(TypeError, match=message):
        function(torch.ones(5, 7, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"^attn_mask must have up to four .*, got shape \(1, 2"):
        function(torch.ones(1, 2, 1, 5, 7, device=device))


def test_masks_may_have_any_strides():
    mask = draw((2, 1, 260, 300), torch.float32)
    expected = fa_ops.mask_blocks(mask)
    for other in (mask.mT.contiguous().mT, mask.repeat(1, 1, 1, 2)[..., :300]):
        assert torch.equal(fa_ops.mask_blocks(other), expected)
    shared = mask[:1].expand(4, 1, 260, 300)
    assert torch.equal(fa_ops.mask_blocks(shared), expected[:1].expand(4, -1, -1))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 130, 140), (1, 300)])
def test_opcheck(shape, requires_grad):
    opcheck(masks.MASK_BLOCKS, (torch.randn(shape).requires_grad_(requires_grad),))


def test_a_graph_of_any_lengths():
    def attend(q, k, v, mask):
        return fa_ops.attention(q, k, v, mask, mask_blocks=fa_ops.mask_blocks(mask))

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    counter = torch._dynamo.utils.counters["stats"]
    counter.clear()
    for Sq, Sk in ((140, 300), (260, 130), (5, 9)):
        q, k, v = (torch.randn(2, 2, s, 8) for s in (Sq, Sk, Sk))
        mask = draw((2, 1, Sq, Sk), torch.bool)
        torch.testing.assert_close(compiled(q, k, v, mask), fa_ops.attention(q, k, v, mask))
    assert counter["unique_graphs"] == 1


def test_vmap_over_masks():
    many = draw((3, 1, 130, 140), torch.bool)
    assert torch.equal(
        torch.vmap(fa_ops.mask_blocks)(many), torch.stack([fa_ops.mask_blocks(m) for m in many])
    )
    q, k, v = (torch.randn(3, 1, 2, s, 8) for s in (130, 140, 140))
    blocks = torch.vmap(fa_ops.mask_blocks)(many)

    def attend(q, k, v, mask, blocks):
        return fa_ops.attention(q, k, v, mask, mask_blocks=blocks)

    expected = torch.stack([fa_ops.attention(*one) for one in zip(q, k, v, many)])
    torch.testing.assert_close(torch.vmap(attend)(q, k, v, many, blocks), expected)
    shared = torch.vmap(attend, in_dims=(0, 0, 0, None, None))(q, k, v, many[0], blocks[0])
    torch.testing.assert_close(
        shared, fa_ops.attention(*(t[:, 0] for t in (q, k, v)), many[0])[:, None]
    )


LONG = {"Sq": 270, "Sk": 400, "mask_blocks": True}
FEATURES = {
    "bool": {"mask": "bool"},
    "bool, queries share": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "bool, keys share": {"mask": "bool", "mask_shape": (0, 1, 1, 0)},
    "float": {"mask": "float", "mask_holes": True},
    "float with a gradient": {"mask": "float", "mask_shape": (0, 1, 1, 1), "mask_grad": True},
    "causal, with lengths": {"mask": "bool", "is_causal": True, "kv_lens": True},
    "ranges and a bias": {"mask": "float", "key_ranges": (1, 0, 1)},
    "every feature of scores": {
        "mask": "float", "alibi": "heads", "softcap": 3.0, "sinks": True, "dropout_p": 0.2,
    },
    "half precision": {"mask": "float", "dtype": torch.bfloat16},
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_attention(feature):
    assert_close_to_oracle(make_case(**LONG | FEATURES[feature]), "cpu")


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_the_mask_is_read_in_mixed_tiles_alone(kind):
    """Lists of another mask show what is skipped, and what is taken for full."""
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (512, 768, 768))
    mask, other = torch.ones(2, 512, 768, dtype=torch.bool)
    other[:, 256:] = False  # empty according to the lists, and kept by the mask
    mask[256:, :256] = False  # full according to the lists
    if kind == "float":
        mask, other = (torch.zeros(512, 768).masked_fill(~m, -math.inf) for m in (mask, other))
    grad = torch.randn(1, 2, 512, 8)

    def run(*args, **options):
        out = fa_ops.attention(q, k, v, *args, **options)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    found = run(mask, mask_blocks=fa_ops.mask_blocks(other))
    for x, y in zip(found, run(other)):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_lists_may_hold_anything():
    q, k, v = (torch.randn(1, 1, 260, 8) for _ in range(3))
    mask = draw((1, 1, 260, 260), torch.bool)
    blocks = fa_ops.mask_blocks(mask)
    for number in (-(2**31), -1, 7, 2**31 - 1):
        out = fa_ops.attention(q, k, v, mask, mask_blocks=torch.full_like(blocks, number))
        assert out.shape == q.shape
