"""Which calls have CTAs that attend the same tokens, each for one kv head."""

import pytest

from fa_ops.backends.hopper.decode import group_width


@pytest.mark.parametrize(
    "B, Hkv, D, is_between, ctas, width",
    [
        (64, 8, 64, True, 132, 8),
        (64, 16, 64, True, 132, 8),
        (64, 8, 64, False, 132, 1),  # heads before tokens
        (64, 8, 128, True, 132, 1),
        (64, 4, 64, True, 132, 1),
        (8, 8, 64, True, 132, 1),  # few rows, whose keys all CTAs share
        (64, 8, 64, True, 7, 1),
    ],
)
def test_heads_between_tokens(B, Hkv, D, is_between, ctas, width):
    S = 4096
    strides = (S * Hkv * D, D, Hkv * D, 1) if is_between else (S * Hkv * D, S * D, D, 1)
    assert group_width(B, (B, Hkv, S, D), strides, ctas) == width
