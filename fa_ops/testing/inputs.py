"""Input factories: one attention problem as data, reproducible from a seed."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from fa_ops.types import Spec


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem: shapes, dtype, layout and features. `repr` is a line that recreates it."""

    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    Sq: int = 33
    Sk: int = 47
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    layout: str = "bhsd"  # memory order: bhsd, bshd, or packed (q, k, v interleaved in one buffer per tensor)
    mask: str | None = None  # bool or float
    mask_shape: tuple[int, int, int, int] | None = None  # which dimensions are full (1) or broadcast (0); None: all full
    mask_grad: bool = False
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    alibi: str | None = None  # heads or batch_heads
    sinks: bool = False
    kv_lens: bool = False
    key_ranges: tuple[int, int, int] | None = None  # full (1) or broadcast (0) over batch, head, query
    dropout_p: float = 0.0
    deterministic: bool = False

    def __repr__(self) -> str:
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"Case({', '.join(changed)})"

    def _tensor(self, generator: torch.Generator, H: int, S: int, D: int) -> Tensor:
        order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "packed": (0, 2, 1, 3)}[self.layout]
        sizes = [(self.B, H, S, D)[i] for i in order]
        if self.layout == "packed":
            sizes[2] *= 2
        x = torch.randn(sizes, generator=generator, dtype=torch.float64).to(self.dtype)
        if self.layout == "packed":
            x = x[:, :, :H]
        return x.permute(order)  # each of these permutations is its own inverse

    def fresh(self, dtype: torch.dtype | None = None, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor, Spec]:
        """q, k, v and the spec: the same numbers every time, rounded to the case's dtype and then cast to `dtype`."""
        g = torch.Generator().manual_seed(self.seed)
        cast = dtype or self.dtype

        def place(x: Tensor, dtype: torch.dtype = cast, grad: bool = requires_grad) -> Tensor:
            x = x.to(device=self.device, dtype=dtype)  # keeps strides
            return x.requires_grad_(grad)

        q = self._tensor(g, self.Hq, self.Sq, self.D)
        k = self._tensor(g, self.Hkv, self.Sk, self.D)
        v = self._tensor(g, self.Hkv, self.Sk, self.Dv)
        spec = self._spec(g, place, cast, requires_grad)
        return place(q), place(k), place(v), spec

    def _spec(self, g: torch.Generator, place, cast: torch.dtype, requires_grad: bool) -> Spec:
        wide = torch.float64 if cast == torch.float64 else torch.float32
        full = (self.B, self.Hq, self.Sq, self.Sk)
        fields: dict = {}
        if self.mask is not None:
            shape = [n if keep else 1 for n, keep in zip(full, self.mask_shape or (1, 1, 1, 1))]
            if self.mask == "bool":
                fields["attn_mask"] = place(torch.rand(shape, generator=g) > 0.3, torch.bool, False)
            else:
                bias = torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype)
                fields["attn_mask"] = place(bias, grad=requires_grad and self.mask_grad)
        if self.alibi is not None:
            shape = (self.Hq,) if self.alibi == "heads" else (self.B, self.Hq)
            fields["alibi_slopes"] = place(torch.rand(shape, generator=g) * 0.5, torch.float32, False)
        if self.sinks:
            fields["sinks"] = place(torch.randn(self.Hq, generator=g), wide)
        if self.kv_lens:
            fields["kv_lens"] = place(torch.randint(0, self.Sk + 1, (self.B,), generator=g), torch.int32, False)
        if self.key_ranges is not None:
            shape = [n if keep else 1 for n, keep in zip(full[:3], self.key_ranges)]
            ends = torch.randint(0, self.Sk + 1, (*shape, 2), generator=g).sort(-1).values
            fields["key_ranges"] = place(ends, torch.int32, False)
        if self.dropout_p > 0:
            fields["dropout_seed"] = place(torch.randint(2**62, (1,), generator=g), torch.int64, False)
        return Spec(
            dropout_p=self.dropout_p, is_causal=self.is_causal, scale=self.scale, window_left=self.window[0],
            window_right=self.window[1], softcap=self.softcap, deterministic=self.deterministic, **fields,
        )  # fmt: skip

    def grad_outputs(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The cotangents of out and lse: the same numbers for every dtype."""
        g = torch.Generator().manual_seed(self.seed + 1)
        grad_out = torch.randn(out.shape, generator=g, dtype=torch.float64).to(self.dtype)
        grad_lse = torch.randn(lse.shape, generator=g, dtype=torch.float64).float()
        return grad_out.to(out.device, out.dtype), grad_lse.to(lse.device, lse.dtype)


def make_case(**changes) -> Case:
    return dataclasses.replace(Case(), **changes)


def random_case(seed: int, **fixed) -> Case:
    """A random legal combination of shapes, layouts and features; `fixed` overrides any field."""
    r = random.Random(seed)
    pick, maybe = r.choice, lambda p: r.random() < p
    Hkv = pick([1, 2, 3])
    D = pick([8, 16, 32, 40, 64])
    causal, ranged = maybe(0.4), maybe(0.2)
    mask = pick([None, None, "float"] if ranged else [None, None, "bool", "float"])
    bits = lambda n: tuple(r.randint(0, 1) for _ in range(n))  # noqa: E731
    fields = dict(
        B=pick([1, 2, 3]), Hq=Hkv * pick([1, 1, 2, 4]), Hkv=Hkv, Sq=pick([1, 2, 17, 33, 64, 100]), Sk=pick([1, 3, 32, 65, 128, 150]),
        D=D, Dv=pick([D, D, 24]), layout=pick(["bhsd", "bshd", "packed"]), seed=seed, mask=mask, mask_shape=bits(4) if mask else None,
        mask_grad=mask == "float" and maybe(0.5), is_causal=causal,
        window=(pick([-1, 0, 5, 40]), pick([-1, 0, 7, 50])) if maybe(0.3) else (-1, -1),
        softcap=pick([1.5, 20.0]) if maybe(0.2) else 0.0, scale=pick([0.3, 1.0]) if maybe(0.2) else None,
        alibi=pick(["heads", "batch_heads"]) if maybe(0.2) else None, sinks=maybe(0.2), kv_lens=maybe(0.2),
        key_ranges=bits(3) if ranged else None, dropout_p=pick([0.1, 0.5]) if maybe(0.15) else 0.0, deterministic=maybe(0.2),
    )  # fmt: skip
    return dataclasses.replace(Case(), **(fields | fixed))
