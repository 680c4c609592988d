"""What `python -m fa_ops doctor --model` shows: the layers of a model, and the masks it gets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig

from hf_integration import explaining, masks
from hf_integration.sweep import run, scenarios, tiny

Rows = list[tuple[str, str]]
RUNS = ("nopad", "leftpad", "rightpad", "decode", "static")


def sections(model: str) -> Iterator[tuple[str, Rows]]:
    """Titles with rows (name, text); `model` is a model type, or a folder with a config.json.

    Raises LookupError where no model of that type can be built and run.
    """
    model_type = model
    if Path(model).is_dir():
        try:
            model_type = AutoConfig.from_pretrained(model, local_files_only=True).model_type
        except (OSError, ValueError) as error:
            raise LookupError(f"no model's config can be read from {model}: {error}") from None
    if model_type not in tiny.CONFIG_MAPPING:
        raise LookupError(f"{model!r} is neither a folder nor a model type that transformers knows")
    base = run.Base(model_type)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        ours = tiny.build(base.config, "fa_ops")
    refusals = [str(w.message) for w in raised if "cannot serve" in str(w.message)]
    yield f"model {model_type}, tiny", [(name, text) for name, text in _layers(ours)]
    if refusals:
        yield "refused", [("because", text) for text in dict.fromkeys(refusals)]
    yield "against eager, and the masks made", [*_runs(base, ours)]


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for layers in explaining.explain(model).layers:
        yield layers.kind, f"{len(layers.names)} x {layers.runs}; {layers.why}"


def _runs(base: run.Base, model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for scenario in RUNS:
        expected = base.answer(scenario)
        if isinstance(expected, str):
            yield scenario, expected
            continue
        masks.counts.clear()
        actual = scenarios.SCENARIOS[scenario](model, base.inputs)
        counted = ", ".join(f"{name} x {n}" for name, n in sorted(masks.counts.items()))
        verdict = scenarios.difference(expected, actual, scenario) or "the same"
        yield scenario, f"{verdict}; masks: {counted or 'none asked for'}"
