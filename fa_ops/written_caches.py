"""Checks of the memory that the two caches of an append may share."""

from __future__ import annotations

from torch import Tensor

from fa_ops import overlap
from fa_ops.call import CacheTensors, Run
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


def checking(run: Run, k: Tensor, v: Tensor) -> Run:
    """`run` with `check` before it, for all caches with the geometry of these.

    Fast where they lie apart, and where values are the first features of the keys.
    """
    lowest, highest = -overlap.extent(v), overlap.extent(k)
    legal: set[int] = set()  # distances of caches within each other's bounds

    def checked(q: Tensor, k: Tensor, v: Tensor, new: CacheTensors, with_lse: bool = True):
        distance = v.data_ptr() - k.data_ptr()
        if lowest < distance < highest and (
            distance not in legal or not (distance or _begin_together(new))
        ):
            check(k, v, new)
            legal.add(distance)
        return run(q, k, v, new, with_lse)

    return checked


def _begin_together(new: CacheTensors) -> bool:
    """Whether new values and their scales begin where new keys and theirs do.

    Then `check` finds of values in keys what it found of others with the same geometry.
    """
    scales = new.k_scale, new.v_scale
    are_same = scales[0] is scales[1] or (
        not any(t is None for t in scales) and scales[0].data_ptr() == scales[1].data_ptr()
    )
    return are_same and new.key.data_ptr() == new.value.data_ptr()
