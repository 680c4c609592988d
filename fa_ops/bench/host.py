"""Host time of an eager call, and where it goes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops import dispatch
from fa_ops.bench.timing import Run
from fa_ops.types import Spec

SHAPE = (1, 8, 64, 64)


def runs(device: str, shape: tuple[int, ...] = SHAPE) -> dict[str, Run]:
    """Calls without gradient: the doors from the outside in, SDPA, and torch's own floor."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    spec = Spec()
    module = dispatch.select(q, k, v, spec)
    backend = module.__name__.rsplit(".", 1)[-1]
    operator = torch.ops.fa.attention.default

    def sdpa(kernel: SDPBackend) -> Run:
        return Run(
            lambda _: F.scaled_dot_product_attention(q, k, v), context=lambda: sdpa_kernel(kernel)
        )

    peers = {"F.sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION)}
    if device == "cuda":
        peers = {"F.sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)} | peers
    return {
        "fa_ops.attention": Run(lambda _: fa_ops.attention(q, k, v)),
        "  inside: torch.ops.fa.attention": Run(lambda _: operator(q, k, v)),
        "  inside: dispatch": Run(lambda _: dispatch.select(q, k, v, spec)),
        f"  inside: backend {backend}": Run(lambda _: module.forward(q, k, v, spec)),
        **peers,
        "torch.empty_like": Run(lambda _: torch.empty_like(q)),
    }
