"""The Triton kernels of tangents without a GPU: registers and shared memory."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")


from fa_ops.backends.triton import launch, tangents  # noqa: E402
from fa_ops.call.call import Saved, Tangents, attention_call  # noqa: E402
from tests.compile_only.sass import SHARED, assert_fits  # noqa: E402

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

B, HQ, HKV, S = 2, 4, 2, 250


def meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(bound, arch, D, dtype=torch.bfloat16, of_query_alone=False, **options):
    """The kernels of a causal call, by name, compiled for `arch`."""
    kernels = bound(arch, tangents)
    q, out, grad, q_t, out_t, grad_t = (meta(B, HQ, S, D, dtype=dtype) for _ in range(6))
    k, v, k_t, v_t = (meta(B, HKV, S, D, dtype=dtype) for _ in range(4))
    rows = [meta(B, HQ, S, dtype=torch.float32) for _ in range(4)]
    saved = Saved(grad, rows[0], out, rows[1])
    call = attention_call(q, k, v, is_causal=True, saved=saved, **options)
    of = Tangents(q_t, k_t, v_t, None, None, grad_t, rows[2], out_t, rows[3])
    if of_query_alone:
        call = call._replace(saved=saved._replace(grad_lse=None))
        of = of._replace(key=None, value=None, grad_out=None, grad_lse=None)
    of_results = of._replace(grad_out=None, grad_lse=None, out=None, lse=None)
    with_sum = call if not of_query_alone else call._replace(saved=saved._replace(grad_out=None))
    tangents.jvp(with_sum._replace(tangents=of_results))
    tangents.backward_jvp(call._replace(tangents=of))
    return kernels


# Bytes that a thread spills, by architecture and head dimension; those not listed spill 16 at most.
# On Hopper with eight warps in place of four fewer are spilled, and the gradients' tangents take
# three times as long. Of float32, whose products are those of the ordinary units, no time is known.
SPILLS = {
    (80, 64): 88, (80, 128): 56, (89, 64): 48, (90, 64): 392, (90, 128): 568, (120, 64): 80,
    (120, 128): 24,
}  # fmt: skip
SPILLS_SINGLE = {64: 696, 128: 336, 256: 656}
if launch.VERSION >= (3, 8):
    SPILLS_SINGLE |= {64: 704, 128: 368}
    if launch.VERSION >= (3, 9):
        SPILLS[89, 128] = 48
    else:
        SPILLS |= {(80, 64): 104, (80, 256): 24, (90, 128): 576, (100, 256): 24}


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("arch", SHARED)
def test_fits(arch, D, bound, tmp_path):
    kernels = compiled(bound, arch, D)
    assert len(kernels) == 3
    for kernel in kernels.values():
        assert_fits(kernel, arch, tmp_path, SPILLS.get((arch, D), 16))


@pytest.mark.parametrize("D", [64, 128, 256])
def test_float32_fits(D, bound, tmp_path):
    for kernel in compiled(bound, 90, D, torch.float32).values():
        assert_fits(kernel, 90, tmp_path, SPILLS_SINGLE[D])


def test_a_tangent_of_the_query_alone(bound, tmp_path):
    for kernel in compiled(bound, 90, 64, of_query_alone=True).values():
        assert_fits(kernel, 90, tmp_path, SPILLS[90, 64])


def test_every_option_compiles(bound):
    options = {
        "softcap": 2.0, "dropout_p": 0.1, "dropout_seed": meta(1, dtype=torch.int64),
        "alibi_slopes": meta(HQ, dtype=torch.float32), "window_left": 64,
        "sinks": meta(HQ, dtype=torch.float32), "attn_mask": meta(1, 1, S, S, dtype=torch.bfloat16),
        "kv_lens": torch.empty(B, dtype=torch.int32, device="meta"),
        "key_ranges": torch.empty(1, 1, S, 2, dtype=torch.int32, device="meta"),
    }  # fmt: skip
    assert len(compiled(bound, 90, 64, **options)) == 3
