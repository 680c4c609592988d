"""Train a tiny Llama with context, tensor and data parallelism, and compare it with one process.

    python -m tests.evaluation.parallel_training --context 2 --tensor 2

Each sequence is distributed over one dimension of the mesh, and the matrices of each layer over the
other. FSDP2 distributes parameters and optimizer states over the first, where it also sums the
gradients. Packed documents, AdamW. Prints the losses of both.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import hf_integration

VOCABULARY, TOKENS = 64, 32
MATRICES = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def tiny_llama() -> LlamaForCausalLM:
    """Two layers with 4 query and 2 key heads, the same weights on every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="fa_ops",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mesh_of(context: int, tensor: int) -> DeviceMesh:
    """All processes, `tensor` of them side by side."""
    return init_device_mesh("cpu", (context, tensor), mesh_dim_names=("context", "tensor"))


def distribute(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """Distribute a model's parameters over the mesh dimensions "context" and "tensor"."""
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tensor"], MATRICES)
    for module in (*model.model.layers, model):
        sharded = fully_shard(module, mesh=mesh["context"])
        # each process has its tokens' part of the loss, whose gradients are summed, not averaged
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    """The same tokens in each step, in two documents of other lengths that are packed in a row."""
    g, found = torch.Generator().manual_seed(1), []
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=g)
    for _ in range(steps):
        first = int(torch.randint(1, TOKENS, (), generator=g))
        positions = torch.cat([torch.arange(first), torch.arange(TOKENS - first)])[None]
        found.append({"input_ids": ids, "position_ids": positions, "labels": ids})
    return found


def train(model: nn.Module, steps: int, mesh: DeviceMesh | None = None) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(steps):
        if mesh is None:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        else:
            with hf_integration.context_parallel(batch, mesh["context"]) as part:
                loss = model(**part).loss
                loss.backward()
        total = loss.detach()
        if mesh is not None:
            dist.all_reduce(total, group=mesh["context"].get_group())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter as one process has it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def compare(context: int, tensor: int, steps: int) -> dict[str, object]:
    """Train on all processes and on one.

    Returns:
        The losses of both, and the largest difference of a parameter.
    """
    mesh = mesh_of(context, tensor)
    alone, together = tiny_llama(), distribute(tiny_llama(), mesh)
    losses = {"one process": train(alone, steps), "all": train(together, steps, mesh)}
    pairs = zip(alone.parameters(), together.parameters(), strict=True)
    difference = max(float((whole(b) - a).abs().max()) for a, b in pairs)
    return losses | {"difference of parameters": difference}


def _work(rank: int, given: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    size = given.context * given.tensor
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    found = compare(given.context, given.tensor, given.steps)
    if rank == 0:
        for name, value in found.items():
            print(f"{name}: {value}")
    dist.destroy_process_group()


def main() -> None:
    """Parse the arguments and start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=2, help="processes of a sequence")
    parser.add_argument("--tensor", type=int, default=2, help="processes of a matrix")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (given, f"{folder}/store"), nprocs=given.context * given.tensor)


if __name__ == "__main__":
    main()
