"""`python -m fa_ops bench selected`: attention over listed keys, beside attention of all keys.

Lists of tokens are those of DSA: a latent cache, whose tokens are drawn for each query. Lists of
blocks are those of MoBA, where a block of queries shares a list, and of NSA, where neighbouring
queries share some blocks. Peers are a dense mask of the same keys, and dense causal attention,
which computes something else.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import fa_ops
from fa_ops.bench import command, comparison
from fa_ops.bench.comparison import Build, Quantity, backward_run, forward_run

OURS, MASK, SDPA_MASK = "fa_ops", "fa_ops mask", "sdpa mask"
DENSE, SDPA_DENSE, GATHERED = "fa_ops causal", "sdpa causal", "fa_ops gathered"
_NAMES = (OURS, MASK, SDPA_MASK, DENSE, SDPA_DENSE, GATHERED)
SHARED = 0.74  # of a list's blocks that the next query has too


@dataclasses.dataclass(frozen=True)
class TokenListProblem:
    """T queries of H heads, each over `count` of N tokens of a latent cache."""

    T: int
    H: int
    N: int
    count: int
    D: int = 576
    Dv: int = 512

    def __str__(self) -> str:
        return f"DSA {self.T} queries, {self.count} of {self.N} tokens, {self.H} heads"

    @property
    def flops(self) -> float:
        """Of both products over what is listed."""
        return 2.0 * self.T * self.H * self.count * (self.D + self.Dv)

    def draw(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (T, H, D), the cache (N, D) and lists of distinct tokens (T, count)."""
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        q = torch.randn(self.T, self.H, self.D, device=device, dtype=dtype)
        latent = torch.randn(self.N, self.D, device=device, dtype=dtype)
        lists = [
            torch.rand(min(1024, self.T - at), self.N, device=device).topk(self.count).indices.int()
            for at in range(0, self.T, 1024)
        ]
        return q, latent, torch.cat(lists)

    def builds(self, device: str) -> dict[str, Build]:
        """What computes it; over gathered keys where their copies are small, as when decoding."""
        q, latent, lists = self.draw(device)
        key, value = latent[:, None], latent[:, None, : self.Dv]

        def listed() -> Tensor:
            return fa_ops.attention_selected_tokens(q, key, value, lists)

        rows = q.transpose(0, 1)[None]  # (1, H, T, D)
        keys = latent[None, None]

        def mask() -> Tensor:
            kept = torch.zeros(self.T, self.N, dtype=torch.bool, device=device)
            return kept.scatter_(1, lists.long(), True)

        def masked() -> comparison.Run:
            kept = mask()
            values = keys[..., : self.Dv]
            return forward_run(lambda: _tokens(fa_ops.attention(rows, keys, values, kept)))

        def sdpa() -> comparison.Run:
            if self.T * self.N * self.H > 2**32:
                raise NotImplementedError("stores all scores")
            kept, expanded = mask(), keys.expand(-1, self.H, -1, -1)
            call = functools.partial(F.scaled_dot_product_attention, attn_mask=kept)
            return forward_run(lambda: _tokens(call(rows, expanded, expanded[..., : self.Dv])))

        def gathered() -> comparison.Run:
            if self.T * self.count > 2**19:
                raise NotImplementedError("copies the keys of each query")
            cache = latent[lists.long()][:, None]  # (T, 1, count, D)
            lens = torch.full((self.T,), self.count, dtype=torch.int32, device=device)
            call = functools.partial(
                fa_ops.attention_with_kv_cache, q[:, :, None], cache, cache[..., : self.Dv], lens
            )
            return forward_run(lambda: call()[:, :, 0])

        return {
            OURS: lambda: forward_run(listed), MASK: masked, SDPA_MASK: sdpa, GATHERED: gathered
        }  # fmt: skip


def _tokens(out: Tensor) -> Tensor:
    return out[0].transpose(0, 1)


