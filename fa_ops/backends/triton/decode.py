"""Launches the decoding kernels: attention over a key-value cache, and of short queries.

Launches depend on shapes only; lengths are read on the device. So a captured CUDA graph is valid
for every length within the cache's capacity.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.triton.append import bind_cache, prepare_cache
from fa_ops.backends.triton.configs import (
    FIXED_KEYS,
    LIGHT_KEYS,
    MERGE_PARTS,
    MERGE_WARPS,
    DecodeTile,
    decode_tile,
)
from fa_ops.backends.triton.decode_kernels import merge_splits_kernel, split_kernel
from fa_ops.backends.triton.launch import (
    INTERPRETED,
    NAMES,
    Class,
    Launch,
    address,
    architecture,
    arguments,
    bind,
    empty,
    interpreter_error,
    multiprocessors,
    padded,
    precision,
    size_error,
)
from fa_ops.call.call import Call, Run
from fa_ops.call.options import ALIGNMENT, MAX_HEAD_DIM, dtype_name, scales_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = torch.float8_e4m3fn
_MAX_KEY_DIM = 640  # of a latent cache: 512 features and up to 128 that rotate
_SLOPES_STRIDE = NAMES.index("slopes_stride_b")
_WINDOW = slice(NAMES.index("window_left"), NAMES.index("window_right") + 1)
_CHUNKS = (16, 64, 256)  # sequences whose lengths a program reads at once
_launches: dict[tuple, SplitKernels] = {}


class Memory(NamedTuple):
    """A cache of keys and values in the form that the kernels take."""

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
    unified_max: Tensor | None

    @staticmethod
    def of(call: Call) -> Memory:
        """The cache of a call, contiguous or paged, or keys and values of a dense call."""
        k, v, tensors, table = call.key, call.value, call.operands, call.operands.page_table
        rest = (v.shape[3], tensors.k_scale, tensors.v_scale, tensors.unified_max)
        if k.dtype == _FP8:
            k, v = _in_pairs("key_cache", k), _in_pairs("value_cache", v)
        (kb, k1, k2, _), (vb, v1, v2, _) = k.stride(), v.stride()
        if table is None:
            return Memory(k, v, (kb, k1, k2, vb, v1, v2), k.shape[1], k.shape[2], 0, None, *rest)
        _, size, Hkv, _ = k.shape
        capacity = size * table.shape[1]
        return Memory(k, v, (kb, k2, k1, vb, v2, v1), Hkv, capacity, size, table, *rest)

    def small(self) -> tuple[Tensor | None, ...]:
        """The tensors besides keys and values, in the order of the launch's arguments."""
        return self.table, self.k_scale, self.v_scale, self.unified_max


def _in_pairs(name: str, x: Tensor) -> Tensor:
    """View an fp8 cache as int16, the width in which the kernels load tensor core operands."""
    if any(stride % 2 for stride in x.stride()[:-1]) or x.data_ptr() % 2:
        raise NotImplementedError(
            f"fp8 caches need even strides and addresses, {name} has strides {x.stride()}"
        )
    return x.view(torch.int16)


def cache_error(call: Call) -> str | None:
    """Return why this backend cannot attend the cache, and which can; None if it can."""
    q, k, v = call[:3]
    device, D, Dv = q.device, q.shape[-1], v.shape[-1]
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return f"runs on CUDA tensors, got {device.type}; the cpu and reference backends run on it"
    arch = architecture(device)
    if device.type == "cuda" and arch < 80:
        return f"needs compute capability 8.0, {torch.cuda.get_device_name(device)} has {arch / 10}"
    if q.dtype not in _DTYPES:
        found = dtype_name(q.dtype)
        return f"takes float16, bfloat16 and float32, got {found}; for float64 use the CPU"
    if k.dtype == _FP8 and arch < 89 and device.type == "cuda":
        return f"has fp8 caches from compute capability 8.9 on, got {arch / 10}"
    if reason := interpreter_error(q):
        return reason
    if k.dtype == _FP8 and (D % 2 or Dv % 2):
        return f"has fp8 caches for even head dimensions, got {D} and {Dv}"
    if D > _MAX_KEY_DIM or Dv > MAX_HEAD_DIM:
        return (
            f"takes head dimensions up to {MAX_HEAD_DIM}, and of keys in a cache up to "
            f"{_MAX_KEY_DIM}, got {D} and {Dv}; the reference backend takes any"
        )
    return size_error(q.shape[2], call.num_keys)


