"""The Triton kernels of lists of blocks without a GPU: registers, memory and instructions."""

import importlib

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")

from fa_ops.backends.triton import launch  # noqa: E402
from fa_ops.call.call import Saved, attention_call  # noqa: E402
from tests.compile_only.sass import assert_fits, disassembled, main_loop  # noqa: E402

host = importlib.import_module("fa_ops.backends.triton.selected")

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

S = 512
NSA, MOBA, TOKENS = (64, 1, 16), (512, 128, 4), (1, 1, 64)  # block_size, query_block, entries


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def compiled(bound):
    """compiled(arch, lists, D): the kernels of a forward and a backward pass, by name."""

    def collect(arch, lists, D, dtype=torch.bfloat16, group=16):
        (size, query_block, n), kernels = lists, bound(arch, host)
        q, k = (meta(1, S, heads, D, dtype=dtype).transpose(1, 2) for heads in (2 * group, 2))
        lists = meta(1, 2, S // query_block, n, dtype=torch.int32)
        options = {"block_size": size, "query_block": query_block, "is_causal": True}
        call = attention_call(q, k, k, block_indices=lists, **options)
        host.selected_forward(call)
        if D <= 256:
            lse = meta(1, 2 * group, S, dtype=torch.float32)
            host.selected_backward(call._replace(saved=Saved(q, None, q, lse)))
        return kernels

    return collect


# Bytes of the stack, most of them where rows are recomputed, and what the loops reload.
STACK, RELOADED = 176, 40


@pytest.mark.parametrize("lists", [NSA, MOBA], ids=["NSA", "MoBA"])
def test_products_on_hopper_are_asynchronous(lists, compiled, tmp_path):
    for name, kernel in compiled(90, lists, 128, group=16 if lists is NSA else 4).items():
        assert_fits(kernel, 90, tmp_path, STACK)
        if name.endswith("grad_kernel") or name == "forward_kernel":
            code = disassembled(kernel.asm["cubin"], tmp_path)
            loop = main_loop(code)
            # of the pass for dk and dv alone, which gathers rows
            most = RELOADED if name == "key_grad_kernel" else 0
            assert sum(line.startswith(("LDL", "STL")) for line in loop) <= most, name
            assert sum("HGMMA" in line for line in loop) >= 12
            assert code.count("WARPGROUP.DEPBAR") <= 3  # none after each product
            assert code.count("LDGSTS.E.BYPASS.128") >= 24  # keys, or rows, are loaded ahead


def test_fits_on_ampere(compiled, tmp_path):
    for kernel in compiled(80, NSA, 128).values():
        assert_fits(kernel, 80, tmp_path, 64)


def test_wide_heads_and_single_keys_fit(compiled, tmp_path):
    for lists, D in ((NSA, 256), (TOKENS, 512)):
        for kernel in compiled(90, lists, D).values():
            assert_fits(kernel, 90, tmp_path, 1024)
