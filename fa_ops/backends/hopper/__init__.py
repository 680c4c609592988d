"""The backend for sm_90a: CUDA C++ compiled by NVRTC on first use, launched through the driver.

`plan` picks one of these modules for a call: `forward` and `backward` (kernels in
`cuda/forward.cu` and `cuda/backward.cu`; many queries of a cache and packed queries over pages run
on them as well), `packed` for packed sequences, `decode` for few queries against a long cache and
what such a call writes before it attends, `mla` for a latent cache, and `eight_bit` for 8-bit
products. Each makes a `kernel_plan.KernelPlan` of a call's geometry. Tiles are in `configs`;
`runtime` compiles, loads and launches kernels.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from fa_ops.backends.hopper.configs import (
    MAX_NARROW_DIM,
    has_latent_dims,
    head_dim_error,
    limit_error,
)
from fa_ops.call.call import (
    CACHED,
    DENSE,
    PACKED,
    PAGED,
    PROGRAMMED,
    QUANTIZED,
    QUANTIZED_PACKED,
    SELECTED,
    Call,
    Plan,
    append_then_attend,
    decoding,
    general,
    has_short_gradients,
    has_short_rows,
    is_decoding,
    queries_of_kv_head,
)
from fa_ops.call.options import (
    MAX_DECODING_QUERIES,
    MAX_HEAD_DIM,
    MAX_SHORT_GRADIENT_ROWS,
    dtype_name,
)
from fa_ops.programs.program import program_error

_ALTERNATIVE = "the triton backend can run it"


def is_for_this_gpu() -> bool:
    """Whether the backend would run on this machine's GPU if all it needs were installed."""
    return _gpu_error() is None


def _gpu_error() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU (sm_90), this one is sm_{major}{minor}"
    return None


@functools.cache
def available_error() -> str | None:
    """Why this machine cannot run the backend at all, or None."""
    if reason := _gpu_error():
        return reason
    from fa_ops.backends.hopper.runtime import nvrtc

    try:
        nvrtc.nvrtc()
    except nvrtc.CompileError as error:
        return str(error)
    return None


def supports(call: Call) -> str | None:
    """Why the backend cannot run the call, or None."""
    signature = call.signature
    if signature is PROGRAMMED:
        return _programmed_error(call)
    if call.options.max_scores:
        return f"has no kernel that returns the largest score of each query; {_ALTERNATIVE}"
    if call.tangents is not None:
        return _tangent_error(call)
    if signature is QUANTIZED:
        return _quantized_error(call)
    if signature is QUANTIZED_PACKED:
        return _packed_quantized_error(call)
    if signature is CACHED:
        return _cached_error(call)
    if signature is PAGED:
        return _paged_error(call)
    if signature is SELECTED:
        return "has no kernel for lists of blocks; the triton backend can run it"
    if call.backend == "auto" and signature is DENSE:
        if call.saved is None and is_decoding(call):
            # where the decoding kernel cannot run, a backend that splits keys is faster than
            # `forward`
            return cache_error(call)
        if _is_slow_for_short_rows(call):
            return f"is slower for short rows with a bias; {_ALTERNATIVE}"
    return support_error(call, signature is DENSE)


def _tangent_error(call: Call) -> str | None:
    """Why the backend cannot run a call with tangents, or None."""
    from fa_ops.backends.hopper import tangents

    if call.query.device.type != "cuda":
        return _device_error(call.query)
    widest = max(call.query.shape[-1], call.value.shape[-1])
    other = "triton" if widest <= 256 else "reference"  # as triton's `support_error` says
    reason = tangents.tangent_error(call)
    return reason and f"{reason}; the {other} backend can run it"


def append_error(call: Call) -> str | None:
    """Why the backend does not write new keys for another one."""
    return "appends and attends in one call"


def merge_error(outs: Tensor) -> str | None:
    """Why the backend cannot merge states."""
    return f"has no kernel that merges; {_ALTERNATIVE}"


def mask_blocks_error(mask: Tensor) -> str | None:
    """Why the backend cannot summarise a mask."""
    return f"has no kernel that summarises masks; {_ALTERNATIVE}"


def _is_slow_for_short_rows(call: Call) -> bool:
    """Whether rows with a bias are so short that the kernel that holds them whole is faster.

    With 128 tokens, which that kernel holds as well, this backend takes 0.9 times as long.
    """
    if max(call.query.shape[2], call.key.shape[2]) > MAX_SHORT_GRADIENT_ROWS:
        return False
    return has_short_gradients(call) if call.is_backward else has_short_rows(call)


def plan(call: Call) -> Plan:
    """The plan of a call on this backend."""
    from fa_ops.backends.hopper.runtime.launch import together

    kernel, prepare = _plan(call)
    return Plan(kernel, together(prepare))


def _plan(call: Call) -> Plan:
    """The same plan, whose kernels are compiled one after another.

    Modules are imported where they are needed: reading the parameters of their kernels takes 20 ms.
    """
    signature = call.signature
    if call.tangents is not None:
        from fa_ops.backends.hopper import tangents

        return general("tangents", tangents.jvp)
    if signature in (QUANTIZED, QUANTIZED_PACKED, PAGED):
        return _rare_plan(call)
    if call.saved is not None:
        return _backward_plan(call)
    if signature is CACHED:
        module = _cache_module(call)
        return _appending(module) if call.writes_cache else _plan_of(module)
    if signature is PACKED:
        from fa_ops.backends.hopper import packed

        return Plan("forward", packed.prepare)
    if is_decoding(call) and not call.is_programmed:
        module = _cache_module(call)
        if module.cache_error(call) is None:
            return decoding(_plan_of(module))
    from fa_ops.backends.hopper import forward

    return Plan("forward", forward.prepare)


