"""`python -m fa_ops bench features`: the cost of each feature relative to plain causal attention.

Optionally with the cost in FlexAttention.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.bench import command
from fa_ops.bench.peers import compiled_flex
from fa_ops.bench.timing import Run, Time, device_times

WINDOW, GLOBAL, DOCUMENT, SOFTCAP, DROPOUT = 1024, 128, 1024, 30.0, 0.1


@dataclasses.dataclass(frozen=True)
class Feature:
    """Options of a call with (1, heads, S, D) tensors, and the equivalent for FlexAttention.

    `lengths` are those of documents that are packed for `attention_varlen`. `keep` and `score` are
    FlexAttention's mask_mod and score_mod; without `keep` it does not support the feature.
    """

    options: dict
    keep: Callable | None = None
    score: Callable | None = None
    lengths: tuple[int, ...] = ()


Makers = dict[str, Callable[[], Feature]]  # functions that create features, by name


def mixed_lengths(S: int) -> tuple[int, ...]:
    """Lengths of documents, S tokens in total: from 256 tokens on, 16 that differ up to 15-fold."""
    unit, lengths = max(S // 256, 1), []
    for i in range(15):
        lengths.append(min(unit * (2 + 7 * i % 29), S - sum(lengths)))
    return tuple(n for n in (*lengths, S - sum(lengths)) if n)


def dense_mask(
    i: Tensor, keep: Callable, dtype: torch.dtype = torch.bool, with_blocks: bool = False
) -> Feature:
    """What `keep` keeps of queries and keys i as a dense mask, alone or with its `mask_blocks`."""
    mask = keep(None, None, i[:, None], i[None])
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=i.device).masked_fill_(~mask, -torch.inf)
    blocks = {"mask_blocks": fa_ops.mask_blocks(mask)} if with_blocks else {}
    return Feature({"attn_mask": mask} | blocks, keep)


def past(b, h, q, k):
    """Which keys queries attend under causality."""
    return q >= k


def float_mask(S: int, device: str) -> Feature:
    """Causality and a bias for each query and key."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # that of the queries
    bias = torch.randn(S, S, device=device, dtype=dtype)
    score = lambda s, b, h, q, k: s + bias[q, k]  # noqa: E731
    return Feature({"is_causal": True, "attn_mask": bias}, past, score)


def window_and_global(b, h, q, k):
    """Which keys queries attend in a causal window beside global tokens."""
    return (q >= k) & (q - k < WINDOW) | (q < GLOBAL) | (k < GLOBAL)


