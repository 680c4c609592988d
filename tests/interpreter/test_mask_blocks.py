"""Triton kernels that skip by `mask_blocks`, and the kernels that make them, in the interpreter."""

import math

import pytest
import torch

from fa_ops.backends import mask_blocks, reference
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import assert_close_to_oracle, make_case

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 1, 130, 260), (1, 2, 1, 300), (1, 1, 300, 1), (1, 1, 1, 128 * 130)]
)
def test_lists(shape, dtype):
    torch.manual_seed(0)
    mask = torch.rand(shape) < 0.5
    mask[:, :, :, 128:] = False
    mask[:, :, 128:, :128] = True
    mask[..., -5:] = True
    if dtype != torch.bool:
        mask = torch.zeros(shape).masked_fill(~mask, -math.inf)
        mask[:, :, :1, :1] = math.nan
    assert torch.equal(backend.mask_blocks(mask), mask_blocks.mask_blocks(mask))


SMALL = {"B": 1, "Hq": 2, "Hkv": 1, "D": 16, "Dv": 16, "mask_blocks": True}
FEATURES = {
    "bool": {"mask": "bool", "Sq": 140, "Sk": 270},
    "bool, queries share": {"mask": "bool", "mask_shape": (1, 1, 0, 1), "Sq": 40, "Sk": 270},
    "float, keys share": {"mask": "float", "mask_shape": (1, 1, 1, 0), "Sq": 270, "Sk": 140},
    "float": {
        "mask": "float", "mask_holes": True, "mask_grad": True, "Hq": 1, "Sq": 140, "Sk": 140,
    },
    "whole blocks": {"mask": "float", "Sq": 256, "Sk": 128, "Hq": 1, "seed": 3},
    "other masks": {
        "mask": "bool", "window": (70, 30), "kv_lens": True, "Hq": 1, "Sq": 150, "Sk": 280,
        "seed": 1,
    },
    "ranges and scores": {
        "mask": "float", "key_ranges": (1, 0, 1), "softcap": 3.0, "sinks": True, "alibi": "heads",
        "dropout_p": 0.2, "Sq": 130, "Sk": 150,
    },
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    dtype = torch.float16 if "float" in feature else torch.float32
    assert_close_to_oracle(make_case(**SMALL | FEATURES[feature], dtype=dtype), "triton")


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_tiles_are_skipped_or_not_masked(kind):
    """Lists of another mask show what is skipped, and where the mask is not read."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 1, 256, 16) for _ in range(4))
    mask, other = torch.ones(2, 256, 256, dtype=torch.bool)
    other[:128, 128:] = False  # empty according to the lists, and kept by the mask
    mask[128:, :128] = False  # full according to the lists
    if kind == "float":
        mask, other = (torch.zeros(256, 256).masked_fill(~m, -math.inf) for m in (mask, other))
    call = attention_call(
        q, k, v, attn_mask=mask, mask_blocks=reference.mask_blocks(other[None, None])
    )
    out, lse = backend.forward(call)
    expected = reference.forward(attention_call(q, k, v, attn_mask=other))
    torch.testing.assert_close((out, lse), expected, atol=1e-5, rtol=1e-5)
    found = backend.backward(call._replace(saved=Saved(grad, None, out, lse)))
    right = reference.backward(
        attention_call(q, k, v, attn_mask=other, saved=Saved(grad, None, *expected))
    )
    torch.testing.assert_close(found[:3], right[:3], atol=1e-5, rtol=1e-5)


def test_nothing_in_a_skipped_tile_reaches_a_result():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 256, 16) for _ in range(3))
    mask = torch.ones(256, 256, dtype=torch.bool)
    mask[:, 128:] = False
    options = {"attn_mask": mask, "mask_blocks": reference.mask_blocks(mask[None, None])}
    first = backend.forward(attention_call(q, k, v, **options))
    for number in (math.nan, math.inf, 3e38):
        bad = k.clone(), v.clone()
        for t in bad:
            t[:, :, 128:] = number
        assert all(map(torch.equal, first, backend.forward(attention_call(q, *bad, **options))))


@pytest.mark.parametrize("number", [-(2**31), 2**31 - 1])
def test_lists_may_hold_anything(number):
    q, k, v = (torch.randn(1, 1, 140, 16) for _ in range(3))
    mask = torch.ones(140, 140, dtype=torch.bool).tril()
    blocks = torch.full_like(reference.mask_blocks(mask[None, None]), number)
    blocks[..., 1:3] = 2**31 - 1
    out, lse = backend.forward(attention_call(q, k, v, attn_mask=mask, mask_blocks=blocks))
    grads = backend.backward(
        attention_call(
            q, k, v, attn_mask=mask, mask_blocks=blocks, saved=Saved(out, None, out, lse)
        )
    )
    assert grads.query.shape == q.shape
