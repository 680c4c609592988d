"""Gradients on a Hopper GPU: NaN and Inf, extreme options, pairs of CTAs, whole heads."""

import dataclasses
import math

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.backends.hopper import backward
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import Arena, Case, PackedCase, assert_right, random_case
from tests.gpu import hopper_calls
from tests.gpu.cases import check, few_processors, lengthened, pairs_of_ctas

B, HQ, HKV, SQ, SK = 2, 4, 2, 200, 330
LOW = -math.inf
KERNELS = [
    (64, 64, False), (128, 128, False), (72, 72, False), (64, 64, True), (128, 128, True),
    (128, 64, False), (192, 128, False), (256, 256, False),
]  # fmt: skip


def _ranges():
    return torch.randint(0, SK + 1, (B, 1, SQ, 2), device="cuda").sort(-1).values.int()


def _bool_mask():
    return torch.rand(B, 1, SQ, SK, device="cuda") > 0.4


def _bias():
    bias = torch.randn(B, 1, SQ, SK, device="cuda", dtype=torch.bfloat16)
    return bias.masked_fill(~_bool_mask(), LOW)


FEATURES = {
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"window_left": 90, "window_right": 7},
    "lengths": lambda: {"kv_lens": torch.tensor([SK, 77], device="cuda", dtype=torch.int32)},
    "ranges": lambda: {"key_ranges": _ranges()},
    "bool mask": lambda: {"attn_mask": _bool_mask()},
    "float mask": lambda: {"attn_mask": _bias()},
    "dropout": lambda: {
        "is_causal": True, "dropout_p": 0.2, "dropout_seed": torch.tensor([5], device="cuda"),
    },
    "softcap and slopes": lambda: {
        "is_causal": True, "softcap": 20.0, "alibi_slopes": torch.rand(HQ, device="cuda") * 0.1,
    },
}  # fmt: skip


