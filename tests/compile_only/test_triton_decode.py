"""The decoding kernels without a GPU: registers, shared memory, and that nothing is spilled."""

import importlib

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402

from fa_ops.backends.triton import launch  # noqa: E402
from fa_ops.backends.triton.configs import decode_tile  # noqa: E402
from tests.compile_only import sass  # noqa: E402
from tests.compile_only.sass import SHARED, disassembled, innermost_loop, registers  # noqa: E402

host = importlib.import_module("fa_ops.backends.triton.decode")
kernels = importlib.import_module("fa_ops.backends.triton.decode_kernels")
cached = importlib.import_module("fa_ops.backends.triton.cached")
append = importlib.import_module("fa_ops.backends.triton.append")

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

B, Hkv, S = 2, 2, 256
FP8, PAIRS = torch.float8_e4m3fn, torch.int16  # an fp8 cache is read as pairs


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def assert_fits(kernel, arch, folder, spills=32):
    """Nothing is spilled in the loop over keys, and next to nothing around it."""
    sass.assert_fits(kernel, arch, folder, spills)
    loop = innermost_loop(disassembled(kernel.asm["cubin"], folder))
    assert not [name for name in loop if name.startswith(("LDL", "STL"))]


def compiled(arch, D, Dv=None, rows=4, dtype=torch.bfloat16, cached=None, page=0, mode="stream",
             shared=False, options=(), light=False, scales=0,
             unified_max=None):  # fmt: skip
    Dv, cached = Dv or D, cached or dtype
    tile = decode_tile(arch, dtype, cached == PAIRS, D, Dv, rows, light)
    shape = (cached == PAIRS, D, Dv, page, shared, mode, 16, 4, scales)
    split, _ = host.constants(tile, arch, dtype, *shape)
    q, k, lse = meta(1, dtype=dtype), meta(1, dtype=cached), meta(1)
    table = meta(1, dtype=torch.int32) if page else None
    scales = (lse, lse) if cached == PAIRS else (None, None)
    everything = (2.0, lse, 0, lse) if options else (None, None, 0, None)
    windows = (9, 0) if options else (None, None)
    ranges = (meta(B, dtype=torch.int32) if options else None, 0)
    args = (
        q, k, k, q, lse, lse, lse, *(64,) * 9, B, Hkv, 4, 1, S, 0, 264, table, 64, 9, *scales,
        1.0, *everything, meta(B, dtype=torch.int32), *ranges, unified_max, *windows,
    )  # fmt: skip
    return launch.compile_kernel(
        kernels.split_kernel, args, split, tile.options(), GPUTarget("cuda", arch, 32),
        divisors=host.divisors_of(dtype, cached),
    )  # fmt: skip


@pytest.mark.parametrize("arch", SHARED)
def test_fits(arch, tmp_path):
    for D in (64, 128, 256):
        assert_fits(compiled(arch, D), arch, tmp_path)


def test_compilations_are_logged_with_seconds_and_folder(caplog):
    caplog.set_level("INFO", "fa_ops")
    compiled(90, 64)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("compiled 1 kernel, split_kernel, or found it in Triton's cache, in ")
    assert text.endswith(f" s, kept in {triton.knobs.cache.dir}")


@pytest.mark.parametrize("D", [64, 128, 256])
def test_every_option_fits(D, tmp_path):
    for arch in (80, 90):
        kernel = compiled(arch, D, page=16, options=True, light=True)
        assert_fits(kernel, arch, tmp_path)


@pytest.mark.parametrize("cached, D", [(PAIRS, 128), (torch.bfloat16, 128), (torch.bfloat16, 64)])
def test_planned_programs_fit_on_a_multiprocessor(cached, D, tmp_path):
    """By registers and shared memory: one too few and a third of the time is waited for it."""
    tile = decode_tile(90, torch.bfloat16, cached == PAIRS, D, D, 4, False)
    kernel = compiled(90, D, cached=cached)
    threads = 32 * tile.num_warps
    assert tile.per_sm * threads * registers(kernel.asm["cubin"], tmp_path) <= 65536
    assert tile.per_sm * (kernel.metadata.shared + 1024) <= 228 * 1024


@pytest.mark.parametrize("arch", SHARED)
def test_mla_fits(arch, tmp_path):
    # what the query's rows are computed from goes to the stack while keys are read; a tile half as
    # wide spills nothing and takes 1.7 times as long
    kernel = compiled(arch, 576, 512, rows=128, page=64, shared=True)
    assert_fits(kernel, arch, tmp_path, 320)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_groups_fit(D, tmp_path):
    assert_fits(compiled(90, D, rows=32), 90, tmp_path)


