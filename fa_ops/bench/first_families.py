"""Families of shapes whose first calls are measured; calls of a family differ in length only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

import fa_ops

DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class KernelFamily:
    """Calls that differ in length only: `length` tokens or keys first, then each of `others`.

    With the last length there are fewer tiles than multiprocessors.
    """

    name: str
    kind: str  # a key of CALLS
    D: int
    page: int = 0  # keys of a cache's page; 0: contiguous
    append: bool = False  # one new key of each row is written
    length: int = 4096
    others: tuple[int, ...] = (6001, 2050, 200)

    def call(self, length: int, device: str, backend: str) -> Callable[[], object]:
        """Create the inputs for one length; return the call."""
        draw = functools.partial(torch.randn, device=device, dtype=DTYPE)
        return CALLS[self.kind](self, length, draw, backend)


Draw = Callable[..., Tensor]


def _dense(f: KernelFamily, S: int, draw: Draw, backend: str, grad: bool = False):
    q, k, v = (draw(1, 16, S, f.D, requires_grad=grad) for _ in range(3))
    return lambda: fa_ops.attention(q, k, v, is_causal=True, backend=backend)


def _backward(f: KernelFamily, S: int, draw: Draw, backend: str):
    """The backward pass alone: the forward pass is one of the inputs."""
    out = _dense(f, S, draw, backend, grad=True)()
    grad = torch.randn_like(out)
    return lambda: out.backward(grad)


def _varlen(f: KernelFamily, S: int, draw: Draw, backend: str):
    q, k, v = (draw(S, 16, f.D) for _ in range(3))
    ends = torch.tensor([0, S // 8, S // 2, S], dtype=torch.int32, device=q.device)
    return lambda: fa_ops.attention_varlen(q, k, v, ends, ends, is_causal=True, backend=backend)


def _quantized(f: KernelFamily, S: int, draw: Draw, backend: str):
    q, k, v = (draw(1, 16, S, f.D) for _ in range(3))
    return lambda: fa_ops.quantized_attention(q, k, v, is_causal=True, backend=backend)


def _quantized_varlen(f: KernelFamily, S: int, draw: Draw, backend: str):
    q, k, v = (draw(S, 16, f.D).to(torch.float8_e4m3fn) for _ in range(3))
    ends = torch.tensor([0, S // 8, S // 2, S], dtype=torch.int32, device=q.device)
    scales = dict.fromkeys(("q_scale", "k_scale", "v_scale"), torch.ones(1, device=q.device))
    return lambda: fa_ops.attention_varlen(
        q, k, v, ends, ends, is_causal=True, backend=backend, **scales
    )


def _decode(f: KernelFamily, S: int, draw: Draw, backend: str, B: int = 8):
    q = draw(B, 32, 1, f.D)
    table, shape = _pages(f, S, B, q.device)
    k, v = (draw(*shape(8), f.D) for _ in range(2))
    new = {"key": draw(B, 8, 1, f.D), "value": draw(B, 8, 1, f.D)} if f.append else {}
    return _cached(q, k, v, S, table, backend, new)


def _mla(f: KernelFamily, S: int, draw: Draw, backend: str, B: int = 8):
    q = draw(B, 64, 1, f.D)
    table, shape = _pages(f, S, B, q.device)
    k = draw(*shape(1), f.D)
    key = draw(B, 1, 1, f.D)
    new = {"key": key, "value": key[..., :512]} if f.append else {}
    return _cached(q, k, k[..., :512], S, table, backend, new)


def _pages(f: KernelFamily, S: int, B: int, device: torch.device):
    """A page table or None, and a function from heads to a cache's shape without features."""
    if not f.page:
        return None, lambda heads: (B, heads, S)
    each = -(-S // f.page)
    table = torch.arange(B * each, dtype=torch.int32, device=device).view(B, each)
    return table, lambda heads: (B * each, f.page, heads)


def _cached(
    q: Tensor, k: Tensor, v: Tensor, S: int, table: Tensor | None, backend: str,
    new: dict[str, Tensor],
):  # fmt: skip
    lens = torch.full((len(q),), S - bool(new), dtype=torch.int32, device=q.device)
    return lambda: fa_ops.attention_with_kv_cache(q, k, v, lens, table, backend=backend, **new)


CALLS = {
    "forward": _dense, "backward": _backward, "varlen": _varlen, "decode": _decode, "mla": _mla,
    "quantized": _quantized, "quantized varlen": _quantized_varlen,
}  # fmt: skip
FAMILIES = (
    *(KernelFamily(f"forward causal D{D}", "forward", D) for D in (64, 128, 256)),
    *(KernelFamily(f"backward causal D{D}", "backward", D) for D in (64, 128, 256)),
    KernelFamily("varlen causal D128", "varlen", 128),
    KernelFamily("8-bit forward causal D128", "quantized", 128),
    KernelFamily("8-bit varlen causal D128", "quantized varlen", 128),
    KernelFamily("decode D128", "decode", 128),
    KernelFamily("decode D128, pages of 64", "decode", 128, page=64),
    KernelFamily("MLA", "mla", 576),
    KernelFamily("MLA, pages of 64", "mla", 576, page=64),
    KernelFamily("decode D128, append", "decode", 128, append=True),
    KernelFamily("decode D128, pages of 64, append", "decode", 128, page=64, append=True),
    KernelFamily("MLA, pages of 64, append", "mla", 576, page=64, append=True),
)
