"""Train a few layers of Llama 3 8B on packed documents over several GPUs, against one GPU.

    python -m tests.evaluation.context_parallel_training --processes 2

Prints the losses of one process and of all over the same steps, then the seconds of a step: of all
processes, and of one device with its share of the tokens. FSDP2 distributes the parameters.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hf_integration


def llama(given: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    """A Llama with the shape of the arguments, the same weights on every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=given.vocabulary, hidden_size=given.hidden, num_hidden_layers=given.layers,
        intermediate_size=given.intermediate, num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads, max_position_embeddings=given.tokens,
        rope_theta=500000.0, attn_implementation="fa_ops",
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )  # fmt: skip
    with device:
        model = LlamaForCausalLM(config).to(config.dtype)
    return model.train()


def distributed(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """The model with its parameters distributed by FSDP2, and its gradients summed."""
    for module in (*model.model.layers, model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)  # losses are parts of a mean over all tokens
        sharded.set_force_sum_reduction_for_comms(True)
    return model


def packed_batch(tokens: int, documents: int, vocabulary: int, device) -> dict[str, Tensor]:
    """One row of documents of random lengths."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, tokens), generator=g)
    ends = torch.randperm(tokens - 1, generator=g)[: documents - 1].sort().values + 1
    sizes = torch.diff(ends, prepend=torch.tensor([0]), append=torch.tensor([tokens])).tolist()
    positions = torch.cat([torch.arange(n) for n in sizes])[None]
    ids, positions = ids.to(device), positions.to(device)
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def train(model, batch: dict, steps: int, mesh: DeviceMesh | None = None) -> tuple[list, float]:
    """The loss of each step, and the median of their seconds after the first two."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=batch["input_ids"].is_cuda)
    losses, seconds = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        if mesh is None:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        else:
            with hf_integration.context_parallel(batch, mesh) as part:
                loss = model(**part).loss
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float()
        if mesh is not None:
            dist.all_reduce(total, group=mesh.get_group())
        losses.append(float(total))  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return losses, statistics.median(seconds[2:] or seconds)


def freed() -> None:
    """Give back the memory of a model that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(given: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Train on one process, with all tokens and with a share of them, then on all processes."""
    world, found = dist.get_world_size(), {}
    shapes = {"all tokens": (given.tokens, given.documents)}
    shapes["a share"] = (given.tokens // world, max(1, given.documents // world))
    for name, (tokens, documents) in shapes.items():
        batch = packed_batch(tokens, documents, given.vocabulary, device)
        steps = given.steps if name == "all tokens" else min(given.steps, 6)
        found[f"one, {name}"] = train(llama(given, device), batch, steps)
        freed()
    mesh = init_device_mesh(device.type, (world,))
    model = distributed(llama(given, device), mesh)
    batch = packed_batch(given.tokens, given.documents, given.vocabulary, device)
    found["all"] = train(model, batch, given.steps, mesh)
    return found


def report(found: dict, given: argparse.Namespace) -> None:
    """Print losses and times."""
    one, (share, alone), (all_losses, together) = (
        found["one, all tokens"][0], found["one, a share"], found["all"],
    )  # fmt: skip
    for step, (a, b) in enumerate(zip(one, all_losses, strict=True), 1):
        print(f"step {step:2d}: loss {a:.5f} of one process, {b:.5f} of all")
    difference = max(abs(a - b) / abs(a) for a, b in zip(one, all_losses, strict=True))
    print(f"largest relative difference of the losses: {difference:.2e}")
    print(
        f"{len(share)} steps of one device with {given.tokens // given.processes} tokens: ", end=""
    )
    print(f"{alone * 1e3:.1f} ms each; {given.processes} devices with {given.tokens}: ", end="")
    print(f"{together * 1e3:.1f} ms, ratio {alone / together:.3f}")


def _work(rank: int, store: str, given: argparse.Namespace) -> None:
    device = torch.device("cuda", rank) if given.device == "cuda" else torch.device("cpu")
    options = {"rank": rank, "world_size": given.processes, "timeout": timedelta(seconds=300)}
    torch.set_num_threads(1)  # as torchrun does: threads of all processes would wait for cores
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{store}", **options)
    found = compare(given, device)
    if rank == 0:
        report(found, given)
        if given.json:
            with open(given.json, "w") as file:
                json.dump(found, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    """The arguments; the defaults are four layers of Llama 3 8B."""
    known = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known.add_argument("--processes", type=int, default=2)
    known.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    known.add_argument("--tokens", type=int, default=32768)
    known.add_argument("--documents", type=int, default=16)
    known.add_argument("--steps", type=int, default=20)
    known.add_argument("--layers", type=int, default=4)
    known.add_argument("--hidden", type=int, default=4096)
    known.add_argument("--intermediate", type=int, default=14336)
    known.add_argument("--heads", type=int, default=32)
    known.add_argument("--kv-heads", type=int, default=8)
    known.add_argument("--vocabulary", type=int, default=128256)
    known.add_argument("--json", help="write losses and seconds to this file")
    return known


def main() -> None:
    """Parse the arguments and start the processes."""
    given = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (f"{folder}/store", given), nprocs=given.processes)


if __name__ == "__main__":
    main()