def cache_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Append the new keys and values, if any, then attend."""
    return decode(call._replace(query=prepare_cache(call)) if call.writes_cache else call)


def prepare_cached(call: Call) -> Run:
    """A function that runs cached calls with the geometry of this one."""
    q, write = call.query, bind_cache(call) if call.writes_cache else None
    options = call.without_tensors()
    exact = q.dtype == torch.float32  # unless torch's switch says otherwise
    known: dict[tuple, Callable] = {}  # by alignment of the addresses, and by that switch

    def run(q, k, v, tensors, with_lse=True) -> tuple[Tensor, Tensor | None]:
        t = tensors
        k_at, v_at = k.data_ptr(), v.data_ptr()
        if (k_at | v_at) % 2:
            _in_pairs("key_cache", k), _in_pairs("value_cache", v)
        if write is not None:
            q, _ = write(q, k, v, t)
        is_aligned = (q.data_ptr() | k_at | v_at) % ALIGNMENT == 0
        kind = is_aligned, k_at == v_at, exact and precision(q.dtype)
        launch = known.get(kind)
        if launch is None:
            launch = known[kind] = _bind(options._replace(query=q, key=k, value=v, operands=t))
        if INTERPRETED and k.dtype == _FP8:  # kernels are given the tensors, not their addresses
            k, v = k.view(torch.int16), v.view(torch.int16)
        small = (t.page_table, t.k_scale, t.v_scale, t.unified_max, t.alibi_slopes, t.sinks)
        return launch(with_lse, q, k, v, *small, t.kv_lens, t.key_ranges)

    return run


def decode(call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) laid out (B, Sq, Hq, Dv), and lse (B, Hq, Sq).

    New keys are in the cache already, behind those that kv_lens count.
    """
    m, t = Memory.of(call), call.operands
    small = (t.alibi_slopes, t.sinks, t.kv_lens, t.key_ranges)
    small = (None if x is None else x.contiguous() for x in small)
    return _bind(call)(True, call.query, m.key, m.value, *m.small(), *small)


