"""`python -m tests.evaluation.backend_matrix`: which backend supports which feature, as a table.

Each row is a call, and each cell what the backend's own `supports` says of it and of its backward
pass. Tensors have shapes but no memory, and GPUs are pretended, so that the command runs anywhere.
`--write` puts the table into docs/features.md.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import typer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fa_ops
from fa_ops.call.call import Call, Saved, Tangents
from fa_ops.plans import dispatch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"
DEVICES = {"hopper": "cuda", "triton": "cuda", "cpu": "cpu", "reference": "cpu"}
# Compute capabilities of the pretended GPUs; `hopper` runs on one of them alone.
CAPABILITIES = {"hopper": ((9, 0),), "triton": ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))}
TOKENS, WIDTH = 4096, 128
TABLE = re.compile(r"^\| feature \| `hopper`.*\n(?:\|.*\n)*", re.M)


class Shape(NamedTuple):
    """The query, key and value of a call, and the device of its other tensors."""

    device: str
    dtype: torch.dtype = torch.bfloat16
    D: int = WIDTH
    Dv: int = WIDTH
    heads: int = 32
    kv_heads: int = 8

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor without memory."""
        return torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)

    def integers(self, *shape: int) -> Tensor:
        """Lengths, page numbers or ranges."""
        return self.tensor(*shape, dtype=torch.int32)

    def dense(self, queries: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of two rows."""
        shapes = ((self.heads, queries, self.D), (self.kv_heads, TOKENS, self.D))
        shapes += ((self.kv_heads, TOKENS, self.Dv),)
        return tuple(self.tensor(2, *shape) for shape in shapes)

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of packed sequences."""
        shapes = ((self.heads, self.D), (self.kv_heads, self.D), (self.kv_heads, self.Dv))
        return tuple(self.tensor(TOKENS, *shape) for shape in shapes)

    def pages(self, page: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Pages of keys and of values."""
        sizes = (2 * TOKENS // page, page, self.kv_heads)
        return self.tensor(*sizes, self.D, dtype=dtype), self.tensor(*sizes, self.Dv, dtype=dtype)


# The tensors and options of a call on a device.
Arguments = tuple[tuple[Tensor, ...], dict[str, Any]]


class Feature(NamedTuple):
    """A row of the table."""

    name: str
    arguments: Callable[[str], Arguments]
    has_gradient: bool = True
    change: Callable[[Call], Call] = lambda call: call  # of what is described to what is asked for


def _dense(name: str, options: Callable[[Shape], dict] = lambda s: {}, **shape: Any) -> Feature:
    def arguments(device: str) -> Arguments:
        given = Shape(device, **shape)
        return given.dense(), options(given)

    return Feature(name, arguments)


def _packed(name: str, **options: Any) -> Feature:
    def arguments(device: str) -> Arguments:
        given = Shape(device)
        ends = given.integers(5)
        return given.packed(), {"cu_seqlens_q": ends, "cu_seqlens_k": ends, **options}

    return Feature(name, arguments)


def _cached(name: str, queries: int = 1, page: int = 0, **given: Any) -> Feature:
    cache_dtype, appends = given.pop("cache_dtype", None), given.pop("appends", False)
    latent = given.pop("latent", False)

    def arguments(device: str) -> Arguments:
        shape = Shape(device, D=576, Dv=512, kv_heads=1) if latent else Shape(device)
        query, key, value = shape.dense(queries)
        options = {"kv_lens": shape.integers(2), "page_table": None, **given}
        if appends:
            options |= {"key": key.narrow(2, 0, queries), "value": value.narrow(2, 0, queries)}
        if page:
            key, value = shape.pages(page, cache_dtype)
            options["page_table"] = shape.integers(2, TOKENS // page)
        elif cache_dtype is not None:
            key, value = key.to(cache_dtype), value.to(cache_dtype)
        if cache_dtype is not None:
            scales = shape.tensor(2, shape.kv_heads, dtype=torch.float32)
            options |= {"k_scale": scales, "v_scale": scales}
        return (query, key, key.narrow(-1, 0, shape.Dv) if latent else value), options

    return Feature(name, arguments, has_gradient=False)


def _eight_bit(name: str, D: int, **options: Any) -> Feature:
    def arguments(device: str) -> Arguments:
        return Shape(device, D=D, Dv=D).dense(), options

    return Feature(name, arguments, has_gradient=False)


def _lists_of_tokens(name: str) -> Feature:
    def arguments(device: str) -> Arguments:
        shape = Shape(device, D=576, Dv=512, kv_heads=1)
        query, key, _ = shape.packed()
        value = key.narrow(-1, 0, shape.Dv)
        lists, counts = shape.integers(TOKENS, 2048), shape.integers(TOKENS)
        return (query, key, value), {"token_indices": lists, "counts": counts}

    return Feature(name, arguments, has_gradient=False)


def _derivative(name: str, change: Callable[[Call], Call], **shape: Any) -> Feature:
    return _dense(name, lambda s: {"is_causal": True}, **shape)._replace(
        has_gradient=False, change=change
    )


def tangents_of_results(call: Call) -> Call:
    """The call for the tangents of out and lse, by that of the query."""
    q = call.query  # that there are such tensors is all that backends ask
    return call._replace(saved=Saved(None, None, q, q), tangents=Tangents(query=q))


def tangents_of_gradients(call: Call) -> Call:
    """The call for the tangents of the gradients, which a double backward asks for."""
    q = call.query
    return call._replace(saved=Saved(q, None, q, q), tangents=Tangents(query=q, grad_out=q))


def _program(s: Shape) -> dict:
    """Functions of which a program is left."""
    return {
        "score_mod": lambda score, b, h, i, j: torch.tanh(score),
        "mask_mod": lambda b, h, i, j: (i - j) % 3 == 0,
        "enable_gqa": True,
    }


def _options(s: Shape) -> dict:
    """Functions that become options: a window and a soft cap."""
    return {
        "score_mod": lambda score, b, h, i, j: 30.0 * torch.tanh(score / 30.0),
        "mask_mod": lambda b, h, i, j: (i >= j) & (i - j < 128),
        "enable_gqa": True,
    }


E4M3 = torch.float8_e4m3fn
FEATURES = [
    _dense("float16", dtype=torch.float16),
    _dense("bfloat16"),
    _dense("float32", dtype=torch.float32),
    _dense("float64", dtype=torch.float64),
    _dense("up to 256 features", D=256, Dv=256),
    _dense("up to 512 features", D=512, Dv=512),
    _dense("513 features and more", D=520, Dv=520),
    _dense("more features in keys than in values", D=192),
    _dense("more features in values than in keys", Dv=192),
    _dense("`is_causal`, `window`", lambda s: {"is_causal": True, "window": (128, 0)}),
    _dense("`softcap`", lambda s: {"softcap": 30.0}),
    _dense("`alibi_slopes`", lambda s: {"alibi_slopes": s.tensor(s.heads, dtype=torch.float32)}),
    _dense("`sinks`", lambda s: {"sinks": s.tensor(s.heads, dtype=torch.float32)}),
    _dense("`kv_lens`", lambda s: {"kv_lens": s.integers(2)}),
    _dense("`key_ranges`", lambda s: {"key_ranges": s.integers(2, 1, TOKENS, 2)}),
    _dense("a bool mask", lambda s: {"attn_mask": s.tensor(TOKENS, TOKENS, dtype=torch.bool)}),
    _dense("a float mask and its gradient", lambda s: {"attn_mask": s.tensor(TOKENS, TOKENS)}),
    _dense(
        "the same with 512 features",
        lambda s: {"attn_mask": s.tensor(TOKENS, TOKENS)},
        D=512,
        Dv=512,
    ),
    _dense("`dropout_p`", lambda s: {"dropout_p": 0.1}),
    _dense("`deterministic`", lambda s: {"deterministic": True}),
    _dense("`flex_attention`, functions that become options", _options),
    _dense("`flex_attention`, a program", _program),
    _dense(
        "`attention_selected`",
        lambda s: {"block_indices": s.integers(2, s.kv_heads, TOKENS, 16), "is_causal": True},
    ),
    _lists_of_tokens("`attention_selected_tokens`, latent cache (MLA)"),
    _derivative("`jvp`", tangents_of_results),
    _derivative("`jvp`, up to 512 features", tangents_of_results, D=512, Dv=512),
    _derivative("double backward", tangents_of_gradients),
    _packed("packed sequences"),
    _packed("packed sequences, `dropout_p`", dropout_p=0.1),
    _cached("one token over a cache"),
    _cached("a prompt over a cache", queries=512, is_causal=True),
    _cached("a prompt over pages of 64 keys", queries=512, page=64, is_causal=True),
    _cached("a prompt over pages of 1 key", queries=512, page=1, is_causal=True),
    _cached("one token over pages of 1 key", page=1),
    _cached("append to pages of 16 keys", page=16, appends=True),
    _cached("latent cache (MLA) in pages", page=64, latent=True),
    _cached("e4m3 cache", cache_dtype=E4M3),
    _cached("`num_splits`", num_splits=4),
    _cached("`batch_invariant`", batch_invariant=True),
    _eight_bit("`quantized_attention`, int8", 128, qk_dtype=torch.int8),
    _eight_bit("`quantized_attention`, e4m3", 128, qk_dtype=E4M3),
    _eight_bit("`quantized_attention`, 40 features", 40, qk_dtype=torch.int8),
]


@contextlib.contextmanager
def pretended_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Tensors without memory, on devices that need not exist."""
    available = {name: None for name in DEVICES}
    with (
        warnings.catch_warnings(),
        FakeTensorMode(),
        mock.patch.dict(dispatch._available, available),
        mock.patch.object(torch.cuda, "get_device_capability", lambda _device=None: capability),
    ):
        warnings.simplefilter("ignore")  # that such tensors have no address
        yield


def refusals(feature: Feature, backend: str) -> tuple[str | None, str | None]:
    """Why the backend does not run the call, and why not its backward pass."""
    backward = []

    def refusal(name: str, call: Call) -> str | None:
        module, call = dispatch.load(name), feature.change(call)
        if name == backend and feature.has_gradient:
            q = call.query  # that there are such tensors is all that backends ask
            mask = call.operands.attn_mask
            has_bias = mask is not None and mask.is_floating_point()
            saved = Saved(q, None, q, q, mask_grad=has_bias)
            backward.append(module.supports(call._replace(saved=saved)))
        return module.supports(call)

    tensors, options = feature.arguments(DEVICES[backend])
    with mock.patch.object(dispatch, "refusal", refusal):
        try:
            explained = fa_ops.explain(*tensors, backend=backend, **options)
        except TypeError as error:  # a dtype that the device does not have
            return str(error), None
    return explained.reasons[backend], backward[0] if backward else None


def verdict(feature: Feature, backend: str) -> str:
    """What the table says: "yes", "forward" where the backward pass is refused, or "–"."""
    forward, backward = refusals(feature, backend)
    if forward is not None:
        return "–"
    return "yes" if backward is None else "forward"


def cell(feature: Feature, backend: str) -> str:
    """The verdict, and the compute capability from which on it holds if not all have it."""
    verdicts = {}
    for capability in CAPABILITIES.get(backend, ((0, 0),)):
        with pretended_gpu(capability):
            verdicts[capability] = verdict(feature, backend)
    *_, last = verdicts.values()
    since = next(c for c in verdicts if {v for d, v in verdicts.items() if d >= c} == {last})
    return last if since == next(iter(verdicts)) else f"{last}, from {since[0]}.{since[1]}"


def table() -> str:
    """The table in Markdown."""
    rows = [["feature", *(f"`{name}`" for name in DEVICES)], ["---"] * (1 + len(DEVICES))]
    rows += [[f.name, *(cell(f, name) for name in DEVICES)] for f in FEATURES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(write: Annotated[bool, typer.Option(help="into docs/features.md")] = False) -> None:
    """Print the table."""
    text = table()
    if write:
        page = PAGE.read_text()
        PAGE.write_text(TABLE.sub(lambda _: text, page))
    else:
        print(text, end="")


if __name__ == "__main__":
    typer.run(main)
