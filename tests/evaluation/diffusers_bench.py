"""Time attention and whole transformer blocks of diffusers with each attention backend.

    python -m tests.evaluation.diffusers_bench --json out.json

Two shapes in bfloat16: Flux (24 heads of 128, 4096 image and 512 text tokens) and Wan 14B (40 heads
of 128, 32760 tokens). All backends are timed in one run, alternately. The error is the root mean
square of the difference from a result, relative to that result's: for attention its result in
float32, for blocks that with native attention. The cosine is that of the two results.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
from collections.abc import Callable
from typing import NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

import hf_integration.diffusers
from fa_ops.bench.timing import Run, device_times

OURS = ("fa_ops", "fa_ops_8bit")
BACKENDS = (*OURS, "native", "_native_cudnn", "_native_flash", "flash", "_flash_3")
FA3_FORWARD = "fa3_fwd_interface"  # FlashAttention 3 without its backward pass
HEAD_DIM = 128
SHAPES = {"flux": (24, 4608), "wan": (40, 32760)}  # heads, tokens
TEXT = 512


def block_of(shape: str, tokens: int) -> Callable[[], object]:
    """A call of a transformer block with random weights."""
    heads, width = SHAPES[shape][0], SHAPES[shape][0] * HEAD_DIM
    torch.manual_seed(0)
    if shape == "flux":
        block = FluxTransformerBlock(width, heads, HEAD_DIM)
        inputs = {
            "hidden_states": torch.randn(1, tokens - TEXT, width),
            "encoder_hidden_states": torch.randn(1, TEXT, width),
            "temb": torch.randn(1, width),
            "image_rotary_emb": angles(tokens, HEAD_DIM),
        }
    else:
        block = WanTransformerBlock(width, 13824, heads, "rms_norm_across_heads", True)
        inputs = {
            "hidden_states": torch.randn(1, tokens, width),
            "encoder_hidden_states": torch.randn(1, TEXT, width),
            "temb": torch.randn(1, 6, width),
            "rotary_emb": tuple(x[None, :, None] for x in angles(tokens, HEAD_DIM)),
        }
    return functools.partial(block, **inputs)


def angles(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (tokens, width) in float32, by which positions are rotated."""
    turns = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    turns = turns.repeat_interleave(2, 1).float()
    return turns.cos(), turns.sin()


def set_backend(block: nn.Module, backend: str) -> None:
    """Set the backend of every attention layer of a block."""
    for layer in block.modules():
        if hasattr(getattr(layer, "processor", None), "_attention_backend"):
            layer.processor._attention_backend = AttentionBackendName(backend)


class Accuracy(NamedTuple):
    """How close a result is to the exact one."""

    error: float  # the root mean square error, relative to that of the exact result
    cosine: float


def accuracy(out: Tensor, exact: Tensor) -> Accuracy:
    """The accuracy of a result, compared with the exact one in float32."""
    out, size = out.float(), exact.norm()
    cosine = (out.double() * exact.double()).sum() / (out.double().norm() * exact.double().norm())
    return Accuracy(float((out - exact).norm() / size), float(cosine))


def attention_calls(heads: int, tokens: int) -> tuple[dict[str, Callable], Tensor]:
    """A call of attention for each backend that runs here, and the result in float32."""
    qkv = [torch.randn(1, tokens, heads, HEAD_DIM) for _ in range(3)]
    exact = dispatch_attention_fn(*(x.float() for x in qkv), backend="native")
    calls = {
        name: functools.partial(dispatch_attention_fn, *qkv, backend=name) for name in BACKENDS
    }
    if importlib.util.find_spec(FA3_FORWARD):
        fa3 = importlib.import_module(FA3_FORWARD).flash_attn_func
        calls[FA3_FORWARD] = lambda: fa3(*qkv)
    runnable = {}
    for name, call in calls.items():
        try:
            call()
            runnable[name] = call
        except Exception as problem:  # a backend that is missing or does not support the call
            reason = str(problem).partition(". ")[0]
            print(f"  {name}: {type(problem).__name__}: {reason}")
    return runnable, exact


def measure(shape: str, device: str, tokens: int, budget_ms: float) -> list[dict]:
    """The rows of one shape: attention alone, and the block with each of diffusers' backends."""
    calls, exact = attention_calls(SHAPES[shape][0], tokens)
    close = {name: accuracy(_first(call()), exact) for name, call in calls.items()}
    del exact
    rows = _rows(shape, "attention", calls, close, device, budget_ms)
    del calls
    call = block_of(shape, tokens)
    blocks = {}
    for name in (row["backend"] for row in rows if row["backend"] in BACKENDS):
        blocks[name] = functools.partial(_with_backend, call, name)
    exact = _first(blocks["native"]()).float()
    close = {name: accuracy(_first(run()), exact) for name, run in blocks.items()}
    return rows + _rows(shape, "block", blocks, close, device, budget_ms)


def _with_backend(call: functools.partial, backend: str) -> object:
    set_backend(call.func, backend)
    return call()


def _rows(shape, part, calls, close, device, budget_ms) -> list[dict]:
    runs = {name: Run(lambda _, call=call: call()) for name, call in calls.items()}
    times = device_times(runs, device, budget_ms)
    best = min((t.ms for name, t in times.items() if name not in OURS), default=float("nan"))
    rows = []
    for name, time in times.items():
        row = {"shape": shape, "part": part, "backend": name, "ms": time.ms}
        rows.append(row | close[name]._asdict())
        ratio = f", best other / ours {best / time.ms:.2f}" if name in OURS else ""
        print(
            f"{shape} {part:9} {name:17} {time.ms:9.3f} ms, error {close[name].error:.2e}, "
            f"cosine {close[name].cosine:.6f}{ratio}"
        )
    return rows


def _first(result: object) -> Tensor:
    return result if isinstance(result, Tensor) else result[-1 if len(result) == 2 else 0]


def main(arguments: list[str] | None = None) -> list[dict]:
    """Print and return the rows of all shapes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, help="instead of those of the shapes")
    parser.add_argument("--budget", type=float, default=500.0, help="ms for each row")
    parser.add_argument("--json", help="a file for the rows")
    options = parser.parse_args(arguments)
    assert hf_integration.diffusers.NAME  # the import registers the backend
    rows = []
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, options.dtype))
    try:
        with torch.no_grad(), torch.device(options.device):
            for shape in options.shapes:
                tokens = options.tokens or SHAPES[shape][1]
                rows += measure(shape, options.device, tokens, options.budget)
    finally:
        torch.set_default_dtype(default)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return rows


if __name__ == "__main__":
    main()
