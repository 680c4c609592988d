"""The report of `python -m fa_ops doctor --model`: which attention runs in each layer, and why."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PreTrainedConfig

from hf_integration.explaining import explain

Rows = list[tuple[str, str]]


def sections(model: str) -> Iterator[tuple[str, Rows]]:
    """Yield titles with rows (name, text) for a model type, or a folder with a config.json.

    The model is built without memory for its weights. Raises LookupError if none can be built.
    """
    config = _config(model)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with warnings.catch_warnings(record=True) as raised, torch.device("meta"):
        warnings.simplefilter("always")
        try:
            built = AutoModel.from_config(config, attn_implementation="fa_ops", dtype=dtype)
        except Exception as error:  # modeling code can raise anything
            raise _cannot_build(model, error) from None
    rows = [
        (layers.kind, f"{len(layers.names)} x {layers.runs}; {layers.why}")
        for layers in explain(built).layers
    ]
    yield f"model {config.model_type}", rows or [("attention", "none")]
    refusals = dict.fromkeys(str(w.message) for w in raised if "attention code" in str(w.message))
    if refusals:
        yield "refused", [("because", text) for text in refusals]


def _config(model: str) -> PreTrainedConfig:
    if Path(model).is_dir():
        try:
            return AutoConfig.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise LookupError(f"no model's config can be read from {model}: {error}") from None
    if model not in CONFIG_MAPPING:
        raise LookupError(f"{model!r} is neither a folder nor a model type of transformers")
    try:
        return CONFIG_MAPPING[model]()
    except Exception as error:  # "encoder-decoder" has no default config in some releases
        raise _cannot_build(model, error) from None


def _cannot_build(model: str, error: Exception) -> LookupError:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return LookupError(f"no model can be built from {model!r}: {reason}")
