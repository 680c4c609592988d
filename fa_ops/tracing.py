"""What torch does with the code that runs now, in the calling thread.

The only module that asks torch. `torch.compiler.is_compiling()` will not do: from torch 2.13 on it
is true in every thread while one of them compiles, and before that only where Dynamo traces.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

# Read on every eager call, where each dot in a name would be looked up again.
in_functorch = torch._C._are_functorch_transforms_active
is_traced_by_dynamo = torch.compiler.is_dynamo_compiling  # a constant: False unless Dynamo traces
_dispatch_modes = torch._C._len_torch_dispatch_stack
_dispatch_mode = torch._C._get_dispatch_mode
_function_modes = torch._C._len_torch_function_stack
_is_profiler_enabled = torch.autograd._profiler_enabled
_is_traced_by_jit = torch._C._is_tracing
_is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
# of all threads: printing a tensor while another thread exports leaves the key of this one included
_pre_dispatch_modes = torch._ops._len_torch_dispatch_stack_pre_dispatch

_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch  # where `make_fx(pre_dispatch=True)` records
PLAIN = (Tensor, torch.nn.Parameter)
_KEYS = torch._C._TorchDispatchModeKey
_TRACING_MODES = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)


def is_compiling() -> bool:
    """Whether a compiler traces this code in the calling thread, or fake tensors run it.

    Dynamo, AOTAutograd, `torch.export` and `make_fx` are such compilers.
    """
    return (
        is_traced_by_dynamo()
        or (_dispatch_modes() > 0 and _has_tracing_mode())
        or (_is_key_included(_PRE_DISPATCH) and _pre_dispatch_modes() > 0)
    )


def _has_tracing_mode() -> bool:
    return any(_dispatch_mode(key) is not None for key in _TRACING_MODES)


def is_watched() -> bool:
    """Whether something has to see every operator of which the dispatcher's keys do not tell."""
    return (
        is_traced_by_dynamo()
        or forward_ad._current_level >= 0
        or _function_modes() > 0
        or _is_profiler_enabled()
    )


def is_dispatched() -> bool:
    """Whether every call is given to the dispatcher now, whatever its tensors.

    A call that is compiled is: its sizes may be symbolic, and plans are for eager calls.
    """
    return is_watched() or (in_functorch() or _dispatch_modes() or _is_traced_by_jit())


def can_read(*tensors: Tensor, waiting: bool = False) -> bool:
    """Whether the host may read what the tensors hold, now.

    Not while the calling thread traces, where a number would become a constant of the graph, nor
    what `torch.vmap` maps over, nor tensors without memory. Tensors on a device only where
    `waiting` for it is acceptable, and not while a CUDA graph is captured.
    """
    if is_compiling() or _is_traced_by_jit():
        return False
    mapping = in_functorch()
    for t in tensors:
        if type(t) not in PLAIN or (mapping and _is_mapped(t)):
            return False
        if t.is_meta or not t.is_cpu and (not waiting or is_capturing(t.device)):
            return False
    return True


def is_differentiated(t: Tensor) -> bool:
    """Whether a derivative by this tensor is asked for, by autograd or a transform."""
    if torch.is_grad_enabled() and t.requires_grad:
        return True
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        return True
    is_wrapped = in_functorch() and functorch.is_functorch_wrapped_tensor(t)
    return is_wrapped and is_differentiated(functorch.get_unwrapped(t))


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_mapped(tensor: Tensor) -> bool:
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
