"""Random edge cases: extreme options, NaN and Inf, invalid lengths, unusual strides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fa_ops.testing.isolation import NUMBERS, OPERANDS
from fa_ops.testing.layouts import GRAD_LAYOUTS, LAYOUTS

Pick = Callable[[Sequence], Any]

HAZARDS = ("extremes", "poison", "broken", "strides")
WINDOWS = (0, 2**29 + 1, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**40, sys.maxsize)
SOFTCAPS = (1e-40, 1e-3, 1e4, 1e6, 1e300)
SCALES = (0.0, 2.0**-120, -(2.0**-60), 2.0**20, -(2.0**40))
SINKS = ("-inf", "inf", "3e38", "-3e38", "80", "1e4")
MAGNITUDES = {torch.float16: 16640.0}  # factor of queries and keys for huge scores, by dtype
MAGNITUDE = 133120.0  # the factor for all other dtypes


def draw_hazard(pick: Pick, kind: str, fields: dict) -> dict:
    """Draw one of `HAZARDS`; return the fields of a family to replace."""
    hazard = pick(HAZARDS)
    if hazard == "extremes":
        return _extremes(pick, kind, fields)
    if hazard == "poison":
        return _poison(pick, kind, fields)
    if hazard == "broken":
        lens = {} if kind == "cached" else {"kv_lens": pick((False, True))}
        ranges = {} if kind == "packed" or fields.get("mask") == "bool" else {"ranges": True}
        return {"broken": True, **lens, **ranges}
    return {"strides": True} if kind != "cached" else {"broken": True}


def _extremes(pick: Pick, kind: str, fields: dict) -> dict:
    what = pick(("window", "softcap", "sinks", *(() if kind == "cached" else ("scale", "huge"))))
    if what == "window":
        return {"window": (pick((-1, *WINDOWS)), pick((-1, *WINDOWS)))}
    if what == "softcap":
        return {"softcap": pick(SOFTCAPS), "scale": None}
    if what == "sinks":
        return {"sinks": pick(SINKS)}
    # terms added to scores this large round away, so that the largest key would be arbitrary
    exact = {"integers": True, "alibi": None, "softcap": 0.0}
    if fields.get("mask") == "float":
        exact |= {"mask": None, "mask_grad": False}
    if what == "scale":
        return exact | {"scale": pick(SCALES), "magnitude": 1.0}
    # a power of two: products are exact whether the scale is applied to q, k or the score
    huge = MAGNITUDES.get(fields["dtype"], MAGNITUDE)
    return exact | {"scale": pick((0.125, 0.5)), "magnitude": huge}


def _poison(pick: Pick, kind: str, fields: dict) -> dict:
    number = pick(NUMBERS[:1] if fields.get("fp8") else NUMBERS)
    if kind == "cached":
        return {"poison": f"{number} {pick(OPERANDS[:3])}"}
    operand = pick(OPERANDS)
    changes: dict = {"poison": f"{number} {operand}"}
    if operand == "attn_mask":
        if kind == "packed":
            return {"poison": f"{number} value"}
        changes |= {"mask": "float", "mask_shape": fields.get("mask_shape") or (1, 1, 1, 1)}
    if operand == "sinks":
        changes["sinks"] = True
    if operand == "alibi_slopes" and fields["alibi"] is None:
        changes["alibi"] = "heads"
    return changes


def draw_layouts(pick: Pick) -> dict:
    """Draw the layouts of a case's inputs and of its grad_out."""
    return {"layout": pick(LAYOUTS), "grad_layout": pick(GRAD_LAYOUTS)}
