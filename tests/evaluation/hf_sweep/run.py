"""Run one architecture in every scenario."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from tests.evaluation.hf_sweep import inputs as make
from tests.evaluation.hf_sweep import tiny
from tests.evaluation.hf_sweep.scenarios import CHANGES, SCENARIOS, Skip, changes, difference

SECONDS = 180  # limit for one architecture and implementation
Results = dict[str, list[str]]  # scenario -> [status, detail]


class Base:
    """An architecture with eager attention: its configs, inputs and results."""

    def __init__(self, model_type: str) -> None:
        """Raises LookupError with the last error if no config and input run."""
        self.model_type = model_type
        self.config, self.model, self.inputs = _first_that_runs(model_type)
        self.models = {None: self.model}
        self.answers: dict[str, dict[str, Tensor] | str] = {}

    def config_for(self, scenario: str):
        """The config for a scenario, which may change it."""
        wanted = CHANGES.get(scenario)
        if wanted is None or not changes(self.config, wanted):
            return self.config
        return next(tiny.configs(self.model_type, **wanted))

    def answer(self, scenario: str) -> dict[str, Tensor] | str:
        """The result of eager attention, or why there is none."""
        if scenario not in self.answers:
            model = self.model
            try:
                if self.config_for(scenario) is not self.config:
                    model = tiny.build(self.config_for(scenario), "eager")
                torch.manual_seed(0)  # some models draw random numbers
                self.answers[scenario] = SCENARIOS[scenario](model, self.inputs)
            except Skip as reason:
                self.answers[scenario] = f"skip: {reason}"
            except Exception as error:
                self.answers[scenario] = f"base_error: {_line(error)}"
        return self.answers[scenario]


def _first_that_runs(model_type: str) -> tuple[object, PreTrainedModel, dict]:
    last: Exception = LookupError("no config")
    for config in tiny.configs(model_type):
        try:
            model = tiny.build(config, "eager")
        except Exception as error:
            last = error
            continue
        for inputs in make.candidates(model):
            try:
                with torch.no_grad():
                    model(**inputs)
                return config, model, inputs
            except Exception as error:
                last = error
    raise LookupError(_line(last))


def compare(base: Base, implementation: str, scenarios: list[str]) -> Results:
    """The results of an implementation by scenario: [status, detail].

    Statuses: pass, fail, error; unrouted: the model never calls the implementation; unsupported:
    transformers refuses to build the model with it; skip, base_error: eager attention has no
    result.
    """
    results: Results = {}
    model = None
    for scenario in scenarios:
        expected = base.answer(scenario)
        if isinstance(expected, str):
            results[scenario] = expected.split(": ", 1)
            continue
        try:
            config = base.config_for(scenario)
            is_changed = config is not base.config
            if is_changed or model is None:
                made = tiny.build(config, implementation)
                model = model if is_changed else made
        except Exception as error:
            results[scenario] = ["unsupported", _line(error)]
            continue
        results[scenario] = _verdict(made if is_changed else model, base, scenario, implementation)
    return results


def _verdict(model, base: Base, scenario: str, implementation: str) -> list[str]:
    expected = base.answer(scenario)
    with calls(implementation) as count:
        try:
            torch.manual_seed(0)
            actual = SCENARIOS[scenario](model, base.inputs)
        except Exception as error:
            return ["error", _line(error)]
    if not count[implementation]:
        return ["unrouted", ""]
    found = difference(expected, actual, scenario)
    return ["pass", ""] if found is None else ["fail", found]


@contextlib.contextmanager
def calls(implementation: str) -> Iterator[Counter]:
    """Count the calls of an attention function."""
    count: Counter = Counter()
    original = AttentionInterface()[implementation]

    @functools.wraps(original)
    def counted(*args, **kwargs):
        count[implementation] += 1
        return original(*args, **kwargs)

    AttentionInterface.register(implementation, counted)
    try:
        yield count
    finally:
        AttentionInterface.register(implementation, original)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after some seconds; for the main thread only."""

    def stop(*_):
        raise TimeoutError(f"more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:200]
