"""The two caches of an append share no memory, unless the values are the first features of keys."""

from __future__ import annotations

import pytest
import torch

import fa_ops
from fa_ops.call import cache_memory
from fa_ops.call.options import Operands
from fa_ops.plans import planning

B, Hkv, S, D, Sn = 2, 2, 12, 16, 2
LENS = torch.tensor([0, 7], dtype=torch.int32)
TABLE = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)  # pages of four keys


def memory(is_paged: bool, width: int) -> torch.Tensor:
    shape = (6, 4, Hkv, width) if is_paged else (B, Hkv, S, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def new(width: int = D) -> torch.Tensor:
    return torch.randn(B, Hkv, Sn, width, generator=torch.Generator().manual_seed(width))


def append(k, v, is_paged, operator=False, **changes):
    given = {"key": new(k.shape[-1]), "value": new(v.shape[-1]).neg()} | changes
    query = torch.ones(B, 4, Sn, k.shape[-1])
    table = TABLE if is_paged else None
    if operator:
        key, value = given.pop("key"), given.pop("value")
        of = torch.ops.fa.attention_with_kv_cache_append
        return of(query, k, v, key, value, LENS, table, **given)[0]
    return fa_ops.attention_with_kv_cache(query, k, v, LENS, table, **given)


def pairs(is_paged: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Caches that share some of their bytes."""
    x, wide = memory(is_paged, D), memory(is_paged, 3 * D)
    flat = torch.zeros(2 * x.numel())
    size = x.numel()
    later = [flat[at : at + size].view(x.shape) for at in (0, size - 1)]
    found = {
        "one tensor": (x, x),
        "other features": (wide[..., : 2 * D], wide[..., D : 2 * D]),
        "one number": (wide[..., : D + 1], wide[..., D:]),
        "an alias": (x, x.view(torch.int32).view(torch.float32)),
    }
    if is_paged:  # the first pages lie apart, the second ones do not
        steps = (256, 0), (128, 128)
        found["other steps"] = tuple(
            flat.as_strided(x.shape, (step, 32, D, 1), at) for step, at in steps
        )
    else:  # pages with different numbers need not both be in use
        found |= {"the last number": tuple(later), "values before keys": tuple(reversed(later))}
    return found


def apart(is_paged: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Caches of the same shapes that do not, and lie within each other's bounds."""
    wide, pool = memory(is_paged, 3 * D), torch.zeros(7, 4, Hkv, D)
    pages = {"a pool": (pool[:-1], pool[1:])} if is_paged else {}
    return pages | {
        "halves": (wide[..., :D], wide[..., D : 2 * D]),
        "ends": (wide[..., 2 * D :], wide[..., :D]),
        "own": (memory(is_paged, D), memory(is_paged, D)),
    }


@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("operator", [False, True], ids=["function", "operator"])
def test_caches_that_share_memory_are_refused_before_anything_is_written(
    is_paged, backend, operator
):
    for _ in range(2):  # the second time with plans
        for name, (k, v) in pairs(is_paged).items():
            before = k.clone(), v.clone()
            with pytest.raises(ValueError, match="value.* shares memory|value must be the same"):
                append(k, v, is_paged, operator, backend=backend)
            assert torch.equal(k, before[0]) and torch.equal(v, before[1]), name
        for k, v in apart(is_paged).values():
            append(k, v, is_paged, operator, backend=backend)
        assert planning._prepared


@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
def test_the_message_names_the_rule_and_what_to_pass(is_paged):
    x, wide = memory(is_paged, D), memory(is_paged, 3 * D)
    with pytest.raises(ValueError) as error:
        append(wide[..., : 2 * D], wide[..., D : 2 * D], is_paged)
    assert str(error.value) == (
        "value_cache shares memory with key_cache, and both are written to: "
        "only key_cache[..., :16] may"
    )
    with pytest.raises(ValueError) as error:
        append(x, x, is_paged)
    assert str(error.value) == (
        "value_cache is the first 16 features of key_cache, which is written to: value must be "
        "the same features of key, in the same memory: pass key[..., :16]"
    )
    angles = torch.zeros(S, 4)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    key = new()
    with pytest.raises(ValueError, match="rotary_cos, which rotates keys alone, must be None"):
        append(x, x, is_paged, key=key, value=key, **rotary)


@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("width", [D, D // 2])
def test_values_that_are_the_first_features_of_keys_are_written_once(is_paged, width):
    """As to caches of their own."""
    key, results = new(), []
    for is_shared in (True, False, True):
        k = memory(is_paged, D)
        v = k[..., :width] if is_shared else k[..., :width].clone()
        out = append(k, v, is_paged, key=key, value=key[..., :width])
        results.append((out, k, v))
    for of_shared, expected, again in zip(*results):
        assert torch.equal(of_shared, expected) and torch.equal(again, expected)


def test_scales_of_shared_caches_are_one_tensor():
    cache = memory(False, D).to(torch.float8_e4m3fn)
    query, key = torch.ones(B, 4, Sn, D).half(), new().half()
    scale = torch.ones(B, Hkv)

    def call(**scales):
        return fa_ops.attention_with_kv_cache(
            query, cache, cache, LENS, key=key, value=key, **scales
        )

    for scales in ({"k_scale": scale}, {"k_scale": scale, "v_scale": scale.clone()}):
        with pytest.raises(ValueError, match="k_scale and v_scale must be the same tensor"):
            call(**scales)
    assert call(k_scale=scale, v_scale=scale).isfinite().all()
    with pytest.raises(ValueError, match="k_scale and v_scale must be the same tensor"):
        call(k_scale=scale, v_scale=scale.clone())


def test_repeated_calls_over_caches_that_lie_apart_compare_addresses_alone(monkeypatch):
    compared = []
    share_memory = cache_memory.share_memory
    monkeypatch.setattr(
        cache_memory, "share_memory", lambda *of: compared.append(of) or share_memory(*of)
    )
    wide = memory(False, 2 * D)
    caches = wide[..., :D], wide[..., D:]
    run = cache_memory.checking(lambda *args: args, *caches)
    for _ in range(3):
        assert run(None, *caches, Operands(kv_lens=LENS), False) == (
            None, *caches, Operands(kv_lens=LENS), False
        )  # fmt: skip
    assert len(compared) == 1
    own = memory(False, D), memory(False, D)
    cache_memory.checking(lambda *args: None, *own)(None, *own, Operands(kv_lens=LENS))
    assert len(compared) == 1


@pytest.mark.parametrize("with_scales", [False, True])
def test_repeated_calls_whose_values_are_in_keys_compare_addresses_alone(monkeypatch, with_scales):
    checked, check = [], cache_memory.check
    monkeypatch.setattr(cache_memory, "check", lambda *of: checked.append(of) or check(*of))
    k, key, scale = memory(False, D), new(), torch.ones(B, Hkv)
    scales = (scale, scale) if with_scales else (None, None)
    run = cache_memory.checking(lambda *args: None, k, k[..., :8])

    def repeat(value, k_scale, v_scale):
        tensors = Operands(
            kv_lens=LENS, new_key=key, new_value=value, k_scale=k_scale, v_scale=v_scale
        )
        run(None, k, k[..., :8], tensors)

    for _ in range(3):
        repeat(key[..., :8], *scales)
        assert len(checked) == 1
    with pytest.raises(ValueError, match="value must be the same features of key"):
        repeat(key.clone()[..., :8], *scales)
    if with_scales:
        repeat(key[..., :8], scale, scale.view(B, Hkv))
        assert len(checked) == 2
        with pytest.raises(ValueError, match="must be the same tensor"):
            repeat(key[..., :8], scale, scale.clone())


def test_empty_caches_share_nothing():
    empty = torch.zeros(0, Hkv, S, D)
    out = fa_ops.attention_with_kv_cache(
        torch.zeros(0, 4, Sn, D), empty, torch.zeros(0, Hkv, S, D), LENS[:0],
        key=torch.zeros(0, Hkv, Sn, D), value=torch.ones(0, Hkv, Sn, D),
    )  # fmt: skip
    assert out.shape == (0, 4, Sn, D)
