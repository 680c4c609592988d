"""The Triton kernels of tangents in the interpreter, against the oracle."""

from __future__ import annotations

import pytest
import torch

from fa_ops.testing import PackedCase, make_case
from fa_ops.testing.tangents import assert_tangents_close

SIZES = {"B": 1, "Hq": 2, "Hkv": 1, "Sq": 40, "Sk": 70, "D": 16, "Dv": 16}
CASES = {
    "plain": {},
    "causal": {"is_causal": True, "layout": "bshd"},
    "lengths and slopes": {"is_causal": True, "alibi": "batch_heads", "kv_lens": True, "B": 2},
    "ranges": {"key_ranges": (1, 1, 1), "window": (20, 3), "D": 20, "Dv": 12},
    "bool mask": {"mask": "bool", "mask_holes": True, "mask_blocks": True, "Sq": 130},
    "all": {
        "is_causal": True, "softcap": 2.0, "sinks": True, "dropout_p": 0.3, "mask": "float",
        "mask_shape": (1, 0, 1, 1), "mask_grad": True, "mask_holes": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_dense(name):
    assert_tangents_close(make_case(**SIZES | {"dtype": torch.float16} | CASES[name]), "triton")


def test_float32():
    options = {"softcap": 2.0, "sinks": True, "is_causal": True}
    assert_tangents_close(make_case(**SIZES, **options), "triton")


def test_packed():
    features = make_case(
        Hq=4, Hkv=2, D=16, Dv=16, dtype=torch.float16, is_causal=True, sinks=True, dropout_p=0.2
    )
    assert_tangents_close(PackedCase((5, 0, 40), (9, 4, 35), 3, features), "triton")
