"""The Triton forward kernels without a GPU: registers, shared memory and instructions."""

import importlib

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402

from fa_ops.backends.triton import launch  # noqa: E402
from fa_ops.backends.triton.configs import forward_tile  # noqa: E402
from fa_ops.call.call import attention_call  # noqa: E402
from tests.compile_only.sass import SHARED, assert_fits, disassembled, main_loop  # noqa: E402

host = importlib.import_module("fa_ops.backends.triton.forward")

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

B, Hq, S = 2, 4, 256


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


LENGTHS = {"kv_lens": meta(B, dtype=torch.int32), "sinks": meta(Hq)}
KINDS = {
    "full": {},
    "causal": {"is_causal": True},
    "positions": dict(
        is_causal=True, window_left=9, key_ranges=meta(B, Hq, S, 2, dtype=torch.int32), **LENGTHS
    ),
    "everything": dict(
        is_causal=True, window_left=9, key_ranges=meta(B, Hq, S, 2, dtype=torch.int32),
        softcap=20.0, alibi_slopes=meta(Hq), attn_mask=meta(B, Hq, S, S), dropout_p=0.1,
        dropout_seed=meta(1, dtype=torch.int64), **LENGTHS,
    ),
}  # fmt: skip


def compiled(arch, D, options, dtype=torch.bfloat16, packed=False, Dv=None, page=0):
    q, v, lse = meta(B, Hq, S, D, dtype=dtype), meta(B, Hq, S, Dv or D, dtype=dtype), meta(B, Hq, S)
    strides = q.stride()[:3] * 2 + v.stride()[:3]
    values, kind = launch.arguments(attention_call(q, q, v, **options), B, Hq, S, S)
    ends = (meta(B + 1, dtype=torch.int32),) * 2 if packed else (None, None)
    pages = (meta(B, 16, dtype=torch.int32), 16, 32) if page else (None, 0, 0)
    args = (q, q, v, v, lse, None, *strides, B, Hq, 1, S, S, *values, *ends, *pages)
    dims, mode = (D, Dv or D), "ieee"
    tile = forward_tile(arch, dtype, max(dims), kind, mode, page)
    divisors = launch.Layout(True, False).divisors("qkv", dtype) | kind.divisors()
    return launch.compile_kernel(
        host.forward_kernel, args, host.constants(tile, dims, kind, mode, page),
        tile.options(), GPUTarget("cuda", arch, 32), divisors=divisors, fixed=kind.fixed(),
    )  # fmt: skip


# causal ones on sm_90 are tested below, with their products
ARCHITECTURES = [(arch, kind) for arch in SHARED for kind in ("causal", "everything")]
ARCHITECTURES.remove((90, "causal"))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("arch, kind", ARCHITECTURES)
def test_fits(arch, kind, D, tmp_path):
    # all options at once are no main configuration: a few values may be spilled outside the loop
    assert_fits(compiled(arch, D, KINDS[kind]), arch, tmp_path, 32 if kind == "everything" else 0)


@pytest.mark.parametrize("dims", [(40, 16), (64, 32), (16, 72), (192, 128), (24, 256)])
def test_widths_that_differ_fit(dims, tmp_path):
    assert_fits(compiled(90, dims[0], KINDS["causal"], Dv=dims[1]), 90, tmp_path)


# Values that threads keep in memory from before the loop until behind it, in bytes.
KEPT = {(3, 6): 184}.get(launch.VERSION, 8 if launch.VERSION >= (3, 9) else 0)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("arch", [*SHARED])
def test_pages_fit(arch, page, tmp_path):
    options = {"is_causal": True, "kv_lens": LENGTHS["kv_lens"]}
    for D in (64, 128, 256):
        kept = KEPT if (arch, D) == (90, 256) else 0
        assert_fits(compiled(arch, D, options, page=page), arch, tmp_path, kept)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_fp32_fits(D, tmp_path):
    for arch in (80, 90):
        # 16 bytes on sm_80, all of them where rows are recomputed
        spills = 16 if (arch, D) == (80, 64) else 0
        assert_fits(compiled(arch, D, KINDS["causal"], torch.float32), arch, tmp_path, spills)


@pytest.mark.parametrize("kind", ["full", "causal", "positions", "packed", "page 16", "page 128"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_products_on_hopper_are_asynchronous(D, kind, tmp_path):
    page = int(kind[5:]) if kind.startswith("page ") else 0
    options = KINDS["causal" if page or kind == "packed" else kind]
    kernel = compiled(90, D, options, packed=kind == "packed", page=page)
    assert_fits(kernel, 90, tmp_path, KEPT if D == 256 else 0)
    code = disassembled(kernel.asm["cubin"], tmp_path)
    products, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
    # one wait in the loop and one behind it; ptxas puts one after every product that it serialises
    assert products >= 8 and waits == 2, (products, waits)
    # keys and values are loaded ahead
    assert sum("LDGSTS.E.BYPASS.128" in line for line in code.splitlines()) >= 8
    loop = main_loop(code)
    assert sum("HGMMA" in name for name in loop) >= 8
    assert not any(name.startswith(("LDL", "STL")) for name in loop)


def test_the_launcher_supports_this_triton():
    driver = importlib.import_module("triton.backends.nvidia.driver")
    launcher = object.__new__(driver.CudaLauncher)
    assert launch._convention_error(launcher) is None
