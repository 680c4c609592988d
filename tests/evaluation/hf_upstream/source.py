"""Load transformers' common model tests from its source distribution, with replaced strings."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "transformers_upstream_tests"
TESTS = "test_modeling_common"


def version(folder: Path) -> str:
    """The version of an unpacked source distribution.

    Raises ValueError for another folder, or one without the common model tests.
    """
    about = folder / "PKG-INFO"
    if not about.is_file() or not path(folder).is_file():
        raise ValueError(f"{folder} has no PKG-INFO beside tests/{TESTS}.py")
    lines = about.read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Version:"))


def path(folder: Path) -> Path:
    """The file of the common model tests."""
    return folder / "tests" / f"{TESTS}.py"


def load(folder: Path, replacements: dict[str, str]) -> ModuleType:
    """The module of the common tests, with string constants replaced.

    Classes that the tests import from files outside the distribution (tests of generation and
    export) become empty classes.
    """
    file = path(folder)
    tree = _Replace(replacements).visit(ast.parse(file.read_text(), str(file)))
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
    """The relative imports whose files do not exist: module -> imported names."""
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.level == 1 and n.module]
    return {
        node.module: [alias.name for alias in node.names]
        for node in imports
        if not tests.joinpath(*node.module.split(".")).with_suffix(".py").is_file()
    }


def _stems(name: str) -> list[str]:
    """The prefixes of a dotted name: a, a.b and a.b.c of a.b.c."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


class _Replace(ast.NodeTransformer):
    def __init__(self, replacements: dict[str, str]) -> None:
        self.replacements = replacements

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and node.value in self.replacements:
            return ast.copy_location(ast.Constant(self.replacements[node.value]), node)
        return node
