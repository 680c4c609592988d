"""CONTRIBUTING.md names files that exist, docs/environment.md the variables that the code reads."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = ("fa_ops", "compile_passes", "hf_integration", "tests")


def is_environment(node: ast.AST) -> bool:
    return ast.unparse(node).endswith(("environ", "environment"))


def variables_read(tree: ast.AST) -> Iterator[str]:
    """Names of environment variables that are read, which must be constants."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr in ("get", "pop", "setdefault")
            if node.func.attr == "getenv" or method and is_environment(node.func.value):
                name = node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            name = node.slice if is_environment(node.value) else None
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            name = node.left
        if name is not None:
            assert isinstance(name, ast.Constant), f"{ast.unparse(node)}: name the variable"
            yield name.value


def test_the_table_of_environment_variables_is_complete():
    read = defaultdict(set)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for variable in variables_read(ast.parse(text)) if "env" in text else ():
                read[variable].add(str(path.relative_to(ROOT)))
    page = (ROOT / "docs/environment.md").read_text()
    table, _, others = page.partition("## Of other libraries\n")
    table += others.partition("\n## ")[2]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", table, re.M)
    assert {name: set(re.findall(r"`([^`]+)`", files)) for name, files in rows} == read


def test_reads_of_environment_variables_are_found():
    code = """
os.environ.get("A"), os.environ["B"], environment.setdefault("C", 1), os.getenv("D", "")
"E" in os.environ
environ.pop("F")
os.environ["G"] = "1"
settings.get("H")
"""
    assert {*variables_read(ast.parse(code))} == {*"ABCDEF"}


def test_files_that_are_named_exist():
    names = re.findall(r"`((?:fa_ops|tests|docs)/[\w/.]+)`", TEXT)
    assert len(names) > 50
    missing = {name for name in names if not (ROOT / name).exists()}
    assert not missing, f"CONTRIBUTING.md names {sorted(missing)}"
