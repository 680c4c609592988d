"""Input factories: attention problems as data, reproducible from a seed; and memory under test."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from fa_ops.backends import reference
from fa_ops.call.call import Call, attention_call
from fa_ops.call.options import MASK_BLOCK, NO_OPERANDS, Operands, mask_tiles

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem: shapes, dtype, layout, features. `repr` is a line that recreates it.

    `mask_shape`, over (B, Hq, Sq, Sk), and `key_ranges`, over (B, Hq, Sq), hold 1 for a dimension
    of full size and 0 for a broadcast one; a `mask_shape` of None is all ones.
    """

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
    layout: str = "bhsd"  # one of `layouts.LAYOUTS`
    mask: str | None = None  # "bool" or "float"
    mask_shape: tuple[int, int, int, int] | None = None
    mask_grad: bool = False
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    alibi: str | None = None  # "heads" or "batch_heads"
    sinks: bool | str = False  # or the value of every second head's sink, such as "-inf"
    kv_lens: bool = False
    key_ranges: tuple[int, int, int] | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    mask_holes: bool = False  # mask out some rows, and with a float mask some elements
    magnitude: float = 1.0  # factor of q, and so of the scores
    lse_grad: bool = True  # whether lse is differentiated too
    grad_layout: str = "bhsd"  # layout of the gradient of out, one of `layouts.GRAD_LAYOUTS`
    integers: bool = False  # q and k are small integers times `magnitude`: their products are exact
    broken: bool = False  # kv_lens, key_ranges and cu_seqlens may hold out-of-range numbers
    poison: str | None = None  # NaN or Inf in an operand, such as "nan key"; see `isolation`
    mask_blocks: bool = False  # give those of the mask, some of whose tiles are empty or full
    lists: tuple[int, int, int] | None = None  # block_size, query_block and n of block_indices
    documents: int = 0  # of cu_seqlens, in the only row of a batch with lists

    def __repr__(self) -> str:
        return short_repr(self)

    def _tensor(
        self, g: torch.Generator, move: Callable, H: int, S: int, D: int, factor: float = 1.0,
        integers: bool = False,
    ) -> Tensor:  # fmt: skip
        """Draw (B, H, S, D) in the case's dtype and layout; `move` applies device and dtype."""
        shape = self.B, H, S, D
        x = torch.randn(base_shape(self.layout, *shape), generator=g, dtype=torch.float64)
        if integers:
            x = x.round().clamp(-2, 2)
        return arranged(self.layout, move((x * factor).to(self.dtype)), *shape)

    def fresh(self, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Call:
        """The call with new tensors, always with the same values.

        Values are rounded to the case's dtype, then cast to `dtype`.
        """
        g = torch.Generator().manual_seed(self.seed)
        cast = dtype or self.dtype

        def move(x: Tensor, dtype: torch.dtype = cast, grad: bool = False) -> Tensor:
            return x.to(device=self.device, dtype=dtype).requires_grad_(grad)

        factor, exact = self.magnitude, self.integers
        q = self._tensor(g, move, self.Hq, self.Sq, self.D, factor, exact)
        k = self._tensor(g, move, self.Hkv, self.Sk, self.D, factor if exact else 1.0, exact)
        v = self._tensor(g, move, self.Hkv, self.Sk, self.Dv)
        operands = self._operands(g, move, cast, requires_grad)
        q, k, v = (x.requires_grad_(requires_grad) for x in (q, k, v))
        if self.lists is not None:
            operands |= {"block_size": self.lists[0], "query_block": self.lists[1]}
        return attention_call(
            q, k, v, dropout_p=self.dropout_p, is_causal=self.is_causal, scale=self.scale,
            window_left=self.window[0], window_right=self.window[1], softcap=self.softcap,
            deterministic=self.deterministic, **operands,
        )  # fmt: skip

    def _operands(
        self, g: torch.Generator, move: Callable, cast: torch.dtype, requires_grad: bool
    ) -> dict[str, Tensor]:
        wide = torch.float64 if cast == torch.float64 else torch.float32
        full = (self.B, self.Hq, self.Sq, self.Sk)
        fields: dict = {}
        if self.mask is not None:
            shape = [n if keep else 1 for n, keep in zip(full, self.mask_shape or (1, 1, 1, 1))]
            holes = torch.rand((*shape[:3], 1), generator=g) < (0.2 if self.mask_holes else 0.0)
            if self.mask == "bool":
                keep = (torch.rand(shape, generator=g) > 0.3) & ~holes
                fields["attn_mask"] = move(keep, torch.bool, False)
            else:
                bias = torch.randn(shape, generator=g, dtype=torch.float64)
                if self.mask_holes:
                    bias[holes | (torch.rand(shape, generator=g) < 0.2)] = float("-inf")
                grad = requires_grad and self.mask_grad
                fields["attn_mask"] = move(bias.to(self.dtype), grad=grad)
            if self.mask_blocks:
                fill_some(fields["attn_mask"].detach(), g)
                fields["mask_blocks"] = reference.mask_blocks(fields["attn_mask"])
        if self.alibi is not None:
            fields["alibi_slopes"] = move(random_slopes(self, g), torch.float32, False)
        if self.sinks:
            fields["sinks"] = move(random_sinks(self, g), wide, requires_grad)
        if self.kv_lens:
            lens = torch.randint(0, self.Sk + 1, (self.B,), generator=g)
            if self.broken:
                lens = with_invalid_values(lens, self.Sk, g)
            fields["kv_lens"] = move(lens, torch.int32, False)
        if self.key_ranges is not None:
            shape = [n if keep else 1 for n, keep in zip(full[:3], self.key_ranges)]
            ranges = torch.randint(0, self.Sk + 1, (*shape, 2), generator=g).sort(-1).values
            if self.broken:
                ranges = with_invalid_values(ranges, self.Sk, g)
            fields["key_ranges"] = move(ranges, torch.int32, False)
        if self.lists is not None:
            lists = random_lists(self, g)
            fields |= {name: move(x, torch.int32, False) for name, x in lists.items()}
        if self.dropout_p > 0:
            seed = torch.randint(2**62, (1,), generator=g)
            fields["dropout_seed"] = move(seed, torch.int64, False)
        return fields

    def grad_outputs(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of a loss with respect to out and lse, with the same values every time."""
        g = torch.Generator().manual_seed(self.seed + 1)
        grad_out = torch.randn(out.shape, generator=g, dtype=torch.float64).to(self.dtype)
        grad_lse = torch.randn(lse.shape, generator=g, dtype=torch.float64).float()
        grad_out = rearranged(self.grad_layout, grad_out.to(out.device, out.dtype))
        return grad_out, grad_lse.to(lse.device, lse.dtype)


def with_each(call: Call, function: Callable[[str, Tensor], Tensor]) -> Call:
    """The call with other tensors: what the function makes of the name and the tensor of each."""
    names = ("query", "key", "value")
    tensors = {name: function(name, t) for name, t in zip(names, call[:3])}
    if call.operands is not NO_OPERANDS:
        operands = zip(Operands._fields, call.operands)
        made = (None if t is None else function(name, t) for name, t in operands)
        tensors["operands"] = Operands(*made)
    return call._replace(**tensors)


def short_repr(case: object) -> str:
    """The constructor call that recreates a dataclass, without the fields left at their default."""
    fields = ((f.name, f.default, getattr(case, f.name)) for f in dataclasses.fields(case))
    changed = (f"{name}={value!r}" for name, default, value in fields if value != default)
    return f"{type(case).__name__}({', '.join(changed)})"


def random_sinks(case, g: torch.Generator) -> Tensor:
    """Sinks (Hq,) for a case with sinks; a string gives the value of every second head's."""
    sinks = torch.randn(case.Hq, generator=g)
    if isinstance(case.sinks, str):
        sinks[case.seed % 2 :: 2] = float(case.sinks)
    return sinks


def random_lists(case: Case, g: torch.Generator) -> dict[str, Tensor]:
    """block_indices with holes and repeats, some of them empty; counts; cu_seqlens."""
    (size, query_block, n), B, Hkv = case.lists, case.B, case.Hkv
    are_own = torch.randint(2, (2,), generator=g).tolist()  # of each batch element, of each head
    shape = [full if own else 1 for own, full in zip(are_own, (B, Hkv))]
    shape += [-(-case.Sq // query_block), n]
    fields, limit = {}, torch.tensor(-(-case.Sk // size))
    if case.documents:
        ends = torch.randint(0, case.Sk + 1, (case.documents - 1,), generator=g).sort().values
        ends = torch.cat((torch.tensor([0]), ends, torch.tensor([case.Sk])))
        fields["cu_seqlens"] = ends
        blocks = (ends.diff() + size - 1).div(size, rounding_mode="floor")
        limit = blocks.repeat_interleave(ends.diff())[::query_block].view(1, 1, -1, 1)
    lists = (torch.rand(shape, generator=g) * (limit + 1)).floor().long() - 1
    lists[torch.rand(shape[:3], generator=g) < 0.1] = -1
    if case.seed % 3 == 0:
        fields["counts"] = torch.randint(0, n + 1, shape[:3], generator=g)
    if case.broken:
        lists = with_invalid_values(lists, -(-case.Sk // size), g)
    return fields | {"block_indices": lists}


def random_slopes(case, g: torch.Generator) -> Tensor:
    """ALiBi slopes for a case with them, (Hq,) or (B, Hq)."""
    shape = (case.Hq,) if case.alibi == "heads" else (case.B, case.Hq)
    return torch.rand(shape, generator=g) * 0.5


def with_invalid_values(x: Tensor, end: int, g: torch.Generator) -> Tensor:
    """Replace about half of x (int64) by values that may be negative or beyond `end`."""
    others = torch.tensor([INT_MIN, -end - 7, -1, 0, end, end + 1, 2 * end + 70, INT_MAX])
    chosen = others[torch.randint(len(others), x.shape, generator=g)]
    return torch.where(torch.rand(x.shape, generator=g) < 0.5, chosen, x)


@dataclasses.dataclass(frozen=True)
class PackedCase:
    """Sequences packed along the token dimension, for `fa_ops.attention_varlen`.

    `features` holds all other fields; its B, Sq, Sk, mask and key_ranges are ignored. `margin`
    tokens that belong to no sequence precede the first sequence and follow the last.
    """

    lengths_q: tuple[int, ...] = (5, 0, 17, 33)
    lengths_k: tuple[int, ...] = (9, 4, 0, 47)
    margin: int = 0
    features: Case = Case()

    def packing(self) -> tuple[Tensor, Tensor]:
        """cu_seqlens of queries and of keys."""
        return tuple(self._on_device(x) for x in self._cu_seqlens())

    def meaning(self) -> tuple[Tensor, Tensor]:
        """The valid cu_seqlens that are equivalent to `packing` where values are not checked.

        cu_seqlens are clamped to the tokens, and made non-decreasing by a running maximum.
        """
        sides = zip(self._cu_seqlens(), self._tokens())
        return tuple(self._on_device(x.clamp(0, n).cummax(0).values) for x, n in sides)

    def _on_device(self, cu_seqlens: Tensor) -> Tensor:
        return cu_seqlens.to(self.features.device, torch.int32)

    def _tokens(self) -> tuple[int, int]:
        return tuple(sum(x) + 2 * self.margin for x in (self.lengths_q, self.lengths_k))

    def _cu_seqlens(self) -> list[Tensor]:
        """cu_seqlens of queries and of keys, in int64, with invalid values if `broken`."""
        sides = (self.lengths_q, self.lengths_k)
        cu_seqlens = [torch.tensor([0, *lengths]).cumsum(0) + self.margin for lengths in sides]
        if not self.features.broken:
            return cu_seqlens
        g = torch.Generator().manual_seed(self.features.seed + 2)
        which = int(torch.randint(1, 4, (), generator=g))
        for side, tokens in enumerate(self._tokens()):
            if which & 1 << side:
                cu_seqlens[side] = invalid_cu_seqlens(cu_seqlens[side], tokens, g)
        return cu_seqlens

    def fresh(self, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Call:
        """The call with new tensors q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv)."""
        none = {"mask": None, "mask_blocks": False, "key_ranges": None}
        plain = dataclasses.replace(self.features, **none)
        Tq, Tk = self._tokens()
        tokens = dataclasses.replace(plain, B=1, Sq=Tq, Sk=Tk).fresh(dtype)[:3]
        q, k, v = (x[0].transpose(0, 1).requires_grad_(requires_grad) for x in tokens)
        batch = dataclasses.replace(plain, B=len(self.lengths_k), Sk=max(self.lengths_k))
        call, (ends_q, ends_k) = batch.fresh(dtype, requires_grad), self.packing()
        lens = call.operands.kv_lens
        if lens is not None and not plain.broken:
            lens = lens.minimum(ends_k.diff())
        return call.changed(
            query=q, key=k, value=v, kv_lens=lens, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k,
            packed=True,
        )  # fmt: skip

    def grad_outputs(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of out and lse, as `Case.grad_outputs`."""
        return self.features.grad_outputs(out, lse)


def invalid_cu_seqlens(cu_seqlens: Tensor, tokens: int, g: torch.Generator) -> Tensor:
    """Make cu_seqlens negative at the start, too large at the end, or decreasing in between."""
    n, cu_seqlens = len(cu_seqlens), cu_seqlens.clone()
    at = int(torch.randint(n, (), generator=g))
    kind = int(torch.randint(5, (), generator=g))
    if kind == 0:
        cu_seqlens[: at + 1] = -1 - int(torch.randint(2 * tokens + 9, (), generator=g))
    elif kind in (1, 2):
        cu_seqlens[at:] = tokens + 1 + int(torch.randint(2 * tokens + 9, (), generator=g))
    elif kind == 3:
        cu_seqlens[0], cu_seqlens[-1] = INT_MIN, INT_MAX
    else:
        cu_seqlens[at] = with_invalid_values(cu_seqlens[at], tokens, g)
    return cu_seqlens


def make_case(**changes: Any) -> Case:
    """The default case with some fields changed."""
    return dataclasses.replace(Case(), **changes)


def random_case(seed: int, **fixed: Any) -> Case:
    """A random valid combination of shapes, layouts and features; `fixed` overrides any field."""
    r = random.Random(seed)
    pick = r.choice

    def maybe(p: float) -> bool:
        return r.random() < p

    def bits(n: int) -> tuple[int, ...]:
        return tuple(r.randint(0, 1) for _ in range(n))

    Hkv = pick([1, 2, 3])
    D = pick([8, 16, 32, 40, 64])
    ranged = maybe(0.2)
    mask = pick([None, None, "float"] if ranged else [None, None, "bool", "float"])
    fields = {
        "B": pick([1, 2, 3]),
        "Hq": Hkv * pick([1, 1, 2, 4]),
        "Hkv": Hkv,
        "Sq": pick([1, 2, 17, 33, 64, 100]),
        "Sk": pick([1, 3, 32, 65, 128, 150]),
        "D": D,
        "Dv": pick([D, D, 24]),
        "layout": pick(["bhsd", "bshd", "packed"]),
        "seed": seed,
        "mask": mask,
        "mask_shape": bits(4) if mask else None,
        "mask_grad": mask == "float" and maybe(0.5),
        "mask_holes": mask is not None and maybe(0.3),
        "is_causal": maybe(0.4),
        "window": (pick([-1, 0, 5, 40]), pick([-1, 0, 7, 50])) if maybe(0.3) else (-1, -1),
        "softcap": pick([1.5, 20.0]) if maybe(0.2) else 0.0,
        "scale": pick([0.3, 1.0]) if maybe(0.2) else None,
        "alibi": pick(["heads", "batch_heads"]) if maybe(0.2) else None,
        "sinks": maybe(0.2),
        "kv_lens": maybe(0.2),
        "key_ranges": bits(3) if ranged else None,
        "dropout_p": pick([0.1, 0.5]) if maybe(0.15) else 0.0,
        "deterministic": maybe(0.2),
        "lse_grad": maybe(0.5),
        "grad_layout": pick(["bhsd", "bhsd", *GRAD_LAYOUTS]),
        "broken": maybe(0.5),
    }
    if maybe(0.15):
        fields["layout"] = pick(LAYOUTS)
    if fields["sinks"] and maybe(0.2):
        fields["sinks"] = "-inf"
    fields["mask_blocks"] = mask is not None and maybe(0.4)
    return dataclasses.replace(Case(), **(fields | fixed))


# Masks some of whose tiles are empty or full, as `mask_blocks` finds them.


def fill_some(mask: Tensor, g: torch.Generator) -> None:
    """Mask a third of the tiles of a mask out, in place, and make a third change no score."""
    lowest, highest = (False, True) if mask.dtype == torch.bool else (-torch.inf, 0.0)
    kinds = torch.randint(3, mask_tiles(mask), generator=g).to(mask.device)
    rows, columns = mask.shape[-2:]
    for dim, size in ((2, rows), (3, columns)):
        kinds = kinds.repeat_interleave(MASK_BLOCK, dim).narrow(dim, 0, size)
    mask.masked_fill_(kinds == 0, lowest).masked_fill_(kinds == 1, highest)


# Memory layouts of (B, H, S, D) inputs: contiguous, permuted, sliced, expanded, overlapping.

LAYOUTS = ("bhsd", "bshd", "packed", "expanded", "heads", "rows", "frames")
GRAD_LAYOUTS = ("bhsd", "bshd", "ones", "rows", "frames")


def base_shape(layout: str, B: int, H: int, S: int, D: int) -> tuple[int, ...]:
    """The shape of the contiguous tensor of which `arranged` returns a view."""
    return {
        "bhsd": (B, H, S, D),
        "bshd": (B, S, H, D),
        "packed": (B, S, 2 * H, D),  # a slice of wider rows
        "expanded": (1, H, S, D),  # all rows of the batch share memory
        "heads": (B, 1, S, D),  # all heads share memory
        "rows": (B, H, 1, D),  # all tokens share memory
        "frames": (B, H, max(S, 1) + D - 1),  # each row begins one element after the row before it
    }[layout]


def arranged(layout: str, base: Tensor, B: int, H: int, S: int, D: int) -> Tensor:
    """A (B, H, S, D) view of `base` in the named layout."""
    if layout == "frames":
        return base.unfold(-1, D, 1)[:, :, :S]
    if layout in ("bshd", "packed"):
        base = base[:, :, :H].transpose(1, 2)
    return base.expand(B, H, S, D)


def rearranged(layout: str, x: Tensor) -> Tensor:
    """A tensor of x's shape (..., D) and of its values in another layout, which may repeat values.

    "ones" repeats a single value everywhere.
    """
    if layout == "ones":
        return x.flatten()[:1].view([1] * x.dim()).expand(x.shape)
    if layout == "rows":
        return x[..., :1, :].expand(x.shape)
    if layout == "bshd":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "frames":
        *outer, S, D = x.shape
        return torch.cat([x[..., 0], x[..., -1, 1:]], -1).unfold(-1, D, 1)
    return x


# Buffers with margins around each tensor, which reveal writes outside a kernel's outputs.

MARGIN = 1 << 14  # minimal bytes on either side; a larger tensor has margins of its own size
FILL = 0xFF  # NaN in every float dtype, -1 in integers: reading a margin changes results too


class Arena:
    """Places tensors inside larger buffers; `check` finds writes outside the tensors.

    Examples:
        >>> arena = Arena()
        >>> q, k, v = (arena.placed(x) for x in (q, k, v))
        >>> with arena.outputs("triton"):
        ...     out = fa_ops.attention(q, k, v, backend="triton")
        >>> arena.check()
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int, int, Tensor | None]] = []

    def placed(self, x: Tensor, read_only: bool = True) -> Tensor:
        """Copy x, with its strides, into a buffer with margins.

        Args:
            read_only: whether `check` also verifies that the copy, and the memory between its
                elements, has not changed.
        """
        y = self._allocated(x)
        span = _span(x)
        with torch.no_grad():
            flat = torch.as_strided(x.detach(), (span,), (1,))
            torch.as_strided(y, (span,), (1,), y.storage_offset()).copy_(flat)
        if read_only:
            buffer, first, last, _ = self._buffers[-1]
            self._buffers[-1] = buffer, first, last, buffer[first:last].clone()
        return y.requires_grad_(x.requires_grad)

    @contextlib.contextmanager
    def outputs(self, backend: str) -> Iterator[None]:
        """In a `with` block, uninitialised memory that the backend allocates has margins.

        Floating point memory is NaN until it is written.
        """
        with replaced(self._allocated, backend):
            yield

    def check(self) -> None:
        """Raise AssertionError if a margin or a read-only tensor has changed; drop all buffers."""
        buffers, self._buffers = self._buffers, []
        changed = []
        for buffer, first, last, content in buffers:
            parts = [(buffer[:first] != FILL).sum(), (buffer[last:] != FILL).sum()]
            parts.append((buffer[first:last] != content).sum() if content is not None else parts[0])
            changed.append(torch.stack(parts))
        if not changed:
            return
        counts = torch.stack(changed).tolist()  # one copy from the device
        for (buffer, first, last, content), (before, after, inside) in zip(buffers, counts):
            size = f"a tensor of {last - first} bytes on {buffer.device}"
            assert not before, f"{before} bytes before {size} were overwritten"
            assert not after, f"{after} bytes after {size} were overwritten"
            assert content is None or not inside, f"{inside} bytes of {size} were overwritten"

    def _allocated(self, x: Tensor) -> Tensor:
        """A tensor with x's shape and strides, filled with `FILL`, in a buffer with margins."""
        bytes_of_x = _span(x) * x.element_size()
        margin = -(-max(MARGIN, bytes_of_x) // MARGIN) * MARGIN
        with torch.no_grad():
            buffer = torch.zeros(bytes_of_x + 2 * margin, dtype=torch.uint8, device=x.device)
            buffer.fill_(FILL)
            y = torch.tensor([], dtype=x.dtype, device=x.device)  # results must not be views
            y.set_(buffer.untyped_storage(), margin // x.element_size(), x.shape, x.stride())
        self._buffers.append((buffer, margin, margin + bytes_of_x, None))
        return y


def _span(x: Tensor) -> int:
    """The number of elements of memory from x's first element to its last, both included."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))


# Replace every function by which a backend allocates uninitialised memory, or fill it with NaN.

_TORCH = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


@functools.cache
def _hopper_allocators() -> list[tuple[object, str]]:
    """`empty` in every Hopper module that defines it, those of repeated calls included."""
    from fa_ops.backends import hopper

    found = pkgutil.walk_packages(hopper.__path__, f"{hopper.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    return [(module, "empty") for module in modules if hasattr(module, "empty")]


@contextlib.contextmanager
def replaced(
    wrap: Callable[[Tensor], Tensor],
    backend: str,
    wrap_hopper: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[None]:
    """In a `with` block, allocating uninitialised memory returns `wrap(x)` instead of x.

    Tensors on the meta device stay as they are.

    Args:
        backend: the backend whose allocation functions are replaced in addition to torch's.
        wrap_hopper: applied instead of `wrap` to what the Hopper backend's functions return.
    """
    with contextlib.ExitStack() as patches:

        def patch(owner: object, name: str, function: Callable | None) -> None:
            patches.enter_context(mock.patch.object(owner, name, function))

        for owner, name in _TORCH:
            patch(owner, name, _wrapped(getattr(owner, name), wrap))
        if backend == "hopper":
            for owner, name in _hopper_allocators():
                patch(owner, name, _wrapped(getattr(owner, name), wrap_hopper or wrap))
        if backend == "triton":
            from fa_ops.backends.triton import launch

            patch(launch, "_empty_strided_cuda", None)  # it then uses torch.empty_strided
        yield


@contextlib.contextmanager
def poisoned_memory(backend: str = "hopper") -> Iterator[None]:
    """In a `with` block, uninitialised tensors of torch and of the named backend hold NaN.

    A kernel that skips part of its output then fails. The Hopper backend's workspaces, which are
    1-D, are left as they are.
    """
    _device_constructors()  # torch caches this set, which must hold the unpatched functions
    with replaced(_with_nan, backend, lambda x: _with_nan(x) if x.dim() > 1 else x):
        yield


def _with_nan(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        with torch.no_grad():
            x.fill_(float("nan"))
    return x


def _wrapped(allocate: Callable, wrap: Callable[[Tensor], Tensor]) -> Callable:
    @functools.wraps(allocate)
    def function(*args, **options):
        x = allocate(*args, **options)
        return x if x.device.type == "meta" else wrap(x)

    return function
