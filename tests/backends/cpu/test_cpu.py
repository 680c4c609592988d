"""The CPU backend, feature by feature and trap by trap."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import fa_ops
from fa_ops.backends import cpu, reference
from fa_ops.backends.cpu import dense
from fa_ops.backends.cpu import scores as tiles
from fa_ops.backends.cpu.scores import attended_ranges
from fa_ops.bench.timing import peak_memory
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import Case, PackedCase, assert_close_to_oracle, make_case
from tests.kernels import assert_merges_into

# more than one tile of rows and of keys
LONG = {"B": 2, "Hq": 4, "Hkv": 2, "Sq": 150, "Sk": 300, "D": 16, "Dv": 16}
SHORT = LONG | {"Sq": 40, "Sk": 17}
WIDE = LONG | {"Dv": 24}
FEATURES = {
    "full": make_case(**LONG),
    "causal": make_case(**LONG | {"Sk": 150}, is_causal=True),
    "causal, cached": make_case(**LONG, is_causal=True, layout="bshd"),
    "causal, dead rows": make_case(**SHORT, is_causal=True),
    "decode": make_case(**LONG | {"Sq": 1}, is_causal=True),
    "MQA": make_case(**LONG | {"Hkv": 1}, is_causal=True, layout="packed"),
    "one head": make_case(**LONG | {"Hq": 1, "Hkv": 1}, softcap=3.0),
    "Dv != D": make_case(**WIDE),
    "scale": make_case(**LONG, scale=0.4),
    "negative scale": make_case(**LONG, scale=-0.4, is_causal=True),
    "no scale": make_case(**LONG, scale=0.0, is_causal=True),
    "softcap": make_case(**LONG, softcap=2.0, is_causal=True),
    "alibi": make_case(**LONG, alibi="heads", is_causal=True),
    "alibi per batch": make_case(**LONG, alibi="batch_heads", kv_lens=True),
    "left window": make_case(**LONG, window=(30, -1), is_causal=True),
    "right window": make_case(**LONG, window=(-1, 9)),
    "window": make_case(**LONG, window=(0, 0)),
    "window, decode": make_case(**LONG | {"Sq": 1}, window=(40, 0)),
    "window and kv_lens": make_case(**LONG, window=(20, 5), kv_lens=True),
    "kv_lens": make_case(**LONG, kv_lens=True),
    "kv_lens, causal": make_case(**LONG, kv_lens=True, is_causal=True, seed=4),
    "key_ranges": make_case(**LONG, key_ranges=(1, 1, 1)),
    "key_ranges of rows": make_case(**LONG, key_ranges=(0, 0, 1), is_causal=True),
    "key_ranges of batches": make_case(**LONG, key_ranges=(1, 0, 0), is_causal=True),
    "key_ranges and bias": make_case(
        **LONG, key_ranges=(1, 0, 1), mask="float", mask_shape=(0, 1, 0, 1), mask_grad=True
    ),
    "sinks": make_case(**LONG, sinks=True),
    "sinks, dead rows": make_case(**SHORT, sinks=True, is_causal=True),
    "sinks in the loop": make_case(**WIDE, sinks=True, kv_lens=True, is_causal=True),
    "dropout": make_case(**LONG, dropout_p=0.3, is_causal=True),
    "dropout, softcap, bias": make_case(
        **LONG, dropout_p=0.6, softcap=4.0, mask="float", mask_shape=(1, 0, 1, 1), mask_grad=True
    ),
    "bool mask": make_case(**LONG, mask="bool", mask_holes=True),
    "bool mask of keys": make_case(**LONG, mask="bool", mask_shape=(1, 0, 0, 1)),
    "bool mask, causal": make_case(
        **LONG, mask="bool", mask_shape=(0, 1, 1, 1), is_causal=True, softcap=5.0
    ),
    "bias": make_case(**LONG, mask="float", mask_holes=True),
    "bias, sinks, dead rows": make_case(**LONG, mask="float", mask_holes=True, sinks=True),
    "bias gradient": make_case(**LONG, mask="float", mask_grad=True, mask_holes=True),
    **{
        f"bias gradient {bits}": make_case(**LONG, mask="float", mask_shape=bits, mask_grad=True)
        for bits in [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (1, 1, 0, 1)]
    },
    "expanded": make_case(**LONG, layout="expanded", is_causal=True),
    "expanded in the loop": make_case(**WIDE, layout="expanded", is_causal=True),
}


@pytest.mark.parametrize("lse_grad", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("name", FEATURES)
def test_features_give_the_results_of_the_oracle(name, lse_grad):
    assert_close_to_oracle(make_case(**vars(FEATURES[name]) | {"lse_grad": lse_grad}), "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_dtypes(name, dtype):
    assert_close_to_oracle(make_case(**vars(FEATURES[name]) | {"dtype": dtype}), "cpu")


@pytest.mark.parametrize("D", [1, 2, 37, 128, 200, 512])
@pytest.mark.parametrize("softcap", [0.0, 9.0], ids=["flash", "loop"])
def test_head_dims(D, softcap):
    case = make_case(Sq=20, Sk=30, D=D, Dv=D, softcap=softcap, is_causal=True, lse_grad=False)
    assert_close_to_oracle(case, "cpu")


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


PIECES = {  # which calls are aten's, in how many pieces; None: the loop's
    "full": (make_case(), {}, 1),
    "causal": (make_case(), {"is_causal": True}, 1),
    "causal, all rows dead but one": (make_case(Sk=1), {"is_causal": True}, 1),
    "decode in a window": (make_case(Sq=1), {"is_causal": True, "window_left": 9}, 1),
    "a window that hides nothing": (make_case(), {"is_causal": True, "window_left": 99}, 1),
    "equal lengths": (make_case(), {"kv_lens": int32(9, 9)}, 1),
    "lengths": (make_case(), {"kv_lens": int32(9, 47), "is_causal": True}, 2),
    "a batch without keys": (make_case(), {"kv_lens": int32(0, 9)}, 1),
    "no keys at all": (make_case(), {"kv_lens": int32(0, 0)}, 0),
    "padding on the left": (
        make_case(Sq=47),
        {"is_causal": True, "key_ranges": int32(3, 47, 11, 47).view(2, 1, 1, 2)},
        2,
    ),
    "padding on the right": (
        make_case(Sq=47),
        {"is_causal": True, "key_ranges": int32(0, 30, 0, 47).view(2, 1, 1, 2)},
        None,  # rows beyond the padding still attend: neither a rectangle nor a triangle
    ),
    "a bias": (make_case(), {"attn_mask": torch.randn(33, 47)}, 1),
    "a bias that needs a copy": (make_case(), {"attn_mask": torch.ones(33, 47).bool()}, None),
    "a mask of keys": (make_case(), {"attn_mask": torch.ones(2, 1, 1, 47).bool()}, 1),
    "a bias and causal": (make_case(), {"attn_mask": torch.zeros(1), "is_causal": True}, None),
    "window": (make_case(), {"window_left": 9}, None),
    "softcap": (make_case(), {"softcap": 1.0}, None),
    "alibi": (make_case(), {"alibi_slopes": torch.ones(4)}, None),
    "dropout": (make_case(), {"dropout_p": 0.1}, None),
    "negative scale": (make_case(), {"scale": -1.0}, None),
    "another value size": (make_case(Dv=24), {}, None),
    "sinks": (make_case(), {"sinks": torch.zeros(4)}, 1),
}


@pytest.mark.parametrize("name", PIECES)
def test_which_calls_use_the_aten_kernel(name, monkeypatch):
    case, options, expected = PIECES[name]
    q, k, v = case.fresh()[:3]
    monkeypatch.setattr(dense, "MIN_PIECE_SCORES", 0)
    pieces = dense.plan(attention_call(q, k, v, **options))
    assert (None if pieces is None else len(pieces)) == expected


@pytest.mark.parametrize("name", [n for n, (_, o, _) in PIECES.items() if "dropout_p" not in o])
def test_both_engines_agree(name, monkeypatch):
    monkeypatch.setattr(dense, "MIN_PIECE_SCORES", 0)
    case, options, expected = PIECES[name]
    q, k, v = case.fresh()[:3]
    call = attention_call(q, k, v, **options)
    out, lse = cpu.forward(call)
    by_loop = dense.blockwise_forward(call, 0)
    torch.testing.assert_close((out, lse), by_loop, rtol=1e-5, atol=1e-5)
    grad_out, _ = case.grad_outputs(out, lse)
    call = call._replace(saved=Saved(grad_out, None, out, lse))
    grads, by_loop = cpu.backward(call), dense.blockwise_backward(call, 0)
    torch.testing.assert_close(tuple(grads[:3]), tuple(by_loop[:3]), rtol=1e-5, atol=1e-5)


LOOPS = {"flash": {}, "loop": {"softcap": 50.0}}


@pytest.mark.parametrize("Sq, Sk", [(5, 5), (5, 8), (8, 5)])
@pytest.mark.parametrize("hidden", [-1, 0, 1, 2])
def test_windows_that_hide_a_key_or_two_on_either_side(Sq, Sk, hidden):
    for window in ((Sk - 1 - hidden, -1), (-1, Sq - 1 - hidden), (Sk - 1, Sq - 1 - hidden)):
        assert_close_to_oracle(make_case(Sq=Sq, Sk=Sk, D=16, Dv=16, window=window), "cpu")


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_rows_with_nothing_to_attend(options):
    case = make_case(Sq=9, Sk=5)
    q, k, v = case.fresh()[:3]
    call = attention_call(q, k, v, is_causal=True, **options)
    out, lse = cpu.forward(call)
    assert (out[:, :, :4] == 0).all() and (lse[:, :, :4] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 4:]).all()
    grads = cpu.backward(
        call._replace(saved=Saved(torch.ones_like(out), torch.ones_like(lse), out, lse))
    )
    assert (grads.query[:, :, :4] == 0).all()
    assert all(torch.isfinite(g).all() for g in grads[:3])


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, -math.inf, 3.0])], ids=str)
def test_no_keys(options, sinks):
    q, k, v = make_case().fresh()[:3]
    call = attention_call(q, k, v, kv_lens=int32(0, 0), sinks=sinks, **options)
    out, lse = cpu.forward(call)
    expected = (
        torch.full_like(lse, -math.inf) if sinks is None else sinks.view(-1, 1).expand_as(lse)
    )
    assert (out == 0).all() and (lse == expected).all()
    grads = cpu.backward(
        call._replace(saved=Saved(torch.ones_like(out), torch.ones_like(lse), out, lse))
    )
    assert all((g == 0).all() for g in grads[:3])
    if sinks is not None:
        rows = 2.0 * 33
        assert grads.sinks.tolist() == [rows, rows, 0.0, rows]


def test_lengths_and_ranges_outside_the_keys_are_clamped():
    q, k, v = make_case(dtype=torch.float64).fresh()[:3]
    for options in LOOPS.values():
        call = attention_call(
            q, k, v, kv_lens=int32(-5, 99), key_ranges=int32(-7, 99).view(1, 1, 1, 2),
            alibi_slopes=torch.ones(4), is_causal=True, **options,
        )  # fmt: skip
        torch.testing.assert_close(cpu.forward(call), reference.forward(call))


POISON = {
    "causal": {"is_causal": True},
    "softcap": {"is_causal": True, "softcap": 9.0},
    "window": {"window_left": 3, "window_right": 0},
    "kv_lens": {"kv_lens": int32(30, 12)},
    "loop, kv_lens": {"kv_lens": int32(30, 12), "softcap": 5.0},
    "bool mask": {"attn_mask": torch.ones(40, 40).tril().bool()},
    "float mask": {"attn_mask": torch.full((40, 40), -math.inf).triu(1)},
    "dropout": {"is_causal": True, "dropout_p": 0.5, "dropout_seed": torch.tensor([3])},
}


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "where"),
    # a bias is added to the score, and NaN - inf is NaN
    [(n, w) for n in POISON for w in ("value", "key") if (n, w) != ("float mask", "key")],
)
def test_a_bad_key_or_value_reaches_only_the_rows_that_attend_it(name, poison, where):
    options = POISON[name]
    case = make_case(Sq=40, Sk=40)
    q, k, v = case.fresh()[:3]
    grad_out = case.grad_outputs(q, q[..., 0])[0]
    call = attention_call(q, k, v, **options)
    clean = cpu.forward(call)
    clean_dq = cpu.backward(call._replace(saved=Saved(grad_out, None, *clean))).query
    scores = reference.modify_scores(torch.zeros(2, 4, 40, 40), call)
    attended = scores[..., 20] > -math.inf
    (v if where == "value" else k)[:, :, 20] = poison
    out, lse = cpu.forward(call)
    dq = cpu.backward(call._replace(saved=Saved(grad_out, None, out, lse))).query
    assert attended.any() and not attended.all()
    assert not torch.isnan(out[~attended]).any() and not torch.isnan(lse[~attended]).any()
    torch.testing.assert_close(out[~attended], clean[0][~attended])
    torch.testing.assert_close(lse[~attended], clean[1][~attended])
    torch.testing.assert_close(dq[~attended], clean_dq[~attended])
    if where == "value":
        assert not torch.isfinite(out[attended]).any()
        torch.testing.assert_close(lse, clean[1])


@pytest.mark.parametrize("Sk", [1, 5, 7, 9, 20])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_bad_query_reaches_its_row_however_few_keys_there_are(Sk, is_causal):
    call = make_case(Sq=5, Sk=Sk, is_causal=is_causal).fresh()
    q = call.query
    q[0, 1, 4] = math.nan
    out, lse = cpu.forward(call)
    bad = torch.zeros(lse.shape, dtype=torch.bool)
    bad[0, 1, 4] = True
    assert torch.equal(out.isnan().all(-1), bad) and torch.equal(out.isnan().any(-1), bad)
    assert torch.equal(lse.isnan(), bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("Hq", [2, 4])
def test_gradients_of_the_scores_of_one_key_are_exactly_zero(Hq, dtype):
    q, k, v = (torch.randn(2, H, n, 64, dtype=dtype) for H, n in ((Hq, 9), (2, 1), (2, 1)))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    for options in ({}, {"window": (3, 2), "softcap": 2.0}):
        out = fa_ops.attention(*tensors, **options)
        dq, dk, dv = torch.autograd.grad(out, tensors, torch.randn_like(out))
        assert not dq.any() and not dk.any() and dv.any()


def test_gradients_of_two_keys_are_those_of_two_calls_with_one_key():
    """A part of attention is given the result over all keys, as in rings."""
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (5, 2, 2))
    out, lse = fa_ops.attention(q, k, v, return_lse=True)
    grad_out = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
    parts = [
        torch.ops.fa.attention_backward(
            grad_out, None, q.detach(), k[:, :, n : n + 1].detach(), v[:, :, n : n + 1].detach(),
            out.detach(), lse.detach(),
        )
        for n in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 2), dk)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], 2), dv)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_bad_sink_reaches_its_head(softcap):
    call = make_case(sinks=True, softcap=softcap).fresh()
    call.operands.sinks[2] = math.nan
    out, lse = cpu.forward(call)
    assert torch.isnan(out[:, 2]).all() and torch.isnan(lse[:, 2]).all()
    assert torch.isfinite(out[:, [0, 1, 3]]).all()


@pytest.mark.parametrize("where", ["mask", "slopes"])
def test_a_bad_bias_reaches_no_row_that_masks_it(where):
    call = make_case(window=(1, 0), Sq=9, Sk=9, mask="float", alibi="heads").fresh()
    clean = cpu.forward(call)
    mask = call.operands.attn_mask.clone()
    if where == "mask":
        mask[..., 2, 5] = math.nan
        torch.testing.assert_close(cpu.forward(call.changed(attn_mask=mask)), clean)
    else:
        slopes = torch.tensor([math.nan, 0, 0, 0])
        bad = call.changed(alibi_slopes=slopes, kv_lens=int32(0, 9))
        torch.testing.assert_close(cpu.forward(bad), reference.forward(bad), equal_nan=True)


@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "alibi"])
def test_extreme_scores(name):
    options = {"plain": {}, "causal": {"is_causal": True}, "softcap": {"softcap": 8e3}}
    case = make_case(magnitude=1e4, scale=1.0, **options.get(name, {"alibi": "heads"}))
    assert_close_to_oracle(case, "cpu", gradients=False)
    q, k, v = case.fresh(requires_grad=True)[:3]
    out, lse = torch.ops.fa.attention_with_lse(q, k, v, is_causal=case.is_causal, scale=1.0)
    for grad in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_masked_by_the_lowest_finite_number_attends_all_keys(options, dtype):
    q, k, v = make_case(dtype=dtype).fresh()[:3]
    mask = torch.zeros(33, 47, dtype=dtype)
    mask[5] = torch.finfo(dtype).min
    out, _ = cpu.forward(attention_call(q, k, v, attn_mask=mask, **options))
    mean = v.float().mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(out[:, :, 5].float(), mean, rtol=1e-2, atol=1e-2)


def test_positions_of_many_keys():
    """Key positions beyond 2**16, in the loop and in aten's kernel."""
    size = {"B": 1, "Hq": 2, "Hkv": 1, "Sq": 2, "Sk": 70_001, "D": 8, "Dv": 8}
    assert_close_to_oracle(make_case(**size, is_causal=True, lse_grad=False), "cpu")
    assert_close_to_oracle(make_case(**size, is_causal=True, softcap=4.0), "cpu")
    assert_close_to_oracle(make_case(**size, window=(100, 0)), "cpu")