def draw(H, S, D, batch=B):
    return torch.randn(batch, S, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def attended(call, Sq=SQ, Sk=SK, batch=B):
    """bool (B, Hq, Sq, Sk)."""
    i, j = (torch.arange(n, device="cuda") for n in (Sq, Sk))
    t, o = call.operands, call.options
    keys = torch.full((batch,), Sk, device="cuda") if t.kv_lens is None else t.kv_lens
    keys = keys.view(-1, 1, 1, 1)
    diagonal = i[:, None] + keys - Sq
    kept = (j < keys).expand(batch, HQ, Sq, Sk)
    if o.is_causal:
        kept = kept & (j <= diagonal)
    if o.window_left >= 0:
        kept = kept & (j >= diagonal - o.window_left) & (j <= diagonal + o.window_right)
    if t.key_ranges is not None:
        first, end = t.key_ranges[..., :1], t.key_ranges[..., 1:]
        kept = kept & (j >= first) & (j < end)
    if t.attn_mask is not None:
        mask = t.attn_mask
        kept = kept & (mask if mask.dtype == torch.bool else mask != LOW)
    return kept


def touched(kept, operand, b, h, row):
    """The rows of dQ, and of dK and dV, that NaN in one row of an operand affects."""
    queries = torch.zeros(kept.shape[:3], dtype=torch.bool, device="cuda")
    if operand in ("query", "grad_out", "grad_lse"):
        queries[b, h, row] = True
    else:
        heads = slice(h * (HQ // HKV), (h + 1) * (HQ // HKV))
        queries[b, heads] = kept[b, heads, :, row]
    queries &= kept.any(-1)
    keys = (kept & queries[..., None]).any(2)
    return queries, keys.view(kept.shape[0], HKV, HQ // HKV, -1).any(2)


def assert_isolated(grads, clean, queries, keys):
    for name, x, expected, rows in zip("qkv", grads, clean, (queries, keys, keys)):
        error = (x.float() - expected.float())[~rows].abs().max()
        assert error <= 0.02 * expected.float().abs().max(), f"d{name} differs by {error}"
    assert grads.query[queries].isnan().any(-1).all()
    assert grads.key[keys].isnan().any(-1).all()


def gradients_by(q, k, v, grad_out, options, grad_lse=None, poison=None, kept=None):
    """Gradients, given an out and an lse that contain NaN in affected rows only."""
    clean = [x.nan_to_num(0, 0, 0).double() for x in (q, k, v)]
    out, lse = reference.forward(attention_call(*clean, **options))
    lse = lse.float().contiguous()
    if poison in ("key", "value", "query"):
        out[kept] = math.nan
    if poison in ("key", "query"):
        lse[kept] = math.nan
    out = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    saved = Saved(grad_out, grad_lse, out, lse)
    return hopper_calls.backward(attention_call(q, k, v, saved=saved, **options))


@pytest.mark.parametrize("processors", [None, 1])  # groups of query heads are divided, or not
@pytest.mark.parametrize("operand", ["query", "key", "value", "grad_out", "grad_lse"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("D, Dv, deterministic", KERNELS)
def test_dense(D, Dv, deterministic, feature, operand, processors):
    torch.manual_seed(D)
    options = {"deterministic": deterministic, **FEATURES[feature]()}
    operands = {
        "query": draw(HQ, SQ, D), "key": draw(HKV, SK, D), "value": draw(HKV, SK, Dv),
        "grad_out": draw(HQ, SQ, Dv), "grad_lse": torch.randn(B, HQ, SQ, device="cuda"),
    }  # fmt: skip
    # adding -inf to a NaN score gives NaN
    is_added = feature == "float mask" and operand in ("query", "key")
    call = attention_call(*(operands[name] for name in ("query", "key", "value")), **options)
    kept = attended(call.changed(attn_mask=None) if is_added else call)

    def solve(poison=None, rows=None):
        q, k, v, grad_out, grad_lse = operands.values()
        return gradients_by(q, k, v, grad_out, options, grad_lse, poison, rows)

    with few_processors(processors) if processors else torch.no_grad():
        clean = solve()
        for value in (math.nan, math.inf):
            b, h, row = 1, 1, 61
            before = operands[operand][b, h, row].clone()
            operands[operand][b, h, row] = value
            queries, keys = touched(kept, operand, b, h, row)
            grads = solve(operand, queries)
            operands[operand][b, h, row] = before
            if value == math.nan:
                assert_isolated(grads, clean, queries, keys)
            else:
                for x, y, rows in zip(grads, clean, (queries, keys, keys)):
                    error = (x.float() - y.float())[~rows].abs().max()
                    assert error <= 0.02 * y.float().abs().max()


@pytest.mark.parametrize("D, Dv, deterministic", KERNELS)
def test_nan_in_keys_beyond_kv_lens_has_no_effect(D, Dv, deterministic):
    q, k, v, grad_out = draw(HQ, SQ, D), draw(HKV, SK, D), draw(HKV, SK, Dv), draw(HQ, SQ, Dv)
    for lens in ([SK, 77], [0, 129], [64, 128]):
        kv_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
        options = {"deterministic": deterministic, "kv_lens": kv_lens}
        clean = gradients_by(q, k, v, grad_out, options)
        dirty_k, dirty_v = k.clone(), v.clone()
        for b, n in enumerate(lens):
            dirty_k[b, :, n:], dirty_v[b, :, n:] = math.nan, math.inf
        grads = gradients_by(q, dirty_k, dirty_v, grad_out, options)
        for x, y in zip(grads[:3], clean):
            assert (x - y).abs().max() <= 0.02 * y.abs().max()
        for b, n in enumerate(lens):
            assert (grads.key[b, :, n:] == 0).all() and (grads.value[b, :, n:] == 0).all()


@pytest.mark.parametrize("D, Dv, deterministic", KERNELS)
def test_rows_without_keys_have_zero_gradients(D, Dv, deterministic):
    q, k, v, grad_out = draw(HQ, SQ, D), draw(HKV, 100, D), draw(HKV, 100, Dv), draw(HQ, SQ, Dv)
    # the first 100 queries have no keys
    options = {"deterministic": deterministic, "is_causal": True}
    grad_lse = torch.randn(B, HQ, SQ, device="cuda")
    clean = gradients_by(q, k, v, grad_out, options, grad_lse)
    for x in (q, grad_out, grad_lse):
        x[:, :, :100] = math.nan
    grads = gradients_by(q, k, v, grad_out, options, grad_lse)
    assert (grads.query[:, :, :100] == 0).all()
    for x, y in zip(grads[:3], clean):
        assert (x - y).abs().max() <= 0.02 * y.abs().max()


@pytest.mark.parametrize("D, deterministic", [(64, False), (128, False), (128, True), (256, False)])
@pytest.mark.parametrize("operand", range(4))
@pytest.mark.parametrize("feature", ["full", "causal", "ALiBi"])
def test_sequences(D, deterministic, operand, feature):
    lengths, margin = [70, 3, 129, 1, 60], 5  # the margins are tokens outside all sequences
    T, bad = sum(lengths) + 2 * margin, range(margin + 70 + 3, margin + 70 + 3 + 129)
    ends = (torch.tensor([0, *lengths]).cumsum(0) + margin).int().cuda()
    tensors = [
        torch.randn(T, H, D, device="cuda", dtype=torch.bfloat16) for H in (HQ, HKV, HKV, HQ)
    ]
    slopes = torch.rand(len(lengths), HQ, device="cuda") * 0.1 if feature == "ALiBi" else None
    call = attention_call(
        *tensors[:3], is_causal=feature != "full", deterministic=deterministic,
        alibi_slopes=slopes, cu_seqlens_q=ends, cu_seqlens_k=ends,
    )  # fmt: skip
    q, k, v = (x.double() for x in call[:3])
    out, lse = reference.varlen_forward(call._replace(query=q, key=k, value=v))
    out, lse = out.bfloat16().contiguous(), lse.float().contiguous()

    def solve():
        saved = Saved(tensors[3], None, out, lse)
        return hopper_calls.varlen_backward(call._replace(saved=saved))

    clean = solve()
    for token in (bad.start + 60, 2, T - 2):
        tensors[operand][token] = math.nan
    if operand < 3:  # the forward pass would give NaN for the sequence
        out[bad], lse[:, bad] = math.nan, math.nan
    grads, good = solve(), torch.ones(T, dtype=torch.bool)
    good[bad] = False
    for x, y in zip(grads[:3], clean):
        assert (x - y)[good].abs().max() <= 0.02 * y.abs().max()


def test_nan_in_all_rows_is_not_much_slower():
    """The search for the source of NaN stops early for rows that must be NaN."""
    q = torch.randn(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16)
    call, times = attention_call(q, q, q, is_causal=True), []
    for value in (0.0, math.nan):
        out, lse = q + value, torch.zeros(1, 8, 8192, device="cuda") + value
        for _ in range(2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            grads = hopper_calls.backward(call._replace(saved=Saved(out, None, out, lse)))
            end.record()
            torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        assert all(x.isnan().all() for x in grads[:3]) == (value != 0.0)
    assert times[1] < 20 * times[0]


@pytest.mark.parametrize("D, Dv, deterministic", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_huge_scores(D, Dv, deterministic, dtype):
    shapes = (HQ, SQ, D), (HKV, SK, D), (HKV, SK, Dv), (HQ, SQ, Dv)
    q, k, v, grad_out = (draw(*shape).to(dtype) for shape in shapes)
    limit = 133120.0 if dtype == torch.bfloat16 else 60000.0
    for huge in (limit, 3000.0, 300.0):
        pairs = (q * huge, k * huge), (q * 0 + huge, k * 0 + huge), (q * 0 - huge, k * 0 + huge)
        for a, b in pairs:
            a, b = a.clamp(-limit, limit), b.clamp(-limit, limit)
            for is_causal in (False, True):
                options = {"is_causal": is_causal, "deterministic": deterministic}
                grads = gradients_by(a, b, v, grad_out, options)
                assert grads.value.isfinite().all()
                if dtype == torch.bfloat16:  # the others may overflow in float16
                    assert grads.query.isfinite().all() and grads.key.isfinite().all()


@pytest.mark.parametrize("D, Dv, deterministic", KERNELS)
@pytest.mark.parametrize("softcap", [1e-40, 1e-3, 5.0, 300.0, 1e4, 1e6, 1e9, 1e300])
def test_softcaps(D, Dv, deterministic, softcap):
    q, k, v, grad_out = draw(HQ, SQ, D) * 3, draw(HKV, SK, D), draw(HKV, SK, Dv), draw(HQ, SQ, Dv)
    options = {"is_causal": True, "softcap": softcap, "deterministic": deterministic}
    grads = gradients_by(q, k, v, grad_out, options)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    # the oracle cannot differentiate softcaps of 1e-40 or 1e300 in float64
    exact = options | {"softcap": min(max(softcap, 1e-12), 1e12)}
    out, _ = reference.forward(attention_call(*leaves, **exact))
    expected = torch.autograd.grad(out, leaves, grad_out.double())
    for x, y in zip(grads, expected):
        assert (x.double() - y).abs().max() <= 0.02 * y.abs().max() + 1e-6


@pytest.mark.parametrize("D, Dv, deterministic", KERNELS)
def test_windows_wider_than_the_sequence_have_no_effect(D, Dv, deterministic):
    q, k, v, grad_out = draw(HQ, SQ, D), draw(HKV, SK, D), draw(HKV, SK, Dv), draw(HQ, SQ, Dv)
    q, k, v, grad_out = q[:1], k[:1], v[:1], grad_out[:1]
    for is_causal in (False, True):
        plain = {"is_causal": is_causal, "deterministic": deterministic}
        expected = gradients_by(q, k, v, grad_out, plain)
        for far in (1 << 20, (1 << 29) - 1, 1 << 29, 1 << 30, (1 << 31) - 2):
            for left, right in ((far, far), (-1, far), (far, -1)):
                options = plain | {"window_left": left, "window_right": right}
                grads = gradients_by(q, k, v, grad_out, options)
                for x, y in zip(grads[:3], expected):
                    assert torch.equal(x, y) or not deterministic
                    assert (x - y).abs().max() <= 0.02 * y.abs().max()


@pytest.mark.parametrize("D, Dv, deterministic", KERNELS)
@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1e-8])
def test_small_scales(D, Dv, deterministic, scale):
    q, k, v, grad_out = draw(HQ, SQ, D), draw(HKV, SK, D), draw(HKV, SK, Dv), draw(HQ, SQ, Dv)
    options = {"scale": scale, "deterministic": deterministic}
    grads = gradients_by(q, k, v, grad_out, options)
    assert all(x.isfinite().all() for x in grads[:3])
    mean = grad_out.double().mean(2, keepdim=True) * SQ / SK
    expected = mean.view(B, HKV, 2, 1, Dv).sum(2)
    assert (grads.value.double() - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("sinks", [LOW, 0.5])
def test_sinks_of_rows_without_keys(sinks):
    q, k, v, grad_out = draw(HQ, SQ, 64), draw(HKV, 100, 64), draw(HKV, 100, 64), draw(HQ, SQ, 64)
    options = {"is_causal": True, "sinks": torch.full((HQ,), sinks, device="cuda")}
    grads = gradients_by(q, k, v, grad_out, options)
    assert grads.sinks.isfinite().all() and (sinks != LOW or (grads.sinks == 0).all())
    assert all(x.isfinite().all() for x in grads[:3])


# The backward kernel for pairs of CTAs on a Hopper GPU, for queries of any number of keys.


@pytest.fixture
def pairs():
    with pairs_of_ctas():
        yield


def pair_case(seed, **fixed):
    D = (256, 248)[seed % 2]
    dtype = (torch.bfloat16, torch.float16)[seed // 4 % 2]
    plain = dict(mask=None, softcap=0.0, dropout_p=0.0, deterministic=False)
    return random_case(seed, **{"D": D, "Dv": D, "dtype": dtype, "device": "cuda"} | plain | fixed)


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("seed", range(60))
def test_random_by_pairs(seed):
    check(lengthened(pair_case(seed)))


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("seed", range(8))
def test_nothing_outside_the_tensors_is_written_by_pairs(seed):
    assert_right(pair_case(seed + 500), "hopper", Arena())


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (1, 700), (129, 129), (300, 1000), (1300, 700), (64, 128), (65, 64)],
    ids=str,
)
@pytest.mark.parametrize(
    "changes", [{}, {"is_causal": True}, {"window": (100, 30)}, {"kv_lens": True}], ids=str
)
def test_lengths_by_pairs(changes, lengths):
    check(
        Case(
            B=2, Hq=4, Hkv=2, Sq=lengths[0], Sk=lengths[1], D=256, Dv=256, dtype=torch.bfloat16,
            device="cuda", **changes,
        )
    )  # fmt: skip


@pytest.mark.usefixtures("pairs")
def test_groups_in_parts():
    base = Case(
        B=3, Hq=8, Hkv=1, Sq=333, Sk=430, D=256, Dv=256, dtype=torch.float16, device="cuda",
        is_causal=True,
    )  # fmt: skip
    for count in (1, 16, 132):
        with few_processors(count):
            check(base)
            check(dataclasses.replace(base, Hkv=8))


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("poison", ["nan key", "inf value", "nan value", "nan query"])
def test_nothing_but_what_attends_it_becomes_nan(poison):
    assert_right(pair_case(4, Sq=200, Sk=300, is_causal=True, poison=poison), "hopper", None)


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("operand", ["query", "key", "value", "grad_out", "grad_lse"])
@pytest.mark.parametrize("feature", ["causal", "window", "lengths", "ranges"])
def test_nan_and_inf_by_pairs(feature, operand):
    for processors in (None, 1):
        test_dense(256, 256, False, feature, operand, processors)


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("alibi", [None, "batch_heads"])
def test_packed(alibi):
    features = Case(
        Hq=6, Hkv=2, D=256, Dv=256, dtype=torch.bfloat16, device="cuda", is_causal=True,
        alibi=alibi,
    )  # fmt: skip
    check(PackedCase((700, 3, 129), (700, 3, 129), 0, features))


# Backward passes on a Hopper GPU whose CTAs have all keys of a head, or two slots for keys.

DIMS = (64, 128, 40, 120)


@pytest.fixture(params=[(1, True), (4, True), (4, False)], ids=str)
def taken(request, monkeypatch):
    """Each answer of the rule, with so few multiprocessors that it prefers whole heads.

    Parameters are their number, and whether the products sum rows themselves.
    """
    processors, sums_rows = request.param
    answers, rule = [], backward.prefers_whole_heads
    monkeypatch.setattr(backward, "prefers_own_row_sums", lambda *args: sums_rows)
    monkeypatch.setattr(
        backward,
        "prefers_whole_heads",
        lambda *args: answers.append(rule(*args)) or answers[-1],
    )
    with few_processors(processors):
        yield answers


def whole_case(seed, **fixed):
    D, dtype = DIMS[seed % 4], (torch.bfloat16, torch.float16)[seed // 4 % 2]
    plain = {
        "mask": None, "softcap": 0.0, "dropout_p": 0.0, "key_ranges": None, "kv_lens": False,
        "D": D, "Dv": D, "dtype": dtype, "device": "cuda",
    }  # fmt: skip
    return random_case(seed, **plain | fixed)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("seed", range(60))
def test_random_by_whole_heads(seed):
    check(whole_case(seed, B=3, Hq=8, Hkv=(8, 4, 2)[seed % 3], Sk=(100, 300, 777)[seed // 4 % 3]))


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("seed", range(8))
def test_nothing_outside_the_tensors_is_written_by_whole_heads(seed):
    assert_right(whole_case(seed + 500, Hq=6, Hkv=6), "hopper", Arena())


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (1, 700), (129, 129), (300, 1000), (1300, 700), (64, 128), (512, 512), (65, 64)],
    ids=str,
)
@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, {"window": (100, 30)}], ids=str)
def test_lengths_by_whole_heads(changes, lengths, D, taken):
    case = Case(
        B=2, Hq=4, Hkv=2, Sq=lengths[0], Sk=lengths[1], D=D, Dv=D, dtype=torch.bfloat16,
        device="cuda", **changes,
    )  # fmt: skip
    check(case)
    check(dataclasses.replace(case, B=5, Hq=3, Hkv=3))
    assert any(taken) or (lengths[0] > lengths[1] and changes)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize(
    "B, Hq, Hkv, Sq, Sk", [(1, 8, 8, 64, 64), (2, 4, 2, 60, 100), (3, 5, 5, 100, 256)]
)
def test_small_problems_on_many_processors(B, Hq, Hkv, Sq, Sk, D, taken):
    with few_processors(132):
        for is_causal in (False, True):
            check(
                Case(
                    B=B, Hq=Hq, Hkv=Hkv, Sq=Sq, Sk=Sk, D=D, Dv=D, dtype=torch.float16,
                    device="cuda", is_causal=is_causal, sinks=True,
                )
            )  # fmt: skip
    assert D > 64 or all(taken)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("D", DIMS)
def test_bits_repeat(D):
    """Each thread adds its sums in one order, so `deterministic` needs no other kernel."""
    case = Case(
        B=5, Hq=8, Hkv=8, Sq=600, Sk=600, D=D, Dv=D, dtype=torch.bfloat16, device="cuda",
        is_causal=True, deterministic=True,
    )  # fmt: skip
    call = case.fresh()
    out, lse = hopper_calls.forward(call)
    grad = torch.randn_like(out)
    first, *more = (
        hopper_calls.backward(call._replace(saved=Saved(grad, None, out, lse)))[:3]
        for _ in range(5)
    )
    for again in more:
        assert all(torch.equal(x, y) for x, y in zip(first, again))


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("operand", ["query", "key", "value", "grad_out", "grad_lse"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("feature", ["causal", "window"])
def test_nan_and_inf_by_whole_heads(feature, D, operand, taken):
    test_dense(D, D, False, feature, operand, None)
    assert any(taken)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("D", [64, 40])
@pytest.mark.parametrize(
    "changes",
    [{}, {"is_causal": True}, {"window": (100, 30)}, {"kv_lens": True}, {"alibi": "heads"}],
    ids=str,
)
def test_two_slots_for_keys(changes, D, monkeypatch):
    """Also of CTAs that take blocks of keys of several heads, and parts of a group's queries."""
    monkeypatch.setattr(backward, "prefers_whole_heads", lambda *args: False)
    base = Case(
        B=2, Hq=6, Hkv=6, Sq=300, Sk=450, D=D, Dv=D, dtype=torch.bfloat16, device="cuda", **changes
    )
    check(base)
    check(dataclasses.replace(base, Hkv=1))
    check(dataclasses.replace(base, Sq=700, Sk=600))
