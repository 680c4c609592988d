"""Compiles kernels into the disk cache ahead of the first call. Needs NVRTC but no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fa_ops.backends.hopper import backward, decode, eight_bit, forward
from fa_ops.backends.hopper.configs import (
    MAX_NARROW_DIM,
    BackwardConfig,
    backward_config,
    decode_config,
    forward_config,
    mla_config,
    quantized_config,
)
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.backends.hopper.runtime.launch import Entry
from fa_ops.call.options import MAX_HEAD_DIM, NO_SCALES, PAGE_SCALES, ROW_SCALES

HEAD_DIMS = tuple(range(8, MAX_HEAD_DIM + 1, 8))
COMMON_HEAD_DIMS = (64, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16)
# full, causal, with a window, with key ranges
_FORWARDS = ({}, {"window": True}, {"window": True, "left": True}, {"ranges": True})
_PAGES = (0, 16, 64)  # keys of a cache's page; 0: contiguous
_DECODED_PAGES = (*_PAGES, 1)  # 1: of any number that no copy brings whole


class Variant(NamedTuple):
    """The kernels that similar calls launch: the arguments of `compiler.cubins`."""

    kind: str
    entries: tuple[str, ...]
    defines: dict[str, int]


def variants(
    head_dims: Sequence[int] = COMMON_HEAD_DIMS, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Variant]:
    """The kernels of calls without dense masks, dropout, softcap, ALiBi and sinks.

    These are forward, backward, causal prefill of a cache, decoding with up to 8 queries of a KV
    head, decoding over a latent cache, and what writes new keys to a cache. Over 256 features there
    are no kernels that attend a cache.
    """
    for dtype in dtypes:
        yield from _appends(dtype, dtype)
    for D, dtype in itertools.product(head_dims, dtypes):
        yield from _forwards(D, dtype)
        for page in _PAGES if D <= MAX_NARROW_DIM else ():
            config = forward_config(D, D, page=page)
            defines = macros(config, dtype, window=True, kv_lens=True)
            yield Variant("forward", ("forward",), defines)
        for page in _DECODED_PAGES if D <= MAX_NARROW_DIM else ():
            config = decode_config(D, D, 8, page)
            defines = macros(config, dtype, paged=page > 0)
            yield Variant("decode", _names(decode.entries_of(config)), defines)
        for config, features in dict.fromkeys(_backwards(D)):
            defines = macros(config, dtype, **dict(features))
            entries = _names(backward.entries_of(config, defines))
            yield Variant("backward", entries, defines)
    for dtype, page in itertools.product(dtypes, _DECODED_PAGES):
        config = mla_config(page)
        defines = macros(config, dtype, paged=page > 0)
        yield Variant("mla", _names(decode.entries_of(config)), defines)


def _appends(dtype: torch.dtype, cached: torch.dtype) -> Iterator[Variant]:
    """Without rotation, and with tables in float32 and in the dtype of the query."""
    for angles in (None, torch.float32, dtype):
        yield Variant("append", ("append",), decode.append_defines(dtype, cached, angles))


def _backwards(D: int) -> Iterator[tuple[BackwardConfig, tuple[tuple[str, bool], ...]]]:
    """Configurations and features of backward passes, groups of query heads whole or in parts."""
    for name in ("", "window", "ranges"):
        features = ((name, True),) if name else ()
        for pairs, split in itertools.product((False, True), repeat=2):
            config = backward_config(D, D, prefers_pairs=pairs, differs_by_row=name == "ranges")
            yield config, (*features, ("split", split))
        if name != "ranges":
            for sums_rows in (False, True):
                config = backward_config(D, D, whole_heads=True, sums_rows=sums_rows)
                yield config, (*features, ("split", False))


def _forwards(D: int, dtype: torch.dtype) -> Iterator[Variant]:
    config = forward_config(D, D)
    for features in _FORWARDS:
        defines = macros(config, dtype, **features)
        yield Variant(config.kernel, (config.kernel,), defines)


def eight_bit_variants(
    head_dims: Sequence[int] = COMMON_HEAD_DIMS, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Variant]:
    """The kernels of `quantized_attention` with its defaults, and of `attention` of e4m3 tensors.

    Full and causal, for the head dims that the kernels have. And those of e4m3 caches, with up to 8
    queries of a KV head, and without scales of tokens.
    """
    for dtype in dtypes:
        yield Variant("dequantize", ("dequantize",), forward.dequantize_defines(dtype))
        yield from _appends(dtype, eight_bit.E4M3)
    narrow = [D for D in head_dims if D <= MAX_NARROW_DIM]
    for D, dtype, page in itertools.product(narrow, dtypes, _DECODED_PAGES):
        for scales in (NO_SCALES, ROW_SCALES, PAGE_SCALES)[: 3 if page else 2]:
            config = decode_config(D, D, 8, page, is_e4m3=True, scales=scales)
            defines = macros(config, dtype, paged=page > 0)
            yield Variant("decode", _names(decode.entries_of(config)), defines)
    for D in filter(eight_bit.has_head_dim, head_dims):
        for window in (False, True):
            config = quantized_config(D, D, has_16_bits=True)
            for dtype in dtypes:
                defines = macros(config, dtype, window=window)
                yield Variant("quantized", ("quantized",), defines)
            for head_scales in (False, True):
                scale_defines = macros(
                    quantized_config(D, D), torch.bfloat16, is_int8=False, window=window,
                    signs=True, head_scales=head_scales,
                )  # fmt: skip
                yield Variant("quantized", ("quantized",), scale_defines)
        for dtype in dtypes:
            defines = eight_bit.quantize_defines(dtype, D, D)
            yield Variant("quantize", ("quantize",), defines)
        yield Variant("scaled", ("scaled",), eight_bit.e4m3_defines(D))


def _names(entries: Iterable[Entry]) -> tuple[str, ...]:
    return tuple(entry.name for entry in entries)


def compile_variant(variant: Variant) -> int:
    """Compile a variant into the cache; returns the number of kernels that were missing.

    Raises:
        CompileError: NVRTC is missing, or refuses a source.
    """
    kind, entries, defines = variant
    missing = nvrtc.uncached(kind, entries, defines)
    nvrtc.cubins(kind, missing, defines)
    return len(missing)
