"""New keys and values of a cached call on Hopper: the kernel's own source as C++ on the CPU, where
every access outside a tensor, or at a wrong multiple of bytes, ends the process; and its host code.
"""

import dataclasses
import random
import shutil
import struct
import subprocess

import pytest
import torch

from fa_ops.backends import hopper, reference
from fa_ops.backends.hopper import decode
from fa_ops.backends.hopper.runtime import launch
from fa_ops.backends.hopper.runtime.launch import Params
from fa_ops.plans import dispatch, planning
from fa_ops.testing.caches import CacheCase, random_cache_case
from tests.backends.hopper.cuda_as_cpp import SOURCES, WARP, needs_compiler

PTX = """
#include <cstdio>
#include <vector>
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __fdiv_rn(float x, float y) { volatile double z = y; return x / z; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static u32 bfloat16(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fc0 : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
static u32 pack(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }
static u32 e4m3(float x) {
  if (x != x) return 127;
  const float size = std::min(fabsf(x), 448.f);
  u32 best = 0;
  for (u32 y = 1; y < 127; y++) {
    const float d = fabsf(e4m3_value(y) - size), least = fabsf(e4m3_value(best) - size);
    if (d < least || (d == least && y % 2 == 0)) best = y;
  }
  return best | std::signbit(x) << 7;
}
static u32 pack_e4m3(float a, float b, float c, float d) {
  return e4m3(a) | e4m3(b) << 8 | e4m3(c) << 16 | e4m3(d) << 24;
}
"""
# Runs a launch that a file describes: CTAs, parameters, the bytes of each allocation, and which
# parameters are addresses in which of them. The allocations' new bytes replace the file.
RUN = """
#include "append.cu"
template <class T> static T next(FILE* file) {
  T x;
  if (fread(&x, sizeof x, 1, file) != 1) abort();
  return x;
}
int main(int, char** names) {
  FILE* file = fopen(names[1], "rb");
  const int ctas = next<int>(file);
  AppendParams params = next<AppendParams>(file);
  std::vector<std::pair<char*, long long>> all(next<int>(file));
  for (auto& [bytes, size] : all) {
    size = next<long long>(file), bytes = (char*)malloc(size);
    if (fread(bytes, 1, size, file) != size) abort();
  }
  for (int n = next<int>(file); n; n--) {
    const int field = next<int>(file), of = next<int>(file);
    *(char**)((char*)&params + field) = all[of].first + next<long long>(file);
  }
  fclose(file);
  for (int block = 0; block < ctas; block++)
    for (int thread = 0; thread < THREADS; thread++)
      blockIdx.x = block, threadIdx.x = thread, append(params);
  file = fopen(names[1], "wb");
  for (auto& [bytes, size] : all) fwrite(bytes, 1, size, file), free(bytes);
  fclose(file);
}
"""
POINTERS = ("q", "rotated", "key", "value", "k", "v", "kv_lens", "ends", "table", "k_scale")
POINTERS += ("v_scale", "cos", "sin")


