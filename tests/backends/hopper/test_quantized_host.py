"""Attention with 8-bit products on the Hopper backend's host: what its kernels find."""

import struct

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fa_ops.backends import hopper
from fa_ops.backends.hopper import eight_bit
from fa_ops.backends.hopper.kernel_plan import Geometry
from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.call.call import attention_call
from fa_ops.call.options import Operands
from fa_ops.cli import cubins

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def driver(driver):
    driver.struct_bytes = 384 + 11 * 8 + 16 * 4
    return driver


def test_a_16_bit_call_is_quantised_first(driver):
    q, k, v = (
        torch.randn(2, n, S, 64, dtype=torch.half) for n, S in ((4, 300), (2, 200), (2, 200))
    )
    lens = torch.tensor([200, 7], dtype=torch.int32)
    call = attention_call(q, k, v, is_causal=True, kv_lens=lens, eight_bits=True)
    out, lse = eight_bit.quantized_forward(call)
    assert [one.name for one in driver.launched] == ["quantize", "quantized"]
    assert driver.called.count("cuMemsetD32Async") == 1
    words = struct.unpack_from("<15Q", driver.last("quantize")[1])
    assert words[:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr()) and words[14] == lens.data_ptr()
    # statistics of each key head: four CTAs for values, one for the mean; two blocks of 128 values,
    # and four of 64 keys
    assert driver.last("quantize")[0] == (2 * 2 * 5 + 2 * 2 * (1 + 1), 1)
    # two counters of each key head behind the largest values
    assert words[12] - words[11] == 4 * 2 * 2 * 64 and words[13] - words[12] == 4 * 2 * 2
    grid, params = driver.last("quantized")
    assert grid == (4, 1)  # of 24 tiles, on four multiprocessors
    maps = [struct.unpack_from("<Q", params, at)[0] for at in (0, 128, 256)]
    assert maps == [q.data_ptr(), *words[4:6]] and words[3] == words[9] == 0  # queries stay
    found = struct.unpack_from("<11Q", params, 384)
    assert found[:2] == (out.data_ptr(), lse.data_ptr()) and found[7] == lens.data_ptr()
    assert found[3:5] == words[7:9] and found[5] and found[6] == words[10]
    assert found[10] != 0  # tiles are handed out on demand
    assert struct.unpack_from("<6i", params, 472) == (2, 4, 2, 300, 200, 64)


def test_prepared_calls_find_their_own_tensors(driver):
    q, k, v = (torch.randn(2, 4, 100, 64, dtype=torch.half) for _ in range(3))
    lens, sinks = torch.tensor([90, 7], dtype=torch.int32), torch.randn(4, dtype=torch.half)
    run = eight_bit.prepare(attention_call(q, k, v, kv_lens=lens, sinks=sinks, eight_bits=True))
    other = q.clone(), k.clone(), v.clone()
    for tensors in ((q, k, v), other):
        out, lse = run(*tensors, Operands(sinks=sinks, kv_lens=lens), False)
        assert lse is None and out.shape == q.shape
        words = struct.unpack_from("<15Q", driver.last("quantize")[1])
        assert words[:3] == tuple(t.data_ptr() for t in tensors) and words[14] == lens.data_ptr()
        found = struct.unpack_from("<10Q", driver.last("quantized")[1], 384)
        assert found[:2] == (out.data_ptr(), 0) and found[7] == lens.data_ptr()
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view_as(q).copy_(q)
    run(shifted, k, v, Operands(sinks=sinks, kv_lens=lens))
    read = struct.unpack_from("<15Q", driver.last("quantize")[1])[0]
    assert read != shifted.data_ptr() and read % 16 == 0


