"""The functions that diffusers calls for the attention backends "fa_ops" and "fa_ops_8bit".

They have the arguments of diffusers' own backends, which selects what it passes by their names.
Query, key and value are (B, S, H, D), and positions are those of scaled_dot_product_attention. Last
comes what explains which of them runs in a model.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Collection
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch.nn.functional
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _templated_context_parallel_attention,
)
from torch import Tensor, nn
from transformers.utils import logging

import fa_ops
from fa_ops.call.options import MAX_HEAD_DIM, dtype_name
from fa_ops.tracing import is_compiling
from hf_integration.encodings import is_readable, reads_are_free
from hf_integration.explanations import Explanation, Layers, backend_of, example, modules_of
from hf_integration.hooks import EIGHT_BIT, NAME

if TYPE_CHECKING:
    from diffusers import ContextParallelConfig, ParallelConfig

_logger = logging.get_logger(__name__)
Result = Tensor | tuple[Tensor, Tensor]


def fa_ops_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: ParallelConfig | None = None,
) -> Result:
    """Compute one attention call of a diffusers model.

    Args:
        query: ``(B, Sq, Hq, D)``.
        key: ``(B, Sk, Hkv, D)``.
        value: ``(B, Sk, Hkv, Dv)``.
        attn_mask: bool or float, ``(B, Sk)`` for keys, or broadcastable to ``(B, Hq, Sq, Sk)``.
        dropout_p: probability of dropping a softmax weight.
        is_causal: query ``i`` attends keys ``j <= i``, also where ``Sq`` and ``Sk`` differ.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``.
        enable_gqa: not needed; key heads may always be fewer than query heads.
        return_lse: also return the logarithm of the softmax's denominator, ``(B, Sq, Hq)``.
        _parallel_config: the sequence is distributed by diffusers' templates.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError: a mask with ``is_causal``; what :func:`check_parallel` refuses.
        NotImplementedError: no backend can run the call.
    """
    if _parallel_config is not None:
        config = _parallel_config.context_parallel_config
        check_parallel(config, attn_mask, dropout_p, is_causal)
        return _templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
            forward_op=forward_op, backward_op=backward_op,
            _parallel_config=_parallel_config,
        )  # fmt: skip
    key, value, options = with_mask(query, key, value, attn_mask, is_causal)
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    result = fa_ops.attention(
        *heads_first, dropout_p=dropout_p, scale=scale, return_lse=return_lse, **options
    )
    return _tokens_first(result)


def fa_ops_8bit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Result:
    """Compute one attention call with 8-bit products, as :func:`fa_ops_attention`.

    Calls whose mask is more than a length or a range of keys for each row have 16-bit products,
    with a warning. Such a mask is recognised where the host can read it without waiting.

    Raises ValueError where a gradient would be recorded, and for dropout.
    """
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if dropout_p or is_trained:
        raise ValueError(
            "the attention backend 'fa_ops_8bit' is for inference: run the model under "
            "torch.no_grad(), or train with 'fa_ops'"
        )
    seen_key, seen_value, options = with_mask(query, key, value, attn_mask, is_causal)
    if "attn_mask" in options:
        if not is_compiling():
            _logger.warning_once(
                "a mask that is not known to be one run of keys: such calls of 'fa_ops_8bit' have "
                "16-bit products."
            )
        return fa_ops_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, return_lse
        )
    heads_first = (x.transpose(1, 2) for x in (query, seen_key, seen_value))
    result = fa_ops.quantized_attention(*heads_first, scale=scale, return_lse=return_lse, **options)
    return _tokens_first(result)


def with_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The keys and values that are attended, and the options that express mask and causality.

    Tensors are (B, S, H, D). fa_ops aligns causality at the last key, and SDPA at the first one.
    """
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a Tensor or None, got {type(mask).__name__}")
    if not is_causal:
        return key, value, mask_arguments(mask, key)
    if mask is not None:
        raise ValueError("attn_mask must be None with is_causal=True, as in SDPA")
    Sq, Sk = query.shape[1], key.shape[1]
    if Sq > Sk:
        return key, value, {"window": (None, Sq - Sk)}
    return key[:, :Sq], value[:, :Sq], {"is_causal": True}


def _tokens_first(result: Result) -> Result:
    """(B, S, H, ...) for (B, H, S, ...)."""
    if isinstance(result, Tensor):
        return result.transpose(1, 2)
    out, lse = result
    return out.transpose(1, 2), lse.transpose(1, 2)


# Masks as arguments of fa_ops, of which lengths and ranges of keys cost the least.


# How often each encoding was made (not while tracing).
mask_counts: Counter[str] = Counter()


