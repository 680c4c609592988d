"""Caches that grow: a call of a family that is already planned launches what a first one would."""

import random
import struct

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper import decode, forward, mla
from fa_ops.backends.hopper.configs import has_latent_dims
from fa_ops.backends.hopper.kernel_plan import Geometry
from fa_ops.call import cache_checks, checks
from fa_ops.plans import dispatch, planning
from tests.backends.hopper.conftest import Driver

BF16 = torch.bfloat16
LENGTHS = random.Random(0).sample(range(512, 3000), 12) + [512, 513]
SIZES = [(2, 4, 2, 64, 64), (1, 6, 3, 128, 128), (1, 32, 8, 128, 64), (3, 8, 8, 72, 40)]


@pytest.fixture(autouse=True)
def on_cpu(driver, monkeypatch):
    """CPU tensors go to this backend; their values are not checked, as those of CUDA tensors."""
    driver.struct_bytes = 576

    def cache_error(call):
        is_latent = has_latent_dims(call.query.shape[-1], call.value.shape[-1])
        return (mla if is_latent else decode).cache_error(call)

    monkeypatch.setattr(hopper, "cache_error", cache_error)
    monkeypatch.setattr(dispatch, "AUTO", {"cpu": ("hopper",)})
    monkeypatch.setattr(dispatch, "_available", {"hopper": None})
    monkeypatch.setattr(planning, "_check_of_values", lambda call: None)


def forget():
    planning.forget()
    for known in (decode.split_kv_plan, decode._template, mla._template):
        known.cache_clear()


def contiguous(B, H, S, D):
    return torch.zeros(B, H, S, D, dtype=BF16)


def transposed(B, H, S, D):
    return contiguous(B, S, H, D).transpose(1, 2)


def sliced(B, H, S, D):
    return contiguous(B, H, 3000, D)[:, :, :S]


LAYOUTS = {one.__name__: one for one in (contiguous, transposed, sliced)}
SINKS = torch.zeros(32)


