"""`python -m fa_ops bench host`: host time of a call and of its parts.

The calls are made without gradients, and forward + backward; eager, and compiled as a function of
their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops.bench import command
from fa_ops.bench.sweep import grad_out
from fa_ops.bench.timing import Run, Time, host_times
from fa_ops.call.call import DENSE, Call, Saved
from fa_ops.call.options import NO_OPERANDS, Options
from fa_ops.plans import dispatch, planning

SHAPE = (1, 8, 64, 64)
TRAINING = ", forward + backward"


def runs(device: str, shape: tuple[int, ...] = SHAPE) -> dict[str, Run]:
    """The calls to time: each layer of fa_ops from the outside in, SDPA, and a trivial operator."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
    peers = {"F.sdpa flash": SDPBackend.FLASH_ATTENTION}
    if device == "cuda":
        peers = {"F.sdpa cudnn": SDPBackend.CUDNN_ATTENTION} | peers
    return _forward(*inputs, peers) | _training(*inputs, peers) | _compiled(*inputs)


def _forward(q: Tensor, k: Tensor, v: Tensor, peers: dict[str, SDPBackend]) -> dict[str, Run]:
    call = planning.normalised(Call(q, k, v))
    scalars = DENSE.scalars(Options())
    module = dispatch.choose(call)
    plan = planning.plan_of(DENSE, q, k, v, NO_OPERANDS, scalars)
    operator = torch.ops.fa.attention.default

    def run(call: Callable[[], object], kernel: SDPBackend | None = None) -> Run:
        return Run(lambda _: call(), context=lambda: _context(False, kernel))

    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    key_of = planning.key_of
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    ends = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * q.shape[2]
    sdpa = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    return {
        "fa_ops.attention": run(lambda: fa_ops.attention(q, k, v)),
        "fa_ops.attention, lse": run(lambda: fa_ops.attention(q, k, v, return_lse=True)),
        "fa_ops.attention, bool mask": run(lambda: fa_ops.attention(q, k, v, mask)),
        "fa_ops.attention_varlen": run(lambda: fa_ops.attention_varlen(*packed, ends, ends)),
        "  inside: torch.ops.fa.attention": run(lambda: operator(q, k, v)),
        "  inside: planning": run(
            lambda: planning.prepared(key_of(DENSE, q, k, v, call.operands, scalars))
        ),
        f"  inside: backend {_name(module)}": run(lambda: plan.run(q, k, v, call.operands)),
        **{name: run(sdpa, kernel) for name, kernel in peers.items()},
        "torch.empty_like": run(lambda: torch.empty_like(q)),
    }


def _training(q: Tensor, k: Tensor, v: Tensor, peers: dict[str, SDPBackend]) -> dict[str, Run]:
    training = functools.partial(_step, q, k, v)
    operator = torch.ops.fa.attention_backward.default
    out, lse = fa_ops.attention(q, k, v, return_lse=True)
    saved = grad_out(out), None, q, k, v, out, lse
    given = Saved(saved[0], None, out, lse)
    call = planning.normalised(Call(q, k, v, saved=given))
    module, scalars = dispatch.choose(call), DENSE.scalars(Options())
    plan = planning.prepared_backward(DENSE, Options(), scalars, q, k, v, NO_OPERANDS, given)
    sdpa = F.scaled_dot_product_attention
    return {
        f"fa_ops.attention{TRAINING}": training(fa_ops.attention),
        "  inside: torch.ops.fa.attention_backward": Run(
            lambda _: operator(*saved), context=torch.no_grad
        ),
        f"  inside: backend {_name(module)}, backward": Run(
            lambda _: plan.run(*saved, call.operands), context=torch.no_grad
        ),
        **{f"{name}{TRAINING}": training(sdpa, kernel) for name, kernel in peers.items()},
        f"torch.addcmul{TRAINING}": training(torch.addcmul),
    }


def _step(
    q: Tensor, k: Tensor, v: Tensor, call: Callable[..., Tensor],
    kernel: SDPBackend | None = None, eager: Callable[..., Tensor] | None = None,
) -> Run:  # fmt: skip
    """Forward + backward; the gradient of the output is created once, in the output's layout."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with _context(True, kernel):
        grad = grad_out((eager or call)(*leaves).detach())
    return Run(
        lambda _: torch.autograd.grad(call(*leaves), leaves, grad),
        context=lambda: _context(True, kernel),
    )


def _compiled(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Run]:
    """Functions of one call each; PyTorch chooses the kernel of SDPA when it compiles."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa_ops.attention(q, k, v)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    rows = {}
    for name, function in (("compiled", attention), ("compiled F.sdpa", sdpa)):
        call = torch.compile(function, fullgraph=True, dynamic=False)
        rows[f"{name}, forward"] = Run(
            lambda _, call=call: call(q, k, v), context=lambda: _context(False, None)
        )
        rows[f"{name}{TRAINING}"] = _step(q, k, v, call, eager=function)
    return rows


def _name(backend: ModuleType) -> str:
    return backend.__name__.rsplit(".", 1)[-1]


@contextlib.contextmanager
def _context(gradient: bool, kernel: SDPBackend | None) -> Iterator[None]:
    only = contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel)
    with torch.set_grad_enabled(gradient), only:
        yield


def table(times: dict[str, Time]) -> Table:
    """A line for each call: microseconds of host time."""
    result = Table(title="host time of one call")
    for name in ("call", "us, median", "20 % - 80 %"):
        result.add_column(name, justify="left" if name == "call" else "right")
    for name, time in times.items():
        spread = f"{time.low * 1e3:.1f} - {time.high * 1e3:.1f}"
        result.add_row(name, f"{time.ms * 1e3:.1f}", spread)
    return result


def records(times: dict[str, Time]) -> list[dict]:
    """The rows of `table` for the JSON file."""
    return [
        {"call": name.strip(), "us": t.ms * 1e3, "us_20": t.low * 1e3, "us_80": t.high * 1e3}
        for name, t in times.items()
    ]


def main(
    device: command.Device = "auto",
    json: command.Json = None,
    bursts: Annotated[int, typer.Option(min=1, help="number of samples of each call")] = 300,
) -> None:
    """Measure the host time of a small call and its parts, without and with gradients."""
    device, console = command.device(device), Console()
    command.header("host", device, ["fa_ops", "F.sdpa"], f"{bursts} bursts")
    times = host_times(runs(device), device, bursts)
    console.print(table(times))
    if device == "cpu":
        console.print("on a CPU a call's time includes its computation")
    if json is not None:
        command.write_json(json, device, "host", records(times))
