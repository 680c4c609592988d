"""Packed sequences with 8-bit products on the Hopper backend: its host code, and its kernels as C++
on the CPU."""

import ctypes
import dataclasses
import struct

import pytest
import torch

import fa_ops
from fa_ops.backends.hopper import eight_bit, kernel_plan
from fa_ops.call.call import attention_call
from tests.backends.hopper import cuda_quantized
from tests.backends.hopper.cuda_as_cpp import needs_compiler

E4M3 = torch.float8_e4m3fn
LAYOUT = eight_bit._LAYOUT


@pytest.fixture
def driver(driver):
    driver.struct_bytes = LAYOUT.size
    return driver


def described(
    page=0, heads=(2, 1), D=32, Dv=16, ends=(1, 20, 20, 60), lens=None, seed=0, signs=1, **options
):
    """A call of three sequences, one of which has no query; two tokens are of none.

    `signs`: -1 makes the scores of some heads the opposite.
    """
    g = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(shape, generator=g).to(E4M3)

    ends_q = torch.tensor(ends, dtype=torch.int32)
    B = len(ends) - 1
    scales = [torch.rand(B, H, generator=g) + 0.5 for H in (heads[0], heads[1], heads[1])]
    scales[0][:, 0] *= signs
    q = numbers(ends[-1] + 1, heads[0], D)
    if page:
        k, v = numbers(40, page, heads[1], D), numbers(40, page, heads[1], Dv)
        table = torch.randperm(40, generator=g)[: B * 12].view(B, 12).int()
        ends_k, lens = None, lens or (100, 30, 12 * page)
    else:
        k, v = numbers(300, heads[1], D), numbers(300, heads[1], Dv)
        table, ends_k = None, torch.tensor([3, 133, 150, 290], dtype=torch.int32)
    lens = lens and torch.tensor(lens, dtype=torch.int32)
    return attention_call(
        q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, page_table=table, kv_lens=lens,
        q_scale=scales[0], k_scale=scales[1], v_scale=scales[2], smooth_key=False,
        eight_bits=True, backend="hopper", **options,
    )  # fmt: skip


def expected(call):
    """What the oracle makes of the same call."""
    t, o = call.operands, call.options
    window = None if o.window_left < 0 > o.window_right else (o.window_left, o.window_right)
    return fa_ops.attention_varlen(
        call.query, call.key, call.value, t.cu_seqlens_q, t.cu_seqlens_k, kv_lens=t.kv_lens,
        page_table=t.page_table, sinks=t.sinks, is_causal=o.is_causal, window=window,
        softcap=o.softcap, q_scale=t.q_scale, k_scale=t.k_scale, v_scale=t.v_scale,
        return_lse=True, backend="reference",
    )  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The two kernels of a plan."""
    folder, made = tmp_path_factory.mktemp("packed8"), {}

    def of(plan, defines, threads):
        key = frozenset(defines.items())
        if key not in made:
            paged, Dv = plan.sequences.pages is not None, plan.out[0][2]
            before = eight_bit.packed_e4m3_defines(Dv, paged)
            made[key] = (
                cuda_quantized.preparation(folder, f"prepare{len(made)}", before),
                cuda_quantized.attention(folder, f"attend{len(made)}", defines, threads),
            )
        return made[key]

    return of


def read(address, shape, dtype):
    """A tensor of what lies there."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=dtype).view(shape)


