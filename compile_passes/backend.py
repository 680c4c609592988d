"""`torch.compile(model, backend="fa_ops")`: Inductor with the fusion pass, registered by the
torch_dynamo_backends entry point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx

from compile_passes.install import FusionPass, append_fusion, fusion_in


def fa_ops(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: dict | None = None,
) -> Callable:
    """Compile with Inductor and the pass; `mode` and `options` are those of `torch.compile`."""
    patches = dict(list_mode_options(mode)) if mode else {}
    patches |= options or {}
    slot = patches.get("pre_grad_custom_pass", config.pre_grad_custom_pass)
    patches["pre_grad_custom_pass"] = slot if fusion_in(slot) else append_fusion(slot, FusionPass())
    return compile_fx(gm, example_inputs, config_patches=patches)
