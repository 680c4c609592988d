"""`python -m tests.evaluation.hf_bench`: a Llama or wide layers with each attention implementation.

Weights are random, and nothing is downloaded. Every row holds a measurement of this run, or an
error message.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging

import hf_integration
from fa_ops.bench import command
from fa_ops.bench.command import in_existing_folder
from tests.evaluation import hf_bench_peers as peers
from tests.evaluation.hf_bench_parts import PARTS
from tests.evaluation.hf_bench_shapes import SHAPES, Sizes, build

IMPLEMENTATIONS = ("sdpa", "flash_attention_3", "flex_attention", "fa_ops")
MODES = ("eager", "compiled")


@dataclass
class Bench:
    """A model on a device; every part of the benchmark adds its measurements to `rows`."""

    sizes: Sizes
    model: PreTrainedModel
    device: torch.device
    repeats: int
    rows: list[dict]
    deadline: float = math.inf  # of time.monotonic(); later cases are skipped
    only: str = ""  # run only cases whose names contain it

    def tokens(self, B: int, S: int) -> Tensor:
        """Random tokens (B, S), the same in every call."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape, vocab = (B, S), self.sizes.vocab
        return torch.randint(3, vocab, shape, generator=generator, device=self.device)

    def can_use(self, implementation: str, about: dict) -> bool:
        """Set the implementation; if that fails, add a row with the error."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            self.model.set_attn_implementation(implementation)
        except Exception as error:
            self.add(about | _error(error))
            return False
        return True

    def record(self, about: dict, measure: Callable[[], dict]) -> None:
        """Add a row with a measurement, or with the error if there is one."""
        if self.only not in about["case"]:
            return
        torch._dynamo.reset()  # otherwise a second shape compiles dynamic code
        try:
            if time.monotonic() > self.deadline:
                raise TimeoutError("skipped: the time budget is spent")
            row = about | measure()
        except Exception as error:  # a case that fails must not stop the others
            row = about | _error(error)
        self.add(row)

    def add(self, row: dict) -> None:
        """Add a row and print it."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def milliseconds(self, step: Callable[[], object]) -> float:
        """The median over `repeats` runs after two warm-up runs."""
        times = []
        for i in range(2 + self.repeats):
            self.wait()
            start = time.perf_counter()
            step()
            self.wait()
            if i >= 2:
                times.append((time.perf_counter() - start) * 1e3)
        return round(statistics.median(times), 3)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _error(error: Exception) -> dict:
    return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def _names(names: list[str]) -> list[str]:
    """The implementations, with FlashAttention 3 under the name by which it is available here."""
    other = peers.register() if "flash_attention_3" in names else None
    return [other if other and name == "flash_attention_3" else name for name in names]


def main(
    json_file: Annotated[
        Path, typer.Option("--json", help="the file for the rows", callback=in_existing_folder)
    ] = Path("hf_bench.json"),
    implementations: Annotated[str, typer.Option(help="comma separated")] = ",".join(
        IMPLEMENTATIONS
    ),
    parts: Annotated[str, typer.Option(help="comma separated")] = ",".join(PARTS),
    shape: Annotated[str, typer.Option(help=" or ".join(SHAPES))] = "llama",
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    layers: Annotated[int, typer.Option(min=1)] = 8,
    modes: Annotated[str, typer.Option(help="comma separated")] = ",".join(MODES),
    repeats: Annotated[int, typer.Option(min=1, help="runs per measurement")] = 7,
    case: Annotated[str, typer.Option(help="only cases whose name contains it")] = "",
    budget: Annotated[
        float | None, typer.Option(help="seconds, after which no further case is run")
    ] = None,
    tiny: Annotated[bool, typer.Option(help="a tiny model, to try the command")] = False,
) -> None:
    """Measure prefill, training, decoding with a static cache and peak memory, in bf16."""
    start = time.monotonic()
    chosen = (
        ("part", parts, PARTS),
        ("mode", modes, MODES),
        ("implementation", implementations, (*IMPLEMENTATIONS, *AttentionInterface())),
        ("shape", shape, SHAPES),
    )
    for name, words, known in chosen:
        for word in words.split(","):
            if word not in known:
                raise typer.BadParameter(f"no {name} is called {word!r}: {', '.join(known)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch has no such device")
    if device == "cpu" and not tiny:
        raise typer.BadParameter("a model of this size needs CUDA; --tiny tries the command")
    logging.set_verbosity_error()
    sizes = SHAPES[shape].tiny if tiny else replace(SHAPES[shape].sizes, layers=layers)
    torch_device = torch.device(device)
    dtype = torch.bfloat16 if torch_device.type == "cuda" else torch.float32
    bench = Bench(sizes, build(shape, sizes, torch_device, dtype), torch_device, repeats, [])
    bench.deadline = math.inf if budget is None else start + budget
    bench.only = case
    names = _names(implementations.split(","))
    about = {
        "transformers": transformers.__version__,
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "layers": sizes.layers,
        "repeats": repeats,
    }
    print(json.dumps(command.environment(torch_device.type) | about), flush=True)
    for part in parts.split(","):
        for compiled in (mode == "compiled" for mode in modes.split(",")):
            for name in names:
                if name == peers.FA3_FORWARD and part not in peers.PARTS:
                    continue
                about_part = {"implementation": name, "part": part, "compiled": compiled}
                if bench.can_use(name, about_part):
                    PARTS[part](bench, name, compiled)
                kind = torch_device.type
                command.write_json(json_file, kind, "transformers", bench.rows, **about)


if __name__ == "__main__":
    assert hf_integration.NAME  # the import registers the implementation
    typer.run(main)
