"""`python -m fa_ops bench flex`: functions of scores and masks, beside torch's FlexAttention.

Each function is measured by `flex_attention` here, by the options of `attention` that compute the
same where there are some, and by torch's function: compiled on a GPU, also with its FLASH backend,
and eager on a CPU. With `--masks` instead: what lists the tiles of a mask, for lengths up to a
million.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import fa_ops
from fa_ops.bench import command, comparison
from fa_ops.bench.comparison import Build, Quantity, backward_run, forward_run
from fa_ops.bench.peers import compiled_flex
from fa_ops.bench.timing import Run

DOCUMENT, SOFTCAP, WINDOW = 1024, 30.0, 4096
PLAIN = "causal"
OURS, OPTIONS = "fa_ops", "fa_ops options"
COMPILED, FLASH, EAGER = "torch compiled", "torch FLASH", "torch eager"
_PEERS = {"cuda": (COMPILED, FLASH), "cpu": (EAGER,)}
DENSE_PAIRS = 2**31  # what stores an element for each pair of tokens is measured up to so many


def past(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A causal mask."""
    return i >= j


@dataclasses.dataclass(frozen=True)
class ScoreFunctions:
    """The functions of a call, the tensors that they capture with a gradient, and equal options.

    `aux` asks for the largest scores too.
    """

    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] = past
    captured: tuple[Tensor, ...] = ()
    options: dict | None = None
    aux: bool = False


def _biased(bias: Tensor, at: Callable[..., tuple], trained: bool = False) -> ScoreFunctions:
    """A bias of scores, `bias[at(b, h, i, j)]`."""
    captured = (bias.requires_grad_(),) if trained else ()
    return ScoreFunctions(lambda s, b, h, i, j: s + bias[at(b, h, i, j)], captured=captured)