def _bind(call: Call) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The part of a call that does not depend on its tensors' contents and addresses."""
    q, tensors, memory = call.query, call.operands, Memory.of(call)
    splits, invariant = call.options.num_splits, call.options.batch_invariant
    new = 0 if tensors.new_key is None else tensors.new_key.shape[2]
    B, Hq, Sq, D = q.shape
    Dv, Hkv, capacity = memory.Dv, memory.Hkv, memory.capacity
    group, device = Hq // Hkv, q.get_device()
    if Sq == 1:  # a single query is the last and has no later keys
        call = call.changed(is_causal=False, window_right=-1)
    values, kind = arguments(call, B, Hq, Sq, capacity)
    scale, cap, slopes_stride, (left, right) = *values[:2], values[_SLOPES_STRIDE], values[_WINDOW]
    mode = "fixed" if invariant else "even" if splits else "stream"
    plan = _plan(q, memory, kind, mode, group * Sq)
    tile = plan.tile
    if mode == "stream":
        splits = programs = multiprocessors(device) * tile.per_sm
        slots = 2 * splits
    else:
        splits = max(1, -(-capacity // FIXED_KEYS)) if mode == "fixed" else splits
        programs = B * Hkv * -(-group * Sq // tile.block_m) * splits
        slots = programs if splits > 1 else 0
    shape_of_out = (B, Hq, Sq, Dv), (Sq * Hq * Dv, Dv, Hq * Dv, 1), q.dtype, device
    shape_of_lse = (B, Hq, Sq), (Hq * Sq, Sq, 1), torch.float32, device
    # pieces, their lse, and a place for the lse of a call that returns none
    parts = slots * tile.block_m * Dv, slots * tile.block_m, B * Hq * Sq
    workspace = (sum(parts),), (1,), torch.float32, device
    sizes = (B, Hkv, group, Sq, capacity, new, splits)
    strides = (*q.stride()[:3], *memory.strides)
    table_stride = 0 if memory.table is None else memory.table.stride(0)
    pages = memory.key.shape[0]
    ranges = tensors.key_ranges
    ranges_stride = 0 if ranges is None or ranges.shape[0] == 1 else 2

    def run(with_lse, q, k, v, *small, at=address):
        out, lse = empty(*shape_of_out), empty(*shape_of_lse) if with_lse else None
        if Sq == 0:
            return out, lse
        work = empty(*workspace)
        *pieces, unwanted = _parts(at(work), parts)
        results = at(out), unwanted if lse is None else at(lse)
        table, k_scale, v_scale, unified_max, slopes, sinks, kv_lens, ranges = [
            None if t is None else at(t) for t in small
        ]
        split_args = (
            at(q), at(k), at(v), *results, *pieces, *strides, *sizes, table, table_stride, pages,
            k_scale, v_scale, scale, cap, slopes, slopes_stride, sinks, kv_lens, ranges,
            ranges_stride, unified_max, left, right,
        )  # fmt: skip
        merge_args = (*pieces, *results, *sizes, sinks, kv_lens, ranges, ranges_stride, left)
        if at is not address:
            return split_args, merge_args
        plan.split((programs, 1, 1), split_args)
        if splits > 1:
            plan.merge((B * Hq * Sq, 1, 1), merge_args)
        return out, lse

    if plan.split is None and Sq:
        small = (tensors.alibi_slopes, tensors.sinks, tensors.kv_lens, ranges)
        m = memory
        plan = plan.compile(run(True, q, m.key, m.value, *m.small(), *small, at=lambda t: t))
    return run


def _parts(work: Tensor | int, sizes: tuple[int, int, int]) -> Sequence[Tensor | int]:
    """The three adjacent fp32 parts of the workspace at `work`, as tensors or addresses."""
    if isinstance(work, int):
        first, second, _ = sizes
        return work, work + 4 * first, work + 4 * (first + second)
    return work.split(sizes)


class SplitKernels(NamedTuple):
    """The kernels of one class of calls, or a function that compiles them from sample arguments."""

    tile: DecodeTile
    split: Launch | None = None
    merge: Launch | None = None
    compile: Callable[[tuple], SplitKernels] | None = None


def _plan(q: Tensor, memory: Memory, kind: Class, mode: str, rows: int) -> SplitKernels:
    k, v, B, D, Dv = memory.key, memory.value, q.shape[0], q.shape[3], memory.Dv
    bits = (q.stride(0) | q.stride(1) | q.stride(2)) * q.element_size() | q.data_ptr()
    stride_bits = functools.reduce(operator.or_, memory.strides)
    bits |= stride_bits * k.element_size() | k.data_ptr() | v.data_ptr()
    aligned, wide = bits % ALIGNMENT == 0, max(memory.strides) >= 1 << 31
    shared = k.data_ptr() == v.data_ptr() and memory.strides[:3] == memory.strides[3:]
    shared = shared and Dv <= min(D, _main(D))
    sms = multiprocessors(q.get_device())
    apart = q.shape[2] > 1 and (kind.left or kind.right)  # rows may attend different keys
    light = B * memory.Hkv * -(-rows // 32) * memory.capacity <= LIGHT_KEYS * sms
    chunk = next((c for c in _CHUNKS if c >= B), _CHUNKS[-1])
    # pieces of a sequence with its share of the programs; longer ones loop in the merge kernel
    parts = min(MERGE_PARTS, padded(2 + 2 * sms // max(1, B * memory.Hkv)))
    scales = scales_of(memory.k_scale, memory.v_scale, memory.page > 0)
    given = (*(t is not None for t in memory.small()), scales)
    key = (
        q.dtype, k.dtype, D, Dv, memory.page, aligned, wide, shared, kind, mode, rows <= 16,
        apart, light, chunk, parts, given, precision(q.dtype), q.get_device(),
    )  # fmt: skip
    plan = _launches.get(key)
    if plan is not None:
        return plan
    arch, fp8 = architecture(q.device), k.dtype == torch.int16
    tile = decode_tile(arch, q.dtype, fp8, D, Dv, rows, light)

    def compiled(samples: tuple[tuple, tuple]) -> SplitKernels:
        shape = (D, Dv, memory.page, shared, mode, chunk, parts, scales, kind.extreme, apart)
        split, merge = constants(tile, arch, q.dtype, fp8, *shape)
        early = {"launch_pdl": True} if split["PDL"] else {}
        divisors = divisors_of(q.dtype, k.dtype) if aligned else {}
        layout = {"device": q.device, "divisors": divisors, "wide": wide}
        plan = _launches[key] = SplitKernels(
            tile,
            bind(split_kernel, samples[0], split, tile.options() | early, **layout),
            bind(
                merge_splits_kernel, samples[1], merge, {"num_warps": MERGE_WARPS} | early,
                device=q.device,
            ),
        )  # fmt: skip
        return plan

    return SplitKernels(tile, compile=compiled)


def divisors_of(dtype: torch.dtype, cached: torch.dtype) -> dict[str, int]:
    """The divisors for `bind` if every row starts at a multiple of 16 bytes."""
    dtypes = {"q": dtype, "k": cached, "v": cached}
    units = {name: ALIGNMENT // dtype.itemsize for name, dtype in dtypes.items()}
    strides = {f"{name}_stride_{d}": units[name] for name in "qkv" for d in "bhs"}
    return strides | dict.fromkeys("qkv", ALIGNMENT)


def constants(
    tile: DecodeTile, arch: int, dtype: torch.dtype, fp8: bool, D: int, Dv: int, page: int,
    shared: bool, mode: str, chunk: int, parts: int, scales: int = 0,
    extreme: bool = False, apart: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """The constexpr parameters of the split and the merge kernel."""
    min_width = 32 if fp8 else 16  # products of fp8 sum over pairs, at least 16 of them
    main = max(min_width, _main(D))
    extra = max(min_width, padded(D - main)) if main < D else 0
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
        "STAGES": tile.num_stages, "SCALES": scales, "EXTREME": extreme, "APART": apart,
    }  # fmt: skip
    merge = {
        "Dv": Dv, "BLOCK_DV": padded(Dv), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        **common, "PARTS": parts,
    }  # fmt: skip
    return split | common | early, merge | early


def _main(D: int) -> int:
    """Columns of the first product q.k; a second one adds the others if D > 256."""
    return padded(D) if D <= 256 else 1 << (D.bit_length() - 1)
