"""Whether the running model returns attention weights, which `output_attentions=True` requests.

Most models pass this argument on to the attention function. The layers of some do not (SigLIP,
Nemotron, StableLM): transformers collects the weights from what their attention returns.
"""

from __future__ import annotations

from fa_ops.tracing import is_compiling

try:
    from transformers.utils.output_capturing import _active_collector as _collector

    _collector.global_var  # noqa: B018
except (ImportError, AttributeError) as error:
    _collector = None
    state = f"off: {error}"
else:
    state = "on"


def requested() -> bool:
    """Whether transformers is collecting weights from attention layers."""
    if _collector is None:
        return False
    # A model that is compiled as a whole sets the global variable, as torch.compile cannot trace
    # context variables. Layers that are compiled on their own read None.
    collected = _collector.global_var if is_compiling() else _collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)