def check_preparation(call, plan, found):
    """Scales are repeated, values transposed, and each sequence's keys found."""
    t, (T, Hq, _) = call.operands, call.query.shape
    Hkv, Dv = call.value.shape[-2:]
    blocks, B = plan.sequences.key_blocks, plan.sequences.count
    lens = read(found.kv_lens, (B,), torch.int32)
    starts = read(found.key_starts, (B, 2), torch.int32)
    q_scale = read(found.q_scale, (Hq, T), torch.float32)
    k_scale = read(found.k_scale, (Hkv, blocks, 2), torch.float32)
    v_scale = read(found.v_scale, (B, Hkv, Dv), torch.float32)
    values = read(found.value, (Hkv, Dv, blocks, 128), torch.uint8)
    assert torch.equal(v_scale, t.v_scale.unsqueeze(2).expand(B, Hkv, Dv))
    at = torch.arange(128)
    a, rest = at % 32 // 16, at % 16
    key = at // 32 * 32 + 8 * (2 * a + rest % 4 // 2) + rest // 4 * 2 + rest % 2
    for b in range(B):
        first, end = t.cu_seqlens_q[b : b + 2].tolist()
        assert torch.equal(q_scale[:, first:end], t.q_scale[b, :, None].expand(Hq, end - first))
        n, (begin, block) = int(lens[b]), starts[b].tolist()
        if t.page_table is None:
            assert (begin, n) == (int(t.cu_seqlens_k[b]), int(t.cu_seqlens_k.diff()[b]))
            own = call.value.view(torch.uint8)[begin : begin + n]
        else:
            assert (begin, n) == (0, int(t.kv_lens[b]))
            own = call.value.view(torch.uint8)[t.page_table[b].long()].flatten(0, 1)[:n]
        count = -(-n // 128)
        wanted = torch.zeros(count * 128, Hkv, Dv, dtype=torch.uint8)
        wanted[:n] = own
        wanted = wanted.view(count, 128, Hkv, Dv)[:, key].permute(2, 3, 0, 1)
        assert torch.equal(values[:, :, block : block + count], wanted)
        assert torch.equal(
            k_scale[:, block : block + count], t.k_scale[b].view(-1, 1, 1).expand(Hkv, count, 2)
        )


def run(call, driver, kernels, monkeypatch, seed=0):
    """out and lse by the host code and the emulated kernels."""
    compiled = []
    kernel = kernel_plan.kernel

    def noted(*args):
        compiled.append(args)
        return kernel(*args)

    monkeypatch.setattr(kernel_plan, "kernel", noted)
    monkeypatch.setattr(eight_bit, "processors", lambda device: 1)
    for one in (eight_bit._packed_plan, kernel_plan.kernel_of):
        one.cache_clear()
    plan = eight_bit._plan_of(call)
    _, _, _, threads, shared_bytes, defines = compiled[0]
    prepare, attend = kernels(plan, dict(defines), threads)
    found, memory = plan.source.run(call.query, call.key, call.value, call.operands, 0, True)
    memory[0] = 0  # which the driver would set
    grid, params = driver.last("scaled_packed")
    prepare.run(params, grid[0])
    check_preparation(call, plan, found)
    monkeypatch.setattr(plan.source, "run", lambda *_: (found, memory))
    out, lse = plan.run(call.query, call.key, call.value, call.operands)
    grid, params = driver.last("quantized")
    maps = (cuda_quantized.Tensor * 3)()
    for to, one in zip(maps, plan.maps):
        (B, H, S, D), (b, h, s, _) = one._shape, one._strides
        rows = ctypes.c_uint.from_buffer_copy(one._rest[2], 4).value
        for name, value in dict(D=D, S=S, H=H, B=B, b=b, h=h, s=s, rows=rows).items():
            setattr(to, name, value)
    wrong = attend.run(params, maps, grid[0], seed)
    assert wrong is None, wrong
    return out, lse


# A sequence of one query, one of two tiles whose causal rows may have no keys, and one more.
FEW_AND_MANY = {"heads": (4, 2), "ends": (2, 3, 239, 240)}
CASES = [
    {"is_causal": True},
    {"is_causal": True, "signs": -1},
    {"page": 16, "is_causal": True},
    {"D": 64, "Dv": 64, **FEW_AND_MANY},
    {"page": 64, "D": 256, "Dv": 256, "lens": (300, 200, 700), "is_causal": True, **FEW_AND_MANY},
]


@needs_compiler
@pytest.mark.parametrize("options", CASES)
def test_results_are_those_of_the_oracle(options, driver, kernels, monkeypatch):
    call = described(**options)
    out, lse = run(call, driver, kernels, monkeypatch)
    wanted, wanted_lse = expected(call)
    assert torch.equal(lse == float("-inf"), wanted_lse == float("-inf"))
    alive = wanted_lse > float("-inf")
    assert (lse - wanted_lse)[alive].abs().max() < 1e-3
    assert (out - wanted).float().norm() < 0.01 * wanted.float().norm()
    assert not out[0].any() and not out[-1].any()


def beside_a_dominant_key(D=32, Dv=16, Sq=20, Sk=385):
    """A call of one sequence whose last key has a weight of about 1, and the value 0.

    The weights of the other keys are about 2**-22. The last key has a block for itself.
    """
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(Sq, 1, D, generator=g), torch.randn(Sk, 1, D, generator=g)
    v = torch.rand(Sk, 1, Dv, generator=g) + 0.5
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[-1], v[-1] = 0.0, 0.0
    k[-1, 0, 0] = 88.0
    ends_q, ends_k = (torch.tensor([0, n], dtype=torch.int32) for n in (Sq, Sk))
    one = torch.ones(1, 1)
    return attention_call(
        q.to(E4M3), k.to(E4M3), v.to(E4M3), cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, q_scale=one,
        k_scale=one, v_scale=one, smooth_key=False, eight_bits=True, backend="hopper",
    )  # fmt: skip


@needs_compiler
def test_weights_beside_a_dominant_key_are_kept(driver, kernels, monkeypatch):
    """Where a sum of products begins, weights are relative to the largest of its own keys."""
    config = eight_bit.packed_config
    of_blocks = lambda *args: dataclasses.replace(config(*args), summed_keys=128)  # noqa: E731
    monkeypatch.setattr(eight_bit, "packed_config", of_blocks)
    call = beside_a_dominant_key()
    out, _ = run(call, driver, kernels, monkeypatch)
    q, k, v = (t.double().transpose(0, 1).unsqueeze(0) for t in (call.query, call.key, call.value))
    wanted = fa_ops.attention(q, k, v, backend="reference")[0].transpose(0, 1)
    assert (out.double() - wanted).norm() < 0.02 * wanted.norm()


@needs_compiler
def test_a_lane_may_come_late(driver, kernels, monkeypatch):
    """Where consumers skip blocks or whole tiles, as of sequences of one query."""
    call = described(64, D=16, Dv=136, heads=(1, 1), ends=(1, 2, 2, 3), lens=(500, 0, 450))
    for seed in range(16):
        run(call, driver, kernels, monkeypatch, seed)


def test_the_kernels_find_borders_and_tables(driver, monkeypatch):
    call = described(16, is_causal=True, sinks=torch.ones(2))
    t, plan = call.operands, eight_bit._plan_of(call)
    out, lse = eight_bit.prepare_packed(call)(call.query, call.key, call.value, t)
    assert out.shape == (61, 2, 16) and out.dtype == torch.bfloat16 and lse.shape == (2, 61)
    assert [one.name for one in driver.launched] == ["scaled_packed", "quantized"]
    before = eight_bit._SEQUENCES_LAYOUT.unpack(driver.last("scaled_packed")[1])
    pages = (t.page_table.data_ptr(), 12, 16, 40, 0, 0, t.cu_seqlens_q.data_ptr())
    assert before["pages"] == pages and before["lens_from"] == (t.kv_lens.data_ptr(),)
    assert before["v"] == (call.value.data_ptr(),) and before["cu_seqlens_k"] == (0,)
    assert before["keys"] == (192,) and before["key_blocks"] == (3 * 2,)
    grid, params = driver.last("quantized")
    found = LAYOUT.unpack(params)
    assert found["pages"] == pages and found["key_starts"] == before["key_starts"]
    assert found["kv_lens"] == before["kv_lens"] and found["k_scale"] == before["k_scale"]
    assert found["B"] == (3,) and found["Sq"] == (61,) and found["Sk"] == (6 * 128,)
    assert found["tiles"] == (2 * (0 + 3 + 2),) and grid == (4, 1)  # on four multiprocessors
    assert eight_bit.prepare_packed(call)(call.query, call.key, call.value, t, False)[1] is None
    shifted = torch.empty(call.query.numel() + 1, dtype=E4M3)[1:].view_as(call.query)
    eight_bit.prepare_packed(call)(shifted, call.key, call.value, t)
    (read,) = struct.unpack_from("<Q", driver.last("quantized")[1])
    assert read != shifted.data_ptr() and read % 16 == 0
    assert plan.sequences.key_blocks == 6


@pytest.mark.parametrize("page", [0, 16])
def test_values_whose_rows_are_not_multiples_of_16_bytes_run(page, driver):
    call = described(page, Dv=24)
    out, lse = eight_bit.prepare_packed(call)(call.query, call.key, call.value, call.operands)
    assert out.shape == (61, 2, 24) and lse.shape == (2, 61)


REFUSED = {
    "attends packed sequences in float8_e4m3fn": lambda: described()._replace(
        query=torch.zeros(61, 2, 32)
    ),
    "needs a head dim that is a multiple of 16": lambda: described(D=24),
    "needs pages of 16, 32 or a multiple of 64 keys, got 48": lambda: described(48),
    "needs a positive scale": lambda: described(scale=-1.0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    assert message in eight_bit.packed_error(REFUSED[message]())
    assert eight_bit.packed_error(described()) is None


def test_the_memory_of_values_is_limited(monkeypatch):
    monkeypatch.setattr(eight_bit, "MAX_VALUE_BYTES", 128 * 5 * 16)
    assert eight_bit.packed_error(described()) is None  # 300 keys of three sequences
    reason = eight_bit.packed_error(described(16))
    assert reason == f"transposes at most {128 * 5 * 16} bytes of values, got {128 * 6 * 16}"
