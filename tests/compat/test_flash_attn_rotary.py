"""flash_attn.layers.rotary and flash_attn.ops.triton.rotary."""

import pytest
import torch

from fa_ops.compat.flash_attn.layers import rotary
from fa_ops.compat.flash_attn.ops.triton.rotary import apply_rotary

STYLES = pytest.mark.parametrize("interleaved", [False, True])
ANGLES = torch.rand(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 6
COS, SIN = ANGLES.cos(), ANGLES.sin()


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def complex_rotated(x, positions, interleaved):
    """x (S, H, D) with its first 6 features multiplied by exp(i angle)."""
    first, rest = x[..., :6], x[..., 6:]
    pairs = first.unflatten(-1, (3, 2)) if interleaved else first.unflatten(-1, (2, 3)).mT
    product = (
        torch.view_as_complex(pairs.contiguous())
        * torch.polar(torch.ones_like(ANGLES), ANGLES)[positions, None]
    )
    pairs = torch.view_as_real(product)
    first = pairs.flatten(-2) if interleaved else pairs.mT.flatten(-2)
    return torch.cat([first, rest], -1)


@STYLES
@pytest.mark.parametrize("offsets", [0, 4, torch.tensor([1, 5])], ids=["0", "4", "rows"])
def test_batches_and_gradients(offsets, interleaved):
    x = draw(2, 7, 2, 8).requires_grad_()
    out = rotary.apply_rotary_emb(x, COS, SIN, interleaved, seqlen_offsets=offsets)
    first = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 2
    rows = [complex_rotated(x[b], torch.arange(7) + first[b], interleaved) for b in range(2)]
    expected, grad = torch.stack(rows), torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(y, x, grad)[0] for y in (out, expected))
    torch.testing.assert_close(found, wanted)
    if offsets is first[0]:
        tables = COS[offsets : offsets + 7], SIN[offsets : offsets + 7]
        torch.testing.assert_close(rotary.apply_rotary_emb_torch(x, *tables, interleaved), expected)


@STYLES
def test_packed_sequences(interleaved):
    x, ends = draw(9, 2, 8), torch.tensor([0, 2, 9], dtype=torch.int32)
    out = rotary.apply_rotary_emb(
        x, COS, SIN, interleaved, seqlen_offsets=torch.tensor([3, 1]), cu_seqlens=ends, max_seqlen=7
    )
    positions = torch.tensor([3, 4, *range(1, 8)])
    torch.testing.assert_close(out, complex_rotated(x, positions, interleaved))


@STYLES
def test_in_place_and_back(interleaved):
    x = draw(2, 7, 2, 8)
    before = x.clone()
    assert apply_rotary(x, COS, SIN, 2, interleaved=interleaved, inplace=True) is x
    assert not torch.equal(x, before)
    back = apply_rotary(x, COS, SIN, 2, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back, before)


def test_tokens_behind_the_tables_are_not_rotated():
    x = draw(1, 7, 2, 8)
    out = apply_rotary(x, COS, SIN, torch.tensor([9]))
    assert torch.equal(out[:, 3:], x[:, 3:]) and not torch.equal(out[:, 2], x[:, 2])


@STYLES
@pytest.mark.parametrize("joint", [False, True])
def test_queries_and_keys_of_one_tensor(joint, interleaved):
    x = draw(2, 7, 3, 2, 8) if not joint else draw(2, 7, 8, 8)
    q, k, v = x.unbind(2) if not joint else x.split([4, 2, 2], 2)
    expected = [complex_rotated(t[0], torch.arange(7), interleaved) for t in (q, k)]
    value, leaf = v.clone(), x.clone().requires_grad_()
    heads = 4 if joint else None
    out = rotary.apply_rotary_emb_qkv_(leaf, COS, SIN, None, None, interleaved, 0, heads)
    parts = out.unbind(2) if not joint else out.split([4, 2, 2], 2)
    for found, wanted in zip(parts, (*expected, value[0])):
        torch.testing.assert_close(found[0], wanted)
    (grad,) = torch.autograd.grad(out, leaf, out.detach())
    torch.testing.assert_close(grad, x)


