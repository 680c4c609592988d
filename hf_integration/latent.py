"""Multi-head latent attention (DeepSeek V2, V3 and similar models) on the latent cache.

transformers caches one latent of r numbers and one rotated key per token, and in each step expands
all of them to the keys and values of every head. Decoding does not need that: with W_UK absorbed
into the query and W_UV into the output, every head attends the latents themselves, as one key head
of r + rope dimensions whose values are its first r dimensions.

Source: DeepSeek-AI, DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

# Calls with more queries expand: absorbed ones take three to four times the arithmetic per query.
MAX_ABSORBED_QUERIES = 16


def install(module: ModuleType, is_ours: Callable[[object], bool]) -> bool:
    """Make the attention classes of a modeling module pass latents unexpanded. Idempotent.

    `is_ours(config)` is whether our attention function will be called. Returns whether there is a
    class to patch; one whose `expand_kv` has other parameters is not patched.
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
    """Whether key and value are latents that `expand_kv` did not expand."""
    patched = hasattr(getattr(type(layer), "expand_kv", None), "_fa_ops_original")
    return patched and key.shape[1] == 1 and key.shape[-1] == layer.qk_rope_head_dim


def expand(layer: nn.Module, k_rot: Tensor, kv_nope: Tensor) -> tuple[Tensor, Tensor]:
    """Expand latents to the keys and values of every head."""
    return type(layer).expand_kv._fa_ops_original(layer, kv_nope, k_rot)


def can_absorb(layer: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether there are few queries on a longer cache, and the projection is a plain weight."""
    project = layer.kv_b_proj
    plain = type(project) is nn.Linear and project.bias is None
    if not plain or not project.weight.dtype.is_floating_point:
        return False
    return 4 * query.shape[2] <= key.shape[2] and query.shape[2] <= MAX_ABSORBED_QUERIES


def absorb(
    layer: nn.Module, query: Tensor, k_rot: Tensor, kv_nope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query (B, Hq, Sq, r + rope), key (B, 1, Sk, r + rope), value (B, 1, Sk, r), W_UV."""
    up_k, up_v = _up_projections(layer)
    q_nope, q_rot = query.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
    q_latent = torch.einsum("bhqn,hnr->bhqr", q_nope, up_k.to(query.dtype))
    key = torch.cat([kv_nope, k_rot], -1)  # values are a view of it, so a kernel reads them once
    return torch.cat([q_latent, q_rot], -1), key, key[..., : kv_nope.shape[-1]], up_v


def _up_projections(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """W_UK (H, nope, r) and W_UV (H, Dv, r)."""
    widths = [layer.qk_nope_head_dim, layer.v_head_dim]
    weight = layer.kv_b_proj.weight
    return weight.view(-1, sum(widths), weight.shape[1]).split(widths, 1)


def project_out(out: Tensor, up_v: Tensor) -> Tensor:
    """Project the output from latents (B, Sq, H, r) to values (B, Sq, H, Dv)."""
    return torch.einsum("bqhr,hvr->bqhv", out, up_v.to(out.dtype)).contiguous()
