"""Multi-head latent attention (DeepSeek V2 and V3, and kin) on the latent cache.

transformers caches one latent of r numbers and one rotated key per token, and expands all of them
to keys and values of every head in each step. Decoding needs neither: with W_UK absorbed into the
query and W_UV into the output, every head attends the latents themselves, as one key head of
r + rope dimensions whose values are its first r.

Source: DeepSeek-AI, DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

# More queries than these expand: each costs three to four times the arithmetic when absorbed.
MAX_ABSORBED_QUERIES = 16


def install(module: ModuleType, is_ours: Callable[[object], bool]) -> bool:
    """Make the attention classes of a modeling module pass latents on. Idempotent.

    `is_ours(config)`: whether our attention function will be called. Returns whether there
    is such a class; one whose `expand_kv` takes other arguments is left alone.
    """
    found = False
    for value in list(vars(module).values()):
        if not (inspect.isclass(value) and "expand_kv" in vars(value)):
            continue
        original = value.expand_kv
        if hasattr(original, "_fa_ops_original"):
            found = True
        elif list(inspect.signature(original).parameters) == ["self", "kv_nope", "k_rot"]:
            value.expand_kv = _deferred(original, is_ours)
            found = True
    return found


def _deferred(original: Callable, is_ours: Callable[[object], bool]) -> Callable:
    @functools.wraps(original)
    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        if is_ours(self.config):
            return k_rot, kv_nope
        return original(self, kv_nope, k_rot)

    expand_kv._fa_ops_original = original
    return expand_kv


def is_latent(layer: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether key and value are what `expand_kv` was to expand."""
    patched = hasattr(getattr(type(layer), "expand_kv", None), "_fa_ops_original")
    return patched and key.shape[1] == 1 and key.shape[-1] == layer.qk_rope_head_dim


def expand(layer: nn.Module, k_rot: Tensor, kv_nope: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every head."""
    return type(layer).expand_kv._fa_ops_original(layer, kv_nope, k_rot)


def can_absorb(layer: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Few queries on a longer cache, and a plain projection, whose weight can be read."""
    project = layer.kv_b_proj
    plain = type(project) is nn.Linear and project.bias is None
    if not plain or not project.weight.dtype.is_floating_point:
        return False
    return 4 * query.shape[2] <= key.shape[2] and query.shape[2] <= MAX_ABSORBED_QUERIES


def absorb(
    layer: nn.Module, query: Tensor, k_rot: Tensor, kv_nope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query (B, Hq, Sq, r + rope), key (B, 1, Sk, r + rope), value (B, 1, Sk, r), and W_UV."""
    up_k, up_v = _up_projections(layer)
    q_nope, q_rot = query.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
    q_latent = torch.einsum("bhqn,hnr->bhqr", q_nope, up_k.to(query.dtype))
    key = torch.cat([kv_nope, k_rot], -1)  # values are a view of it: a kernel reads them once
    return torch.cat([q_latent, q_rot], -1), key, key[..., : kv_nope.shape[-1]], up_v


def _up_projections(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """W_UK (H, nope, r) and W_UV (H, Dv, r)."""
    widths = [layer.qk_nope_head_dim, layer.v_head_dim]
    weight = layer.kv_b_proj.weight
    return weight.view(-1, sum(widths), weight.shape[1]).split(widths, 1)


def project_out(out: Tensor, up_v: Tensor) -> Tensor:
    """(B, Sq, H, r) to (B, Sq, H, Dv)."""
    return torch.einsum("bqhr,hvr->bqhv", out, up_v.to(out.dtype)).contiguous()
