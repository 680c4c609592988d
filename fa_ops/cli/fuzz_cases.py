"""Random calls by number, and the outcome of comparing each with the oracle."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import torch

from fa_ops import cache_checks, checks, dispatch
from fa_ops.call import CACHED, DENSE, PACKED, QUANTIZED, Call, Saved
from fa_ops.testing import Arena, CacheCase, QuantizedCase, assert_right, draws, make_case
from fa_ops.testing.allocators import poisoned_memory

# repeated over the numbers of families
KINDS = ("dense", "packed", "dense", "cached", "dense", "quantized")
MAX_DRAWS = 2000  # draws that a backend may refuse before the search for a valid one fails


class Target(NamedTuple):
    """The backend to test, its device, and the dtypes of the calls."""

    backend: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    arena: bool = False  # draw edge cases only, and check margins around all tensors
    kinds: tuple[str, ...] = KINDS  # of the families, in turn


class Outcome(NamedTuple):
    """The result of one case."""

    target: Target
    family: int
    case: int
    kind: str = ""
    gradients: bool = False  # whether gradients were compared as well
    features: Sequence[str] = ()
    error: str | None = None
    device_lost: bool = False  # the process cannot use its device any more


class FuzzRun(NamedTuple):
    """Cases `first` to `last - 1` of a family, for one target."""

    target: Target
    family: int
    first: int
    last: int


def outcomes(run: FuzzRun) -> Iterator[Outcome]:
    """Run the cases in order."""
    try:
        family = family_of(run.target, run.family)
    except Exception as error:
        yield Outcome(run.target, run.family, run.first, error=_message(error))
        return
    for number in range(run.first, run.last):
        yield _outcome(run.target, run.family, number, family)


def _outcome(target: Target, number: int, index: int, family: draws.Family) -> Outcome:
    result = Outcome(target, number, index, family.kind)
    case = None
    try:
        case = _case_of(target, number, index, family)
        result = result._replace(features=draws.features(case))
        arena = Arena() if target.arena else None
        repeated = target.arena or index % 4 == 0
        gradients = has_gradients(target.backend, case)
        compared = assert_right(case, target.backend, arena, repeated, gradients)
        return result._replace(gradients=compared)
    except AssertionError as error:
        return result._replace(error=str(error))
    except Exception as error:  # run the other cases even if one fails
        lost = target.device == "cuda" and _device_is_lost()
        return result._replace(error=f"{case}: {_message(error)}", device_lost=lost)


def _device_is_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # after an illegal access the CUDA context is unusable
        return True
    return False


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def family_of(target: Target, number: int) -> draws.Family:
    """Family `number`: the first draw for this number that the backend supports.

    Raises:
        LookupError: the backend supports none of `MAX_DRAWS` draws.
    """
    kind = target.kinds[number % len(target.kinds)]
    if kind == "quantized" and target.kinds == KINDS and not _has_8_bits(target):
        kind = "dense"
    for attempt in range(MAX_DRAWS):
        pick = random.Random(f"{number}.{attempt}").choice
        family = draws.family(pick, kind, target.dtypes, True if target.arena else None)
        case = family.case(pick, target.device)
        reason = refusal(target.backend, case)
        if reason is None:
            return family
    raise LookupError(
        f"{target.backend} supports none of {MAX_DRAWS} {kind} calls; the last one: {reason}"
    )


def _has_8_bits(target: Target) -> bool:
    """Whether the backend has kernels with 8-bit products for this device."""
    plain = QuantizedCase(make_case(dtype=torch.float16, device=target.device))
    return refusal(target.backend, plain) is None


def _case_of(target: Target, number: int, index: int, family: draws.Family) -> draws.AnyCase:
    for attempt in itertools.count():
        pick = random.Random(f"{number}.{index}.{attempt}").choice
        case = family.case(pick, target.device)
        may_differ = isinstance(case, CacheCase | QuantizedCase)
        if not may_differ or refusal(target.backend, case) is None:
            return case  # a backend supports dense and packed calls of a family in every size
        if attempt == MAX_DRAWS:
            raise LookupError(f"{target.backend} supports none of {MAX_DRAWS} calls of {family}")


def refusal(backend: str, case: draws.AnyCase) -> str | None:
    """Why the backend cannot run a case; None where it can."""
    q, k, v, *cache, spec = case.fresh()
    if isinstance(case, QuantizedCase):
        call = Call(QUANTIZED, q, k, v, spec, quantization=cache[0], backend=backend)
    elif cache:
        call = Call(CACHED, q, k, v, spec, cache=cache[0], backend=backend)
    else:
        call = Call(DENSE if q.dim() == 4 else PACKED, q, k, v, spec, backend=backend)
    return dispatch.refusal(backend, call)


def has_gradients(backend: str, case: draws.AnyCase) -> bool:
    """Whether the backend has a backward pass for a case that it supports."""
    if isinstance(case, CacheCase | QuantizedCase):
        return False
    q, k, v, spec = case.fresh()[:4]
    saved = Saved(q, None, q, q)  # that there are such tensors is all that backends ask
    call = Call(DENSE if q.dim() == 4 else PACKED, q, k, v, spec, saved=saved, backend=backend)
    return dispatch.refusal(backend, call) is None


@contextlib.contextmanager
def strict(target: Target) -> Iterator[None]:
    """In a `with` block, memory that a backend allocates is NaN until it is written.

    For Triton's interpreter lengths and pages are not checked, as on a GPU. Of its float32 calls,
    all of which are small, half are multiplied as larger ones are.
    """
    with contextlib.ExitStack() as patches:
        patches.enter_context(poisoned_memory(target.backend))
        if target.backend == "triton":
            from fa_ops.backends.triton import configs

            half = mock.patch.object(configs, "is_small", lambda *sizes: hash(sizes) % 2 == 0)
            patches.enter_context(half)
        if target.backend == "triton" and target.device == "cpu":
            for module, name in ((checks, "values"), (cache_checks, "values")):
                patches.enter_context(mock.patch.object(module, name, lambda *_, **__: None))
        yield
