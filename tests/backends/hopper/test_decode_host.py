"""A decoding call of the Hopper backend on the host: what its kernels find."""

import ctypes
import struct
import sys
import threading

import pytest
import torch

from fa_ops.backends.hopper import decode, mla
from fa_ops.backends.hopper.runtime import launch, nvrtc
from fa_ops.call.call import attention_call
from fa_ops.call.options import Operands
from fa_ops.cli import cubins


@pytest.fixture
def driver(driver):
    driver.struct_bytes = 576
    return driver


def qkv(Sk=900):
    q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16)
    return q, *(torch.randn(2, 2, Sk, 64, dtype=torch.bfloat16) for _ in range(2))


def words(params: bytes) -> tuple[int, ...]:
    """Addresses of query, keys and values, and the nine behind the tensor maps."""
    return struct.unpack_from("<Q120xQ120xQ120x9Q", params)


LENS = torch.tensor([3, 500], dtype=torch.int32)
PLAIN, OF_LENS = Operands(), Operands(kv_lens=LENS)


def prepared(q, k, v, module=decode, **arguments):
    return module.prepare(attention_call(q, k, v, over_cache=True, **arguments))


def test_both_kernels_find_the_addresses_of_the_call(driver):
    q, k, v = qkv()
    slopes, sinks = torch.ones(4), torch.ones(4)
    ranges = torch.tensor([0, 9], dtype=torch.int32).view(1, 1, 1, 2)
    call = attention_call(
        q, k, v, kv_lens=LENS, alibi_slopes=slopes, sinks=sinks, key_ranges=ranges, over_cache=True
    )
    out, lse = decode.forward(call)
    assert [one.name for one in driver.launched] == ["decode", "combine"]
    first, second = (one.params for one in driver.launched)
    assert first == second
    found = words(first)
    given = (q, k, v, out, lse)
    assert found[:5] == tuple(t.data_ptr() for t in given)
    assert found[7:] == (LENS.data_ptr(), ranges.data_ptr(), 0, sinks.data_ptr(), slopes.data_ptr())
    assert out.shape == (2, 4, 1, 64) and lse.shape == (2, 4, 1)


@pytest.mark.parametrize("D, row_bytes", [(64, 64), (128, 128), (256, 128)])
@pytest.mark.parametrize("of_pages", [False, True])
def test_e4m3_caches_are_copied_by_bytes(driver, monkeypatch, D, row_bytes, of_pages):
    defines = []
    note = lambda source, entry, macros: defines.append(macros) or entry  # noqa: E731
    monkeypatch.setattr(nvrtc, "program", note)
    q = torch.randn(2, 4, 1, D, dtype=torch.bfloat16)
    shape = (80, 16, 2, D) if of_pages else (2, 2, 640, D)
    k, v = (torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2))
    table = torch.arange(80, dtype=torch.int32).view(2, 40) if of_pages else None
    scale_shape = (80, 1, 2) if of_pages else (2, 2)
    k_scale, v_scale = torch.ones(scale_shape), torch.ones(scale_shape)
    call = attention_call(
        q, k, v, kv_lens=LENS, page_table=table, k_scale=k_scale, v_scale=v_scale, over_cache=True
    )
    decode.forward(call)
    params = driver.launched[0].params
    assert struct.unpack_from("<2Q", params, 456) == (k_scale.data_ptr(), v_scale.data_ptr())
    assert struct.unpack_from("<Q2B", params, 128) == (k.data_ptr(), 0, 4)
    numbers = struct.unpack_from("<7Q4I", params, 139)
    if of_pages:
        assert numbers == (D, 16, 2, 80, 2 * D, D, 32 * D, row_bytes, 16, 1, 1)
    else:
        assert numbers == (D, 640, 2, 2, D, 640 * D, 1280 * D, row_bytes, 64, 1, 1)
    macros = [(one["IS_E4M3"], one["HAS_SCALES"], one["WHOLE_ROWS"]) for one in defines]
    assert set(macros) == {(1, 2 if of_pages else 1, 0)}
    decode.forward(call.changed(k_scale=None))
    assert struct.unpack_from("<2Q", driver.launched[-1].params, 456) == (0, v_scale.data_ptr())
    decode.forward(call.changed(k_scale=None, v_scale=None))
    assert struct.unpack_from("<2Q", driver.launched[-1].params, 456) == (0, 0)
    assert {one["HAS_SCALES"] for one in defines[-2:]} == {0}
    warmed = [one.defines for one in cubins.eight_bit_variants((D,), (torch.bfloat16,))]
    assert all(one in warmed for one in defines)


def test_a_prepared_call_fills_the_same_struct(driver):
    q, k, v = qkv()
    run = prepared(q, k, v, kv_lens=LENS)
    out, lse = run(q, k, v, OF_LENS)
    kept = words(driver.launched[-1].params)
    decode.forward(attention_call(q, k, v, kv_lens=LENS, over_cache=True))
    again = words(driver.launched[-1].params)
    assert kept[3:5] == (out.data_ptr(), lse.data_ptr())
    assert kept[:3] == again[:3] and kept[7:] == again[7:]
    assert driver.launched[0].params[472:] == driver.launched[-1].params[472:]


