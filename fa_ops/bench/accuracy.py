"""`python -m fa_ops bench accuracy`: errors of 16-bit and of 8-bit attention against float64.

Each error is measured over the output of a few queries that attend all keys: its root mean square
relative to the output's, the cosine of the angle between output and exact output, and the largest
relative error of a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.bench import command
from fa_ops.bench.peers import E4M3, failure, scaled_call, scaled_flash_attn_3

console = Console()


class Errors(NamedTuple):
    """How an output differs from the exact one."""

    rmse: float  # relative to the exact output's root mean square
    cosine: float
    worst_row: float  # the largest relative error of a row

    @staticmethod
    def of(out: Tensor, exact: Tensor) -> Errors:
        """Compare an output with the exact one, (..., Dv)."""
        difference = out.double() - exact
        rows = difference.norm(dim=-1) / exact.norm(dim=-1)
        cosine = torch.cosine_similarity(out.double().flatten(), exact.flatten(), 0)
        return Errors((difference.norm() / exact.norm()).item(), cosine.item(), rows.max().item())


class AccuracyRow(NamedTuple):
    """The errors of all implementations on one problem, or why one did not run."""

    distribution: str
    length: int
    errors: dict[str, Errors | str]


def _flash_attn_3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = scaled_flash_attn_3(q, k, v)()
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _ours(**flags) -> Callable:
    return lambda q, k, v: fa_ops.quantized_attention(q, k, v, **flags)


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bfloat16": fa_ops.attention,
    "int8": _ours(),
    "int8 rotated": _ours(rotate=True),
    "e4m3 scales": _ours(qk_dtype=E4M3),
    "e4m3 per tensor": lambda q, k, v: scaled_call(q, k, v)(),
    "flash-attn 3 fp8": _flash_attn_3,
}


def measure(inputs: Inputs) -> dict[str, Errors | str]:
    """The errors of every implementation; for one that cannot run, the reason."""
    exact = exact_attention(inputs)
    found: dict[str, Errors | str] = {}
    for name, implementation in IMPLEMENTATIONS.items():
        try:
            with torch.no_grad():
                found[name] = Errors.of(implementation(*inputs), exact)
        except (ImportError, NotImplementedError, RuntimeError) as error:
            found[name] = failure(error)
    return found


def measurements(
    steps: Iterable[tuple[str, int]], queries: int, heads: int, head_dim: int, device: str
) -> Iterator[AccuracyRow]:
    """One row for each distribution and length."""
    for name, length in steps:
        inputs = draw(name, length, queries, heads, head_dim, device)
        yield AccuracyRow(name, length, measure(inputs))


def table(title: str, rows: list[AccuracyRow]) -> Table:
    """Relative error, cosine and worst row of every implementation."""
    ran = [n for n in IMPLEMENTATIONS if any(isinstance(r.errors[n], Errors) for r in rows)]
    shown = Table("inputs", "keys", *ran, title=title, caption="RMSE / cosine / worst row")
    for row in rows:
        cells = [
            f"{e.rmse:.4f} / {e.cosine:.5f} / {e.worst_row:.3f}" if isinstance(e, Errors) else "-"
            for e in (row.errors[name] for name in ran)
        ]
        shown.add_row(row.distribution, str(row.length), *cells)
    return shown


def records(rows: list[AccuracyRow]) -> list[dict]:
    """The rows for a JSON file."""
    return [
        {"distribution": row.distribution, "length": row.length, "implementation": name}
        | (e._asdict() if isinstance(e, Errors) else {"error": e})
        for row in rows
        for name, e in row.errors.items()
    ]


def parsed(lengths: str | None, device: str) -> list[int]:
    """The numbers of keys; the default depends on the device."""
    if lengths is None:
        return [1024, 8192, 65536] if device == "cuda" else [1024, 4096]
    return command.integers("--lengths", lengths)


def main(
    device: command.Device = "auto",
    lengths: Annotated[
        str | None, typer.Option(help="comma-separated numbers of keys; on a GPU up to 524288")
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="queries that attend all keys")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="query and key heads")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, max=256, help="features of a head")] = 128,
    only: command.Only = None,
    json: command.Json = None,
) -> None:
    """Compare errors of 16-bit and 8-bit attention with float64."""
    device = command.device(device)
    names = command.matching(only, list(DISTRIBUTIONS), "distribution")
    sizes = parsed(lengths, device)
    pairs = list(itertools.product(names, sizes))
    steps = command.watched(
        pairs, "accuracy", device, IMPLEMENTATIONS, "inputs", "{0[0]}, {0[1]} keys".format
    )
    rows = list(measurements(steps, queries, heads, head_dim, device))
    if not console.is_terminal:
        console.width = 200
    facts = command.environment(device)
    console.print(table(f"{heads} heads of {head_dim}, {facts['device']}", rows))
    for name, error in rows[0].errors.items():
        if not isinstance(error, Errors):
            console.print(f"{name}: {error}", highlight=False, markup=False)
    if json is not None:
        command.write_json(json, device, "accuracy", records(rows))


# Inputs whose attention is computed to measure errors: a few queries and many keys.

FACTOR = 20.0  # of outliers


class Inputs(NamedTuple):
    """query (1, H, queries, D), key and value (1, H, S, D) in bfloat16, attended in full."""

    query: Tensor
    key: Tensor
    value: Tensor


def gaussian(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Leave normally distributed numbers as they are."""


def outlier_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One token in 500 is FACTOR times as large, in query, key and value."""
    for x in (q, k, v):
        x[:, :, 7::500] *= FACTOR


def outlier_channels(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Two channels of the keys are FACTOR times as large."""
    D = k.shape[-1]
    k[..., [3 % D, 17 % D]] *= FACTOR
    q *= 4.0 / FACTOR


def key_mean(q: Tensor, k: Tensor, v: Tensor) -> None:
    """All keys share a vector that is eight times as large as what differs."""
    k += 8.0 * torch.randn_like(k[:, :, :1])


def needle(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Each query has a key of its own among all, whose weight is about 0.9."""
    queries, S, D = q.shape[2], k.shape[2], q.shape[3]
    at = torch.arange(queries, device=q.device) * (S // queries)
    score = math.log(S) + 0.5 + math.log(9.0)
    k[:, :, at] = q * (score * D**0.5 / q.square().sum(-1, keepdim=True))


DISTRIBUTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "gaussian": gaussian,
    "outlier tokens": outlier_tokens,
    "outlier channels": outlier_channels,
    "key mean": key_mean,
    "needle": needle,
}


def draw(name: str, length: int, queries: int, heads: int, head_dim: int, device: str) -> Inputs:
    """The inputs of a distribution, always the same."""
    g = torch.Generator(device).manual_seed(0)
    shapes = ((1, heads, n, head_dim) for n in (min(queries, length), length, length))
    q, k, v = (torch.randn(shape, device=device, generator=g) for shape in shapes)
    with torch.random.fork_rng(devices=[device] if device != "cpu" else []):
        torch.manual_seed(0)
        DISTRIBUTIONS[name](q, k, v)
    return Inputs(*(x.bfloat16() for x in (q, k, v)))


def exact_attention(inputs: Inputs) -> Tensor:
    """The output in float64, by the head and by blocks of queries."""
    q, k, v = inputs
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    for h in range(q.shape[1]):
        keys, values = k[0, h].double(), v[0, h].double()
        for rows in torch.arange(q.shape[2], device=q.device).split(64):
            scores = q[0, h, rows].double() @ keys.T * q.shape[3] ** -0.5
            out[0, h, rows] = torch.softmax(scores, -1) @ values
    return out
