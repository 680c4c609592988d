"""Which e4m3 caches are converted to the dtype of query before a prompt attends them.

The products of a prompt take many times as long as the conversion of the keys of its rows.
"""

from __future__ import annotations

import torch

from fa_ops.call.call import Call, is_prefill

MAX_BYTES = 1 << 32  # of the converted cache


def error(call: Call) -> str | None:
    """Why such a cache is not converted, or None."""
    (q, k, v), tensors = call[:3], call.operands
    if not is_prefill(q):
        return (
            "converts e4m3 caches for 64 and more queries of a head that fill the device, got "
            f"{q.shape[2]} of {q.shape[0]} x {q.shape[1]} heads"
        )
    if q.dtype == torch.float16 and (tensors.k_scale is not None or tensors.v_scale is not None):
        return "converts no e4m3 caches with scales to float16, which may not hold their products"
    heads, keys = k.shape[2 if call.is_paged else 1], call.num_keys
    token = q.shape[0] * heads * (q.shape[3] + v.shape[3]) * q.element_size()
    most = 1 << (MAX_BYTES // token).bit_length() - 1 if token <= MAX_BYTES else 0
    if keys > most:  # a power of two, so that families of calls agree on it
        return f"converts e4m3 caches of at most {most} keys of such shapes, got {keys}"
    return None