def mask_arguments(mask: Tensor | None, key: Tensor) -> dict[str, Tensor]:
    """The keyword arguments of an attention call that express a mask.

    Args:
        mask: bool or float, ``(B, Sk)`` for keys, or broadcastable to ``(B, H, Sq, Sk)``.
        key: ``(B, Sk, H, D)``.

    Returns:
        ``kv_lens`` or ``key_ranges`` where the mask keeps one run of keys for all queries of a row
        and the host can read it without waiting; elsewhere ``attn_mask``, and for masks of keys
        also ``kv_lens``, behind which no key is kept.
    """
    if mask is None:
        return {}
    if mask.shape == key.shape[:2]:
        mask = mask[:, None, None]
    if mask.dtype != torch.bool or mask.dim() != 4 or not mask.shape[1] == mask.shape[2] == 1:
        return _counted("dense", attn_mask=mask)
    kept = mask[:, 0, 0].expand(*key.shape[:2])
    ends = (kept * torch.arange(1, kept.shape[1] + 1, device=mask.device)).amax(1).int()
    if is_compiling() or not (reads_are_free(mask.device) and is_readable(mask)):
        return _counted("keys", attn_mask=mask, kv_lens=ends)
    starts = kept.int().argmax(1).int()
    if not torch.equal(ends - starts, kept.sum(1)):
        return _counted("keys", attn_mask=mask, kv_lens=ends)
    if not starts.any():
        return _counted("lengths", kv_lens=ends)
    return _counted("ranges", key_ranges=torch.stack([starts, ends], -1)[:, None, None])


def _counted(encoding: str, **found: Tensor) -> dict[str, Tensor]:
    if not is_compiling():
        mask_counts[encoding] += 1
    return found


# The forward and backward pass of one part of a distributed sequence, for diffusers' templates.
#
# A template distributes the sequence (ring, Ulysses or both) and calls the two functions inside an
# autograd function of its own, with tensors (B, S, H, D) and lse (B, S, H).


_attend, _differentiate = torch.ops.fa.attention_with_lse, torch.ops.fa.attention_backward


