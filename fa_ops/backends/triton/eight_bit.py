"""Launches attention with 8-bit products: quantisation of 16-bit tensors, then the kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_ops.backends.triton.arguments import LOG2E, padded
from fa_ops.backends.triton.configs import Tile, quantized_tile
from fa_ops.backends.triton.eight_bit_kernels import (
    PARTS,
    VALUE_BLOCK,
    quantize_kernel,
    quantized_kernel,
    statistics_kernel,
)
from fa_ops.backends.triton.launch import INTERPRETED, Launch, architecture, bind
from fa_ops.call.options import SCALE_BLOCK, Quantization, Spec, default_scale

E4M3 = torch.float8_e4m3fn
BLOCK_SHIFT = SCALE_BLOCK.bit_length() - 1
ALL_SHIFT = 30  # one scale for all tokens
BLOCKS = 4  # blocks of SCALE_BLOCK tokens that a program quantises
_MAX_WINDOW = 2**30
_launches: dict[tuple, Launch] = {}


class EightBit(NamedTuple):
    """8-bit tensors and their scales as the kernel reads them."""

    query: Tensor  # (B, Hq, Sq, D or more), int8 or e4m3
    key: Tensor  # (B, Hkv, Sk, D or more)
    value: Tensor  # (B, Hkv, Dv, Sk or more), e4m3
    q_scale: Tensor  # (B, Hq, blocks of 2**q_shift tokens)
    q_shift: int
    k_scale: Tensor
    k_shift: int
    v_scale: Tensor  # (B, Hkv, Dv)
    offset: Tensor | None = None  # (B, Hq, Sq)


def architecture_error(q: Tensor) -> str | None:
    """Why the GPU cannot compute with e4m3, or None."""
    if INTERPRETED or q.device.type != "cuda" or architecture(q.device) >= 89:
        return None
    return f"needs compute capability 8.9 for e4m3, got {architecture(q.device) / 10}"


def quantized_forward(
    q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype, bfloat16 for e4m3, and lse (B, Hq, Sq)."""
    if q.dtype == E4M3:
        eight, dtype = _as_given(q, k, v, how, spec), torch.bfloat16
    else:
        eight, dtype = quantise(q, k, v, how, spec), q.dtype
    B, Hq, Sq, D = q.shape
    out = torch.empty_permuted((B, Hq, Sq, v.shape[3]), (0, 2, 1, 3), dtype=dtype, device=q.device)
    lse = torch.empty((B, Hq, Sq), dtype=torch.float32, device=q.device)
    scale, Sk, (left, right) = default_scale(spec, D), k.shape[2], _window(spec)
    cap = spec.softcap * LOG2E if spec.softcap else None
    factor = scale / spec.softcap if spec.softcap else scale * LOG2E
    ranges, strides = spec.key_ranges, (0, 0, 0)
    if ranges is not None:
        ranges = ranges.contiguous().expand(B, Hq, Sq, 2)
        strides = ranges.stride()[:3]
    args = (
        eight.query, eight.key, eight.value, out, lse,
        *eight.query.stride()[:3], *eight.key.stride()[:3], *eight.value.stride()[:3],
        eight.q_scale, *eight.q_scale.stride(),
        eight.k_scale, *eight.k_scale.stride(),
        eight.v_scale, *eight.v_scale.stride(),
        B, Hq, Hq // k.shape[1], Sq, Sk, factor, cap, eight.offset, spec.sinks, spec.kv_lens,
        ranges, *strides, left, right,
    )  # fmt: skip
    tile = quantized_tile(architecture(q.device), max(D, v.shape[3]))
    launch = _find(quantized_kernel, args, attention_constants(eight, tile), q, tile.options())
    launch((-(-Sq // tile.block_m) * Hq * B, 1, 1), args)
    return out, lse


def quantise(q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec) -> EightBit:
    """Quantise 16-bit or float32 tensors, in two launches."""
    (B, Hq, Sq, D), (_, Hkv, Sk, Dv), device = q.shape, v.shape, q.device
    smooth = how.smooth_key and not spec.softcap
    is_int8 = how.qk_dtype in (None, torch.int8)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    parts = PARTS.value
    sums = new(B, Hkv, parts, D) if smooth else None
    largest = new(B, Hkv, parts, Dv)
    constants = quantise_constants(q, v, how, spec)
    strides = (*k.stride()[:3], *v.stride()[:3])
    args = (k, v, sums, largest, *strides, Hkv, Sk, spec.kv_lens)
    _find(statistics_kernel, args, constants[0], q)((parts, Hkv, B), args)
    dtype, width = torch.int8 if is_int8 else E4M3, _width(D)
    blocks = -(-Sk // SCALE_BLOCK)
    eight = EightBit(
        new(B, Hq, Sq, width, dtype=dtype), new(B, Hkv, Sk, width, dtype=dtype),
        new(B, Hkv, Dv, Sk + -Sk % VALUE_BLOCK.value, dtype=E4M3), new(B, Hq, Sq), 0,
        new(B, Hkv, blocks), BLOCK_SHIFT, new(B, Hkv, Dv), new(B, Hq, Sq) if smooth else None,
    )  # fmt: skip
    args = (
        q, k, v, sums, largest, eight.query, eight.key, eight.value, eight.q_scale, eight.k_scale,
        eight.v_scale, eight.offset, *q.stride()[:3], *strides, B, Hq, Hq // Hkv, Sq, Sk,
        D, Dv, default_scale(spec, D), (D & -D) ** -0.5, spec.kv_lens,
    )  # fmt: skip
    tokens = BLOCKS * SCALE_BLOCK
    programs = B * (Hq * -(-Sq // tokens) + 2 * Hkv * -(-Sk // tokens))
    options = quantise_options(D)
    _find(quantize_kernel, args, constants[1], q, options)((programs, 1, 1), args)
    return eight


def quantise_constants(
    q: Tensor, v: Tensor, how: Quantization, spec: Spec
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constexpr parameters of `statistics_kernel` and of `quantize_kernel`."""
    D, Dv = q.shape[3], v.shape[3]
    widths = {"D": D, "Dv": Dv, "BLOCK_D": _width(D), "BLOCK_DV": padded(Dv)}
    first = widths | {"SMOOTH": how.smooth_key and not spec.softcap}
    rest = {"ROTATE": how.rotate, "INT8": how.qk_dtype in (None, torch.int8)}
    return first, first | rest | {"BLOCKS": BLOCKS}


def quantise_options(D: int) -> dict[str, int]:
    """The compiler options of `quantize_kernel`: the rows of a block stay in registers."""
    return {"num_warps": 8 if D > 128 else 4}


def attention_constants(eight: EightBit, tile: Tile) -> dict[str, Any]:
    """The constexpr parameters of `quantized_kernel`."""
    D, Dv = eight.query.shape[3], eight.value.shape[2]
    return {
        "D": D,
        "Dv": Dv,
        "BLOCK_D": _width(D),
        "BLOCK_DV": padded(Dv),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "Q_SHIFT": eight.q_shift,
        "K_SHIFT": eight.k_shift,
    }


def divisors(args: tuple, names: list[str]) -> dict[str, int]:
    """Parameters of the kernels that are multiples of 16: addresses and strides of rows."""
    found = {}
    for name, arg in zip(names, args):
        value = arg.data_ptr() if isinstance(arg, Tensor) and not arg.is_meta else arg
        is_row = "_stride_" in name and "range" not in name
        aligned = name in ("q", "k", "v", "q8", "k8", "v8") or is_row
        if aligned and isinstance(value, int) and value % 16 == 0:
            found[name] = 16
    return found


def _find(
    kernel: Any, args: tuple, constants: dict, q: Tensor, options: dict | None = None
) -> Launch:
    """The launch of a kernel for arguments like these, compiled on first use."""
    divisible = divisors(args, kernel.arg_names)
    kinds = tuple(a.dtype if isinstance(a, Tensor) else a is None for a in args)
    wide = any(isinstance(a, int) and a >= 1 << 23 for a in args)
    key = (
        kernel.fn.__name__, kinds, tuple(divisible), wide, *constants.values(), q.get_device(),
    )  # fmt: skip
    found = _launches.get(key)
    if found is None:
        found = _launches[key] = bind(
            kernel, args, constants, options or {"num_warps": 4}, device=q.device,
            divisors=divisible, wide=wide,
        )  # fmt: skip
    return found


def _width(D: int) -> int:
    """The width of rows of query and key: tensor cores multiply 32 8-bit numbers at once."""
    return max(32, padded(D))


def _window(spec: Spec) -> tuple[int | None, int | None]:
    left = None if spec.window_left < 0 else min(spec.window_left, _MAX_WINDOW)
    if spec.is_causal:
        return left, 0
    return left, None if spec.window_right < 0 else min(spec.window_right, _MAX_WINDOW)


def _as_given(q: Tensor, k: Tensor, v: Tensor, how: Quantization, spec: Spec) -> EightBit:
    """e4m3 tensors with their scales; value is transposed, as tensor cores read it."""
    Sk = k.shape[2]
    transposed = v.view(torch.uint8).transpose(2, 3)
    if spec.kv_lens is not None:  # a weight of 0 times what lies beyond may be NaN
        inside = torch.arange(Sk, device=v.device) < spec.kv_lens.view(-1, 1, 1, 1)
        transposed = transposed.masked_fill(~inside, 0)
    transposed = F.pad(transposed, (0, -Sk % VALUE_BLOCK.value)).contiguous()
    q_scale, q_shift = _of_tokens(how.q_scale, q)
    k_scale, k_shift = _of_tokens(how.k_scale, k)
    v_scale = how.v_scale
    v_scale = v_scale.view(1, 1, 1) if v_scale.dim() < 2 else v_scale
    v_scale = v_scale if v_scale.dim() == 3 else v_scale.unsqueeze(-1)
    v_scale = v_scale.expand(v.shape[0], v.shape[1], v.shape[3])
    return EightBit(q, k, transposed.view(E4M3), q_scale, q_shift, k_scale, k_shift, v_scale)


def _of_tokens(scale: Tensor, x: Tensor) -> tuple[Tensor, int]:
    """The scale as (B, H, blocks), and log2 of the number of tokens of a block."""
    B, H, S, _ = x.shape
    if scale.dim() == 3:
        return scale, 0 if scale.shape[2] == S else BLOCK_SHIFT
    scale = scale.view(1, 1) if scale.dim() < 2 else scale
    return scale.expand(B, H).unsqueeze(-1), ALL_SHIFT
