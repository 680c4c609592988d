"""The models of the benchmark: their sizes, and how they are built with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its inputs; lengths are in tokens."""

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
    steps: int = 32  # tokens decoded per measurement
    head_dim: int = 128


class Shape(NamedTuple):
    """Sizes to measure, tiny ones to try the command, and what makes a model of some sizes."""

    sizes: Sizes
    tiny: Sizes
    build: Callable[[Sizes, torch.dtype], PreTrainedModel]


def llama(sizes: Sizes, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama."""
    config = LlamaConfig(
        **_common(sizes), max_position_embeddings=131072, attn_implementation="eager"
    )
    return LlamaForCausalLM._from_config(config, dtype=dtype)


def gemma4_global(sizes: Sizes, dtype: torch.dtype) -> PreTrainedModel:
    """Gemma 4's text model with global layers alone, whose heads are 512 wide.

    Values are the keys without their rotation, as in its larger models, and scores have no scale.
    """
    config = transformers.Gemma4TextConfig(
        **_common(sizes),
        global_head_dim=sizes.head_dim,
        num_global_key_value_heads=sizes.kv_heads,
        layer_types=["full_attention"] * sizes.layers,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=131072,
        attn_implementation="eager",
    )
    return transformers.Gemma4ForCausalLM._from_config(config, dtype=dtype)


def _common(sizes: Sizes) -> dict[str, int]:
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }


_TINY = Sizes(2, 64, 96, 4, 2, 128, 64, (4, 32), (2, 32), 64, (32, 64), (2,), (32,), 4, head_dim=16)
SHAPES = {
    "llama": Shape(Sizes(), _TINY, llama),
    # what one of eight GPUs has of a Llama 3 70B under tensor parallelism
    "llama-70b-slice": Shape(
        Sizes(hidden=8192, intermediate=3584, heads=8, kv_heads=1, vocab=16032),
        replace(_TINY, kv_heads=1),
        llama,
    ),
    "gemma4-global": Shape(
        Sizes(kv_heads=4, head_dim=512, vocab=32768, contexts=(4096, 16384)),
        replace(_TINY, head_dim=512),
        gemma4_global,
    ),
}


def build(shape: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of a shape with random weights, in eval mode."""
    torch.manual_seed(0)
    with torch.device(device):
        model = SHAPES[shape].build(sizes, dtype)
    return model.to(device).eval()
