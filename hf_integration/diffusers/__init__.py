"""fa_ops for diffusers: importing this package registers the attention backend "fa_ops".

"fa_ops_8bit" is the same with 8-bit products, for inference.

    import hf_integration.diffusers
    hf_integration.diffusers.register()  # the import has done it, which a linter does not know
    pipeline.transformer.set_attention_backend("fa_ops")

With `DIFFUSERS_ATTN_BACKEND=fa_ops` it is the default of all models; this import must then come
before the first model of diffusers is imported.
"""

from __future__ import annotations

from hf_integration.requirements import failed_import

try:
    import diffusers  # noqa: F401
except ImportError as error:
    raise failed_import("hf_integration.diffusers", "diffusers", "0.42", error) from error

from hf_integration.diffusers import registration  # noqa: F401  # before diffusers' models are imported
from hf_integration.diffusers.attention import mask_counts
from hf_integration.diffusers.explanations import explain, keep_16_bit
from hf_integration.diffusers.registration import register
from hf_integration.hooks import EIGHT_BIT, NAME

__all__ = ["EIGHT_BIT", "NAME", "explain", "keep_16_bit", "mask_counts", "register"]

register()
