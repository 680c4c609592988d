"""Compiling ahead of the first call, into the disk cache. Needs NVRTC but no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fa_ops.backends.hopper import compiler, decode, dense_backward, dense_forward, mla
from fa_ops.backends.hopper.configs import (
    backward_config,
    decode_config,
    forward_config,
    mla_config,
)

HEAD_DIMS = (64, 128, 192, 256)  # those between use the next one's kernels
DTYPES = (torch.bfloat16, torch.float16)
# full, causal, with a window, and with key ranges
_FORWARDS = ({}, {"ragged": True}, {"ragged": True, "left": True}, {"ranges": True})
_PAGES = (0, 16, 64)  # keys of a cache's page; 0: contiguous
_BACKWARDS = ({}, {"ragged": True}, {"ranges": True})


class Variant(NamedTuple):
    """A translation unit: `compiler.cubin(*variant)` compiles it."""

    kind: str
    defines: dict[str, int]


def variants(
    head_dims: Sequence[int] = HEAD_DIMS, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Variant]:
    """The kernels of calls without dense masks, dropout, softcap, ALiBi or sinks: forward,
    backward, and decoding with up to 8 queries of a kv head, or over a latent cache."""
    for D, dtype in itertools.product(head_dims, dtypes):
        config = forward_config(D, D)
        for features in _FORWARDS:
            yield Variant("forward", dense_forward.kernel_defines(config, dtype, **features))
        if D == 64:
            short = forward_config(D, D, is_short=True)
            yield Variant("forward", dense_forward.kernel_defines(short, dtype, ragged=True))
        for page in _PAGES:
            config = decode_config(D, D, 8, page)
            yield Variant("decode", decode.kernel_defines(config, dtype, paged=page > 0))
        config = backward_config(D, D)
        for features in _BACKWARDS:
            yield Variant("backward", dense_backward.kernel_defines(config, dtype, **features))
    for dtype, page in itertools.product(dtypes, _PAGES):
        defines = mla.kernel_defines(mla_config(page), dtype, paged=page > 0)
        yield Variant("mla", defines)


def compile_variant(variant: Variant) -> bool:
    """Compile into the cache; False where the cache had it.

    Raises:
        CompileError: NVRTC is missing, or refuses the source.
    """
    if compiler.is_cached(*variant):
        return False
    compiler.cubin(*variant)
    return True
