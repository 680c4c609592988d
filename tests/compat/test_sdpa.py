"""SDPA on the operator: aten's operators and autograd on a CPU, where torch has no such kernels."""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.library import Library
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn

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


def dumped(name):
    """The registered kernels of an operator."""
    return torch._C._dispatch_dump(f"aten::{name}")


def test_activation_registers_the_kernels_until_restored():
    assert sdpa.NAME in torch_attention.list_flash_attention_impls()
    torch_attention.activate_flash_attention_impl("fa_ops")
    try:
        assert torch_attention.current_flash_attention_impl() == "fa_ops"
        known = [name for name in sdpa.KERNELS if hasattr(torch.ops.aten, name)]
        assert 4 <= len(known) <= len(sdpa.KERNELS) == 5
        assert all("sdpa.py" in dumped(name) for name in known)
    finally:
        torch_attention.restore_flash_attention_impl()
    assert torch_attention.current_flash_attention_impl() is None
    assert not any("sdpa.py" in dumped(name) for name in known)
    q, k, v = inputs("(B, H, S, D)")
    handle = sdpa.activate("CPU")
    flash(q, k, v)
    handle.remove(), handle.remove()
    with pytest.raises(NotImplementedError):
        flash(q, k, v)


@pytest.mark.parametrize("Sk", [12, 5])
def test_causal_masks_of_unequal_lengths_are_aligned_at_the_bottom_right(Sk, active):
    """As in torch's flash kernel, which `causal_lower_right` relies on."""
    q, k, v = inputs("(B, H, S, D)", Sk=Sk)
    out, lse, *_ = flash(q, k, v, is_causal=True)
    mask = torch.ones(9, Sk, dtype=torch.bool).tril(Sk - 9)
    rows = mask.any(-1)
    wanted = expected(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out[:, :, rows], wanted[:, :, rows])
    assert not out[:, :, ~rows].any() and (lse[:, :, ~rows] == torch.inf).all()
    grad = torch.randn_like(out) * rows[:, None]
    grads = torch.autograd.grad(out, (q, k, v), grad)
    kept = torch.autograd.grad(wanted[:, :, rows], (q, k, v), grad[:, :, rows])
    for found, other in zip(grads, kept, strict=True):
        torch.testing.assert_close(found, other)


def before(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """A kernel that is there before, whose results are unlike any other."""
    return torch.full_like(q, 7), q, None, None, 1, 1, q, q, q


@pytest.fixture
def replaced(monkeypatch):
    """Kernels of fa_ops on CPU tensors over another kernel, with nothing said yet."""
    monkeypatch.setattr(sdpa, "_said", set())
    other = Library("aten", "IMPL", "CPU")
    other.impl("_scaled_dot_product_flash_attention", before, "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that a kernel is overridden
        handle = sdpa.activate("CPU")
    yield
    handle.remove()
    out = flash(torch.zeros(1, 1, 1, 8), *torch.zeros(2, 1, 1, 1, 8))[0]
    other._destroy()
    assert (out == 7).all()  # restored


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dropout_p": 0.5}, "dropout draws the weights that torch's kernel drops"),
        ({"return_debug_mask": True}, "return_debug_mask must be False"),
        ({"dtype": torch.complex64}, "complex64"),
    ],
)
@torch.no_grad()
def test_unsupported_calls_go_to_the_kernel_before_and_say_so_once(options, why, replaced):
    dtype = options.pop("dtype", torch.float32)
    q, k, v = (x.to(dtype) for x in inputs("(B, H, S, D)"))
    with pytest.warns(UserWarning, match=f"torch's own kernel runs .*: .*{why}"):
        assert (flash(q, k, v, **options)[0] == 7).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (flash(q, k, v, **options)[0] == 7).all()
        q, k, v = inputs("(B, H, S, D)")
        torch.testing.assert_close(flash(q, k, v)[0], expected(q, k, v))


@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"return_debug_mask": True}])
def test_unsupported_calls_raise_where_there_was_no_kernel(options, active):
    with pytest.raises(NotImplementedError, match="torch's kernel|return_debug_mask"):
        flash(*inputs("(B, H, S, D)"), **options)


def test_results_without_gradients_are_those_of_sdpa(active):
    q, k, v = inputs("(B, S, H, D)")
    with torch.no_grad():
        out = flash(q, k, v)[0]
        assert not out.requires_grad
        torch.testing.assert_close(out, expected(q, k, v))


def test_deterministic_algorithms(active):
    q, k, v = inputs("(B, H, S, D)")
    found = []
    for warn_only in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.autograd.grad(flash(q, k, v)[0].sum(), q)
        finally:
            torch.use_deterministic_algorithms(False)
        found.append([w for w in caught if "defaults to a non-deterministic" in str(w.message)])
    assert not found[0] and len(found[1]) == 1


ENDS = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
# of varlen_attn and of the raw operator, which have got more with torch's releases
VARLEN = inspect.signature(varlen_attn).parameters
RAW = {a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments}


def varlen(q, k, v, window):
    """varlen_attn with a window, as this release of torch takes it."""
    options = {"window_size": window}
    if "window_size" not in VARLEN:
        if window not in ((-1, -1), (-1, 0)):
            pytest.skip("this release of torch has no windows")
        options = {"is_causal": window == (-1, 0)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" not in VARLEN:
            pytest.skip("this release of torch has no groups of heads")
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, ENDS, ENDS, 7, 7, **options)