@STYLES
@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_the_module(scale_base, interleaved):
    module = rotary.RotaryEmbedding(6, 100.0, interleaved, scale_base)
    q, kv = torch.randn(2, 7, 3, 8), torch.randn(2, 7, 2, 3, 8)
    inputs = q.clone(), kv.clone()
    found_q, found_kv = module(q, kv, seqlen_offset=2)
    position, frequency = torch.arange(9.0), 100.0 ** (-torch.arange(0, 6, 2) / 6)
    angle = position[:, None] * frequency
    power = (position - 4) / (scale_base or 1)
    base = (torch.arange(0, 6, 2) + 2.4) / 8.4
    decay = base ** power[:, None] if scale_base else torch.ones(9, 3)
    for found, x, factor in (
        (found_q, inputs[0], decay), (found_kv[:, :, 0], inputs[1][:, :, 0], 1 / decay)
    ):  # fmt: skip
        tables = (angle.cos() * factor)[2:], (angle.sin() * factor)[2:]
        torch.testing.assert_close(found, rotary.apply_rotary_emb_torch(x, *tables, interleaved))
    assert torch.equal(found_kv[:, :, 1], inputs[1][:, :, 1])
    qkv = torch.stack([inputs[0], inputs[0], inputs[0]], 2)
    torch.testing.assert_close(module(qkv, seqlen_offset=2)[:, :, 0], found_q)


x = draw(2, 7, 2, 8)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"x must .*, got \(7, 2, 8\): pass x\[None\]", lambda: apply_rotary(x[0], COS, SIN)),
        ("max_seqlen must be given", lambda: apply_rotary(x[0], COS, SIN, 0, torch.zeros(2))),
        (r"both have shape .*got \(12, 3\) and \(11, 3\): pass an",
         lambda: apply_rotary(x, COS, SIN[1:])),
        (r"cos is for 6 features, but x has 4: pass cos\[:, :2\]",
         lambda: apply_rotary(x[..., :4], COS, SIN)),
        ("cos has 12 positions, but 13 are needed: pass a", lambda: apply_rotary(x, COS, SIN, 6)),
        (r"qkv must have shape .*got \(2, 7, 2, 8\) and None: pass torch.stack",
         lambda: rotary.apply_rotary_emb_qkv_(x, COS, SIN)),
        (r"kv must .* \(2, 7, 2, 8\): pass torch.stack",
         lambda: rotary.apply_rotary_emb_kv_(x, COS, SIN)),
        ("max_seqlen must be given with the first seqlen_offset that is a Tensor",
         lambda: rotary.RotaryEmbedding(6)(x, x, torch.tensor([0, 1]))),
    ],
)  # fmt: skip
def test_errors(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_is_rotated_before_an_error():
    """Tables of keys are checked before queries are rotated in place."""
    qkv, cos = torch.randn(2, 4, 3, 2, 8), torch.ones(4, 4)
    kept = qkv.clone()
    for message, tables in (
        (r"cos_k and sin_k must both have shape", (cos, cos, cos[:, :3], cos)),
        ("cos_k must be floating point, got int64", (cos, cos, cos.long(), cos)),
        ("sin_k is on meta, but qkv is on cpu", (cos, cos, cos, cos.to("meta"))),
        ("cos_k is for 10 features, but qkv has 8", (cos, cos, *(torch.ones(4, 5),) * 2)),
        ("cos_k has 3 positions, but 4 are needed", (cos, cos, cos[:3], cos[:3])),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            rotary.apply_rotary_emb_qkv_(qkv, *tables)
        assert torch.equal(qkv, kept)


def test_offsets_and_borders_of_sequences_must_fit():
    x, cos = torch.randn(2, 4, 2, 8), torch.ones(9, 4)
    ends = torch.tensor([0, 3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seqlen_offsets must .* \(2,\), got \(3,\): pass an int"):
        rotary.apply_rotary_emb(x, cos, cos, seqlen_offsets=ends)
    with pytest.raises(TypeError, match="seqlen_offsets must be int32 or int64, got bool"):
        rotary.apply_rotary_emb(x, cos, cos, seqlen_offsets=ends[:2].bool())
    for wrong in (ends[:, None], ends[:0], ends[0]):
        with pytest.raises(
            ValueError, match=r"cu_seqlens must have shape \(B \+ 1,\), got \(.*\): pass the"
        ):
            rotary.apply_rotary_emb(x[0], cos, cos, cu_seqlens=wrong, max_seqlen=4)
    with pytest.raises(TypeError, match="cu_seqlens must be int32, got int64"):
        rotary.apply_rotary_emb(x[0], cos, cos, cu_seqlens=ends.long(), max_seqlen=4)
