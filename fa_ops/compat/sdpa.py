"""Run `F.scaled_dot_product_attention` on the kernels of fa_ops instead of torch's flash kernel:

    import fa_ops.compat.sdpa
    torch.nn.attention.activate_flash_attention_impl("fa_ops")
    ...
    torch.nn.attention.restore_flash_attention_impl()

Importing the module only registers the name. While it is active, calls that torch dispatches to its
flash kernel on CUDA (no mask, 16 bits, allowed by `sdpa_kernel`) run `fa::attention`, in eager mode
and under `torch.compile`, forward and backward. So do jagged NestedTensors and
`torch.nn.attention.varlen.varlen_attn`, with `fa::attention_varlen`. Dropout, the debug mask, and
what no backend of fa_ops supports go to the kernel that was there before, with a warning, once.
"""

from __future__ import annotations

import torch
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from fa_ops.compat.aten_flash import KERNELS
from fa_ops.compat.installation import Replacement

NAME = "fa_ops"


class Handle:
    """The registration of the kernels, which torch keeps while they are active."""

    def __init__(self, key: str) -> None:
        replacements = {
            name: Replacement(name, key, kernel)
            for name, kernel in KERNELS.items()
            if hasattr(torch.ops.aten, name)  # the one in place is of a later torch than 2.11
        }
        self._library: Library | None = Library("aten", "IMPL", key)
        for name, replacement in replacements.items():
            self._library.impl(name, replacement, key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Restore the kernels that were there before."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def activate(key: str = "CUDA") -> Handle:
    """Register the kernels; called by `torch.nn.attention.activate_flash_attention_impl`."""
    return Handle(key)


register_flash_attention_impl(NAME, register_fn=activate)
