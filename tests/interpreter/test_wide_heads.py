"""Head dimensions from 257 to 512 in the interpreter against the oracle (TRITON_INTERPRET=1)."""

import pytest
import torch

from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import Case, PackedCase, assert_close_to_oracle, make_case
from fa_ops.testing.caches import CacheCase, assert_cache_close

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]

SMALL = {"B": 1, "Hq": 2, "Hkv": 1, "Sq": 40, "Sk": 50}
FEATURES = {
    "causal": {"D": 512, "Dv": 512, "is_causal": True, "lse_grad": True},
    "single precision": {"D": 512, "Dv": 512, "dtype": torch.float32},
    "320 features, 384 of values": {"D": 320, "Dv": 384, "window": (20, 3)},
    "wide values alone": {"D": 40, "Dv": 512, "is_causal": True},
    "wide keys alone": {"D": 500, "Dv": 24, "kv_lens": True, "sinks": True},
    "everything": {
        "D": 512, "Dv": 512, "mask": "float", "alibi": "heads", "softcap": 3.0, "sinks": True,
        "kv_lens": True, "key_ranges": (1, 1, 1), "window": (30, 30), "dropout_p": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    case = make_case(**SMALL | {"dtype": torch.float16} | FEATURES[feature])
    assert_close_to_oracle(case, "triton")


def test_packed():
    features = Case(dtype=torch.float16, D=512, Dv=272, Hq=2, Hkv=1, is_causal=True)
    assert_close_to_oracle(PackedCase((0, 5, 40), (4, 9, 47), 5, features), "triton")


CACHES = {
    "contiguous": {"D": 512, "Dv": 512, "Hq": 4, "Hkv": 1, "S": 90, "Sq": 2, "is_causal": True},
    "pages": {"D": 400, "Dv": 400, "S": 70, "page_size": 8, "new": 3, "rotary": 64},
    "pages of fp8": {"D": 512, "Dv": 320, "S": 70, "page_size": 16, "fp8": True, "Sq": 2},
    "many rows": {"D": 288, "Dv": 288, "Hq": 40, "Hkv": 1, "S": 70, "window": (40, 0)},
}


@pytest.mark.parametrize("feature", CACHES)
def test_cache(feature):
    assert_cache_close(CacheCase(**{"dtype": torch.float16} | CACHES[feature]), "triton")


def test_a_masked_value_that_is_not_finite_changes_no_other_row():
    """Rows and keys that are recomputed: gradients of keys in two launches."""
    q, k, v = make_case(dtype=torch.float16, D=512, Dv=264, **SMALL).fresh()[:3]
    v[:, :, 45] = float("inf")  # the last queries attend it
    q[:, :, 38] = float("nan")
    call = attention_call(q, k, v, is_causal=True)
    out, lse = backend.forward(call)
    assert bool(out[:, :, :35].isfinite().all()) and bool(out[:, :, 38].isnan().all())
    grad = torch.ones_like(out)
    grad[:, :, 35:] = 0.0
    clean = torch.nan_to_num(out, 0.0, 0.0, 0.0)
    dq, dk, dv = backend.backward(call._replace(saved=Saved(grad, None, clean, lse)))[:3]
    assert bool(dq[:, :, :35].isfinite().all())
    assert bool(dk[:, :, :45].isnan().any()) and bool(dv[:, :, 49:].isfinite().all())