def is_sanitised(folder):
    """Whether programs with the sanitisers run on this machine."""
    program = folder / "empty"
    command = ["g++", "-fsanitize=address,undefined", "-x", "c++", "-", "-o", program]
    built = subprocess.run(command, input=b"int main() {}", capture_output=True)
    return built.returncode == 0 and subprocess.run([program], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A program for each set of macros, compiled when it is asked for."""
    folder = tmp_path_factory.mktemp("append")
    shutil.copytree(SOURCES, folder / "cuda")
    ptx = WARP.replace("struct uint4", "struct alignas(16) uint4") + PTX
    (folder / "cuda" / "ptx.cuh").write_text(ptx)
    flags = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    flags = flags if is_sanitised(folder) else []
    found = {}

    def of(defines):
        name = "append" + "".join(map(str, defines.values()))
        if name not in found:
            macros = [f"-D{macro}={value}" for macro, value in defines.items()]
            source, found[name] = folder / f"{name}.cpp", folder / name
            source.write_text('#include "ptx.cuh"\n' + RUN)
            command = ["g++", "-O1", "-std=c++17", "-w", *flags, *macros, f"-I{folder / 'cuda'}"]
            subprocess.run([*command, source, "-o", found[name]], check=True)
        return found[name]

    return of


def bytes_of(t):
    """All bytes of the memory that a tensor is in."""
    return torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage())


def bytes_with_one_nan(t):
    """`bytes_of`, in which NaN of e4m3 has no sign."""
    found = bytes_of(t)
    return found.where(found & 127 < 127, 127) if t.dtype == decode._CACHED_E4M3 else found


def run_launch(program, file, ctas, params, tensors):
    """Run the kernel on copies of the tensors' memory, then replace that memory."""
    offsets = {name: field.offset for name, field in decode._APPEND_LAYOUT.fields.items()}
    memory, pointers = {}, []
    for name, t in zip(POINTERS, tensors, strict=True):
        if t is not None:
            base = t.untyped_storage().data_ptr()
            index = list(memory).index(base) if base in memory else len(memory)
            memory[base] = bytes_of(t)
            pointers.append(struct.pack("<iiq", offsets[name], index, t.data_ptr() - base))
    text = struct.pack("<i", ctas) + params + struct.pack("<i", len(memory))
    for one in memory.values():
        text += struct.pack("<q", one.numel()) + one.numpy().tobytes()
    file.write_bytes(text + struct.pack("<i", len(pointers)) + b"".join(pointers))
    found = subprocess.run([program, file], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    text, at = file.read_bytes(), 0
    for one in memory.values():
        one.copy_(torch.frombuffer(bytearray(text[at : at + one.numel()]), dtype=torch.uint8))
        at += one.numel()
    assert at == len(text)


def in_own_memory(t, offset):
    """The same tensor, so many elements behind the beginning of memory that ends with it."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    whole = torch.zeros(offset + span, dtype=t.dtype)
    whole[offset:].copy_(torch.as_strided(t, (span,), (1,)))
    return torch.as_strided(whole, t.shape, t.stride(), offset)


def in_copied_memory(*tensors):
    """The tensors again, in copies of their memory."""
    copies = {t.untyped_storage().data_ptr(): bytes_of(t).clone() for t in tensors}
    return [
        torch.tensor([], dtype=t.dtype).set_(
            copies[t.untyped_storage().data_ptr()].untyped_storage(), t.storage_offset(), t.shape,
            t.stride(),
        ) for t in tensors
    ]  # fmt: skip


def write_as_defined(call):
    """Write the new keys and values by the semantics; returns the lengths with them."""
    (k, v), t = call[1:3], call.operands
    new, lens = t.new_key.shape[2], t.kv_lens.long()
    size = k.shape[1] if call.is_paged else 1
    capacity = t.page_table.shape[1] * size if call.is_paged else k.shape[2]
    for b, length in enumerate(lens.tolist()):
        for n in range(new):
            at = length + n
            is_inside = 0 <= at < capacity
            if not is_inside or call.is_paged and not 0 <= t.page_table[b, at // size] < len(k):
                continue
            position = torch.tensor([at])
            if t.rotary_cos is not None:
                position = position.clamp(max=len(t.rotary_cos) - 1)
            key = reference.rotate(t.new_key[b, :, n : n + 1].double(), call, position)
            pairs = (v, t.new_value[b, :, n : n + 1], t.v_scale), (k, key, t.k_scale)
            for memory, x, scale in pairs:
                factor = reference.scales(scale, t.page_table, b, range(at, at + 1), size)
                x = reference.quantised(x.to(t.new_key.dtype).double(), factor, memory.dtype)
                view, index = reference.slots(memory, t.page_table, b, at, at + 1)
                view[index] = x.transpose(0, 1).view(view.dtype)
    return (lens + new).clamp(0, capacity)


def rotated_as_defined(call, lens):
    q = call.query

    def positions(length):
        at = torch.arange(length - q.shape[2], length)
        return at.clamp(0, len(call.operands.rotary_cos) - 1)

    rows = [reference.rotate(x.double(), call, positions(n)) for x, n in zip(q, lens.tolist())]
    return torch.stack(rows).to(q.dtype)


def assert_written(driver, programs, file, call):
    """Run host code and kernel, and compare everything that they wrote."""
    driver.struct_bytes = decode._APPEND_LAYOUT.size
    q, k, v = call[:3]
    k2, v2 = in_copied_memory(k, v)
    kept = [t for t in (q, *call.operands) if t is not None]
    before = [bytes_of(t).clone() for t in kept]
    queries, ends = decode.prepare_append(call)(q, k, v, call.operands)
    (ctas, _), params = driver.last("append")
    t, key, rotary = call.operands, call.operands.new_key, call.operands.rotary_cos
    given = (q, queries, key, t.new_value, k, v, t.kv_lens, None if key is None else ends)
    given += t.page_table, t.k_scale, t.v_scale, t.rotary_cos, t.rotary_sin
    defines = decode.append_defines(q.dtype, k.dtype, None if rotary is None else rotary.dtype)
    run_launch(programs(defines), file, ctas, params, given)
    as_defined = call._replace(key=k2, value=v2)
    lens = t.kv_lens.long() if t.new_key is None else write_as_defined(as_defined)
    assert ends.tolist() == lens.tolist()
    for found, expected in ((k, k2), (v, v2)):
        if rotary is None:
            assert torch.equal(*map(bytes_with_one_nan, (found, expected)))
        found, expected = found.float(), expected.float()
        unit = 0.13 if k.dtype != q.dtype else 2**-7
        near = (found - expected).abs() <= unit * (expected.abs() + 0.5)
        assert (near | found.isnan() & expected.isnan()).all()
    if rotary is None:
        assert queries is q
    else:
        expected = rotated_as_defined(call, lens)
        torch.testing.assert_close(queries, expected, atol=2**-8, rtol=2**-7)
        features = 2 * rotary.shape[1]
        assert torch.equal(queries[..., features:], q[..., features:])
    for t, bytes_before in zip(kept, before):
        assert torch.equal(bytes_of(t), bytes_before)


@needs_compiler
@pytest.mark.parametrize("seed", range(120))
def test_random(driver, programs, tmp_path, seed):
    r = random.Random(seed)
    case = random_cache_case(
        seed, dtype=torch.bfloat16, fp8=seed % 3 == 0, broken=seed % 4 == 1,
        rotary=r.choice((0, 8, 12, 16)), new=r.choice((1, 3, 7)), S=r.choice((7, 20, 64)),
        D=r.choice((16, 24, 64, 256)), Dv=r.choice((8, 64, 128)), shared=False, ranges=False,
        page_size=(0, 1, 5, 16, 64)[seed % 5],
    )  # fmt: skip
    case = dataclasses.replace(
        case, page_scales=case.fp8 and case.page_size > 0 and seed % 2 == 0,
        token_scales=case.fp8 and seed % 2 == 1 and not case.broken,
    )  # fmt: skip
    call = case.fresh()
    t, offset = call.operands, lambda: r.choice((0, 0, 1, 2, 4, 8))
    q, k, v, *new = (in_own_memory(t, offset()) for t in (*call[:3], t.new_key, t.new_value))
    changes = dict(zip(("new_key", "new_value"), new))
    if r.random() < 0.2:
        changes = {name: t[:, :1].expand(-1, case.Hkv, -1, -1) for name, t in changes.items()}
    if case.rotary:
        dtype = r.choice((torch.float32, torch.bfloat16))
        for name in ("rotary_cos", "rotary_sin"):
            changes[name] = in_own_memory(getattr(t, name).to(dtype), offset())
    call = call.changed(query=q, key=k, value=v, **changes)
    assert_written(driver, programs, tmp_path / "launch", call)


LENGTHS = (0, 499, 500, 511, 512, 513, 515, -1, -2, -600, 2**31 - 1, -(2**31), 2**31 - 3)


@needs_compiler
@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("rotary, interleaved", [(0, False), (32, False), (8, True), (12, True)])
def test_lengths_at_and_beyond_the_capacity(
    driver, programs, tmp_path, page_size, rotary, interleaved
):
    S = 512
    case = CacheCase(B=len(LENGTHS), Hq=2, Hkv=1, Sq=3, S=S, D=32, Dv=16, dtype=torch.bfloat16,
                     new=3, lens=(0,) * len(LENGTHS), rotary=rotary, interleaved=interleaved,
                     page_size=page_size)  # fmt: skip
    call = case.fresh().changed(kv_lens=torch.tensor(LENGTHS, dtype=torch.int32))
    if page_size:
        pages = call.operands.page_table.numel()
        table = torch.arange(pages, dtype=torch.int32).view(-1, S // page_size)
        table[3, -1], table[2, -1], table[0, 0] = len(call.key), -1, 2**31 - 1
        call = call.changed(page_table=table)
    assert_written(driver, programs, tmp_path / "launch", call)


@needs_compiler
@pytest.mark.parametrize("page_size", [0, 64])
def test_latent_caches(driver, programs, tmp_path, page_size):
    case = CacheCase(B=3, Hq=4, Hkv=1, D=576, Dv=512, S=130, new=3, Sq=2, shared=True,
                     page_size=page_size, dtype=torch.bfloat16, lens=(0, 61, 127))  # fmt: skip
    assert_written(driver, programs, tmp_path / "launch", case.fresh())


@needs_compiler
def test_views_of_one_pool(driver, programs, tmp_path):
    case = CacheCase(B=3, S=64, dtype=torch.bfloat16, new=2, page_size=16, lens=(0, 15, 40))
    call = case.fresh()
    pool = torch.randn(len(call.key), 2, *call.key.shape[1:], dtype=torch.bfloat16)
    call = call._replace(key=pool[:, 0], value=pool[:, 1])
    assert_written(driver, programs, tmp_path / "launch", call)


@needs_compiler
def test_queries_alone_are_rotated(driver, programs, tmp_path):
    case = CacheCase(B=3, Hq=4, Sq=5, S=64, D=32, Dv=32, dtype=torch.bfloat16, rotary=16,
                     lens=(64, 2, 40))  # fmt: skip
    assert_written(driver, programs, tmp_path / "launch", case.fresh())


@needs_compiler
def test_extreme_numbers_are_quantised_as_defined(driver, programs, tmp_path):
    case = CacheCase(B=1, S=64, D=16, Dv=16, dtype=torch.bfloat16, fp8=True, new=2, lens=(3,))
    call = case.fresh()
    numbers = torch.tensor([0.0, -0.0, 1e30, -1e30, 448.0, 465.0, 2**-9, 2**-10])
    for x in (call.operands.new_key, call.operands.new_value):
        x.view(-1, 8)[:] = numbers
        x[0, 0, 0, 7] = float("nan")
    assert_written(driver, programs, tmp_path / "launch", call)
    assert call.key[0, 0, 3, 7].float().isnan()


def decoding_call(D=64, rotary=0, **changes):
    case = CacheCase(B=2, Hq=8, Hkv=2, S=960, D=D, Dv=D, dtype=torch.bfloat16, rotary=rotary,
                     new=1, **changes)  # fmt: skip
    return case.fresh()


@pytest.fixture
def on_hopper(driver, monkeypatch):
    """Calls of CPU tensors run on this backend, whose driver takes notes."""
    monkeypatch.setattr(
        hopper, "cache_error", lambda call: hopper._cache_module(call).cache_error(call)
    )
    monkeypatch.setitem(dispatch._available, "hopper", None)
    sizes = {"append": decode._APPEND_LAYOUT.size, "decode": decode._LAYOUT.size}

    def read(name, pointers):
        driver.struct_bytes = sizes.get(name, 0)
        return type(driver).read(driver, name, pointers)

    driver.read = read
    return driver


@pytest.mark.parametrize("rotary", [0, 32])
@pytest.mark.parametrize("page_size", [0, 64])
def test_the_attending_kernel_finds_what_was_written(on_hopper, rotary, page_size):
    call = decoding_call(rotary=rotary, page_size=page_size)._replace(backend="hopper")
    plan = planning.plan_for(call)
    assert plan.kernel == "append, then decode"
    q, k, v, t = call.query, call.key, call.value, call.operands
    plan.prepare(call)(q, k, v, t)
    first, second, _ = on_hopper.launched
    assert [first.name, second.name] == ["append", "decode"]
    assert on_hopper.called.count("cuLaunchKernelEx") == 3
    found = decode._APPEND_LAYOUT.unpack(first.params)
    assert found["kv_lens"] == (t.kv_lens.data_ptr(),) and found["k"] == (k.data_ptr(),)
    (queries,) = struct.unpack_from("<Q", second.params)
    (lens,) = struct.unpack_from("<Q", second.params, 384 + 4 * 8)
    assert (queries,) == found["rotated"] and (lens,) == found["ends"]
    assert (queries == q.data_ptr()) == (rotary == 0) and lens != t.kv_lens.data_ptr()


@pytest.mark.parametrize("rotary", [0, 32])
def test_what_is_written_for_one_call_is_behind_the_workspace(on_hopper, monkeypatch, rotary):
    call, allocated, empty = decoding_call(rotary=rotary), [], decode.empty
    monkeypatch.setattr(decode, "empty", lambda *of: allocated.append(empty(*of)) or allocated[-1])
    run = planning.plan_for(call._replace(backend="hopper")).prepare(call)
    run(call.query, call.key, call.value, call.operands, False)
    (out, workspace), (first, *_) = allocated, on_hopper.launched
    assert out.shape == call.query.shape and workspace.dtype == torch.uint8
    own, begin = decode.plan_of(call.read_only()).template.workspace[0][0], workspace.data_ptr()
    found = decode._APPEND_LAYOUT.unpack(first.params)
    (rotated,), (ends,) = found["rotated"], found["ends"]
    if rotary:
        assert begin + own <= rotated <= ends - 2 * call.query.numel()
        assert (rotated - begin) % 128 == 0
    assert begin + own <= ends == begin + len(workspace) - 4 * len(call.query)
    assert (ends - begin) % 128 == 0


@pytest.mark.parametrize("rotary", [0, 32])
def test_caches_that_are_copied_are_written_before(on_hopper, rotary):
    call = decoding_call(rotary=rotary)
    run = planning.plan_for(call._replace(backend="hopper")).prepare(call)
    q, k, v = (in_own_memory(t, 1) for t in (call.query, call.key, call.value))
    assert k.data_ptr() % 16 and k.stride() == call.key.stride()
    run(q, k, v, call.operands)
    first, second, _ = on_hopper.launched
    assert [first.name, second.name] == ["append", "decode"]
    found = decode._APPEND_LAYOUT.unpack(first.params)
    assert found["k"] == (k.data_ptr(),) and found["q"] == (q.data_ptr(),)
    copied = decode._LAYOUT.unpack(second.params)
    assert copied["k_rows"] not in (found["k"], (call.key.data_ptr(),))
    assert copied["kv_lens"] == found["ends"]
    assert (copied["q_rows"] == found["rotated"]) == (rotary > 0)


def test_kernels_are_compiled_together(on_hopper, monkeypatch):
    """The kernel that attends is asked for before the one that writes is waited for."""
    order = []

    def begin(names):
        order.extend(names)
        return [lambda name=name: order.append(f"code of {name}") or name for name in names]

    monkeypatch.setattr(launch.nvrtc, "begin", begin)
    call = decoding_call()
    hopper.plan(call).prepare(call)
    assert order[:3] == ["append", "decode", "combine"] and order[3] == "code of append"


def test_another_current_device_gives_way_to_the_calls(on_hopper, monkeypatch):
    call, current, entered = decoding_call(), [1], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            current[0] = self.index

        def __exit__(self, *_):
            current[0] = 1

    run = decode.prepare_append(call)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(decode, "current_device", lambda: current[0])
    run(call.query, call.key, call.value, call.operands)
    assert entered == [None] and len(on_hopper.launched) == 1


def test_calls_share_no_parameters(on_hopper, monkeypatch):
    """Those of a launch are given back once the driver has copied them."""
    call, taken = decoding_call(), []
    take = Params.take
    monkeypatch.setattr(Params, "take", lambda *args: taken.append(take(*args)) or taken[-1])
    run = decode.prepare_append(call)
    for _ in range(2):
        run(call.query, call.key, call.value, call.operands)
    assert len(taken) == 2 and taken[0][0] is taken[1][0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": torch.zeros(2, 8, 0, 64)}, "that queries attend, got a query of shape (2, 8, 0"),
        ({"rotary_cos": torch.zeros(5, 0)}, "at least two features, rotary_cos is (5, 0)"),
        ({"key": torch.zeros(1).expand(2, 8, 2**26, 64)}, "2147483519 rows, got 2147483648"),
    ],
)  # fmt: skip
def test_what_it_does_not_write(on_hopper, changes, message):
    call = decoding_call()
    assert hopper.supports(call) is None
    query, rest = changes.get("query"), {k: t for k, t in changes.items() if k != "query"}
    if query is not None:
        call = call._replace(query=query)
    names = {"key": "new_key", "value": "new_value"}
    operands = {names.get(name, name): t for name, t in rest.items()}
    call = call._replace(operands=call.operands._replace(**operands))
    assert message in decode.append_error(call)
    if query is None:
        assert "the triton backend can run it" in hopper.supports(call)


def test_a_cache_that_no_kernel_attends_is_not_written(on_hopper):
    call = decoding_call(page_size=4, Sq=16)
    assert "needs pages of 16" in hopper.supports(call)
    assert "in one call" in hopper.append_error(call)
    rest = call.read_only()
    kept, given = rest.operands, call.operands
    removed = {"new_key", "new_value", "rotary_cos", "rotary_sin"}
    assert rest.options is call.options and not any(getattr(kept, name) for name in removed)
    assert all(getattr(kept, n) is getattr(given, n) for n in set(kept._fields) - removed)
