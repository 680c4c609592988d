"""Who may import whom, read from the sources; and what `import fa_ops` must not bring along."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
THIRD_PARTY = {"fa_ops": {"transformers"}, "compile_passes": {"transformers", "triton"}}
# A module's own prefix: the prefixes of our modules that it may import. The longest one counts.
ALLOWED = {
    "fa_ops.types": set(),
    "fa_ops.dispatch": {"fa_ops.types"},
    # ops load the DTensor rules when they first see one
    "fa_ops.ops": {"fa_ops.ops", "fa_ops.types", "fa_ops.dispatch", "fa_ops.distributed"},
    "fa_ops.backends": {"fa_ops.types"},
    "fa_ops.api": {"fa_ops.ops", "fa_ops.types", "fa_ops.dispatch"},
    "fa_ops.distributed": {"fa_ops.ops", "fa_ops.types", "fa_ops.api", "fa_ops.distributed"},
    "fa_ops.compat": {"fa_ops.ops", "fa_ops.types", "fa_ops.api", "fa_ops.compat"},
    "fa_ops": {"fa_ops"},
    "compile_passes": {"compile_passes", "fa_ops"},
    "hf_integration": {"hf_integration", "fa_ops"},
}
BACKENDS = {p.stem for p in (ROOT / "fa_ops/backends").iterdir() if not p.stem.startswith("_")}
BACKENDS -= {"dropout"}


def modules() -> dict[str, Path]:
    found = {}
    for package in ("fa_ops", "compile_passes", "hf_integration"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Dotted names that the file imports; `everywhere`: in function bodies too."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else _at_import(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return found


def _at_import(node: ast.AST):
    """What runs when the file is imported: not function bodies, not `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if not isinstance(child, ast.FunctionDef | ast.Lambda) and not typing_only:
            yield child
            yield from _at_import(child)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def backend_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[2] if parts[:2] == ["fa_ops", "backends"] and parts[2:] else None


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_layers(name):
    rule = max((p for p in ALLOWED if within(name, p)), key=len)
    own = backend_of(name)
    for other in imports(MODULES[name]):
        if not any(within(other, p) for p in ("fa_ops", "compile_passes", "hf_integration")):
            continue
        if own is not None and backend_of(other) in (own, "dropout"):
            continue
        assert any(within(other, p) for p in ALLOWED[rule]), f"{name} imports {other}"


@pytest.mark.parametrize("name", [m for m in MODULES if backend_of(m) is None])
def test_backends_are_loaded_by_name_only(name):
    """All but the tools (testing, bench, the command line) reach a backend through `dispatch`."""
    if any(within(name, p) for p in ("fa_ops.testing", "fa_ops.bench", "fa_ops.__main__")):
        return
    for other in imports(MODULES[name]):
        assert backend_of(other) not in BACKENDS, f"{name} imports {other}"


@pytest.mark.parametrize("name", [m for m in MODULES if m.split(".")[0] in THIRD_PARTY])
def test_optional_packages_are_not_imported_at_import(name):
    outside = {other.split(".")[0] for other in imports(MODULES[name], everywhere=False)}
    assert not outside & THIRD_PARTY[name.split(".")[0]]
    if backend_of(name) is None:
        assert "triton" not in outside


@pytest.mark.parametrize("door", ["compile_passes", "hf_integration"])
def test_doors_use_public_names_only(door):
    for name in (m for m in MODULES if within(m, door)):
        for node in ast.walk(ast.parse(MODULES[name].read_text())):
            if isinstance(node, ast.ImportFrom) and within(node.module, "fa_ops"):
                private = [a.name for a in node.names if a.name.startswith("_")]
                assert not private, f"{name} imports {private} from {node.module}"


def test_import_brings_neither_triton_nor_transformers():
    code = "import sys, fa_ops; print({'triton', 'transformers'} & set(sys.modules))"
    assert fresh(code) == "set()"


def test_first_call_may_be_compiled():
    code = """
import torch, fa_ops
q = torch.randn(1, 2, 8, 16)
attend = torch.compile(lambda q: fa_ops.attention(q, q, q), fullgraph=True, backend="aot_eager")
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
print(torch.allclose(attend(q), expected, atol=1e-5))
"""
    assert fresh(code) == "True"


def fresh(code: str) -> str:
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
