"""What the matcher knows about a value: scores, weights, or why they were lost."""

from __future__ import annotations

import dataclasses

import torch

from compile_passes.axes import Axis, Dims, Group, flat, resolve
from compile_passes.ir import Value


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Something that joins the scores from outside: a number, a symbolic scalar, or a tensor aligned with them."""

    value: Value | float
    dims: Dims = ()

    def axes(self) -> set[Axis]:
        return set(flat(self.dims))


@dataclasses.dataclass(frozen=True)
class Bias:
    """scores + coefficient * leaf, in `dtype`"""

    leaf: Leaf
    dtype: torch.dtype
    coefficient: float = 1.0


@dataclasses.dataclass(frozen=True)
class Fill:
    """Scores become `value` where the mask is `where`."""

    mask: Leaf
    where: bool
    value: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """softcap * tanh(scale * factors * (a . b) / softcap), then the terms in order. `path` is every node so far."""

    a: Leaf
    b: Leaf
    summed: Group
    product: Value
    product_dims: Dims
    dims: Dims
    path: tuple[Value, ...]
    scale: float = 1.0
    factors: tuple[Leaf, ...] = ()  # multiply
    divisors: tuple[Leaf, ...] = ()
    softcap: float = 0.0
    terms: tuple[Bias | Fill, ...] = ()

    def then(self, value: Value, **changes) -> Scores:
        return dataclasses.replace(self, path=(*self.path, value), **changes)


@dataclasses.dataclass(frozen=True)
class Weights:
    """softmax(scores) over the axes `keys`, perhaps dropped out, times the factors (which do not vary along the keys)."""

    scores: Scores
    softmax: Value
    keys: Group
    dims: Dims
    path: tuple[Value, ...]
    dropout_p: float = 0.0
    factors: tuple[Leaf, ...] = ()

    def then(self, value: Value, **changes) -> Weights:
        return dataclasses.replace(self, path=(*self.path, value), **changes)

    def key_axes(self) -> set[Axis]:
        return set(resolve(self.keys))


@dataclasses.dataclass(frozen=True)
class Lost:
    """Was scores or weights until `value` did something that a softmax attention does not do."""

    reason: str
    value: Value
    softmax: Value | None = None


@dataclasses.dataclass(frozen=True)
class Core:
    """One whole attention: weights times `v`, laid out as `dims`."""

    weights: Weights
    v: Leaf
    features: Group
    dims: Dims
    out: Value

    @property
    def path(self) -> tuple[Value, ...]:
        return self.weights.path


State = Scores | Weights | Lost
