"""Masks on a Hopper GPU: bits of every form, long rows, many heads, and repeated calls."""

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper import masks
from fa_ops.testing import assert_close_to_oracle
from tests.backends.hopper.test_masks import FORMS, by_key, by_query
from tests.gpu.cases import UNBOUNDED, random_masked_case


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
    reason = hopper.support_error(*case.fresh())
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
