"""The one Library, and every private torch name that the operators need."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from importlib.abc import MetaPathFinder

import torch
from torch import DispatchKeySet, Tag, Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.library import Library
from torch.nested._internal.nested_tensor import NestedTensor

from fa_ops.ops.schemas import SCHEMAS
from fa_ops.tracing import PLAIN, in_functorch, is_dispatched

# Actions that wait until a module is imported, for parts of torch that not everyone uses.


class _AfterImport(MetaPathFinder):
    """Finds a module by the finders behind it, and makes its loader run an action afterwards."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        # Those behind this one alone, as another copy of this class may ask this one in turn.
        all_finders = list(sys.meta_path)
        at = all_finders.index(self) if self in all_finders else -1
        finders = (one.find_spec for one in all_finders[at + 1 :] if hasattr(one, "find_spec"))
        spec = next(filter(None, (find(name, path, target) for find in finders)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module) -> None:
                execute(module)
                if self in sys.meta_path:  # not earlier, as a spec may be requested and not used
                    sys.meta_path.remove(self)
                    self.action()

            spec.loader.exec_module = execute_and_act
        return spec


def _is_of_dropped_modules(finder: object) -> bool:
    """Whether it waits for an import on behalf of this module as it was imported before."""
    kind = type(finder)
    return kind.__module__ == __name__ and kind.__name__ == _AfterImport.__name__


sys.meta_path[:] = [one for one in sys.meta_path if not _is_of_dropped_modules(one)]


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call `action` once the module has been imported; now, if it has been."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


# The operators' library, and every private torch name that they need.

TAGS = (Tag.pt2_compliant_tag,)

_MORE_TAGS = {"dropout_seed": (Tag.nondeterministic_seeded, Tag.flexible_layout)}


def _kernels() -> Library:
    """The library of the operators' kernels, without any yet; the operators are defined.

    If the modules were dropped and are imported again in one process, the kernels of the first
    import are removed. The definitions stay, as compiled code and other modules hold them.
    """
    earlier = vars(torch.ops.fa).get("_defined_by_fa_ops")
    if earlier is None:
        definitions = Library("fa", "DEF")
        for name, schema in SCHEMAS.items():
            definitions.define(name + schema, tags=TAGS + _MORE_TAGS.get(name, ()))
    else:
        definitions, schemas, kernels = earlier
        if schemas != SCHEMAS:
            raise ImportError(
                "fa_ops was imported in this process before with other schemas of its operators, "
                "which torch cannot replace: start a new process"
            )
        kernels._destroy()
    kernels = Library("fa", "FRAGMENT")
    torch.ops.fa._defined_by_fa_ops = definitions, SCHEMAS, kernels
    return kernels


lib = _kernels()

AFTER_AUTOGRAD = torch._C._after_autograd_keyset
# Excludes view tracking too: an output made by transposing a buffer is not a view to its user.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView

try:  # dispatcher kernels run at one functorch level
    from torch._functorch.utils import enable_single_level_autograd_function as _single_level
    from torch.autograd.function import _SingleLevelFunction

    class SingleLevelFunction(_SingleLevelFunction):
        """An autograd.Function that acts at the current functorch level alone."""

        # compiled autograd reads it, and only the public class has it
        _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)
except ImportError:  # then torch.func.grad of an operator raises torch's own error
    from torch.autograd import Function as SingleLevelFunction

    _single_level = nullcontext


def apply(function: type[SingleLevelFunction], *args):
    """`function.apply` from inside an Autograd kernel."""
    if in_functorch():
        with _single_level():
            return function.apply(*args)
    return function.apply(*args)


@functools.cache
def is_device_kernel_next(keyset: int) -> bool:
    """Whether the dispatcher would go from an Autograd kernel to that for CPU or CUDA.

    `keyset` is a keyset's `raw_repr`.
    """
    below = DispatchKeySet.from_raw_repr(keyset) & AFTER_AUTOGRAD
    return below.highestPriorityTypeId() in (DispatchKey.CPU, DispatchKey.CUDA)