@pytest.mark.parametrize("tile", [(1, 1), (3, 5), (16, 16), (1000, 1000)], ids=str)
@pytest.mark.parametrize("slab", [1, 2**30], ids=["one head", "all heads"])
def test_results_do_not_depend_on_tiles(monkeypatch, tile, slab):
    case = make_case(
        B=3, Sq=13, Sk=21, kv_lens=True, window=(6, 2), softcap=3.0, sinks=True, dropout_p=0.2,
        mask="float", mask_shape=(1, 1, 0, 1), mask_grad=True, alibi="batch_heads",
        dtype=torch.float64,
    )  # fmt: skip
    monkeypatch.setattr(tiles, "ROWS", tile[0])
    monkeypatch.setattr(tiles, "COLS", tile[1])
    monkeypatch.setattr(tiles, "SLAB", slab)
    assert_close_to_oracle(case, "cpu")


def test_tiles_outside_every_key_range_are_not_visited():
    """A window costs O(S), and a bool mask of blocks only its blocks."""
    case = make_case(B=1, Sq=1024, Sk=1024)
    q, k, _ = case.fresh()[:3]
    blocks = torch.block_diag(*[torch.ones(256, 256)] * 4).bool()
    for options, expected in [
        ({"softcap": 1.0}, 64),
        ({"is_causal": True}, 40),
        ({"window_left": 100, "window_right": 0}, 16),
        ({"kv_lens": int32(256)}, 16),
        ({"attn_mask": blocks}, 16),
    ]:
        call = attention_call(q, k, k, **options)
        problem = tiles.ScoreProblem(call, attended_ranges(call), 0)
        problem.rows, problem.cols = 64, 256
        (slab,) = problem.slabs()
        scores = tiles.Scores(problem, slab)
        visited = sum(1 for rows in problem.row_blocks() for _ in scores.tiles(rows))
        assert visited == expected, options


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter")
@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_memory_is_linear_in_length(options):
    """The scores alone would be 128 MiB; results and gradients are 4."""
    q, k, v = (torch.randn(1, 2, 4096, 32, requires_grad=True) for _ in range(3))

    def call():
        out, lse = torch.ops.fa.attention_with_lse(q, k, v, is_causal=True, **options)
        torch.autograd.grad(out.sum(), (q, k, v))

    assert peak_memory(call, "cpu") < 24 * 2**20


