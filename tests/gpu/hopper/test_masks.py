"""Masks on a Hopper GPU: bits of every form, float masks with gradients, tiles that are skipped."""

import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper, mask_blocks
from fa_ops.backends.hopper import forward, masks
from fa_ops.call.call import attention_call
from fa_ops.testing import assert_close_to_oracle, make_case
from fa_ops.testing.inputs import fill_some
from tests.backends.hopper.test_masks import FORMS, by_key, by_query
from tests.gpu import hopper_calls
from tests.gpu.cases import (
    DIMS,
    UNBOUNDED,
    MaskedCase,
    all_tiles,
    check,
    few_processors,
    masked_case,
    random_masked_case,
)


def on_gpu(t):
    """A copy with the same strides and offset."""
    memory = torch.tensor([], dtype=t.dtype).set_(t.untyped_storage())
    return memory.cuda().as_strided(t.shape, t.stride(), t.storage_offset())


def assert_packed(mask):
    for found, expected in (by_query(mask), by_key(mask)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    assert_packed(on_gpu(FORMS[form][0]))


@pytest.mark.parametrize("seed", range(60))
def test_random_strides(seed):
    """Slices of permuted memory, each dimension repeated, strided, or shared."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    sizes = draw(1, 3), draw(1, 4), draw(1, 31, 65, 200), draw(1, 33, 64, 1024, 1025, 2100)
    steps = [draw(1, 1, 2) for _ in sizes]
    order = torch.randperm(4, generator=generator).tolist()
    memory = torch.rand([sizes[d] * steps[d] + 3 for d in order], generator=generator)
    mask = (memory > draw(0.0, 0.4, 0.999)).permute([order.index(d) for d in range(4)])
    first = draw(0, 0, 3)
    mask = mask[tuple(slice(first, first + n * step, step) for n, step in zip(sizes, steps))]
    shared = [2 if n == 1 and draw(False, True) else -1 for n in mask.shape]
    assert_packed(on_gpu(mask.expand(shared)))


def test_more_heads_than_a_grid_has():
    mask = torch.rand(23, 3000, 2, 40, device="cuda") > 0.5
    assert mask.shape[0] * mask.shape[1] > masks._MAX_GRID_HEADS
    assert_packed(mask)


@pytest.mark.parametrize("columns", [200_000, 200_001])
def test_long_rows(columns):
    assert_packed(torch.rand(2, 1, 1, columns, device="cuda") > 0.999)
    assert_packed(torch.rand(columns, 40, device="cuda").mT > 0.999)


@pytest.mark.parametrize("seed", range(64))
def test_attention_under_random_broadcast_masks(seed):
    fixed = {"mask_grad": False, "key_ranges": None, "dtype": torch.bfloat16}
    case = random_masked_case(seed, "bool", fixed, band=(-UNBOUNDED, 50 + 10 * seed))
    reason = hopper.support_error(case.fresh())
    if reason:
        pytest.skip(reason)
    assert_close_to_oracle(case, "hopper")


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_repeated_calls_read_their_own_mask(dtype):
    """At any address, and with values that change in place."""
    q, k, v = (torch.randn(1, 4, 96, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    memory = torch.ones(96 * 96 + 7, device="cuda", dtype=dtype)
    for offset in (0, 1, 7, 0):
        mask = memory[offset : offset + 96 * 96].view(96, 96)
        values = torch.randn(96, 96, device="cuda")
        mask.copy_(values > 0 if dtype == torch.bool else values)
        out = fa_ops.attention(q, k, v, mask, backend="hopper")
        expected = fa_ops.attention(q, k, v, mask, backend="triton")
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_a_captured_call_reads_the_mask_that_is_there():
    q = torch.randn(1, 4, 96, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(96, 96, device="cuda", dtype=torch.bool)
    fa_ops.attention(q, q, q, mask, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa_ops.attention(q, q, q, mask, backend="hopper")
    mask.tril_()
    graph.replay()
    expected = fa_ops.attention(q, q, q, is_causal=True, backend="hopper")
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


# Float masks on a Hopper GPU: every broadcast shape, dtype and layout, with gradients.


@pytest.mark.parametrize("seed", range(256))
def test_gradients(seed):
    fields = {"mask_holes": seed % 5 < 2, "mask_grad": seed % 3 < 2, "is_wide": seed // 2 % 3 == 0}
    check(masked_case(seed, mask="float", **fields))


@pytest.mark.parametrize("seed", range(48))
def test_random(seed):
    check(random_masked_case(seed, "float", {}, is_wide=seed % 4 == 0))


@pytest.mark.parametrize("shape", [(0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1), (1, 1, 1, 0)], ids=str)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_long(dims, is_wide, shape):
    D, Dv = dims
    base = MaskedCase(
        B=2, Hq=4, Hkv=2, Sq=1500, Sk=2100, D=D, Dv=Dv, dtype=torch.bfloat16, device="cuda",
        mask="float", mask_shape=shape, mask_grad=True, is_wide=is_wide, deterministic=is_wide,
    )  # fmt: skip
    for is_causal in (False, True):
        check(dataclasses.replace(base, is_causal=is_causal))


def test_more_tiles_than_processors():
    base = MaskedCase(
        B=20, Hq=4, Hkv=4, Sq=300, Sk=300, D=64, Dv=64, dtype=torch.bfloat16, device="cuda",
        mask="float", is_causal=True, mask_grad=True,
    )  # fmt: skip
    for shape in ((0, 0, 1, 1), (1, 1, 1, 1)):
        check(dataclasses.replace(base, mask_shape=shape))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_finite_fill_values_are_scores(D, dtype):
    """Rows with only filled keys average all values, and do not affect gradients of other rows."""
    q, k, v = (
        torch.randn(1, 2, 200, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    for fill in (-1e9, torch.finfo(dtype).min):
        mask = torch.zeros(200, 200, device="cuda", dtype=dtype)
        mask[3], mask[:, 50:] = fill, fill
        out, lse = fa_ops.attention(q, k, v, mask, return_lse=True, backend="hopper")
        mean = v.double().mean(2)
        torch.testing.assert_close(out[:, :, 3].double(), mean, atol=4e-3, rtol=2e-2)
        torch.testing.assert_close(lse[:, :, 3], mask[3, 0].float().expand_as(lse[:, :, 3]))
        seed = torch.randn_like(out)
        seed[:, :, 3] = 0
        grads = torch.autograd.grad(out, (q, k, v), seed)
        expected = fa_ops.attention(q, k, v, mask == 0, backend="hopper")
        for actual, wanted in zip(grads, torch.autograd.grad(expected, (q, k, v), seed)):
            torch.testing.assert_close(actual, wanted, atol=2e-2, rtol=2e-2)


def test_fully_masked_rows_give_zero():
    q = torch.randn(2, 4, 100, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.randn(100, 100, device="cuda")
    mask[7] = mask[64:] = float("-inf")
    mask.requires_grad_()
    out, lse = fa_ops.attention(q, q, q, mask, return_lse=True, backend="hopper")
    empty = torch.isneginf(mask).all(1)
    assert (out[:, :, empty] == 0).all() and torch.isneginf(lse[:, :, empty]).all()
    assert not out.isnan().any() and not lse[:, :, ~empty].isinf().any()
    dq, dmask = torch.autograd.grad(out.float().sum(), (q, mask))
    assert not dq.isnan().any() and (dmask[empty] == 0).all() and not dmask.isnan().any()


def test_deterministic_gradients_of_masks_are_bitwise_equal():
    q, k, v = (
        torch.randn(2, 8, 1000, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    grad = torch.randn_like(q)
    for shape in ((1000, 1000), (2, 1, 1, 1000), (1, 8, 1000, 1)):
        mask = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        options = {"is_causal": True, "deterministic": True, "backend": "hopper"}
        first, *others = (
            torch.autograd.grad(fa_ops.attention(q, k, v, mask, **options), (q, k, v, mask), grad)
            for _ in range(3)
        )
        for grads in others:
            assert all(map(torch.equal, grads, first))


def test_plans_are_reused_for_masks_at_other_addresses():
    """A plan depends on the mask's layout; its address is read on every call."""
    q = torch.randn(1, 2, 130, 64, device="cuda", dtype=torch.bfloat16)
    masks = [torch.randn(130, 136, device="cuda", dtype=torch.bfloat16)[:, :130] for _ in range(3)]
    for mask in masks:
        out, _ = hopper_calls.forward(attention_call(q, q, q, attn_mask=mask))
        expected = fa_ops.attention(q.float(), q.float(), q.float(), mask.float())
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


# The Hopper kernels skip every tile that `mask_blocks` do not list.

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
    call = attention_call(q, k, v, attn_mask=mask, mask_blocks=fa_ops.mask_blocks(mask))
    found = forward.forward(call)
    with all_tiles():
        expected = forward.forward(call)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))
    for _ in range(20):
        again = forward.forward(call)
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
