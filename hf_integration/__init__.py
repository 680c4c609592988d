"""fa_ops for transformers: importing this package registers `attn_implementation="fa_ops"`.

"fa_ops_8bit" is the same with 8-bit products in prefills, for inference.

    import hf_integration
    hf_integration.register()  # the import has done it, which a linter does not know
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fa_ops")

Without the import, transformers raises a ValueError for an unknown implementation.
"""

from __future__ import annotations

from hf_integration.hooks import failed_import

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise failed_import("hf_integration", "transformers", "5.17", error) from error

from hf_integration import attention, decoding, hooks, operators, unsupported_models
from hf_integration.attention import fa_ops_8bit_attention_forward, fa_ops_attention_forward
from hf_integration.distribution import context_parallel
from hf_integration.encodings import counts as mask_counts
from hf_integration.explanations import Explanation, explain, keep_16_bit
from hf_integration.hooks import EIGHT_BIT, NAME, PAGED
from hf_integration.masks import fa_ops_mask

__all__ = [
    "EIGHT_BIT",
    "NAME",
    "PAGED",
    "Explanation",
    "context_parallel",
    "explain",
    "fa_ops_8bit_attention_forward",
    "fa_ops_attention_forward",
    "fa_ops_mask",
    "keep_16_bit",
    "mask_counts",
    "register",
]


def register(as_flash_attention_2: bool = False) -> None:
    """Register "fa_ops", "paged|fa_ops" and "fa_ops_8bit"; called on import. Idempotent.

    Args:
        as_flash_attention_2: also answer for "flash_attention_2", for code that asks for this name:
            `transformers serve`, sentence-transformers and trl unpad for no other. Models then run
            on fa_ops, without flash-attn and on the CPU too. False gives the name back.

    Raises:
        TypeError: as_flash_attention_2 is no bool.
        RuntimeError: this transformers release lacks a method that must be wrapped.
    """
    if not isinstance(as_flash_attention_2, bool):
        raise TypeError(f"as_flash_attention_2 must be a bool, got {as_flash_attention_2!r}")
    unsupported_models.install()
    hooks.install_batching()
    hooks.states["padding in decoding"] = decoding.install()
    hooks.states["output_attentions that layers do not pass on"] = operators.state
    for name in (NAME, PAGED):
        AttentionInterface.register(name, fa_ops_attention_forward)
        AttentionMaskInterface.register(name, fa_ops_mask)
    AttentionInterface.register(EIGHT_BIT, fa_ops_8bit_attention_forward)
    AttentionMaskInterface.register(EIGHT_BIT, fa_ops_mask)
    if as_flash_attention_2:
        attention.take_flash_name()
    else:
        attention.give_back_flash_name()


register()