def redispatch(operator: OpOverload, keyset: DispatchKeySet, *args, **options):
    """Call the operator's kernel below autograd."""
    with below_autograd():
        return operator.redispatch(keyset & AFTER_AUTOGRAD, *args, **options)


def register_subclass_rule(name: str, kind: type, rule) -> None:
    """Register the operator's rule for a tensor subclass, below autograd."""
    torch.library.register_torch_dispatch(f"fa::{name}", kind, rule, lib=lib)


def nested_like(values: Tensor, like: NestedTensor) -> NestedTensor:
    """A NestedTensor of the same structure: the public constructor can't be traced."""
    return NestedTensor(
        values,
        offsets=like.offsets(),
        lengths=like.lengths(),
        _metadata_cache=like._metadata_cache,
        _ragged_idx=like._ragged_idx,
    )


def recording():
    """A context for a Function's forward in which the transforms below it still record.

    torch runs it without gradients.
    """
    return _recording() if in_functorch() else nullcontext()


@contextmanager
def _recording():
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def forward_mode_below():
    """The same of forward mode alone."""
    return forward_ad._set_fwd_grad_enabled(True) if in_functorch() else nullcontext()


def is_forward_mode() -> bool:
    """Whether tensors may carry tangents, of torch's only level of dual numbers.

    Graphs that AOTAutograd traces enter the level without telling `forward_ad`.
    """
    return forward_ad._current_level >= 0 or in_functorch()


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether a tensor carries a forward-mode tangent that counts."""
    if not is_forward_mode() or not torch._C._is_fwd_grad_enabled():
        return False
    tangents = [None if t is None else forward_ad.unpack_dual(t, level=0)[1] for t in tensors]
    return any([t is not None for t in tangents])


# What errors of the other functions name.
DIFFERENTIABLE = (
    "fa_ops.attention and attention_varlen have the derivatives of first and second order, "
    "attention also with an attn_mask for what no other argument expresses"
)


def reject_forward_ad(operator: OpOverload, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError where a tensor carries a forward-mode tangent."""
    if has_tangent(*tensors):
        raise NotImplementedError(
            f"{operator.name()} has no forward-mode derivative (jvp): {DIFFERENTIABLE}"
        )


def run_vmap_rule(rule, operator, *operands):
    """Call `rule(info, in_dims, *operands)` from a FuncTorchBatched kernel, one level peeled off.

    Not torch.library.register_vmap: that refuses operators with keyword-only tensors.
    """
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, operator, *operands)


def run_vmap_randomly(draw: Callable[[int], Tensor]) -> Tensor:
    """Random numbers in a FuncTorchVmapMode kernel; `draw(N)` draws them for N samples."""
    from torch._C._functorch import _add_batch_dim
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    vmap = retrieve_current_functorch_interpreter()
    if vmap.randomness() == "error":
        raise RuntimeError(
            "vmap: called random operation while in randomness error mode. Please either use the "
            "'same' or 'different' randomness flags on vmap or perform the randomness operation "
            "out of vmap"
        )
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.FuncTorchVmapMode)):
        if vmap.randomness() == "same":
            return draw(1)[0]
        drawn = draw(vmap.batch_size())
    return _add_batch_dim(drawn, 0, vmap.level())


PROXY_MODULE = "torch.fx.experimental.proxy_tensor"


def hide_from_policies(operator: OpOverload) -> None:
    """Keep selective checkpointing, which marks nodes too, from deciding about an operator."""
    from torch.utils import checkpoint

    getattr(checkpoint, "SAC_IGNORED_OPS", set()).add(operator)