def _appending(module: ModuleType) -> Plan:
    from fa_ops.backends.hopper import decode, forward

    attend = _plan_of(module)
    if module is forward:
        return append_then_attend(Plan("append", decode.prepare_append), attend)
    prepare = functools.partial(decode.append_before, module.plan_of)
    return Plan(f"append, then {attend.kernel}", prepare)


def _backward_plan(call: Call) -> Plan:
    if call.is_packed:
        from fa_ops.backends.hopper import packed

        return Plan("backward", packed.prepare_backward)
    from fa_ops.backends.hopper import backward

    return Plan("backward", backward.prepare)


def _rare_plan(call: Call) -> Plan:
    """The plan of a call with 8-bit products, or of packed queries over pages."""
    if call.is_quantized:
        from fa_ops.backends.hopper import eight_bit

        prepare = eight_bit.prepare_packed if call.is_packed else eight_bit.prepare
        return Plan("8-bit forward", prepare)
    from fa_ops.backends.hopper import forward

    return Plan("forward", forward.prepare_paged)


def _plan_of(module: ModuleType) -> Plan:
    """The plan of calls over a cache by one of the modules of `_cache_module`."""
    name = module.__name__.rpartition(".")[2]
    if name == "forward":  # whose `prepare` is for dense calls
        return Plan("prefill", module.prepare_cached)
    return Plan(name, module.prepare)


def support_error(call: Call, takes_wide: bool = False) -> str | None:
    """Why the backend cannot run this call, or None; `takes_wide`: head dims over 256 too."""
    if call.query.device.type != "cuda":
        return _device_error(call.query)
    reason = _unsupported(call, takes_wide)
    is_wide = max(call.query.shape[-1], call.value.shape[-1]) > MAX_HEAD_DIM
    alternative = "the reference backend takes any" if is_wide else _ALTERNATIVE
    return reason and f"{reason}; {alternative}"


def _programmed_error(call: Call) -> str | None:
    """Why the backend cannot run a call with a program, or None."""
    if call.query.device.type != "cuda":
        return _device_error(call.query)
    reason = _unsupported(call, False) or program_error(call.options.program)
    if reason is None and call.operands.attn_mask is not None:
        reason = "has no attn_mask beside a program of score_mod and mask_mod"
    if reason is None and call.saved is not None:
        from fa_ops.backends.hopper import term_gradients

        reason = term_gradients.program_error(call)
    return reason and f"{reason}; {_ALTERNATIVE}"


def _quantized_error(call: Call) -> str | None:
    """Why the backend cannot run a call with 8-bit products, or None."""
    from fa_ops.backends.hopper import eight_bit

    if call.query.device.type != "cuda":
        return _device_error(call.query)
    reason = eight_bit.support_error(call)
    return reason and f"{reason}; {_ALTERNATIVE}"


def _packed_quantized_error(call: Call) -> str | None:
    """Why the backend cannot attend packed sequences with 8-bit products, or None."""
    from fa_ops.backends.hopper import eight_bit

    if call.query.device.type != "cuda":
        return _device_error(call.query)
    return eight_bit.packed_error(call)


def _paged_error(call: Call) -> str | None:
    """Why the backend cannot attend pages with packed queries, or None."""
    from fa_ops.backends.hopper import forward

    if call.query.device.type != "cuda":
        return _device_error(call.query)
    return forward.paged_error(call)


def _device_error(q: Tensor) -> str:
    return f"needs CUDA tensors, query is on {q.device}; the cpu backend can run it"


def _unsupported(call: Call, takes_wide: bool) -> str | None:
    q, v = call.query, call.value
    D, Dv = q.shape[-1], v.shape[-1]
    is_wide = takes_wide and max(D, Dv) > MAX_NARROW_DIM
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 and float16, query is {dtype_name(q.dtype)}"
    if reason := head_dim_error(D, Dv, MAX_HEAD_DIM if is_wide else MAX_NARROW_DIM):
        return reason
    if is_wide and (reason := _wide_error(call)):
        return reason
    if -(-Dv // 64) > -(-D // 64) and not is_wide:
        return f"needs a value head dim that is not the larger one, got {D} and {Dv}"
    tokens = 0 if q.dim() == 3 else -2
    return limit_error(call.scale, q.shape[tokens], v.shape[tokens])


def _wide_error(call: Call) -> str | None:
    """Why the kernel of wide heads does not have these options, or None."""
    options = {
        "attn_mask": call.operands.attn_mask is not None,
        "alibi_slopes": call.operands.alibi_slopes is not None,
        "softcap": call.options.softcap > 0,
        "dropout_p": call.options.dropout_p > 0,
    }
    for name, is_given in options.items():
        if is_given:
            return f"has no {name} for head dims over {MAX_NARROW_DIM}"
    return None


def _cached_error(call: Call) -> str | None:
    """Why the backend cannot write to such a cache, or attend it, or None."""
    reason = cache_error(call.read_only())
    if reason or not call.writes_cache:
        return reason
    from fa_ops.backends.hopper import decode

    reason = decode.append_error(call)
    return reason and f"{reason}; {_ALTERNATIVE}"


def cache_error(call: Call) -> str | None:
    """Why the backend cannot attend such a cache, or None."""
    if call.query.device.type != "cuda":
        return _device_error(call.query)
    reason = _cache_module(call).cache_error(call)
    return reason and f"{reason}; {_ALTERNATIVE}"


def _cache_module(call: Call) -> ModuleType:
    if has_latent_dims(call.query.shape[-1], call.value.shape[-1]):
        from fa_ops.backends.hopper import mla

        return mla
    if queries_of_kv_head(call) > MAX_DECODING_QUERIES:
        from fa_ops.backends.hopper import forward

        return forward
    from fa_ops.backends.hopper import decode

    return decode
