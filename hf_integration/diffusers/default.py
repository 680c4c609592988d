"""The default backend that DIFFUSERS_ATTN_BACKEND names, if it is ours.

diffusers looks it up in its list of names when attention_dispatch is imported, before our names can
be in the list. It is given "native" instead, and `registration` sets the one that was requested.
"""

from __future__ import annotations

from diffusers.utils import constants

from hf_integration.hooks import EIGHT_BIT, NAME

requested: str | None = None
if constants.DIFFUSERS_ATTN_BACKEND in (NAME, EIGHT_BIT):
    requested = constants.DIFFUSERS_ATTN_BACKEND
    constants.DIFFUSERS_ATTN_BACKEND = "native"
