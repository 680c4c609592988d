"""The scenarios of the sweep, and the comparison of their results with those of eager attention.

A scenario is a function of a model and its inputs that returns tensors by name. It raises Skip if
it does not apply to the architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from fa_ops.cli import demo as smollm
from tests.evaluation.hf_sweep import inputs as make

NEW_TOKENS = 4
TOLERANCE = 5e-4  # relative to the largest value; a wrong mask or feature changes 1e-2 or more
GRADIENT_TOLERANCE = 5e-3

WINDOW = {
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "attention_chunk_size": 5,
    "local_attention": 4,
    "sliding_window_size": 5,
}
SOFTCAP = {"attn_logit_softcapping": 2.0, "attn_logit_softcap": 2.0}


class Skip(Exception):
    """Raised with the reason why a scenario does not apply."""


def nopad(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """A forward pass without padding."""
    with torch.no_grad():
        return _flat(model(**inputs))


def leftpad(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """A forward pass with left padding."""
    return _padded(model, inputs, "left")


def rightpad(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """A forward pass with right padding."""
    return _padded(model, inputs, "right")


def decode(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """Greedy decoding with a dynamic cache."""
    return _generate(model, inputs, None, None)


def decode_leftpad(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """Greedy decoding of left padded prompts with a dynamic cache."""
    return _generate(model, inputs, "left", None)


def static(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """Greedy decoding with a static cache."""
    return _generate(model, inputs, None, "static")


def static_leftpad(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """Greedy decoding of left padded prompts with a static cache."""
    return _generate(model, inputs, "left", "static")


def chunked(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """A prefill in two chunks, the second of which attends the cache of the first."""
    cache_argument = smollm.cache_argument(type(model))
    _need(model, cache_argument)
    if getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
        raise Skip("not a decoder")
    ids, cache = make.tokens(), DynamicCache(config=model.config)
    with torch.no_grad():
        first = model(ids[:, :7], use_cache=True, **{cache_argument: cache})
        second = model(ids[:, 7:], use_cache=True, **{cache_argument: cache})
    return {"first": first.logits, "second": second.logits}


def grad(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """The gradients of all parameters."""
    outputs = [out for out in _flat(model(**inputs)).values() if out.requires_grad]
    if not outputs:
        raise Skip("no output depends on a parameter")
    weights = [make.noise(*out.shape, seed=5).to(out) / out.numel() for out in outputs]
    loss = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, gradients, strict=True) if g is not None}


def window(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """A model with a window of five keys."""
    if not changes(model.config, WINDOW):
        raise Skip("no window")
    return nopad(model, inputs)


def softcap(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """A model whose scores are capped at two."""
    if not changes(model.config, SOFTCAP):
        raise Skip("no softcap")
    return nopad(model, inputs)


def sink(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """A model with sinks, without padding and with left padding."""
    if not any("sink" in name for name, _ in model.named_parameters()):
        raise Skip("no sinks")
    padded = {f"padded {name}": out for name, out in leftpad(model, inputs).items()}
    return nopad(model, inputs) | padded


def packed(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    """Two documents in one row, separated by their positions."""
    _need(model, "position_ids", smollm.cache_argument(type(model)))
    if getattr(model.config, "is_encoder_decoder", False):
        raise Skip("not a decoder")
    positions = torch.cat([torch.arange(n) for n in (5, 7)])[None]
    with torch.no_grad():
        out = model(input_ids=make.tokens(rows=1), position_ids=positions, use_cache=False)
    return _flat(out)


SCENARIOS: dict[str, Callable[[PreTrainedModel, dict], dict[str, Tensor]]] = {
    run.__name__: run
    for run in (
        nopad, leftpad, rightpad, decode, decode_leftpad, static, static_leftpad, chunked, grad,
        window, softcap, sink, packed,
    )
}  # fmt: skip
# Scenarios that build another model, with those of the values that its config has.
CHANGES = {"window": WINDOW, "softcap": SOFTCAP}


def changes(config, wanted: dict) -> dict:
    """The `wanted` values if the config or one of its parts sets such a size, else none."""
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", ()))]
    known = {n for part in parts if part is not None for n in wanted if getattr(part, n, None)}
    sizes = {name for name in known if isinstance(wanted[name], int | float)}
    return {name: wanted[name] for name in wanted} if sizes - {"use_sliding_window"} else {}


def difference(eager: dict[str, Tensor], results: dict[str, Tensor], scenario: str) -> str | None:
    """Where two results differ by more than rounding, or None."""
    if eager.keys() != results.keys():
        return f"other outputs: {sorted(eager.keys() ^ results.keys())[:3]}"
    tolerance = GRADIENT_TOLERANCE if scenario == "grad" else TOLERANCE
    largest = max((t.abs().max().item() for t in eager.values() if t.numel()), default=0.0)
    for name, expected in eager.items():
        actual = results[name]
        if actual.shape != expected.shape:
            return f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
        if not expected.is_floating_point():
            if not torch.equal(actual, expected):
                return f"{name}: other tokens"
            continue
        if not expected.numel():
            continue
        scale = expected.abs().nan_to_num().max().item()
        if scenario == "grad":
            scale = max(scale, 1e-3 * largest)
        if not torch.allclose(actual, expected, 0.0, tolerance * scale + 1e-12, equal_nan=True):
            off = (actual - expected).abs().max().item()
            return f"{name}: off by {off:.1e}, largest {scale:.1e}"
    return None


def _padded(model: PreTrainedModel, inputs: dict, side: str) -> dict[str, Tensor]:
    """The outputs of real tokens; those of padding tokens have no meaning."""
    _need(model, "attention_mask", "input_ids")
    if "pixel_values" in inputs or set(inputs) - {"input_ids", "decoder_input_ids"}:
        raise Skip("not text alone")
    mask = make.padding(side)
    with torch.no_grad():
        out = _flat(model(**inputs, attention_mask=mask))
    return {
        name: t[mask.bool()] if t.shape[:2] == mask.shape else t
        for name, t in out.items()
    }  # fmt: skip


def _generate(
    model: PreTrainedModel, inputs: dict, side: str | None, cache: str | None
) -> dict[str, Tensor]:
    """Greedy tokens and their logits."""
    if not model.can_generate():
        raise Skip("does not generate")
    prompt = {name: t for name, t in inputs.items() if not name.startswith("decoder_")}
    mask = torch.ones((make.B, make.S), dtype=torch.long) if side is None else make.padding(side)
    if set(prompt) == {"input_ids"}:
        prompt["attention_mask"] = mask
    elif side is not None:
        raise Skip("not text alone")
    if getattr(model.config, "is_encoder_decoder", False):
        prompt["decoder_start_token_id"] = 1
    out = model.generate(
        **prompt,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        cache_implementation=cache,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return {"tokens": out.sequences, "logits": torch.stack(out.logits)}


def _need(model: PreTrainedModel, *names: str) -> None:
    for name in set(names) - make.names(model):
        raise Skip(f"no parameter {name}")


# Caches, and weights, which only eager attention returns by default.
_SKIPPED = ("cache", "past_key_values", "cache_params", "attentions")


def _flat(out) -> dict[str, Tensor]:
    """All float tensors of an output by their paths."""
    return dict(_walk("", out))


def _walk(path: str, value) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            if not name.endswith(_SKIPPED):
                yield from _walk(f"{path}.{name}" if path else name, part)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _walk(f"{path}.{i}", part)
