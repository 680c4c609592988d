"""Fused attentions with dense masks share their `fa::mask_blocks`, made again after a write."""

from __future__ import annotations

import pytest
import torch

from compile_passes.emit import masks
from tests.compile_passes.helpers import Fusion, check, fuse, qkv

LENGTH = 150  # more than a tile of the mask


@pytest.fixture
def inputs():
    """q, k, v and a bool mask, of which the second tile of keys is empty for the first queries."""
    mask = torch.rand(LENGTH, LENGTH) < 0.5
    mask[:128, 128:] = False
    mask[:, 0] = True
    return *qkv(Sq=LENGTH, Sk=LENGTH, Hq=1, Hkv=1, B=1), mask


def attend(q, k, v, mask):
    scores = q @ k.transpose(-1, -2) * 0.35
    return scores.masked_fill(mask == 0, float("-inf")).softmax(-1) @ v


def made(fusion: Fusion) -> int:
    return fusion.code.count("fa.mask_blocks.default(")


def given(fusion: Fusion) -> int:
    return fusion.code.count("mask_blocks = mask_blocks")


def test_layers_share_the_blocks_of_a_mask(inputs):
    def layers(q, k, v, mask):
        for _ in range(3):
            q = attend(q, k, v, mask)
        return q

    fusion = check(layers, inputs, cores=3)
    assert (made(fusion), given(fusion)) == (1, 3)


def test_blocks_are_made_again_after_the_mask_was_written_to(inputs):
    def layers(q, k, v, mask):
        mask = mask.clone()
        q = attend(q, k, v, mask)
        mask[:128, 128:] = True
        return attend(q, k, v, mask)

    fusion = check(layers, inputs, cores=2)
    assert (made(fusion), given(fusion)) == (2, 2)


def test_masks_that_differ_have_their_own(inputs):
    def layers(q, k, v, mask):
        return attend(attend(q, k, v, mask), k, v, mask.T)

    assert made(check(layers, inputs, cores=2)) == 2


def test_random_masks_are_not_taken_for_one_another(inputs):
    def layers(q, k, v, mask):
        for _ in range(2):
            q = attend(q, k, v, mask & (torch.rand(LENGTH, LENGTH) < 2.0))
        return q

    assert made(check(layers, inputs, cores=2)) == 2


def test_any_length_in_one_graph():
    fusion = fuse(attend, dynamic=True)
    for length in (150, 40, 260):
        inputs = *qkv(Sq=length, Sk=length, Hq=1, Hkv=1, B=1), torch.rand(length, length) < 0.9
        torch.testing.assert_close(fusion.run(*inputs), attend(*inputs), atol=1e-5, rtol=1e-5)
    assert len(fusion.graphs) == made(fusion) == given(fusion) == 1


@pytest.mark.parametrize("rows, device", [(1, "cpu"), (LENGTH, "hopper")])
def test_calls_that_they_do_not_pay_for_have_none(inputs, rows, device, monkeypatch):
    if device == "hopper":
        monkeypatch.setattr(masks, "mask_blocks_pay", lambda queries, mask: False)
    q, k, v, mask = inputs
    fusion = check(attend, (q[:, :, :rows], k, v, mask[-rows:]))
    assert (made(fusion), given(fusion)) == (0, 0)
