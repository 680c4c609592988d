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
from fa_ops.call.call import Call, Plan, Saved, append_then_attend, decoding
from fa_ops.call.options import (
    MAX_DECODING_QUERIES,
    MAX_HEAD_DIM,
    MAX_SHORT_GRADIENT_ROWS,
    Cache,
    Quantization,
    Spec,
    default_scale,
    dtype_name,
    has_short_gradients,
    has_short_rows,
    is_decoding,
    queries_of_kv_head,
)

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
    q, k, v, spec = call.query, call.key, call.value, call.spec
    if call.is_quantized:
        if call.is_packed:
            return _packed_quantized_error(call)
        return _quantized_error(q, k, v, call.quantization, spec)
    if call.is_cached:
        return _cached_error(call)
    if call.is_paged:
        return _paged_error(call)
    is_dense, saved = not call.is_packed, call.saved  # all other calls have returned
    if call.backend == "auto" and is_dense:
        if saved is None and is_decoding(q.shape[2], k.shape[2], spec):
            # where the decoding kernel cannot run, a backend that splits keys is faster than
            # `forward`
            return cache_error(q, k, v, Cache(), spec)
        if _is_slow_for_short_rows(q, k, v, spec, saved):
            return f"is slower for short rows with a bias; {_ALTERNATIVE}"
    return support_error(q, k, v, spec, is_dense)


def append_error(call: Call) -> str | None:
    """Why the backend does not write new keys for another one."""
    return "appends and attends in one call"


def merge_error(outs: Tensor) -> str | None:
    """Why the backend cannot merge states."""
    return f"has no kernel that merges; {_ALTERNATIVE}"


def mask_blocks_error(mask: Tensor) -> str | None:
    """Why the backend cannot summarise a mask."""
    return f"has no kernel that summarises masks; {_ALTERNATIVE}"


def _is_slow_for_short_rows(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, saved: Saved | None
) -> bool:
    """Whether rows with a bias are so short that the kernel that holds them whole is faster.

    With 128 tokens, which that kernel holds as well, this backend takes 0.9 times as long.
    """
    if max(q.shape[2], k.shape[2]) > MAX_SHORT_GRADIENT_ROWS:
        return False
    if saved is not None:
        return has_short_gradients(q, k, v, spec, saved.mask_grad)
    return has_short_rows(q, k, v, spec)


def plan(call: Call) -> Plan:
    """The plan of a call on this backend."""
    from fa_ops.backends.hopper.runtime.launch import together

    kernel, prepare = _plan(call)
    return Plan(kernel, together(prepare))


def _plan(call: Call) -> Plan:
    """The same plan, whose kernels are compiled one after another.

    Modules are imported where they are needed: reading the parameters of their kernels takes 20 ms.
    """
    if call.is_quantized or (call.is_packed and call.is_paged):
        return _rare_plan(call)
    q, k, v = call.query, call.key, call.value
    if call.saved is not None:
        return _backward_plan(call)
    if call.is_cached:
        module = _cache_module(q, k, v, call.cache)
        return _appending(module) if call.writes_cache else _plan_of(module)
    if call.is_packed:
        from fa_ops.backends.hopper import packed

        return Plan("forward", packed.prepare)
    module = _decoding_module(q, k, v, call.spec)
    if module is not None:
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


def _decoding_module(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> ModuleType | None:
    """The module that runs a dense call with few queries as one over a cache, or None."""
    if not is_decoding(q.shape[2], k.shape[2], spec):
        return None
    module = _cache_module(q, k, v, Cache())
    return module if module.cache_error(q, k, v, Cache(), spec) is None else None


def support_error(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, takes_wide: bool = False
) -> str | None:
    """Why the backend cannot run this call, or None; `takes_wide`: head dims over 256 too."""
    if q.device.type != "cuda":
        return _device_error(q)
    reason = _unsupported(q, v, spec, takes_wide)
    is_wide = max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM
    alternative = "the reference backend takes any" if is_wide else _ALTERNATIVE
    return reason and f"{reason}; {alternative}"


def _quantized_error(
    q: Tensor, k: Tensor, v: Tensor, quantization: Quantization, spec: Spec
) -> str | None:
    """Why the backend cannot run a call with 8-bit products, or None."""
    from fa_ops.backends.hopper import eight_bit

    if q.device.type != "cuda":
        return _device_error(q)
    reason = eight_bit.support_error(q, k, v, quantization, spec)
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


def _unsupported(q: Tensor, v: Tensor, spec: Spec, takes_wide: bool) -> str | None:
    D, Dv = q.shape[-1], v.shape[-1]
    is_wide = takes_wide and max(D, Dv) > MAX_NARROW_DIM
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 and float16, query is {dtype_name(q.dtype)}"
    if reason := head_dim_error(D, Dv, MAX_HEAD_DIM if is_wide else MAX_NARROW_DIM):
        return reason
    if is_wide and (reason := _wide_error(spec)):
        return reason
    if -(-Dv // 64) > -(-D // 64) and not is_wide:
        return f"needs a value head dim that is not the larger one, got {D} and {Dv}"
    tokens = 0 if q.dim() == 3 else -2
    return limit_error(default_scale(spec, D), q.shape[tokens], v.shape[tokens])


def _wide_error(spec: Spec) -> str | None:
    """Why the kernel of wide heads does not have these options, or None."""
    options = {
        "attn_mask": spec.attn_mask is not None,
        "alibi_slopes": spec.alibi_slopes is not None,
        "softcap": spec.softcap > 0,
        "dropout_p": spec.dropout_p > 0,
    }
    for name, is_given in options.items():
        if is_given:
            return f"has no {name} for head dims over {MAX_NARROW_DIM}"
    return None


def _cached_error(call: Call) -> str | None:
    """Why the backend cannot write to such a cache, or attend it, or None."""
    rest = call.read_only()
    reason = cache_error(rest.query, rest.key, rest.value, rest.cache, rest.spec)
    if reason or not call.writes_cache:
        return reason
    from fa_ops.backends.hopper import decode

    reason = decode.append_error(call)
    return reason and f"{reason}; {_ALTERNATIVE}"


def cache_error(q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> str | None:
    """Why the backend cannot attend such a cache, or None."""
    if q.device.type != "cuda":
        return _device_error(q)
    reason = _cache_module(q, k, v, cache).cache_error(q, k, v, cache, spec)
    return reason and f"{reason}; {_ALTERNATIVE}"


def _cache_module(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> ModuleType:
    if has_latent_dims(q.shape[-1], v.shape[-1]):
        from fa_ops.backends.hopper import mla

        return mla
    if queries_of_kv_head(q, k, cache) > MAX_DECODING_QUERIES:
        from fa_ops.backends.hopper import forward

        return forward
    from fa_ops.backends.hopper import decode

    return decode
