"""Head dimensions from 257 to 512 on a GPU: forward, backward, caches, graphs and dispatch."""

import pytest
import torch

import fa_ops
from fa_ops.testing import Case, PackedCase, assert_close_to_oracle, random_case
from fa_ops.testing.caches import assert_cache_close, random_cache_case
from tests.kernels import DTYPES

DIMS = ((512, 512), (320, 320), (512, 256), (264, 500), (64, 512))


@pytest.mark.parametrize("seed", range(40))
def test_random(seed):
    D, Dv = DIMS[seed % len(DIMS)]
    dtype = DTYPES[seed % 3]
    assert_close_to_oracle(random_case(seed, dtype=dtype, device="cuda", D=D, Dv=Dv), "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("S", [(256, 384), (257, 390)], ids=["whole blocks", "ragged"])
def test_gradients(dtype, causal, S):
    sizes = {"D": 512, "Dv": 512, "Sq": S[0], "Sk": S[1], "Hq": 4, "Hkv": 1}
    assert_close_to_oracle(Case(dtype=dtype, is_causal=causal, device="cuda", **sizes), "triton")


@pytest.mark.parametrize("seed", range(4))
def test_packed(seed):
    features = Case(
        dtype=DTYPES[seed % 2], D=512, Dv=(512, 320)[seed % 2], Hq=4, Hkv=2, is_causal=seed > 1,
        device="cuda",
    )  # fmt: skip
    case = PackedCase((5, 0, 517, 33, 260), (9, 4, 600, 0, 190), seed % 2 * 7, features)
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("seed", range(30))
def test_cache(seed):
    D, Dv = ((512, 512), (320, 384), (448, 448))[seed % 3]
    fixed = {"dtype": torch.bfloat16, "fp8": False, "page_scales": False} if seed % 2 else {}
    case = random_cache_case(seed, device="cuda", D=D, Dv=Dv, **fixed)
    assert_cache_close(case, "triton")


def test_the_choice_of_a_backend_and_a_cuda_graph():
    q = torch.randn(2, 8, 300, 512, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 300, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    fa_ops.attention(q, k, v, is_causal=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa_ops.attention(q, k, v, is_causal=True)
    graph.replay()
    assert (out.float() - expected).abs().max() < 2e-2
