"""Problems over contiguous and paged key-value caches as data, compared with the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.call.call import Call, attention_call
from fa_ops.testing.budget import CachePoison, assert_within_budget, by_operator, naive
from fa_ops.testing.inputs import (
    INT_MAX,
    INT_MIN,
    Arena,
    random_sinks,
    random_slopes,
    short_repr,
    with_each,
    with_invalid_values,
)

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class CacheCase:
    """One call over a key-value cache. `repr` is a line that recreates it."""

    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    Sq: int = 1
    S: int = 150  # capacity
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    fp8: bool = False
    page_scales: bool = False  # fp8 scales for each page instead of each row
    token_scales: bool = False  # for each token
    page_size: int = 0  # 0: contiguous
    bshd: bool = True  # a contiguous cache is (B, S, H, D) in memory
    new: int = 0  # number of keys to append
    shared: bool = False  # values are a view of the first Dv columns of the keys
    rotary: int = 0  # number of features that are rotated
    interleaved: bool = False
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    alibi: str | None = None
    sinks: bool | str = False  # as in `Case`
    num_splits: int = 0
    batch_invariant: bool = False
    lens: tuple[int, ...] | None = None
    magnitude: float = 1.0  # factor of the queries
    unified_max: float | None = None  # the estimate of every head's largest score
    ranges: bool = False  # pass key_ranges, one for each row of the batch
    broken: bool = False  # kv_lens, ranges and pages may hold out-of-range numbers
    poison: str | None = None  # NaN or Inf in one operand, such as "nan key"; see `isolation`

    def __repr__(self) -> str:
        return short_repr(self)

    def fresh(self) -> Call:
        """The call with new tensors, always with the same values. Unused keys are NaN."""
        g = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype)

        lens = self.lens or torch.randint(self.S - self.new + 1, (self.B,), generator=g).tolist()
        kv_lens = torch.tensor(lens, dtype=torch.int32)
        q, table = draw(self.B, self.Hq, self.Sq, self.D) * self.magnitude, None
        if self.page_size:
            pages = -(-self.S // self.page_size)
            table = torch.randperm(self.B * pages + 3, generator=g)[: self.B * pages]
            table = table.view(self.B, pages).int()
            for b, length in enumerate(lens):  # unused entries are invalid pages
                table[b, -(-(length + self.new) // self.page_size) :] = 10**6 if b % 2 else -7
        ranges, used = None, [(0, length) for length in lens]
        if self.ranges:
            first = [int(torch.randint(length + 3, (), generator=g)) - 2 for length in lens]
            used = [(lo, lo + int(torch.randint(self.S, (), generator=g))) for lo in first]
            ranges = torch.tensor(used, dtype=torch.int32).view(self.B, 1, 1, 2)
            used = [(max(lo, 0), min(hi, n)) for (lo, hi), n in zip(used, lens)]
        k, v = (self._memory(draw, table, used, width) for width in (self.D, self.Dv))
        if self.shared:
            v = k[..., : self.Dv]
        fields: dict = {}
        if self.new:
            fields["new_key"] = draw(self.B, self.Hkv, self.new, self.D)
            fields["new_value"] = draw(self.B, self.Hkv, self.new, self.Dv)
        if self.fp8:
            for name in ("k_scale", "v_scale"):
                fields[name] = self._scale(g, len(k), used, lens)
        if self.rotary:
            angle = torch.rand(self.S + 1, self.rotary // 2, generator=g) * 6
            fields["rotary_cos"], fields["rotary_sin"] = angle.cos(), angle.sin()
        if self.unified_max is not None:
            fields["unified_max"] = torch.full((self.Hq,), self.unified_max)
        if self.sinks:
            fields["sinks"] = random_sinks(self, g)
        if self.alibi is not None:
            fields["alibi_slopes"] = random_slopes(self, g)
        call = attention_call(
            q, k, v, is_causal=self.is_causal, scale=self.scale, window_left=self.window[0],
            window_right=self.window[1], softcap=self.softcap, kv_lens=kv_lens, key_ranges=ranges,
            page_table=table, rotary_interleaved=self.interleaved, num_splits=self.num_splits,
            batch_invariant=self.batch_invariant, over_cache=True, **fields,
        )  # fmt: skip
        if self.broken:
            call = self._with_invalid_values(call)
        call = with_each(call, lambda name, t: t.to(self.device))
        return _with_shared_values(call, self.Dv) if self.shared else call

    def _scale(self, g: torch.Generator, pages: int, key_ranges: list, lens: list) -> Tensor:
        if not (self.page_scales or self.token_scales):
            return torch.rand((self.B, self.Hkv), generator=g) + 0.5
        shape = self.B, self.Hkv, self.S
        if self.page_size:
            shape = pages, self.page_size if self.token_scales else 1, self.Hkv
        scale = torch.rand(shape, generator=g) + 0.5
        scale *= 2.0 ** torch.randint(-2, 3, shape, generator=g)
        if not (self.page_size or self.broken):
            for row, (lo, _), length in zip(scale, key_ranges, lens):
                row[:, :lo] = row[:, length + self.new :] = float("nan")
        return scale

    def _with_invalid_values(self, call: Call) -> Call:
        g = torch.Generator().manual_seed(self.seed + 2)
        t, changes = call.operands, {}
        if torch.rand((), generator=g) < 0.6:
            changes["kv_lens"] = with_invalid_values(t.kv_lens.long(), self.S, g).int()
        if t.key_ranges is not None:
            changes["key_ranges"] = with_invalid_values(t.key_ranges.long(), self.S, g).int()
        if (table := t.page_table) is not None:
            missing = torch.tensor([-1, INT_MIN, table.numel() + 3, INT_MAX], dtype=torch.int32)
            missing = missing[torch.randint(4, table.shape, generator=g)]
            keep = torch.rand(table.shape, generator=g) < 0.7
            changes["page_table"] = torch.where(keep, table, missing)
        return call.changed(**changes)

    def _memory(self, draw, table: Tensor | None, key_ranges: list, width: int) -> Tensor:
        if table is not None:
            pages = table.numel() + 3
            x = draw(pages, self.page_size, self.Hkv, width)
            used = torch.zeros(pages, self.page_size, dtype=torch.bool)
            for b, (lo, hi) in enumerate(key_ranges):
                keys = torch.arange(lo, max(lo, hi))
                used[table[b, keys // self.page_size].long(), keys % self.page_size] = True
            x[~used] = float("nan")
            return x.to(FP8) if self.fp8 else x
        x = draw(self.B, self.S, self.Hkv, width)
        for b, (lo, hi) in enumerate(key_ranges):
            x[b, :lo] = x[b, max(lo, hi) :] = float("nan")
        x = x.to(FP8) if self.fp8 else x
        return x.transpose(1, 2) if self.bshd else x.transpose(1, 2).contiguous()


def random_cache_case(seed: int, **fixed: Any) -> CacheCase:
    """A random valid combination of features; `fixed` overrides any field."""
    r = random.Random(seed)
    pick, D = r.choice, r.choice([16, 16, 32, 40, 64])
    Hkv, Sq, half = r.choice([1, 2, 3]), r.choice([1, 1, 1, 2, 5, 16]), r.random() < 0.3
    fields = {
        "B": pick([1, 2, 3, 5]), "Hq": Hkv * pick([1, 2, 4, 8]), "Hkv": Hkv, "Sq": Sq,
        "S": pick([1, 20, 130, 300]), "D": D, "Dv": pick([D, D, 24]), "seed": seed,
        "dtype": torch.float16 if half else torch.float32, "fp8": half and r.random() < 0.5,
        "page_size": pick([0, 0, 1, 5, 8, 16, 64, 256]), "bshd": r.random() < 0.5,
        "is_causal": r.random() < 0.6, "softcap": pick([0.0, 0.0, 0.0, 1.5]),
        "window": (pick([-1, 0, 5, 40]), pick([-1, 0, 2])) if r.random() < 0.3 else (-1, -1),
        "scale": pick([None, None, 0.3, -0.2]), "alibi": pick([None, None, "heads", "batch_heads"]),
        "sinks": r.random() < 0.3, "num_splits": pick([0, 0, 1, 3]),
    }  # fmt: skip
    if r.random() < 0.4:
        fields["new"] = min(fields["S"], pick([1, Sq, 3]))
    if r.random() < 0.3:
        fields["rotary"], fields["interleaved"] = pick([8, 16]), r.random() < 0.5
    if fields["num_splits"] == 0 and r.random() < 0.2:
        fields["batch_invariant"] = True
    fields["ranges"] = r.random() < 0.25
    fields["unified_max"] = pick([None, None, None, 0.0, 2.0, -30.0])
    fields["page_scales"] = fields["fp8"] and fields["page_size"] > 0 and r.random() < 0.5
    fields["token_scales"] = fields["fp8"] and r.random() < 0.4
    return dataclasses.replace(CacheCase(), **(fields | fixed))


def assert_cache_close(
    case: CacheCase, backend: str, arena: Arena | None = None, calls: int = 1
) -> None:
    """Compare out, lse and the caches after the call with the oracle within the error budget.

    Args:
        arena: allocate inputs and results in it, and check that nothing outside them is written.
        calls: how often to call; all results must be bitwise equal.
    """
    call, other = case.fresh(), case.fresh()
    # the oracle reads, and appends to, a copy of the cache that is not poisoned
    attend, attend_naive = reference.dense, _naive_in(case.dtype)
    if case.broken:
        other, present = valid_call(other)
        other = with_spare_page(other)
        attend = attend_present(present, attend)
        attend_naive = attend_present(present, attend_naive)
    expected = reference.cached(other, attend)
    poison = None
    if case.poison:
        poison = CachePoison(case, other)
        poison.write(call)
    if arena is not None:
        call = _placed(arena, call, case.shared)
    with contextlib.nullcontext() if arena is None else arena.outputs(backend):
        results = [by_operator(call.changed(backend=backend)) for _ in range(calls)]
    if arena is not None:
        arena.check()
    for repeated in results[1:]:
        for name, x, y in zip(("out", "lse"), results[0], repeated):
            same = (x == y) | (x.isnan() & y.isnan())
            assert bool(same.all()), f"{case}: {name} differs when the call is repeated"
    caches = (
        ("key_cache", call.key, other.key), ("value_cache", call.value, other.value)
    )  # fmt: skip
    # rotated keys may be rounded differently
    rounding = 0.13 if case.fp8 else torch.finfo(case.dtype).eps * 2
    for name, x, y in caches if not poison else ():
        x, y = x.float(), y[: len(x)].float()
        near = (x - y).abs() <= rounding * (y.abs() + 0.5) if case.rotary else x == y
        assert bool((near | (x.isnan() & y.isnan())).all()), f"{case}: {name} after the call"
    t = other.operands
    appended = other.without_new().changed(rotary_cos=t.rotary_cos, rotary_sin=t.rotary_sin)
    baseline = reference.cached(appended, attend_naive)
    noise = max(rounding * 2 if case.rotary else 0.0, _noise_of_scales(case, other))
    # an error of a score is one of the output in units of values
    largest = t.v_scale.nan_to_num().max().item() if case.fp8 else 1.0
    noises = {"out": noise * max(1.0, largest), "lse": noise}
    for name, x, y, z in zip(("out", "lse"), results[0], expected, baseline):
        if poison is not None:
            x = poison.replaced(name, x, y)
        assert_within_budget(f"{case}: {name}", x, y, z, torch.tensor(noises[name]))


def _naive_in(dtype: torch.dtype) -> Callable:
    return lambda call: naive(Call(*(t.to(dtype) for t in call[:3]), *call[3:]))


def _placed(arena: Arena, call: Call, shared: bool) -> Call:
    """The same call with all tensors in the arena; only caches that are appended to may change."""
    placed, writes = {}, call.operands.new_key is not None

    def put(name: str, x: Tensor) -> Tensor:
        if name == "value" and shared:
            return x  # replaced below
        if name in ("key", "value"):
            return arena.placed(x, read_only=not writes)
        if id(x) not in placed:
            placed[id(x)] = arena.placed(x)
        return placed[id(x)]

    width = call.value.shape[-1]
    call = with_each(call, put)
    return _with_shared_values(call, width) if shared else call


def _with_shared_values(call: Call, width: int) -> Call:
    """The same with values that are the first features of the keys, and their scales."""
    new = call.operands.new_key
    new_value = None if new is None else new[..., :width]
    value, scale = call.key[..., :width], call.operands.k_scale
    return call.changed(value=value, new_value=new_value, v_scale=scale)


def _noise_of_scales(case: CacheCase, call: Call) -> float:
    """The standard deviation of a score whose fp8 key was multiplied by its scale and rounded.

    The naive computation has this error too, but over the few rows of a decoding step the rounding
    of the scores may cancel it.
    """
    if not case.fp8:
        return 0.0
    product = case.magnitude * abs(call.scale) * case.D**0.5
    largest = call.operands.k_scale.nan_to_num().max().item()
    return product * largest * torch.finfo(case.dtype).eps / 12**0.5


# The meaning of calls over a cache with lengths or pages that lie outside the cache.
#
# Where the host does not check them (docs/decode.md), lengths are clamped to the capacity, new keys
# beyond it are not written, and keys in pages that do not exist are masked out.


def first_invalid_value(call: Call) -> str | None:
    """The beginning of the error that a backend that checks lengths and pages must raise."""
    k, t = call.key, call.operands
    new = 0 if t.new_key is None else t.new_key.shape[2]
    table, size = t.page_table, k.shape[1]
    for b, length in enumerate(t.kv_lens.tolist()):
        if length < 0 or length + new > call.num_keys:
            return f"kv_lens[{b}] is {length}, which"
        if table is not None:
            used = table[b, : -(-(length + new) // size)].tolist()
            for n, page in enumerate(used):
                if not 0 <= page < len(k):
                    return f"page_table[{b}, {n}] is {page}, but"
    return None


def valid_call(call: Call) -> tuple[Call, list[Tensor]]:
    """Write the new keys that fit into the cache; return the valid call that remains.

    The last result holds a bool tensor for each row of the batch: which of its keys exist. Pages
    that do not exist are replaced by page len(k), which `with_spare_page` adds.
    """
    (_, k, v), t, capacity = call[:3], call.operands, call.num_keys
    new = 0 if t.new_key is None else t.new_key.shape[2]
    table, size = t.page_table, k.shape[1]
    exists = None if table is None else (table >= 0) & (table < len(k))
    for b, length in enumerate(t.kv_lens.tolist()):
        for n in range(new):
            at = length + n
            if 0 <= at < capacity and (exists is None or exists[b, at // size]):
                key, value = (x[b, :, n : n + 1].double() for x in (t.new_key, t.new_value))
                key = _rotated(key, call, at).to(t.new_key.dtype)
                _write(k, key, t.k_scale, table, b, at)
                _write(v, value, t.v_scale, table, b, at)
    lens = (t.kv_lens.long() + new).clamp(0, capacity)
    present = [torch.ones(n, dtype=torch.bool, device=k.device) for n in lens.tolist()]
    changes = {"new_key": None, "new_value": None, "kv_lens": lens.int()}
    if exists is not None:
        present = [row.repeat_interleave(size)[: len(p)] for row, p in zip(exists, present)]
        changes["page_table"] = table.where(exists, len(k))
        changes["k_scale"], changes["v_scale"] = map(_with_spare_scale, (t.k_scale, t.v_scale))
    return call.changed(**changes), present


def _rotated(key: Tensor, call: Call, position: int) -> Tensor:
    """A key (H, 1, D), rotated by the last angles if there are none for its position."""
    cos = call.operands.rotary_cos
    last = 0 if cos is None else len(cos) - 1
    return reference.rotate(key, call, torch.tensor([min(position, last)]))


def _write(
    memory: Tensor, new: Tensor, scale: Tensor | None, table: Tensor | None, b: int, at: int
) -> None:
    factor = reference.scales(scale, table, b, range(at, at + 1), memory.shape[1])
    x = reference.quantised(new.double(), factor.to(new.device), memory.dtype)
    view, index = reference.slots(memory, table, b, at, at + 1)
    view[index] = x.transpose(0, 1).view(view.dtype)


def with_spare_page(call: Call) -> Call:
    """The call with a page of zeros behind those of a paged cache."""
    if not call.is_paged:
        return call
    key, value = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (call.key, call.value))
    return call._replace(key=key, value=value)


def _with_spare_scale(scale: Tensor | None) -> Tensor | None:
    """Append the spare page's scale to scales of pages; return scales of heads unchanged."""
    if scale is None or scale.dim() == 2:
        return scale
    return torch.cat([scale, torch.ones_like(scale[:1])])


def attend_present(present: Sequence[Tensor], attend: Callable) -> Callable:
    """Wrap `attend`, which `reference.cached` calls once a row, to mask out missing keys."""
    rows = iter(present)
    return lambda call: attend(call.changed(attn_mask=next(rows).view(1, 1, 1, -1)))
