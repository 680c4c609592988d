"""Packed calls of the Hopper backend on the host: CPU tensors, and a driver that notes launches."""

import ctypes
import struct

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper import backward as dense_backward
from fa_ops.backends.hopper import forward as dense_forward
from fa_ops.backends.hopper import masks, packed
from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.call.call import Saved, attention_call, general
from fa_ops.plans import dispatch, planning
from tests.backends.hopper import test_backward_host as host

RANGES, SEEDS = packed._PARAMS, masks._ROW_SEEDS
LENGTHS = (5, 0, 40, 51)
TOKENS, BOUNDED = sum(LENGTHS), {"is_causal": True, "window": (7, None)}


def of_call(name, pointers):
    """The parameters of a kernel by name, or the struct that it reads."""
    layout = {"packed_ranges": RANGES, "row_seeds": SEEDS}.get(name)
    if name == "forward":
        at = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))[0]
        return ctypes.string_at(at, dense_forward._PARAMS.fields["bias"].offset)
    if layout is None:
        return host.read(name, pointers)
    fields = enumerate(layout.fields.values())
    read = {f.name: (f.format, ctypes.string_at(pointers[i], f.size)) for i, f in fields}
    return {name: struct.unpack("<" + format, data)[0] for name, (format, data) in read.items()}


@pytest.fixture
def noted(driver, monkeypatch):
    driver.read = of_call
    monkeypatch.setattr(hopper, "support_error", lambda *call: None)
    monkeypatch.setattr(dispatch, "_available", {"hopper": None})
    monkeypatch.setattr(dispatch, "AUTO", {"cpu": ("hopper",)})
    monkeypatch.setattr(planning, "_check_of_values", lambda call: None)  # as on a GPU
    return driver


def ends():
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


def tokens(heads, offset=0, D=64):
    memory = torch.zeros(TOKENS * heads * D + offset, dtype=torch.bfloat16)
    return memory[offset:].view(TOKENS, heads, D).requires_grad_()


def inputs(offset=0):
    return tokens(4, offset), tokens(2, offset), tokens(2, offset)


def of_forward(noted):
    return dense_forward._PARAMS.unpack(noted.last("forward")[1])


def modules():
    return [one.run.__module__ for one in planning._prepared.values()]


def test_each_call_has_its_own_tensors(noted):
    for _ in range(3):
        (q, k, v), ends_q, ends_k = inputs(), ends(), ends()
        lens = torch.tensor([5, 0, 3, 51], dtype=torch.int32)
        noted.launched.clear()
        out, lse = fa_ops.attention_varlen(
            q, k, v, ends_q, ends_k, kv_lens=lens, return_lse=True, **BOUNDED
        )
        assert [one.name for one in noted.launched] == ["packed_ranges", "forward"]
        assert out.shape == (TOKENS, 4, 64) and out.is_contiguous()
        assert lse.shape == (4, TOKENS) and lse.is_contiguous()
        (grid, ranges), found = noted.last("packed_ranges"), of_forward(noted)
        at = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "kv_lens": lens}
        assert {name: ranges[name] for name in at} == {n: t.data_ptr() for n, t in at.items()}
        sizes = {"sequences": 4, "Tq": TOKENS, "Tk": TOKENS, "window_left": 7, "window_right": 0}
        assert {name: ranges[name] for name in sizes} == sizes and grid == (1, 1)
        assert found["key_ranges"] == (ranges["ranges"],)
        assert (found["out"], found["lse"]) == ((out.data_ptr(),), (lse.data_ptr(),))
        rows = [found[name][0] for name in ("q_rows", "k_rows", "v_rows")]
        assert rows == [t.data_ptr() for t in (q, k, v)]
        grads = torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        names = [one.name for one in noted.launched[2:]]
        assert names == ["packed_ranges", "clip_ranges", "preprocess", "backward", "postprocess"]
        ranges, products = (noted.last(name)[1] for name in ("packed_ranges", "backward"))
        assert {name: ranges[name] for name in at} == {n: t.data_ptr() for n, t in at.items()}
        assert noted.last("clip_ranges")[1]["ranges"] == (ranges["ranges"],)
        of_products = host.of_params(products)["tensors"]
        assert of_products[:3] + of_products[4:] == tuple(t.data_ptr() for t in (q, k, v, *grads))
        assert [g.stride() for g in grads] == [t.stride() for t in (q, k, v)]
    assert modules() == [packed.__name__, packed.__name__]


def test_the_dense_kernels_find_one_long_sequence(noted):
    q, k, v = inputs()
    out, lse = fa_ops.attention_varlen(q, k, v, ends(), ends(), return_lse=True, **BOUNDED)
    grad_out, grad_lse = torch.zeros_like(out), torch.zeros_like(lse)
    torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse))
    forward, backward = (noted.last(name)[1] for name in ("forward", "backward"))
    rows = host.of_params(noted.last("preprocess")[1])
    assert (rows["grad_lse"], rows["saved_lse"]) == ((grad_lse.data_ptr(),), (lse.data_ptr(),))
    ranges = torch.zeros(1, 1, TOKENS, 2, dtype=torch.int32)
    dense = [t.detach().transpose(0, 1)[None] for t in (q, k, v, grad_out, out)]
    dense_forward.forward(attention_call(*dense[:3], key_ranges=ranges))
    at = dense_forward._PARAMS.fields["q_strides"].offset
    assert noted.last("forward")[1][at:] == forward[at:]
    q, k, v, grad_out, out = dense
    saved = Saved(grad_out, grad_lse[None], out, lse[None])
    dense_backward.backward(attention_call(q, k, v, key_ranges=ranges, saved=saved))
    at = dense_backward._PARAMS.fields["B"].offset
    assert noted.last("backward")[1][at:] == backward[at:]


