"""The modules that each module may import."""

from __future__ import annotations

import ast

import pytest

from tests.evaluation.lines import room_graph, rooms_of
from tests.imports import (
    PACKAGES,
    ROOT,
    imports,
    modules,
    modules_of,
    ours,
    reached,
    top_level_imports,
    within,
)

CALL = ("fa_ops.call", "fa_ops.programs", "fa_ops.tracing")
PLANS = ("fa_ops.plans", *CALL)
OPS = ("fa_ops.ops", *PLANS)
FUNCTIONS = ("fa_ops.functions", *OPS)
# What modules under a prefix may import at their top from our packages; the longest prefix counts.
# The stages of a call: functions, ops, plans, call. Each imports the stages after it.
TOP = {
    "fa_ops": (*FUNCTIONS, "fa_ops.compat"),
    "fa_ops.tracing": (),
    "fa_ops.programs": ("fa_ops.programs", "fa_ops.tracing"),
    "fa_ops.call": CALL,
    "fa_ops.plans": PLANS,
    "fa_ops.ops": OPS,
    "fa_ops.functions": FUNCTIONS,
    "fa_ops.backends": (
        "fa_ops.call",
        "fa_ops.programs",
        "fa_ops.backends.dropout",
        "fa_ops.backends.mask_blocks",
        "fa_ops.backends.quantization",
        "fa_ops.backends.rotary",
        "fa_ops.backends.selected",
    ),
    "fa_ops.distributed": (*FUNCTIONS, "fa_ops.distributed", "fa_ops.backends.dropout"),
    "fa_ops.distributed.peer_memory": (
        "fa_ops.distributed.peer_protocol",
        "fa_ops.backends.hopper.runtime.launch",  # calls of the CUDA driver
    ),
    "fa_ops.compat": (
        *FUNCTIONS,
        "fa_ops.compat",
        "fa_ops.distributed",
        "fa_ops.backends.dropout",
        "fa_ops.backends.rotary",
    ),
    "fa_ops.testing": (
        "fa_ops.testing",
        "fa_ops.call",
        "fa_ops.backends.quantization",
        "fa_ops.backends.reference",
    ),
    "compile_passes": ("compile_passes", "fa_ops"),
    "compile_passes.report": (),
    "compile_passes.ir": ("compile_passes.ir",),
    "compile_passes.rewrites": (
        "compile_passes.rewrites",
        "compile_passes.ir",
        "compile_passes.report",
    ),
    "compile_passes.match": (
        "compile_passes.match",
        "compile_passes.rewrites.einsums",
        "compile_passes.ir",
        "compile_passes.report",
        "fa_ops.call.options",
    ),
    "compile_passes.masks": (
        "compile_passes.masks",
        "compile_passes.match",
        "compile_passes.ir",
        "compile_passes.report",
    ),
    "compile_passes.emit": (
        "compile_passes.emit",
        "compile_passes.masks",
        "compile_passes.match",
        "compile_passes.ir",
        "compile_passes.report",
        "fa_ops",
    ),
    "hf_integration": ("hf_integration", "fa_ops"),
}
# Commands may import everything.
COMMANDS = ("fa_ops.__main__", "fa_ops.bench", "fa_ops.cli")
# Modules of fa_ops that users, compile_passes and hf_integration may import.
PUBLIC = (
    "fa_ops",
    "fa_ops.functions.attention",
    "fa_ops.functions.flex_graphs",
    "fa_ops.plans.dispatch",
    "fa_ops.call.backend_option",
    "fa_ops.distributed",
    "fa_ops.testing",
    "fa_ops.tracing",
    "fa_ops.call.options",
)


def allowed_imports(module: str) -> tuple[str, ...]:
    return TOP[max((prefix for prefix in TOP if within(module, (prefix,))), key=len)]


MODULES = list(modules())


def test_modules_are_found():
    names = {name for name, _ in MODULES}
    assert {"fa_ops.functions.attention", "fa_ops.ops.dense", "fa_ops.backends.reference"} <= names


def test_imports_that_run_with_a_module_are_found():
    code = """
import a
if TYPE_CHECKING:
    import b
else:
    from c import d
def f():
    import e
class G:
    import h
    def i(self):
        import j
try:
    import k
except ImportError:
    l = None
"""
    assert top_level_imports(ast.parse(code)) == {"a", "c.d", "h", "k"}


