"""Kernels that multiply float32 in parts, without a GPU: registers, memory and instructions."""

import importlib

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")


from fa_ops.backends.triton import configs, launch, matrix_products  # noqa: E402
from fa_ops.backends.triton.backward_kernels import ROW_UNIT  # noqa: E402
from fa_ops.backends.triton.configs import backward_tiles  # noqa: E402
from fa_ops.call.call import Saved, attention_call  # noqa: E402
from tests.compile_only.sass import assert_fits, disassembled, innermost_loop  # noqa: E402

HOSTS = [importlib.import_module(f"fa_ops.backends.triton.{x}") for x in ("forward", "backward")]
FORWARD, BACKWARD = HOSTS

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

B, HQ, HKV, S = 2, 4, 2, 256
# Bytes that threads keep in memory, most of them before and behind the loops.
SPILLS = {
    "forward_kernel": {32: 48, 64: 48, 128: 16},
    "query_grad_kernel": {32: 32, 64: 16, 128: 16},
    # gradients of 32 features: the fastest tile has 168 registers, so that three programs share a
    # multiprocessor
    "key_value_grad_kernel": {32: 384, 64: 88, 128: 64},
    "parts_kernel": dict.fromkeys((32, 64, 128), 0),
}
# The same numbers where other releases of Triton than 3.7, and their ptxas, keep more, by
# architecture, and what packed calls have more than dense ones. The tiles are the same.
MORE_SPILLS = {
    (3, 6): {
        (80, "query_grad_kernel", 64): 96,
        (80, "key_value_grad_kernel", 64): 592,
        (90, "key_value_grad_kernel", 32): 400,
        **{(100, "parts_kernel", D): 8 for D in (32, 64, 128)},
    },
    (3, 8): {(100, "key_value_grad_kernel", 64): 192},
    (3, 9): {
        (90, "key_value_grad_kernel", 32): 400,
        (90, "forward_kernel", 64): 72,
        (90, "query_grad_kernel", 64): 96,
        (90, "key_value_grad_kernel", 64): 96,
        (90, "query_grad_kernel", 128): 32,
        (90, "key_value_grad_kernel", 128): 352,
        (100, "key_value_grad_kernel", 64): 136,
    },
}.get(launch.VERSION, {})
MORE_OF_PACKED = {(3, 6): 80, (3, 8): 56, (3, 9): 160}.get(launch.VERSION, 40)
# Kernels for Hopper that read or write spilled values in their loops.
SPILLING_LOOPS = {("key_value_grad_kernel", 32)} | {
    (3, 8): {("forward_kernel", 32), ("forward_kernel", 64)},
    (3, 9): {
        ("forward_kernel", 64),
        ("query_grad_kernel", 64),
        ("key_value_grad_kernel", 128),
    },
}.get(launch.VERSION, set())


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def compiled(monkeypatch, bound):
    """compiled(arch, run): the kernels that `run` binds, by name, compiled for `arch`; `mode` is
    how they multiply float32.
    """

    def collect(arch, run, mode="split"):
        kernels = bound(arch, *HOSTS, matrix_products)
        monkeypatch.setattr(configs, "float32_products", lambda *call: mode)
        run()
        return kernels

    return collect


def forward(D, options, S=S):
    return lambda: FORWARD.forward(
        attention_call(meta(B, HQ, S, D), *(meta(B, HKV, S, D) for _ in "kv"), **options)
    )


def backward(D, options, S=S, mask_grad=False):
    def run():
        q, out, grad = (meta(B, HQ, S, D) for _ in range(3))
        k, v = (meta(B, HKV, S, D) for _ in range(2))
        saved = Saved(grad, None, out, meta(B, HQ, S), mask_grad)
        BACKWARD.backward(attention_call(q, k, v, saved=saved, **options))

    return run


@pytest.mark.parametrize("D", [16, 32, 64, 128])
@pytest.mark.parametrize("arch", [80, 90, 100, 103])
def test_the_second_kernel_reads_only_blocks_that_the_first_wrote(arch, D):
    query, key_value = backward_tiles(arch, torch.float32, D, "split")
    assert query.block_m % key_value.block_m == 0
    assert ROW_UNIT.value % query.block_m == 0
    assert ROW_UNIT.value % query.block_n == ROW_UNIT.value % key_value.block_n == 0


