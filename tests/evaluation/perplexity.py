"""`python -m tests.evaluation.perplexity`: SmolLM2 with 8-bit attention, beside 16-bit attention.

Its perplexity on documentation of Python's standard library, and its greedy tokens.
"""

from __future__ import annotations

import argparse
import asyncio.tasks
import decimal
import doctest
import inspect
import logging
import unittest.mock
from typing import NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fa_ops.bench import command
from fa_ops.cli import demo as smollm

# Text that every machine has: documentation of Python's standard library.
SOURCES = (doctest, decimal.Decimal, argparse.ArgumentParser, logging.Logger,
           unittest.mock.NonCallableMock, asyncio.tasks)  # fmt: skip
NAMES = ("eager", "fa_ops", "fa_ops_8bit")
GREEDY = 32  # tokens that are generated


class LanguageModelRun(NamedTuple):
    """What the model predicts with one attention implementation."""

    name: str
    perplexity: float
    same_predictions: float  # the share of tokens after which the likeliest is that of eager
    same_greedy: int  # generated tokens before the first that differs from eager's


def check_installed() -> None:
    """Raise typer.BadParameter unless the packages that hold the model are installed."""
    if packages := smollm.missing():
        needed = " ".join(packages)
        raise typer.BadParameter(f"the language model needs other packages: pip install {needed}")


def text() -> str:
    """The documentation of SOURCES and of their public members."""
    parts = []
    for source in SOURCES:
        members = (getattr(source, n) for n in sorted(dir(source)) if not n.startswith("_"))
        parts += [inspect.getdoc(x) or "" for x in (source, *members)]
    return "\n\n".join(part for part in dict.fromkeys(parts) if len(part) > 80)


def measure(device: str, tokens: int = 1024, rows: int = 4) -> list[LanguageModelRun]:
    """Run `rows` windows of `tokens` tokens of the text with every implementation."""
    import hf_integration

    hf_integration.register()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = smollm.load(device, dtype)
    ids = model.tokenizer(text(), return_tensors="pt")["input_ids"][0]
    rows = min(rows, ids.numel() // tokens)
    batch = ids[: rows * tokens].view(rows, tokens).to(device)
    prompt = model.ask("Explain in three sentences what a compiler does.")
    found, eager = [], None
    for name in NAMES:
        model.net.set_attn_implementation(name)
        perplexity, best, greedy = _run(model.net, batch, prompt)
        eager = eager or (best, greedy)
        same = (best == eager[0]).float().mean().item()
        length = min(greedy.numel(), eager[1].numel())
        agree = (greedy[:length] == eager[1][:length]).long().cumprod(0).sum()
        found.append(LanguageModelRun(name, perplexity, same, int(agree)))
    return found


def _run(net: torch.nn.Module, batch: Tensor, prompt: Tensor) -> tuple[float, Tensor, Tensor]:
    """Perplexity, the likeliest next tokens, and generated ones."""
    losses, best = [], []
    with torch.no_grad():
        for row in batch:
            logits = net(row[None]).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, row[1:]))
            best.append(logits.argmax(-1))
        greedy = net.generate(prompt, max_new_tokens=GREEDY, do_sample=False)[0, prompt.shape[1] :]
    return torch.stack(losses).mean().exp().item(), torch.stack(best), greedy


def table(runs: list[LanguageModelRun]) -> Table:
    """One row for each implementation; perplexities relative to fa_ops with 16 bits too."""
    shown = Table("attention", "perplexity", "relative", "same next token", "same greedy tokens",
                  title="SmolLM2-135M")  # fmt: skip
    base = next(run.perplexity for run in runs if run.name == "fa_ops")
    for run in runs:
        shown.add_row(run.name, f"{run.perplexity:.4f}", f"{run.perplexity / base - 1:+.3%}",
                      f"{run.same_predictions:.1%}", str(run.same_greedy))  # fmt: skip
    return shown


def main(device: command.Device = "auto", json: command.Json = None) -> None:
    """Compare the perplexity and the greedy tokens of eager attention, fa_ops and fa_ops_8bit."""
    device = command.device(device)
    check_installed()
    measured = measure(device)
    Console().print(table(measured))
    if json is not None:
        rows = [{"implementation": run.name} | run._asdict() for run in measured]
        command.write_json(json, device, "perplexity", rows)


if __name__ == "__main__":
    typer.run(main)