@pytest.mark.parametrize("module, tree", MODULES, ids=[name for name, _ in MODULES])
def test_imports(module, tree):
    everywhere, top = ours(imports(tree)), ours(top_level_imports(tree))
    if within(module, COMMANDS):
        return
    allowed = allowed_imports(module)
    if module.startswith("fa_ops.backends."):
        allowed += (".".join(module.split(".")[:3]),)  # a backend may import its own modules
    wrong = {name for name in top if not within(name, allowed)}
    assert not wrong, f"{module} must not import {sorted(wrong)}"
    for other in ("compile_passes", "hf_integration"):
        if not module.startswith(other):
            assert not within_any(everywhere, (other,)), f"{module} must not import {other}"
    if module.startswith("fa_ops.backends"):
        assert not within_any(everywhere, ("fa_ops.ops", "fa_ops.functions", "fa_ops.plans"))
    if module.startswith(("compile_passes", "hf_integration")):
        used = {name for name in everywhere if name.startswith("fa_ops")}
        private = {n for n in used if not within(n, PUBLIC[1:]) and n.count(".") > 1}
        assert not private, f"{module} must use fa_ops' public names, not {sorted(private)}"


def within_any(names: set[str], prefixes: tuple[str, ...]) -> bool:
    return any(within(name, prefixes) for name in names)


def test_no_modules_import_each_other_in_a_circle():
    names = {name for name, _ in MODULES}
    imported = {name: modules_of(ours(top_level_imports(tree)), names) for name, tree in MODULES}
    circles = [name for name in names if name in reached(imported, name)]
    assert not circles, sorted(circles)


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert [name for name in sorted(graph) if name in reached(graph, name)] == ["b", "c"]


def test_folders_do_not_import_each_other_in_a_circle():
    """`python -m tests.evaluation.lines` prints what is counted here."""
    for package in PACKAGES:
        assert rooms_of(room_graph(ROOT, package)).circles == [], package
    rooms = rooms_of(room_graph(ROOT, "fa_ops"))
    assert rooms.rooms <= 16 and rooms.levels <= 10, rooms


def test_levels_and_circles_of_folders_are_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"b", "e"}, "d": set(), "e": set()}
    assert rooms_of(graph) == (5, 3, 5, [["b", "c"]])


def test_installed_packages_do_not_import_tests():
    """The tests, with the evaluations, are not part of the wheel."""
    for module, tree in MODULES:
        assert not within_any(imports(tree), ("tests",)), f"{module} imports tests"


@pytest.mark.parametrize("heavy", ["triton", "transformers", "typer", "rich"])
def test_heavy_packages_are_imported_only_where_they_are_needed(heavy):
    allowed = {
        "triton": ("fa_ops.backends.triton",),
        "transformers": ("hf_integration",),
    }.get(heavy, ())
    for module, tree in MODULES:
        if not within(module, (*allowed, *COMMANDS)):
            top = {name.split(".")[0] for name in top_level_imports(tree)}
            assert heavy not in top, f"{module} imports {heavy} at its top"


# What of torch, or of transformers, says how code runs; much of it for the whole process at once.
STATE = {
    "_are_functorch_transforms_active", "_dispatch_tls_is_dispatch_key_included",
    "_get_dispatch_mode", "_is_compiling_flag", "_is_exporting_flag", "_is_tracing",
    "_len_torch_dispatch_stack", "_len_torch_function_stack", "get_proxy_mode",
    "is_batchedtensor", "is_compiling", "is_current_stream_capturing", "is_cuda_stream_capturing",
    "is_dynamo_compiling", "is_exporting", "is_fake_tensor", "is_fx_symbolic_tracing",
    "is_fx_tracing", "is_functorch_wrapped_tensor", "is_in_onnx_export", "is_jit_tracing",
    "is_torch_fx_proxy", "is_torchdynamo_compiling", "is_torchdynamo_exporting", "is_tracing",
}  # fmt: skip


def questions(tree: ast.AST) -> set[str]:
    """Which of these a module asks of others than `fa_ops.tracing`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "tracing":
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module != "fa_ops.tracing":
            found |= {alias.name for alias in node.names}
    return found & STATE


@pytest.mark.parametrize("module, tree", MODULES, ids=lambda x: x if isinstance(x, str) else "")
def test_one_module_asks_torch_how_code_runs(module, tree):
    """Answers for the whole process would take checks from a thread while another compiles."""
    if module != "fa_ops.tracing":
        assert not questions(tree), "ask fa_ops.tracing"


def test_questions_to_torch_are_found():
    asked = """
import torch
from torch.compiler import is_compiling
from fa_ops.tracing import is_capturing
tracing.is_compiling() or torch.cuda.is_current_stream_capturing()
"""
    assert questions(ast.parse(asked)) == {"is_compiling", "is_current_stream_capturing"}
    assert questions(dict(MODULES)["fa_ops.tracing"])