@pytest.mark.parametrize("shape", [(4,), (4, 4)], ids=["heads", "batch and heads"])
def test_slopes_and_positions(noted, shape):
    for _ in range(2):
        (q, k, v), slopes = inputs(), torch.ones(shape)
        noted.launched.clear()
        out = fa_ops.attention_varlen(q, k, v, ends(), ends(), alibi_slopes=slopes, **BOUNDED)
        assert [one.name for one in noted.launched] == ["packed_ranges", "forward"]
        ranges, found = noted.last("packed_ranges")[1], of_forward(noted)
        assert ranges["positions"] == TOKENS
        assert found["positions"] == (ranges["ranges"] + 8 * TOKENS,)
        assert found["alibi"] == (slopes.data_ptr(),)
        assert found["alibi_b"] == (0 if len(shape) == 1 else 4,)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        grid, ranges = noted.last("packed_ranges")
        found = host.of_params(noted.last("backward")[1])
        assert ranges["positions"] == 2 * TOKENS and grid == (1, 1)
        assert found["positions"] == (ranges["ranges"] + 8 * TOKENS,)
        assert found["alibi"] == (slopes.data_ptr(),)
        assert found["alibi_b"] == (0 if len(shape) == 1 else 4,)
    assert modules() == [packed.__name__, packed.__name__]


@pytest.mark.parametrize("ends, kind", [(ends(), 2), (torch.zeros(1).int(), 0)], ids=["4", "none"])
def test_slopes_of_no_sequence_are_not_read(noted, monkeypatch, ends, kind):
    made = {}

    def program(source, entry, defines):
        made[entry] = dict(defines)
        return entry

    monkeypatch.setattr(nvrtc, "program", program)
    (q, k, v), slopes = inputs(), torch.ones(len(ends) - 1, 4)
    out = fa_ops.attention_varlen(q, k, v, ends, ends, alibi_slopes=slopes)
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert noted.last("packed_ranges")[1]["positions"] == TOKENS * kind
    assert made["forward"]["HAS_ALIBI"] == made["backward"]["HAS_ALIBI"] == kind


def test_dropout_and_sinks(noted):
    sinks = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    borders = ends() + 0
    borders[0], borders[-1] = 2, TOKENS - 3
    for _ in range(2):
        q, k, v = inputs()
        noted.launched.clear()
        out, lse = fa_ops.attention_varlen(
            q, k, v, borders, borders, dropout_p=0.5, sinks=sinks, return_lse=True
        )
        assert [one.name for one in noted.launched] == ["packed_ranges", "row_seeds", "forward"]
        grid, seeds = noted.last("row_seeds")
        at = borders.data_ptr()
        assert (seeds["cu_seqlens_q"], seeds["cu_seqlens_k"]) == (at, at)
        sizes = {"sequences": 4, "heads": 4, "rows": 128, "count": 512}
        assert {name: seeds[name] for name in sizes} == sizes and grid == (2, 1)
        found = of_forward(noted)
        assert found["dropout"][0] == seeds["row_seeds"]
        assert found["sinks"][0] not in (0, sinks.data_ptr())  # as float32
        outside = torch.zeros(TOKENS, dtype=torch.bool)
        outside[:2] = outside[-3:] = True
        assert torch.equal(lse.isneginf().all(0), outside)
        seed = seeds["seed"]
        *grads, dsinks = torch.autograd.grad(out, (q, k, v, sinks), torch.zeros_like(out))
        assert noted.last("row_seeds")[1]["seed"] == seed
        rows = host.of_params(noted.last("preprocess")[1])
        assert rows["saved_lse"] == (lse.data_ptr(),) and dsinks.shape == (4,)
    assert modules() == [packed.__name__, packed.__name__]


def test_tensors_that_tma_cannot_read_are_copied_in_each_call(noted):
    for offset in (0, 1, 8):
        q, k, v = inputs(offset)
        out = fa_ops.attention_varlen(q, k, v, ends(), ends())
        is_copied = bool(offset % 8)
        assert (of_forward(noted)["q_rows"] != (q.data_ptr(),)) == is_copied
        grads = torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        at = host.of_params(noted.last("backward")[1])["tensors"]
        assert (at[0] != q.data_ptr()) == is_copied and not any(x % 16 for x in at)
        assert [g.stride() for g in grads] == [t.stride() for t in (q, k, v)]


@pytest.mark.parametrize("D", [64, 24])
def test_layouts_of_projections(noted, D):
    """Query, key and value as slices of one tensor, whose rows are aligned or not."""
    parts = torch.zeros(TOKENS, 3, 4, D + D % 16 // 2, dtype=torch.bfloat16)[..., :D]
    parts.requires_grad_()
    q, k, v = parts.unbind(1)
    out = fa_ops.attention_varlen(q, k, v, ends(), ends())
    assert out.shape == (TOKENS, 4, D) and out.is_contiguous() and not out._is_view()
    grads = torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert [g.stride() for g in grads] == [torch.empty_like(t).stride() for t in (q, k, v)]
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)]
    assert {*modules()} <= {packed.__name__, packed.__name__, general.__module__}
