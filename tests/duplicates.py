"""List code that is duplicated between files of the installed packages:

    python -m tests.duplicates

Duplicated code is `MIN_LINES` or more consecutive lines that are equal in two files up to leading
whitespace. Blank lines, comments, docstrings, imports, parameter lists and overloads are not
compared.
`tests/test_style.py` lists the duplicates that are accepted.
"""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.imports import PACKAGES, ROOT

MIN_LINES = 6


class Duplicate(NamedTuple):
    """Equal code in two files, and the numbers of its first line in each of them."""

    first: str
    second: str
    first_line: int
    second_line: int
    lines: int


def code_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a file that are compared, with their numbers."""
    text = path.read_text()
    skipped = set(_python_lines_to_skip(text)) if path.suffix == ".py" else set()
    comment = "#" if path.suffix == ".py" else ("//", "#include", "#pragma")
    stripped = ((n, line.strip()) for n, line in enumerate(text.splitlines(), 1))
    return [(n, s) for n, s in stripped if s and n not in skipped and not s.startswith(comment)]


def _python_lines_to_skip(text: str) -> Iterator[int]:
    """The numbers of lines with imports, docstrings and parameter lists."""
    for node in ast.walk(ast.parse(text)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            yield from range(node.lineno, node.end_lineno + 1)
        elif isinstance(node, ast.FunctionDef):
            is_overload = any(ast.unparse(one) == "overload" for one in node.decorator_list)
            first = node.decorator_list[0].lineno if is_overload else node.lineno
            yield from range(first, node.end_lineno + 1 if is_overload else node.body[0].lineno)


def duplicates(root: Path = ROOT) -> list[Duplicate]:
    """All duplicated code between files, longest first."""
    paths = [
        path
        for package, suffix in itertools.product(PACKAGES, ("py", "cu", "cuh"))
        for path in sorted((root / package).rglob(f"*.{suffix}"))
    ]
    code = {str(path.relative_to(root)): code_lines(path) for path in paths}
    windows = defaultdict(list)
    for name, lines in code.items():
        for start in range(len(lines) - MIN_LINES + 1):
            window = tuple(text for _, text in lines[start : start + MIN_LINES])
            windows[window].append((name, start))
    found = set()
    for occurrences in windows.values():
        for (first, i), (second, j) in itertools.combinations(occurrences, 2):
            a, b = code[first], code[second]
            continues = i > 0 and j > 0 and a[i - 1][1] == b[j - 1][1]
            if first != second and not continues:
                pairs = zip(a[i:], b[j:])
                equal = list(itertools.takewhile(lambda pair: pair[0][1] == pair[1][1], pairs))
                found.add(Duplicate(first, second, a[i][0], b[j][0], len(equal)))
    return sorted(found, key=lambda duplicate: (-duplicate.lines, duplicate))


def main() -> None:
    """Print all duplicates."""
    for first, second, first_line, second_line, lines in duplicates():
        print(f"{lines:4} lines  {first}:{first_line}  {second}:{second_line}")


if __name__ == "__main__":
    main()
