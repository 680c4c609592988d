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
from fa_ops.call.call import Call
from fa_ops.call.options import Cache, Spec, default_scale
from fa_ops.testing.allocators import Arena
from fa_ops.testing.budget import assert_within_budget, naive
from fa_ops.testing.inputs import (
    INT_MAX,
    INT_MIN,
    random_sinks,
    random_slopes,
    short_repr,
    with_invalid_values,
)
from fa_ops.testing.nan_isolation import CachePoison

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

    def fresh(self) -> tuple[Tensor, Tensor, Tensor, Cache, Spec]:
        """New q, caches, Cache and Spec, always with the same values. Unused keys are NaN."""
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
            fields["key"] = draw(self.B, self.Hkv, self.new, self.D)
            fields["value"] = draw(self.B, self.Hkv, self.new, self.Dv)
        if self.fp8:
            for name in ("k_scale", "v_scale"):
                fields[name] = self._scale(g, len(k), used, lens)
        if self.rotary:
            angle = torch.rand(self.S + 1, self.rotary // 2, generator=g) * 6
            fields["rotary_cos"], fields["rotary_sin"] = angle.cos(), angle.sin()
        spec = Spec(
            is_causal=self.is_causal, scale=self.scale, window_left=self.window[0],
            window_right=self.window[1], softcap=self.softcap, kv_lens=kv_lens,
            sinks=random_sinks(self, g) if self.sinks else None,
            alibi_slopes=None if self.alibi is None else random_slopes(self, g), key_ranges=ranges,
        )  # fmt: skip
        if self.unified_max is not None:
            fields["unified_max"] = torch.full((self.Hq,), self.unified_max)
        cache = Cache(
            page_table=table, rotary_interleaved=self.interleaved, num_splits=self.num_splits,
            batch_invariant=self.batch_invariant, **fields,
        )  # fmt: skip
        if self.broken:
            cache, spec = self._with_invalid_values(cache, spec)
        on = lambda t: t.to(self.device) if isinstance(t, Tensor) else t  # noqa: E731
        k = on(k)
        v = k[..., : self.Dv] if self.shared else on(v)
        cache = Cache(*map(on, cache))
        if self.shared:
            cache = _with_shared_values(cache, self.Dv)
        return on(q), k, v, cache, Spec(*map(on, spec))

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

    def _with_invalid_values(self, cache: Cache, spec: Spec) -> tuple[Cache, Spec]:
        g = torch.Generator().manual_seed(self.seed + 2)
        ranges, table = spec.key_ranges, cache.page_table
        if torch.rand((), generator=g) < 0.6:
            lens = with_invalid_values(spec.kv_lens.long(), self.S, g).int()
            spec = spec._replace(kv_lens=lens)
        if ranges is not None:
            spec = spec._replace(key_ranges=with_invalid_values(ranges.long(), self.S, g).int())
        if table is not None:
            missing = torch.tensor([-1, INT_MIN, table.numel() + 3, INT_MAX], dtype=torch.int32)
            missing = missing[torch.randint(4, table.shape, generator=g)]
            keep = torch.rand(table.shape, generator=g) < 0.7
            cache = cache._replace(page_table=torch.where(keep, table, missing))
        return cache, spec

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


def arguments(cache: Cache, spec: Spec) -> tuple[tuple, dict]:
    """The operator's arguments after the caches, and its keyword arguments."""
    new = () if cache.key is None else (cache.key, cache.value)
    options = cache._asdict() | spec._asdict()
    for name in (
        "page_table", "key", "value", "attn_mask", "dropout_p", "is_causal", "kv_lens",
        "dropout_seed", "deterministic", "mask_blocks",
    ):  # fmt: skip
        del options[name]
    return (*new, spec.kv_lens, cache.page_table, spec.is_causal), options


def call(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> tuple[Tensor, Tensor]:
    """Call the reading or the appending operator; return (out, lse)."""
    args, options = arguments(cache, spec)
    name = "attention_with_kv_cache" + ("_append" if cache.key is not None else "")
    return getattr(torch.ops.fa, name)(q, k, v, *args, **options)


def assert_cache_close(
    case: CacheCase, backend: str, arena: Arena | None = None, calls: int = 1
) -> None:
    """Compare out, lse and the caches after the call with the oracle within the error budget.

    Args:
        arena: allocate inputs and results in it, and check that nothing outside them is written.
        calls: how often to call; all results must be bitwise equal.
    """
    q, k, v, cache, spec = case.fresh()
    q2, k2, v2, cache2, spec2 = case.fresh()
    # the oracle reads, and appends to, a copy of the cache that is not poisoned
    attend, attend_naive = reference.dense, _naive_in(case.dtype)
    if case.broken:
        cache2, spec2, present = valid_call(k2, v2, cache2, spec2)
        k2, v2 = with_spare_page(k2, v2, cache2)
        attend = attend_present(present, attend)
        attend_naive = attend_present(present, attend_naive)
    expected = reference.cached(Call.of(q2, k2, v2, spec2, cache=cache2), attend)
    poison = None
    if case.poison:
        poison = CachePoison(case, q2, k2, v2, cache2, spec2)
        poison.write(q, k, v, cache)
    if arena is not None:
        q, k, v, cache, spec = _placed(arena, q, k, v, cache, spec, case.shared)
    with contextlib.nullcontext() if arena is None else arena.outputs(backend):
        results = [call(q, k, v, cache, spec._replace(backend=backend)) for _ in range(calls)]
    if arena is not None:
        arena.check()
    for repeated in results[1:]:
        for name, x, y in zip(("out", "lse"), results[0], repeated):
            same = (x == y) | (x.isnan() & y.isnan())
            assert bool(same.all()), f"{case}: {name} differs when the call is repeated"
    # rotated keys may be rounded differently
    rounding = 0.13 if case.fp8 else torch.finfo(case.dtype).eps * 2
    for name, x, y in (("key_cache", k, k2), ("value_cache", v, v2)) if not poison else ():
        x, y = x.float(), y[: len(x)].float()
        near = (x - y).abs() <= rounding * (y.abs() + 0.5) if case.rotary else x == y
        assert bool((near | (x.isnan() & y.isnan())).all()), f"{case}: {name} after the call"
    rotation = {name: getattr(cache2, name) for name in ("rotary_cos", "rotary_sin")}
    appended = Call.of(q2, k2, v2, spec2, cache=cache2).without_new()
    baseline = reference.cached(appended.changed(**rotation), attend_naive)
    noise = max(rounding * 2 if case.rotary else 0.0, _noise_of_scales(case, spec2, cache2))
    # an error of a score is one of the output in units of values
    largest = cache2.v_scale.nan_to_num().max().item() if case.fp8 else 1.0
    noises = {"out": noise * max(1.0, largest), "lse": noise}
    for name, x, y, z in zip(("out", "lse"), results[0], expected, baseline):
        if poison is not None:
            x = poison.replaced(name, x, y)
        assert_within_budget(f"{case}: {name}", x, y, z, torch.tensor(noises[name]))


def _naive_in(dtype: torch.dtype) -> Callable:
    return lambda call: naive(Call(*(t.to(dtype) for t in call[:3]), *call[3:]))


def _placed(arena: Arena, q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec, shared: bool):
    """The same call with all tensors in the arena; only caches that are appended to may change."""
    placed = {}

    def put(x: object) -> object:
        if isinstance(x, Tensor) and id(x) not in placed:
            placed[id(x)] = arena.placed(x)
        return placed.get(id(x), x)

    writes = cache.key is not None
    k2 = arena.placed(k, read_only=not writes)
    v2 = k2[..., : v.shape[-1]] if shared else arena.placed(v, read_only=not writes)
    cache = Cache(*map(put, cache))
    if shared:
        cache = _with_shared_values(cache, v.shape[-1])
    return put(q), k2, v2, cache, Spec(*map(put, spec))


def _with_shared_values(cache: Cache, width: int) -> Cache:
    """The same with new values that are the first features of the new keys, and their scales."""
    value = None if cache.key is None else cache.key[..., :width]
    return cache._replace(value=value, v_scale=cache.k_scale)


def _noise_of_scales(case: CacheCase, spec: Spec, cache: Cache) -> float:
    """The standard deviation of a score whose fp8 key was multiplied by its scale and rounded.

    The naive computation has this error too, but over the few rows of a decoding step the rounding
    of the scores may cancel it.
    """
    if not case.fp8:
        return 0.0
    product = case.magnitude * abs(default_scale(spec, case.D)) * case.D**0.5
    return product * cache.k_scale.nan_to_num().max().item() * torch.finfo(case.dtype).eps / 12**0.5


# The meaning of calls over a cache with lengths or pages that lie outside the cache.
#
# Where the host does not check them (docs/decode.md), lengths are clamped to the capacity, new keys
# beyond it are not written, and keys in pages that do not exist are masked out.


def first_invalid_value(k: Tensor, cache: Cache, spec: Spec) -> str | None:
    """The beginning of the error that a backend that checks lengths and pages must raise."""
    new = 0 if cache.key is None else cache.key.shape[2]
    table, size = cache.page_table, k.shape[1]
    for b, length in enumerate(spec.kv_lens.tolist()):
        if length < 0 or length + new > _capacity(k, cache):
            return f"kv_lens[{b}] is {length}, which"
        if table is not None:
            used = table[b, : -(-(length + new) // size)].tolist()
            for n, page in enumerate(used):
                if not 0 <= page < len(k):
                    return f"page_table[{b}, {n}] is {page}, but"
    return None


def _capacity(k: Tensor, cache: Cache) -> int:
    return k.shape[2] if cache.page_table is None else cache.page_table.shape[1] * k.shape[1]


def valid_call(k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> tuple[Cache, Spec, list[Tensor]]:
    """Write the new keys that fit to k and v; return the valid call that remains.

    The last result holds a bool tensor for each row of the batch: which of its keys exist. Pages
    that do not exist are replaced by page len(k), which `with_spare_page` adds.
    """
    new = 0 if cache.key is None else cache.key.shape[2]
    capacity, table, size = _capacity(k, cache), cache.page_table, k.shape[1]
    exists = None if table is None else (table >= 0) & (table < len(k))
    for b, length in enumerate(spec.kv_lens.tolist()):
        for n in range(new):
            at = length + n
            if 0 <= at < capacity and (exists is None or exists[b, at // size]):
                key, value = (x[b, :, n : n + 1].double() for x in (cache.key, cache.value))
                key = _rotated(key, cache, at).to(cache.key.dtype)
                _write(k, key, cache.k_scale, cache, b, at)
                _write(v, value, cache.v_scale, cache, b, at)
    lens = (spec.kv_lens.long() + new).clamp(0, capacity)
    present = [torch.ones(n, dtype=torch.bool, device=k.device) for n in lens.tolist()]
    if exists is not None:
        present = [row.repeat_interleave(size)[: len(p)] for row, p in zip(exists, present)]
        scales = map(_with_spare_scale, (cache.k_scale, cache.v_scale))
        cache = cache._replace(page_table=table.where(exists, len(k)))
        cache = cache._replace(**dict(zip(("k_scale", "v_scale"), scales)))
    return cache._replace(key=None, value=None), spec._replace(kv_lens=lens.int()), present


def _rotated(key: Tensor, cache: Cache, position: int) -> Tensor:
    """A key (H, 1, D), rotated by the last angles if there are none for its position."""
    last = 0 if cache.rotary_cos is None else len(cache.rotary_cos) - 1
    return reference.rotate(
        key, Call.of(None, None, None, cache=cache), torch.tensor([min(position, last)])
    )


def _write(memory: Tensor, new: Tensor, scale: Tensor | None, cache: Cache, b: int, at: int):
    factor = reference.scales(scale, cache.page_table, b, range(at, at + 1), memory.shape[1])
    x = reference.quantised(new.double(), factor.to(new.device), memory.dtype)
    view, index = reference.slots(memory, cache.page_table, b, at, at + 1)
    view[index] = x.transpose(0, 1).view(view.dtype)


def with_spare_page(k: Tensor, v: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
    """Append a page of zeros to paged caches."""
    if cache.page_table is None:
        return k, v
    return tuple(torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))


def _with_spare_scale(scale: Tensor | None) -> Tensor | None:
    """Append the spare page's scale to scales of pages; return scales of heads unchanged."""
    if scale is None or scale.dim() == 2:
        return scale
    return torch.cat([scale, torch.ones_like(scale[:1])])


def attend_present(present: Sequence[Tensor], attend: Callable) -> Callable:
    """Wrap `attend`, which `reference.cached` calls once a row, to mask out missing keys."""
    rows = iter(present)
    return lambda call: attend(call.changed(attn_mask=next(rows).view(1, 1, 1, -1)))
