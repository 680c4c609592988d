"""The oracle itself: against a literal transcription of the formula, one number at a time."""

from __future__ import annotations

import math

import pytest
import torch

from fa_ops.backends import dropout, reference
from fa_ops.call.call import Call, Saved
from fa_ops.testing import PackedCase, make_case

TINY = {"B": 2, "Hq": 4, "Hkv": 2, "Sq": 4, "Sk": 6, "D": 3, "Dv": 2, "dtype": torch.float64}
CASES = {
    "plain": make_case(**TINY),
    "scale": make_case(**TINY, scale=0.7),
    "causal": make_case(**TINY, is_causal=True),
    "causal, more queries": make_case(**TINY | {"Sq": 8, "Sk": 5}, is_causal=True),
    "window": make_case(**TINY, window=(2, 1)),
    "left window": make_case(**TINY, window=(1, -1)),
    "causal window": make_case(**TINY, window=(2, 3), is_causal=True),
    "softcap": make_case(**TINY, softcap=1.5, mask="float", mask_shape=(1, 1, 1, 1)),
    "alibi": make_case(**TINY, alibi="heads", is_causal=True),
    "alibi per batch": make_case(**TINY, alibi="batch_heads", kv_lens=True, seed=3),
    "bool mask": make_case(**TINY, mask="bool", mask_shape=(1, 0, 1, 1), mask_holes=True),
    "float mask": make_case(**TINY, mask="float", mask_shape=(0, 1, 1, 1), mask_holes=True),
    "sinks": make_case(**TINY, sinks=True, is_causal=True),
    "kv_lens": make_case(**TINY, kv_lens=True, is_causal=True, window=(2, -1), sinks=True, seed=2),
    "key_ranges": make_case(**TINY, key_ranges=(1, 1, 1), is_causal=True),
    "shared key_ranges": make_case(**TINY, key_ranges=(0, 0, 1), alibi="heads"),
    "dropout": make_case(**TINY, dropout_p=0.4),
}


