"""SDPA on the operator: aten's operators and autograd on a CPU, where torch has no such kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention

from fa_ops.compat import sdpa

LAYOUTS = {
    "(B, H, S, D)": lambda x: x,
    "(B, S, H, D)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "(S, B, H, D)": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
}
flash = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture
def active():
    """Registers the kernels for CPU tensors."""
    handle = sdpa.activate("CPU")
    yield
    handle.remove()


def inputs(layout, Hkv=4, Sk=9, D=8):
    shapes = (2, 4, 9, D), (2, Hkv, Sk, D), (2, Hkv, Sk, D)
    return tuple(LAYOUTS[layout](torch.randn(shape)).requires_grad_() for shape in shapes)


def expected(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)


CALLS = pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3, "is_causal": True}], ids=str
)


@CALLS
@pytest.mark.parametrize("Hkv", [4, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_gradients_are_those_of_sdpa(layout, Hkv, options, active):
    q, k, v = inputs(layout, Hkv)
    out = flash(q, k, v, **options)[0]
    wanted = expected(q, k, v, **options)
    torch.testing.assert_close(out, wanted)
    assert out.stride() == torch.empty_like(q).stride()
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    for x, found, other in zip((q, k, v), grads, torch.autograd.grad(wanted, (q, k, v), grad)):
        torch.testing.assert_close(found, other)
        assert found.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_results_have_the_layout_of_real_ones(layout, active):
    torch.library.opcheck(flash.default, inputs(layout), test_utils=("test_faketensor",))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_results_and_gradients_are_the_same(layout, active):
    torch._dynamo.reset()

    def block(q, k, v):
        return flash(q * 1.5, k, v, is_causal=True)[0].transpose(1, 2).flatten(2) * 2

    q, k, v = inputs(layout)
    out = torch.compile(block, fullgraph=True)(q, k, v)
    wanted = block(q, k, v)
    torch.testing.assert_close(out, wanted)
    for found, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, wanted))):
        torch.testing.assert_close(found, other)


def test_activation_registers_the_kernels_until_restored():
    assert sdpa.NAME in torch_attention.list_flash_attention_impls()
    q, k, v = inputs("(B, H, S, D)")
    torch_attention.activate_flash_attention_impl("fa_ops")
    try:
        assert torch_attention.current_flash_attention_impl() == "fa_ops"
        assert "sdpa.py" in torch._C._dispatch_dump(f"aten::{sdpa.FORWARD}")
        assert "sdpa.py" in torch._C._dispatch_dump(f"aten::{sdpa.BACKWARD}")
    finally:
        torch_attention.restore_flash_attention_impl()
    assert torch_attention.current_flash_attention_impl() is None
    assert "sdpa.py" not in torch._C._dispatch_dump(f"aten::{sdpa.FORWARD}")
    handle = sdpa.activate("CPU")
    flash(q, k, v)
    handle.remove(), handle.remove()
    with pytest.raises(NotImplementedError):
        flash(q, k, v)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.5}, "dropout_p must be 0 where fa_ops replaces torch's flash kernel"),
        ({"return_debug_mask": True}, "return_debug_mask must be False"),
        ({"is_causal": True, "Sk": 12}, "needs as many queries as keys.*got 9 and 12"),
    ],
)
def test_unsupported_calls_raise(options, message, active):
    q, k, v = inputs("(B, H, S, D)", Sk=options.pop("Sk", 9))
    with pytest.raises(NotImplementedError, match=message):
        flash(q, k, v, **options)


def test_results_without_gradients_are_those_of_sdpa(active):
    q, k, v = inputs("(B, S, H, D)")
    with torch.no_grad():
        out = flash(q, k, v)[0]
        assert not out.requires_grad
        torch.testing.assert_close(out, expected(q, k, v))
