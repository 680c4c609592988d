"""Finds or makes the plan of a call.

The checks and the choice of a backend are most of the host time of a small call, and their outcome
is the same for every call with the same geometry: shapes, strides, dtypes, devices, options, and
the set of optional tensors. `key_of` describes that geometry, and `prepared` finds what runs it. On
a miss, `prepare` checks the call, chooses a backend, and lets the backend's plan make what runs
this geometry. The public functions, the kernels of the operators and autograd all run what is found
here.

A cache that grows by a token has a new geometry in every step. All of them form one family, which
is checked and planned once: a backend may compare the number of keys with powers of two only.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

from fa_ops.call import (
    backend_option,
    cache_checks,
    cache_memory,
    checks,
    quantized_checks,
    selected_checks,
)
from fa_ops.call.call import (
    CACHED,
    DENSE,
    PACKED,
    PAGED,
    PROGRAMMED,
    PROGRAMMED_MAX,
    QUANTIZED,
    SELECTED,
    Call,
    Plan,
    Run,
    Saved,
    Signature,
    append_then_attend,
    rows_are_aligned,
)
from fa_ops.call.options import (
    NO_OPERAND_SET,
    NO_OPERANDS,
    TOKEN_SCALES,
    Operands,
    OperandSet,
    Options,
    bounded,
    operand_set,
    scales_of,
)
from fa_ops.plans import dispatch, outputs, recognition
from fa_ops.plans.recognition import LastCall
from fa_ops.tracing import is_capturing

# Reports page numbers and lengths out of range on the GPU too, at the price of a synchronisation.
DEBUG = os.environ.get("FA_OPS_DEBUG", "0") not in ("", "0")

_LIMIT = 1024
_log = logging.getLogger("fa_ops.plans")


class Prepared:
    """The prepared plan of all calls of one geometry."""

    def __init__(
        self, run: Run, signature: Signature, options: Options, scalars: tuple, operands: OperandSet
    ) -> None:
        self.run = run
        self.signature, self.options = signature, options  # of the calls
        self.scalars = scalars  # as `key_of` was given them
        self.operands = operands  # that the calls have
        self.last_call: LastCall | None = None  # by which calls that repeat are recognised
        self.last_backward: LastCall | None = None  # of a forward pass


_prepared: dict[tuple, Prepared] = {}
_plans: dict[tuple, Plan] = {}


def key_of(
    signature: Signature, q: Tensor, k: Tensor, v: Tensor, operands: Operands, scalars: tuple
) -> tuple | None:
    """The geometry of a call; None where an argument is no tensor or has no strides.

    The types of scalars are part of the geometry: the checks refuse 1 for a bool, but it equals
    True.
    """
    try:
        dtype, k_shape, v_shape = q.dtype, k.shape, v.shape
        backend = (
            backend_option.chosen() if backend_option.open_blocks() else backend_option.default
        )
        key = (
            signature, q.shape, q.stride(), k_shape, k.stride(), v_shape, v.stride(),
            dtype, k.dtype, v.dtype, q.device, k.device, v.device, backend,
            scalars, tuple(map(type, scalars)),
        )  # fmt: skip
        if k_shape != v_shape:  # values may be part of the keys
            key += (k.data_ptr() == v.data_ptr(),)
        if dtype is torch.float32:
            key += (recognition.precision_of(q),)
        if operands is not NO_OPERANDS:
            given = signature.operands.select(operands)
            key += tuple(
                [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in given]
            )
        return key
    except (AttributeError, RuntimeError):
        return None


def prepared(key: tuple | None) -> Prepared | None:
    """The prepared plan of this geometry, or None."""
    try:
        return _prepared.get(key)
    except TypeError:  # an option that cannot be hashed, which the checks refuse
        return None


def prepare(key: tuple, call: Call, scalars: tuple) -> Prepared:
    """Check, plan and prepare the first call of a geometry.

    Raises:
        ValueError, TypeError: the call is not legal.
        NotImplementedError: no backend, or not the one asked for, can run it.
    """
    if key is None:
        check(call)  # raises
    signature, operands = key[0], call.operands
    family = _family_of(key, call, signature)
    plan = _plans.get(family)
    check_values = _check_of_values(call)
    if plan is None:
        check(call, signature=signature)
        if check_values is not None and not is_capturing(call.query.device):
            check_values(call.query, call.key, call.value, operands)
    step = _normalising_step(operands)
    normal = _normalised(call, step)
    if plan is None:
        plan = _keep(_plans, family, plan_for(normal))
        if _log.isEnabledFor(logging.DEBUG):
            _log_plan(plan, call, normal)
    run = _with_steps_before(plan.prepare(normal), call, step, check_values)
    given = NO_OPERAND_SET if operands is NO_OPERANDS else operand_set(operands)
    return _keep(_prepared, key, Prepared(run, signature, call.options, scalars, given))


def _log_plan(plan: Plan, call: Call, normal: Call) -> None:
    """Log a new plan in the words of `fa_ops.explain`."""
    backend = "none" if normal.is_empty else dispatch.choose(normal).__name__.rpartition(".")[2]
    lines = [f"backend: {backend}", f"kernel: {plan.kernel}"]
    lines += dispatch.notes(call.query, call.key, call.value, call.operands, call.options.is_causal)
    _log.debug("new plan\n%s", "\n".join(lines))


def _keep(known: dict, key: tuple, value):
    if len(known) >= _LIMIT:
        known.clear()
    known[key] = value
    return value


def forget() -> None:
    """Drop all plans."""
    _prepared.clear()
    recognition.last_calls.clear()
    _plans.clear()


def run(
    signature: Signature, q: Tensor, k: Tensor, v: Tensor, operands: Operands, scalars: tuple,
    with_lse: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Run a forward call by its plan: out and lse, which may be None if not `with_lse`, and maxima.

    Raises:
        ValueError, TypeError, NotImplementedError: as `prepare` does.
    """
    plan = plan_of(signature, q, k, v, operands, scalars)
    return plan.run(q, k, v, operands, with_lse)