def small(B, Hq, S):
    lens = torch.full((B,), S, dtype=torch.int32)
    ranges = torch.stack([lens // 7, lens], -1)[:, None, None]
    return lens, ranges, SINKS[:Hq]


def plain(q, k, v):
    return fa_ops.attention(q, k, v)


def with_options(q, k, v):
    options = {"is_causal": True, "scale": 0.3, "window": (700, None), "softcap": 20.0}
    return fa_ops.attention(q, k, v, **options)


def padded(q, k, v):
    lens, ranges, sinks = small(q.shape[0], q.shape[1], k.shape[2])
    return fa_ops.attention(q, k, v, kv_lens=lens, key_ranges=ranges, sinks=sinks)


def cached(q, k, v):
    lens, _, _ = small(q.shape[0], q.shape[1], k.shape[2])
    return fa_ops.attention_with_kv_cache(q, k, v, lens)


def cached_with_lse(q, k, v):
    lens, ranges, sinks = small(q.shape[0], q.shape[1], k.shape[2])
    call = fa_ops.attention_with_kv_cache
    return call(q, k, v, lens, key_ranges=ranges, sinks=sinks, return_lse=True)[0]


FUNCTIONS = (plain, with_options, padded, cached, cached_with_lse)


def family(S):
    """What the checks and the choice of a plan may depend on of a number of keys."""
    return S.bit_length(), (S - 1).bit_length()


def what_matters(params: bytes, maps: int) -> tuple:
    """All but where a call has its results, small tensors and workspace."""
    at, addresses = 128 * maps, 9 if maps == 3 else 6
    given = struct.unpack_from(f"<{addresses}Q", params, at)
    return params[:at], [bool(x) for x in given], params[at + 8 * addresses :]


def launched(driver: Driver, function, q, k, v, maps=3) -> list[tuple]:
    """What a call launches, with the parameters that are to be the same in a first call."""
    driver.launched.clear()
    driver.struct_bytes = 576 if maps == 3 else 384
    out = function(q, k, v)
    assert driver.launched
    results = {struct.unpack_from("<Q", one.params, 128 * maps)[0] for one in driver.launched}
    assert results == {out.data_ptr()} and out.shape == (*q.shape[:3], v.shape[3])
    return [(one.name, *what_matters(one.params, maps)) for one in driver.launched]


@pytest.fixture
def checked(monkeypatch):
    """The names of the checks and choices that were made, in their order."""
    called = []

    def note(module, name):
        one = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: called.append(name) or one(*a, **k))

    note(checks, "dense"), note(cache_checks, "cached")
    note(dispatch, "choose"), note(hopper, "supports"), note(hopper, "plan")
    return called


def grown(driver, checked, function, steps, maps=2):
    """What each step launches. Only the first one of a family is checked and planned."""
    found, families = [], set()
    for q, k, v in steps:
        checked.clear()
        found.append(launched(driver, function, q, k, v, maps))
        if family(k.shape[2]) in families:
            assert not checked
        else:
            assert len(checked) == 4 and checked[1:] == ["choose", "supports", "plan"]
        families.add(family(k.shape[2]))
    assert len(planning._plans) == len(families) < len(planning._prepared)
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_longer_cache_is_launched_as_if_it_were_the_first(
    function, layout, sizes, driver, checked
):
    B, Hq, Hkv, D, Dv = sizes
    q, lay = contiguous(B, Hq, 1, D), LAYOUTS[layout]
    steps = [(q, lay(B, Hkv, S, D), lay(B, Hkv, S, Dv)) for S in LENGTHS]
    found = grown(driver, checked, function, steps, maps=3)
    assert len(planning._prepared) == len(steps)
    for step, one in zip(steps, found):
        forget()
        assert launched(driver, function, *step) == one


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_latent_cache_grows_too(layout, driver, checked):
    q = contiguous(1, 16, 1, 576)
    keys = [LAYOUTS[layout](1, 1, S, 576) for S in LENGTHS]
    steps = [(q, k, k[..., :512]) for k in keys]
    for step, one in zip(steps, grown(driver, checked, plain, steps, maps=2)):
        forget()
        assert launched(driver, plain, *step, maps=2) == one
        assert [name for name, *_ in one] == ["mla", "combine"]
    others = keys[1].clone()[..., :512], keys[1].as_strided((1, 1, 600, 512), (576, 576, 512, 1))
    for v in others:
        with pytest.raises(NotImplementedError, match="one head's keys hold its values"):
            plain(q, keys[1][:, :, :600], v[:, :, :600])


def test_maps_and_lengths_are_those_of_the_tensors(driver):
    """Read without the code that writes them; all of a row's 128 features are in one box."""
    q = contiguous(1, 6, 1, 128)
    for S in (700, 701, 2000):
        k, v = contiguous(1, 3, S, 128), transposed(1, 3, S, 128)
        plain(q, k, v)
        params = driver.launched[-1].params
        for at, t in ((128, k), (256, v)):
            address, *_ = struct.unpack_from("<Q3B", params, at)
            sizes = struct.unpack_from("<5Q4Q", params, at + 11)
            steps = [2 * t.stride(d) if t.shape[d] > 1 else 16 for d in (2, 1, 0)]
            assert address == t.data_ptr() and sizes == (64, 2, S, 3, 1, 128, *steps)
        B, Hq, Hkv, group, Sq, Sk, Dv, idle = struct.unpack_from("<8i", params, 472)
        assert (B, Hq, Hkv, group, Sq, Sk, Dv, idle) == (1, 6, 3, 2, 1, S, 128, 1)


def test_parts_are_merged_from_the_length_on_at_which_rows_are_shared(driver):
    q = contiguous(1, 6, 1, 128)  # 3 units on 4 CTAs
    for S, names in ((512, ["decode"]), (513, ["decode", "combine"]), (512, ["decode"])):
        found = launched(driver, plain, q, contiguous(1, 3, S, 128), contiguous(1, 3, S, 128))
        assert [name for name, *_ in found] == names


def wrong_calls():
    q, k, v = contiguous(2, 4, 1, 64), contiguous(2, 2, 700, 64), contiguous(2, 2, 700, 32)
    q_alone, three = contiguous(1, 4, 1, 64), contiguous(2, 3, 700, 64)
    apart = contiguous(2, 2, 700, 128)
    rows = torch.zeros(2, 2, 700, 68, dtype=BF16)
    off = torch.zeros(k.numel() + 1, dtype=BF16)[1:].view_as(k)
    return {
        "another dtype of query": (TypeError, q.half(), k, v),
        "another dtype of key": (TypeError, q, k.half(), v),
        "another dtype of value": (TypeError, q, k, v.float()),
        "fewer values": (ValueError, q, k, v[:, :, :699]),
        "fewer keys": (ValueError, q, k[:, :, :699], v),
        "heads that do not divide": (ValueError, q, three, three[..., :32]),
        "more value heads": (ValueError, q, k, contiguous(2, 4, 700, 32)),
        "fewer key heads": (ValueError, q, k[:, :1], v),
        "another batch": (ValueError, q, three[:1, :2], three[:1, :2, :, :32]),
        "another batch of keys": (ValueError, q, contiguous(3, 2, 700, 64), v),
        "another batch of values": (ValueError, q, k, v[:1]),
        "another batch of queries": (ValueError, q_alone, k, v),
        "another head dimension": (ValueError, q, contiguous(2, 2, 700, 48), v),
        "three dimensions": (ValueError, q, k[0], v),
        "keys apart": (ValueError, q, apart[..., ::2], v),
        "values apart": (ValueError, q, k, apart[..., ::4]),
        "rows of keys off their alignment": (NotImplementedError, q, rows[..., :64], v),
        "rows of values off their alignment": (NotImplementedError, q, k, rows[..., :32]),
        "an address off its alignment": (NotImplementedError, q, off, v),
        "heads that share memory": (NotImplementedError, q, k[:, :1].expand(2, 2, 700, 64), v),
    }


@pytest.mark.parametrize("function", (plain, padded, cached), ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", wrong_calls())
def test_an_error_of_a_longer_cache_is_that_of_a_first_call(name, function):
    kind, q, k, v = wrong_calls()[name]
    for S in (600, 699):
        function(contiguous(2, 4, 1, 64), contiguous(2, 2, S, 64), contiguous(2, 2, S, 32))
    for _ in range(2):
        with pytest.raises(kind) as after:
            function(q, k, v)
    assert len(planning._plans) == 1
    forget()
    with pytest.raises(kind) as first:
        function(q, k, v)
    assert str(after.value) == str(first.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"kv_lens": torch.zeros(3, dtype=torch.int32)},
        {"kv_lens": torch.zeros(2)},
        {"kv_lens": [700, 700]},
        {"key_ranges": torch.zeros(2, 1, 1, 3, dtype=torch.int32)},
        {"sinks": torch.zeros(5)},
        {"sinks": torch.zeros(4, dtype=torch.float64)},
        {"is_causal": 0},
        {"backend": "fastest"},
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["attention", "attention_with_kv_cache"])
def test_wrong_options_of_a_longer_cache_raise(call, bad):
    q, lens = contiguous(2, 4, 1, 64), torch.full((2,), 600, dtype=torch.int32)
    good = {"kv_lens": lens, "key_ranges": small(2, 4, 600)[1], "sinks": torch.zeros(4)}
    for S, options in ((700, good), (701, good | bad), (702, good)):
        k, v = contiguous(2, 2, S, 64), contiguous(2, 2, S, 64)
        if options is good:
            getattr(fa_ops, call)(q, k, v, **options)
        else:
            with pytest.raises((TypeError, ValueError)):
                getattr(fa_ops, call)(q, k, v, **options)


@pytest.mark.parametrize("module, dims", [(decode, (64, 64)), (mla, (576, 512))])
def test_more_keys_than_can_be_counted_are_refused_whatever_came_before(module, dims):
    def plan(S):
        shapes = (128, 4, 1, dims[0]), *((128, 1, S, D) for D in dims)
        strides = [(H * S * D, S * D, D, 1) for _, H, S, D in shapes]
        kind = mla.MlaPlan if module is mla else decode.DecodePlan
        return decode.split_kv_plan(kind, Geometry(BF16, None, shapes, tuple(strides)))

    for S in (1 << 20, (1 << 30) - 1):
        assert plan(S).template is plan(700).template
    with pytest.raises(NotImplementedError, match=f"32 bits, got 128 x 1 x {1 << 30} keys"):
        plan(1 << 30)


def test_a_cache_is_of_another_family_once_it_is_long_enough_to_cut(monkeypatch):
    monkeypatch.setattr(hopper, "support_error", lambda *call: None)
    monkeypatch.setattr(forward, "prepare", lambda call: lambda *args: ("whole", None))
    q = contiguous(1, 4, 1, 64)
    for S in (510, 511, 512, 513, 511):
        out = plain(q, contiguous(1, 2, S, 64), contiguous(1, 2, S, 64))
        assert (out == "whole") if S < 512 else out.shape == q.shape
    assert len(planning._plans) == 3 and len(planning._prepared) == 4  # 512 is a family alone
    k = contiguous(1, 2, 0, 64)
    assert not plain(q, k, k).any() and len(planning._plans) == 4


def test_what_is_remembered_stays_bounded(driver, monkeypatch):
    monkeypatch.setattr(planning, "_LIMIT", 8)
    q = contiguous(1, 4, 1, 64)
    for S in range(600, 640):
        for function in (plain, cached):
            launched(driver, function, q, contiguous(1, 2, S, 64), contiguous(1, 2, S, 64))
            assert len(planning._prepared) <= 8 and len(planning._plans) <= 2
    for H in range(1, 12):  # as many families
        plain(contiguous(1, H, 1, 64), contiguous(1, H, 600, 64), contiguous(1, H, 600, 64))
        assert len(planning._prepared) <= 8 and len(planning._plans) <= 8
    for known in (decode.split_kv_plan, decode._template, mla._template):
        assert known.cache_info().maxsize <= 1024
