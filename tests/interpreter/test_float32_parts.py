"""float32 tensors as three bfloat16 tensors: their sums, their products, and who takes them."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fa_ops.backends.triton import configs, launch
from fa_ops.backends.triton import matrix_products as P
from fa_ops.backends.triton.matrix_products import in_parts, products
from fa_ops.call.options import Options

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1")

TINY, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def parts_of(x):
    """The three parts (3, *x.shape) of a vector x, which has up to 128 elements."""
    x = x.reshape(1, 1, 1, -1)
    return in_parts(x, x, x)[0][:, 0, 0, : x.shape[3]]


def test_the_sum_is_exact():
    generator = torch.Generator().manual_seed(0)
    for exponent in (-110, -60, -1, 0, 30, 127):
        mantissa = torch.rand(128, generator=generator) + 1.0
        x = torch.ldexp(mantissa, torch.tensor(exponent)) * torch.tensor([1.0, -1.0]).repeat(64)
        parts = parts_of(x)
        assert bool(parts.isfinite().all())
        torch.testing.assert_close(parts.double().sum(0), x.double(), atol=0.0, rtol=0.0)
        assert torch.equal(parts, parts.bfloat16().float())
        assert bool((parts[0].abs() >= 2.0**7 * parts[1].abs()).all())
        assert bool((parts[1].abs() >= 2.0**7 * parts[2].abs()).all())


def test_the_largest_numbers_have_finite_parts():
    x = torch.tensor([LARGEST, -LARGEST, math.nextafter(LARGEST, 0.0), 3.39e38])
    parts = parts_of(x)
    assert bool(parts.isfinite().all())
    assert torch.equal(parts.double().sum(0), x.double())


def test_nan_and_inf_are_the_first_part():
    high, *rest = parts_of(torch.tensor([math.nan, math.inf, -math.inf, 1.0]))
    assert bool(high[0].isnan()) and high[1:].tolist() == [math.inf, -math.inf, 1.0]
    assert not any(bool(part.any()) for part in rest)


def test_subnormal_numbers_lose_what_bfloat16_cannot_hold():
    x = torch.tensor([TINY, TINY / 2, TINY * 1.7, 3e-40, 1e-45, 0.0])
    error = (parts_of(x).double().sum(0) - x.double()).abs()
    assert bool((error <= 2.0**-134).all())


def tensors(packed, D, Dv, strided):
    """q, k, v and grad_out of different sizes."""
    generator = torch.Generator().manual_seed(1)
    B, Hq, Hkv, Sq, Sk = 2, 4, 2, 70, 33

    def draw(H, S, width):
        shape = (S, H, width) if packed else (B, H, S, width)
        x = torch.randn(*shape[:-1], width + 4 * strided, generator=generator)[..., :width]
        return x if packed or not strided else x.transpose(1, 2).contiguous().transpose(1, 2)

    return draw(Hq, Sq, D), draw(Hkv, Sk, D), draw(Hkv, Sk, Dv), draw(Hq, Sq, Dv)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("D, Dv, strided", [(16, 16, False), (40, 100, True), (1, 128, False)])
def test_every_element_of_each_tensor(packed, D, Dv, strided):
    given = tensors(packed, D, Dv, strided)
    for x, parts in zip(given, in_parts(*given), strict=True):
        # (3, B, H, S, width), packed (3, T, H, width)
        parts = torch.stack(parts.chunk(3, dim=1 if packed else 0))
        width = x.shape[-1]
        assert torch.equal(parts[..., :width].double().sum(0), x.double())
        assert not parts[..., width:].any()
        assert parts.shape[-1] >= 16 and parts.shape[-1].bit_count() == 1
    without_grad = in_parts(*given[:3])
    assert len(without_grad) == 3 and torch.equal(without_grad[2], in_parts(*given)[2])


@triton.jit
def product_kernel(out, x, y, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x, y = P.parts(tl.load(x + at), None, PRECISION), P.parts(tl.load(y + at), None, PRECISION)
    tl.store(out + at, P.product(x, P.transposed(y), None, PRECISION))


@pytest.mark.parametrize("mode", ["split", "loaded"])
def test_products_are_those_of_float32(mode):
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(64, 64, generator=generator) for _ in range(2))
    out = torch.empty(64, 64)
    product_kernel[(1,)](out, x, y, 64, mode)
    exact, size = x.double() @ y.double().T, x.double().abs() @ y.double().abs().T
    assert ((out - exact).abs() / size).max().item() < 2.0**-22


def test_who_takes_parts(monkeypatch, real_float32_products):
    monkeypatch.setattr(configs, "float32_products", real_float32_products)
    many, q = 1 << 30, torch.empty(1)

    def mode(arch=90, q=q, scores=many, rows=1024, D=64, Dv=64, backward=False, **options):
        monkeypatch.setattr(P, "architecture", lambda device: arch)
        return products(q, scores, rows, (D, Dv), Options(**options), backward)

    assert [a for a in (75, 80, 86, 87, 89, 90, 100, 103, 120) if mode(a) == "split"] == [
        80, 90, 100, 103,
    ]  # fmt: skip
    assert mode(D=128) == mode(D=1, Dv=128) == mode(softcap=0.5) == mode(softcap=30.0) == "split"
    for options in (
        {"q": q.half()}, {"D": 129}, {"D": 16, "Dv": 192}, {"softcap": 0.25},
    ):  # fmt: skip
        assert mode(**options) == mode(rows=1, **options) == "ieee", options
    monkeypatch.setattr(P, "precision", lambda dtype: "tf32")
    assert mode() == "tf32"


def test_few_rows_are_divided_as_they_are_loaded(real_float32_products):
    """The rows of the H200 that the rule was made from: (heads, tokens, features)."""

    def mode(H, S, D, is_causal=False, backward=False, arch=90):
        return real_float32_products(arch, H * S * S, S, D, is_causal, backward)

    for H, S, D in ((8, 512, 32), (8, 128, 128)):
        assert mode(H, S, D) == "loaded" and mode(H, S, D, arch=80) == "ieee"
    for H, S, D in ((8, 1024, 64), (8, 512, 128), (2048, 257, 64)):
        assert mode(H, S, D) == mode(H, S, D, arch=80) == "split"
    assert mode(2048, 256, 64) == mode(1024, 512, 64, is_causal=True) == "loaded"
    assert mode(1024, 513, 64, is_causal=True) == "split"
    assert mode(4096, 128, 64, backward=True) == mode(1024, 256, 128, True, True) == "loaded"
    assert mode(2048, 129, 64, backward=True) == mode(1024, 257, 128, True, True) == "split"
    assert mode(2048, 128, 64, arch=80) == "split"
