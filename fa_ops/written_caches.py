"""What memory the two caches that an append writes to may share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fa_ops import overlap
from fa_ops.call import CacheTensors
from fa_ops.checks import need
from fa_ops.types import Cache


def check(k: Tensor, v: Tensor, new: Cache | CacheTensors) -> None:
    """Raise ValueError for caches that share memory.

    Values that are the first features of the keys, as in MLA, may be written if their new values
    are those of the new keys too: then both writes are of the same numbers.
    """
    if not (k.numel() and v.numel()):
        return
    if not overlap.is_narrowed(v, k):
        message = "value_cache shares memory with key_cache, and both are written to: only {} may"
        is_shared = overlap.caches_share_memory(k, v, new.page_table is not None)
        need(not is_shared, message, f"key_cache[..., :{v.shape[-1]}]")
        return
    width = v.shape[-1]
    beginning = f"value_cache is the first {width} features of key_cache, which is written to: "
    need(new.rotary_cos is None, "{}rotary_cos, which rotates keys alone, must be None", beginning)
    message = "{}value must be the same features of key, in the same memory: pass key[..., :{}]"
    need(overlap.is_narrowed(new.value, new.key), message, beginning, width)
    scales = new.k_scale, new.v_scale
    is_same = scales[0] is scales[1] or (
        None not in scales and overlap.is_narrowed(scales[1], scales[0])
    )
    need(is_same, "{}k_scale and v_scale must be the same tensor", beginning)


def check_of(k: Tensor, v: Tensor) -> Callable[[Tensor, Tensor, CacheTensors], None]:
    """`check` for all caches with the shapes and strides of these; fast where they lie apart."""
    lowest, highest = -overlap.extent(v), overlap.extent(k)
    apart: set[int] = set()  # distances of caches that are interleaved but share no byte

    def check_again(k: Tensor, v: Tensor, new: CacheTensors) -> None:
        distance = v.data_ptr() - k.data_ptr()
        if lowest < distance < highest and distance not in apart:
            check(k, v, new)
            if distance:
                apart.add(distance)

    return check_again
