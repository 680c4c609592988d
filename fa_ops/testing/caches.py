"""Key-value caches as data: one problem from a seed, contiguous or paged, and its oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.testing import broken_caches
from fa_ops.testing.arena import Arena
from fa_ops.testing.budget import assert_within_budget, naive
from fa_ops.testing.inputs import INT_MAX, INT_MIN, anything
from fa_ops.testing.isolation import CachePoison
from fa_ops.types import Cache, Spec, default_scale, longer

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class CacheCase:
    """`repr` is a line that recreates it."""

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
    page_scales: bool = False  # of fp8: for each page instead of each row
    page_size: int = 0  # 0: contiguous
    bshd: bool = True  # memory order of a contiguous cache
    new: int = 0  # keys to append
    shared: bool = False  # the value is a view of the key's first Dv columns
    rotary: int = 0  # features that are rotated
    interleaved: bool = False
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    alibi: str | None = None
    sinks: bool | str = False  # as of Case
    num_splits: int = 0
    batch_invariant: bool = False
    lens: tuple[int, ...] | None = None
    magnitude: float = 1.0  # of queries
    unified_max: float | None = None  # what every head's largest score is said to be
    ranges: bool = False  # a run of keys for each row; the others are unused
    broken: bool = False  # kv_lens, ranges and pages hold numbers outside the cache too
    poison: str | None = None  # NaN or Inf in one operand, such as "nan key"; see `isolation`

    def __repr__(self) -> str:
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"CacheCase({', '.join(changed)})"

    def fresh(self) -> tuple[Tensor, Tensor, Tensor, Cache, Spec]:
        """q, the caches, Cache and Spec: the same numbers every time. Unused keys are NaN."""
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
            for b, length in enumerate(lens):  # entries that are not needed point nowhere
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
            if self.shared:
                fields["value"] = fields["key"][..., : self.Dv]
        if self.fp8:
            for name in ("k_scale", "v_scale"):
                shape = (k.shape[0], 1, self.Hkv) if self.page_scales else (self.B, self.Hkv)
                fields[name] = torch.rand(shape, generator=g) + 0.5
                if self.page_scales:
                    fields[name] *= 2.0 ** torch.randint(-2, 3, shape, generator=g)
            if self.shared:
                fields["v_scale"] = fields["k_scale"]
        if self.rotary:
            angle = torch.rand(self.S + 1, self.rotary // 2, generator=g) * 6
            fields["rotary_cos"], fields["rotary_sin"] = angle.cos(), angle.sin()
        spec = Spec(
            is_causal=self.is_causal, scale=self.scale, window_left=self.window[0],
            window_right=self.window[1], softcap=self.softcap, kv_lens=kv_lens,
            sinks=self._sinks(g),
            alibi_slopes=self._slopes(g), key_ranges=ranges,
        )  # fmt: skip
        cache = Cache(
            page_table=table, rotary_interleaved=self.interleaved, num_splits=self.num_splits,
            batch_invariant=self.batch_invariant, unified_max=self._guesses(), **fields,
        )  # fmt: skip
        if self.broken:
            cache, spec = self._with_broken(cache, spec)
        on = lambda t: t.to(self.device) if isinstance(t, Tensor) else t  # noqa: E731
        k = on(k)
        v = k[..., : self.Dv] if self.shared else on(v)
        return on(q), k, v, Cache(*map(on, cache)), Spec(*map(on, spec))

    def _with_broken(self, cache: Cache, spec: Spec) -> tuple[Cache, Spec]:
        g = torch.Generator().manual_seed(self.seed + 2)
        ranges, table = spec.key_ranges, cache.page_table
        if torch.rand((), generator=g) < 0.6:
            lens = anything(spec.kv_lens.long(), self.S, g).int()
            spec = spec._replace(kv_lens=lens)
        if ranges is not None:
            spec = spec._replace(key_ranges=anything(ranges.long(), self.S, g).int())
        if table is not None:
            missing = torch.tensor([-1, INT_MIN, table.numel() + 3, INT_MAX], dtype=torch.int32)
            missing = missing[torch.randint(4, table.shape, generator=g)]
            keep = torch.rand(table.shape, generator=g) < 0.7
            cache = cache._replace(page_table=torch.where(keep, table, missing))
        return cache, spec

    def _sinks(self, g: torch.Generator) -> Tensor | None:
        if not self.sinks:
            return None
        sinks = torch.randn(self.Hq, generator=g)
        if isinstance(self.sinks, str):
            sinks[self.seed % 2 :: 2] = float(self.sinks)
        return sinks

    def _guesses(self) -> Tensor | None:
        guess = self.unified_max
        return None if guess is None else torch.full((self.Hq,), guess)

    def _slopes(self, g: torch.Generator) -> Tensor | None:
        if self.alibi is None:
            return None
        shape = (self.Hq,) if self.alibi == "heads" else (self.B, self.Hq)
        return torch.rand(shape, generator=g) * 0.5

    def _memory(self, draw, table: Tensor | None, runs: list, width: int) -> Tensor:
        if table is not None:
            pages = table.numel() + 3
            x = draw(pages, self.page_size, self.Hkv, width)
            used = torch.zeros(pages, self.page_size, dtype=torch.bool)
            for b, (lo, hi) in enumerate(runs):
                keys = torch.arange(lo, max(lo, hi))
                used[table[b, keys // self.page_size].long(), keys % self.page_size] = True
            x[~used] = float("nan")
            return x.to(FP8) if self.fp8 else x
        x = draw(self.B, self.S, self.Hkv, width)
        for b, (lo, hi) in enumerate(runs):
            x[b, :lo] = x[b, max(lo, hi) :] = float("nan")
        x = x.to(FP8) if self.fp8 else x
        return x.transpose(1, 2) if self.bshd else x.transpose(1, 2).contiguous()


def random_cache_case(seed: int, **fixed) -> CacheCase:
    """A random legal combination; `fixed` overrides any field."""
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
    return dataclasses.replace(CacheCase(), **(fields | fixed))


def arguments(cache: Cache, spec: Spec) -> tuple[tuple, dict]:
    """What follows the caches in a call of the operator that the Cache asks for."""
    new = () if cache.key is None else (cache.key, cache.value)
    options = cache._asdict() | spec._asdict()
    for name in (
        "page_table", "key", "value", "attn_mask", "dropout_p", "is_causal", "kv_lens",
        "dropout_seed", "deterministic",
    ):  # fmt: skip
        del options[name]
    return (*new, spec.kv_lens, cache.page_table, spec.is_causal), options


def call(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> tuple[Tensor, Tensor]:
    args, options = arguments(cache, spec)
    name = "attention_with_kv_cache" + ("_append" if cache.key is not None else "")
    return getattr(torch.ops.fa, name)(q, k, v, *args, **options)


def assert_cache_close(
    case: CacheCase, backend: str, arena: Arena | None = None, calls: int = 1
) -> None:
    """out, lse and the caches after the call, against the oracle within the error budget.

    Args:
        arena: where inputs and results then lie; what is written beside them is an error.
        calls: how often to call; all results must have the same bits.
    """
    q, k, v, cache, spec = case.fresh()
    q2, k2, v2, cache2, spec2 = case.fresh()
    # how the oracle attends is found from a clean cache, which it writes to as well
    attend, other = reference.dense, _narrow(case)
    if case.broken:
        cache2, spec2, present = broken_caches.meaning(k2, v2, cache2, spec2)
        k2, v2 = broken_caches.with_spare_page(k2, v2, cache2)
        attend, other = (broken_caches.Present(present, one) for one in (attend, other))
    expected = reference.cached(q2, k2, v2, cache2, spec2, attend)
    poison = None
    if case.poison:
        poison = CachePoison(case, q2, k2, v2, cache2, spec2)
        poison.write(q, k, v, cache)
    if arena is not None:
        q, k, v, cache, spec = _placed(arena, q, k, v, cache, spec, case.shared)
    with contextlib.nullcontext() if arena is None else arena.outputs(backend):
        runs = [call(q, k, v, cache, spec._replace(backend=backend)) for _ in range(calls)]
    if arena is not None:
        arena.check()
    for again in runs[1:]:
        for name, x, y in zip(("out", "lse"), runs[0], again):
            same = (x == y) | (x.isnan() & y.isnan())
            assert bool(same.all()), f"{case}: {name} differs when the call is repeated"
    # what was rotated may be rounded the other way
    loose = 0.13 if case.fp8 else torch.finfo(case.dtype).eps * 2
    for name, x, y in (("key_cache", k, k2), ("value_cache", v, v2)) if not poison else ():
        x, y = x.float(), y[: len(x)].float()
        near = (x - y).abs() <= loose * (y.abs() + 0.5) if case.rotary else x == y
        assert bool((near | (x.isnan() & y.isnan())).all()), f"{case}: {name} after the call"
    known = reference.cached(q2, k2, v2, cache2._replace(key=None), longer(spec2, cache2), other)
    noise = torch.tensor(
        max(loose * 2 if case.rotary else 0.0, _noise_of_scales(case, spec2, cache2))
    )
    for name, x, y, z in zip(("out", "lse"), runs[0], expected, known):
        if poison is not None:
            x = poison.judged(name, x, y)
        assert_within_budget(f"{case}: {name}", x, y, z, noise)


def _narrow(case: CacheCase) -> Callable:
    def attend(q, k, v, spec):
        return naive(*(x.to(case.dtype) for x in (q, k, v)), spec)

    return attend


def _placed(arena: Arena, q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec, shared: bool):
    """The same call between margins; caches may be written to, all else may not."""
    placed = {}

    def put(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in placed:
            placed[id(x)] = arena.placed(x)
        return placed[id(x)]

    writes = cache.key is not None
    k2 = arena.placed(k, read_only=not writes)
    v2 = k2[..., : v.shape[-1]] if shared else arena.placed(v, read_only=not writes)
    return put(q), k2, v2, Cache(*map(put, cache)), Spec(*map(put, spec))


def _noise_of_scales(case: CacheCase, spec: Spec, cache: Cache) -> float:
    """The standard deviation of a score whose fp8 key was multiplied by its scale and rounded.

    The naive computation does that too, but a decoding step is so few rows that another rounding,
    of the scores, may cancel it.
    """
    if not case.fp8:
        return 0.0
    product = case.magnitude * abs(default_scale(spec, case.D)) * case.D**0.5
    return product * cache.k_scale.max().item() * torch.finfo(case.dtype).eps / 12**0.5
