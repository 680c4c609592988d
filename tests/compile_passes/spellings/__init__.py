"""Attention as models write it: the CASES of all files in this folder."""

from __future__ import annotations

from tests.compile_passes.spellings import (
    centred,
    decoders,
    einsums,
    encoders,
    exponentials,
    gates,
    guards,
    joined,
    means,
    normalised,
    padded_masks,
    products,
    refused,
    rows_without_keys,
    sdpa_calls,
    styles,
    vision,
    written,
    zero_one,
)

FILES = (
    decoders,
    encoders,
    vision,
    styles,
    refused,
    rows_without_keys,
    sdpa_calls,
    guards,
    gates,
    einsums,
    joined,
    normalised,
    exponentials,
    centred,
    means,
    padded_masks,
    products,
    written,
    zero_one,
)
CASES = {name: case for file in FILES for name, case in file.CASES.items()}