def plan_of(
    signature: Signature, q: Tensor, k: Tensor, v: Tensor, operands: Operands, scalars: tuple
) -> Prepared:
    """Find or make what runs a forward call. Raises as `prepare` does."""
    key = key_of(signature, q, k, v, operands, scalars)
    return prepared(key) or prepare(key, signature.call(q, k, v, operands, scalars), scalars)


def with_backend(scalars: tuple) -> tuple:
    """Scalars with the backend that is chosen now, on which the backward pass will then run."""
    backend = scalars[_BACKEND] or backend_option.chosen()
    return (*scalars[:_BACKEND], backend, *scalars[_BACKEND + 1 :]) if backend else scalars


_BACKEND = Options._fields.index("backend")


def prepared_backward(
    signature: Signature, options: Options, scalars: tuple, q: Tensor, k: Tensor, v: Tensor,
    operands: Operands, saved: Saved,
) -> Prepared:  # fmt: skip
    """Find or make what runs the backward pass of a call.

    `scalars` are those of its forward pass, for `key_of`, which the checked `options` mean.
    """
    scalars = backward_scalars(scalars, saved)
    key = key_of(signature, q, k, v, operands, scalars)
    found = prepared(key)
    if found is None:
        if torch.are_deterministic_algorithms_enabled():
            options = options._replace(deterministic=True)
        found = prepare(key, Call(q, k, v, operands, options, saved), scalars)
    return found


def backward_scalars(scalars: tuple, saved: Saved) -> tuple:
    """The scalars of a backward pass, and the geometry of its additional tensors, for `key_of`."""
    grad_out, grad_lse, out, lse, mask_grad = saved
    geometry = (
        "backward", scalars, torch.are_deterministic_algorithms_enabled(), mask_grad,
        grad_out.shape, grad_out.stride(), grad_out.dtype, grad_out.device,
        out.shape, out.stride(), out.dtype, out.device,
        lse.shape, lse.stride(), lse.dtype, lse.device,
    )  # fmt: skip
    if grad_lse is None:
        return geometry
    return *geometry, grad_lse.shape, grad_lse.stride(), grad_lse.dtype, grad_lse.device


