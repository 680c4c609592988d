"""A training call of the Hopper backend on the host, from the public function to the launches.

Tensors are on the CPU, and the driver records its calls."""

import ctypes
import struct

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper import backward as dense_backward
from fa_ops.backends.hopper import forward as dense_forward
from fa_ops.backends.hopper import masks
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import Saved, attention_call, general
from fa_ops.call.options import NO_OPERANDS
from fa_ops.plans import dispatch, planning
from fa_ops.testing.inputs import poisoned_memory
from tests.backends.hopper import test_backward_host as host

driver = host.driver
OF_FORWARD = dense_forward._PARAMS.fields["bias"].offset  # bytes


@pytest.fixture
def noted(driver, monkeypatch):
    """Calls of CPU tensors go to the backend, whose kernels are only noted."""
    read = driver.read

    def params(name, at):
        if name not in ("forward", "pack_rows", "pack_columns"):
            return read(name, at)
        return ctypes.string_at(ctypes.cast(at, ctypes.POINTER(ctypes.c_void_p))[0], OF_FORWARD)

    driver.read = params
    monkeypatch.setattr(hopper, "support_error", lambda *call: None)
    monkeypatch.setattr(dispatch, "_available", {"hopper": None})
    monkeypatch.setattr(dispatch, "AUTO", {"cpu": ("hopper",)})
    return driver


def prepared():
    """What runs the only forward pass, and its only backward pass."""
    forward, backward = planning._prepared.values()
    return forward.run, backward.run


def assert_hopper_runs_both():
    """Without copies, so that nothing but launches is left to do in a call."""
    modules = [run.__module__ for run in prepared()]
    assert modules == [dense_forward.__name__, dense_backward.__name__]


def inputs(D=64, offset=0):
    """bf16 (B, H, S, D), rows of all heads side by side, `offset` elements into their memory."""
    memory = [
        torch.zeros(2 * 96 * H * D + offset, dtype=torch.bfloat16)[offset:] for H in (4, 2, 2)
    ]
    q, k, v = (t.view(2, 96, -1, D).transpose(1, 2).requires_grad_() for t in memory)
    return q, k, v


def addresses(products):
    """Of q, k, v, grad_out, dq, dk and dv."""
    return [struct.unpack_from("<Q", products, 128 * i)[0] for i in range(7)]


def train(noted, q, k, v, grad_out=None, **options):
    """Gradients and what the product kernel was launched with."""
    out = fa_ops.attention(q, k, v, is_causal=True, **options)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    products = noted.last("backward")[1]
    assert host.of_params(products)["out"] == (out.data_ptr(),)
    return grads, products