@pytest.mark.parametrize("name", ["full", "causal", "causal, cached", "kv_lens", "softcap"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_have_the_documented_layouts(name, layout, dtype):
    case = make_case(**vars(FEATURES[name]) | {"layout": layout, "dtype": dtype})
    call = case.fresh()
    q, k, v = call[:3]
    out, lse = cpu.forward(call)
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    grads = cpu.backward(call._replace(saved=Saved(torch.ones_like(out), None, out, lse)))
    for grad, x in zip(grads, (q, k, v)):
        assert grad.dtype == dtype and grad.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("name", ["full", "causal", "softcap", "bias gradient", "dropout"])
def test_repeated_calls_are_bitwise_equal(name):
    case = FEATURES[name]
    call = case.fresh()
    out, lse = cpu.forward(call)
    again = cpu.forward(call)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    saved = Saved(*case.grad_outputs(out, lse), out, lse, case.mask_grad)
    first, second = (cpu.backward(call._replace(saved=saved)) for _ in range(2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second))


PACKED = {
    "ragged": PackedCase(),
    "ragged, causal": PackedCase(margin=2, features=make_case(is_causal=True)),
    "equal": PackedCase((20,) * 4, (30,) * 4, 1, make_case(is_causal=True)),
    "partly equal": PackedCase((4, 20, 20, 0, 20), (9, 30, 30, 7, 30), features=make_case()),
    "loop": PackedCase(features=make_case(softcap=3.0, Dv=24, window=(7, 2))),
    "alibi, equal": PackedCase((9,) * 3, (11,) * 3, 0, make_case(alibi="batch_heads")),
    "lengths": PackedCase(features=make_case(kv_lens=True, alibi="batch_heads", is_causal=True)),
    "sinks": PackedCase(margin=1, features=make_case(sinks=True, is_causal=True)),
    "dropout": PackedCase(features=make_case(dropout_p=0.4)),
    "dropout, equal": PackedCase((9,) * 3, (11,) * 3, 2, make_case(dropout_p=0.4)),
    "one": PackedCase((300,), (300,), 0, make_case(is_causal=True, layout="bshd")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lse_grad", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("name", PACKED)
def test_packed(name, lse_grad, dtype):
    case = PACKED[name]
    features = make_case(**vars(case.features) | {"dtype": dtype, "lse_grad": lse_grad})
    case = PackedCase(case.lengths_q, case.lengths_k, case.margin, features)
    assert_close_to_oracle(case, "cpu")


@pytest.mark.parametrize("ends", [[0, 99], [5, 2, 9], [-3, 4, 50], [60, 70]], ids=str)
def test_wrong_cu_seqlens_stay_inside_the_tensors(ends):
    call = PackedCase((20,), (20,)).fresh()
    wrong = torch.tensor(ends, dtype=torch.int32)
    right = torch.tensor([0, *[20] * (len(ends) - 1)], dtype=torch.int32)
    for ends_q, ends_k in [(wrong, wrong), (wrong, right), (right, wrong)]:
        call = call.changed(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
        out, lse = cpu.varlen_forward(call)
        grads = cpu.varlen_backward(call._replace(saved=Saved(out, None, out, lse)))
        assert all(torch.isfinite(x).all() for x in (out, *grads[:3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 8), (3, 2, 5, 7, 16), (4, 6, 1)], ids=str)
def test_merge_states(shape, dtype):
    g = torch.Generator().manual_seed(0)
    outs = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    lses = (torch.randn(shape[:-1], generator=g, dtype=torch.float64) * 30).to(wide)
    lses[torch.rand(shape[:-1], generator=g) < 0.3] = -math.inf
    out, lse = cpu.merge_states(outs, lses)
    expected_out, expected_lse = reference.merge_states(outs, lses)
    assert out.dtype == dtype and lse.dtype == wide
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_merge_states_ignores_the_out_of_a_state_without_keys():
    outs, lses = torch.randn(3, 5, 16), torch.randn(3, 5)
    outs[1], lses[1] = math.nan, -math.inf
    expected = cpu.merge_states(outs[[0, 2]], lses[[0, 2]])
    torch.testing.assert_close(cpu.merge_states(outs, lses), expected)


def test_other_devices_and_dtypes_are_refused():
    q = Case().fresh().query
    assert cpu.available_error() is None
    assert cpu.support_error(q) is None
    assert cpu.support_error(q.to("meta")) == "runs on CPU tensors, got meta"
    assert "got int32" in cpu.support_error(q.int())


def frames(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """(B, H, S, D) whose rows overlap: each begins one number after the row before it."""
    B, H, S, D = shape
    return torch.randn(B, H, S + D - 1, dtype=torch.float64).to(dtype).unfold(-1, D, 1)


OVERLAPS = {
    "unfolded": frames,
    "unfolded by 3": lambda B, H, S, D, dtype: (
        torch.randn(B, H, 3 * S + D).to(dtype).unfold(-1, D, 3)[:, :, :S]
    ),
    "heads unfolded": lambda B, H, S, D, dtype: frames(B, S, H, D, dtype=dtype).transpose(1, 2),
    "one row": lambda B, H, S, D, dtype: torch.randn(D).to(dtype).expand(B, H, S, D),
    "one head": lambda B, H, S, D, dtype: torch.randn(B, 1, S, D).to(dtype).expand(B, H, S, D),
    "wide": lambda B, H, S, D, dtype: torch.randn(B, H, S, 2 * D).to(dtype)[..., D:],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("softcap", [0.0, 9.0], ids=["flash", "loop"])
def test_rows_that_overlap(name, dtype, softcap):
    """Each of query, key, value and grad_out, in every path."""
    torch.manual_seed(0)
    shape, make = (2, 4, 7, 16), OVERLAPS[name]
    lens, ends = torch.tensor([5, 7]).int(), torch.tensor([0, 3, 7]).int()
    plain = [torch.randn(shape).to(dtype) for _ in range(4)]
    paths = {
        "dense": dict(is_causal=True), "full": {}, "lens": dict(kv_lens=lens),
    }  # fmt: skip
    for at in range(4):
        given = list(plain)
        given[at] = make(*shape, dtype=dtype)
        copies = [x.clone(memory_format=torch.contiguous_format) for x in given]
        for path, options in paths.items():
            results = []
            for *qkv, grad_out in (given, copies):
                qkv = [x.detach().requires_grad_() for x in qkv]
                out = fa_ops.attention(*qkv, softcap=softcap, **options)
                results.append((out, *torch.autograd.grad(out, qkv, grad_out)))
            torch.testing.assert_close(*results, msg=lambda text: f"{path} {at}: {text}")  # noqa: B023
        results = []
        for *qkv, grad_out in (given, copies):
            tokens = [x[0].transpose(0, 1).detach().requires_grad_() for x in qkv]
            out = fa_ops.attention_varlen(*tokens, ends, ends, softcap=softcap, is_causal=True)
            grads = torch.autograd.grad(out, tokens, grad_out[0].transpose(0, 1))
            with torch.no_grad():
                cached = fa_ops.attention_with_kv_cache(*qkv, lens, softcap=softcap)
                cache = [torch.zeros(2, 4, 14, 16, dtype=dtype) for _ in range(2)]
                fa_ops.attention_with_kv_cache(
                    qkv[0], *cache, lens, key=qkv[1], value=qkv[2], softcap=softcap
                )
            results.append((out, *grads, cached, *cache))
        torch.testing.assert_close(*results)


def test_merge_into():
    assert_merges_into(cpu, torch.float32, "cpu")
    assert_merges_into(cpu, torch.bfloat16, "cpu", sum_dtype=torch.float32)