def run_tangents(call: Call) -> tuple:
    """Run a call with tangents by its plan. Raises as `prepare` does."""
    (q, k, v), operands, saved, tangents = call[:3], call.operands, call.saved, call.tangents
    if torch.are_deterministic_algorithms_enabled():
        call = call.changed(deterministic=True)
    geometry = [
        (t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else t
        for t in (*saved, *tangents)
    ]
    scalars = "tangents", call.signature.scalars(call.options), *geometry
    key = key_of(call.signature, q, k, v, operands, scalars)
    plan = prepared(key) or prepare(key, call, scalars)
    return plan.run(q, k, v, operands, saved, tangents)


def plan_for(call: Call) -> Plan:
    """The plan of a legal, normalised call, by the backend that `dispatch` chooses."""
    if call.is_empty:
        return outputs.plan(call)
    backend = dispatch.choose(call)
    if call.options.over_cache and call.writes_cache:
        rest = call.read_only()
        reader = backend if backend.append_error(call) else dispatch.choose(rest)
        if reader is not backend:
            name = reader.__name__.rpartition(".")[2]
            return append_then_attend(backend.append_plan(call), plan_for(rest), name)
    return backend.plan(call)


def _family_of(key: tuple, call: Call, signature: Signature) -> tuple:
    """The key of all calls that the checks and backends treat alike.

    It has the position of the number of keys among the powers of two, and the alignment of rows, in
    place of the number and the strides of keys. Of paged caches it has the pages, without how many
    of them a row may use.
    """
    q, k, v, operands = call.query, call.key, call.value, call.operands
    if (
        not (signature is DENSE or signature is CACHED)
        or call.saved is not None
        or not q.dim() == k.dim() == v.dim() == 4
    ):
        return key
    table, mask = operands.page_table, operands.attn_mask
    if table is not None and table.dim() != 2:
        return key
    keys = k.shape[2] if table is None else call.num_keys
    size = keys.bit_length(), (keys - 1).bit_length(), rows_are_aligned(q, k, v)
    if table is not None:
        described = table.shape[0], table.dtype, table.device
        return *_with_operand(key, signature, "page_table", described), *size
    if operands.mask_blocks is not None:  # whose shape is checked against the number of keys
        return key
    # every stride of a cache that is written to is checked, and the shape of scales of tokens
    if signature is CACHED and (call.writes_cache or _has_token_scales(operands)):
        return key
    if mask is not None:
        shape = [n if at or n != keys else "keys" for at, n in enumerate(reversed(mask.shape))]
        key = _with_operand(key, signature, "attn_mask", (*shape, mask.dtype, mask.device))
    _, q_shape, q_strides, k_shape, k_strides, v_shape, v_strides, *rest = key
    return (
        signature, q_shape, q_strides, k_shape[:2], k_shape[3], v_shape[:2], v_shape[3],
        keys == v_shape[2], *size, k_strides[3], v_strides[3], k_strides == v_strides, *rest,
    )  # fmt: skip


def _with_operand(key: tuple, signature: Signature, name: str, described: tuple) -> tuple:
    """A key of `key_of` with another description of an operand."""
    names = signature.operands.names
    at = len(key) - len(names) + names.index(name)
    return *key[:at], described, *key[at + 1 :]


def _has_token_scales(operands: Operands) -> bool:
    is_paged = operands.page_table is not None
    return scales_of(operands.k_scale, operands.v_scale, is_paged) == TOKEN_SCALES


def check(call: Call, real: bool = True, signature: Signature | None = None) -> None:
    """Raise ValueError or TypeError unless the call is legal.

    `real` tensors have memory, whose strides kernels rely on; those of fakes may lie.
    """
    signature = signature or call.signature
    if signature is DENSE:
        checks.dense(call, real)
    elif signature is PACKED:
        checks.packed(call, real)
    elif signature is PROGRAMMED or signature is PROGRAMMED_MAX:
        checks.programmed(call, real)
    elif signature is CACHED:
        cache_checks.cached(call, real)
    elif signature is PAGED:
        cache_checks.paged(call)
    elif signature is SELECTED:
        selected_checks.blocks(call, real)
    elif signature is QUANTIZED:
        quantized_checks.quantized(call, real)
    else:
        quantized_checks.packed(call)
    if call.saved is not None:
        checks.saved(call.query, call.value, call.saved, call.is_backward)
        if call.tangents is not None:
            checks.tangents(call)
        if call.saved.mask_grad:
            checks.mask_grad(call.operands.attn_mask)


def normalised(call: Call) -> Call:
    """The call as backends see it.

    Small tensors are contiguous, as kernels index them flat. A window that excludes no key is -1.
    New keys without tokens are None. Head dimensions of 0 are padded.
    """
    return _normalised(call, _normalising_step(call.operands))


def _normalised(call: Call, step: Callable[[Operands], Operands] | None) -> Call:
    if step is not None:
        call = call._replace(operands=step(call.operands))
    options = call.options
    if options.window_left >= 0 or options.window_right >= 0:
        left, right = bounded(options.window_left), bounded(options.window_right)
        options = options._replace(window_left=left, window_right=right)
    backend = options.backend or backend_option.chosen() or "auto"
    call = call._replace(options=options, backend=backend)
    return outputs.with_features(call) if call.lacks_features else call


def _normalising_step(tensors: Operands) -> Callable[[Operands], Operands] | None:
    """A function that normalises the optional tensors of a call; None if nothing needs it."""
    if tensors is NO_OPERANDS:
        return None
    steps = {}
    for name, t in zip(tensors._fields, tensors):
        if t is None or name == "attn_mask":
            continue
        if name not in ("new_key", "new_value"):
            if not t.is_contiguous():
                steps[name] = Tensor.contiguous
        elif 0 in t.shape[:3]:  # a head dimension of 0 is padded
            steps[name] = _absent
    if not steps:
        return None
    return lambda t: t._replace(**{name: step(getattr(t, name)) for name, step in steps.items()})


def _absent(t: Tensor) -> None:
    """In place of new keys and values without tokens."""


def _with_steps_before(
    run: Run, call: Call, step: Callable[[Operands], Operands] | None,
    check_values: Callable[..., None] | None,
) -> Run:  # fmt: skip
    """`run` preceded by the steps that every call of this geometry needs."""
    if call.lacks_features:
        run = outputs.adding_features(run, call)
    if step is not None:
        run = _after(step, run, call)
    if call.operands.new_key is not None:
        run = cache_memory.checking(run, call.key, call.value)
    if check_values is None:
        return run
    last = call.saved is not None and call.tangents is None
    add = _checking_values_of_backward if last else _checking_values
    return add(run, check_values)


def _check_of_values(call: Call) -> Callable[..., None] | None:
    """What checks lengths, pages or cu_seqlens on the host; on CUDA kernels clamp them."""
    signature = call.signature
    is_read = call.query.device.type == "cpu" or DEBUG
    if signature is PACKED and is_read:
        longest = call.options.max_seqlen_q, call.options.max_seqlen_k
        return functools.partial(checks.values, longest=longest)
    if signature is CACHED and is_read:
        return cache_checks.values
    if signature is SELECTED and is_read and call.saved is None:
        return functools.partial(selected_checks.block_values, call.options)
    return None


def _after(step: Callable[[Operands], Operands], run: Run, call: Call) -> Run:
    """`run` with its optional tensors changed by `step`."""
    if call.tangents is not None:
        return lambda q, k, v, tensors, *rest: run(q, k, v, step(tensors), *rest)
    if call.saved is not None:
        return lambda *tensors: run(*tensors[:-1], step(tensors[-1]))
    return lambda q, k, v, tensors, with_lse=True: run(q, k, v, step(tensors), with_lse)


def _checking_values(run: Run, check_values: Callable[..., None]) -> Run:
    def checked(q, k, v, tensors, *rest):
        if not is_capturing(q.device):
            check_values(q, k, v, tensors)
        return run(q, k, v, tensors, *rest)

    return checked


def _checking_values_of_backward(run: Run, check_values: Callable[..., None]) -> Run:
    """The same for the backward pass of a packed call."""

    def checked(grad_out, grad_lse, q, k, v, out, lse, tensors):
        check_values(q, k, v, tensors)
        return run(grad_out, grad_lse, q, k, v, out, lse, tensors)

    return checked