def test_each_call_has_its_own_tensors_and_the_same_sizes(noted):
    at = dense_backward._ADDRESSES.size  # what calls share stands behind
    packed = [train(noted, *inputs())[1][at:] for _ in range(2)]
    q, k, v = inputs()
    grad_out = torch.zeros(2, 96, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    grads, products = train(noted, q, k, v, grad_out)
    assert addresses(products) == [t.data_ptr() for t in (q, k, v, grad_out, *grads)]
    assert [g.stride() for g in grads] == [t.stride() for t in (q, k, v)]
    assert_hopper_runs_both()
    out, lse = prepared()[0](*(t.detach() for t in (q, k, v)), NO_OPERANDS)
    dense_backward.backward(
        attention_call(q, k, v, is_causal=True, saved=Saved(grad_out, None, out, lse))
    )
    expected = noted.last("backward")[1][at:]
    assert packed == [expected] * 2 and products[at:] == expected


def test_gradients_laid_out_otherwise(noted):
    q, k, v = inputs()
    for grad_out in (
        torch.zeros(2, 4, 96, 64, dtype=torch.bfloat16),
        torch.zeros(2, 96, 4, 72, dtype=torch.bfloat16).transpose(1, 2)[..., :64],
        torch.zeros(2, 96, 4, 64, dtype=torch.bfloat16).transpose(1, 2),
    ):
        _, products = train(noted, q, k, v, grad_out)
        assert addresses(products)[3] == grad_out.data_ptr()
        assert host.of_params(products)["strides"][9:12] == grad_out.stride()[:3]
    one = torch.zeros(1, dtype=torch.bfloat16)
    apart = torch.zeros(2, 4, 64, 96, dtype=torch.bfloat16).mT
    shifted = torch.zeros(2 * 4 * 96 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 4, 96, 64)
    for grad_out in (one.expand(2, 4, 96, 64), apart, shifted):
        _, products = train(noted, q, k, v, grad_out)
        assert addresses(products)[3] != grad_out.data_ptr()
        assert host.of_params(products)["strides"][9:12] == (4 * 96 * 64, 96 * 64, 64)


def test_tensors_that_no_copy_reads_are_copied_in_each_call(noted):
    train(noted, *inputs())
    q, k, v = inputs(offset=1)
    grads, products = train(noted, q, k, v)
    assert len(planning._prepared) == 2
    assert not any(at % 16 for at in addresses(products))
    assert not {t.data_ptr() for t in (q, k, v)} & set(addresses(products))
    assert [g.stride() for g in grads] == [t.stride() for t in (q, k, v)]


def test_layouts_that_no_copy_reads_are_run_by_the_functions_that_copy(noted):
    q, k, v = inputs(D=24)
    q = torch.zeros(2, 4, 96, 28, dtype=torch.bfloat16)[..., :24].requires_grad_()
    grads, _ = train(noted, q, k, v)
    assert [run.__module__ for run in prepared()] == [general.__module__] * 2
    assert grads[0].stride() == torch.empty_like(q).stride()


def test_tensor_options_of_each_call_reach_the_kernels(noted):
    sinks = torch.zeros(4, requires_grad=True)
    for _ in range(3):
        lens = torch.tensor([96, 7], dtype=torch.int32)
        ranges, slopes = torch.zeros(2, 1, 96, 2, dtype=torch.int32), torch.ones(4)
        q, k, v = inputs()
        options = {"kv_lens": lens, "key_ranges": ranges, "alibi_slopes": slopes, "sinks": sinks}
        out = fa_ops.attention(q, k, v, **options)
        words = struct.unpack_from("<7Q", noted.last("forward")[1], 384)
        assert words[0] == out.data_ptr()
        assert words[2:6] == tuple(t.data_ptr() for t in (lens, ranges, sinks, slopes))
        *grads, dsinks = torch.autograd.grad(out, (q, k, v, sinks), torch.zeros_like(out))
        assert dsinks.shape == (4,) and grads[0].shape == q.shape
        found = host.of_params(noted.last("backward")[1])
        assert (found["kv_lens"], found["alibi"]) == ((lens.data_ptr(),), (slopes.data_ptr(),))
        runs = noted.last("clip_ranges")[1]
        assert (runs["ranges"], runs["kv_lens"]) == ((ranges.data_ptr(),), (lens.data_ptr(),))
        assert_hopper_runs_both()


def test_masks_reach_the_kernels(noted):
    for _ in range(2):
        mask = torch.ones(96, 96, dtype=torch.bool)
        noted.launched.clear()
        _, products = train(noted, *inputs(), attn_mask=mask)
        by_query = packed_mask(noted.last("pack_rows")[1])
        by_key = packed_mask(noted.last("pack_columns")[1])
        assert by_query["mask"] == by_key["mask"] == (mask.data_ptr(),)
        forward = dense_forward._PARAMS.unpack(noted.last("forward")[1])
        assert forward["mask"] == by_query["bits"]
        assert host.of_params(products)["by_key"][0] == by_key["bits"][0]
        names = [one.name for one in noted.launched]
        assert names[:3] == ["pack_rows", "forward", "pack_columns"]  # one launch for each
        assert_hopper_runs_both()


def test_float_masks_are_read_in_place_where_rows_are_aligned(noted):
    layout = struct_layout("masks.cuh", "Bias")
    at = dense_forward._PARAMS.fields["bias"].offset
    noted.read = lambda name, pointers: ctypes.string_at(
        ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))[0], at + layout.size
    )

    def address(mask):
        out = fa_ops.attention(*(t.detach() for t in inputs()), mask, backend="hopper")
        assert out.shape == (2, 4, 96, 64)
        params = noted.last("forward")[1]
        return layout.unpack(params[at : at + layout.size])["data"][0]

    memory = torch.zeros(96 * 96 + 8)
    for offset in (0, 4, 8, 0):
        mask = memory[offset : offset + 96 * 96].view(96, 96)
        assert address(mask) == mask.data_ptr()
    (forward,) = planning._prepared.values()
    assert forward.run.__module__ == dense_forward.__name__
    mask = memory[1 : 1 + 96 * 96].view(96, 96)  # of the same geometry, but for its alignment
    assert address(mask) != mask.data_ptr() and len(planning._prepared) == 1
    odd = torch.zeros(96, 97)[:, :96]
    assert address(odd) != odd.data_ptr()


def packed_mask(params):
    return masks._LAYOUT.unpack(params)


def test_results_that_no_kernel_writes_are_nan_under_test(noted, monkeypatch):
    zeros = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype).zero_()  # noqa: E731
    for module in (dense_forward, dense_backward):
        monkeypatch.setattr(module, "empty", zeros)
    with poisoned_memory():
        out = fa_ops.attention(*inputs(), return_lse=True)
        (q, k, v), grad_out = inputs(), torch.zeros_like(out[0])
        grads = dense_backward.backward(attention_call(q, k, v, saved=Saved(grad_out, None, *out)))
    assert all(t.isnan().all() for t in (*out, *grads[:3]))


def words_at(name, params):
    """The words (4 * 2, 128) of two batches of four heads, read while the kernel is launched."""
    layouts = {"forward": dense_forward._PARAMS, "backward": dense_backward._PARAMS}
    if name not in layouts:
        return params
    at = layouts[name].fields["dropout"].offset
    address, rows = struct.unpack_from("<Qi", params, at)
    assert rows == 128 and address % 16 == 0  # bulk loads
    words = bytearray(ctypes.string_at(address, 4 * 8 * rows))
    return torch.frombuffer(words, dtype=torch.int32).view(8, rows)


@pytest.mark.parametrize("layout", ["contiguous", "heads last", "misaligned"])
def test_words_of_dropout_take_the_place_of_those_that_a_kernel_writes(noted, layout):
    read = noted.read
    noted.read = lambda name, at: words_at(name, read(name, at))
    words = torch.arange(2 * 4 * 96, dtype=torch.int32).view(2, 4, 96) - 300
    if layout == "heads last":
        words = words.mT.contiguous().mT
    if layout == "misaligned":
        words = torch.cat([words.new_zeros(1), words.flatten()])[1:].view(2, 4, 96)
    q, k, v = inputs()
    out, _ = torch.ops.fa.attention_with_lse(q, k, v, None, 0.5, dropout_seed=words)
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert [one.name for one in noted.launched] == [
        "forward", "preprocess", "backward", "postprocess"
    ]  # fmt: skip
    for name in ("forward", "backward"):
        assert torch.equal(noted.last(name)[1][:, :96], words.reshape(8, 96))