@dataclasses.dataclass(frozen=True)
class BlockListProblem:
    """S tokens of Hq and Hkv heads: `count` blocks of `block` keys for each `shared` queries."""

    name: str
    S: int
    Hq: int
    Hkv: int
    D: int
    block: int
    shared: int
    count: int

    def __str__(self) -> str:
        blocks = f"{self.count} blocks of {self.block} for {self.shared}"
        return f"{self.name} {self.S} tokens, {blocks}, {self.Hq}/{self.Hkv} heads of {self.D}"

    def lists(self, device: str) -> Tensor:
        """Lists (1, Hkv, rows, count): the first block, a row's own, and others before it.

        The others are kept from row to row with probability `SHARED`.
        """
        generator = torch.Generator(device).manual_seed(0)
        rows = -(-self.S // self.shared)
        row = torch.arange(rows, device=device)[:, None]
        shape = self.Hkv, rows, self.count
        draw = functools.partial(torch.rand, shape, generator=generator, device=device)
        start = torch.where(draw() < SHARED, 0, row).cummax(1).values  # of the current choice
        share = draw().gather(1, start)
        own = row * self.shared // self.block
        lists = (share * (start * self.shared // self.block + 1)).long()
        lists[..., 0] = 0
        lists[..., -1:] = own
        return lists[None].int()

    def mask(self, lists: Tensor) -> Tensor:
        """The same keys as a mask (1, Hq, S, S)."""
        _, Hkv, rows, _ = lists.shape
        blocks = -(-self.S // self.block)
        kept = torch.zeros(1, Hkv, rows, blocks, dtype=torch.bool, device=lists.device)
        kept.scatter_(3, lists.long(), True)
        kept = kept.repeat_interleave(self.block, 3)[..., : self.S]
        kept = kept.repeat_interleave(self.shared, 2)[:, :, : self.S].tril()
        return kept.repeat_interleave(self.Hq // Hkv, 1)

    def flops(self, lists: Tensor) -> float:
        """Of both products over what is listed and not masked, of a forward pass."""
        i = torch.arange(self.S, device=lists.device)
        each = lists.long().sort(3).values
        is_new = torch.ones_like(each, dtype=torch.bool)
        is_new[..., 1:] = each[..., 1:] != each[..., :-1]
        pairs = 0
        for at in range(0, self.S, 4096):  # the keys of a row before each query
            rows = i[at : at + 4096]
            of = rows // self.shared
            keys = (rows[:, None] + 1 - each[0, :, of] * self.block).clamp(0, self.block)
            pairs += int((keys * is_new[0, :, of]).sum())
        return 4.0 * pairs * (self.Hq // self.Hkv) * self.D

    def builds(self, what: str, device: str) -> dict[str, Build]:
        """What computes a pass by each implementation."""
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        q, k, v, grad_out = (
            torch.randn(1, self.S, H, self.D, device=device, dtype=dtype).transpose(1, 2)
            for H in (self.Hq, self.Hkv, self.Hkv, self.Hq)
        )
        leaves = tuple(t.requires_grad_() for t in (q, k, v))
        lists = self.lists(device)

        def run(call) -> comparison.Run:
            if what == "forward":
                return forward_run(call)
            return backward_run(call, leaves, grad_out)

        listed = functools.partial(
            fa_ops.attention_selected, q, k, v, lists, block_size=self.block,
            query_block=self.shared,
        )  # fmt: skip
        sdpa = functools.partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)

        def masked() -> comparison.Run:
            mask = self.mask(lists)
            return run(lambda: fa_ops.attention(q, k, v, mask))

        def sdpa_masked() -> comparison.Run:
            return run(functools.partial(sdpa, attn_mask=self.mask(lists)))

        return {
            OURS: lambda: run(listed),
            MASK: masked,
            SDPA_MASK: sdpa_masked,
            DENSE: lambda: run(lambda: fa_ops.attention(q, k, v, is_causal=True)),
            SDPA_DENSE: lambda: run(functools.partial(sdpa, is_causal=True)),
        }


GRIDS: dict[str, list[TokenListProblem | BlockListProblem]] = {
    "cuda": [
        TokenListProblem(64, 128, 65536, 2048),  # decoding
        TokenListProblem(4096, 128, 131072, 2048),
        TokenListProblem(32768, 128, 32768, 2048),
        *(BlockListProblem("MoBA", S, 32, 8, 128, 512, 128, 4) for S in (8192, 16384, 32768)),
        *(
            BlockListProblem("NSA", S, 64, 4, 128, 64, 1, 16)
            for S in (4096, 6144, 8192, 16384, 32768)
        ),
    ],
    "cpu": [
        TokenListProblem(8, 4, 1024, 64),
        TokenListProblem(128, 4, 512, 64),
        BlockListProblem("MoBA", 512, 4, 2, 64, 64, 32, 3),
        BlockListProblem("NSA", 512, 4, 2, 64, 32, 1, 4),
    ],
}  # fmt: skip


def quantities(
    problems: list[TokenListProblem | BlockListProblem], device: str, only: str | None = None
) -> list[Quantity]:
    """Forward passes, and backward passes over blocks, of problems whose name has a word."""
    names = command.matching(only, list(map(str, problems)), "problem")
    found = []
    for problem in problems:
        if str(problem) not in names:
            continue
        if isinstance(problem, TokenListProblem):
            make = functools.partial(problem.builds, device)
            found.append(Quantity(str(problem), "forward", make, flops=problem.flops))
            continue
        flops = problem.flops(problem.lists(device))
        share = flops / (2.0 * problem.S * (problem.S + 1) * problem.Hq * problem.D)
        name = f"{problem}: {share:.0%} of causal"
        for what, factor in (("forward", 1.0), ("backward", 2.5)):
            make = functools.partial(problem.builds, what, device)
            others = DENSE, SDPA_DENSE
            found.append(Quantity(name, what, make, None, others, flops * factor))
    return found


def main(
    device: command.Device = "auto",
    only: command.Only = None,
    budget: Annotated[float, typer.Option(min=0.1, help="milliseconds to time each call")] = 200.0,
    json: command.Json = None,
) -> None:
    """Compare attention over listed keys with dense masks and with causal attention."""
    device = command.device(device)
    measured = quantities(GRIDS[device], device, only)
    comparison.compare("selected", measured, list(_NAMES), device, budget, json)
