"""Packed queries over pages on the Triton kernels."""

import pytest
import torch

import fa_ops
from fa_ops.backends.triton import launch
from tests.ops.test_varlen_pages import OPTIONS, drawn


@pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_packed_queries_attend_pages():
    q, k, v, ends, lens, table = drawn()
    options = {
        "kv_lens": lens,
        "page_table": table,
        "return_lse": True,
        **OPTIONS["slopes of sequences"],
    }
    out, lse = fa_ops.attention_varlen(q, k, v, ends, None, 7, **options, backend="triton")
    expected, expected_lse = fa_ops.attention_varlen(q, k, v, ends, None, **options, backend="cpu")
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
