"""The report of test results."""

from __future__ import annotations

from collections import Counter

# The runs of a family: the implementation that the tests name, and the one that replaces it.
RUNS = (("sdpa", "sdpa"), ("sdpa", "fa_ops"), ("flash_attention_2", "fa_ops"))

Found = dict[str, list]  # test -> [outcome, attention calls, reason]


def key(scope: str, implementation: str) -> str:
    """The name of a run."""
    return implementation if scope == implementation else f"{implementation} for {scope}"


def lines(results: dict[str, dict[str, Found | str]]) -> list[str]:
    """A markdown table, the tests that pass only with sdpa, and failed tests of FlashAttention 2.

    `results`: family -> run -> test results, or an error.
    """
    columns = [key(*names) for names in RUNS]
    table = [
        f"| model | {' | '.join(columns)} | passed with sdpa alone | calls of fa_ops |",
        "|---" * (len(columns) + 3) + "|",
    ]
    notes = []
    for family, runs in results.items():
        base, replaced, flash = (runs[name] for name in columns)
        worse = regressions(base, replaced)
        calls = "-" if isinstance(replaced, str) else sum(test[1] for test in replaced.values())
        cells = [family, *map(_counts, (base, replaced, flash)), str(len(worse)), str(calls)]
        table.append(f"| {' | '.join(cells)} |")
        notes += [f"{family}: {name}: {replaced[name][2]}" for name in worse]
        notes += [f"{family}: {name}: {test[2]}" for name, test in _failed(flash)]
        notes += [f"{family}, {n}: {runs[n]}" for n in columns if isinstance(runs[n], str)]
    return [*table, "passed / failed / skipped", *notes]


def regressions(base: Found | str, replaced: Found | str) -> list[str]:
    """The tests that pass with sdpa, but not with fa_ops."""
    if isinstance(base, str) or isinstance(replaced, str):
        return []
    passed = (name for name, test in base.items() if test[0] == "passed")
    return [name for name in passed if replaced.get(name, ["missing", 0, ""])[0] != "passed"]


def _counts(found: Found | str) -> str:
    if isinstance(found, str):
        return "did not run"
    counted = Counter(test[0] for test in found.values())
    return " / ".join(str(counted[outcome]) for outcome in ("passed", "failed", "skipped"))


def _failed(found: Found | str) -> list[tuple[str, list]]:
    if isinstance(found, str):
        return []
    return [(name, test) for name, test in found.items() if test[0] == "failed"]


def is_good(results: dict[str, dict[str, Found | str]]) -> bool:
    """Whether all runs finished, no test passes only with sdpa, and no flash test fails."""
    for runs in results.values():
        base, replaced, flash = (runs[key(*names)] for names in RUNS)
        if any(isinstance(found, str) for found in runs.values()):
            return False
        if regressions(base, replaced) or _failed(flash):
            return False
    return True
