"""Pages name files and tests that exist, docs/environment.md the variables that the code reads."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "tests/README.md")
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
    read = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            read |= set(variables_read(ast.parse(text)) if "env" in text else ())
    page = (ROOT / "docs/environment.md").read_text()
    table, _, others = page.partition("## Of other libraries\n")
    table += others.partition("\n## ")[2]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert len(rows) == len(set(rows)) and set(rows) == read


def test_reads_of_environment_variables_are_found():
    code = """
os.environ.get("A"), os.environ["B"], environment.setdefault("C", 1), os.getenv("D", "")
"E" in os.environ
environ.pop("F")
os.environ["G"] = "1"
settings.get("H")
"""
    assert {*variables_read(ast.parse(code))} == {*"ABCDEF"}


@pytest.mark.parametrize("page, least", [*zip(PAGES, (10, 90))])
def test_files_that_are_named_exist(page, least):
    names = re.findall(r"`((?:fa_ops|tests|docs)/[\w/.]+)`", (ROOT / page).read_text())
    assert len(names) > least
    missing = {name for name in names if not (ROOT / name).exists()}
    assert not missing, f"{page} names {sorted(missing)}"


def test_tests_of_the_quick_part_exist():
    make = ["make", "--silent", "--dry-run", "test-quick", "STAMP="]
    text = subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = re.findall(r"tests/[\w/.:]+", text)
    assert len(names) > 15
    for name in names:
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(), name


def test_every_folder_of_tests_is_described():
    table = (ROOT / "tests/README.md").read_text().partition("## Parts")[0]
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    folders |= {path.parent.name for path in (ROOT / "tests/backends").glob("*/test_*.py")}
    assert folders <= set(re.findall(r"`(\w+)`", table))