def test_a_longer_cache_has_its_own_lengths_maps_and_kernels(driver):
    families = set()
    for Sk in (900, 901, 64, 900):
        driver.launched.clear()
        q, k, v = qkv(Sk)
        plan = prepared(q, k, v, kv_lens=LENS).__self__
        plan.run(q, k, v, OF_LENS)
        families.add(plan.template)
        expected = ["decode", "combine"] if Sk > 64 else ["decode"]
        assert [one.name for one in driver.launched] == expected
        params = driver.launched[0].params
        assert struct.unpack_from("<6i", params, 472) == (2, 4, 2, 2, 1, Sk)
        for at in (128, 256):
            assert struct.unpack_from("<3Q", params, at + 11) == (64, Sk, 2)
    assert len(families) == 1


def test_an_unwanted_lse_lies_behind_the_workspace(driver):
    q, k, v = qkv()
    plan = prepared(q, k, v).__self__
    out, lse = plan.run(q, k, v, PLAIN, False)
    assert lse is None and out.shape == q.shape
    _, _, _, _, lse_at, sums_at, stats_at, *_ = words(driver.launched[-1].params)
    (size,), _, _ = plan.template.workspace
    assert sums_at < stats_at < lse_at and lse_at + 2 * 4 * 4 == sums_at + size
    assert lse_at % 16 == 0


def test_tensors_off_their_alignment_are_copied(driver):
    q, k, v = qkv()
    run = prepared(q, k, v)
    off = torch.cat([k.flatten()[:1], k.flatten()])[1:].view_as(k)
    assert off.data_ptr() % 16
    out, _ = run(q, off, v, PLAIN, False)
    found = words(driver.launched[-1].params)
    assert found[0] == q.data_ptr() and found[2] == v.data_ptr() and found[3] == out.data_ptr()
    assert found[1] % 16 == 0 and found[1] != off.data_ptr()


def test_another_current_device_gives_way_to_the_calls(driver, monkeypatch):
    q, k, v = qkv()
    plan, current, entered = prepared(q, k, v).__self__, [1], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            current[0] = self.index

        def __exit__(self, *_):
            current[0] = 1

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(decode, "current_device", lambda: current[0])
    plan.run(q, k, v, PLAIN, False)
    assert entered == [None] and len(driver.launched) == 1


def test_threads_share_a_plan_and_no_struct(driver):
    q, k, v = qkv()
    run, mine = prepared(q, k, v, kv_lens=LENS), {}
    start = threading.Barrier(4)

    def work():
        own = torch.randn_like(q)
        start.wait()
        outs = [run(own, k, v, OF_LENS, False)[0].data_ptr() for _ in range(100)]
        mine[threading.get_ident()] = own.data_ptr(), set(outs)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(mine) == 4 and len(driver.launched) == 4 * 100 * 2
    for one in driver.launched:
        q_at, outs = mine[one.thread]
        found = words(one.params)
        assert found[0] == q_at and found[3] in outs


def test_a_struct_serves_a_later_call_and_keeps_its_tail():
    params = launch.Params(struct.Struct("<2Q"), b"tail")
    one, two = params.take(1, 2), params.take(3, 4)
    assert one[0].raw == struct.pack("<2Q", 1, 2) + b"tail"
    assert two[0].raw == struct.pack("<2Q", 3, 4) + b"tail"
    assert two[1][0] == ctypes.addressof(two[0])
    params.give_back(one)
    assert params.take(5, 6) is one and one[0].raw == struct.pack("<2Q", 5, 6) + b"tail"


def test_a_launch_without_a_context_is_repeated(driver, monkeypatch):
    driver.answers["cuLaunchKernelEx"] = [201, 0, 0]
    q, k, v = qkv()
    decode.forward(attention_call(q, k, v, kv_lens=LENS, over_cache=True))
    assert [one.name for one in driver.launched] == ["decode", "decode", "combine"]
    assert driver.called[-4:-2] == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    driver.answers["cuLaunchKernelEx"] = [700]
    with pytest.raises(launch.DriverError, match="cuLaunchKernelEx failed"):
        decode.forward(attention_call(q, k, v, kv_lens=LENS, over_cache=True))
    assert len(driver.launched) == 4


def test_the_struct_of_a_latent_cache(driver):
    driver.struct_bytes = 384
    q = torch.randn(2, 16, 1, 576, dtype=torch.bfloat16)
    k = torch.randn(40, 64, 1, 576, dtype=torch.bfloat16)
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    out, lse = mla.forward(
        attention_call(q, k, k[..., :512], kv_lens=LENS, page_table=table, over_cache=True)
    )
    assert [one.name for one in driver.launched] == ["mla", "combine"]
    params = driver.launched[0].params
    at = struct.unpack_from("<Q", params)[0], struct.unpack_from("<Q", params, 128)[0]
    assert at == (q.data_ptr(), k.data_ptr())
    out_at, lse_at, _, _, lens_at, table_at = struct.unpack_from("<6Q", params, 256)
    assert (out_at, lse_at) == (out.data_ptr(), lse.data_ptr())
    assert (lens_at, table_at) == (LENS.data_ptr(), table.data_ptr())
    run = prepared(q, k, k[..., :512], mla, kv_lens=LENS, page_table=table)
    out, lse = run(q, k, k[..., :512], Operands(kv_lens=LENS, page_table=table), False)
    again = driver.launched[-1].params
    out_at, lse_at, sums_at, stats_at = struct.unpack_from("<4Q", again, 256)
    (size,), _, _ = run.__self__.template.workspace
    assert lse is None and out_at == out.data_ptr()
    assert sums_at < stats_at < lse_at and lse_at + 2 * 16 * 4 == sums_at + size
    assert again[304:] == params[304:]
