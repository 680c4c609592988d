"""Merges the results of the forward kernel for parts of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.hopper.kernel_params import kernel_layout
from fa_ops.backends.hopper.launch import Params, address, empty, kernel
from fa_ops.backends.hopper.tiling import MAX_SPLITS

_THREADS, _ROWS = 256, 8  # a warp for each row
_PARAMS = kernel_layout("forward_combine.cu", "forward_combine")


class Combine:
    """The launch behind a forward kernel whose tiles attend parts of the keys.

    `out` is (B, Hq, Sq, Dv). The results of the parts are float32 (splits, B, Sq, Hq, Dv), then
    their lse (splits, B, Sq, Hq).
    """

    def __init__(
        self, out: tuple[int, int, int, int], splits: int, dtype: torch.dtype, has_sinks: bool,
        device: int,
    ) -> None:  # fmt: skip
        B, Hq, Sq, Dv = out
        rows = B * Sq * Hq
        defines = {
            "IS_BF16": int(dtype == torch.bfloat16), "HAS_SINKS": int(has_sinks),
            "MAX_SPLITS": MAX_SPLITS,
        }  # fmt: skip
        name = "forward_combine"
        self._kernel = kernel(name, name, device, _THREADS, 0, tuple(defines.items()))
        self._grid = -(-rows // _ROWS), 1
        self._params = Params.of(_PARAMS, "splits", (splits, rows, Sq, Hq, Dv))
        self._parts = (splits * rows * (Dv + 1),), (1,), torch.float32
        self._lse_offset = splits * rows * Dv * 4

    @classmethod
    def of(cls, out: tuple[int, int, int, int], splits: int, *options) -> Combine | None:
        """None for a single part, which is the result."""
        return cls(out, splits, *options) if splits > 1 else None

    def parts(self) -> tuple[Tensor, int, int]:
        """Memory for the parts, and the addresses in it of their results and of their lse."""
        memory = empty(*self._parts)
        at = memory.data_ptr()
        return memory, at, at + self._lse_offset

    def run(
        self, stream: int, parts: tuple[Tensor, int, int], sinks: Tensor | None, out: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        """Launch behind the kernel that writes `parts`."""
        params = self._params.take(*parts[1:], address(sinks), out.data_ptr(), address(lse))
        self._kernel.launch(self._grid, stream, params[1], dependent=True)
        self._params.give_back(params)