@pytest.mark.parametrize("arch", [arch for arch in SHARED if arch >= 89])
def test_fp8_fits(arch, tmp_path):
    for D in (64, 128):
        assert_fits(compiled(arch, D, cached=PAIRS), arch, tmp_path)
        assert_fits(compiled(arch, D, cached=PAIRS, page=16, scales=2), arch, tmp_path)


@pytest.mark.parametrize("D", [64, 128])
def test_two_loops_fit(D, tmp_path):
    """From a guess of the maximum, and once more where it is no good; what the second loop needs
    of the query may wait on the stack."""
    assert_fits(compiled(90, D, unified_max=meta(4)), 90, tmp_path, 64)


def test_fp32_fits(tmp_path):
    spills = 48 if launch.VERSION == (3, 8) else 32
    for arch in (80, 90):
        sass.assert_fits(compiled(arch, 128, dtype=torch.float32), arch, tmp_path, spills)


@pytest.mark.parametrize("arch", SHARED)
def test_merging_fits(arch, tmp_path):
    tile = decode_tile(arch, torch.bfloat16, False, 128, 128, 4, False)
    for mode, parts in (("stream", 16), ("even", 4)):
        constants = (tile, arch, torch.bfloat16, False, 128, 128, 0, False, mode, 256, parts)
        _, merge = host.constants(*constants)
        out, lse, lens = meta(1, dtype=torch.bfloat16), meta(1), meta(B, dtype=torch.int32)
        args = (lse, lse, out, lse, B, Hkv, 4, 1, S, 0, 264, lse, lens, None, 0, None)
        kernel = launch.compile_kernel(
            kernels.merge_splits_kernel, args, merge, {"num_warps": 4}, GPUTarget("cuda", arch, 32)
        )
        sass.assert_fits(kernel, arch, tmp_path, 32)


@pytest.mark.parametrize("cached", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("page", [0, 16])
def test_appending_fits(page, cached, tmp_path):
    q, k, angles = meta(1, dtype=torch.bfloat16), meta(1, dtype=cached), meta(1)
    ints = meta(1, dtype=torch.int32)
    scales = (angles, angles) if cached == FP8 else (None, None)
    args = (q, q, q, q, k, k, *(64,) * 15, 4, 2, 1, 1, 2, S, ints if page else None, 64, 9, ints,
            ints, *scales, angles, angles, S)  # fmt: skip
    for interleaved in (False, True):
        constants = {
            "D": 128, "Dv": 128, "BLOCK": 128, "R": 64, "INTERLEAVED": interleaved, "PAGE": page,
            "SCALES": 2 if page > 0 else 0, "PDL": True,
        }  # fmt: skip
        kernel = launch.compile_kernel(
            append.append_kernel, args, constants, {"num_warps": 1}, GPUTarget("cuda", 90, 32)
        )
        sass.assert_fits(kernel, 90, tmp_path, 32)
        # rounded as the other backends round, or a number in a thousand becomes the next one
        assert "div.full" not in kernel.asm["ptx"]
        assert ("div.rn.f32" in kernel.asm["ptx"]) == (cached == FP8)


@pytest.mark.parametrize("page", [0, 64, 16])
def test_keys_and_values_are_prefetched(page, tmp_path):
    """Both come by asynchronous copies of 16 bytes, and two programs share a multiprocessor."""
    kernel = compiled(90, 128, page=page)
    code = disassembled(kernel.asm["cubin"], tmp_path)
    loop = innermost_loop(code)
    assert sum(name.startswith("LDGSTS.E.BYPASS.128") for name in loop) == 16
    assert kernel.metadata.shared <= 113 * 1024


@pytest.mark.parametrize("page, scales", [(0, 1), (0, 3), (16, 2), (64, 3), (64, 0)])
@pytest.mark.parametrize("D", [64, 256, 512])
def test_conversion_of_e4m3(D, page, scales, tmp_path):
    scale, table = meta(1) if scales else None, meta(B, 8, dtype=torch.int32) if page else None
    args = (
        meta(1, dtype=PAIRS), meta(1, dtype=torch.bfloat16), scale, meta(B, dtype=torch.int32),
        table, table, 64, 64, 64, Hkv, S, 8, 16,
    )  # fmt: skip
    for arch in (89, 90):
        kernel = launch.compile_kernel(
            cached.dequantize_kernel, args, cached.constants(D, page, scales),
            {"num_warps": cached.WARPS}, GPUTarget("cuda", arch, 32),
            divisors=cached.ALIGNED,
        )  # fmt: skip
        sass.assert_fits(kernel, arch, tmp_path)
        code = disassembled(kernel.asm["cubin"], tmp_path)
        assert (code.count("LDG.E.128"), code.count("STG.E.128")) == (2, 4)
