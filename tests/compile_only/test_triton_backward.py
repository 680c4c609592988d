"""The Triton backward kernels without a GPU: registers, shared memory and instructions."""

import importlib

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")


from fa_ops.backends.triton import launch  # noqa: E402
from fa_ops.backends.triton.backward_kernels import ROW_UNIT  # noqa: E402
from fa_ops.backends.triton.configs import backward_tiles  # noqa: E402
from fa_ops.call.call import Saved, attention_call  # noqa: E402
from fa_ops.testing import random_case  # noqa: E402
from fa_ops.testing.inputs import with_each  # noqa: E402
from tests.compile_only.sass import SHARED, assert_fits, disassembled, main_loop  # noqa: E402

host = importlib.import_module("fa_ops.backends.triton.backward")

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

B, HQ, HKV, S = 2, 4, 2, 256


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def compiled(bound):
    """compiled(arch, run): the kernels that `run` binds, by name, compiled for `arch`."""

    def collect(arch, run):
        kernels = bound(arch, host)
        run()
        return kernels

    return collect


def dense(D, options, S=S, dtype=torch.bfloat16, mask_grad=False):
    def run():
        q, out, grad = (meta(B, HQ, S, D, dtype=dtype) for _ in range(3))
        k, v = (meta(B, HKV, S, D, dtype=dtype) for _ in range(2))
        lse = meta(B, HQ, S, dtype=torch.float32)
        saved = Saved(grad, None, out, lse, mask_grad)
        host.backward(attention_call(q, k, v, saved=saved, **options))

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [1, 16, 64, 65, 128, 200, 256])
@pytest.mark.parametrize("arch", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_the_second_kernel_reads_only_blocks_that_the_first_wrote(arch, D, dtype):
    query, key_value = backward_tiles(arch, dtype, D)
    assert query.block_m % key_value.block_m == 0
    assert ROW_UNIT.value % query.block_m == 0
    assert ROW_UNIT.value % query.block_n == ROW_UNIT.value % key_value.block_n == 0


# a few values before the loop; on Hopper, keys and values of wide heads leave no register free, and
# what else is alive outside the loop must go
HOPPER_SPILLS = {64: 64, 128: 320, 256: 400}
if launch.VERSION >= (3, 9):  # which computes the descriptors of products in ordinary registers
    HOPPER_SPILLS[256] = 664


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("arch", SHARED)
def test_fits(arch, D, compiled, tmp_path):
    """Lengths that are no multiple of a block, where more is masked."""
    for kernel in compiled(arch, dense(D, {"is_causal": True}, S=250)).values():
        spills = HOPPER_SPILLS[D] if arch == 90 else 32
        # most of them where gradients are recomputed beside a NaN or Inf
        if (arch, D) == (100, 256):
            spills = 112
        assert_fits(kernel, arch, tmp_path, spills)


@pytest.mark.parametrize("D, causal", [(64, True), (128, False), (128, True), (256, True)])
def test_products_on_hopper_are_asynchronous(D, causal, compiled, tmp_path):
    kernels = compiled(90, dense(D, {"is_causal": causal}))
    for name, products in (("query_grad_kernel", 3), ("key_value_grad_kernel", 4)):
        assert_fits(kernels[name], 90, tmp_path, HOPPER_SPILLS[D])
        loop = main_loop(disassembled(kernels[name].asm["cubin"], tmp_path))
        waits = sum("WARPGROUP.DEPBAR" in one for one in loop)
        # ptxas puts a wait after every instruction of a product that it serialises
        assert waits <= products < sum("HGMMA" in one for one in loop)
        if D < 256:
            assert not any(one.startswith(("LDL", "STL")) for one in loop), name


# of float32; the loop of sm_120 has 3 loads of spilled values among 3756 instructions
SINGLE_SPILLS = {(90, 128): 24, (120, 128): 48} if launch.VERSION == (3, 8) else {(120, 128): 40}


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("arch", [90, 120])
def test_fp32_fits(arch, D, compiled, tmp_path):
    for kernel in compiled(arch, dense(D, {"is_causal": True}, dtype=torch.float32)).values():
        assert_fits(kernel, arch, tmp_path, SINGLE_SPILLS.get((arch, D), 16))


@pytest.mark.parametrize("seed", range(10))
def test_every_feature_compiles(seed, compiled):
    """What the interpreter lets pass, such as a loop variable that changes its type."""
    case = random_case(seed, dtype=(torch.bfloat16, torch.float16)[seed % 2])
    call = with_each(case.fresh(), lambda name, x: x.to("meta"))
    out = meta(case.B, case.Hq, case.Sq, case.Dv, dtype=case.dtype)
    lse = meta(case.B, case.Hq, case.Sq, dtype=torch.float32)

    def run():
        host.backward(call._replace(saved=Saved(out, lse, out, lse, case.mask == "float")))

    assert len(compiled((80, 90)[seed % 2], run)) == 2 + (case.mask == "float")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_compiles_without_spills(causal, compiled, tmp_path):
    def run():
        q, out, grad = (meta(1000, HQ, 64) for _ in range(3))
        k, v = (meta(900, HKV, 64) for _ in range(2))
        ends = meta(B + 1, dtype=torch.int32)
        lse = meta(HQ, 1000, dtype=torch.float32)
        call = attention_call(q, k, v, is_causal=causal, cu_seqlens_q=ends, cu_seqlens_k=ends)
        host.varlen_backward(call._replace(saved=Saved(grad, None, out, lse)))

    for kernel in compiled(80, run).values():
        assert_fits(kernel, 80, tmp_path, 16)
