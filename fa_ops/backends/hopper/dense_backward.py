"""Dense backward on sm_90a in three launches: row sums, the products, and dQ: its sums to the input
type, or, for wide heads and where its bits must repeat, its products as well. A plan per family of
calls."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from fa_ops.backends.hopper import dropout
from fa_ops.backends.hopper.bias import Bias, bits_of
from fa_ops.backends.hopper.configs import BackwardConfig, backward_config
from fa_ops.backends.hopper.launch import (
    Entry,
    Params,
    TensorMap,
    address,
    current_stream,
    empty,
    kernels,
    launch_early,
    on_device,
)
from fa_ops.backends.hopper.mask import bits_by_key, bits_by_query, queries_share, run_at
from fa_ops.backends.hopper.mask_gradient import mask_gradient
from fa_ops.backends.hopper.problem import (
    LOG2E,
    ScoreUnits,
    copyable,
    key_section,
    section_of,
    shared_strides,
    window,
)
from fa_ops.types import Gradients, Packing, Spec

# struct Params in cuda/backward.cuh: maps and addresses, scalars, a mask's bits, dropout, a bias
_PLACES, _SCALARS = struct.Struct("<" + 7 * "128s" + "7Q"), struct.Struct("<14i4f")
_BITS, _BITS_AT = struct.Struct("<10Qi4x"), _PLACES.size + _SCALARS.size
_DROPOUT_AT = _BITS_AT + _BITS.size
_BIAS_AT, _PARAMS_BYTES = 1152, 1344

# What the kernels around the products take: addresses, then what calls share.
_PREPARE, _PREPARE_OFFSETS = struct.Struct("<7Q"), (*range(0, 57, 8), 80, *range(104, 117, 4))
_FINISH, _FINISH_OFFSETS = struct.Struct("<2Q"), (0, 8, 16, *range(40, 57, 4))
_RUNS, _RUNS_OFFSETS = struct.Struct("<4Q"), (0, 8, 16, 24, 32, *range(56, 73, 4))

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
    grads = [torch.empty_like(t) for t in (q, k, v)]
    tensors = q, k, v, grad_out, out = [copyable(t) for t in (q, k, v, grad_out, out)]
    ranges, slopes, mask = spec.key_ranges, spec.alibi_slopes, spec.attn_mask
    if ranges is not None and ranges.stride(3) != 1:
        ranges = ranges.contiguous()
    bias, held = Bias.of(mask) if bits_of(mask) else (None, None)
    plan = _plan(
        q.dtype,
        q.device.index,
        (q.shape, k.shape, v.shape),
        tuple(t.stride() for t in (*tensors, *grads)),
        (spec.is_causal, spec.scale, spec.window_left, spec.window_right, spec.softcap),
        spec.deterministic,
        spec.kv_lens is not None,
        None if ranges is None else (ranges.shape[1], *shared_strides(ranges)),
        None if slopes is None else slopes.dim(),
        mask is not None and bias is None,
        bias,
        spec.dropout_p,
    )
    small = tuple(None if t is None else t.contiguous() for t in (spec.kv_lens, slopes))
    row_keys = dropout.row_keys(q, spec, packing)
    dmask, delta = plan.run(
        (*tensors, *grads), lse, grad_lse, (*small, ranges), mask, held, row_keys, mask_grad
    )
    return Gradients(*grads, dmask, _sink_gradient(spec, lse, delta))


class Plan:
    """All of a call that does not depend on where its tensors lie or what they hold."""

    def __init__(
        self, dtype, device, shapes, strides, statics, deterministic, has_lens, ranges,
        slopes_dim, has_mask, bias, dropout_p,
    ):  # fmt: skip
        (B, Hq, Sq, D), (_, Hkv, Sk, _), (_, _, _, Dv) = shapes
        *_, of_grad_out, of_out, of_dq, _, _ = strides
        causal, scale, left, right, softcap = statics
        left, right, ragged = window(causal, left, right)
        crowded = has_mask or dropout_p > 0 or softcap > 0
        bits = bias.dtype.itemsize * 8 if bias else 0
        self.config = config = backward_config(D, Dv, deterministic, bits, crowded)
        self.device, self.dropout_p = device, dropout_p
        self.kernels = _kernels_for(
            config, dtype, device, ragged=ragged, kv_lens=has_lens, ranges=ranges is not None,
            softcap=softcap > 0, alibi=slopes_dim is not None, mask=has_mask, dropout=dropout_p > 0,
        )  # fmt: skip
        units = ScoreUnits.of(D, scale, softcap)
        self.bias = None
        if bias is not None:
            self.bias = functools.partial(bias.packed, bias.map(), unit=units.accumulator)
        self.m_blocks = m_blocks = -(-Sq // config.block_m)
        self.row_blocks, n_blocks = m_blocks * config.block_m // _ROWS, -(-Sk // config.block_n)
        self.heads, self.ctas = B * Hq, n_blocks * B * Hkv
        self._allocate(0 if ranges is None else B * ranges[0])
        out = B, Hq, Sq, Dv
        layouts = zip((*shapes, out, out, *shapes), strides)
        self.maps = [TensorMap(dtype, shape, stride, _ROWS) for shape, stride in layouts]
        del self.maps[4]  # of the output, which no copy reads
        # the kernels leave out what dropout multiplies weights with
        gradient = units.gradient * dropout.scale(dropout_p)
        per_query = Sq * 2 * (D + Dv) * (Hq // Hkv)
        scalars = _SCALARS.pack(
            *(B, Hq, Hkv, Hq // Hkv, Sq, Sk, left, right, m_blocks, n_blocks),
            section_of(B * Hkv, per_query, _SECTION_BYTES),
            key_section(B * Hkv, Sk, D + Dv) * (Hq // Hkv),
            Hq if slopes_dim == 2 else 0,
            1 if ranges is None else ranges[0],
            *(gradient, units.inside_tanh),
            LOG2E if bias else units.accumulator * LOG2E,  # with a bias, scores are in its units
            1.0 / units.accumulator,
        )
        self.params = Params(_PLACES, scalars.ljust(_PARAMS_BYTES - _PLACES.size, b"\0"))
        rows = struct.pack("<6q4i", *of_out[:3], *of_grad_out[:3], Hq, Sq, Dv, self.rows)
        self.prepare = Params(_PREPARE, rows, _PREPARE_OFFSETS)
        rows = struct.pack("<3q4if", *of_dq[:3], m_blocks, Hq, Sq, D, gradient)
        self.finish = Params(_FINISH, rows, _FINISH_OFFSETS)
        if ranges is not None:
            rows = struct.pack("<3q5i", *ranges[1:], ranges[0], Sq, Sk, left, right)
            self.keep_runs = Params(_RUNS, rows, _RUNS_OFFSETS)

    def _allocate(self, run_heads: int) -> None:
        """Shapes, strides and dtypes of the workspace, whose parts follow one another:
        log-sum-exps, row sums, and, in one pass, the sums of dQ."""
        self.rows = self.row_blocks * _ROWS
        rows = self.heads * self.rows
        floats = 2 * rows + (rows * self.config.head_dim if self.config.adds_dq else 0)
        self.row_bytes = 4 * rows
        self.workspace = (floats,), (1,), torch.float32
        self.run_bytes = 8 * run_heads * self.rows
        self.runs = (run_heads * (2 * self.rows + 4 * self.m_blocks),), (1,), torch.int32
        self.run_grid = run_heads, self.m_blocks

    def run(
        self,
        tensors: Sequence[Tensor],
        lse: Tensor,
        grad_lse: Tensor | None,
        small: tuple[Tensor | None, ...],
        mask: Tensor | None,
        bias: Tensor | None,
        row_keys: Tensor | None,
        mask_grad: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """Fills dq, dk and dv; the mask's gradient, and the row sums (B * Hq, rows)."""
        (q, k, v, grad_out, out, *grads), (lens, slopes, ranges) = tensors, small
        config, kernels, dmask = self.config, self.kernels, None
        with on_device(self.device):
            stream = current_stream(self.device)
            workspace, runs = empty(*self.workspace), self._find_runs(ranges, lens, stream)
            at = lse_log2 = workspace.data_ptr()
            delta, sums = at + self.row_bytes, at + 2 * self.row_bytes if config.adds_dq else 0
            places = (t.data_ptr() for t in (q, k, v, grad_out, *grads))
            params = self.params.take(
                *(of.at(place) for of, place in zip(self.maps, places)),
                *(lse_log2, delta, sums, address(lens), address(slopes), address(runs)),
                0 if runs is None else runs.data_ptr() + self.run_bytes,
            )
            bits = self._write_features(params[0], mask, bias, row_keys, k.shape[2])
            rows = self.prepare.take(
                out.data_ptr(), grad_out.data_ptr(), lse.data_ptr(), address(grad_lse),
                lse_log2, delta, sums,
            )  # fmt: skip
            kernels.prepare.launch((self.heads, self.row_blocks), stream, rows[1])
            self.prepare.give_back(rows)
            launch_early((kernels.products,), self.ctas, stream, params[1])
            if config.adds_dq:
                rows = self.finish.take(sums, grads[0].data_ptr())
                launch_early((kernels.finish,), self.m_blocks * self.heads, stream, rows[1])
                self.finish.give_back(rows)
            else:
                ctas = -(-self.m_blocks // 2) * self.heads
                kernels.queries.launch((ctas, 1), stream, params[1])
            if mask_grad:
                dmask = mask_gradient(mask, q, k, config, kernels.defines, params[0], stream)
        self.params.give_back(params)
        del bits  # the kernels that read them are launched
        return dmask, workspace[self.row_bytes // 4 :][: self.row_bytes // 4]

    def _find_runs(self, ranges: Tensor | None, lens: Tensor | None, stream: int) -> Tensor | None:
        """Each query's keys after every mask, and each block of queries' bounds."""
        if ranges is None:
            return None
        runs = empty(*self.runs)
        at = runs.data_ptr()
        params = self.keep_runs.take(ranges.data_ptr(), address(lens), at, at + self.run_bytes)
        self.kernels.keep_runs.launch(self.run_grid, stream, params[1])
        self.keep_runs.give_back(params)
        return runs

    def _write_features(
        self, params, mask: Tensor | None, bias: Tensor | None, row_keys: Tensor | None, Sk: int
    ) -> tuple[Tensor | None, ...]:
        """What masks and dropout have in the parameters; the bits that these point to."""
        by_key = by_query = None
        if mask is not None and bias is None:
            # for the scores that have a row a key, and for those that have one a query
            by_key = bits_by_key(mask)
            by_query = None if self.config.adds_dq else bits_by_query(mask, Sk)
            block = 0 if queries_share(mask) else self.config.block_m // 8
            _BITS.pack_into(params, _BITS_AT, *_as_read(by_key), *_as_read(by_query), block)
        if row_keys is not None:
            packed = dropout.parameters(row_keys, self.dropout_p)
            params[_DROPOUT_AT : _DROPOUT_AT + len(packed)] = packed
        if bias is not None:
            packed = self.bias(address(bias))
            params[_BIAS_AT : _BIAS_AT + len(packed)] = packed
        return by_key, by_query


_plan = functools.lru_cache(maxsize=1024)(Plan)


def _as_read(bits: Tensor | None) -> tuple[int, ...]:
    """struct Bits in cuda/backward.cuh."""
    return (0,) * 5 if bits is None else (address(bits), *shared_strides(bits), run_at(bits))


def _sink_gradient(spec: Spec, lse: Tensor, delta: Tensor) -> Tensor | None:
    """Minus a sink's weight times delta, summed over batch and queries; delta holds -dlse."""
    if spec.sinks is None:
        return None
    B, Hq, Sq = lse.shape
    weight = torch.exp(spec.sinks.float().view(1, Hq, 1) - lse)
    return -(weight * delta.view(B, Hq, -1)[..., :Sq]).sum((0, 2)).to(spec.sinks.dtype)


class _Kernels:
    def __init__(self, defines: tuple[tuple[str, int], ...], config: BackwardConfig, device: int):
        self.defines = defines
        entries = entries_of(config, dict(defines))
        names = (entry.name for entry in entries)
        found = dict(zip(names, kernels("backward", device, entries, defines)))
        self.prepare, self.products = found["prepare"], found["backward"]
        self.finish, self.queries = found.get("finish"), found.get("backward_queries")
        self.keep_runs = found.get("keep_runs")


def entries_of(config: BackwardConfig, defines: dict[str, int]) -> list[Entry]:
    """What a call launches."""
    entries = [
        Entry("prepare", 256),
        Entry("backward", config.threads, config.shared_bytes),
        Entry("finish", 256)
        if config.adds_dq
        else Entry("backward_queries", config.threads, config.query_shared_bytes),
    ]
    if defines["HAS_RANGES"]:
        entries.append(Entry("keep_runs", config.block_m))
    return entries


_kernels = functools.cache(_Kernels)


def _kernels_for(
    config: BackwardConfig, dtype: torch.dtype, device: int, **features: bool
) -> _Kernels:
    return _kernels(tuple(kernel_defines(config, dtype, **features).items()), config, device)


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
