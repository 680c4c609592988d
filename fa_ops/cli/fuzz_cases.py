"""One random call against the oracle: which one a number means, and how it went."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import torch

from fa_ops import cache_checks, checks, dispatch
from fa_ops.call import CACHED, DENSE, PACKED, Call
from fa_ops.testing import Arena, CacheCase, assert_right, draws
from fa_ops.testing.poison import poisoned_memory

KINDS = ("dense", "packed", "dense", "cached", "dense")  # of families 0, 1, 2, ... and on
TRIES = 2000  # draws that a backend may refuse before the search for one ends


class Target(NamedTuple):
    """What is tried, and where."""

    backend: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    arena: bool = False  # margins around all tensors are checked, and all calls are at some edge


class Outcome(NamedTuple):
    """How a case went."""

    target: Target
    family: int
    case: int
    kind: str = ""
    gradients: bool = False  # whether they were compared too
    features: Sequence[str] = ()
    error: str | None = None
    spoils: bool = False  # the process cannot use its device any more


class FuzzRun(NamedTuple):
    """Cases `first` to `last - 1` of a family."""

    target: Target
    family: int
    first: int
    last: int


def outcomes(run: FuzzRun) -> Iterator[Outcome]:
    """Try the run's cases, one after the other."""
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
        compared = assert_right(case, target.backend, arena, repeated)
        return result._replace(gradients=compared)
    except AssertionError as error:
        return result._replace(error=str(error))
    except Exception as error:  # one that cannot run must not hide the others
        broken = target.device == "cuda" and _device_is_broken()
        return result._replace(error=f"{case}: {_message(error)}", spoils=broken)


def _device_is_broken() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # an illegal address stays with the process
        return True
    return False


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def family_of(target: Target, number: int) -> draws.Family:
    """The first draw of that number that the backend takes.

    Raises:
        LookupError: it takes none.
    """
    kind = KINDS[number % len(KINDS)]
    for attempt in range(TRIES):
        pick = random.Random(f"{number}.{attempt}").choice
        family = draws.family(pick, kind, target.dtypes, True if target.arena else None)
        case = family.case(pick, target.device)
        reason = refusal(target.backend, case)
        if reason is None:
            return family
    raise LookupError(f"{target.backend} took none of {TRIES} {kind} calls; of the last: {reason}")


def _case_of(target: Target, number: int, index: int, family: draws.Family) -> draws.AnyCase:
    for attempt in itertools.count():
        pick = random.Random(f"{number}.{index}.{attempt}").choice
        case = family.case(pick, target.device)
        if not isinstance(case, CacheCase) or refusal(target.backend, case) is None:
            return case  # sizes do not change what a backend says of dense and packed calls
        if attempt == TRIES:
            raise LookupError(f"{target.backend} takes one call in {TRIES} of {family} at most")


def refusal(backend: str, case: draws.AnyCase) -> str | None:
    """Why the backend cannot run a case; None where it can."""
    q, k, v, *cache, spec = case.fresh()
    if cache:
        call = Call(CACHED, q, k, v, spec, cache=cache[0], backend=backend)
    else:
        call = Call(DENSE if q.dim() == 4 else PACKED, q, k, v, spec, backend=backend)
    return dispatch.refusal(backend, call)


@contextlib.contextmanager
def strict(target: Target) -> Iterator[None]:
    """In a `with` block, memory that a backend allocates and does not write shows.

    Triton's interpreter is treated as a GPU is: lengths and pages are not checked for it.
    """
    with contextlib.ExitStack() as patches:
        patches.enter_context(poisoned_memory(target.backend))
        if target.backend == "triton" and target.device == "cpu":
            for module, name in ((checks, "values"), (cache_checks, "values")):
                patches.enter_context(mock.patch.object(module, name, lambda *_: None))
        yield
