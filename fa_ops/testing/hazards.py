"""Draws that go to the edges: extreme options, NaN and Inf, broken lengths, unusual strides."""

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
SINKS = ("-inf", "3e38", "-3e38", "80", "1e4")
MAGNITUDES = {torch.float16: 16640.0}  # of queries and keys; others have
MAGNITUDE = 133120.0


def drawn(pick: Pick, kind: str, fields: dict) -> dict:
    """Fields of a family for one of `HAZARDS`, drawn; they replace some of `fields`."""
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
    # what is added to scores as large rounds away: which of two keys wins would be chance
    exact = {"integers": True, "alibi": None, "softcap": 0.0}
    if fields.get("mask") == "float":
        exact |= {"mask": None, "mask_grad": False}
    if what == "scale":
        return exact | {"scale": pick(SCALES), "magnitude": 1.0}
    # a scale by which a product is exact, whichever factor it is applied to first
    huge = MAGNITUDES.get(fields["dtype"], MAGNITUDE)
    return exact | {"scale": pick((0.125, 0.5)), "magnitude": huge}


def _poison(pick: Pick, kind: str, fields: dict) -> dict:
    number = pick(NUMBERS[:1] if fields.get("fp8") else NUMBERS)
    if kind == "cached":
        return {"poison": f"{number} {pick(OPERANDS[:3])}"}
    operand = pick(OPERANDS)
    more: dict = {"poison": f"{number} {operand}"}
    if operand == "attn_mask":
        if kind == "packed":
            return {"poison": f"{number} value"}
        more |= {"mask": "float", "mask_shape": fields.get("mask_shape") or (1, 1, 1, 1)}
    if operand == "sinks":
        more["sinks"] = True
    if operand == "alibi_slopes" and fields["alibi"] is None:
        more["alibi"] = "heads"
    return more


def strides(pick: Pick) -> dict:
    """Layouts of a case's inputs and of its grad_out."""
    return {"layout": pick(LAYOUTS), "grad_layout": pick(GRAD_LAYOUTS)}
