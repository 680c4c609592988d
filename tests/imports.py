"""The modules of the installed packages, and which of them import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("fa_ops", "compile_passes", "hf_integration")


def modules(root: Path = ROOT) -> Iterator[tuple[str, ast.Module]]:
    """Names and syntax trees; a folder's `__init__` has the folder's name."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = list(path.relative_to(root).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            yield ".".join(parts), ast.parse(path.read_text())


def imports(tree: ast.AST) -> set[str]:
    """Full names of all imports in the tree; `from a import b` counts as a.b."""
    return _names(ast.walk(tree))


def top_level_imports(tree: ast.Module) -> set[str]:
    """Imports that run with the module: not those in functions or for type checking."""
    return _names(_run_with_module(tree))


def _run_with_module(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    yield node
    children = node.orelse if _is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from _run_with_module(child)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or in one of these."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def ours(names: set[str]) -> set[str]:
    """The names within the installed packages."""
    return {name for name in names if within(name, PACKAGES)}


def modules_of(imported: set[str], names: set[str]) -> set[str]:
    """The files that are imported; a package that only gives a name of its module is none."""
    return {name if name in names else name.rpartition(".")[0] for name in imported} & names


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """What the arrows of a graph lead to; the start itself only by a circle."""
    found, waiting = set(), [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found
