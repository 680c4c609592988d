"""The Hopper kernel of tangents on the CPU, and which calls it takes."""

import ctypes

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fa_ops.backends import hopper
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import structs
from fa_ops.backends.hopper.tangents import TangentConfig, jvp
from fa_ops.call.call import Saved, Tangents, attention_call
from tests.backends.hopper.cuda_as_cpp import needs_compiler
from tests.backends.hopper.cuda_cluster import PTX, compiled
from tests.backends.hopper.cuda_forward import FORWARD_PTX

# After the kernel's own source: `sizes` are B, Hq, Hkv, Sq, Sk, D, CTAs, seed, left and right.
CALL = r"""
#include "tangent.cu"
static TangentParams params;
static void body_of_thread() { tangent(params); }
extern "C" const char* run(u16** data, const int* sizes, float** rows, const int* lens) {
  TangentParams& p = params;
  const int B = sizes[0], Hq = sizes[1], Hkv = sizes[2], Sq = sizes[3], Sk = sizes[4], D = sizes[5];
  static Tensor tensors[6];
  TensorMap* maps[] = {&p.q, &p.k, &p.v, &p.q_t, &p.k_t, &p.v_t};
  for (int i = 0; i < 6; i++) {
    tensors[i] = {data[i], D, i % 3 ? Sk : Sq, i % 3 ? Hkv : Hq, B, i % 3 ? BLOCK_N : 64};
    maps[i]->words[0] = (u64)&tensors[i];
  }
  static int counter;
  counter = 0, p.tile_counter = sizes[7] & 1 ? &counter : nullptr;
  p.out = data[6], p.grad_out = data[7], p.out_t = data[8];
  p.lse = rows[0], p.lse_t = rows[1], p.grad_dot = rows[2], p.kv_lens = lens;
  p.out_strides = p.grad_strides = {(long long)Hq * Sq * D, (long long)Sq * D, D};
  p.B = B, p.Hq = Hq, p.group = Hq / Hkv, p.Sq = Sq, p.Sk = Sk, p.D = p.Dv = D;
  p.window_left = sizes[8], p.window_right = sizes[9];
  p.m_blocks = (Sq + BLOCK_M - 1) / BLOCK_M, p.tiles = p.m_blocks * B * Hq, p.section = B * Hq;
  p.scale = 0.25f, p.scale_log2 = 0.25f * LOG2E;
  gridDim.x = sizes[6];
  for (int i = 0; i < sizes[6]; i++)
    if (const char* found = run_cluster(body_of_thread, i, sizes[7] + i)) return found;
  return nullptr;
}
"""
FAR = 1 << 29
ALL = {"window": 1, "left": 1, "kv_lens": 1, "grad_out": 1}
# features of the kernel, and B, Hq, Hkv, Sq, Sk, left, right, lengths
CASES = {
    "full": ({}, (1, 2, 1, 150, 70, FAR, FAR, None)),
    "causal": ({"window": 1, "grad_out": 1}, (1, 2, 1, 140, 200, FAR, 0, None)),
    "more queries than keys": (ALL, (2, 1, 1, 200, 40, FAR, 0, [40, 40])),
    "window": (ALL, (1, 1, 1, 200, 190, 20, 5, [190])),
    "lengths": (ALL, (3, 2, 2, 70, 90, FAR, 0, [90, 0, 33])),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    made = {}

    def compile(**features):
        key = tuple(features.items())
        if key not in made:
            config = TangentConfig(16, 16, 32, 2)
            machine = PTX.replace(
                "CTAS = 2, THREADS = 512", f"CTAS = 1, THREADS = {config.threads}"
            )
            defines = macros(config, torch.bfloat16, **features)
            folder = tmp_path_factory.mktemp("tangent")
            made[key] = compiled(folder, "tangent.cu", CALL, defines, machine + FORWARD_PTX)
        return made[key]

    return compile


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_tangents_are_those_of_dense_code(name, kernels):
    features, (B, Hq, Hkv, Sq, Sk, left, right, lens) = CASES[name]
    library = kernels(**features)
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        shapes = ((B, Hq, Sq, 16), (B, Hkv, Sk, 16), (B, Hkv, Sk, 16)) * 2
        x = [torch.randn(shape, generator=g).bfloat16() for shape in shapes]
        x[1] += 3  # keys with a mean
        grad_out = torch.randn(B, Hq, Sq, 16, generator=g).bfloat16()
        ends = torch.tensor(lens or [Sk] * B).view(B, 1, 1, 1)
        i, j = torch.arange(Sq).view(-1, 1) + ends - Sq, torch.arange(Sk)
        attended = (j >= i - left) & (j <= i + right) & (j < ends)

        def attend(q, k, v, attended=attended):
            k, v = (x.repeat_interleave(Hq // Hkv, 1) for x in (k, v))
            scores = (q @ k.mT * 0.25).masked_fill(~attended, -1e30)
            p = scores.softmax(-1).where(attended, 0.0)
            return p @ v, scores.logsumexp(-1)

        inputs = tuple(t.double() for t in x)
        (out, lse), (out_t, lse_t) = torch.func.jvp(attend, inputs[:3], inputs[3:])
        empty = ~attended.expand(B, Hq, Sq, Sk).any(-1)
        lse, lse_t = lse.masked_fill(empty, float("-inf")).float(), lse_t.masked_fill(empty, 0.0)
        if lens:
            for b, n in enumerate(lens):
                for t in x[1:3] + x[4:]:
                    t[b, :, n:] = float("nan")
        out = out.bfloat16()
        actual = torch.full((B, Sq, Hq, 16), float("nan")).bfloat16()
        rows = [lse.contiguous(), *(torch.full_like(lse, float("nan")) for _ in range(2))]
        data = (ctypes.c_void_p * 9)(*(t.data_ptr() for t in (*x, out, grad_out, actual)))
        pointers = (ctypes.c_void_p * 3)(*(t.data_ptr() for t in rows))
        sizes = (ctypes.c_int * 10)(B, Hq, Hkv, Sq, Sk, 16, 2, seed, left, right)
        given = None if lens is None else (ctypes.c_int * B)(*lens)
        error = library.run(data, sizes, pointers, given)
        assert error is None, error.decode()
        actual = actual.transpose(1, 2).double()
        assert (actual - out_t).norm() <= 6e-3 * out_t.norm()
        assert (rows[1] - lse_t).norm() <= 1e-5 * lse_t.norm()
        assert not (actual[empty].any() or rows[1][empty].any())
        if "grad_out" in features:
            dot = (out_t * grad_out.double()).sum(-1)
            assert (rows[2] - dot).norm() <= 6e-3 * dot.norm()


def described(D=64, dtype=torch.bfloat16, without=(), device="cuda", **options):
    """A call for tangents of the results, on a device that need not exist."""
    q, k, v = (torch.empty(2, H, 300, D, dtype=dtype, device=device) for H in (4, 2, 2))
    tangents = {"query": q, "key": k, "value": v}
    t = Tangents(**{n: x for n, x in tangents.items() if n not in without})
    saved = Saved(None, None, q, torch.empty(q.shape[:3], device=device))
    return attention_call(q, k, v, saved=saved, **options)._replace(tangents=t)


def test_what_has_no_kernel_is_refused_with_the_reason():
    with FakeTensorMode():
        assert hopper.supports(described(is_causal=True, window_left=30)) is None
        assert hopper.supports(described(72, torch.float16)) is None
        call = described()
        backward = call._replace(saved=call.saved._replace(grad_out=call.query))
        of_results = {"out": call.query, "lse": call.saved.lse}
        backward = backward._replace(tangents=call.tangents._replace(**of_results))
        cases = {
            "tangents of gradients": backward,
            "at most 128, got 192 and 192": described(192),
            "bfloat16 and float16": described(dtype=torch.float32),
            "with softcap": described(softcap=2.0),
            "key has none": described(without=("key",)),
            "positive scale": described(scale=0.0),
        }
        for text, refused in cases.items():
            reason = hopper.supports(refused)
            assert reason and text in reason and "the triton backend can run it" in reason, reason


@pytest.mark.parametrize("D, causal, dynamic", [(64, True, True), (128, False, False)])
def test_a_launch_gets_the_sizes_of_a_call(D, causal, dynamic, driver):
    driver.struct_bytes = structs.struct_layout("tangent.cu", "TangentParams").size
    call = described(D, device="cpu", is_causal=causal)
    out_t, lse_t, dot = jvp(call)
    assert out_t.shape == call.query.shape and lse_t.shape == call.query.shape[:3] and dot is None
    (ctas, _), data = driver.last("tangent")
    fields = structs.struct_layout("tangent.cu", "TangentParams").unpack(data)
    assert fields["Hq"] == (4,) and fields["group"] == (2,) and fields["tiles"] == (24,)
    assert fields["window_right"] == ((0,) if causal else (FAR,)) and ctas <= 24
    assert fields["out_t"] == (out_t.data_ptr(),) and fields["grad_dot"] == (0,)
