"""More queries of a kv head than decoding attends at once: the dense forward kernel over a cache.

It looks pages up in their table. Where tiles of queries are too few for the device, each attends a
part of the keys (`tiling`). e4m3 caches are converted first.
"""

from __future__ import annotations

from torch import Tensor

from fa_ops.backends import conversion
from fa_ops.backends.hopper import decode, dense_forward, dequantize
from fa_ops.backends.hopper.configs import padded
from fa_ops.backends.hopper.problem import MISALIGNED, page_error, tma_aligned
from fa_ops.call import CACHED, CacheTensors, Call, Run, general
from fa_ops.types import Cache, DenseTensors, Spec


def cache_error(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> str | None:
    """Why the kernel cannot attend such a cache, or None."""
    if spec.key_ranges is not None:
        return f"has no key_ranges for more than {decode.MAX_ROWS} queries of a kv head"
    D, Dv = q.shape[3], v.shape[3]
    if padded(Dv) > padded(D):
        return f"needs a value head dim that is not the larger one, got {D} and {Dv}"
    if cache.page_table is not None and (reason := page_error(k.shape[1])):
        return reason
    is_e4m3 = k.dtype == dequantize.E4M3
    reason = decode.memory_error(q, k, v, cache, spec, (dequantize.E4M3,) if is_e4m3 else ())
    return conversion.error(q, k, v, cache) if is_e4m3 and reason is None else reason


def forward(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq)."""
    table = cache.page_table
    if k.dtype == dequantize.E4M3:
        k, v = map(tma_aligned, (k, v))
        tensors = Call(CACHED, q, k, v, spec, cache=cache).tensors
        k, v, table = dequantize.converter(q, k, v, cache).run(k, v, tensors)
    return dense_forward.forward(q, *_by_head(k, v, table), spec, table=table)


def prepare(call: Call) -> Run:
    """A function that runs cached calls with the geometry of this one."""
    k, v, table = call.key, call.value, call.cache.page_table
    converter = None
    if k.dtype == dequantize.E4M3:
        converter = dequantize.converter(call.query, k, v, call.cache)
        k, v, table = converter.empty()
    k, v = _by_head(k, v, table)
    attend = dense_forward.prepare_attention(call.query, k, v, call.spec, table)
    if attend is None:
        return general("prefill", forward).prepare(call)
    options = call.without_tensors()

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: CacheTensors, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        t, table = tensors, tensors.page_table
        if converter is not None:
            if (k.data_ptr() | v.data_ptr()) & MISALIGNED:
                return forward(q, k, v, *options.arguments_with(tensors))
            k, v, table = converter.run(k, v, tensors)
        small = DenseTensors(None, t.alibi_slopes, t.sinks, t.kv_lens)
        return attend(q, *_by_head(k, v, table), small, with_lse, table)

    return run


def _by_head(k: Tensor, v: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The cache with heads before tokens; in pages the tokens come first."""
    return (k, v) if table is None else (k.transpose(1, 2), v.transpose(1, 2))