@pytest.mark.parametrize("run", [forward, backward], ids=["forward", "backward"])
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_fits(arch, D, run, compiled, tmp_path):
    """Lengths that are no multiple of a block, where more is masked."""
    kernels = compiled(arch, run(D, {"is_causal": True}, S=250))
    assert len(kernels) == (2 if run is forward else 3)
    for name, kernel in kernels.items():
        assert_fits(kernel, arch, tmp_path, MORE_SPILLS.get((arch, name, D), SPILLS[name][D]))


@pytest.mark.parametrize("D", [32, 64, 128])
def test_products_on_hopper(D, compiled, tmp_path):
    """Six for each of float32, none of which waits alone, and no spilled value between them."""
    options = {"is_causal": True}
    kernels = compiled(90, forward(D, options)) | compiled(90, backward(D, options))
    products = {"forward_kernel": 2, "query_grad_kernel": 3, "key_value_grad_kernel": 4}
    for name, count in products.items():
        loop = innermost_loop(disassembled(kernels[name].asm["cubin"], tmp_path))
        assert sum("HGMMA" in one for one in loop) >= 6 * count, name
        if (name, D) not in SPILLING_LOOPS:
            assert not any(one.startswith(("LDL", "STL")) for one in loop), name


# The same of kernels that divide float32 as they load it, with Triton 3.7; no limit but one that is
# rounded up is known of the others.
LOADED = {
    "forward_kernel": {32: 0, 64: 8, 128: 24},
    "query_grad_kernel": {32: 0, 64: 0, 128: 0},
    "key_value_grad_kernel": {32: 144, 64: 128, 128: 8},
}
MORE_OF_LOADED = 0 if launch.VERSION == (3, 7) else 512


@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("run", [forward, backward], ids=["forward", "backward"])
def test_division_of_what_is_loaded(run, D, compiled, tmp_path):
    """One launch less, and the same products."""
    kernels = compiled(90, run(D, {"is_causal": True}, S=250), "loaded")
    assert kernels.keys() == (
        {"forward_kernel"} if run is forward else {"query_grad_kernel", "key_value_grad_kernel"}
    )
    products = {"forward_kernel": 2, "query_grad_kernel": 3, "key_value_grad_kernel": 4}
    for name, kernel in kernels.items():
        assert_fits(kernel, 90, tmp_path, LOADED[name][D] + MORE_OF_LOADED)
        loop = innermost_loop(disassembled(kernel.asm["cubin"], tmp_path))
        assert sum("HGMMA" in one for one in loop) >= 6 * products[name]


@pytest.mark.parametrize("arch, D", [(80, 128), (90, 64)])
@pytest.mark.parametrize("run", [forward, backward], ids=["forward", "backward"])
def test_every_feature_compiles(run, arch, D, compiled):
    options = dict(
        is_causal=True, window_left=9, key_ranges=meta(B, HQ, S, 2, dtype=torch.int32),
        softcap=20.0, alibi_slopes=meta(HQ), attn_mask=meta(B, HQ, S, S), dropout_p=0.1,
        dropout_seed=meta(1, dtype=torch.int64), kv_lens=meta(B, dtype=torch.int32),
    )  # fmt: skip
    if run is forward:
        assert len(compiled(arch, forward(D, options | {"sinks": meta(HQ)}))) == 2
    else:
        assert len(compiled(arch, backward(D, options, mask_grad=True))) == 4


def test_packed_compiles(compiled, tmp_path):
    def run():
        ends, lse = meta(B + 1, dtype=torch.int32), meta(HQ, 1000)
        q, out, grad = (meta(1000, HQ, 64) for _ in range(3))
        k, v = (meta(900, HKV, 64) for _ in range(2))
        call = attention_call(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
        FORWARD.varlen_forward(call)
        BACKWARD.varlen_backward(call._replace(saved=Saved(grad, None, out, lse)))

    for name, kernel in compiled(90, run).items():
        # with the bounds of sequences
        assert_fits(kernel, 90, tmp_path, SPILLS[name][64] + MORE_OF_PACKED)
