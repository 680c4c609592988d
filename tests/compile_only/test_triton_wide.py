"""The Triton kernels of heads over 256 wide without a GPU: registers and shared memory.

What is spilled, in bytes, is indices before and behind the main loop and in the loop that computes
rows with NaN or Inf again.
"""

import pytest

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")

from fa_ops.backends.triton import launch  # noqa: E402
from tests.compile_only import test_triton_backward as backward  # noqa: E402
from tests.compile_only import test_triton_decode as decode  # noqa: E402
from tests.compile_only import test_triton_forward as forward  # noqa: E402
from tests.compile_only.sass import assert_fits, disassembled, innermost_loop  # noqa: E402

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

compiled = backward.compiled  # a fixture
ARCHITECTURES = (80, 90, 100, 120)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_forward_fits(arch, tmp_path):
    kernel = forward.compiled(arch, 512, forward.KINDS["causal"])
    kept = {80: 8, 90: 8, 100: 24} if launch.VERSION >= (3, 8) else {80: 8, 100: 16}
    assert_fits(kernel, arch, tmp_path, kept.get(arch, 0))
    assert getattr(kernel.metadata, "tmem_size", 0) <= 512  # columns of sm_100's tensor memory
    if arch == 90:
        code = disassembled(kernel.asm["cubin"], tmp_path)
        assert code.count("HGMMA") >= 32 and code.count("WARPGROUP.DEPBAR") == 2


@pytest.mark.parametrize("arch", [80, 120])
def test_forward_with_every_option_fits(arch, tmp_path):
    assert_fits(forward.compiled(arch, 512, forward.KINDS["everything"]), arch, tmp_path, 32)


SPILLS = {90: (96, 128, 128), 120: (112, 160, 64)}
IN_LOOP = 0  # instructions that spill in the main loop of the first kernel
if launch.VERSION >= (3, 9):  # which computes the descriptors of products in ordinary registers
    SPILLS[90], IN_LOOP = (120, 208, 128), 13


@pytest.mark.parametrize("arch", [90, 120])
def test_backward_fits(arch, bound, tmp_path):
    kernels = bound(arch, backward.host, by_name=False)
    backward.dense(512, {"is_causal": True}, S=250)()
    allowed = (IN_LOOP if arch == 90 else 0, 0, 0)
    for kernel, spills, in_loop in zip(kernels, SPILLS[arch], allowed, strict=True):
        assert_fits(kernel, arch, tmp_path, spills)
        assert getattr(kernel.metadata, "tmem_size", 0) <= 512
        main_loop = innermost_loop(disassembled(kernel.asm["cubin"], tmp_path))
        assert sum(one.startswith(("LDL", "STL")) for one in main_loop) <= in_loop
    if arch == 90:  # both warpgroups compute a product together, and each of them once
        for kernel, products in zip(kernels, (66, 66, 34)):
            loop = innermost_loop(disassembled(kernel.asm["cubin"], tmp_path))
            assert sum("HGMMA" in one for one in loop) == products


@pytest.mark.parametrize("rows", [4, 32])
@pytest.mark.parametrize("arch", [90, 120])
def test_decoding_fits(arch, rows, tmp_path):
    assert_fits(decode.compiled(arch, 512, rows=rows), arch, tmp_path)