def functions(H: int, S: int, device: str) -> dict[str, Callable[[], ScoreFunctions]]:
    """All functions, each made when it is measured; causal unless their name says otherwise."""
    draw = functools.partial(torch.randn, device=device)
    distance = lambda b, h, i, j: (h, i - j + S - 1)  # noqa: E731

    def t5() -> ScoreFunctions:
        buckets = draw(32, H)

        def score(s, b, h, i, j):
            apart = (i - j).clamp(min=0)
            far = 16 + (torch.log(apart.clamp(min=1).float() / 16) / math.log(8.0) * 16).int()
            return s + buckets[torch.where(apart < 16, apart, far.clamp(max=31)), h]

        return ScoreFunctions(score)

    def alibi() -> ScoreFunctions:
        slopes = torch.logspace(-1, -8, H, base=2.0, device=device)
        given = {"is_causal": True, "alibi_slopes": slopes}
        return ScoreFunctions(lambda s, b, h, i, j: s - slopes[h] * (i - j), options=given)

    def forgetting() -> ScoreFunctions:
        gates = draw(1, H, S).sigmoid().log().cumsum(-1).requires_grad_()
        score = lambda s, b, h, i, j: s + gates[b, h, i] - gates[b, h, j]  # noqa: E731
        return ScoreFunctions(score, captured=(gates,))

    def scaled() -> ScoreFunctions:
        factor, offset = (draw(H).requires_grad_() for _ in range(2))
        score = lambda s, b, h, i, j: s * factor[h] + offset[h]  # noqa: E731
        return ScoreFunctions(score, captured=(factor, offset))

    def documents() -> ScoreFunctions:
        i = torch.arange(S, device=device, dtype=torch.int32)
        number = i // DOCUMENT
        ranges = torch.stack([i // DOCUMENT * DOCUMENT, i + 1], -1)[None, None]
        keep = lambda b, h, i, j: (i >= j) & (number[i] == number[j])  # noqa: E731
        return ScoreFunctions(mask_mod=keep, options={"key_ranges": ranges})

    return {
        PLAIN: lambda: ScoreFunctions(options={"is_causal": True}),
        "relative positions": lambda: _biased(draw(H, 2 * S - 1), distance),
        "relative positions, trained": lambda: _biased(draw(H, 2 * S - 1), distance, True),
        "T5 buckets": t5,
        "ALiBi": alibi,
        "forgetting gates, trained": forgetting,
        "bias of keys, trained": lambda: _biased(draw(1, S), lambda b, h, i, j: (b, j), True),
        "scale and offset of heads, trained": scaled,
        f"softcap {SOFTCAP:g}": lambda: ScoreFunctions(
            lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP),
            options={"is_causal": True, "softcap": SOFTCAP},
        ),
        f"documents of {DOCUMENT}": documents,
        "largest scores": lambda: ScoreFunctions(aux=True),
    }


def quantities(
    H: int, S: int, dims: list[int], device: str, only: str | None = None
) -> list[Quantity]:
    """Forward and backward passes of plain causal attention, and of the chosen functions.

    Raises:
        typer.BadParameter: no name contains one of the words of `only`.
    """
    known = functions(H, S, device)
    chosen = dict.fromkeys((PLAIN, *command.matching(only, known, "function")))
    return [
        Quantity(
            f"D{D} {name}", what, functools.partial(_builds, known[name], (H, S, D), device, what),
            (f"D{D} {PLAIN}", what),
        )
        for D in dims
        for name in chosen
        for what in ("forward", "backward")
    ]  # fmt: skip


def _builds(
    make: Callable[[], ScoreFunctions], sizes: tuple[int, int, int], device: str, what: str
) -> dict[str, Build]:
    """What runs a pass by each implementation."""
    H, S, D = sizes
    given = make()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, grad_out = (
        torch.randn(1, S, H, D, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    leaves = q, k, v, *given.captured
    for t in leaves:  # torch's function refuses them on a CPU where they require a gradient
        t.requires_grad_(what == "backward")

    def run(call: Callable[[], Tensor]) -> Run:
        return forward_run(call) if what == "forward" else backward_run(call, leaves, grad_out)

    builds: dict[str, Build] = {
        OURS: lambda: run(
            lambda: _out(
                fa_ops.flex_attention(
                    q, k, v, given.score_mod, mask_mod=given.mask_mod, return_aux=_request(given)
                )
            )
        )
    }
    if given.options is not None:
        builds[OPTIONS] = lambda: run(lambda: fa_ops.attention(q, k, v, **given.options))
    for name in _PEERS[device]:
        builds[name] = lambda name=name: run(_peer(name, given, (q, k, v), device))
    return builds


def _peer(
    name: str, given: ScoreFunctions, tensors: tuple[Tensor, ...], device: str
) -> Callable[[], Tensor]:
    """A call of torch's function, whose BlockMask is made before."""
    S = tensors[0].shape[2]
    mask = torch_flex.create_block_mask(given.mask_mod, None, None, S, S, device=device)
    function = torch_flex.flex_attention if name == EAGER else compiled_flex()
    kernel = {"BACKEND": "FLASH"} if name == FLASH else None
    return lambda: _out(
        function(
            *tensors, score_mod=given.score_mod, block_mask=mask, kernel_options=kernel,
            return_aux=_request(given),
        )
    )  # fmt: skip


def _request(given: ScoreFunctions) -> torch_flex.AuxRequest | None:
    return torch_flex.AuxRequest(max_scores=True) if given.aux else None


def _out(results: Tensor | tuple) -> Tensor:
    return results[0] if isinstance(results, tuple) else results


def masks(S: int, device: str) -> dict[str, Callable[..., Tensor]]:
    """Masks of S tokens whose tiles are listed."""
    each = torch.arange(S, device=device, dtype=torch.int32)
    number = each * 1000 // S
    parent = (each - 1 - each % 5).clamp(min=0)
    width = max(math.isqrt(S), 1)

    def neighbours(b, h, i, j):
        return ((i % width - j % width).abs() <= 8) & ((i // width - j // width).abs() <= 8)

    return {
        "causal": past,
        f"window {WINDOW}": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
        "1000 documents": lambda b, h, i, j: (i >= j) & (number[i] == number[j]),
        "prefix": lambda b, h, i, j: (i >= j) | (j < S // 8),
        "neighbours on a square": neighbours,
        "window with sinks": lambda b, h, i, j: (i >= j) & ((i - j < WINDOW) | (j < 64)),
        "dilated": lambda b, h, i, j: (i >= j) & (i - j < WINDOW) & ((i - j) % 4 == 0),
        "tree": lambda b, h, i, j: (j == i) | (j == parent[i]) | (j == parent[parent[i]]),
    }


def mask_quantities(lengths: list[int], device: str, only: str | None = None) -> list[Quantity]:
    """The lists of tiles of each mask and length; `create_block_mask` where all pairs fit."""

    def builds(S: int, name: str) -> dict[str, Build]:
        mask = masks(S, device)[name]

        def theirs() -> Run:
            if S * S > DENSE_PAIRS:
                raise NotImplementedError("makes an element for each pair of tokens")
            make = functools.partial(torch_flex.create_block_mask, mask, None, None, S, S)
            return Run(lambda _: make(device=device).kv_num_blocks)

        make_ours = functools.partial(fa_ops.mask_tiles, mask, None, None, S, S, device)
        ours = lambda: Run(lambda _: make_ours())  # noqa: E731
        return {"mask_tiles": ours, "create_block_mask": theirs}

    chosen = command.matching(only, masks(1, "cpu"), "mask")
    return [
        Quantity(
            f"{S} tokens, {name}", "tiles", functools.partial(builds, S, name),
            others=("create_block_mask",), on_host=True,
        )
        for S in lengths
        for name in chosen
    ]  # fmt: skip


def main(
    device: command.Device = "auto",
    tokens: Annotated[
        str | None,
        typer.Option(help="sequence length, with --masks several; default: 16384 on a GPU, 512 on "
                     "a CPU; of masks 16384,131072,1048576 and 4096,65536"),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="default: 16, on a CPU 2")] = None,
    head_dims: Annotated[
        str | None, typer.Option(help="features of a head; default: 64,128,256, on a CPU 64")
    ] = None,
    only: command.Only = None,
    list_tiles: Annotated[
        bool, typer.Option("--masks", help="measure what lists the tiles of masks instead")
    ] = False,
    budget: Annotated[float, typer.Option(min=0.1, help="milliseconds to time each call")] = 200.0,
    json: command.Json = None,
) -> None:  # fmt: skip
    """Compare functions of scores and masks with options, and with torch's FlexAttention."""
    device = command.device(device)
    on_gpu = device == "cuda"
    if list_tiles:
        default = "16384,131072,1048576" if on_gpu else "4096,65536"
        lengths = command.integers("--tokens", tokens or default)
        names = ["mask_tiles", "create_block_mask"]
        measured = mask_quantities(lengths, device, only)
    else:
        lengths = command.integers("--tokens", tokens or ("16384" if on_gpu else "512"))
        if len(lengths) != 1:
            raise typer.BadParameter(f"--tokens must be one length without --masks, got {tokens}")
        dims = command.integers("--head-dims", head_dims or ("64,128,256" if on_gpu else "64"))
        names = [OURS, OPTIONS, *_PEERS[device]]
        measured = quantities(heads or (16 if on_gpu else 2), lengths[0], dims, device, only)
    comparison.compare("flex", measured, names, device, budget, json)
