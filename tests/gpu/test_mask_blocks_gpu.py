"""`mask_blocks` on a GPU: lists, results of the kernels that skip by them, and CUDA graphs."""

import pytest
import torch

import fa_ops
from fa_ops.backends import mask_blocks
from fa_ops.testing import assert_close_to_oracle, make_case


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 129, 257), (1, 2, 1, 400), (2, 1, 300, 1), (1, 1, 3000, 3000), (3, 1, 1, 9000)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_lists(shape, dtype, transposed):
    mask = torch.rand(shape, device="cuda") > 0.5
    mask[..., 128:300] = False
    mask[:, :, 128:, :128] = True
    if dtype != torch.bool:
        mask = torch.zeros(shape, device="cuda", dtype=dtype).masked_fill(~mask, -torch.inf)
        mask[..., 0] = torch.nan
    mask = mask.mT.contiguous() if transposed else mask
    mask = mask.mT if transposed else mask
    assert torch.equal(fa_ops.mask_blocks(mask), mask_blocks.mask_blocks(mask))


LONG = {"Sq": 300, "Sk": 400, "D": 64, "Dv": 64, "device": "cuda", "mask_blocks": True}
FEATURES = {
    "bool": {"mask": "bool"},
    "bool, queries share": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "float of heads": {"mask": "float", "mask_holes": True, "D": 128, "Dv": 128},
    "float of batches": {"mask": "float", "mask_shape": (1, 0, 1, 1), "deterministic": True},
    "float, queries share": {"mask": "float", "mask_shape": (1, 1, 0, 1), "mask_holes": True},
    "float, keys share": {"mask": "float", "mask_shape": (0, 1, 1, 0), "mask_holes": True},
    "gradient of the mask": {"mask": "float", "mask_shape": (0, 0, 1, 1), "mask_grad": True},
    "causal and lengths": {"mask": "float", "is_causal": True, "kv_lens": True},
    "ranges": {"mask": "float", "key_ranges": (1, 0, 1), "sinks": True},
    "whole tiles": {"mask": "float", "Sq": 512, "Sk": 256, "mask_holes": True},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_attention(feature, seed, backend):
    case = make_case(**LONG | FEATURES[feature], dtype=torch.bfloat16, seed=seed)
    assert_close_to_oracle(case, backend)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_captured_graph_reads_the_mask_again(backend):
    q, k, v, spec = make_case(
        Sq=300, Sk=300, D=64, Dv=64, mask="float", mask_shape=(0, 0, 1, 1), mask_holes=True,
        device="cuda", dtype=torch.bfloat16,
    ).fresh()  # fmt: skip
    mask = spec.attn_mask

    def run():
        blocks = fa_ops.mask_blocks(mask)
        return fa_ops.attention(q, k, v, mask, mask_blocks=blocks, backend=backend)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for start in (0, 128):
        mask.fill_(-torch.inf)[..., start : start + 128] = 0.0
        graph.replay()
        torch.testing.assert_close(out, fa_ops.attention(q, k, v, mask), atol=2e-2, rtol=2e-2)
