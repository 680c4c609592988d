"""Launching the decoding kernels: attention over a key-value cache, and short queries in general.

Everything here depends on shapes alone; lengths are read on the device. So a captured CUDA graph
serves every length that its cache can hold.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.triton.arguments import Class, arguments, padded, precision
from fa_ops.backends.triton.configs_decode import (
    FIXED_KEYS,
    LIGHT_KEYS,
    MERGE_PARTS,
    MERGE_WARPS,
    DecodeTile,
    decode_tile,
)
from fa_ops.backends.triton.decode_append import prepare_cache
from fa_ops.backends.triton.decode_kernels import merge_splits_kernel, split_kernel
from fa_ops.backends.triton.launch import INTERPRETED, Launch, address, architecture, bind, empty
from fa_ops.types import Cache, Spec

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = torch.float8_e4m3fn
_CHUNKS = (16, 256)  # rows of the batch that a program looks over at once
_launches: dict[tuple, Plan] = {}


class Plan(NamedTuple):
    """The kernels of one class of calls."""

    split: Launch
    merge: Launch
    tile: DecodeTile


class Memory(NamedTuple):
    """A cache of keys and values as the kernels see it."""

    key: Tensor  # fp8 as int16, two numbers in each
    value: Tensor
    strides: tuple[int, ...]  # of key, then value: batch or page, head, token
    Hkv: int
    capacity: int
    page: int  # keys of a page; 0: contiguous
    table: Tensor | None
    Dv: int
    k_scale: Tensor | None
    v_scale: Tensor | None

    @staticmethod
    def of(k: Tensor, v: Tensor, cache: Cache) -> Memory:
        rest = (v.shape[3], cache.k_scale, cache.v_scale)
        table = cache.page_table
        if k.dtype == _FP8:
            k, v = _in_pairs("key_cache", k), _in_pairs("value_cache", v)
        (kb, k1, k2, _), (vb, v1, v2, _) = k.stride(), v.stride()
        if table is None:
            return Memory(k, v, (kb, k1, k2, vb, v1, v2), k.shape[1], k.shape[2], 0, None, *rest)
        _, size, Hkv, _ = k.shape
        capacity = size * table.shape[1]
        return Memory(k, v, (kb, k2, k1, vb, v2, v1), Hkv, capacity, size, table, *rest)


def _in_pairs(name: str, x: Tensor) -> Tensor:
    """An fp8 cache as int16, which is how tensor cores' operands can be read."""
    if any(stride % 2 for stride in x.stride()[:-1]) or x.data_ptr() % 2:
        raise NotImplementedError(
            f"fp8 caches need even strides and addresses, {name} has strides {x.stride()}"
        )
    return x.view(torch.int16)


