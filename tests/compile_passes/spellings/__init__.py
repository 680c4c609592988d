"""Attention as models write it: the CASES of all files in this folder."""

from __future__ import annotations

from tests.compile_passes.spellings import (
    decoders,
    encoders,
    refused,
    rows_without_keys,
    styles,
    vision,
)

FILES = (decoders, encoders, vision, styles, refused, rows_without_keys)
CASES = {name: case for file in FILES for name, case in file.CASES.items()}
