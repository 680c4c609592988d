"""`python -m hf_integration.bench`: a Llama of 8B shape with each attention implementation.

Random weights, no network. Every number is a measurement of this run or an error text; nothing is
carried over from elsewhere.
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
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.utils import logging

import hf_integration
from fa_ops.cli.options import in_a_folder
from hf_integration import peers

IMPLEMENTATIONS = ("sdpa", "flash_attention_3", "flex_attention", "fa_ops")
MODES = ("eager", "compiled")
PARTS = ("prefill", "train", "decode", "generate", "memory")


@dataclass(frozen=True)
class Sizes:
    """The model and what it is given; lengths in tokens."""

    layers: int = 8
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    prefill: int = 8192
    padded: tuple[int, int] = (8, 1024)  # rows, tokens
    train: tuple[int, int] = (2, 4096)
    packed: int = 8192
    contexts: tuple[int, ...] = (4096, 32768)
    batches: tuple[int, ...] = (1, 16)
    memory: tuple[int, ...] = (8192, 16384, 32768)
    steps: int = 32  # tokens decoded for one time


TINY = Sizes(2, 64, 96, 4, 2, 128, 64, (4, 32), (2, 32), 64, (32, 64), (1, 2), (32, 64), 4)


@dataclass
class Bench:
    """One model on one device; every part adds its rows to `rows`."""

    sizes: Sizes
    model: LlamaForCausalLM
    device: torch.device
    repeats: int
    rows: list[dict]
    deadline: float = math.inf  # of time.monotonic(); cases that come after it are left out
    only: str = ""  # a part of the names of the cases to run

    def tokens(self, B: int, S: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        shape, vocab = (B, S), self.sizes.vocab
        return torch.randint(3, vocab, shape, generator=generator, device=self.device)

    def can_use(self, implementation: str, about: dict) -> bool:
        """Set it; where that fails the row says why."""
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
        """Add a row, with the error in place of a number where it cannot be measured."""
        if self.only not in about["case"]:
            return
        torch._dynamo.reset()  # else a second shape makes FlexAttention, and the model, dynamic
        try:
            if time.monotonic() > self.deadline:
                raise TimeoutError("left out: the time budget is spent")
            row = about | measure()
        except Exception as error:  # one that cannot run must not hide the others
            row = about | _error(error)
        self.add(row)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def milliseconds(self, step: Callable[[], object]) -> float:
        """The median over `repeats` runs after two that are not counted."""
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
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _error(error: Exception) -> dict:
    return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def prefill(bench: Bench, name: str, compiled: bool) -> None:
    """One forward pass without a cache; the logits of the last token."""
    mode = {"implementation": name, "part": "prefill", "compiled": compiled}
    model = torch.compile(bench.model, dynamic=False) if compiled else bench.model

    def run(**inputs) -> dict:
        with torch.no_grad():
            ms = bench.milliseconds(lambda: model(**inputs, use_cache=False, logits_to_keep=1))
        mask = inputs.get("attention_mask")
        real = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        return {"ms": ms, "real_tokens": real, "us_per_real_token": round(ms * 1e3 / real, 4)}

    ids = bench.tokens(1, bench.sizes.prefill)
    bench.record(mode | {"case": f"1 x {ids.shape[1]}"}, lambda: run(input_ids=ids))
    B, S = bench.sizes.padded
    ids, case = bench.tokens(B, S), f"{B} x {S}"
    bench.record(mode | {"case": case}, lambda: run(input_ids=ids))
    mask = left_padding(ids)
    bench.record(
        mode | {"case": f"{case}, left padded"}, lambda: run(input_ids=ids, attention_mask=mask)
    )


def left_padding(ids: Tensor) -> Tensor:
    """Row b of B misses its first b / (4 B) tokens: an eighth of all tokens is padding."""
    B, S = ids.shape
    missing = torch.arange(B, device=ids.device)[:, None] * S // (4 * B)
    return (torch.arange(S, device=ids.device) >= missing).long()


def train(bench: Bench, name: str, compiled: bool) -> None:
    """Forward, loss and backward; no optimizer."""
    mode = {"implementation": name, "part": "train", "compiled": compiled}
    model = torch.compile(bench.model, dynamic=False) if compiled else bench.model

    def run(**inputs) -> dict:
        def step() -> None:
            model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
            bench.model.zero_grad(set_to_none=True)

        bench.model.train()
        try:
            return {"ms": bench.milliseconds(step)}
        finally:
            bench.model.zero_grad(set_to_none=True)
            bench.model.eval()

    ids = bench.tokens(*bench.sizes.train)
    bench.record(mode | {"case": "{} x {}".format(*ids.shape)}, lambda: run(input_ids=ids))
    packing = documents(bench.sizes.packed, bench.device)
    ids = bench.tokens(1, bench.sizes.packed)
    count = packing["cu_seq_lens_q"].numel() - 1
    case = f"{count} documents packed to {bench.sizes.packed}"
    bench.record(mode | {"case": case}, lambda: run(input_ids=ids, **packing))


def documents(total: int, device: torch.device) -> dict:
    """Eight documents of lengths 1 : 2 : ... : 8, as DataCollatorWithFlattening describes them."""
    ends = [total * n * (n + 1) // 72 for n in range(9)]
    lengths = [b - a for a, b in zip(ends, ends[1:])]
    cu = torch.tensor(ends, dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    longest = max(lengths)
    return {
        "position_ids": positions,
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def decode(bench: Bench, name: str, compiled: bool) -> None:
    """A token at a time with a static cache; compiled as generate() does it, reduce-overhead.

    The last case of a batch size has the longest cache filled only as far as the shortest.
    """
    sizes = bench.sizes
    cases = [(n, n, B) for B in sizes.batches for n in sizes.contexts]
    cases += [(min(sizes.contexts), max(sizes.contexts), B) for B in sizes.batches]
    for filled, room, B in cases:
        about = {"implementation": name, "part": "decode", "compiled": compiled}
        about |= {"case": f"batch {B}, {filled} of {room + 2 * sizes.steps} filled"}

        def run(filled: int = filled, room: int = room, B: int = B) -> dict:
            return {"ms_per_token": _decode(bench, filled, room + 2 * sizes.steps, B, compiled)}

        bench.record(about, run)
        gc.collect()


def _decode(bench: Bench, filled: int, room: int, B: int, compiled: bool) -> float:
    config, steps = bench.model.config, bench.sizes.steps
    cache = StaticCache(config=config, max_cache_len=room)
    ids = bench.tokens(B, 1)
    shape = (B, config.num_key_value_heads, 1, config.head_dim)
    like = torch.empty(shape, dtype=bench.model.dtype, device=bench.device)
    for layer in cache.layers:
        layer.lazy_initialization(like, like)
        layer.keys.normal_()
        layer.values.normal_()

    def forward(ids: Tensor) -> Tensor:
        return bench.model(ids, past_key_values=cache, use_cache=True).logits

    on_gpu = bench.device.type == "cuda"
    options = {"mode": "reduce-overhead"} if on_gpu else {"backend": "aot_eager"}
    step = torch.compile(forward, fullgraph=True, dynamic=False, **options)
    step = step if compiled else forward

    def tokens() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(filled)
        for _ in range(steps):
            step(ids)

    with torch.no_grad():
        return round(bench.milliseconds(tokens) / steps, 4)


def generate(bench: Bench, name: str, compiled: bool) -> None:
    """generate() itself with a static cache, which compiles decoding on GPUs; also left padded.

    A token's time is the difference between many tokens and one, so that the prefill cancels out.
    """
    if not compiled and bench.device.type == "cuda":
        return
    B, S = max(bench.sizes.batches), min(bench.sizes.contexts)
    for rows, padded in ((1, False), (B, False), (B, True)):
        ids = bench.tokens(rows, S)
        mask = left_padding(ids) if padded else torch.ones_like(ids)
        about = {"implementation": name, "part": "generate", "compiled": compiled}
        about |= {"case": f"batch {rows} x {S}" + ", left padded" * padded}

        def run(ids: Tensor = ids, mask: Tensor = mask) -> dict:
            few, many = (_generate(bench, ids, mask, n) for n in (2, 2 + bench.sizes.steps))
            return {"ms_per_token": round((many - few) / bench.sizes.steps, 4)}

        bench.record(about, run)


def _generate(bench: Bench, ids: Tensor, mask: Tensor, new: int) -> float:
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    options["cache_implementation"] = "static"
    if bench.device.type != "cuda":
        options["disable_compile"] = True
    return bench.milliseconds(lambda: bench.model.generate(ids, attention_mask=mask, **options))


def memory(bench: Bench, name: str, compiled: bool) -> None:
    """What a prefill holds at most beyond the weights, unpadded and left padded; eager only."""
    if compiled:
        return
    for S in bench.sizes.memory:
        ids = bench.tokens(1, S)
        mask = (torch.arange(S, device=bench.device) >= S // 8).long()[None]
        for case, inputs in (("", {}), (", left padded", {"attention_mask": mask})):

            def run(ids: Tensor = ids, inputs: dict = inputs) -> dict:
                return {"peak_MiB": _peak(bench, ids, inputs)}

            about = {"implementation": name, "part": "memory", "compiled": False}
            bench.record(about | {"case": f"1 x {S}{case}"}, run)


def _peak(bench: Bench, ids: Tensor, inputs: dict) -> float:
    if bench.device.type != "cuda":
        raise NotImplementedError("peak memory is read from CUDA's allocator")
    with torch.no_grad():
        for _ in range(2):  # the first run compiles, which holds memory of its own
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            bench.model(ids, use_cache=True, logits_to_keep=1, **inputs)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


RUN = {
    "prefill": prefill,
    "train": train,
    "decode": decode,
    "generate": generate,
    "memory": memory,
}


def build(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=131072,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    return model.to(device).eval()


def _names(wanted: list[str]) -> list[str]:
    """The implementations, FlashAttention 3 under the name by which it can be had here."""
    other = peers.register() if "flash_attention_3" in wanted else None
    return [other if other and name == "flash_attention_3" else name for name in wanted]


def main(
    json_file: Annotated[
        Path, typer.Option("--json", help="where the rows go", callback=in_a_folder)
    ] = Path("hf_bench.json"),
    implementations: Annotated[str, typer.Option(help="comma separated")] = ",".join(
        IMPLEMENTATIONS
    ),
    parts: Annotated[str, typer.Option(help="comma separated")] = ",".join(PARTS),
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    layers: Annotated[int, typer.Option(min=1)] = 8,
    modes: Annotated[str, typer.Option(help="comma separated")] = ",".join(MODES),
    repeats: Annotated[int, typer.Option(min=1, help="runs of which the median counts")] = 7,
    case: Annotated[str, typer.Option(help="only cases whose name contains it")] = "",
    budget: Annotated[
        float | None, typer.Option(help="seconds, after which no further case is begun")
    ] = None,
    tiny: Annotated[bool, typer.Option(help="a tiny model: does the command run?")] = False,
) -> None:
    """Prefill, training, decoding with a static cache and peak memory, in bf16; JSON rows."""
    start = time.monotonic()
    chosen = (
        ("part", parts, RUN),
        ("mode", modes, MODES),
        ("implementation", implementations, (*IMPLEMENTATIONS, *AttentionInterface())),
    )
    for name, given, known in chosen:
        for word in given.split(","):
            if word not in known:
                raise typer.BadParameter(f"no {name} is called {word!r}: {', '.join(known)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch sees no such device")
    if device == "cpu" and not tiny:
        raise typer.BadParameter("a model of 8B shape needs CUDA; --tiny tries the command")
    logging.set_verbosity_error()
    sizes = TINY if tiny else replace(Sizes(), layers=layers)
    place = torch.device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    bench = Bench(sizes, build(sizes, place, dtype), place, repeats, [])
    bench.deadline = math.inf if budget is None else start + budget
    bench.only = case
    names = _names(implementations.split(","))
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if place.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "layers": sizes.layers,
        "repeats": repeats,
    }
    print(json.dumps(about), flush=True)
    for part in parts.split(","):
        for compiled in (mode == "compiled" for mode in modes.split(",")):
            for name in names:
                if name == peers.FA3_FORWARD and part not in peers.PARTS:
                    continue
                about_part = {"implementation": name, "part": part, "compiled": compiled}
                if bench.can_use(name, about_part):
                    RUN[part](bench, name, compiled)
                json_file.write_text(json.dumps(about | {"rows": bench.rows}, indent=1))


if __name__ == "__main__":
    assert hf_integration.NAME  # the import registers the implementation
    typer.run(main)
