"""The report of a sweep: counts and differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.evaluation.hf_sweep.scenarios import SCENARIOS

COUNTED = ("pass", "fail", "error", "unrouted", "unsupported")


def lines(results: dict) -> Iterator[str]:
    """The report of results: model type -> implementation -> scenario -> [status, detail]."""
    built = {t: r for t, r in results.items() if "base_error" not in r}
    yield f"{len(results)} model types, {len(built)} build and run with eager attention"
    names = sorted({name for r in built.values() for name in r})
    yield f"{'scenario':16}" + "".join(f"{name:>24}" for name in names)
    yield f"{'':16}" + f"{'/'.join(word[:5] for word in COUNTED):>33}"
    for scenario in SCENARIOS:
        counts = (count(built, name, scenario) for name in names)
        yield f"{scenario:16}" + "".join(f"{text:>24}" for text in counts)
    for name in names:
        yield f"\n{name} differs from eager:"
        yield from _differences(built, name)


def count(built: dict, name: str, scenario: str) -> str:
    """The numbers of statuses of an implementation in a scenario."""
    statuses = Counter(r[name][scenario][0] for r in built.values() if scenario in r.get(name, {}))
    return "/".join(str(statuses[word]) for word in COUNTED)


def _differences(built: dict, name: str) -> Iterator[str]:
    for model_type, result in built.items():
        wrong = {s: r for s, r in result.get(name, {}).items() if r[0] in ("fail", "error")}
        if wrong:
            scenario, (status, detail) = next(iter(wrong.items()))
            yield f"  {model_type}: {' '.join(wrong)}; {scenario}: {status} {detail}"
