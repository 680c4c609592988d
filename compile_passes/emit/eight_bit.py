"""The choice of 8-bit products for fused attention, if requested, and the call for them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

import torch
from torch import fx

from compile_passes.emit.emitter import Emitter
from compile_passes.ir.axes import Group
from compile_passes.masks.classified_masks import ClassifiedMasks
from compile_passes.match.attention_site import AttentionSite
from fa_ops.call.options import MAX_DECODING_QUERIES, MAX_QUANTIZED_HEAD_DIM

QUANTIZED = torch.ops.fa.quantized_attention.default
_DTYPES = torch.float16, torch.bfloat16, torch.float32
# `_modules['blocks']._modules['0']` and `getattr(blocks, '0')` of older releases, `L['self']`
_ATTRIBUTE = re.compile(r"\._modules\['(\w+)'\]|\['(\w+)'\]")
_GETATTR = re.compile(r"getattr\(([^()]*), '(\w+)'\)")


@dataclasses.dataclass(frozen=True)
class QuantizedProducts:
    """The option: attention of modules with these names keeps 16-bit products."""

    sixteen_bit: tuple[str, ...] = ()

    @classmethod
    def of(cls, eight_bit: bool, sixteen_bit: Collection[str]) -> QuantizedProducts | None:
        """The options among the arguments of `install`; None without 8-bit products.

        Raises TypeError and ValueError for arguments that are wrong.
        """
        if not isinstance(eight_bit, bool):
            raise TypeError(f"eight_bit must be a bool, got {eight_bit!r}")
        if isinstance(sixteen_bit, str) or not all(isinstance(x, str) and x for x in sixteen_bit):
            raise TypeError(f"sixteen_bit must hold names of modules, got {sixteen_bit!r}")
        if sixteen_bit and not eight_bit:
            raise ValueError(f"sixteen_bit must be empty without eight_bit, got {sixteen_bit!r}")
        return cls(tuple(sorted(sixteen_bit))) if eight_bit else None

    def refusal(self, site: AttentionSite, masks: ClassifiedMasks) -> str | None:
        """Why an attention keeps 16-bit products, or None."""
        if site.requires_grad:
            return "a gradient may be recorded"
        if site.core.weights.dropout_p:
            return "dropout"
        if masks.alibi:
            return "ALiBi"
        if masks.is_dense:
            return "a dense mask"
        if site.dtype not in _DTYPES:
            return str(site.dtype)
        sizes = _size(site.head_dim), _size(site.features)
        if site.q.value.tensor.is_cuda and max(sizes) > MAX_QUANTIZED_HEAD_DIM:
            return f"a head dimension above {MAX_QUANTIZED_HEAD_DIM}"
        queries, keys = _size(site.queries), _size(site.keys)
        if 0 < queries <= MAX_DECODING_QUERIES and not 0 < keys <= queries:
            return f"at most {MAX_DECODING_QUERIES} queries, for which all keys would be quantised"
        path = module_path(site.core.weights.softmax.node)
        name = next((name for name in self.sixteen_bit if _contains(path, name)), None)
        return f"sixteen_bit names {name}" if name else None


def _size(group: Group) -> int:
    """The number of elements of axes; 0 where it is not known."""
    total = 1
    for axis in group:
        total *= axis.size if type(axis.size) is int else 0
    return total


def module_path(node: fx.Node) -> str:
    """The name of the module that computes a node, after what the graph calls its root."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    while (shorter := _GETATTR.sub(r"\1.\2", path)) != path:
        path = shorter
    return _ATTRIBUTE.sub(lambda found: f".{found[1] or found[2]}", path)


def _contains(path: str, name: str) -> bool:
    """Whether the parts of a name are next to one another in a path."""
    return f".{name}." in f".{path}."


def emit_call(emitter: Emitter, arguments: tuple, options: dict[str, object]) -> fx.Node:
    """The call with 8-bit products in place of one of attention; its results are out and lse."""
    *tensors, mask, _, is_causal = arguments
    assert mask is None
    return emitter.function(QUANTIZED, *tensors, None, None, None, is_causal, **options)
