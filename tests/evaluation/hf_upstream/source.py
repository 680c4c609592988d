"""transformers' common model tests, from its source distribution, with names exchanged."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "transformers_upstream_tests"
TESTS = "test_modeling_common"


def version(folder: Path) -> str:
    """The version of an unpacked source distribution.

    Raises ValueError for a folder that is none, or has no common model tests.
    """
    about = folder / "PKG-INFO"
    if not about.is_file() or not path(folder).is_file():
        raise ValueError(f"{folder} has no PKG-INFO beside tests/{TESTS}.py")
    lines = about.read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Version:"))


def path(folder: Path) -> Path:
    return folder / "tests" / f"{TESTS}.py"


def load(folder: Path, exchanged: dict[str, str]) -> ModuleType:
    """The module of common tests, each string that is a key of `exchanged` replaced by its value.

    What the tests import from files that the distribution does not carry (tests of generation and
    export) is an empty class.
    """
    file = path(folder)
    tree = _Exchange(exchanged).visit(ast.parse(file.read_text(), str(file)))
    package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    package.__path__ = [str(file.parent)]
    for name, classes in absent(tree, file.parent).items():
        for stem in _stems(name):
            stub = sys.modules.setdefault(f"{PACKAGE}.{stem}", ModuleType(stem))
            stub.__path__ = []
        vars(stub).update({c: type(c, (), {}) for c in classes})
    module = sys.modules[f"{PACKAGE}.{TESTS}"] = ModuleType(f"{PACKAGE}.{TESTS}")
    module.__file__, module.__package__ = str(file), PACKAGE
    exec(compile(tree, str(file), "exec"), vars(module))
    return module


def absent(tree: ast.Module, tests: Path) -> dict[str, list[str]]:
    """The relative imports whose files are not there: module -> imported names."""
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.level == 1 and n.module]
    return {
        node.module: [alias.name for alias in node.names]
        for node in imports
        if not tests.joinpath(*node.module.split(".")).with_suffix(".py").is_file()
    }


def _stems(name: str) -> list[str]:
    """a.b.c: a, a.b, a.b.c."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


class _Exchange(ast.NodeTransformer):
    def __init__(self, exchanged: dict[str, str]) -> None:
        self.exchanged = exchanged

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and node.value in self.exchanged:
            return ast.copy_location(ast.Constant(self.exchanged[node.value]), node)
        return node
