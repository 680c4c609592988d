"""The Triton forward kernels in the interpreter against the oracle.

They need TRITON_INTERPRET=1 before Triton is imported, so a process of their own:
`make test-interpreter`. `test_backward.py` checks out and lse too: other features, random cases.
"""

import importlib
import math

import pytest
import torch

import fa_ops
from fa_ops.backends import reference
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import Case, PackedCase, assert_close_to_oracle, make_case, random_case
from tests.kernels import alternating_dtype, assert_merges, assert_merges_into

host = importlib.import_module("fa_ops.backends.triton.forward")

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]

FEATURES = {
    "several blocks of rows": {"Sq": 300, "Sk": 20},
    "whole blocks": {"Sq": 128, "Sk": 128},
    "causal with no keys for the first rows": {"is_causal": True, "Sq": 160, "Sk": 10},
    "causal with many more keys": {"is_causal": True, "Sq": 10, "Sk": 160},
    "window on both sides of several blocks": {"window": (70, 3), "Sq": 140, "Sk": 160},
    "window to the left alone": {"window": (3, -1), "Sq": 140, "Sk": 160},
    "causal window": {"window": (20, 9), "is_causal": True, "Sq": 150, "Sk": 150},
    "window that misses every key": {"window": (0, -1), "Sq": 150, "Sk": 4, "kv_lens": True},
    "negative scale": {"scale": -0.3},
    "scale 0": {"scale": 0.0},
    "key ranges of single rows": {"key_ranges": (1, 1, 1), "Sq": 140, "Sk": 160},
    "key ranges and a bias": {"key_ranges": (1, 0, 1), "mask": "float", "is_causal": True},
    "bool mask of a row": {"mask": "bool", "mask_shape": (0, 0, 0, 1), "mask_holes": True},
    "bool mask of a column": {"mask": "bool", "mask_shape": (1, 0, 1, 0)},
    "float mask with holes": {"mask": "float", "mask_shape": (0, 1, 1, 1), "mask_holes": True},
    "everything": {
        "mask": "float", "alibi": "batch_heads", "softcap": 3.0, "sinks": True, "kv_lens": True,
        "key_ranges": (1, 1, 1), "window": (60, 60), "dropout_p": 0.2, "Sq": 140, "Sk": 150,
    },
    "head dim 1": {"D": 1, "Dv": 1},
    "head dim 33, values 200": {"D": 33, "Dv": 200, "B": 1},
    "head dim 256": {"D": 256, "Dv": 256, "B": 1, "Hq": 1, "Hkv": 1},
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    case = make_case(dtype=alternating_dtype(feature, FEATURES), **FEATURES[feature])
    assert_close_to_oracle(case, "triton", gradients=False)


@pytest.mark.parametrize("seed", range(6))
def test_packed(seed):
    features = random_case(seed, mask=None, key_ranges=None, broken=False, D=16, Dv=16)
    case = PackedCase((0, 5, 150, 33, 1), (4, 9, 70, 0, 47), seed % 3 * 65, features)
    assert_close_to_oracle(case, "triton", gradients=False)


def test_packed_more_sequences_than_a_chunk():
    case = PackedCase((1, 2) * 70, (2, 1) * 70, features=Case(is_causal=True, Hq=1, Hkv=1, D=8))
    assert_close_to_oracle(case, "triton", gradients=False)


def test_rows_outside_every_sequence_have_no_sink():
    q = torch.randn(9, 2, 8)
    ends = torch.tensor([2, 5], dtype=torch.int32)
    out, lse = backend.varlen_forward(
        attention_call(q, q, q, sinks=torch.ones(2), cu_seqlens_q=ends, cu_seqlens_k=ends)
    )
    outside = [0, 1, 5, 6, 7, 8]
    assert not out[outside].any() and bool((lse[:, outside] == float("-inf")).all())
    assert bool(lse[:, 2:5].isfinite().all())


def test_sink_of_a_row_without_keys_is_its_lse():
    q = torch.randn(1, 2, 3, 8)
    sinks = torch.tensor([0.5, float("-inf")])
    call = attention_call(q, q, q, sinks=sinks, kv_lens=torch.zeros(1, dtype=torch.int32))
    out, lse = backend.forward(call)
    assert not out.any()
    assert torch.allclose(lse, sinks.view(1, 2, 1).expand(1, 2, 3))


def test_nan_reaches_no_row_that_does_not_attend_it():
    q, k, v = make_case(Sq=40, Sk=150).fresh()[:3]
    ranges = torch.tensor([[20, 70], [0, 129]], dtype=torch.int32).view(2, 1, 1, 2)
    for b, (first, last) in enumerate(ranges.view(2, 2).tolist()):
        for x in (k, v):
            x[b, :, :first] = float("nan")
            x[b, :, last:] = float("inf")
    for options in ({"key_ranges": ranges}, {"key_ranges": ranges, "softcap": 2.0}):
        out, lse = backend.forward(attention_call(q, k, v, **options))
        assert bool(out.isfinite().all() and lse.isfinite().all())
    v[0, 1, 30, 3] = float("nan")
    out, _ = backend.forward(attention_call(q, k, v, key_ranges=ranges))
    assert bool(out[0, 2:, :, 3].isnan().all())
    assert bool(out[0, :2].isfinite().all() and out[1].isfinite().all())


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_by_strides(kind):
    """A mask that is a transpose, a slice, or has fewer than four dimensions."""
    case = make_case(Sq=40, Sk=70)
    q, k, v = case.fresh()[:3]
    full = torch.randn(2, 4, 70, 120)
    full = full > 0 if kind == "bool" else full
    for mask in (
        full[..., :40].transpose(2, 3),
        full[:, :, :40, ::1][..., 7:77],
        full[0, 0, 1, :70],
    ):
        call = attention_call(q, k, v, attn_mask=mask)
        out, lse = backend.forward(call)
        expected, expected_lse = reference.forward(call)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_layout_of_the_results():
    q, k, v = make_case(D=16, Dv=24).fresh()[:3]
    out, lse = backend.forward(attention_call(q, k, v))
    assert out.shape == (2, 4, 33, 24) and out.transpose(1, 2).is_contiguous()
    assert lse.shape == (2, 4, 33) and lse.is_contiguous() and lse.dtype == torch.float32


def test_lengths_scales_and_windows_compile_nothing_new():
    compiled = []
    for length in (1, 7, 64, 100, 129):
        q, k, v = make_case(Sq=length, Sk=length + 3).fresh()[:3]
        backend.forward(attention_call(q, k, v, window_left=length, scale=1.0 / length))
        compiled.append(len(host._launches))
    assert len(set(compiled)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", [(1, 3, 16), (5, 2, 3, 7, 24), (3, 33, 128), (2, 17, 1)], ids=str)
def test_merge_states(shape, dtype):
    assert_merges(backend, torch.randn(shape).to(dtype), torch.randn(shape[:-1]) * 4)


def test_merge_states_ignores_the_out_of_a_state_without_keys():
    outs, lses = torch.randn(3, 5, 16), torch.randn(3, 5)
    outs[1], lses[1] = math.nan, -math.inf
    expected = backend.merge_states(outs[[0, 2]], lses[[0, 2]])
    torch.testing.assert_close(backend.merge_states(outs, lses), expected)


@pytest.mark.parametrize("D", [16, 24, 5])
def test_merge_into(D):
    assert_merges_into(backend, torch.float16, "cpu", D)
    assert_merges_into(backend, torch.float16, "cpu", D, sum_dtype=torch.float32)


def test_unsupported_calls_are_refused():
    q = torch.randn(1, 1, 4, 8)
    assert backend.support_error(attention_call(q, q, q)) is None
    wide = torch.randn(1, 1, 4, 520)
    assert "head dimensions up to 512, got 520" in backend.support_error(attention_call(q, q, wide))
    assert "float64" in backend.support_error(attention_call(q.double(), q.double(), q.double()))


@pytest.mark.parametrize("queries", [1, 17])
def test_bfloat16_is_refused_as_the_interpreter_multiplies_its_bits(queries):
    q, k = (torch.ones(1, 1, n, 16, dtype=torch.bfloat16) for n in (queries, 600))
    lens = torch.tensor([600], dtype=torch.int32)
    for call in (fa_ops.attention, fa_ops.attention_with_kv_cache):
        with pytest.raises(NotImplementedError, match="bfloat16 in Triton's interpreter"):
            call(q, k, k, kv_lens=lens, backend="triton")


def test_fp32_precision_follows_torchs_setting():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for setting, expected in (("ieee", "ieee"), ("tf32", "tf32"), ("none", "ieee")):
            matmul.fp32_precision = setting
            assert launch.precision(torch.float32) == expected
            assert launch.precision(torch.bfloat16) == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("D, Dv, offset", [(37, 16, 0), (16, 37, 0), (64, 64, 1), (64, 64, 8)])
def test_rows_of_unaligned_width(D, Dv, offset):
    """They go through copies, which must not show in the strides of what comes back."""

    def sliced(H, S, width):
        return torch.randn(2, S, H, width + 9).half().transpose(1, 2)[..., offset : offset + width]

    q, k, v = sliced(4, 20, D), sliced(2, 30, D), sliced(2, 30, Dv)
    grad_out = torch.randn(2, 4, 20, Dv).half()
    call = attention_call(q, k, v, is_causal=True)
    out, lse = backend.forward(call)
    expected, expected_lse = reference.forward(call)
    assert out.stride() == (20 * 4 * Dv, Dv, 4 * Dv, 1)
    torch.testing.assert_close(out.double(), expected.double(), atol=4e-3, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=1e-3, rtol=0)
    grads = backend.backward(call._replace(saved=Saved(grad_out, None, out, lse)))
    wanted = reference.backward(call._replace(saved=Saved(grad_out, None, out, lse)))
    for x, grad, want in zip((q, k, v), grads, wanted):
        assert grad.stride() == torch.empty_like(x).stride()
        torch.testing.assert_close(grad.double(), want.double(), atol=2e-2, rtol=0)


def test_a_row_without_keys_changes_no_rounding_of_the_rows_beside_it():
    """Blocks are attended again with natural scores for low finite fills, and for nothing else."""
    call = make_case(Sq=20, Sk=30, mask="float", alibi="heads").fresh()
    ranges = torch.tensor([3, 30], dtype=torch.int32).repeat(1, 1, 20, 1)
    call = call.changed(
        alibi_slopes=20.0 * call.operands.alibi_slopes
    )  # scores of hundreds round visibly
    expected = backend.forward(call.changed(key_ranges=ranges.clone()))
    ranges[:, :, 7] = 0
    actual = backend.forward(call.changed(key_ranges=ranges))
    rows = [i for i in range(20) if i != 7]
    for x, y in zip(actual, expected):
        assert torch.equal(x[:, :, rows], y[:, :, rows])
    assert (actual[0][:, :, 7] == 0).all()
