"""Short rows with a bias on a GPU: the oracle, repeated gradients, the choice of a backend."""

import random

import pytest
import torch

import fa_ops
from fa_ops.backends.triton import short_rows
from fa_ops.testing import assert_close_to_oracle, assert_right, make_case
from fa_ops.testing.inputs import GRAD_LAYOUTS, LAYOUTS

HALF = (torch.bfloat16, torch.float16)
# few classes of kernels, as each is compiled: (D, Dv, mask_shape)
KINDS = [
    (32, 32, (0, 1, 1, 1)),
    (32, 32, (1, 1, 1, 1)),
    (24, 40, (0, 0, 1, 1)),
    (64, 64, (0, 1, 1, 1)),
]


def windows(number: int, **fields):
    """Windows of one of `KINDS`, by number."""
    seed = fields.get("seed", number)
    r = random.Random(seed)
    D, Dv, shape = KINDS[number % 4]
    H = r.choice((1, 3, 8))
    drawn = {
        "B": r.choice((1, 17, 130)), "Hq": H, "Hkv": H, "Sq": r.choice((1, 33, 49, 64)),
        "Sk": r.choice((1, 35, 49, 64)), "D": D, "Dv": Dv, "mask": "float", "mask_shape": shape,
        "mask_grad": r.random() < 0.8, "mask_holes": r.random() < 0.4,
        "layout": r.choice(LAYOUTS), "grad_layout": r.choice(GRAD_LAYOUTS),
        "lse_grad": r.random() < 0.5, "dtype": HALF[number // 4 % 2],
        "seed": seed, "device": "cuda",
    }  # fmt: skip
    return make_case(**(drawn | fields))


@pytest.mark.parametrize("seed", range(32))
def test_windows(seed, monkeypatch):
    if seed // 8 % 2:  # several windows for each program
        monkeypatch.setattr(short_rows, "multiprocessors", lambda device: 3)
    assert_right(windows(seed), "triton", None, repeated=seed % 4 == 0)


@pytest.mark.parametrize("seed", range(16))
def test_numbers_that_are_not_finite(seed):
    number = ("nan", "inf", "-inf")[seed % 3]
    operand = ("query", "key", "value", "grad_out", "attn_mask")[seed % 5]
    case = windows(seed // 4 * 4, Sq=33, Sk=49, mask_holes=True, poison=f"{number} {operand}")
    assert_right(case, "triton", None, repeated=False)


@pytest.mark.parametrize("seed", range(12))
def test_long_rows(seed):
    r = random.Random(seed)
    D = (32, 64)[seed % 2]
    case = windows(
        0, B=r.choice((1, 20)), Hq=6, Hkv=(6, 2)[seed // 2 % 2], Sq=r.choice((65, 100, 128)),
        Sk=r.choice((65, 100, 128)), D=D, Dv=D, seed=seed,
        mask_shape=((0, 1, 1, 1), (1, 1, 1, 1))[seed // 6],
    )  # fmt: skip
    assert_close_to_oracle(case, "triton", gradients=seed < 3)


def swin(B=64, S=49, requires_grad=True):
    q, k, v = torch.randn(3, B, S, 8, 32, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    bias = torch.randn(1, 8, S, S, device="cuda", dtype=torch.bfloat16)
    return [x.requires_grad_(requires_grad) for x in (q, k, v, bias)]


def test_hopper_leaves_them_to_triton():
    q, k, v, bias = swin(requires_grad=False)
    explained = fa_ops.explain(q, k, v, attn_mask=bias)
    assert (explained.backend, explained.kernel) == ("triton", "forward of short rows")
    named = fa_ops.explain(q, k, v, attn_mask=bias, backend="hopper")
    assert named.backend in ("hopper", None)


def test_gradients_repeat_bitwise():
    q, k, v, bias = swin(2048)
    out = fa_ops.attention(q, k, v, bias)
    grads = [
        torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out), retain_graph=True)
        for _ in range(3)
    ]
    assert all(torch.equal(a, b) for more in grads[1:] for a, b in zip(grads[0], more))


def test_cuda_graphs():
    q, k, v, bias = swin(300, requires_grad=False)
    expected = fa_ops.attention(q, k, v, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fa_ops.attention(q, k, v, bias)
    captured.zero_()
    graph.replay()
    assert torch.equal(expected, captured)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_training(dtype):
    q, k, v, bias = swin(40)
    bias = bias.detach().to(dtype).requires_grad_()
    call = lambda: fa_ops.attention(q, k, v, bias)  # noqa: E731
    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        out = function()
        results.append((out, *torch.autograd.grad(out.float().sin().sum(), (q, k, v, bias))))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(eager, compiled, atol=1e-2, rtol=1e-2)