def cache_error(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> str | None:
    """Why this backend cannot attend such a cache, and what can."""
    device, D, Dv = q.device, q.shape[-1], v.shape[-1]
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return f"runs on CUDA tensors, got {device.type}; the cpu and reference backends run on it"
    arch = architecture(device)
    if device.type == "cuda" and arch < 80:
        return f"needs compute capability 8.0, {torch.cuda.get_device_name(device)} has {arch / 10}"
    if q.dtype not in _DTYPES:
        return f"takes float16, bfloat16 and float32, got {q.dtype}; for float64 use the CPU"
    if k.dtype == _FP8 and arch < 89 and device.type == "cuda":
        return f"has fp8 caches from compute capability 8.9 on, got {arch / 10}"
    if k.dtype == _FP8 and (D % 2 or Dv % 2):
        return f"has fp8 caches for even head dimensions, got {D} and {Dv}"
    if D > 640 or Dv > 512 or (D > 256 and D - _main(D) > 128):
        return (
            "takes head dimensions up to 256, and 512 plus up to 128 for keys, got "
            f"{D} and {Dv}; the reference backend takes any"
        )
    return None


def cache_forward(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Append the new keys and values if there are any, then attend."""
    memory, new = Memory.of(k, v, cache), 0
    if cache.key is not None or cache.rotary_cos is not None:
        q = prepare_cache(q, k, v, cache, spec.kv_lens, memory.capacity)
        new = 0 if cache.key is None else cache.key.shape[2]
    return decode(q, memory, spec, new, cache.num_splits, cache.batch_invariant)


def decode(
    q: Tensor, memory: Memory, spec: Spec, new: int = 0, splits: int = 0, invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq). `new`: keys that came to
    kv_lens since."""
    B, Hq, Sq, D = q.shape
    Dv, Hkv = memory.Dv, memory.Hkv
    group = Hq // Hkv
    device = q.get_device()
    out = empty((B, Hq, Sq, Dv), (Sq * Hq * Dv, Dv, Hq * Dv, 1), q.dtype, device)
    lse = empty((B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32, device)
    if Sq == 0:
        return out, lse
    values, kind = arguments(spec, B, Hq, Sq, memory.capacity, D)
    scale, cap, *_ = values
    slopes, slopes_stride, sinks, kv_lens = values[7:11]
    left, right = values[18:]
    mode = "fixed" if invariant else "even" if splits else "stream"
    plan, rows = _find(q, memory, kind, mode, group * Sq, B)
    units = Hkv * -(-group * Sq // plan.tile.block_m)
    if mode == "stream":
        splits = _multiprocessors(device) * plan.tile.per_sm
        programs, slots = splits, 2 * splits
    else:
        if mode == "fixed":
            splits = max(1, -(-memory.capacity // FIXED_KEYS))
        programs = B * units * splits
        slots = programs if splits > 1 else 0
    shape = (slots, plan.tile.block_m, Dv)
    partial = empty(shape, (shape[1] * Dv, Dv, 1), torch.float32, device)
    partial_lse = empty(shape[:2], (shape[1], 1), torch.float32, device)
    k, v = memory.key, memory.value
    tensors = (q, k, v, out, lse, partial, partial_lse)
    table = memory.table
    rest = (
        *q.stride()[:3], *memory.strides, B, Hkv, group, Sq, memory.capacity, new, splits,
        table, 0 if table is None else table.stride(0), k.shape[0],
        memory.k_scale, memory.v_scale, scale, cap, slopes, slopes_stride, sinks, kv_lens,
        left, right,
    )  # fmt: skip
    merge_rest = (B, Hkv, group, Sq, memory.capacity, new, splits, sinks, kv_lens, left)
    if plan.split is None:
        plan = rows((*tensors, *rest), (partial, partial_lse, out, lse, *merge_rest))
    addresses = [address(t) for t in tensors]
    plan.split((programs, 1, 1), (*addresses, *rest))
    if splits > 1:
        q_at, k_at, v_at, *results = addresses
        merged = (results[2], results[3], results[0], results[1])
        plan.merge((B * Hq * Sq, 1, 1), (*merged, *merge_rest))
    return out, lse


def _find(q: Tensor, memory: Memory, kind: Class, mode: str, rows: int, B: int):
    """The plan of these calls; without launches yet, and with what makes them, if it is new."""
    k, v = memory.key, memory.value
    bits = (q.stride(0) | q.stride(1) | q.stride(2)) * q.element_size() | q.data_ptr()
    both = 0
    for stride in memory.strides:
        both |= stride
    bits |= both * k.element_size() | k.data_ptr() | v.data_ptr()
    aligned, wide = bits % 16 == 0, max(memory.strides) >= 1 << 31
    shared = k.data_ptr() == v.data_ptr() and memory.strides[:3] == memory.strides[3:]
    D, Dv = q.shape[3], memory.Dv
    shared = shared and Dv <= D and Dv <= _main(D)
    sms = _multiprocessors(q.get_device())
    light = B * memory.Hkv * -(-rows // 32) * memory.capacity <= LIGHT_KEYS * sms
    chunk = next((c for c in _CHUNKS if c >= B), _CHUNKS[-1])
    # pieces of a row that has its share of the programs; longer ones take a few turns
    parts = min(MERGE_PARTS, padded(2 + 2 * sms // (B * memory.Hkv)))
    scaled = (memory.k_scale is not None, memory.v_scale is not None)
    key = (
        q.dtype, k.dtype, D, Dv, memory.page, aligned, wide, shared, kind, mode, rows <= 16,
        light, chunk, parts, scaled, precision(q.dtype), q.get_device(),
    )  # fmt: skip
    plan = _launches.get(key)
    if plan is not None:
        return plan, None
    arch = architecture(q.device)
    tile = decode_tile(arch, q.dtype, k.dtype == torch.int16, D, Dv, rows, light)

    def compile_both(split_args: tuple, merge_args: tuple) -> Plan:
        split, merge = constants(
            tile,
            arch,
            q.dtype,
            k.dtype == torch.int16,
            D,
            Dv,
            memory.page,
            shared,
            mode,
            chunk,
            parts,
        )
        early = {"launch_pdl": True} if split["PDL"] else {}
        divisors = divisors_of(q.dtype, k.dtype) if aligned else {}
        layout = {"divisors": divisors, "wide": wide}
        plan = _launches[key] = Plan(
            bind(split_kernel, split_args, split, tile.options() | early,
                 device=q.device, **layout),
            bind(merge_splits_kernel, merge_args, merge, {"num_warps": MERGE_WARPS} | early,
                 device=q.device),
            tile,
        )  # fmt: skip
        return plan

    return Plan(None, None, tile), compile_both


def divisors_of(dtype: torch.dtype, cached: torch.dtype) -> dict[str, int]:
    """What `bind` may take for granted where every row starts at a multiple of 16 bytes."""
    units = {"q": 16 // dtype.itemsize, "k": 16 // cached.itemsize, "v": 16 // cached.itemsize}
    strides = {f"{name}_stride_{d}": units[name] for name in "qkv" for d in "bhs"}
    return strides | dict.fromkeys("qkv", 16)


def constants(
    tile: DecodeTile, arch: int, dtype: torch.dtype, fp8: bool, D: int, Dv: int, page: int,
    shared: bool, mode: str, chunk: int, parts: int,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """The constexpr parameters of both kernels."""
    least = 32 if fp8 else 16  # a product over pairs still sums 16 of them
    main = max(least, _main(D))
    extra = max(least, padded(D - main)) if main < D else 0
    common = {
        "STREAM": mode == "stream",
        "FIXED": FIXED_KEYS // tile.block_n if mode == "fixed" else 0,
        "CHUNK": chunk,
    }
    early = {"PDL": arch >= 90 and not INTERPRETED}  # programmatic dependent launch
    split = {
        "D": D, "Dv": Dv, "BLOCK_D": main, "EXTRA": extra,
        "BLOCK_DV": main if shared else padded(Dv), "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "PAGE": page, "SHARED": shared, "PRECISION": precision(dtype),
        "STAGES": tile.num_stages,
    }  # fmt: skip
    merge = {
        "Dv": Dv, "BLOCK_DV": padded(Dv), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        **common, "PARTS": parts,
    }  # fmt: skip
    return split | common | early, merge | early


def _main(D: int) -> int:
    """Columns of the first product; the rest, if D > 256, is added by a second."""
    return padded(D) if D <= 256 else 1 << (D.bit_length() - 1)


@functools.cache
def _multiprocessors(device: int) -> int:
    if device < 0:
        return 4  # the interpreter: enough that rows are cut
    return torch.cuda.get_device_properties(device).multi_processor_count
