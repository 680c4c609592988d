"""The Hopper kernels skip every tile that `mask_blocks` do not list."""

import pytest
import torch

import fa_ops
from fa_ops.backends import mask_blocks
from fa_ops.backends.hopper import forward
from fa_ops.call.options import Spec
from fa_ops.testing import assert_close_to_oracle, make_case
from fa_ops.testing.inputs import fill_some
from tests.gpu.cases import DIMS, all_tiles, few_processors, random_masked_case

TILE = 128


LONG = {"B": 2, "Hq": 4, "Hkv": 2, "Sq": 500, "Sk": 900, "device": "cuda", "mask_blocks": True}
FEATURES = {
    "bool": {"mask": "bool"},
    "bool, queries share": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "bool, keys share": {"mask": "bool", "mask_shape": (1, 1, 1, 0)},
    "bool, window and lengths": {"mask": "bool", "window": (300, 20), "kv_lens": True},
    "bool, softcap and dropout": {"mask": "bool", "softcap": 5.0, "dropout_p": 0.3},
    "float": {"mask": "float", "mask_holes": True, "mask_grad": True},
    "float, queries share": {"mask": "float", "mask_shape": (0, 1, 0, 1)},
    "float, keys share": {"mask": "float", "mask_shape": (1, 0, 1, 0), "mask_holes": True},
    "float, causal lengths": {"mask": "float", "is_causal": True, "kv_lens": True},
    "float, ranges and sinks": {"mask": "float", "key_ranges": (1, 0, 1), "sinks": True},
}


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_results(feature, dims):
    number = list(FEATURES).index(feature) + DIMS.index(dims)
    dtype = (torch.bfloat16, torch.float16)[number % 2]
    sizes = {"D": dims[0], "Dv": dims[1], "dtype": dtype}
    case = make_case(**LONG | FEATURES[feature] | sizes, seed=number)
    assert_close_to_oracle(case, "hopper")


@pytest.mark.parametrize("seed", range(48))
def test_random_masks(seed):
    """Every second one on two multiprocessors, where a CTA has several tiles."""
    mask = ("bool", "float")[seed % 2]
    ranges = {"key_ranges": None} if mask == "bool" else {}
    case = random_masked_case(seed, mask, {"mask_blocks": True, "mask_grad": False} | ranges)
    if seed // 2 % 2:
        with few_processors(2):
            assert_close_to_oracle(case, "hopper")
    else:
        assert_close_to_oracle(case, "hopper")


def inputs(D, Sq, Sk, B=2, H=4):
    g = torch.Generator(device="cuda").manual_seed(Sq)
    return [torch.randn(B, H, S, D, device="cuda", generator=g).bfloat16() for S in (Sq, Sk, Sk)]


def filled(Sq, Sk, dtype, heads=4):
    """A mask with empty and full tiles, on the GPU."""
    g = torch.Generator().manual_seed(Sk)
    mask = torch.rand(2, heads, Sq, Sk, generator=g) > 0.3
    if dtype != torch.bool:
        mask = torch.randn(mask.shape, generator=g).masked_fill(~mask, -torch.inf).to(dtype)
    fill_some(mask, g)
    return mask.cuda()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("Sq, Sk", [(496, 900), (128, 4000), (3008, 3000), (64, 6000)])
def test_bits_of_results_are_those_without_skipping(Sq, Sk, dtype):
    """With 128 features both kernels have the same blocks, and what is skipped adds nothing.

    Lengths are multiples of 16: the rows of a warp move their running maxima together, also those
    behind the last query, whose mask is not read in full tiles.
    """
    q, k, v = inputs(128, Sq, Sk)
    mask = filled(Sq, Sk, dtype)
    spec = Spec(attn_mask=mask, mask_blocks=fa_ops.mask_blocks(mask))
    found = forward.forward(q, k, v, spec)
    with all_tiles():
        expected = forward.forward(q, k, v, spec)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))
    for _ in range(20):
        again = forward.forward(q, k, v, spec)
        assert all(torch.equal(x, y) for x, y in zip(again, expected))


