"""Every kind of configuration in which the Hopper kernels are shipped, under names that stay.

`compare_sass` runs this file in each checkout, so what stands below follows the sources, and the
names do not: they speak of calls alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from fa_ops.backends.hopper import (
    backward,
    configs,
    decode,
    eight_bit,
    forward,
    tangents,
)
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import nvrtc

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DIMS = ((64, 64), (128, 64), (128, 128), (192, 128), (192, 192), (256, 256))
DIMS += ((40, 40), (96, 96), (112, 112), (160, 160))
E4M3 = torch.float8_e4m3fn
PAGES = (0, 16, 64)  # keys of a cache's page; 0: contiguous
DECODED_PAGES = (*PAGES, 1)
CAUSAL = {"window": True}
# Features of dense calls, as `macros` has them; a backward pass has no sinks.
FEATURES = {
    "full": {},
    "causal": CAUSAL,
    "window": CAUSAL | {"left": True},
    "ranges": {"ranges": True},
    "lengths": CAUSAL | {"kv_lens": True},
    "softcap": CAUSAL | {"softcap": True},
    "alibi": CAUSAL | {"alibi": True},
    "packed alibi": {"ranges": True, "alibi": 2},
    "sinks": CAUSAL | {"sinks": True},
    "mask": CAUSAL | {"mask": True},
    "dropout": CAUSAL | {"dropout": True},
}
CACHED = {
    "lengths": {},
    "ranges": {"ranges": True},
    "options": {"softcap": True, "alibi": True, "sinks": True},
}
BEFORE = {"mask": ("pack_rows", "pack_columns"), "dropout": ("row_seeds",)}
BEFORE["packed"] = ("packed_ranges",)
# Entry points that were renamed; files keep the older names, so that checkouts compare.
FILE_NAMES = {
    "clip_ranges": "keep_runs",
    "combine": "merge_parts",
    "packed_ranges": "packed_runs",
    "postprocess": "finish",
    "preprocess": "prepare",
    "row_seeds": "row_keys",
}


class Configuration(NamedTuple):
    """A name, and what is compiled for it: `compiler.cubins(kind, entries, defines)`."""

    name: str
    kind: str
    entries: tuple[str, ...]
    defines: dict[str, int]


def configurations() -> Iterator[Configuration]:
    for kind, entries in BEFORE.items():
        yield Configuration(f"{kind} words", kind, entries, {})
    for Dv, page in itertools.product((64, 128, 256), (0, 64)):
        defines = eight_bit.packed_e4m3_defines(Dv, page > 0)
        kind = "scaled_packed"
        yield Configuration(f"scaled packed Dv{Dv} page{page}", kind, (kind,), defines)
    for word, dtype in DTYPES.items():
        yield from _append(word, dtype)
        yield from _conversions(word, dtype)
        for D, Dv in DIMS:
            yield from _forward(f"forward D{D}/{Dv} {word}", D, Dv, dtype)
            yield from _backward(f"backward D{D}/{Dv} {word}", D, Dv, dtype)
        yield from _wide(f"forward D512/512 {word}", 512, dtype)
        yield from _wide_backward(f"backward D512/512 {word}", 512, dtype)
        yield from _tangents(f"tangents {word}", dtype)
        for D, page in itertools.product((64, 128, 192, 256), DECODED_PAGES):
            yield from _decode(f"decode D{D} page{page} {word}", D, page, dtype)
            yield from _decode_e4m3(f"decode D{D} page{page} {word} e4m3", D, page, dtype)
        for D, Dv in ((64, 64), (128, 128), (256, 256), (80, 40)):
            yield from _quantized(f"D{D}/{Dv} {word}", D, Dv, dtype)
        for page in DECODED_PAGES:
            config = configs.mla_config(page)
            defines = macros(config, dtype, paged=page > 0)
            yield Configuration(
                f"mla page{page} {word}", "mla", _names(decode.entries_of(config)), defines
            )


def _append(word: str, dtype: torch.dtype) -> Iterator[Configuration]:
    rotations = {"": None, " rotary32": torch.float32, " rotary16": dtype}
    for cached, (rotation, angles) in itertools.product((dtype, E4M3), rotations.items()):
        name = f"append {word}{rotation}{' e4m3' if cached == E4M3 else ''}"
        defines = decode.append_defines(dtype, cached, angles)
        yield Configuration(name, "append", ("append",), defines)


def _conversions(word: str, dtype: torch.dtype) -> Iterator[Configuration]:
    defines = forward.dequantize_defines(dtype)
    yield Configuration(f"dequantize {word}", "dequantize", ("dequantize",), defines)
    kind, bits = "forward_combine", int(dtype == torch.bfloat16)
    for sinks in (0, 1):
        defines = {"IS_BF16": bits, "HAS_SINKS": sinks, "MAX_SPLITS": forward.MAX_SPLITS}
        yield Configuration(f"merge {word}{' sinks' * sinks}", kind, (kind,), defines)


def _tangents(name: str, dtype: torch.dtype) -> Iterator[Configuration]:
    for D, Dv in ((64, 64), (128, 128), (96, 64)):
        config = tangents.tangent_config(D, Dv)
        for word in ("full", "causal", "window", "lengths"):
            for grad_out in (0, 1):
                defines = macros(config, dtype, **FEATURES[word], grad_out=grad_out)
                label = f"{name} D{D}/{Dv} {word}{' products' * grad_out}"
                yield Configuration(label, config.kernel, (config.kernel,), defines)


def _wide(name: str, D: int, dtype: torch.dtype) -> Iterator[Configuration]:
    config = configs.forward_config(D, D)
    for word in ("full", "causal", "window", "ranges", "lengths", "sinks"):
        defines = macros(config, dtype, **FEATURES[word])
        yield Configuration(f"{name} {word}", config.kernel, (config.kernel,), defines)


def _wide_backward(name: str, D: int, dtype: torch.dtype) -> Iterator[Configuration]:
    config = configs.backward_config(D, D)
    for word in ("full", "causal", "ranges", "lengths"):
        defines = macros(config, dtype, **FEATURES[word])
        entries = _names(backward.entries_of(config, defines))
        yield Configuration(f"{name} {word}", "backward", entries, defines)


def _forward(name: str, D: int, Dv: int, dtype: torch.dtype) -> Iterator[Configuration]:
    def one(word: str, config: configs.Config, features: dict) -> Configuration:
        defines = macros(config, dtype, **features)
        return Configuration(f"{name} {word}", "forward", ("forward",), defines)

    for word, features in FEATURES.items():
        few_registers = word in ("mask", "dropout")
        differs_by_row = word in ("ranges", "alibi", "packed alibi")
        config = configs.forward_config(
            D, Dv, few_registers=few_registers, differs_by_row=differs_by_row
        )
        yield one(word, config, features)
    for page in PAGES[1:]:
        yield one(f"page{page}", configs.forward_config(D, Dv, page=page), FEATURES["lengths"])
    yield from _few_queries(one, D, Dv)
    for bits in (16, 32):
        yield one(f"bias{bits}", configs.forward_config(D, Dv, bits), CAUSAL)
    for bits in (0, 16, 32):
        config = configs.forward_config(D, Dv, bits, few_registers=True, skips_tiles=True)
        yield one(f"tiles bias{bits}", config, {"mask": bits == 0})


def _few_queries(one, D: int, Dv: int) -> Iterator[Configuration]:
    """Parts of the keys, the heads of a group in one tile, and packed sequences over pages."""
    lengths = FEATURES["lengths"]
    for heads, page in ((1, 0), (3, 0), (4, 0), (4, 16)):
        config = configs.forward_config(D, Dv, page=page)
        config = dataclasses.replace(config, packed_heads=heads)
        label = f"parts heads{heads} page{page}"
        yield one(label, config, lengths | {"splits": True})
        if heads > 1:
            yield one(f"heads{heads} page{page}", config, lengths)
        if page:
            config = dataclasses.replace(config, packs_queries=True)
            yield one(f"sequences page{page}", config, lengths)
            yield one(f"sequences parts page{page}", config, lengths | {"splits": True})


def _backward(name: str, D: int, Dv: int, dtype: torch.dtype) -> Iterator[Configuration]:
    def one(word: str, config: configs.BackwardConfig, features: dict) -> Configuration:
        defines = macros(config, dtype, **features)
        entries = _names(backward.entries_of(config, defines))
        return Configuration(f"{name} {word}", "backward", entries, defines)

    for word, features in FEATURES.items():
        if word not in ("window", "sinks"):
            few_registers = word in ("mask", "dropout", "softcap")
            config = configs.backward_config(
                D,
                Dv,
                few_registers=few_registers,
                differs_by_row=word in ("ranges", "lengths", "alibi", "packed alibi"),
            )
            yield one(word, config, features)
    for word in ("full", "causal", "ranges"):
        split = FEATURES[word] | {"split": True}  # few key heads: groups of query heads are cut
        config = configs.backward_config(D, Dv, differs_by_row=word == "ranges")
        yield one(f"{word} split", config, split)
    for kind, sums_rows in (("short", False), ("alone", True)):
        whole = configs.backward_config(D, Dv, whole_heads=True, sums_rows=sums_rows)
        for word in ("full", "causal") if whole.whole_heads else ():
            yield one(f"{word} {kind}", whole, FEATURES[word])
    paired = configs.backward_config(D, Dv, prefers_pairs=True)
    if paired.is_paired:
        for word in ("full", "causal", "ranges", "lengths", "alibi", "packed alibi"):
            yield one(f"{word} long", paired, FEATURES[word])
        for word in ("full", "causal", "ranges"):
            yield one(f"{word} split long", paired, FEATURES[word] | {"split": True})
    yield one("deterministic", configs.backward_config(D, Dv, deterministic=True), CAUSAL)
    for bits in (16, 32):
        found = one(f"bias{bits}", configs.backward_config(D, Dv, bias_bits=bits), CAUSAL)
        yield found
        config = configs.backward_config(D, Dv, bias_bits=bits)
        defines = found.defines | configs.MaskGradientConfig(config).defines()
        kind = "mask_gradient"
        yield Configuration(f"{name} bias{bits} gradient", kind, (kind,), defines)
    for bits, deterministic in itertools.product((0, 16, 32), (False, True)):
        config = configs.backward_config(D, Dv, deterministic, bits, True, skips_tiles=True)
        word = "tiles deterministic" if deterministic else "tiles"
        yield one(f"{word} bias{bits}", config, {"mask": bits == 0})


def _quantized(name: str, D: int, Dv: int, dtype: torch.dtype) -> Iterator[Configuration]:
    config = configs.quantized_config(D, Dv, has_16_bits=True)
    for word in ("full", "causal", "window", "ranges", "lengths", "softcap", "sinks"):
        for numbers in ("int8", "e4m3") if word in ("full", "causal") else ("int8",):
            defines = macros(config, dtype, is_int8=numbers == "int8", **FEATURES[word])
            label = f"quantized {name} {word} {numbers}"
            yield Configuration(label, "quantized", ("quantized",), defines)
    config = configs.quantized_config(D, Dv)
    signs = macros(config, dtype, is_int8=False, **CAUSAL, signs=True)
    yield Configuration(f"quantized {name} signs", "quantized", ("quantized",), signs)
    for page in PAGES if dtype == torch.bfloat16 else ():
        defines = macros(
            eight_bit.packed_config(D, Dv, page), dtype, **eight_bit.PACKED_FEATURES,
            **FEATURES["lengths" if page else "causal"],
        )  # fmt: skip
        yield Configuration(
            f"quantized {name} sequences page{page}", "quantized", ("quantized",), defines
        )
    heads = signs | macros(config, dtype, is_int8=False, **CAUSAL, signs=True, head_scales=True)
    yield Configuration(f"quantized {name} heads", "quantized", ("quantized",), heads)
    for rotate in (False, True):
        defines = eight_bit.quantize_defines(dtype, D, Dv, True, rotate)
        label = f"quantize {name}{' rotate' * rotate}"
        yield Configuration(label, "quantize", ("quantize",), defines)
    if dtype == torch.bfloat16:
        yield Configuration(f"scaled {name}", "scaled", ("scaled",), eight_bit.e4m3_defines(Dv))


def _decode(name: str, D: int, page: int, dtype: torch.dtype) -> Iterator[Configuration]:
    for rows, (word, features) in itertools.product((8, 16), CACHED.items()):
        config = configs.decode_config(D, D, rows, page)
        defines = macros(config, dtype, paged=page > 0, **features)
        entries = _names(decode.entries_of(config))
        yield Configuration(f"{name} rows{rows} {word}", "decode", entries, defines)


def _decode_e4m3(name: str, D: int, page: int, dtype: torch.dtype) -> Iterator[Configuration]:
    for rows, scales in itertools.product((8, 16), (0, 1, 2, 3) if page else (0, 1, 3)):
        config = configs.decode_config(D, D, rows, page, is_e4m3=True, scales=scales)
        defines = macros(config, dtype, paged=page > 0)
        entries = _names(decode.entries_of(config))
        yield Configuration(f"{name} rows{rows} scales{scales}", "decode", entries, defines)


def _names(entries) -> tuple[str, ...]:
    return tuple(entry.name for entry in entries)


def chosen(only: str) -> list[Configuration]:
    """Those whose names have all words of one of these."""
    wanted = [set(words.split()) for words in only.split(",")]
    return [c for c in configurations() if any(words <= {*c.name.split()} for words in wanted)]


def write(folder: Path, only: str) -> None:
    """Write each entry point's cubin as NAME.ENTRY.cubin, with / as -."""

    def one(configuration: Configuration) -> None:
        name, kind, entries, defines = configuration
        for entry, code in zip(entries, nvrtc.cubins(kind, entries, defines)):
            label = FILE_NAMES.get(entry, entry)
            (folder / f"{name.replace('/', '-')}.{label}.cubin").write_bytes(code)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as threads:
        list(threads.map(one, chosen(only)))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