def check_parallel(
    config: ContextParallelConfig, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> None:
    """Raise ValueError for arguments that the templates would treat wrongly.

    Causality would be that within each block of keys, dropout would drop the same weights of each
    block, and a ring would apply the mask of this process to the keys of all others.
    """
    if is_causal:
        raise ValueError("is_causal must be False with context parallelism, got True")
    if dropout_p:
        raise ValueError(f"dropout_p must be 0 with context parallelism, got {dropout_p}")
    if attn_mask is None:
        return
    if config.ring_degree > 1:
        raise ValueError(
            f"attn_mask must be None with ring_degree {config.ring_degree}: use ulysses_degree"
        )
    if attn_mask.requires_grad:
        raise ValueError("attn_mask must not require grad with context parallelism")


def forward_op(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this process's queries to a block of keys: out, or (out, lse)."""
    options = {"scale": scale, **mask_arguments(attn_mask, key)}
    out, lse = _attend(*_transposed(query, key, value), **options)
    out, lse = _transposed(out, lse)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.fa_ops_options = options
    return (out, lse) if return_lse else out


def backward_op(
    ctx: Any,
    grad_out: Tensor,
    *args: object,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    A ring passes each block of keys with the out and lse of all blocks, from which the weights
    within the block follow. What is not passed is what `forward_op` saved.
    """
    given = query, key, value, out, lse
    query, key, value, out, lse = (
        saved if tensor is None else tensor for tensor, saved in zip(given, ctx.saved_tensors)
    )
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    tensors = _transposed(grad_out.contiguous(), query, key, value, out)
    lse = lse.to(wide).transpose(1, 2).contiguous()
    grads = _differentiate(tensors[0], None, *tensors[1:], lse, **ctx.fa_ops_options)
    return _transposed(*grads[:3])


def _transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)


# The SDPA calls of models whose processors do not ask diffusers for a backend.
#
# The processors of Stable Diffusion, SDXL, Stable Diffusion 3, CogVideoX and others call
# `F.scaled_dot_product_attention` themselves, so that no backend of diffusers has an effect on
# them. In the modules of such processors, `F` becomes a copy of torch.nn.functional in which this
# function runs fa_ops while "fa_ops" is the active backend.


_MAX_SINGLE_DIM = (
    256  # in float32 wider heads are slow without tf32: a kernel has few queries a tile
)
_functions = {NAME: fa_ops_attention, EIGHT_BIT: fa_ops_8bit_attention}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA by the active backend of diffusers if that is ours, and by torch if it is not.

    torch also computes calls of tensors that do not have four dimensions, and on a GPU those with
    head dimensions that no kernel has, or none that is fast, as in the attention of an autoencoder
    in float32, which has one head.
    """
    attend = _functions.get(_AttentionBackendRegistry._active_backend.value)
    if attend is None or query.dim() != 4 or _is_too_wide(query, value):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dim() == 2:
        attn_mask = attn_mask[None]  # (Sq, Sk), which diffusers' backends would take for (B, Sk)
    tokens_first = (x.transpose(1, 2) for x in (query, key, value))
    out = attend(*tokens_first, attn_mask, dropout_p, is_causal, scale)
    return out.transpose(1, 2)


def _is_too_wide(query: Tensor, value: Tensor) -> bool:
    widest = max(query.shape[-1], value.shape[-1])
    limit = _MAX_SINGLE_DIM if query.dtype == torch.float32 else MAX_HEAD_DIM
    if not query.is_cuda or widest <= limit:
        return False
    if not is_compiling():
        _logger.warning_once(
            f"no fast GPU kernel of fa_ops has head dimension {widest} in "
            f"{dtype_name(query.dtype)}: such calls of scaled_dot_product_attention run in torch."
        )
    return True


def answer_sdpa(module: ModuleType) -> None:
    """Replace `F` in a module of diffusers. Idempotent."""
    if getattr(module, "F", None) is torch.nn.functional:
        module.F = _functional


def answers_sdpa(module: ModuleType) -> bool:
    """Whether the SDPA calls of a module are answered."""
    return getattr(module, "F", None) is _functional


def processor_modules(model: nn.Module) -> set[ModuleType]:
    """The modules with the code of a model's attention processors."""
    layers = (layer for layer in model.modules() if getattr(layer, "processor", None) is not None)
    return {sys.modules[type(layer.processor).__module__] for layer in layers}


_functional = ModuleType(__name__ + ".functional", torch.nn.functional.__doc__)
_functional.__dict__.update(
    {name: value for name, value in vars(torch.nn.functional).items() if name[:2] != "__"}
)
_functional.scaled_dot_product_attention = scaled_dot_product_attention


# Which attention runs in each layer of a model, and why.


def explain(model: nn.Module) -> Explanation:
    """Explain which attention runs in each layer of a diffusers model, without running it.

    Args:
        model: a transformer or UNet; of a pipeline, pass ``pipeline.transformer`` or
            ``pipeline.unet``.

    Raises:
        TypeError: the model is no module, such as a pipeline.

    Examples:
        >>> print(hf_integration.diffusers.explain(pipeline.transformer))
        transformer_blocks.0.attn and 18 more (FluxAttnProcessor): fa_ops, backend hopper
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; of a pipeline, pass "
            "pipeline.transformer or pipeline.unet"
        )
    groups: dict[tuple, list[str]] = {}
    for name, layer in model.named_modules():
        if getattr(layer, "processor", None) is not None:
            groups.setdefault((type(layer.processor).__name__, *_of_layer(layer)), []).append(name)
    layers = [Layers(names, *key) for key, names in groups.items()]
    return Explanation(layers, dict(mask_counts), {})


def _of_layer(layer: nn.Module) -> tuple[str, str]:
    """The attention that runs in a layer, and why."""
    module = sys.modules[type(layer.processor).__module__]
    active = _AttentionBackendRegistry._active_backend
    chosen = getattr(layer.processor, "_attention_backend", None) or active
    chosen = getattr(chosen, "value", chosen)
    notes = []
    if not hasattr(layer.processor, "_attention_backend"):
        if "scaled_dot_product_attention(" not in inspect.getsource(type(layer.processor)):
            return "its own attention code", "it neither asks for a backend nor calls SDPA"
        chosen, notes = active.value, ["it calls SDPA itself"]
    set_it = "model.set_attention_backend('fa_ops') changes it"
    if chosen not in (NAME, EIGHT_BIT):
        return chosen, "; ".join([*notes, set_it])
    if notes and not answers_sdpa(module):
        return "torch's scaled_dot_product_attention", "; ".join([*notes, set_it])
    if chosen == EIGHT_BIT:
        notes.append("8-bit products")
    D = _head_dim(layer)
    tensors = example(layer, D, D)
    if tensors is None:
        return NAME, "; ".join(["its head dimension is unknown", *notes])
    runs, refused = backend_of(*tensors)
    return runs, "; ".join([*refused, *notes])


def _head_dim(layer: nn.Module) -> int | None:
    heads, width = getattr(layer, "heads", None), getattr(layer, "inner_dim", None)
    return getattr(layer, "head_dim", None) or (width // heads if heads and width else None)


# Modules of a diffusers model that keep 16-bit products beside "fa_ops_8bit".


def keep_16_bit(model: nn.Module, names: Collection[str]) -> None:
    """Give the attention of some modules the backend "fa_ops", in a model with "fa_ops_8bit".

    The first and last blocks of image and video models are often the most sensitive.
    `set_attention_backend` sets the backend of all modules again.

    Args:
        model: a model after `model.set_attention_backend("fa_ops_8bit")`.
        names: modules as `model.named_modules()` has them, such as ``"blocks.0"``; everything
            inside them is meant.

    Raises:
        TypeError: model is no module, or names is no collection of strings.
        ValueError: the model has no module of a name, or nothing inside has the backend
            "fa_ops_8bit".

    Examples:
        >>> transformer.set_attention_backend("fa_ops_8bit")
        >>> hf_integration.diffusers.keep_16_bit(transformer, ["blocks.0", "blocks.39"])
    """
    chosen = {}
    for name, whole in modules_of(model, names).items():
        processors = [getattr(module, "processor", None) for module in whole.modules()]
        found = [x for x in processors if getattr(x, "_attention_backend", None) == EIGHT_BIT]
        if not found:
            raise ValueError(
                f"names must be modules with the backend {EIGHT_BIT!r}, {name!r} has none: call "
                f"set_attention_backend({EIGHT_BIT!r}) first"
            )
        chosen[name] = found
    for processors in chosen.values():
        for processor in processors:
            processor._attention_backend = AttentionBackendName(NAME)
