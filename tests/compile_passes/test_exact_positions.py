"""Positions near the last integer that their dtype holds exactly, and unknown sizes."""

import pytest
import torch

import compile_passes
from tests.compile_passes.helpers import assert_same, fuse, qkv

INF = float("inf")
S = 12
LIMITS = {
    torch.float32: 2**24,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
    torch.int32: 2**31 - 1,
    torch.int16: 2**15 - 1,
    torch.int8: 2**7 - 1,
    torch.uint8: 2**8 - 1,
}


def causal(first, dtype, late):
    """Causal attention with positions from `first` on, which `late` adds after the cast."""

    def attend(q, k, v):
        i = torch.arange(q.shape[2])
        i = i.to(dtype) + first if late else (i + first).to(dtype)
        return (q @ k.mT).masked_fill(i[:, None] < i, -INF).softmax(-1) @ v

    return attend


def fused(attend, dynamic=None):
    fusion = fuse(attend, dynamic=dynamic)
    assert_same(attend, qkv(), fusion)
    (finding,) = fusion.findings
    assert finding.fused
    return finding.masks


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", LIMITS)
def test_masks_are_flags_up_to_the_last_exact_position(dtype, late, dynamic):
    last = LIMITS[dtype] - S + 1
    assert fused(causal(last, dtype, late), dynamic) == "is_causal"
    dense = f"dense attn_mask (positions may not be exact in {dtype})"
    assert fused(causal(last + 1, dtype, late), dynamic) == dense


def test_quotients_of_wrapped_integers_stay_dense():
    def attend(q, k, v):
        i = (torch.arange(S) + 2**31 - 6).to(torch.int32)
        return (q @ k.mT).masked_fill(i[:, None] // 3 < i // 3, -INF).softmax(-1) @ v

    assert fused(attend).startswith("dense")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_without_a_bound_are_guarded(dtype):
    """Only a size beyond the exact range recompiles."""
    attend, sizes = causal(0, dtype, False), [12, 250, 300]
    fusion = fuse(attend, dynamic=True)
    for size in sizes:
        x = qkv(B=1, Hq=1, Hkv=1, Sq=size, Sk=size)
        assert torch.allclose(fusion.run(*x), attend(*x), atol=1e-5)
    found = [finding.masks for finding in fusion.findings]
    assert found[0] == "is_causal"
    assert found[1:] == (["dense attn_mask (positions may not be exact in torch.bfloat16)"]
                         if dtype == torch.bfloat16 else [])  # fmt: skip


@pytest.mark.parametrize("longest, masks", [(200, "is_causal"), (400, "dense")])
def test_declared_ranges_are_not_narrowed(longest, masks):
    attend, inputs = causal(0, torch.bfloat16, False), qkv()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2, min=2, max=longest)
    fusion = fuse(attend)
    assert torch.allclose(fusion.run(*inputs), attend(*inputs), atol=1e-5)
    assert fusion.findings[0].masks.startswith(masks)


@pytest.mark.parametrize("longest, masks", [(200, "is_causal"), (400, "dense"), (None, "dense")])
def test_exported_programs_need_a_declared_bound(longest, masks):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return causal(0, torch.bfloat16, False)(q, k, v)

    size = torch.export.Dim("size", min=2, max=longest)
    inputs = qkv()
    program = torch.export.export(Model(), inputs, dynamic_shapes=[{2: size}] * 3).module()
    (finding,) = compile_passes.fuse_module(program)
    assert finding.fused and finding.masks.startswith(masks)
    for n in (12, longest or 300):
        x = qkv(B=2, Sq=n, Sk=n)
        assert torch.allclose(program(*x), Model()(*x), atol=1e-5)


@pytest.mark.parametrize("other", [2.5, 0.1, 300, -(2**40)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_comparisons_with_numbers_promote_as_in_torch(dtype, other):
    """The dtype of a comparison depends on the tensor and on the number."""
    if dtype == torch.uint8 and abs(other) > 255:
        pytest.skip("torch refuses it, or wraps it around")

    def attend(q, k, v):
        i = torch.arange(S).to(dtype)
        hidden = (i[:, None] < i) | (i == other) | (i > other)
        return (q @ k.mT).masked_fill(hidden, -1e9).softmax(-1) @ v

    fused(attend)


@pytest.mark.parametrize("fill", [-INF, -1e9])
@pytest.mark.parametrize("times", [1000, 2**20, 2**40])
@pytest.mark.parametrize("number", [3, 2**62, 2**63 - 1, -(2**63)])
def test_bounds_of_long_chunks_do_not_overflow(times, number, fill):
    """A bound times the length of a chunk may exceed int64."""

    def attend(q, k, v, n):
        keep = torch.arange(S) // times <= n
        return (q @ k.mT).masked_fill(~keep, fill).softmax(-1) @ v

    fusion = fuse(attend)
    inputs = (*qkv(), torch.tensor(number))
    rows = attend(*inputs).isfinite()
    actual = fusion.run(*inputs)
    assert torch.allclose(actual, torch.where(rows, attend(*inputs), 0.0), atol=1e-5)
    assert fusion.fused == 1
