"""Masks: those that become arguments of the operator, those that stay dense, and rows without
keys.
"""

import pytest
import torch

from tests.compile_passes.helpers import assert_same, check, fuse, qkv, results, verified

INF = float("inf")
LOWEST = torch.finfo(torch.float32).min


def attention(q, k, v, change):
    return change(q @ k.transpose(-1, -2) * 0.35).softmax(-1) @ v


def positions(scores):
    i = torch.arange(scores.shape[-2])[:, None]
    return i, torch.arange(scores.shape[-1])[None]


def tril(scores):
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~keep, -INF)


def triu_added(scores):
    return scores + torch.triu(torch.full(scores.shape[-2:], -INF), diagonal=1)


def triu_written(scores):
    mask = torch.full(scores.shape[-2:], -INF)
    mask.triu_(1)
    return scores + mask[None, None]


def compared(scores):
    i, j = positions(scores)
    return torch.where(i >= j, scores, torch.finfo(scores.dtype).min)


def compared_the_other_way(scores):
    i, j = positions(scores)
    return torch.where(j > i, -1e9, scores)


def tril_of_ones_is_zero(scores):
    mask = torch.tril(torch.ones(1, 1, *scores.shape[-2:]))
    return scores.masked_fill(mask == 0, -INF)


def one_minus_mask(scores):
    i, j = positions(scores)
    return scores + (1.0 - (j <= i).float()) * -10000.0


def gathered_positions(scores):
    """As in transformers under torch.compile, by indexing with aranges."""
    i, j = positions(scores)
    batch = torch.arange(scores.shape[0])[:, None, None, None]
    place = torch.arange(scores.shape[-1])[None].expand(scores.shape[0], -1)
    keep = place[batch, j[None, None]] <= place[batch, i[None, None]]
    return scores + torch.where(keep, torch.zeros(()), torch.finfo(torch.float32).min)


def captured_as_methods(scores):
    i, j = positions(scores)
    return scores.masked_fill(j.__gt__(i), -INF)


def compared_with_a_number(scores):
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(keep == 0, -INF)


def filled_twice(scores):
    """As in PyTorch's tutorial on transformers."""
    keep = (torch.ones(scores.shape[-2:]).triu() == 1).transpose(0, 1)
    return scores + keep.float().masked_fill(keep == 0, -INF).masked_fill(keep == 1, 0.0)


def repeated_positions(scores):
    i = torch.arange(scores.shape[-1]).repeat(scores.shape[-2], 1)
    return scores.masked_fill(i > i.t(), -INF)


def not_packed(scores):
    """A mask of packed sequences, of which arange positions make one."""
    i, j = positions(scores)
    place = torch.arange(scores.shape[-1]).unsqueeze(0).expand(scores.shape[0], -1)
    new = torch.diff(place, prepend=place[:, :1] - 1, dim=-1) != 1
    segment = new.cumsum(-1)
    same_segment = segment[:, None, :, None] == segment[:, None, None, :]
    return scores.masked_fill(~(same_segment & (j <= i)), -INF)


