"""flash_attn_interface of flash_attn: forward and backward without autograd, as ring attention."""

import inspect

import pytest
import torch

from fa_ops.compat.flash_attn import flash_attn_interface as interface
from tests.compat.test_flash_attn import OPTIONS, draw, options_of

ENDS = torch.tensor([0, 4, 11], dtype=torch.int32)


def arguments_of(name):
    """The arguments of the private functions after dropout_p."""
    options = options_of(name, 4)
    left, right = options.get("window_size", (-1, -1))
    scale, causal = options.get("softmax_scale", 8**-0.5), options.get("causal", False)
    return scale, causal, left, right, options.get("softcap", 0.0), options.get("alibi_slopes")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_forward_and_backward_of_a_batch(name, p):
    q, k, v = draw(2, 9, 4, 8), draw(2, 6, 2, 8), draw(2, 6, 2, 8)
    torch.manual_seed(1)
    expected, lse, weights = interface.flash_attn_func(
        q, k, v, p, **options_of(name, 4), return_attn_probs=True
    )
    torch.manual_seed(1)
    found = interface._wrapped_flash_attn_forward(q, k, v, p, *arguments_of(name), True)
    for one, two in zip(found, (expected, lse, weights)):
        assert torch.equal(one, two) and not one.requires_grad
    grad, buffers = torch.randn_like(expected), [torch.empty_like(x) for x in (q, k, v)]
    sums = interface._wrapped_flash_attn_backward(
        grad, q, k, v, *found[:2], *buffers, p, *arguments_of(name), False, rng_state=found[3]
    )
    for one, two in zip(buffers, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(one, two)
    assert sums.shape == (2, 4, 128)
    torch.testing.assert_close(sums[..., :9].transpose(1, 2), (grad * expected).sum(-1).float())


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_backward_of_packed_sequences(name):
    q, k, v = draw(11, 4, 8), draw(11, 2, 8), draw(11, 2, 8)
    packing = ENDS, ENDS, 7, 7
    expected, lse, _ = interface.flash_attn_varlen_func(
        q, k, v, *packing, **options_of(name, 4), return_attn_probs=True
    )
    found = interface._flash_attn_varlen_forward(q, k, v, *packing, 0.0, *arguments_of(name))
    assert torch.equal(found[0], expected) and torch.equal(found[1], lse)
    grad, buffers = torch.randn_like(expected), [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_varlen_backward(
        grad, q, k, v, *found[:2], *buffers, *packing, 0.0, *arguments_of(name), False
    )
    for one, two in zip(buffers, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(one, two)


@torch.no_grad()
def test_used_keys_and_left_padding_of_packed_sequences():
    q, k, v = draw(11, 4, 8), draw(11, 2, 8), draw(11, 2, 8)
    used, pad = (torch.tensor(x, dtype=torch.int32) for x in ([3, 5], [1, 2]))
    out, lse, *_ = interface._flash_attn_varlen_forward(
        q, k, v, ENDS, ENDS, 7, 7, 0.0, 0.3, True, seqused_k=used, leftpad_k=pad
    )
    for b, (first, last) in enumerate(((0, 4), (4, 11))):
        keys = slice(first + int(pad[b]), first + int(used[b]))
        rows = interface._flash_attn_forward(
            q[None, first:last], k[None, keys], v[None, keys], 0.0, 0.3, True, -1, -1, 0.0, None,
            False,
        )  # fmt: skip
        torch.testing.assert_close(out[first:last], rows[0][0])
        torch.testing.assert_close(lse[:, first:last], rows[1][0])


@torch.no_grad()
def test_partial_results_merge_to_the_whole_as_in_ring_attention():
    """The backward pass of each part takes the lse of all keys."""
    q, k, v = draw(1, 6, 2, 8), draw(1, 8, 2, 8), draw(1, 8, 2, 8)
    tail = (0.3, False, -1, -1, 0.0, None)
    whole = interface._flash_attn_forward(q, k, v, 0.0, *tail, False)
    grad = torch.randn_like(whole[0])
    expected = [torch.zeros_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(grad, q, k, v, *whole[:2], *expected, 0.0, *tail, False)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for part in (slice(0, 4), slice(4, 8)):
        found = torch.empty_like(q)
        interface._flash_attn_backward(
            grad, q, k[:, part], v[:, part], *whole[:2], found, dk[:, part], dv[:, part], 0.0,
            *tail, False,
        )  # fmt: skip
        dq += found
    for one, two in zip((dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(one, two)


def test_signatures_have_the_names_that_callers_inspect():
    names = inspect.getfullargspec(interface._flash_attn_varlen_forward).args
    first = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale"
    assert names[:10] == [*first.split(), "causal"]
    assert "window_size_left" in names and "softcap" in names and "block_table" in names
    names = inspect.getfullargspec(interface._flash_attn_backward).args
    assert names[-2:] == ["deterministic", "rng_state"]


@pytest.mark.parametrize(("length", "padded"), [(1, 128), (128, 128), (129, 256)])
def test_results_of_the_extension_have_its_order_and_shapes(length, padded):
    raw, tail = interface.flash_attn_gpu, (1.0, False, -1, -1, 0.0)
    x = draw(2, length, 2, 8, grad=False)
    found = raw.fwd(x, x, x, None, None, 0.5, *tail, True)
    shapes = [(2, length, 2, 8), (2, 2, length), (2, 2, padded, padded), (2,)]
    assert [tuple(t.shape) for t in found] == shapes and found[3].dtype == torch.int64
    grad, buffers = draw(2, length, 2, 8, grad=False), [torch.empty_like(x) for _ in range(3)]
    given = grad, x, x, x, *found[:2]
    *grads, sums = raw.bwd(*given, *buffers, None, 0.5, *tail, False, None, found[3])
    assert all(a is b for a, b in zip(grads, buffers, strict=True))
    expected = (grad * found[0]).sum(-1).float().transpose(1, 2)
    assert sums.shape == (2, 2, padded) and not sums[..., length:].any()
    torch.testing.assert_close(sums[..., :length], expected)
    x, grad, ends = x.flatten(0, 1), grad.flatten(0, 1), torch.tensor([0, length, 2 * length]).int()
    packing = ends, ends, None, None, None, None, length, length, 0.5, 1.0, False
    found = raw.varlen_fwd(x, x, x, None, *packing, *tail[1:], True)
    assert [t.dim() for t in found] == [3, 2, 4, 1] and found[1].shape == (2, 2 * length)
    assert found[3].dtype == torch.int64 and found[2].dtype == x.dtype
    buffers = [torch.empty_like(x) for _ in range(3)]
    *grads, sums = raw.varlen_bwd(grad, x, x, x, *found[:2], *buffers, ends, ends, None, length,
                                  length, 0.5, 1.0, False, *tail[1:], False, None,
                                  found[3])  # fmt: skip
    assert all(a is b for a, b in zip(grads, buffers, strict=True))
    assert sums.shape == (2, 2 * length + 2 * 128) and not sums[:, 2 * length :].any()
    torch.testing.assert_close(sums[:, : 2 * length], (grad * found[0]).sum(-1).float().T)
    table = torch.arange(2, dtype=torch.int32)[:, None]
    pages = x.unflatten(0, (2, length))
    packing = ends, ends, None, None, table, None, length, length, 0.0, 1.0, False
    found = raw.varlen_fwd(x, pages, pages, None, *packing, *tail[1:], False)
    assert [tuple(t.shape) for t in found] == [tuple(x.shape), (2, 2 * length), (0,), (2,)]
    assert [t.dtype for t in found[2:]] == [x.dtype, torch.int64]


q = torch.randn(1, 2, 2, 8)
packed, pages = q[0], torch.randn(1, 4, 2, 8)
ends, table = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (NotImplementedError, "num_splits > 1 is not supported.*got 2",
         lambda: interface._flash_attn_varlen_forward(
             packed, packed, packed, ends, ends, 2, 2, 0.0, 1.0, False, num_splits=2)),
        (NotImplementedError, "leftpad_k must be None with block_table",
         lambda: interface._flash_attn_varlen_forward(
             packed, pages, pages, ends, ends, 2, 2, 0.0, 1.0, False, block_table=table,
             leftpad_k=table[0])),
        (NotImplementedError, "`generator` argument is no longer supported",
         lambda: interface.flash_attn_gpu.fwd(
             q, q, q, None, None, 0.0, 1.0, False, -1, -1, 0.0, False, object())),
        (ValueError, r"leftpad_k must .* \(1,\), got \(2,\): pass a number for each of the 1",
         lambda: interface._flash_attn_varlen_forward(
             packed, packed, packed, ends, ends, 2, 2, 0.0, 1.0, False, leftpad_k=ends)),
        (ValueError, r"dv must have shape \(1, 2, 2, 8\), got \(2,\)",
         lambda: interface._flash_attn_backward(
             q, q, q, q, q, q[..., 0], None, None, ends, 0.0, 1.0, False, -1, -1, 0.0, None,
             False)),
        (ValueError, r"dq must have shape \(2, 2, 8\), got \(2,\): pass dq.new_empty\(2, 2, 8\)",
         lambda: interface._flash_attn_varlen_backward(
             packed, packed, packed, packed, packed, packed[..., 0], ends, None, None, ends, ends,
             2, 2, 0.0, 1.0, False, -1, -1, 0.0, None, False)),
        (ValueError, r"out must have shape \(1, 2, 2, 8\), got \(2,\)",
         lambda: interface.flash_attn_gpu.fwd(
             q, q, q, ends, None, 0.0, 1.0, False, -1, -1, 0.0, False)),
        (ValueError, "rng_state must be that of the forward pass with dropout, got p 0.5",
         lambda: interface._flash_attn_backward(
             q, q, q, q, q, q[..., 0].transpose(1, 2), q, q, q, 0.5, 1.0, False, -1, -1, 0.0, None,
             False)),
    ],
)  # fmt: skip
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_operators_are_given_their_own_lse(monkeypatch):
    """-inf in rows without keys, in place of the +inf that the forward pass returns."""
    given, run = [], interface.flash_attn_gpu.dense_operators.BACKWARD
    monkeypatch.setattr(
        interface.flash_attn_gpu.dense_operators,
        "BACKWARD",
        lambda *args, **options: given.append(args[6]) or run(*args, **options),
    )
    q, tail = draw(1, 5, 2, 8, grad=False), (0.3, True, -1, -1, 0.0, None, False)
    k = q[:, :2]
    out, lse, *_ = interface._flash_attn_forward(q, k, k, 0.0, *tail)
    interface._flash_attn_backward(q, q, k, k, out, lse, None, None, None, 0.0, *tail)
    assert (lse[..., :3] == torch.inf).all() and (given[0][..., :3] == -torch.inf).all()
