"""Limits that CONTRIBUTING.md states: class names, lengths of files and functions, duplicates."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

from fa_ops.backends.hopper.runtime.nvrtc import _included
from tests.duplicates import MIN_LINES, duplicates
from tests.imports import PACKAGES, ROOT, imports, modules_of, ours
from tests.test_layering import MODULES

# Exceptions from the limits; those that are no longer needed must be removed.
SHARED_CLASS_NAMES: set[str] = set()
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
MAX_LINES = {"py": 800, "cu": 1400, "cuh": 1400}
MAX_FUNCTION_LINES = 90
MAX_CUDA_COLUMNS = 110

# Names that would say nothing of what a module or a class is: participles and collective words.
MEANINGLESS = {
    "agreement", "alike", "answer", "answers", "asked", "captured", "common", "covered",
    "described", "done", "forms", "found", "gate", "given", "helper", "helpers", "kept", "known",
    "latest", "made", "measured", "memo", "misc", "partial", "prepared", "readable", "refused",
    "requests", "scaled", "stepwise", "sums", "things", "tracked", "util", "utils", "waiting",
    "widened",
}  # fmt: skip
MEANINGLESS_NAMES = {"Found", "Prepared", "Scaled"}
# Files with fewer lines than this have two readers in the installed packages.
MIN_FILE_LINES = 120
SHORT_FILES = {  # with the reason
    "fa_ops.compat.flash_attn.ops.triton.rotary": "libraries import the module by this name",
}

HOPPER = "fa_ops/backends/hopper/cuda"
# Lines that may be duplicated between two files, with the reason.
DUPLICATED_LINES = {
    # what the combine kernel calls for two columns, by the types of each kernel
    (f"{HOPPER}/decode.cu", f"{HOPPER}/mla.cu"): 6,
    # the layout of shared memory, and the product of scores in registers that ptxas allocates
    (f"{HOPPER}/forward.cu", f"{HOPPER}/quantized.cu"): 14,
}


def test_all_folders_of_tests_are_collected_together():
    """pytest imports a file of a folder without __init__.py by its name alone."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if not (path.parent / "__init__.py").exists() and path.name != "conftest.py":
            found[path.name].append(str(path.relative_to(ROOT)))
    assert [paths for paths in found.values() if len(paths) > 1] == []


def test_class_names_are_unique_over_the_packages():
    found = defaultdict(list)
    for module, tree in MODULES:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    shared = {name: where for name, where in found.items() if len(where) > 1}
    new = {name: where for name, where in shared.items() if name not in SHARED_CLASS_NAMES}
    assert not new, f"class names must be unique: {new}"
    assert shared.keys() == SHARED_CLASS_NAMES, "remove unique names from SHARED_CLASS_NAMES"


def test_names_say_what_they_name():
    """Of modules and classes; CONTRIBUTING.md has the rule."""
    names = {module.rpartition(".")[2] for module, _ in MODULES}
    for _, tree in MODULES:
        names |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {name for name in names if is_meaningless(name)}
    new = found - MEANINGLESS_NAMES
    assert not new, f"name what these are, by a noun of the field: {sorted(new)}"
    assert found == MEANINGLESS_NAMES, "remove other names from MEANINGLESS_NAMES"


def is_meaningless(name: str) -> bool:
    return name.strip("_").lower() in MEANINGLESS


def test_names_that_say_nothing_are_found():
    assert is_meaningless("_Found") and is_meaningless("sums")
    assert not is_meaningless("partial_sums") and not is_meaningless("FoundPlan")


def test_short_files_have_two_readers():
    """What one module alone uses, and is short, stands in that module."""
    few = files_with_few_readers(MODULES)
    assert not few - SHORT_FILES.keys(), f"fewer than {MIN_FILE_LINES} lines and than two readers"
    assert few == SHORT_FILES.keys(), "remove files from SHORT_FILES"


def files_with_few_readers(modules: list[tuple[str, ast.Module]]) -> set[str]:
    """Modules with fewer lines and readers; `__init__` and `__main__` are read by Python."""
    names = {name for name, _ in modules}
    readers = Counter(
        read for name, tree in modules for read in modules_of(ours(imports(tree)), names) - {name}
    )
    few = set()
    for name in names:
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        if path.exists() and path.stem != "__main__":
            short = len(path.read_text().splitlines()) < MIN_FILE_LINES
            few |= {name} if short and readers[name] < 2 else set()
    return few


def test_files_with_few_readers_are_found():
    code = {"tests.imports": "", "fa_ops": "", "fa_ops.a": "import tests.imports"}
    assert files_with_few_readers([(n, ast.parse(c)) for n, c in code.items()]) == {"tests.imports"}


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_files_are_short(folder):
    long = {
        str(path.relative_to(ROOT))
        for suffix, lines in MAX_LINES.items()
        for path in (ROOT / folder).rglob(f"*.{suffix}")
        if len(path.read_text().splitlines()) >= lines
    }
    known = {name for name in LONG_FILES if name.startswith(f"{folder}/")}
    assert not long - known, f"files must have fewer lines: {MAX_LINES}"
    assert long == known, "remove short files from LONG_FILES"


def test_cuda_lines_are_short():
    sources = sorted((ROOT / "fa_ops/backends/hopper/cuda").iterdir())
    assert sources
    for path in sources:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= MAX_CUDA_COLUMNS, f"{path.name}:{number}"


def test_headers_have_two_kernels():
    """What one kernel alone reads stands in the kernel's own file."""
    folder = ROOT / HOPPER
    readers = defaultdict(set)
    for kernel in folder.glob("*.cu"):
        for header in {*_included(kernel.name)} - {kernel.name, "wgmma.cuh"}:  # this is generated
            readers[header].add(kernel.name)
    few = {path.name: readers[path.name] for path in folder.glob("*.cuh")}
    assert {name: names for name, names in few.items() if len(names) < 2} == {}


def test_functions_are_short():
    long = {
        f"{module}.{function.name}"
        for module, tree in MODULES
        for function in functions(tree)
        if length(function) >= MAX_FUNCTION_LINES and not is_kernel(function)
    }
    assert not long - LONG_FUNCTIONS, f"functions must have fewer than {MAX_FUNCTION_LINES} lines"
    assert long == LONG_FUNCTIONS, "remove short functions from LONG_FUNCTIONS"


def test_duplicated_code_does_not_grow():
    """`python -m tests.duplicates` lists the duplicates with their line numbers."""
    total = defaultdict(int)
    for duplicate in duplicates():
        total[duplicate.first, duplicate.second] += duplicate.lines
    new = {pair: n for pair, n in total.items() if n > DUPLICATED_LINES.get(pair, 0)}
    assert not new, f"{MIN_LINES} or more lines are equal in two files: {new}"


def test_duplicates_are_found(tmp_path):
    lines = [f"    x{n} = {n}" for n in range(7)]
    for package, name in (("fa_ops", "f"), ("hf_integration", "g")):
        (tmp_path / package).mkdir()
        code = [f"def {name}():", '    """Docs."""', *lines[:3], "", "    # comment", *lines[3:]]
        (tmp_path / package / "m.py").write_text("\n".join([*code, f"    return '{name}'"]))
    (found,) = duplicates(tmp_path)
    assert found == ("fa_ops/m.py", "hf_integration/m.py", 3, 3, 7)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def length(function: ast.FunctionDef) -> int:
    """The number of lines without the docstring."""
    total = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return total
    docstring = function.body[0]
    return total - (docstring.end_lineno - docstring.lineno + 1)


def is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list)