CAUSAL = [
    tril,
    triu_added,
    triu_written,
    compared,
    compared_the_other_way,
    tril_of_ones_is_zero,
    one_minus_mask,
    gathered_positions,
    compared_with_a_number,
    filled_twice,
    repeated_positions,
    captured_as_methods,
    not_packed,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("change", CAUSAL, ids=lambda f: f.__name__)
def test_causal_masks_become_a_flag(change, dynamic):
    fusion = check(lambda q, k, v: attention(q, k, v, change), qkv(), dynamic=dynamic)
    assert fusion.findings[-1].masks == "is_causal"


def window(scores):
    i, j = positions(scores)
    return scores.masked_fill((j > i) | (i - j >= 3), -INF)


def band(scores):
    i, j = positions(scores)
    return scores.masked_fill((i - j).abs() > 2, -1e9)


def right_only(scores):
    i, j = positions(scores)
    return scores.masked_fill(~(j < i + 4), -INF)


@pytest.mark.parametrize(
    ("change", "masks"),
    [
        (window, "is_causal, window=(2, 0)"),
        (band, "window=(2, 2)"),
        (right_only, "window=(None, 3)"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_windows_become_flags(change, masks):
    fusion = check(lambda q, k, v: attention(q, k, v, change), qkv())
    assert fusion.findings[0].masks == masks


def test_the_causal_flag_is_aligned_at_the_bottom_right():
    def aligned(scores):
        more = scores.shape[-1] - scores.shape[-2]
        return scores + torch.full(scores.shape[-2:], -INF).triu(more + 1)

    for dynamic in (False, True):
        fusion = check(
            lambda q, k, v: attention(q, k, v, aligned), qkv(Sq=5, Sk=9), dynamic=dynamic
        )
        assert fusion.findings[0].masks == "is_causal"
    fusion = check(lambda q, k, v: attention(q, k, v, tril), qkv(Sq=5, Sk=9))
    assert "key_ranges" in fusion.code  # aligned at the top left


@pytest.mark.parametrize("value", [True, False])
def test_masks_padded_for_memory_keys_are_intervals(value):
    def padded(q, k, v):
        keep = torch.ones(12, 12, dtype=torch.bool).tril()
        keep = torch.nn.functional.pad(keep, (4, 0) if value else (0, 4), value=value)
        return (q @ k.mT * 0.35).masked_fill(~keep, LOWEST).softmax(-1) @ v

    (finding,) = check(padded, qkv(Sk=16)).findings
    assert finding.masks == "a key range for each query"


def test_masks_that_keep_everything_are_dropped():
    def change(scores):
        i, j = positions(scores)
        return scores.masked_fill(j >= i + scores.shape[-1], -INF) + 3.0

    fusion = check(lambda q, k, v: attention(q, k, v, change), qkv())
    assert fusion.findings[0].masks == "no mask"


def test_biases_of_unknown_content_stay_dense_and_get_gradients():
    def function(q, k, v, bias, per_key):
        return attention(q, k, v, lambda s: s + bias - 2.0 * per_key)

    inputs = (*qkv(), torch.randn(4, 12, 12), torch.randn(2, 1, 1, 12))
    check(function, inputs)


def test_a_bias_with_causal_inf_keeps_the_flag():
    def function(q, k, v, bias):
        return attention(q, k, v, lambda s: tril(s + bias))

    fusion = check(function, (*qkv(), torch.randn(12, 12)))
    assert fusion.findings[0].masks == "is_causal, dense attn_mask"


def padding():
    keep = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    keep[0, ..., :7] = False
    return keep


def padded(kind, keep):
    """Causal and padded on the left: the first rows of the first sequence attend nothing."""

    def change(scores):
        i, j = positions(scores)
        visible = keep & (j <= i)
        lowest = torch.finfo(torch.float32).min  # a global would become a symbol
        if kind == "filled":
            return scores.masked_fill(~visible, lowest)
        if kind == "filled a little":
            return scores.masked_fill(~visible, -1e4)
        fill = {"added": lowest, "added a little": -1e4, "added inf": -INF}[kind]
        return scores + torch.where(visible, torch.zeros(()), fill)

    return change


@pytest.mark.parametrize("Hkv, dynamic", [(4, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", ["filled", "filled a little", "added", "added a little"])
def test_rows_without_keys_match_eager(kind, Hkv, dynamic):
    def function(q, k, v, keep):
        k, v = (x.repeat_interleave(4 // Hkv, 1) for x in (k, v))
        return attention(q, k, v, padded(kind, keep))

    fusion = check(function, (*qkv(Hkv=Hkv), padding()), dynamic=dynamic)
    assert fusion.findings[0].masks == "dense attn_mask"


@pytest.mark.parametrize("Sk, proven", [(12, True), (15, True), (9, False)])
def test_prefixes_average_no_rows_where_every_row_has_a_key(Sk, proven):
    """Then the call is a plain one, in training too."""

    def function(q, k, v):
        i, j = torch.arange(12)[:, None] + (Sk - 12), torch.arange(Sk)
        keep = (j <= i) | ((i < 4) & (j < 4))
        scores = q @ k.mT * 0.35 + torch.where(keep, 0.0, LOWEST)
        return scores.softmax(-1) @ v

    fusion = check(function, qkv(Sk=Sk))
    assert fusion.findings[0].masks == "dense attn_mask"
    assert fusion.code.count("fa.attention") == 1
    assert ("averaging_rows" in fusion.code) != proven


def test_rows_without_keys_under_inf_are_zero():
    def function(q, k, v, keep):
        return attention(q, k, v, padded("added inf", keep))

    inputs = (*qkv(), padding())
    fusion = fuse(function)
    out, expected = (results(f, inputs, False)[0] for f in (fusion.run, function))
    assert fusion.fused == 1 and expected[0, :, :7].isnan().all()
    torch.testing.assert_close(out, expected.nan_to_num(0.0), rtol=1e-4, atol=1e-5)


def test_weights_masked_again_make_rows_without_keys_zero():
    def function(q, k, v, drop):
        scores = (q @ k.mT).masked_fill(drop, LOWEST)
        return scores.softmax(-1).masked_fill(drop, 0.0) @ v

    drop = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.5
    drop[0, 0, 3] = True
    check(function, (*qkv(), drop))


def test_the_second_mask_may_be_recomputed():
    """As in CPM-Ant."""

    def function(q, k, v, mask, bias):
        scores = (q @ k.mT + bias).masked_fill(mask.view(2, 1, 12, 12) == torch.tensor(0), -INF)
        p = scores.softmax(-1).masked_fill(mask.view(2, 1, 12, 12) == torch.tensor(0), 0.0)
        return p @ v

    mask = torch.rand(2, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[..., 0] = True
    check(function, (*qkv(), mask.long(), torch.randn(4, 12, 12)))


def test_weights_masked_again_beside_another_mask_are_refused():
    """Where the other mask hides all remaining keys, the masked weights are not the rest."""

    def function(q, k, v, drop):
        scores = (q @ k.mT + torch.where(padding(), 0.0, LOWEST)).masked_fill(drop, -1e9)
        return scores.softmax(-1).masked_fill(drop, 0.0) @ v

    fusion = fuse(function)
    results(fusion.run, (*qkv(), torch.ones(12, 12, dtype=torch.bool).triu(1)), True)
    assert fusion.reasons == [
        "the attention weights are masked after the softmax, not as the scores were"
    ]


@pytest.mark.parametrize("again", ["another tensor", "another comparison", "another number"])
def test_weights_under_another_mask_are_refused(again):
    def function(q, k, v, mask, other):
        second = {
            "another tensor": other == 0,
            "another comparison": mask != 0,
            "another number": mask == 1,
        }[again]
        return (q @ k.mT).masked_fill(mask == 0, -INF).softmax(-1).masked_fill(second, 0.0) @ v

    masks = torch.randint(1, 3, (2, 1, 12, 12)), torch.randint(0, 2, (2, 1, 12, 12))
    fusion = fuse(function)
    results(fusion.run, (*qkv(), *masks), True)
    assert fusion.reasons == [
        "the attention weights are masked after the softmax, not as the scores were"
    ]


def test_masks_that_hide_nothing_are_dropped():
    """As in SEW-D without padding."""

    def function(q, k, v):
        hidden = ~torch.ones(2, 1, 12, 12, dtype=torch.int64).to(torch.bool)
        return (q @ k.mT).masked_fill(hidden, LOWEST).softmax(-1).masked_fill(hidden, 0) @ v

    fusion = check(function, qkv())
    assert fusion.findings[0].masks == "no mask"


def test_nan_to_num_after_the_softmax_is_fused():
    def function(q, k, v, drop):
        return torch.nan_to_num((q @ k.mT).masked_fill(drop, -INF).softmax(-1)) @ v

    drop = torch.zeros(2, 1, 12, 12, dtype=torch.bool)
    drop[1, 0, 5] = True
    inputs = (*qkv(), drop)
    fusion = fuse(function)
    assert_same(function, inputs, fusion, train=False)
    assert fusion.fused == 1


def test_a_small_fill_over_keys_is_kept_exactly():
    def function(q, k, v, drop):
        return attention(q, k, v, lambda s: s.masked_fill(drop[:, None, None], -1.0))

    check(function, (*qkv(), padding()[:, 0, 0]))


def test_expanded_masks_are_passed_unexpanded():
    def function(q, k, v, keep):
        def change(scores):
            return scores.masked_fill(~keep.expand_as(scores), -INF)

        return attention(q, k, v, change)

    keep = padding()
    fusion = check(function, (*qkv(), keep))
    (call,) = fusion.graphs[0].find_nodes(op="call_function", target=torch.ops.fa.attention.default)
    assert call.args[3].meta["example_value"].shape == keep.shape


def causal_fill_then_padding(s, keep, _):
    """As in GPT-Neo: a buffer of unknown content, then a float mask."""
    return torch.where(keep, s, LOWEST) + torch.where(padding(), 0.0, LOWEST)


def padding_then_causal_fill(s, keep, _):
    """A row may average keys with real scores together with filled ones."""
    return torch.where(keep, s + torch.where(padding(), 0.0, LOWEST), LOWEST)


def two_fills(s, keep, _):
    return s.masked_fill(~keep, -1e9).masked_fill(padding().logical_not(), -INF)


def bias_after_a_fill(s, keep, bias):
    return s.masked_fill(~keep, LOWEST) + bias.detach()


def some_keys_lowest_and_others_infinite(s, keep, bias):
    """As the dynamic mask in Doge."""
    mask = bias.masked_fill(~keep, LOWEST)
    return s + mask.masked_fill(torch.arange(12) > torch.arange(12)[:, None], -INF)


def bias_and_lowest_of_unknown_content(s, keep, bias):
    return s + bias + torch.where(keep, 0.0, LOWEST)


def a_fill_after_minus_infinity(s, keep, _):
    """The fill replaces -inf as well: such a row averages future keys."""
    future = torch.arange(12) > torch.arange(12)[:, None]
    return s.masked_fill(future, -INF).masked_fill(~padding() | ~keep, LOWEST)


def a_mask_then_a_fill_then_a_bias(s, keep, bias):
    s = s + torch.where(keep, 0.0, LOWEST)
    return s.masked_fill(padding().logical_not(), LOWEST) + bias.detach()


FLOAT_MASKS = [
    a_fill_after_minus_infinity,
    a_mask_then_a_fill_then_a_bias,
    causal_fill_then_padding,
    padding_then_causal_fill,
    two_fills,
    bias_after_a_fill,
    some_keys_lowest_and_others_infinite,
    bias_and_lowest_of_unknown_content,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("change", FLOAT_MASKS, ids=lambda f: f.__name__)
def test_several_masks_with_rows_without_keys_match_eager(change, dynamic):
    keep = torch.ones(12, 12, dtype=torch.bool).tril(1)
    keep[2], keep[9] = False, False

    def function(q, k, v, keep, bias):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return attention(q, k, v, lambda s: change(s, keep, bias))

    inputs = (*qkv(Hkv=2), keep, torch.randn(4, 12, 12))
    fusion = check(function, inputs, dynamic=dynamic)
    assert fusion.findings[0].masks == "dense attn_mask"
    if not dynamic:
        (finding,) = verified(function, inputs)
        assert finding.fused, finding
        fusion = fuse(function)
        assert_same(function, inputs, fusion, train=False)
        assert fusion.fused == 1


@pytest.mark.parametrize("kind", ["added", "added a little", "filled"])
def test_rows_without_keys_under_a_softcap_match_eager(kind):
    def function(q, k, v, keep):
        capped = torch.tanh(q @ k.mT * 2.0 / 5.0) * 5.0
        return padded(kind, keep)(capped).softmax(-1) @ v

    inputs = (*qkv(), padding())
    check(function, inputs)
    (finding,) = verified(function, inputs)
    assert finding.fused, finding


def test_rows_without_keys_under_a_negative_scale_match_eager():
    def function(q, k, v, keep):
        return padded("added", keep)(q @ k.mT * -0.35).softmax(-1) @ v

    check(function, (*qkv(), padding()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_without_keys_in_half_precision_match_eager(dtype):
    def function(q, k, v, keep):
        scores = padded("added", keep)((q @ k.mT * 0.35).float())
        return scores.softmax(-1).to(q.dtype) @ v

    check(function, (*qkv(dtype), padding()))


def test_rows_without_keys_under_half_precision_masks_match_eager():
    def function(q, k, v, keep):
        mask = q.new_zeros(2, 1, 1, 12).masked_fill(~keep, torch.finfo(q.dtype).min)
        return (q @ k.mT * 0.35 + mask).softmax(-1) @ v

    keep = padding()
    keep[1] = False
    check(function, (*qkv(torch.float16), keep))


def test_numbers_added_to_all_scores_are_part_of_the_lse():
    def function(q, k, v, bias):
        scores = q @ k.mT + bias
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    check(function, (*qkv(), torch.tensor(0.5)))


REFUSED = {
    "a small fill over rows": (
        lambda s, m: s.masked_fill(m, -1.0),
        "scores are filled with -1, which is not far enough below them to be a mask",
    ),
    "a near fill among others": (
        lambda s, m: s.masked_fill(m, -1e4).masked_fill(m.mT, -INF),
        "several masks with different fill values: rows without keys would differ",
    ),
    "a bias after a near fill": (
        lambda s, m: s.masked_fill(m, -1e4) + m.mT.float(),
        "several masks with different fill values: rows without keys would differ",
    ),
    "a near fill over a near mask": (
        lambda s, m: (s + torch.where(m.mT, 0.0, -1e4)).masked_fill(m, -1e4),
        "several masks with different fill values: rows without keys would differ",
    ),
    "a mask from the scores": (
        lambda s, m: s.masked_fill(s < 0.0, -INF),
        "the scores are also read by lt",
    ),
    "two tensors": (
        lambda s, m: torch.where(m, s, m.float()),
        "they are replaced by something that is not one number",
    ),
    "a factor over queries and keys": (
        lambda s, m: s * (m.float() + 1.0),
        "the scores are multiplied by a tensor that varies over queries and keys",
    ),
    "a factor after a bias": (
        lambda s, m: (s + m.float()) * (m.float() + 1.0),
        "they are multiplied by a tensor after a bias, a mask or a softcap",
    ),
    "a factor of 0 and 1 after a bias": (
        lambda s, m: (s + m.float()) * m.float(),
        "scores are filled with 0, which is not far enough below them to be a mask",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_are_refused_with_a_reason(name):
    change, reason = REFUSED[name]
    mask = torch.rand(12, 12, generator=torch.Generator().manual_seed(0)) > 0.7

    def function(q, k, v, mask):
        return attention(q, k, v, lambda s: change(s, mask))

    fusion = fuse(function)
    results(fusion.run, (*qkv(), mask), True)
    (found,) = fusion.reasons
    assert reason in found


def test_biases_that_require_grad_after_a_finite_fill_are_refused():
    """Its gradient reaches the scores that were filled."""

    def function(q, k, v, keep, bias):
        return attention(q, k, v, lambda s: s.masked_fill(~keep, LOWEST) + bias)

    fusion = fuse(function)
    results(fusion.run, (*qkv(), padding(), torch.randn(4, 12, 12)), True)
    assert fusion.reasons == ["a bias that requires grad is added after a finite fill value"]