def gradients(q, k, v, mask, blocks, **options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = fa_ops.attention(q, k, v, mask, mask_blocks=blocks, backend="hopper", **options)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype)
    return torch.autograd.grad(out, (q, k, v), weights)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_bits_of_deterministic_gradients_are_those_without_skipping(D, dtype):
    q, k, v = inputs(D, 896, 1300)
    mask = filled(896, 1300, dtype)
    blocks = fa_ops.mask_blocks(mask)
    found = [gradients(q, k, v, mask, blocks, deterministic=True) for _ in range(5)]
    with all_tiles():
        expected = gradients(q, k, v, mask, blocks, deterministic=True)
    for grads in found:
        for x, y in zip(grads, expected):
            if D == 128:  # others have blocks of their own in the forward
                assert torch.equal(x, y)
            torch.testing.assert_close(x, y, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gradients_read_nothing_in_empty_and_full_tiles(D, dtype, deterministic):
    q, k, v = inputs(D, 700, 1300)
    mask = filled(700, 1300, dtype)
    blocks = fa_ops.mask_blocks(mask)
    expected = gradients(q, k, v, mask, blocks, deterministic=deterministic)
    other = poisoned(mask, blocks)
    found = gradients(q, k, v, other, blocks, deterministic=deterministic)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-2)


def poisoned(mask, blocks):
    """The mask with other values in its empty tiles, and a float mask in full ones too."""
    states = mask_blocks.listed_states(blocks, mask).repeat_interleave(TILE, 2)
    states = states[:, :, : mask.shape[2]].repeat_interleave(TILE, 3)[..., : mask.shape[3]]
    if mask.dtype == torch.bool:  # bits of a bool mask bound the keys of each row
        return mask | (states == mask_blocks.EMPTY)
    other = mask.masked_fill(states == mask_blocks.EMPTY, 2.0)
    return other.masked_fill_(states == mask_blocks.FULL, 3.0)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_what_stands_in_empty_and_full_tiles_is_not_read(D, dtype):
    Sq, Sk = 700, 1300
    q, k, v = inputs(D, Sq, Sk)
    mask = filled(Sq, Sk, dtype)
    blocks = fa_ops.mask_blocks(mask)
    expected = fa_ops.attention(q, k, v, mask, mask_blocks=blocks, backend="hopper")
    other = poisoned(mask, blocks)
    found = fa_ops.attention(q, k, v, other, mask_blocks=blocks, backend="hopper")
    assert torch.equal(found, expected)
    # keys and values of tiles that no query attends may hold anything
    mask[..., 256:512] = False if dtype == torch.bool else -torch.inf
    blocks = fa_ops.mask_blocks(mask)
    expected = fa_ops.attention(q, k, v, mask, mask_blocks=blocks, backend="hopper")
    k[:, :, 256:512] = v[:, :, 256:512] = torch.nan
    found = fa_ops.attention(q, k, v, mask, mask_blocks=blocks, backend="hopper")
    assert torch.equal(found, expected) and found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_lists_with_any_numbers_end(dtype):
    q, k, v = inputs(128, 700, 1300)
    mask = filled(700, 1300, dtype)
    right = fa_ops.mask_blocks(mask)
    for scale in (2, 100, 1 << 31):
        blocks = torch.empty_like(right).random_(-scale, scale)
        fa_ops.attention(q, k, v, mask, mask_blocks=blocks, backend="hopper")
        torch.cuda.synchronize()
    expected = fa_ops.attention(q, k, v, mask, backend="triton")
    found = fa_ops.attention(q, k, v, mask, mask_blocks=right, backend="hopper")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_a_captured_graph_reads_the_mask_again(dtype):
    q, k, v = inputs(128, 640, 640)
    mask = filled(640, 640, dtype)

    def run():
        blocks = fa_ops.mask_blocks(mask)
        return fa_ops.attention(q, k, v, mask, mask_blocks=blocks, backend="auto")

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    kept, left_out = (True, False) if dtype == torch.bool else (0.0, -torch.inf)
    for start in (0, 128, 384):
        mask.fill_(left_out)[..., start : start + 128] = kept
        graph.replay()
        expected = fa_ops.attention(q, k, v, mask, backend="triton")
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_long_rows_and_many_lists():
    """Lists of more tiles than a warp looks at, in a window."""
    Sk = 20_000
    q, k, v = inputs(64, 900, Sk, B=1, H=2)
    tiles = torch.rand(8, 157, device="cuda") > 0.6
    mask = tiles.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:900, :Sk].contiguous()
    blocks = fa_ops.mask_blocks(mask)
    for window in ((-1, -1), (7000, 100), (500, 0)):
        found, expected = (
            fa_ops.attention(q, k, v, mask, window=window, mask_blocks=blocks, backend=backend)
            for backend in ("hopper", "triton")
        )
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