def rows_of(q, k, v, **options):
    """The results of packed sequences by SDPA, one by one."""
    spans = [slice(*ENDS[b : b + 2]) for b in range(3)]
    parts = ([x[span].transpose(0, 1)[None] for x in (q, k, v)] for span in spans)
    outs = [expected(*part, **options)[0].transpose(0, 1) for part in parts]
    return torch.cat(outs)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize("Hkv", [4, 2])
def test_varlen_attn_runs_the_operator_forward_and_backward(Hkv, window, active):
    qkv = torch.randn(11, 4 + 2 * Hkv, 8, requires_grad=True)
    q, k, v = qkv.split([4, Hkv, Hkv], 1)
    out = varlen(q, k, v, window)
    wanted = rows_of(q, k, v, is_causal=window == (-1, 0))
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    found, other = (torch.autograd.grad(x, qkv, grad)[0] for x in (out, wanted))
    torch.testing.assert_close(found, other)


def test_varlen_attn_compiled(active):
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 11, 4, 8).unbind()
    found = torch.compile(varlen, fullgraph=True)(q, k, v, (-1, 0))
    torch.testing.assert_close(found, varlen(q, k, v, (-1, 0)))


def raw(q, k, v, *args, **options):
    """aten::_flash_attention_forward without dropout: out and lse."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, *args, 0.0, options.pop("is_causal", False), False, **options
    )[:2]


@torch.no_grad()
def test_used_keys_pages_and_results_in_place(active):
    q, pages = torch.randn(11, 4, 8), torch.randn(6, 4, 2, 8)
    table, used = torch.tensor([[5, 0], [1, 1], [2, 4]]).int(), torch.tensor([3, 0, 8]).int()
    ends_k = torch.tensor([0, 8, 16, 24], dtype=torch.int32)
    keys = pages[table.long().flatten()].flatten(0, 1)
    packed = ENDS, ends_k, 7, 8
    out, lse = raw(q, keys, keys, *packed, is_causal=True, seqused_k=used)
    if "block_table" in RAW:
        found, found_lse = raw(
            q, pages, pages, *packed, is_causal=True, seqused_k=used, block_table=table
        )
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(found_lse, lse)
    assert (lse[:, 0] == torch.inf).all() and out[4:].isfinite().all() and out[4:].any()
    if not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
        return  # of a later torch than 2.11
    buffer = torch.empty_like(q)
    lse_again = torch.ops.aten._flash_attention_forward_no_dropout_inplace(
        buffer, q, keys, keys, *packed, 0.0, True, False, seqused_k=used
    )
    assert torch.equal(buffer, out) and torch.equal(lse_again, lse)
    for wrong in (torch.empty(2, *q.shape), torch.empty_like(q, dtype=torch.float16)):
        with pytest.raises((ValueError, TypeError), match="^out must"):
            torch.ops.aten._flash_attention_forward_no_dropout_inplace(
                wrong, q, keys, keys, *packed, 0.0, True, False, seqused_k=used
            )


@pytest.mark.parametrize("options", [{}, {"window_size_left": 3, "window_size_right": 1}], ids=str)
@torch.no_grad()
def test_rows_and_their_gradients(options, active):
    q, k, v = torch.randn(2, 9, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    out, lse = raw(q, k, v, None, None, 9, 6, **options)
    grad = torch.randn_like(out)
    grads = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, None, None, 9, 6, 0.0, False, *[torch.zeros(2)] * 2, **options
    )
    with torch.enable_grad():
        leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
        distance = torch.arange(6) - torch.arange(9)[:, None] + 3
        mask = (distance >= -3) & (distance <= 1) if options else torch.ones(9, 6).bool()
        rows = mask.any(-1)
        wanted = expected(*leaves, attn_mask=mask)
        loss = (wanted.transpose(1, 2) * grad)[:, rows].sum()
    assert not out[:, ~rows].any()
    torch.testing.assert_close(out[:, rows], wanted.transpose(1, 2)[:, rows])
    for found, other in zip(grads, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(found, other.transpose(1, 2))


@torch.no_grad()
def test_negative_sides_of_a_window_are_unbounded(active):
    q = torch.randn(11, 4, 8)
    found, wanted = (
        raw(q, q, q, ENDS, ENDS, 7, 7, window_size_left=left, window_size_right=0)[0]
        for left in (-5, -1)
    )
    assert torch.equal(found, wanted)


@torch.no_grad()
def test_borders_that_lack_each_other_are_refused(active):
    q = torch.randn(11, 4, 8)
    with pytest.raises(ValueError, match="given together, got no cum_seq_k"):
        raw(q, q, q, ENDS, None, 7, 7)
    out, lse = raw(q, q, q, ENDS, ENDS, 7, 7)
    with pytest.raises(ValueError, match="given together, got no cum_seq_q"):
        torch.ops.aten._flash_attention_backward(
            q, q, q, q, out, lse, None, ENDS, 7, 7, 0.0, False, *[torch.zeros(2)] * 2
        )
    if "block_table" in RAW:
        pages, table = torch.randn(6, 4, 2, 8), torch.zeros(3, 1, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"got no cum_seq_k \(or seqused_k\)"):
            raw(q, pages, pages, ENDS, None, 7, 4, block_table=table)
