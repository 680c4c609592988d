"""Dense backward on sm_90a in three launches: row sums, the products, and dQ: its sums to the input
type, or, for wide heads and where its bits must repeat, its products as well."""

from __future__ import annotations

import ctypes
import functools
import struct

import torch
from torch import Tensor

from fa_ops.backends.hopper import dropout
from fa_ops.backends.hopper.bias import Bias, bits_of
from fa_ops.backends.hopper.configs import BackwardConfig, backward_config
from fa_ops.backends.hopper.launch import (
    Kernel,
    TensorMap,
    address,
    current_stream,
    kernel,
    launch_early,
    on_device,
    pointers_to,
)
from fa_ops.backends.hopper.mask import bits_by_key, bits_by_query, queries_share, run_at
from fa_ops.backends.hopper.mask_gradient import mask_gradient
from fa_ops.backends.hopper.problem import (
    LOG2E,
    ScoreUnits,
    copyable,
    section_of,
    shared_strides,
    window,
)
from fa_ops.types import Gradients, Packing, Spec

_PARAMS = struct.Struct("<896s7Q14i4f10Qi4x32s")  # struct Params in cuda/backward.cuh
_PARAMS_BYTES = 1152  # its size there, up to a bias
_BIAS_BYTES = 192
_ROWS = 64  # tokens that one copy brings, and a CTA of `prepare`
# Of Q and dO that CTAs side by side pass over: dQ's fp32 sums take as much again, and additions to
# them are fast where they stay in the L2.
_SECTION_BYTES = 16 << 20


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: Spec,
    mask_grad: bool = False,
    packing: Packing | None = None,
) -> Gradients:
    grads = tuple(torch.empty_like(t) for t in (q, k, v))
    q, k, v, grad_out, out = (copyable(t) for t in (q, k, v, grad_out, out))
    B, Hq, Sq, D = q.shape
    config = _config(D, v.shape[-1], spec)
    m_blocks = -(-Sq // config.block_m)
    rows = m_blocks * config.block_m
    lse_log2, delta = torch.empty((2, B * Hq, rows), dtype=torch.float32, device=q.device)
    sums = None
    if config.adds_dq:
        sums = torch.empty((B * Hq, rows, config.head_dim), dtype=torch.float32, device=q.device)
    kernels = _kernels_for(q, spec, config)
    with on_device(q.device.index):
        stream = current_stream(q.device.index)
        runs = _runs(q, k, spec, m_blocks, config, kernels, stream)
        workspace = (lse_log2, delta, sums, *runs)
        row_keys = dropout.row_keys(q, spec, packing)
        params = _params(q, k, v, grad_out, grads, workspace, row_keys, spec, config)
        kernels.prepare.launch(
            (rows // _ROWS, B * Hq),
            stream,
            pointers_to(
                *_words(out, grad_out, lse, grad_lse, lse_log2, delta, sums),
                *(_strides(out), _strides(grad_out)),
                *_ints(Hq, Sq, v.shape[-1], rows),
            ),
        )
        blocks = -(-k.shape[2] // config.block_n) * k.shape[0] * k.shape[1]
        launch_early((kernels.products,), blocks, stream, pointers_to(params))
        if sums is None:
            kernels.queries.launch((-(-m_blocks // 2) * B * Hq, 1), stream, pointers_to(params))
        else:
            dq, scale = grads[0], ctypes.c_float(_gradient_scale(D, spec))
            where = *_words(sums, dq), _strides(dq), *_ints(m_blocks, Hq, Sq, D)
            blocks = m_blocks * B * Hq
            launch_early((kernels.finish,), blocks, stream, pointers_to(*where, scale))
        dmask = None
        if mask_grad:
            dmask = mask_gradient(spec.attn_mask, q, k, config, kernels.defines, params, stream)
    return Gradients(*grads, dmask, _sink_gradient(spec, lse, delta))


def _config(D: int, Dv: int, spec: Spec) -> BackwardConfig:
    bits = bits_of(spec.attn_mask)
    has_mask = spec.attn_mask is not None and not bits
    is_crowded = has_mask or spec.dropout_p > 0 or spec.softcap > 0
    return backward_config(D, Dv, spec.deterministic, bits, is_crowded)


def _params(
    q, k, v, grad_out, grads, workspace, row_keys, spec: Spec, config: BackwardConfig
) -> ctypes.Array:
    (B, Hq, Sq, D), (Hkv, Sk), group = q.shape, k.shape[1:3], q.shape[1] // k.shape[1]
    m_blocks, n_blocks = -(-Sq // config.block_m), -(-Sk // config.block_n)
    left, right, _ = window(spec.is_causal, spec.window_left, spec.window_right)
    units = ScoreUnits.of(D, spec.scale, spec.softcap)
    maps = (
        TensorMap(t.dtype, t.shape, t.stride(), _ROWS).at(t.data_ptr())
        for t in (q, k, v, grad_out, *grads)
    )
    lens = None if spec.kv_lens is None else spec.kv_lens.contiguous()
    slopes = None if spec.alibi_slopes is None else spec.alibi_slopes.contiguous()
    by_key, by_query = _mask_bits(spec, Sk, config)
    bias, held = Bias.of(spec.attn_mask) if config.bias_bits else (None, None)
    dims = D + v.shape[-1]
    section = section_of(B * Hkv, Sq * 2 * dims * group, _SECTION_BYTES)
    query_section = section_of(B * Hkv, Sk * 2 * dims) * group
    params = ctypes.create_string_buffer(_PARAMS_BYTES + _BIAS_BYTES)
    _PARAMS.pack_into(
        params,
        0,
        b"".join(maps),
        *(address(t) for t in (*workspace[:3], lens, slopes, *workspace[3:])),
        *(B, Hq, Hkv, group, Sq, Sk, left, right, m_blocks, n_blocks),
        *(section, query_section),
        Hq if slopes is not None and slopes.dim() == 2 else 0,
        1 if spec.key_ranges is None else spec.key_ranges.shape[1],
        *(_gradient_scale(D, spec), units.inside_tanh),
        LOG2E if bias else units.accumulator * LOG2E,  # with a bias, scores are in its units
        1.0 / units.accumulator,
        *_as_read(by_key),
        *_as_read(by_query),
        0 if by_key is None or queries_share(spec.attn_mask) else config.block_m // 8,
        dropout.parameters(row_keys, spec.dropout_p),
    )
    if bias is not None:
        packed = bias.packed(bias.map(), address(held), units.accumulator)
        ctypes.memmove(ctypes.addressof(params) + _PARAMS_BYTES, packed, len(packed))
    # until the launch has read their addresses
    params.keep = (lens, slopes, by_key, by_query, held)
    return params


def _gradient_scale(D: int, spec: Spec) -> float:
    """Of q's and k's: the kernels leave out what dropout multiplies weights with."""
    return ScoreUnits.of(D, spec.scale, spec.softcap).gradient * dropout.scale(spec.dropout_p)


def _mask_bits(spec: Spec, Sk: int, config) -> tuple[Tensor | None, Tensor | None]:
    """A mask's bits for the scores that have a row a key, and for those that have one a query."""
    mask = spec.attn_mask
    if mask is None or config.bias_bits:
        return None, None
    return bits_by_key(mask), None if config.adds_dq else bits_by_query(mask, Sk)


def _as_read(bits: Tensor | None) -> tuple[int, ...]:
    """struct Bits in cuda/backward.cuh."""
    return (0,) * 5 if bits is None else (address(bits), *shared_strides(bits), run_at(bits))


def _runs(q, k, spec: Spec, m_blocks: int, config, kernels, stream) -> tuple[Tensor | None, ...]:
    """With key ranges, each query's keys after every mask, and each block of queries' bounds."""
    ranges = spec.key_ranges
    if ranges is None:
        return None, None
    ranges = ranges if ranges.stride(3) == 1 else ranges.contiguous()
    (B, _, Sq, _), heads = q.shape, ranges.shape[1]
    lens = None if spec.kv_lens is None else spec.kv_lens.contiguous()
    left, right, _ = window(spec.is_causal, spec.window_left, spec.window_right)
    new = functools.partial(torch.empty, dtype=torch.int32, device=q.device)
    runs, bounds = new((B * heads, m_blocks * config.block_m, 2)), new((B * heads, m_blocks, 4))
    kernels.keep_runs.launch(
        (m_blocks, B * heads),
        stream,
        pointers_to(
            *_words(ranges, lens, runs, bounds),
            (ctypes.c_int64 * 3)(*shared_strides(ranges)),
            *_ints(heads, Sq, k.shape[2], left, right),
        ),
    )
    return runs, bounds


def _sink_gradient(spec: Spec, lse: Tensor, delta: Tensor) -> Tensor | None:
    """Minus a sink's weight times delta, summed over batch and queries; delta holds -dlse."""
    if spec.sinks is None:
        return None
    B, Hq, Sq = lse.shape
    weight = torch.exp(spec.sinks.float().view(1, Hq, 1) - lse)
    return -(weight * delta.view(B, Hq, -1)[..., :Sq]).sum((0, 2)).to(spec.sinks.dtype)


def _words(*tensors: Tensor | None) -> list[ctypes.c_uint64]:
    return [ctypes.c_uint64(address(t)) for t in tensors]


def _ints(*values: int) -> list[ctypes.c_int]:
    return [ctypes.c_int(v) for v in values]


def _strides(t: Tensor) -> ctypes.Array:
    return (ctypes.c_int64 * 3)(*t.stride()[:3])


class _Kernels:
    def __init__(self, defines: tuple[tuple[str, int], ...], config: BackwardConfig, device: int):
        def entry(name: str, threads: int, shared: int = 0) -> Kernel:
            return kernel("backward", name, device, threads, shared, defines)

        self.defines = defines
        self.prepare = entry("prepare", 256)
        self.products = entry("backward", config.threads, config.shared_bytes)
        if config.adds_dq:
            self.finish = entry("finish", 256)
        else:
            self.queries = entry("backward_queries", config.threads, config.query_shared_bytes)
        if dict(defines)["HAS_RANGES"]:
            self.keep_runs = entry("keep_runs", config.block_m)


_kernels = functools.cache(_Kernels)


def _kernels_for(q: Tensor, spec: Spec, config: BackwardConfig) -> _Kernels:
    defines = kernel_defines(
        config,
        q.dtype,
        ragged=window(spec.is_causal, spec.window_left, spec.window_right)[2],
        kv_lens=spec.kv_lens is not None,
        ranges=spec.key_ranges is not None,
        softcap=spec.softcap > 0,
        alibi=spec.alibi_slopes is not None,
        mask=spec.attn_mask is not None and not config.bias_bits,
        dropout=spec.dropout_p > 0,
    )
    return _kernels(tuple(defines.items()), config, q.device.index)


def kernel_defines(
    config: BackwardConfig, dtype: torch.dtype, *, ragged: bool = False, kv_lens: bool = False,
    ranges: bool = False, softcap: bool = False, alibi: bool = False, mask: bool = False,
    dropout: bool = False,
) -> dict[str, int]:  # fmt: skip
    """What the kernels are compiled for; `ragged` has a window or is causal."""
    return config.defines() | {
        "IS_BF16": int(dtype == torch.bfloat16),
        "IS_RAGGED": int(ragged),
        "HAS_KV_LENS": int(kv_lens),
        "HAS_RANGES": int(ranges),
        "HAS_SOFTCAP": int(softcap),
        "HAS_ALIBI": int(alibi),
        "HAS_MASK": int(mask),
        "HAS_DROPOUT": int(dropout),
    }