def literal_score(q, k, call: Call, b: int, h: int, i: int, j: int, Sq: int, Sk: int) -> float:
    """One score as the documentation defines it, -inf where masked."""
    t, o = call.operands, call.options
    length = Sk if t.kv_lens is None else int(t.kv_lens[b])
    position = i + length - Sq
    if j >= length or (o.is_causal and j > position):
        return -math.inf
    if o.window_left >= 0 and j < position - o.window_left:
        return -math.inf
    if o.window_right >= 0 and j > position + o.window_right:
        return -math.inf
    if t.key_ranges is not None:
        lo, hi = t.key_ranges.expand(len(q), len(q[0]), Sq, 2)[b, h, i].tolist()
        if not lo <= j < hi:
            return -math.inf
    group = len(q[0]) // len(k[0])
    s = sum(x * y for x, y in zip(q[b][h][i], k[b][h // group][j]))
    s *= len(q[0][0][0]) ** -0.5 if o.scale is None else o.scale
    if o.softcap > 0:
        s = o.softcap * math.tanh(s / o.softcap)
    if t.alibi_slopes is not None:
        s -= t.alibi_slopes.expand(len(q), len(q[0]))[b, h].item() * abs(position - j)
    if t.attn_mask is not None:
        m = t.attn_mask.expand(len(q), len(q[0]), Sq, Sk)[b, h, i, j].item()
        s = (s if m else -math.inf) if t.attn_mask.dtype == torch.bool else s + m
    return s


def literal_hash(seed: int, batch_head: int, i: int, j: int) -> int:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    stream = mix((batch_head * 0x9E3779B9 + (seed >> 32)) % 2**32) ^ seed % 2**32
    row = mix((stream + i * 0x85EBCA6B) % 2**32)
    return mix((row + j * 0xC2B2AE35) % 2**32)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_formula_in_loops(name):
    case = CASES[name]
    call = case.fresh()
    sinks, p_drop = call.operands.sinks, call.options.dropout_p
    out, lse = reference.dense(call)
    ql, kl, vl = (x.tolist() for x in call[:3])
    for b in range(case.B):
        for h in range(case.Hq):
            for i in range(case.Sq):
                row = [
                    literal_score(ql, kl, call, b, h, i, j, case.Sq, case.Sk)
                    for j in range(case.Sk)
                ]
                total = sum(math.exp(s) for s in row)
                if sinks is not None:
                    total += math.exp(sinks[h].item())
                expected = math.log(total) if total else -math.inf
                assert lse[b, h, i].item() == pytest.approx(expected, abs=1e-12)
                p = [math.exp(s) / (total or 1.0) for s in row]
                if p_drop:
                    seed = int(call.operands.dropout_seed)
                    for j in range(case.Sk):
                        kept = literal_hash(seed, b * case.Hq + h, i, j) >= p_drop * 2**32
                        p[j] *= kept / (1 - p_drop)
                for d in range(case.Dv):
                    x = sum(p[j] * vl[b][h // 2][j][d] for j in range(case.Sk))
                    assert out[b, h, i, d].item() == pytest.approx(x, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    call = CASES[name].fresh(requires_grad=True)
    sinks, mask = call.operands.sinks, call.operands.attn_mask
    extra = [] if sinks is None else [sinks]
    if mask is not None and mask.dtype != torch.bool and torch.isfinite(mask).all():
        extra.append(mask.requires_grad_())

    def attend(q, k, v, *extra):
        out, lse = reference.dense(call._replace(query=q, key=k, value=v))
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(attend, (*call[:3], *extra))


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_packed_sequences_are_dense_ones(margin, sinks):
    features = make_case(
        dtype=torch.float64, sinks=sinks, alibi="batch_heads", is_causal=True, dropout_p=0.2
    )
    case = PackedCase((3, 0, 5, 2), (4, 2, 0, 7), margin, features)
    call = case.fresh()
    q, k, v = call[:3]
    out, lse = reference.varlen_forward(call)
    starts_q, starts_k = (ends.tolist() for ends in case.packing())
    covered = torch.zeros(len(q), dtype=torch.bool)
    for b, (Sq, Sk) in enumerate(zip(case.lengths_q, case.lengths_k)):
        rows = slice(starts_q[b], starts_q[b] + Sq)
        covered[rows] = True
        if not Sk:
            assert (out[rows] == 0).all()
            expected = call.operands.sinks.view(-1, 1) if sinks else torch.tensor([[-math.inf]])
            assert (lse[:, rows] == expected).all()
            continue
        keys = slice(starts_k[b], starts_k[b] + Sk)
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        o, m = reference.dense(call.rows(slice(b, b + 1), *one), first_batch=b)
        torch.testing.assert_close(out[rows], o[0].transpose(0, 1))
        torch.testing.assert_close(lse[:, rows], m[0])
    assert (out[~covered] == 0).all() and (lse[:, ~covered] == -math.inf).all()


def test_lengths_outside_the_keys_are_clamped():
    case = make_case(kv_lens=True, is_causal=True, alibi="heads", dtype=torch.float64)
    wrong, right = (
        case.fresh().changed(kv_lens=torch.tensor(lens, dtype=torch.int32))
        for lens in ([-5, case.Sk + 9], [0, case.Sk])
    )
    torch.testing.assert_close(reference.dense(wrong), reference.dense(right), rtol=0, atol=0)


def test_the_widest_window_leaves_nothing_out():
    call = make_case(dtype=torch.float64).fresh()
    wide = call.changed(window_left=2**63 - 1, window_right=2**63 - 1)
    torch.testing.assert_close(reference.dense(wide), reference.dense(call))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_bad_value_reaches_only_the_rows_that_attend_it(poison):
    call = make_case(is_causal=True, Sq=20, Sk=20).fresh()
    v = call.value
    clean, _ = reference.dense(call)
    v[0, 1, 7, 3] = poison
    out, _ = reference.dense(call)
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[0, 2:, 7:, 3] = True  # the two query heads of kv head 1
    assert torch.isnan(out[touched]).all()
    torch.testing.assert_close(out[~touched], clean[~touched])


def test_backward_is_autograd():
    case = make_case(
        dtype=torch.float64, mask="float", mask_shape=(0, 1, 0, 1), mask_grad=True, sinks=True
    )
    call = case.fresh(requires_grad=True)
    q, k, v = call[:3]
    t = call.operands
    out, lse = reference.dense(call)
    grad_out, grad_lse = case.grad_outputs(out, lse)
    wanted = (q, k, v, t.attn_mask, t.sinks)
    expected = torch.autograd.grad([out, lse], wanted, [grad_out, grad_lse])
    actual = reference.backward(call._replace(saved=Saved(grad_out, grad_lse, out, lse, True)))
    assert actual.term_values is None
    torch.testing.assert_close(tuple(actual[:5]), expected)


def test_merge_states_of_disjoint_keys():
    call = make_case(dtype=torch.float64, Sk=30).fresh()
    k, v = call[1:3]
    whole = reference.dense(call)
    parts = [
        reference.dense(call._replace(key=k[:, :, c], value=v[:, :, c]))
        for c in (slice(0, 9), slice(9, 30))
    ]
    nothing = torch.zeros_like(whole[0]), torch.full_like(whole[1], -math.inf)
    outs, lses = (torch.stack(x) for x in zip(*parts, nothing))
    torch.testing.assert_close(reference.merge_states(outs, lses), whole)
    out, lse = reference.merge_states(outs[2:], lses[2:])
    assert (out == 0).all() and (lse == -math.inf).all()


def test_merge_states_ignores_the_out_of_a_state_without_keys():
    outs, lses = torch.randn(3, 5, 16), torch.randn(3, 5)
    outs[1], lses[1] = math.nan, -math.inf
    expected = reference.merge_states(outs[[0, 2]], lses[[0, 2]])
    torch.testing.assert_close(reference.merge_states(outs, lses), expected)


def test_dropout_keeps_the_right_share_and_depends_on_every_index():
    seed = torch.tensor([1234567890123])
    index, rows = torch.arange(8).view(8, 1, 1), torch.arange(64).view(64, 1)
    for p in (0.0, 0.1, 0.5, 0.9):
        keep = dropout.keep_mask(seed, index, rows, torch.arange(512), p)
        assert keep.shape == (8, 64, 512)
        assert keep.double().mean().item() == pytest.approx(1 - p, abs=5e-3)
        if p == 0.5:
            for dim in range(3):  # neighbours along every index agree half of the time
                first, second = keep.narrow(dim, 0, 7), keep.narrow(dim, 1, 7)
                assert (first == second).double().mean().item() == pytest.approx(0.5, abs=0.03)
            other = dropout.keep_mask(seed + 1, index, rows, torch.arange(512), p)
            assert (keep == other).double().mean().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.75, 0.999])
def test_dropout_bits(p):
    """Far indices and 62-bit seeds too: bit for bit what the Triton kernels compute in uint32."""
    g = torch.Generator().manual_seed(0)
    for _ in range(40):
        seed, b, i, j = (
            int(torch.randint(n, (1,), generator=g)) for n in (2**62, 2**20, 2**31, 2**31)
        )
        keep = dropout.keep_mask(*(torch.tensor([x]) for x in (seed, b, i, j)), p)
        assert keep.item() == (literal_hash(seed, b, i, j) >= math.floor(p * 2**32))
