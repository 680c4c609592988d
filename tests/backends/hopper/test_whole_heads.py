"""Which backward passes run by CTAs with all keys of a head, and their host code."""

import pytest
import torch

from fa_ops.backends.hopper import backward, configs
from fa_ops.backends.hopper.backward import prefers_own_row_sums, prefers_whole_heads
from fa_ops.backends.hopper.kernel_plan import UNBOUNDED
from fa_ops.call.call import Saved, attention_call
from tests.backends.hopper.test_backward_host import driver, of_params, tensors  # noqa: F401

FULL, CAUSAL, WINDOW = (UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (100, UNBOUNDED)


@pytest.mark.parametrize(
    "heads, lengths, D, sides, whole",
    [
        ((128, 32, 32), (128, 128), 64, FULL, True),
        ((64, 32, 32), (256, 256), 64, CAUSAL, True),
        ((32, 32, 32), (512, 512), 64, FULL, True),
        ((32, 32, 32), (512, 512), 64, CAUSAL, True),
        ((16, 32, 32), (1024, 1024), 64, FULL, False),
        ((16, 32, 32), (1024, 1024), 64, CAUSAL, False),
        ((8, 32, 32), (2048, 2048), 64, CAUSAL, False),
        ((64, 16, 16), (256, 256), 128, CAUSAL, True),
        ((32, 16, 16), (512, 512), 128, CAUSAL, True),
        ((32, 16, 16), (512, 512), 128, FULL, False),
        ((16, 16, 16), (1024, 1024), 128, CAUSAL, False),
        # beyond what was timed
        ((32, 32, 8), (512, 512), 128, FULL, False),
        ((2, 16, 16), (512, 512), 64, FULL, False),  # 32 heads on 132 multiprocessors
        ((5, 32, 32), (512, 512), 64, FULL, False),  # 160, of which the last 28 would end alone
        ((2, 16, 16), (4096, 77), 64, FULL, True),  # one block of keys
        ((2, 16, 4), (4096, 77), 64, FULL, False),  # groups of query heads may be divided
        ((32, 32, 32), (512, 300), 64, WINDOW, True),
        ((32, 32, 32), (512, 300), 64, CAUSAL, False),  # rows without keys
        ((32, 32, 32), (300, 512), 64, CAUSAL, True),
        # few steps
        ((1, 8, 8), (256, 128), 64, FULL, True),
        ((1, 8, 8), (128, 256), 64, FULL, True),
        ((1, 8, 8), (256, 256), 64, FULL, False),
        ((8, 12, 12), (197, 197), 64, FULL, True),  # 96 heads
        ((4, 12, 12), (197, 197), 64, FULL, False),
        ((1, 8, 4), (128, 100), 64, FULL, True),
        ((1, 8, 2), (128, 100), 64, FULL, False),
        ((1, 8, 8), (256, 130), 128, FULL, False),
    ],
)
def test_the_rule(heads, lengths, D, sides, whole):
    (B, Hq, Hkv), (Sq, Sk) = heads, lengths
    """An H200's times decided first."""
    assert prefers_whole_heads((B, Hq, Sq, D), (B, Hkv, Sk, D), sides, 132) == whole


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "D, whole", [(64, True), (40, True), (128, True), (96, False), (256, False)]
)
def test_head_dims(D, whole, deterministic):
    config = configs.backward_config(D, D, deterministic, whole_heads=True)
    assert config.whole_heads == whole and config.key_slots == (2 if D <= 64 else 1)
    other = configs.backward_config(D, D, deterministic)
    assert not other.whole_heads and other.key_slots == (2 if other.adds_dq and D <= 64 else 1)
    assert config.adds_dq == (whole or (D < 256 and not deterministic))
    assert config.shared_bytes <= configs.SHARED_LIMIT


@pytest.mark.parametrize(
    "heads, Sq, alone",
    [
        ((1, 8, 8), 64, True),
        ((32, 32, 32), 512, True),  # all multiprocessors have as much to read
        ((2, 16, 16), 1024, True),
        ((2, 16, 16), 4096, False),  # a quarter of them have
        ((2, 16, 4), 1024, False),
    ],
)
def test_who_sums_rows(heads, Sq, alone):
    B, Hq, Hkv = heads
    assert prefers_own_row_sums((B, Hq, Sq, 64), (B, Hkv, 77, 64), 64, 132) == alone


@pytest.mark.parametrize("deterministic, alone", [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("D", [64, 128])
def test_a_call(driver, D, deterministic, alone, monkeypatch):  # noqa: F811
    monkeypatch.setattr(backward, "prefers_own_row_sums", lambda *args: alone)
    backward._plan.cache_clear()
    g, q, k, v, out, lse = tensors(4, 4, 2, 200, 300, D)
    call = attention_call(q, k, v, is_causal=True, deterministic=deterministic)
    backward.backward(call._replace(saved=Saved(g, None, out, lse)))
    grid, products = driver.last("backward")
    found = of_params(products)
    assert grid == (4, 1)  # of 8 heads of keys on 4 processors
    assert (found["parts"], found["part_heads"]) == ((1,), (2,))
    # sums of the two query heads of each CTA, which need not be cleared
    assert found["counter"][0] - found["sums"][0] == 4 * 2 * 256 * D * 4
    assert found["zeros"] == (0,)
    assert [one.name for one in driver.launched] == ["preprocess"] * (not alone) + ["backward"]
    assert alone or driver.last("preprocess") == ((16, 4), products)
    backward._plan.cache_clear()


def plan_of(q, sequences=None, **options):
    call = attention_call(q, q, q, saved=Saved(q, None, q, q), **options)
    return backward.plan_of(call, (q.stride(),) * 3, sequences=sequences)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 30.0}, {"dropout_p": 0.1}, {"window_right": 5, "is_causal": True}],
    ids=str,
)
def test_calls_with_options(driver, options):  # noqa: F811
    q = torch.zeros(1, 4, 200, 64, dtype=torch.bfloat16)
    assert plan_of(q, **options).config.whole_heads == ("is_causal" in options)


def test_packed_sequences_lengths_and_slopes(driver):  # noqa: F811
    q = torch.zeros(1, 4, 200, 64, dtype=torch.bfloat16)
    ranges, lens = torch.zeros(1, 1, 200, 2).int(), torch.ones(1).int()
    assert not plan_of(q, 2, key_ranges=ranges).config.whole_heads
    assert not plan_of(q, kv_lens=lens).config.whole_heads
    assert not plan_of(q, alibi_slopes=torch.ones(4)).config.whole_heads
    assert plan_of(q).config.whole_heads


def test_calls_whose_shared_memory_holds_one_slot_of_keys():
    for options in ({"differs_by_row": True}, {"few_registers": True}, {"bias_bits": 16}):
        config = configs.backward_config(64, 64, **options)
        assert config.key_slots == 1 and config.shared_bytes <= configs.SHARED_LIMIT
