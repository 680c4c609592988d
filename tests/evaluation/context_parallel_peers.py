"""What other packages need for the problems of `context_parallel_bench`: functions to be timed."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fa_ops import compat

Measure = Callable[[Callable[[], Tensor], list[Tensor]], dict]


def of_torch(whole: list[Tensor], is_plain: bool, measure: Measure) -> dict:
    """torch's context_parallel over SDPA, with key heads repeated; causal only."""
    from torch.distributed.tensor.experimental import context_parallel

    if not is_plain:
        return {"error": "has no such mask"}
    mesh = init_device_mesh(whole[0].device.type, (dist.get_world_size(),))
    group = whole[0].shape[1] // whole[1].shape[1]
    tensors = [whole[0].clone(), *(x.repeat_interleave(group, 1) for x in whole[1:])]
    shards = {"buffers": tensors, "buffer_seq_dims": [2, 2, 2], "no_restore_buffers": set(tensors)}
    try:
        with context_parallel(mesh, **shards):
            tensors = [x.requires_grad_() for x in tensors]
            attend = lambda: F.scaled_dot_product_attention(*tensors, is_causal=True)  # noqa: E731
            return measure(attend, tensors)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def of_ring_flash_attn(parts: list[Tensor], is_plain: bool, measure: Measure) -> dict:
    """The package ring-flash-attn in zigzag order, whose flash-attn is fa_ops's; causal only."""
    if not is_plain:
        return {"error": "has no such mask"}
    if importlib.util.find_spec("ring_flash_attn") is None:
        return {"error": "is not installed"}
    if parts[0].dtype == torch.float32:
        return {"error": "needs 16 bits"}
    compat.install("flash_attn")
    adapters = types.ModuleType("ring_flash_attn.adapters")  # imports what transformers 5 lacks
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault(adapters.__name__, adapters)
    try:
        from ring_flash_attn import zigzag_ring_flash_attn_func

        tensors = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in parts]
        attend = lambda: zigzag_ring_flash_attn_func(*tensors, causal=True)  # noqa: E731
        return measure(attend, tensors)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
