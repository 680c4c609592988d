"""Limits that CONTRIBUTING.md sets: names of classes, lengths of files and of functions."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.test_layering import MODULES, PACKAGES, ROOT

# What is over a limit today; a name or a file that no longer is has to leave its list.
SHARED_CLASS_NAMES = {
    "Problem",
    "Tile",
}
LONG_FILES: set[str] = set()
LONG_FUNCTIONS = {
    "fa_ops.compat.flash_attn.flash_attn_with_kvcache",
    "fa_ops.kv_cache.attention_with_kv_cache",
    "hf_integration.attention.fa_ops_attention_forward",
}
MOST_LINES, MOST_FUNCTION_LINES = 600, 60
MAX_CUDA_COLUMNS = 110


def test_class_names_are_unique_over_the_packages():
    found = defaultdict(list)
    for module, tree in MODULES:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    shared = {name: where for name, where in found.items() if len(where) > 1}
    new = {name: where for name, where in shared.items() if name not in SHARED_CLASS_NAMES}
    assert not new, f"each needs a name of its own: {new}"
    assert shared.keys() == SHARED_CLASS_NAMES, "unique by now: take it from SHARED_CLASS_NAMES"


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_files_are_short(folder):
    long = {
        str(path.relative_to(ROOT))
        for suffix in ("py", "cu", "cuh")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
        if len(path.read_text().splitlines()) >= MOST_LINES
    }
    known = {name for name in LONG_FILES if name.startswith(f"{folder}/")}
    assert not long - known, f"files have fewer than {MOST_LINES} lines"
    assert long == known, "short by now: take it from LONG_FILES"


def test_cuda_lines_are_short():
    sources = sorted((ROOT / "fa_ops/backends/hopper/cuda").iterdir())
    assert sources
    for path in sources:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= MAX_CUDA_COLUMNS, f"{path.name}:{number}"


def test_functions_are_short():
    long = {
        f"{module}.{function.name}"
        for module, tree in MODULES
        for function in functions(tree)
        if length(function) >= MOST_FUNCTION_LINES and not is_kernel(function)
    }
    assert not long - LONG_FUNCTIONS, f"functions have fewer than {MOST_FUNCTION_LINES} lines"
    assert long == LONG_FUNCTIONS, "short by now: take it from LONG_FUNCTIONS"


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def length(function: ast.FunctionDef) -> int:
    """Lines, without those of the docstring."""
    total = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return total
    docstring = function.body[0]
    return total - (docstring.end_lineno - docstring.lineno + 1)


def is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list)
