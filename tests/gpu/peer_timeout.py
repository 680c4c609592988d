"""A process that makes no backward pass while the other one does, which then ends.

torchrun --nproc-per-node 2 -m tests.gpu.peer_timeout
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from fa_ops.distributed import context_parallel_attention


def main() -> None:
    """Wait for a gradient that never comes."""
    dist.init_process_group("nccl", timeout=timedelta(seconds=8))
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    q = torch.randn(1, 8, 512, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        out = context_parallel_attention(q, q, q, None, "ring", is_causal=True, transport="peer")
        out.sum().backward()
    torch.cuda.synchronize()
    out = context_parallel_attention(q, q, q, None, "ring", is_causal=True, transport="peer")
    if rank == 1:
        time.sleep(60)
        return
    out.sum().backward()
    torch.cuda.synchronize()
    print("nothing ended this process")


if __name__ == "__main__":
    main()
