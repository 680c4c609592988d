"""The parameters of the backward kernels, as a call of the Hopper backend fills them in."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

from fa_ops.backends import mask_blocks
from fa_ops.backends.hopper import backward
from fa_ops.backends.hopper import masks as mask
from fa_ops.backends.hopper.configs import group_parts
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import Call, Saved, attention_call
from fa_ops.call.options import NO_OPERANDS, Options
from fa_ops.programs.program import parse

LISTS_AT = backward._PARAMS.fields["bias"].offset
LISTS_AT += struct_layout("masks.cuh", "Bias").fields["blocks"].offset


def of_params(products: bytes) -> dict[str, tuple]:
    """What a kernel reads; of a tensor map the address alone, with which the driver starts it."""
    found = backward._PARAMS.unpack(products)
    return {
        name: struct.unpack_from("<Q", values[0]) if isinstance(values[0], bytes) else values
        for name, values in found.items()
    }


def read(name, pointers):
    if name != "clip_ranges":
        return ctypes.string_at(pointers[0], backward._PARAMS.size)
    found = {}
    for i, field in enumerate(backward._CLIP.fields.values()):
        packed = ctypes.string_at(pointers[i], field.size)
        found[field.name] = struct.unpack("<" + field.format, packed)
    return found


@pytest.fixture
def driver(driver):
    driver.read = read
    return driver


@pytest.fixture
def parts_of_heads(monkeypatch):
    """Keys of a head are divided among CTAs."""
    monkeypatch.setattr(backward, "prefers_whole_heads", lambda *args: False)


def tensors(B, Hq, Hkv, Sq, Sk, D):
    q, k, v = (
        torch.zeros(B, S, H, D, dtype=torch.bfloat16).transpose(1, 2)
        for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk))
    )
    out = torch.zeros(B, Hq, Sq, D, dtype=torch.bfloat16)
    return torch.zeros_like(out), q, k, v, out, torch.zeros(B, Hq, Sq)


@pytest.mark.parametrize("D, block", [(64, 128), (128, 64)])
def test_each_kernel_finds_its_tensors_and_sizes(driver, parts_of_heads, D, block):
    g, q, k, v, out, lse = tensors(2, 4, 4, 200, 300, D)
    grads = backward.backward(
        attention_call(q, k, v, is_causal=True, saved=Saved(g, None, out, lse))
    )
    assert [x.stride() for x in grads[:3]] == [x.stride() for x in (q, k, v)]
    (grid, rows), (ctas, products) = map(driver.last, ("preprocess", "backward"))
    assert grid == (8, 4) and rows == products
    assert ctas == (4, 1)  # persistent, of 3 blocks of keys for each of 8 heads
    found, all_tensors = of_params(products), (q, k, v, g, *grads[:3])
    maps = [found[name][0] for name in ("q", "k", "v", "grad_out", "dq", "dk", "dv")]
    assert maps == [x.data_ptr() for x in all_tensors] == list(found["tensors"])
    assert found["strides"] == tuple(n for x in all_tensors for n in x.stride()[:3])
    assert (found["out"], found["saved_lse"]) == ((out.data_ptr(),), (lse.data_ptr(),))
    assert found["grad_lse"] == (0,) and found["out_strides"] == out.stride()[:3]
    rows = 4 * 8 * 256
    assert found["sums"][0] - found["delta"][0] == found["delta"][0] - found["lse"][0] == rows
    assert found["zeros"] == (8 * 256 * D // 4,)
    assert found["key_sums"][0] - found["sums"][0] == 8 * 256 * D * 4
    assert found["counter"] == found["key_sums"]  # groups are whole
    assert found["nonfinite"][0] == found["counter"][0] + 4
    sizes = {"B": 2, "Hq": 4, "Hkv": 4, "group": 1, "Sq": 200, "Sk": 300, "D": D, "Dv": D}
    sizes |= {"m_blocks": 256 // block, "n_blocks": 3, "parts": 1, "part_heads": 1}
    assert {name: found[name][0] for name in sizes} == sizes
    assert found["scale"] == (pytest.approx(D**-0.5),)
    grid, last = driver.last("postprocess")
    assert grid == (256 // block * 8, 1) and last == products


def test_overlapping_rows_have_gradients_that_can_be_written(driver):
    """The copy engine writes rows whose last dimension is contiguous, and aligned to 16 bytes."""
    g, _, k, v, out, lse = tensors(1, 2, 2, 40, 40, 64)
    q = torch.zeros(1, 2, 103, dtype=torch.bfloat16).unfold(-1, 64, 1)
    assert torch.empty_like(q).stride(-1) != 1
    grads = backward.backward(attention_call(q, k, v, saved=Saved(g, None, out, lse)))
    assert [x.stride() for x in grads[:3]] == [torch.empty_like(x).stride() for x in (q, k, v)]
    _, products = driver.last("backward")
    strides = of_params(products)["strides"]
    assert not any(n % 8 for n in strides[12:15])  # dq's


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", [128, 256])
def test_a_group_in_parts_has_sums_of_keys(driver, D, deterministic):
    g, q, k, v, out, lse = tensors(1, 12, 2, 200, 300, D)
    call = attention_call(q, k, v, is_causal=True, deterministic=deterministic)
    backward.backward(call._replace(saved=Saved(g, None, out, lse)))
    adds, blocks, block = D == 128 and not deterministic, -(-300 // 128), 128
    if D == 256:
        blocks, block = -(-300 // 64), 64
    grid, products = driver.last("backward")
    found = of_params(products)
    # of 4 processors, each with 6 blocks of keys
    parts = {128: 6, 256: 3}[D]
    assert (found["parts"], found["part_heads"]) == ((parts,), (6 // parts,))
    assert grid == ((4, 1) if D == 128 else (2 * blocks * parts, 1))
    sums = 2 * blocks * block * 2 * D * (1 if adds else parts) * 4
    assert found["counter"][0] - found["key_sums"][0] == sums
    query_sums = 12 * 256 * D * 4 if adds else 0
    assert found["key_sums"][0] - found["sums"][0] == query_sums
    assert found["zeros"] == ((query_sums + sums) // 16 if adds else 0,)
    grid, _ = driver.last("postprocess")
    assert grid == (2 * 2 * blocks + (12 * 4 if adds else 0), 1)


@pytest.mark.parametrize("Hkv", [6, 2])
def test_pairs_of_ctas(driver, monkeypatch, Hkv):
    """A cluster of two for each block of 128 keys of a head or of a part of its group."""
    monkeypatch.setattr(backward, "prefers_pairs", lambda *args: True)
    backward._plan.cache_clear()
    g, q, k, v, out, lse = tensors(1, 6, Hkv, 200, 300, 256)
    backward.backward(attention_call(q, k, v, is_causal=True, saved=Saved(g, None, out, lse)))
    grid, products = driver.last("backward")
    found, parts = of_params(products), 6 // Hkv
    assert grid == (2 * 3 * Hkv * parts, 1)
    assert (found["n_blocks"], found["m_blocks"], found["parts"]) == ((3,), (4,), (parts,))
    query_sums, key_sums = 6 * 256 * 256 * 4, (parts > 1) * Hkv * 3 * 128 * 512 * 4
    assert found["key_sums"][0] - found["sums"][0] == query_sums
    assert found["counter"][0] - found["key_sums"][0] == key_sums
    grid, _ = driver.last("postprocess")
    assert grid == (6 * 4 + 2 * 3 * Hkv * (parts > 1), 1)
    backward._plan.cache_clear()


@pytest.mark.parametrize(
    "options, paired",
    [
        ({}, True),
        ({"deterministic": True}, False),
        ({"softcap": 30.0}, False),
        ({"dropout_p": 0.1}, False),
    ],
    ids=str,
)
def test_which_calls_pairs_of_ctas_serve(driver, options, paired):
    q = torch.zeros(1, 1, 9000, 256, dtype=torch.bfloat16)
    call = attention_call(q, q, q, is_causal=True, **options, saved=Saved(q, None, q, q))
    plan = backward.plan_of(call, (q.stride(),) * 3)
    assert plan.config.is_paired == paired


@pytest.mark.parametrize("sequences, paired", [(1, True), (5, False), (None, False)])
def test_packed_sequences_and_key_ranges_by_pairs_of_ctas(driver, sequences, paired):
    q = torch.zeros(1, 1, 9000, 256, dtype=torch.bfloat16)
    ranges = torch.zeros(1, 1, 9000, 2, dtype=torch.int32)
    call = attention_call(q, q, q, key_ranges=ranges, saved=Saved(q, None, q, q))
    plan = backward.plan_of(call, (q.stride(),) * 3, sequences=sequences)
    assert plan.config.is_paired == paired


def test_passes_that_overlap(driver):
    g, q, k, v, out, lse = tensors(1, 2, 2, 200, 300, 192)
    backward.backward(attention_call(q, k, v, saved=Saved(g, None, out, lse)))
    (first, products), (second, same) = map(driver.last, ("backward", "backward_queries"))
    assert (first, second) == ((2 * 5, 1), (2 * 2, 1)) and products == same


def test_kernels_note_in_memory_of_their_own(driver, parts_of_heads, monkeypatch):
    """The workspace ends behind the last word that a kernel writes."""
    made = []

    def empty(size, stride, dtype):
        made.append(torch.empty_strided(size, stride, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(backward, "empty", empty)
    for D, block, deterministic in ((64, 128, False), (64, 128, True), (256, 64, False)):
        g, q, k, v, out, lse = tensors(2, 4, 4, 200, 300, D)
        saved = Saved(g, None, out, lse)
        backward.backward(attention_call(q, k, v, deterministic=deterministic, saved=saved))
        found = of_params(driver.last("backward")[1])
        workspace = next(t for t in made if t.data_ptr() == found["lse"][0])
        of_keys = 2 * 8 * -(-300 // block) * block // 16
        of_queries = 0 if D == 64 and not deterministic else 8 * 256 // 16
        end = workspace.data_ptr() + workspace.numel() * 4
        assert end - found["nonfinite"][0] == 4 * (of_keys + of_queries)


def test_key_ranges_and_lengths(driver):
    g, q, k, v, out, lse = tensors(2, 4, 2, 200, 300, 64)
    lens = torch.tensor([300, 100], dtype=torch.int32)
    ranges = torch.zeros(2, 1, 200, 2, dtype=torch.int32)
    call = attention_call(q, k, v, kv_lens=lens, key_ranges=ranges, window_left=7)
    backward.backward(call._replace(saved=Saved(g, None, out, lse)))
    grid, runs = driver.last("clip_ranges")
    assert grid == (2, 2)
    assert (runs["ranges"], runs["kv_lens"]) == ((ranges.data_ptr(),), (lens.data_ptr(),))
    assert runs["strides"] == (400, 0, 2) and (runs["Sq"], runs["Sk"], runs["window_left"]) == (
        (200,),
        (300,),
        (7,),
    )
    found = of_params(driver.last("backward")[1])
    assert found["kv_lens"] == (lens.data_ptr(),)
    assert (found["ranges"], found["bounds"]) == (runs["clipped"], runs["bounds"])
    assert runs["bounds"][0] - runs["clipped"][0] == 2 * 256 * 8


def test_a_later_call_has_its_own_mask(driver, monkeypatch):
    g, q, k, v, out, lse = tensors(1, 2, 2, 64, 64, 64)
    masks = [torch.ones(64, 64, dtype=torch.bool) for _ in range(2)]
    by_address = {one.data_ptr(): one.view(torch.uint8) for one in masks}
    monkeypatch.setattr(mask.MaskPacker, "run", lambda self, stream, at: by_address[at])
    for one in masks:
        backward.backward(attention_call(q, k, v, attn_mask=one, saved=Saved(g, None, out, lse)))
        _, products = driver.last("backward")
        assert of_params(products)["by_key"][0] == one.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16], ids=str)
def test_the_lists_of_a_mask_are_read_where_tiles_are_skipped(dtype, driver, monkeypatch):
    g, q, k, v, out, lse = tensors(1, 2, 2, 64, 300, 64)
    attn_mask = torch.ones(1, 2, 64, 300).to(dtype)
    blocks = mask_blocks.mask_blocks(attn_mask)
    bits = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(mask.MaskPacker, "run", lambda self, stream, at: bits)
    call = attention_call(q, k, v, attn_mask=attn_mask, mask_blocks=blocks)
    backward.backward(call._replace(saved=Saved(g, None, out, lse)))
    _, products = driver.last("backward")
    lists = struct.unpack_from("<Q2q2i", products, LISTS_AT)
    assert lists == (blocks.data_ptr(), 0, 4 * blocks.shape[2], 1, 3)


def sink_gradient(sinks, lse, delta):
    plan = SimpleNamespace(row_sums=lambda workspace: delta)
    return backward.sink_gradient(sinks, lse, plan, None)


def test_a_sink_without_weight_has_no_gradient():
    low = float("-inf")
    lse = torch.tensor([[[0.0, low, 1.0], [0.5, float("inf"), float("inf")]]])
    delta = torch.tensor([[[2.0, 5.0, 3.0], [4.0, 0.0, float("nan")]]])
    found = sink_gradient(torch.tensor([low, 0.5]), lse, delta)
    # of -inf also where a row has no keys; tokens of no sequence have an lse of inf
    assert found.tolist() == [0.0, -4.0]


def test_a_sink_of_a_row_that_is_nan_is_nan():
    lse, delta = torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)
    delta[0, 1, 1] = lse[0, 0, 0] = float("nan")
    assert sink_gradient(torch.zeros(2), lse, delta).isnan().all()


@pytest.mark.parametrize(
    "group, items, expected", [(1, 1, 1), (8, 64, 8), (4, 512, 2), (4, 800, 1)]
)
def test_groups_are_cut_where_there_is_little_work(group, items, expected):
    assert group_parts(group, items, 132) == expected
    assert group_parts(group, items, 132, waves=9) == {512: 4, 800: 2}.get(items, expected)


def test_parts_are_of_equal_size():
    for group in range(1, 40):
        for items in (1, 30, 100, 300, 900):
            parts = group_parts(group, items, 132)
            assert group % parts == 0
            assert parts == group or items * parts >= 132


@pytest.mark.parametrize("Hkv", [6, 2])
def test_wide_heads_have_a_cluster_of_two_ctas_for_each_block(driver, Hkv):
    g, q, k, v, out, lse = tensors(1, 6, Hkv, 200, 300, 512)
    backward.backward(attention_call(q, k, v, is_causal=True, saved=Saved(g, None, out, lse)))
    grid, products = driver.last("wide_keys")
    found, parts = of_params(products), {6: 1, 2: 3}[Hkv]
    assert grid == (2 * 5 * Hkv * parts, 1)
    assert (found["n_blocks"], found["m_blocks"], found["parts"]) == ((5,), (4,), (parts,))
    sums = (parts > 1) * Hkv * parts * 5 * 64 * 1024 * 4
    assert found["counter"][0] - found["key_sums"][0] == sums
    assert found["key_sums"] == found["sums"]
    grid, same = driver.last("wide_queries")
    assert grid == (2 * 4 * 6, 1) and same == products


PROGRAM = """fa1
t0 float row bh grad
t1 float column bh grad
t2 float distance h grad
x0 add(score, t0)
x1 sub(x0, t1)
x2 add(x1, t2)
x3 lt(k, q)
mask x3
score x2
"""


def test_a_program_finds_its_terms_and_runs(driver):
    g, q, k, v, out, lse = tensors(2, 4, 2, 200, 300, 64)
    sizes = 2, 4, 200, 300
    values = torch.zeros(parse(PROGRAM).places("float", *sizes)[1])
    operands = NO_OPERANDS._replace(
        term_values=values, tile_runs=torch.zeros(1, 4, 5, 33, dtype=torch.int32)
    )
    options = Options(program=PROGRAM, scale=0.5)
    call = Call(q, k, v, operands, options, Saved(g, None, out, lse))
    found = backward.backward(call)
    assert found.term_values.shape == values.shape and found.attn_mask is None
    names = [one.name for one in driver.launched]
    assert names == ["preprocess", "backward", "postprocess", "distance_gradient"]
    grid, given = driver.last("distance_gradient")
    assert grid == (4 * 2, 1)  # a head's distances, from -300 to 199, by two CTAs
    at = backward._PARAMS.fields["program"]
    packed = struct.unpack_from("<" + at.format, given, at.offset)
    assert packed[:7] == (values.data_ptr(), 0, 0.5, *sizes)
    assert packed[7:12] == (operands.tile_runs.data_ptr(), 0, 5, 2, 3)
    distances = parse(PROGRAM).places("float", *sizes)[0][2]
    first = found.term_values.data_ptr() + 4 * (distances.offset + 512)
    assert packed[14:] == (first, 0, 256 + 512)
