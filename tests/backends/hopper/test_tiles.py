"""Forward and backward kernels skip the tiles that `mask_blocks` do not list, run on the CPU."""

import ctypes

import pytest
import torch

from fa_ops.backends import mask_blocks
from fa_ops.backends.mask_blocks import EMPTY, FULL
from tests.backends.hopper.cuda_as_cpp import built, needs_compiler
from tests.backends.hopper.cuda_forward import emulated_forward, run_forward
from tests.backends.hopper.cuda_masked_backward import emulated_backward, run_backward

pytestmark = needs_compiler

TILE = 128


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernel with some options, by the arguments of `emulated_forward`."""
    made = {}

    def compile(**options):
        key = tuple(options.items())
        if key not in made:
            made[key] = emulated_forward(tmp_path_factory.mktemp("forward"), **options)
        return made[key]

    return compile


def masks(states, Sq, Sk, g, is_float):
    """A mask with tiles of these states, and one that holds other values in full and empty ones."""
    wide = states.repeat_interleave(TILE, 2)[:, :, :Sq]
    if states.shape[2] == 1:
        wide = wide[:, :, :1]
    wide = wide.repeat_interleave(TILE, 3)[..., :Sk]
    kept = torch.rand(wide.shape, generator=g) > 0.4
    if not is_float:
        mask = kept.where(wide > FULL, wide == FULL)
        return mask, kept.where(wide > FULL, wide == EMPTY)
    bias = torch.randn(wide.shape, generator=g).masked_fill(~kept, -torch.inf)
    mask = bias.where(wide > FULL, 0.0).masked_fill(wide == EMPTY, -torch.inf)
    return mask.bfloat16(), bias.where(wide > FULL, 3.0).bfloat16()


def attended(q, k, v, mask, is_causal, lens):
    """out and lse, written by hand."""
    Sq, Sk, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.mT * 0.25
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    ends = torch.tensor(lens or [Sk] * q.shape[0]).view(-1, 1, 1, 1)
    keys = torch.arange(Sk)
    scores = scores.masked_fill(keys >= ends, -torch.inf)
    if is_causal:
        last = torch.arange(Sq).view(Sq, 1) + ends - Sq
        scores = scores.masked_fill(keys > last, -torch.inf)
    lse = scores.logsumexp(-1)
    dead = (lse == -torch.inf).unsqueeze(-1)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return weights @ v, lse


def draw_states(g, *shape):
    states = torch.randint(3, shape, generator=g)
    states[0, 0, 0] = EMPTY  # queries without keys
    if shape[2] > 1:
        states[-1, -1, -1, 1:] = EMPTY
    return states


BOUNDED = {"window": True, "kv_lens": True}
HALF = {"bias_bits": 16, "block_n": 64} | BOUNDED
# shapes, options of the kernel and of the call
CASES = {
    "bool": (260, 520, BOUNDED, {}),
    "bool, queries share": (200, 500, BOUNDED, {}),
    "bool, causal lengths": (300, 600, BOUNDED, {"lens": [550, 200]}),
    "float": (260, 400, HALF, {}),
    "float, queries share": (200, 500, HALF, {}),
    "float, causal lengths": (300, 500, HALF, {"lens": [450, 130]}),
}


@pytest.mark.parametrize("name", CASES)
def test_forward(name, kernels):
    Sq, Sk, options, call = CASES[name]
    seed = list(CASES).index(name)  # odd ones compute products late
    g = torch.Generator().manual_seed(seed)
    B, Hq, Hkv = 2, 2, 1
    q, k, v = (
        torch.randn(B, H, S, 16, generator=g).bfloat16()
        for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk))
    )
    rows = 1 if "share" in name else -(-Sq // TILE)
    states = draw_states(g, 1 + seed % 2, Hq, rows, -(-Sk // TILE))
    mask, read = masks(states, Sq, Sk, g, is_float="float" in name)
    blocks = mask_blocks.mask_blocks(mask)
    is_causal = "causal" in name
    ctas = 1 + seed // 2 % 2  # of which each has several tiles
    arguments = {"seed": seed, "ctas": ctas, "is_causal": is_causal} | call
    out, lse = run_forward(kernels(**options), q, k, v, mask, blocks, read, **arguments)
    expected, expected_lse = attended(q, k, v, mask, is_causal, call.get("lens"))
    rows = expected_lse > -torch.inf
    assert rows.any() and not rows.all()
    assert torch.equal(lse == -torch.inf, ~rows) and (out[~rows] == 0).all()
    torch.testing.assert_close(lse[rows], expected_lse[rows], atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(out[rows].float(), expected[rows], atol=2e-2, rtol=2e-2)


BACKWARD = {
    "bool": (200, 300, {}, {}),
    "bool, queries share": (200, 300, {}, {}),
    "float, causal lengths": (200, 300, {"bias_bits": 16}, {"lens": [300, 170]}),
    "dQ alone, bool": (300, 500, {"kernel": "backward_queries"}, {}),
    "dQ alone, bool, causal lengths": (
        300, 500, {"kernel": "backward_queries"}, {"lens": [470, 200]}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def backward_kernels(tmp_path_factory):
    made = {}

    def compile(**options):
        key = tuple(options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("backward")
            made[key] = emulated_backward(folder, **options, **BOUNDED)
        return made[key]

    return compile


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name, backward_kernels):
    Sq, Sk, options, call = BACKWARD[name]
    seed, is_causal = list(BACKWARD).index(name), "causal" in name
    g = torch.Generator().manual_seed(seed)
    B, Hq, Hkv = 2, 2, 1
    tensors = [
        torch.randn(B, H, S, 16, generator=g).bfloat16()
        for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk), (Hq, Sq))
    ]
    states = draw_states(g, 1, Hq, 1 if "share" in name else -(-Sq // TILE), -(-Sk // TILE))
    mask, read = masks(states, Sq, Sk, g, is_float="float" in name)
    leaves = [x.float().requires_grad_() for x in tensors[:3]]
    out, lse = attended(*leaves, mask, is_causal, call.get("lens"))
    delta = (out * tensors[3]).sum(-1).detach()
    expected = torch.autograd.grad(out, leaves, tensors[3].float())
    of_queries = "kernel" in options
    ctas = 2 if not of_queries else B * Hq * -(-Sq // TILE)
    blocks = mask_blocks.mask_blocks(mask)
    dq, *stored = run_backward(
        backward_kernels(**options), tensors, lse.detach(), delta, mask, read, blocks, ctas,
        seed=seed, is_causal=is_causal, **call,
    )  # fmt: skip
    found = {"dq": stored[0]} if of_queries else {"dq": dq, "dk": stored[1], "dv": stored[2]}
    for (name, x), y in zip(found.items(), expected):
        assert x.isfinite().all(), name
        assert (x - y).abs().max() <= 2e-2 * max(y.abs().max(), 0.5), name


WALK = """
#include "masks.cuh"
static MaskBlocks blocks;
static int position, last, bounded, count;
static int* found;
template <int BLOCK, bool OF_KEYS> static void walk() {
  TileWalk<BLOCK> walk;
  const TileList list = tile_list<OF_KEYS>(blocks, 0, 0, position);
  bounded ? walk.template start<true>(list, last) : walk.template start<false>(list, last);
  if (threadIdx.x) return;
  count = 0;
  for (int block = walk.seek(last); block >= 0; block = walk.seek(block - 1))
    found[count++] = 2 * block + walk.is_full(block);
}
static ListedBlocks bits;
template <int BLOCK, bool OF_KEYS> static void list() {
  bits = listed_blocks<BLOCK>(tile_list<OF_KEYS>(blocks, 0, 0, position), last);
}
extern "C" void listed(const int* lists, int rows, int columns, bool of_keys, int block, int at,
                       int base, u32* to) {
  blocks = {lists, 0, 0, rows, columns}, position = at, last = base;
  if (block == 64) run_warp(of_keys ? list<64, true> : list<64, false>);
  else run_warp(of_keys ? list<128, true> : list<128, false>);
  to[0] = bits.some, to[1] = bits.full;
}
template <int BLOCK> static void run(bool of_keys) {
  run_warp(of_keys ? walk<BLOCK, true> : walk<BLOCK, false>);
}
extern "C" int steps(const int* lists, int rows, int columns, bool of_keys, int block, int at,
                     int from, bool is_bounded, int* to) {
  blocks = {lists, 0, 0, rows, columns}, found = to;
  position = at, last = from, bounded = is_bounded;
  block == 64 ? run<64>(of_keys) : block == 96 ? run<96>(of_keys) : run<128>(of_keys);
  return count;
}
"""


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    library = built(tmp_path_factory.mktemp("walk"), "walk", WALK)

    def listed(lists, tiles, of_keys, block, position, base):
        """Of 32 blocks from `base` on: which are listed, and which are full."""
        to = (ctypes.c_uint * 2)()
        at = ctypes.c_void_p(lists.data_ptr())
        library.listed(at, *tiles, of_keys, block, position, base, to)
        return tuple([i for i in range(32) if bits >> i & 1] for bits in to)

    def steps(lists, tiles, of_keys, block, position, last, is_bounded):
        """(block, whether it is full) for each step."""
        to = (ctypes.c_int * (last + 2))()
        at = ctypes.c_void_p(lists.data_ptr())
        count = library.steps(at, *tiles, of_keys, block, position, last, is_bounded, to)
        return [(x >> 1, bool(x & 1)) for x in to[:count]]

    steps.listed = listed
    return steps


@pytest.mark.parametrize("block", [64, 96, 128])
@pytest.mark.parametrize("tiles", [(3, 150), (150, 2), (1, 40), (40, 1)])
def test_walks(tiles, block, walk):
    g = torch.Generator().manual_seed(tiles[0])
    states = torch.randint(3, tiles, generator=g)
    states[:, tiles[1] // 3 : tiles[1] // 2] = EMPTY
    lists = [mask_blocks._lists(x[None, None]).flatten() for x in (states, states.T)]
    lists = torch.cat(lists)
    for of_keys, rows in ((True, states), (False, states.T)):
        lines, listed = rows.shape
        length = listed if listed > 1 else 5  # one tile is that of all positions
        blocks = -(-length * TILE // block)
        for line in {0, lines // 2, lines - 1}:
            tile_of = rows[line].expand(length) if listed == 1 else rows[line]
            ends = ((i * block, i * block + block - 1) for i in range(blocks))
            of_block = [{int(tile_of[min(x // TILE, length - 1)]) for x in pair} for pair in ends]
            whole = [(i, x == {FULL}) for i, x in enumerate(of_block) if x != {EMPTY}][::-1]
            for base in range(0, blocks if block != 96 else 0, 15):
                found = walk.listed(lists, tiles, of_keys, block, line * TILE, base)
                near = [(i - base, full) for i, full in whole[::-1] if base <= i < base + 32]
                exists = [[i for i in bits if base + i < blocks] for bits in found]
                assert exists == [[i for i, _ in near], [i for i, full in near if full]]
            for last in {blocks - 1, blocks // 2, 0}:
                expected = [x for x in whole if x[0] <= last]
                found = walk(lists, tiles, of_keys, block, line * TILE + 5, last, True)
                assert found == expected
                if last == blocks - 1:
                    assert walk(lists, tiles, of_keys, block, line * TILE, last, False) == expected


@pytest.mark.parametrize("seed", range(5))
def test_walks_of_any_numbers_end(seed, walk):
    m, n = 2, 40
    g = torch.Generator().manual_seed(seed)
    scale = (2, 100, 1 << 31)[seed % 3]
    lists = torch.randint(-scale, scale, (m * (n + 1) + n * (m + 1),), generator=g).int()
    for of_keys, is_bounded in ((True, True), (True, False), (False, True)):
        found = walk(lists, (m, n), of_keys, 96, 10_000, 51, is_bounded)
        steps = [block for block, _ in found]
        assert steps == sorted(set(steps), reverse=True) and all(0 <= x <= 51 for x in steps)
