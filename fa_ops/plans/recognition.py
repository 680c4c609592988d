"""Recognises calls that repeat: the last call with the same options, and tests of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.call import backend_option
from fa_ops.call.options import selector

if TYPE_CHECKING:
    from fa_ops.plans.planning import Prepared

try:  # TorchDynamo's guards compare tensors in one call of C++
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None


class LastCall(NamedTuple):
    """The last call of its kind with its options, forward or backward, and what became of it.

    Most calls repeat one of them with tensors at other addresses. To compare its tensors with those
    of a new call, in C++, takes a third of the time that it takes to describe and look up their
    geometry, which saves 1.6 to 3 us of a call. The last forward call with each tuple of options is
    in `last_calls`; each forward plan keeps its last backward pass. Call sites in compiled code
    have their last calls in `last_calls` too, forward and backward.
    """

    # Of tensors: whether they have the geometry of this call's own, and the dispatch keys.
    matches: Callable[..., bool]
    # of a forward call an `ops.eager.Found`; of a backward pass its settings and run, or its plan
    outcome: Any


last_calls: dict[tuple, LastCall] = {}  # by options

_LIMIT = 1024


def note(
    options: tuple, plan: Prepared, outcome: Any, like: Callable, tensors: tuple,
    refused: LastCall | None,
) -> None:  # fmt: skip
    """Note the last call with these options, and keep it with its plan for other options.

    `like` makes the test of its tensors; `refused` has one that was False for them.
    """
    last = plan.last_call
    if last is None or last is refused or last.outcome != outcome:
        plan.last_call = last = LastCall(like(*tensors), outcome)
    if len(last_calls) >= _LIMIT:
        last_calls.clear()
    last_calls[options] = last


# What torch's function and property would ask, in a fifth of their time.
_is_deterministic = torch._C._get_deterministic_algorithms
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
_MATMUL = torch.backends.cuda.matmul


def precision_of(x: Tensor) -> str | None:
    """The precision of products of float32 on GPUs; None for CPUs and for other dtypes."""
    if x.dtype is not torch.float32 or x.is_cpu:
        return None
    matmul = torch.backends.cuda.matmul
    is_known = matmul is _MATMUL and _precision is not None
    return _precision("cuda", "matmul") if is_known else matmul.fp32_precision


def settings(q: Tensor, mask_grad: bool) -> tuple:
    """What a backward pass depends on besides its tensors and the options of its forward pass."""
    deterministic = _is_deterministic()
    backend = backend_option.chosen() if backend_option.open_blocks() else backend_option.default
    return backend, deterministic, precision_of(q), mask_grad


def like_call(q: Tensor, k: Tensor, v: Tensor, *operands: Tensor | None) -> Callable[..., bool]:
    """A test whether a forward call with other tensors has the geometry of one with these."""
    are_like = like(q, k, v, *operands, may_be_nested=True)
    precision = precision_of(q)
    shared = shares_memory(k, v)
    if precision is None and shared is None:
        return are_like

    def matches(q: Tensor, k: Tensor, v: Tensor, *operands: Tensor | None) -> bool:
        return (
            are_like(q, k, v, *operands)
            and (shared is None or (k.data_ptr() == v.data_ptr()) is shared)
            and precision == precision_of(q)
        )

    return matches


def like_backward(*given: Tensor | None) -> Callable[..., bool]:
    """The same of the tensors of a backward pass."""
    are_like = like(*given)
    shared = shares_memory(*given[3:5])
    if shared is None:
        return are_like
    return lambda *others: are_like(*others) and shares_memory(*others[3:5]) is shared


def shares_memory(k: Tensor, v: Tensor) -> bool | None:
    """Whether values are part of the keys; None where they have the same shape."""
    return None if k.shape == v.shape else k.data_ptr() == v.data_ptr()


def like(*tensors: Tensor | None, may_be_nested: bool = False) -> Callable[..., bool]:
    """A test whether as many others have the types, dtypes, devices, shapes and strides of these.

    And the dispatch keys, with what modes and transforms add to them. There are two at least.
    `may_be_nested`: the others, where some of these are None or given twice.
    """
    if TensorGuards is None:
        return lambda *others: False
    (test, select), *repeated = _tests_of(tensors)
    absent = [i for i, t in enumerate(tensors) if t is None]
    if not (absent or repeated):
        return test
    select_absent, nones = selector(absent), (None,) * len(absent)

    def are_like(*others: Tensor | None) -> bool:
        if select_absent(others) != nones:  # no tensor equals None
            return False
        given = select(others)
        if may_be_nested:
            for t in given:
                if t.is_nested:  # of strided layout: comparing strides aborts
                    return False
        if not test(*given):
            return False
        for again, at in repeated:  # noqa: SIM110 - a generator takes longer
            if not again(*at(others)):
                return False
        return True

    return are_like


def _tests_of(tensors: Sequence[Tensor | None]) -> list[tuple[Callable, Callable]]:
    """Tests of others, each with what selects those that it tests.

    One test refuses a tensor that is given twice, so those given n times are in n tests.
    """
    groups: list[dict[int, int]] = []  # of each test, positions by the tensors' identities
    for i, t in enumerate(tensors):
        if t is not None:
            group = next((g for g in groups if id(t) not in g), None)
            if group is None:
                groups.append(group := {})
            group[id(t)] = i
    none = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    positions = [list(group.values()) for group in groups]
    return [
        (TensorGuards(*[tensors[i] for i in at], **none).check, selector(at)) for at in positions
    ]