def never_redraw(operator: OpOverload) -> None:
    """Mark the nodes of a random operator, so that a backward graph has the forward's numbers.

    The partitioners of torch 2.11 to 2.15 save nodes that are marked MUST_SAVE, with one exception:
    with a memory budget of 0 they save nothing. There a node that is marked for recomputation, as
    in a checkpointed region, is recomputed from the saved state of the generator.
    """
    from torch._functorch import config
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
    from torch.utils.checkpoint import CheckpointPolicy

    def record(mode, func, types, args=(), kwargs=None):
        result = mode.__torch_dispatch__(func, types, args, kwargs)
        node = next(iter(reversed(mode.tracer.graph.nodes)))
        if node.target is operator:
            recomputed = 0 in (config.activation_memory_budget, *_region_budgets(node.meta))
            policy = CheckpointPolicy.PREFER_RECOMPUTE if recomputed else CheckpointPolicy.MUST_SAVE
            node.meta["recompute"] = policy
        return result

    register_subclass_rule(operator._opname, ProxyTorchDispatchMode, record)


def _region_budgets(meta: dict) -> tuple[object, object]:
    """The memory budgets that were set for the region of a node, None where there are none."""
    custom = meta.get("custom") or {}
    return meta.get("memory_budget"), custom.get("_region_activation_memory_budget")


class Route(enum.Enum):
    """The route by which a call is run."""

    DIRECT = "direct"  # its plan is run, and the dispatcher left out
    RECORD = "record"  # its plan is run inside a node of autograd
    AUTOCAST = "autocast"  # as one of the others, once its tensors are cast and autocast is off
    DISPATCH = "dispatch"  # by the operator


def route_of(*tensors: Tensor | None) -> Route:
    """The route of a call with these arguments, whatever their types."""
    return Route.DISPATCH if is_dispatched() else route_by_tensors(*tensors)


def route_by_tensors(*tensors: Tensor | None) -> Route:
    """`route_of` where nothing but the tensors may need the dispatcher.

    It may be left out where it would have nothing to do but call the kernel of a CPU or of a CUDA
    device. It computes the negative of tensors that are lazily negated.
    """
    recording, needs_grad = _is_grad_enabled(), False
    for t in tensors:
        if t is None:
            continue
        if type(t) not in PLAIN or t.is_neg():
            return Route.DISPATCH
        if recording and t.requires_grad:
            needs_grad = True
    if is_autocast_enabled():
        return Route.AUTOCAST
    return Route.RECORD if needs_grad else Route.DIRECT


# Read on every eager call, where each dot in a name would be looked up again.
_is_grad_enabled = torch.is_grad_enabled
is_autocast_enabled = torch._C._is_any_autocast_enabled


def can_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether the kernel for CPU and CUDA is what such a call would end in."""
    return route_of(*tensors) is Route.DIRECT and is_strided(*tensors)


def is_strided(*tensors: Tensor | None) -> bool:
    """Whether the tensors are in the memory of a CPU or a CUDA device, at their strides."""
    for t in tensors:
        if t is not None and not (
            (t.is_cuda or t.is_cpu)
            and t.layout is torch.strided
            and not (t.is_nested or t.is_neg())
        ):
            return False
    return True


def have_same_dispatch_keys(a: Tensor, b: Tensor) -> bool:
    """Whether neither or both are batched by autograd's own vmap, or zeros without memory."""
    return _dispatch_keys(a) == _dispatch_keys(b)


_dispatch_keys = torch._C._dispatch_keys


def without_autocast():
    """A context in which autocast is off for every kind of device; without its dispatcher keys."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


_AUTOCAST = DispatchKeySet(DispatchKey.Undefined)
for _name, _key in DispatchKey.__members__.items():
    if _name.startswith("Autocast"):
        _AUTOCAST = _AUTOCAST | DispatchKeySet(_key)


def register(name: str, kernel, fake, autograd=None) -> None:
    """Register an operator's kernels: for CPU and CUDA, for fake tensors, for autograd.

    An operator without one for autograd returns integers, which have no gradient.
    """
    if autograd is None:
        operator = getattr(torch.ops.fa, name).default

        def autograd(keyset, *args, **options):
            return redispatch(operator, keyset, *args, **options)

    for key in ("CPU", "CUDA"):
        lib.impl(name, kernel, key)
    torch.library.register_fake(f"fa::{name}", fake, lib=lib)
    lib.impl(name, autograd, "Autograd", with_keyset=True)
