"""`python -m fa_ops bench derivatives`: tangents and second derivatives, beside SDPA's math kernel.

Of each problem: the forward and the backward pass, the forward pass with tangents of query, key and
value (`jvp`), the gradient with a forward pass (`grad`), its tangent (`jvp of grad`), and the
gradient of the gradient (`double backward`). jvp_flash_attention, if it is installed, has the
second of these with tangents only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Annotated

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops.bench import command, comparison
from fa_ops.bench.comparison import Build, Quantity, backward_run, forward_run
from fa_ops.bench.peers import import_first
from fa_ops.bench.problems import Problem
from fa_ops.bench.timing import Run

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

OURS, TRITON, MATH, JVP_FLASH = "fa_ops", "fa_ops triton", "sdpa math", "jvp_flash_attention"
_NAMES = {"cuda": (OURS, TRITON, MATH, JVP_FLASH), "cpu": (OURS, MATH)}
# Each quantity with the one that its time is compared with.
BASELINES = {
    "forward": None, "jvp": "forward", "backward": None, "grad": None, "jvp of grad": "grad",
    "double backward": "backward",
}  # fmt: skip


def quantities(
    lengths: list[int], dims: list[int], tokens: int, width: int, device: str,
    only: str | None = None,
) -> list[Quantity]:  # fmt: skip
    """All quantities of problems with so many tokens, and heads of this width together."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    chosen = command.matching(only, BASELINES, "quantity")
    chosen = [n for n in BASELINES if n in chosen or n in map(BASELINES.get, chosen)]
    problems = [
        Problem(max(tokens // S, 1), max(width // D, 1), max(width // D, 1), S, D, causal, dtype)
        for D in dims
        for causal in (False, True)
        for S in lengths
    ]
    return [
        Quantity(
            str(problem), name, functools.partial(_builds, problem, name, device),
            None if BASELINES[name] is None else (str(problem), BASELINES[name]),
        )
        for problem in problems
        for name in chosen
    ]  # fmt: skip


def _calls(problem: Problem, device: str) -> dict[str, Attention]:
    """A function of query, key and value for each implementation of all quantities."""
    causal = problem.causal
    ours = lambda q, k, v: fa_ops.attention(q, k, v, is_causal=causal)  # noqa: E731
    triton = lambda q, k, v: fa_ops.attention(  # noqa: E731
        q, k, v, is_causal=causal, backend="triton"
    )
    math = lambda q, k, v: F.scaled_dot_product_attention(  # noqa: E731
        q, k, v, is_causal=causal
    )
    calls = {OURS: ours, TRITON: triton, MATH: math}
    return {name: call for name, call in calls.items() if name in _NAMES[device]}


def _builds(problem: Problem, what: str, device: str) -> dict[str, Build]:
    """What computes the quantity by each implementation."""
    tensors = problem.inputs(device, "bhsd", requires_grad=True)
    generator = torch.Generator(device).manual_seed(2)
    draw = lambda like: torch.empty_like(like).normal_(generator=generator)  # noqa: E731
    grad_out = draw(tensors[0].detach()).requires_grad_()
    directions = tuple(draw(t.detach()) for t in (*tensors, grad_out))
    builds: dict[str, Build] = {
        name: functools.partial(_run, what, call, tensors, grad_out, directions, name == MATH)
        for name, call in _calls(problem, device).items()
    }
    if what in ("forward", "jvp") and JVP_FLASH in _NAMES[device]:

        def flash() -> Run:
            function = import_first("jvp_flash_attention.jvp_attention").JVPAttn.fwd_dual
            call = functools.partial(function, causal=problem.causal)
            return _run(what, call, tensors, grad_out, directions, False)

        builds[JVP_FLASH] = flash
    return builds


def _run(
    what: str, call: Attention, tensors: tuple[Tensor, ...], grad_out: Tensor,
    directions: tuple[Tensor, ...], by_math: bool,
) -> Run:  # fmt: skip
    """What is timed of a quantity, and what precedes it."""
    plain = tuple(t.detach() for t in tensors)
    given = grad_out.detach()
    if what == "forward":
        run = forward_run(lambda: call(*plain))
    elif what == "jvp":
        run = Run(lambda _: _tangents(call, plain, directions), context=torch.no_grad)
    elif what == "backward":
        run = backward_run(lambda: call(*tensors), tensors, given)
    elif what == "grad":
        run = Run(lambda _: torch.autograd.grad(call(*tensors), tensors, given))
    elif what == "jvp of grad":
        loss = lambda *qkv: (call(*qkv) * given).sum()  # noqa: E731
        gradient = torch.func.grad(loss, (0, 1, 2))
        run = Run(lambda _: _flat(torch.func.jvp(gradient, plain, directions[:3])))
    else:
        leaves = (*tensors, grad_out)

        def gradients() -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(*tensors), tensors, grad_out, create_graph=True)

        run = Run(lambda found: torch.autograd.grad(found, leaves, directions[:3]), gradients)
    return _by_math(run) if by_math else run


def _tangents(
    call: Attention, plain: tuple[Tensor, ...], directions: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """out and its tangent."""
    with forward_ad.dual_level():
        out = call(*map(forward_ad.make_dual, plain, directions))
        return tuple(forward_ad.unpack_dual(out))


def _flat(pairs: tuple) -> list[Tensor]:
    return [t for part in pairs for t in part]


def _by_math(run: Run) -> Run:
    """The run within SDPA's math kernel, which alone has these derivatives."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with run.context(), sdpa_kernel(SDPBackend.MATH):
            yield

    return Run(run.timed, run.prepare, context)


def main(
    device: command.Device = "auto",
    lengths: Annotated[
        str | None, typer.Option(help="default: 4096,16384 on a GPU, 256,512 on a CPU")
    ] = None,
    head_dims: Annotated[
        str | None, typer.Option(help="features of a head; default: 64,128, on a CPU 64")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="of a batch; default: 16384, on a CPU 512")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=8, help="features of all heads; default: 2048, on a CPU 128")
    ] = None,
    only: command.Only = None,
    budget: Annotated[float, typer.Option(min=0.1, help="milliseconds to time each call")] = 50.0,
    json: command.Json = None,
) -> None:
    """Compare tangents and second derivatives with first ones, and with SDPA's math kernel."""
    device = command.device(device)
    on_gpu = device == "cuda"
    default = "4096,16384" if on_gpu else "256,512"
    chosen = command.integers("--lengths", lengths or default)
    dims = command.integers("--head-dims", head_dims or ("64,128" if on_gpu else "64"))
    tokens, width = tokens or (16384 if on_gpu else 512), width or (2048 if on_gpu else 128)
    measured = quantities(chosen, dims, tokens, width, device, only)
    comparison.compare("derivatives", measured, list(_NAMES[device]), device, budget, json)