@pytest.mark.parametrize("scales", ["one", "heads", "blocks"])
def test_e4m3_tensors_are_read_where_they_lie(driver, scales):
    q, k, v = (torch.randn(2, n, 100, 64).to(E4M3) for n in (4, 2, 2))
    shape = {"one": (1,), "heads": (2, 2), "blocks": (2, 2, 2)}[scales]
    factors = torch.rand(()), torch.rand(shape), torch.rand(2, 2)
    how = dict(zip(("q_scale", "k_scale", "v_scale"), factors), smooth_key=False, eight_bits=True)
    out, _ = eight_bit.quantized_forward(attention_call(q, k, v, **how))
    assert out.dtype == torch.bfloat16
    assert [one.name for one in driver.launched] == ["scaled", "quantized"]
    params = driver.last("quantized")[1]
    maps = [struct.unpack_from("<Q", params, at)[0] for at in (0, 128)]
    assert maps == [q.data_ptr(), k.data_ptr()]
    grid, params = driver.last("scaled")
    # a CTA for each 128 values of a head, and for each 256 scales of queries, keys and channels
    assert grid == (4 + -(-(2 * 4 * 100 + 2 * 2 * 2 + 2 * 2 * 64) // 256), 1)
    words = struct.unpack_from("<9Q", params)
    assert words[:4] == tuple(t.data_ptr() for t in (v, *factors)) and words[8] == 0
    order = {"one": (0, 1), "heads": (1, 1), "blocks": (2, 1)}[scales]
    assert struct.unpack_from("<6i", params, 96) == (0, 64, *order, 1, 1)


def test_calls_find_the_kernels_that_warm_compiles(driver, monkeypatch):
    warmed, used = set(), set()
    for kind, entries, defines in cubins.eight_bit_variants((64,), (torch.half,)):
        if kind in ("decode", "dequantize", "append"):  # of e4m3 caches
            continue
        warmed |= {(kind, entry, frozenset(defines.items())) for entry in entries}

    def program(kind, entry, defines):
        used.add((kind, entry, frozenset(defines.items())))
        return entry

    monkeypatch.setattr(nvrtc, "program", program)
    one, of_blocks = torch.rand(1), torch.rand(1, 2, 2)
    for causal in (False, True):
        q, k, v = (torch.randn(1, 2, 100, 64, dtype=torch.half) for _ in range(3))
        call = attention_call(q, k, v, is_causal=causal, eight_bits=True)
        eight_bit.quantized_forward(call)
        q, k, v = (x.to(E4M3) for x in (q, k, v))
        call = call.changed(query=q, key=k, value=v, q_scale=one, v_scale=one, smooth_key=False)
        for scale in (one, of_blocks):
            eight_bit.quantized_forward(call.changed(k_scale=scale))
    assert warmed == used


@pytest.mark.parametrize(
    "softcap, smooth, has_offset", [(0.0, True, 1), (0.0, False, 0), (2.0, True, 0)]
)
def test_the_mean_is_subtracted_unless_it_would_matter(driver, softcap, smooth, has_offset):
    q, k, v = (torch.randn(1, 2, 100, 64, dtype=torch.bfloat16) for _ in range(3))
    call = attention_call(q, k, v, softcap=softcap, smooth_key=smooth, eight_bits=True)
    eight_bit.quantized_forward(call)
    words = struct.unpack_from("<15Q", driver.last("quantize")[1])
    found = struct.unpack_from("<7Q", driver.last("quantized")[1], 384)
    assert bool(found[5]) == bool(words[10]) == bool(has_offset)


def test_the_offset_is_computed_for_lse_and_sinks_only(driver):
    q, k, v = (torch.randn(1, 2, 100, 64, dtype=torch.bfloat16) for _ in range(3))
    for sinks, with_lse in ((None, True), (torch.zeros(2), False), (None, False)):
        call = attention_call(q, k, v, sinks=sinks, eight_bits=True)
        eight_bit.prepare(call)(q, k, v, Operands(sinks=sinks), with_lse)
        words = struct.unpack_from("<15Q", driver.last("quantize")[1])
        found = struct.unpack_from("<7Q", driver.last("quantized")[1], 384)
        assert bool(found[5]) == (with_lse or sinks is not None) and found[6] == words[10] != 0


def test_results_of_a_call_do_not_overlap(driver):
    shapes = (1, 2, 33, 80), (1, 1, 65, 80), (1, 1, 65, 40)
    tensors = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    quantizer = eight_bit.Quantizer(Geometry.of(attention_call(*tensors)), True, True, False)
    found, memory = quantizer.run(*tensors, Operands(), 0, True)
    sizes = 2 * 33 * 80, 65 * 80, 40 * 128, 4 * 66, 4 * 2, 4 * 40, 4 * 66, 4 * 80, 4
    spans = sorted((at, at + size) for at, size in zip(found, sizes))
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
    begin = memory.data_ptr()
    assert begin <= spans[0][0] and spans[-1][1] <= begin + memory.nbytes


REFUSED = {
    "needs a positive scale, got -1.0": ({}, {"scale": -1.0}),
    "quantises bfloat16 and float16, query is float32": ({"dtype": torch.float32}, {}),
    "needs a head dim that is a multiple of 16, at most 256, got 24": ({"D": 24}, {}),
    "needs a value head dim that is a multiple of 8, at most 256, got 20": ({"Dv": 20}, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    given, options = REFUSED[message]
    with FakeTensorMode():
        dtype, D = given.get("dtype", torch.half), given.get("D", 64)
        q = torch.empty(1, 2, 64, D, dtype=dtype, device="cuda")
        v = torch.empty(1, 2, 64, given.get("Dv", D), dtype=dtype, device="cuda")
        call = attention_call(q, q, v, **options, eight_bits=True)
        assert hopper.supports(call) == f"{message}; the triton backend can run it"


def test_scales_of_single_keys_are_refused():
    with FakeTensorMode():
        q = torch.empty(1, 2, 100, 64, dtype=E4M3, device="cuda")
        scale = torch.empty(1, 2, 100, device="cuda")
        call = attention_call(
            q, q, q, q_scale=scale, k_scale=scale, v_scale=torch.empty(1, device="cuda"),
            eight_bits=True,
        )  # fmt: skip
        assert "no scale for each key, but for each 64" in hopper.supports(call)