def features(H: int, S: int, device: str) -> Makers:
    """All features; each is created only when it is measured, as some hold an (S, S) mask."""
    i = torch.arange(S, device=device, dtype=torch.int32)
    zeros, causal = torch.zeros_like(i), {"is_causal": True}
    slopes = torch.logspace(-1, -8, H, base=2.0, device=device)
    sinks = torch.linspace(-1, 1, H, device=device)
    left = torch.where(i >= S // 8, S // 8, i)  # padding rows attend themselves
    lengths = mixed_lengths(S)
    document = torch.arange(len(lengths), device=device).repeat_interleave(
        torch.tensor(lengths, device=device)
    )

    return {
        "causal": lambda: Feature(causal, past),
        f"causal, softcap {SOFTCAP:g}": lambda: Feature(
            causal | {"softcap": SOFTCAP}, past,
            lambda s, b, h, q, k: SOFTCAP * torch.tanh(s / SOFTCAP),
        ),
        "causal, ALiBi": lambda: Feature(
            causal | {"alibi_slopes": slopes}, past,
            lambda s, b, h, q, k: s - slopes[h] * (q - k),
        ),
        "causal, sinks": lambda: Feature(causal | {"sinks": sinks}),
        "causal, deterministic": lambda: Feature(causal | {"deterministic": True}, past),
        f"causal, window {WINDOW}": lambda: Feature(
            causal | {"window": (WINDOW - 1, 0)},
            lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        ),
        "causal as key_ranges": lambda: Feature(
            {"key_ranges": torch.stack([zeros, i + 1], -1)[None, None]}, past
        ),
        f"documents of {DOCUMENT} as key_ranges": lambda: Feature(
            {"key_ranges": torch.stack([i // DOCUMENT * DOCUMENT, i + 1], -1)[None, None]},
            lambda b, h, q, k: (q >= k) & (q // DOCUMENT == k // DOCUMENT),
        ),
        "left padding as key_ranges": lambda: Feature(
            {"key_ranges": torch.stack([left, i + 1], -1)[None, None]},
            lambda b, h, q, k: (q >= k) & (k >= left[q]),
        ),
        "causal as a bool mask": lambda: dense_mask(i, past),
        "causal as a bool mask, mask_blocks": lambda: dense_mask(i, past, with_blocks=True),
        "causal as a float mask": lambda: dense_mask(i, past, torch.float32),
        "causal as a float mask, mask_blocks": lambda: dense_mask(i, past, torch.float32, True),
        f"window {WINDOW}, {GLOBAL} global, as a bool mask": lambda: dense_mask(
            i, window_and_global
        ),
        f"window {WINDOW}, {GLOBAL} global, mask_blocks": lambda: dense_mask(
            i, window_and_global, with_blocks=True
        ),
        "causal and a float mask": lambda: float_mask(S, device),
        f"causal, dropout {DROPOUT:g}": lambda: Feature(causal | {"dropout_p": DROPOUT}),
        f"{len(lengths)} packed documents": lambda: Feature(
            causal, lambda b, h, q, k: (q >= k) & (document[q] == document[k]), lengths=lengths
        ),
    }  # fmt: skip


Measured = dict[str, dict[str, Time]]  # by feature, then by "forward", "backward", "flex ..."


def choose(known: Makers, only: str | None = None) -> Makers:
    """Plain causal attention, and the features whose name contains one of the words in `only`.

    Raises:
        typer.BadParameter: no name contains one of the words.
    """
    names = (next(iter(known)), *command.matching(only, known, "feature"))
    return {name: make for name, make in known.items() if name in names}


def times(
    chosen: Makers,
    heads: tuple[int, int],
    S: int,
    D: int,
    device: str,
    budget: float,
    flex: bool = False,
) -> Measured:
    """Measure forward and backward passes of each feature; the first one is the baseline.

    `heads` are the numbers of query heads and of key heads.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    Hq, Hkv = heads
    q, k, v, grad_out = (
        torch.randn(1, S, H, D, device=device, dtype=dtype).transpose(1, 2)
        for H in (Hq, Hkv, Hkv, Hq)
    )
    measured: Measured = {}
    names = ["fa_ops", "flex"] if flex else ["fa_ops"]
    for name in command.watched(list(chosen), "features", device, names):
        feature = chosen[name]()
        calls = {"": _ours(feature, device)}
        if flex and feature.keep is not None:
            calls["flex "] = _flex(feature, S, device)
        forward = {f"{n}forward": Run(lambda _, c=c: c(q, k, v)) for n, c in calls.items()}
        with torch.no_grad():
            measured[name] = device_times(forward, device, budget)
        backward = {f"{n}backward": _backward(c, q, k, v, grad_out) for n, c in calls.items()}
        measured[name] |= device_times(backward, device, budget)
    return measured


def _ours(feature: Feature, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    options = feature.options
    if not feature.lengths:
        return lambda q, k, v: fa_ops.attention(q, k, v, **options)
    ends = torch.tensor((0, *feature.lengths), device=device, dtype=torch.int32).cumsum(0).int()
    longest = max(feature.lengths)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = (x[0].transpose(0, 1) for x in (q, k, v))
        out = fa_ops.attention_varlen(*tokens, ends, ends, longest, longest, **options)
        return out.transpose(0, 1)[None]

    return packed


def _flex(feature: Feature, S: int, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = compiled_flex()
    mask = create_block_mask(feature.keep, None, None, S, S, device=device)
    return lambda q, k, v: compiled(
        q, k, v, block_mask=mask, score_mod=feature.score, enable_gqa=q.shape[1] != k.shape[1]
    )


def _backward(call: Callable, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> Run:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    return Run(lambda out: torch.autograd.grad(out, leaves, grad_out), lambda: call(*leaves))


def table(title: str, measured: Measured) -> Table:
    """A row for each feature: milliseconds, and the ratio to the first row."""
    columns = list(next(iter(measured.values())))
    result = Table(title=title, caption="median ms; in brackets: relative to the first row")
    result.add_column("feature")
    for column in columns:
        result.add_column(column, justify="right")
    base = next(iter(measured.values()))
    for name, row in measured.items():
        cells = (
            f"{row[c].ms:.3f} ({row[c].ms / base[c].ms:.2f}x)" if c in row else "-" for c in columns
        )
        result.add_row(name, *cells)
    for ours in ("forward", "backward"):
        flex = f"flex {ours}"
        ratios = [row[flex].ms / row[ours].ms for row in measured.values() if flex in row]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            result.caption += f"\nFlexAttention takes {mean:.2f}x our {ours}, geometric mean"
    return result


def records(measured: Measured) -> list[dict]:
    """The results for the JSON file."""
    return [
        {"feature": name, "ms": {column: time.ms for column, time in row.items()}}
        for name, row in measured.items()
    ]


def main(
    device: command.Device = "auto",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="sequence length; default: 16384 on a GPU, 512 on the CPU"),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="query heads")] = 16,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="key heads; default: as many as query heads")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=8, help="features of a head")] = 128,
    only: command.Only = None,
    flex: Annotated[bool, typer.Option(help="measure compiled FlexAttention too")] = False,
    budget: Annotated[
        float, typer.Option(min=0.1, help="milliseconds to time each cell for")
    ] = 200.0,
    json: command.Json = None,
) -> None:
    """Compare the cost of features, such as masks, with plain causal attention."""
    device = command.device(device)
    tokens = tokens or (16384 if device == "cuda" else 512)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise typer.BadParameter(f"{heads} query heads are no multiple of {kv_heads} key heads")
    chosen = choose(features(heads, tokens, device), only)
    pair = heads, kv_heads
    measured = times(chosen, pair, tokens, head_dim, device, budget, flex)
    name = command.environment(device)["device"]
    shown = heads if heads == kv_heads else f"{heads}/{kv_heads}"
    title = f"{shown} heads of {head_dim}, {tokens} tokens, {name}"
    Console().print(table(title, measured))
    if json is not None:
        command.write_json(json, device, "features", records(measured))
