"""The parts of the benchmark; each adds its measurements to a `Bench`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import StaticCache

if TYPE_CHECKING:
    from tests.evaluation.hf_bench import Bench


def prefill(bench: Bench, name: str, compiled: bool) -> None:
    """A forward pass without a cache, with the logits of the last token."""
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
    """A mask without the first b / (4 B) of row b of B; an eighth of all tokens is padding."""
    B, S = ids.shape
    missing = torch.arange(B, device=ids.device)[:, None] * S // (4 * B)
    return (torch.arange(S, device=ids.device) >= missing).long()


def train(bench: Bench, name: str, compiled: bool) -> None:
    """Forward pass, loss and backward pass, without an optimizer."""
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
    """Decoding with a static cache, compiled as in generate(), by mode reduce-overhead.

    In the last case of a batch size, the longest cache is filled only to the shortest length.
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
    """generate() with a static cache, which compiles decoding on GPUs; also left padded.

    The time of a token is computed from the difference between many tokens and few, in which the
    prefill cancels out.
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
    """The peak memory of a prefill beyond the weights, unpadded and left padded; eager only."""
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
        for _ in range(2):  # the first run compiles, which also allocates memory
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            bench.model(ids, use_cache=True, logits_to_keep=1, **inputs)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


PARTS: dict[str, Callable[[Bench, str, bool], None]] = {
    "prefill": prefill,
    "train": train,
    "decode": decode,
    "generate": generate,
    "memory": memory,
}
