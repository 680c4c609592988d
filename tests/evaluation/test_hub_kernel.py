"""`tests.evaluation.hub_kernel`: what is written can be loaded by `kernels` and transformers."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.evaluation import hub_kernel

LOAD = """
import importlib.util, json, sys, torch
from pathlib import Path

def load(folder):
    name = json.loads((Path(folder) / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
COMPARE = (
    LOAD
    + """
one, two = (load(folder) for folder in sys.argv[1:])
assert "fa_ops" not in sys.modules
import fa_ops
from fa_ops.compat import flash_attn

def outcome(module):
    torch.manual_seed(0)
    q = torch.randn(2, 9, 4, 16, requires_grad=True)
    out = module.flash_attn_func(q, q, q, causal=True, window_size=(3, 0))
    return out, *torch.autograd.grad(out.sin().sum(), q)

for kernel in (one, two):
    assert {*fa_ops.__all__, *flash_attn.__all__} - {"compat"} <= {*dir(kernel)}
    assert all(map(torch.equal, outcome(kernel), outcome(flash_attn)))
namespace = getattr(torch.ops, one.__name__)
compiled = torch.compile(one.attention, fullgraph=True, backend="aot_eager")
x = torch.randn(1, 2, 8, 16)
assert torch.equal(compiled(x, x, x), fa_ops.attention(x, x, x))
assert namespace.attention is not torch.ops.fa.attention
assert one.explain(x, x, x).backend == "cpu"
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    namespace.attention(x, x, x)
assert counter.get_total_flops() == 4 * 2 * 8 * 8 * 16
import torch.distributed.tensor  # registers sharding rules
print("passed")
"""
)
WITH_KERNELS = """
import sys, torch
from pathlib import Path
import transformers.utils as utils
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]))
x = torch.randn(1, 8, 2, 16)
expected = torch.nn.functional.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3)
assert torch.allclose(kernel.flash_attn_func(x, x, x).transpose(1, 2), expected, atol=1e-5)
# transformers accepts few releases of kernels, and this may be another one
for module in (utils, utils.import_utils):
    module.is_kernels_available = lambda *versions: True
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2)).eval()
tokens, padding = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
padding[0, :4] = 0
outs = []
for name in ("eager", "fa-ops/fa-ops"):
    model.set_attn_implementation(name)
    outs.append(model(tokens, attention_mask=padding).logits[:, -1])
assert model.config._attn_implementation == "fa-ops/fa-ops"
assert torch.allclose(*outs, atol=1e-4) and not torch.equal(*outs)
assert "fa_ops" not in sys.modules
print("passed")
"""


def command(*arguments: str, **options: object) -> Result:
    app = typer.Typer()
    app.command()(hub_kernel.main)
    return CliRunner().invoke(app, arguments, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    result = command(str(folder))
    assert result.exit_code == 0, result.output
    return folder


def passes(code: str, *arguments: object, **environment: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )  # fmt: skip
    assert run.stdout.endswith("passed\n"), run.stderr


@pytest.mark.parametrize("variant, backend", [("torch-cpu", "cpu"), ("torch-cuda", "cuda")])
def test_a_variant_has_its_metadata_and_no_absolute_imports(folder, variant, backend):
    variant = folder / "build" / variant
    metadata = json.loads((variant / "metadata.json").read_text())
    assert re.fullmatch(rf"fa_ops_{backend}_[0-9a-f]{{7}}", metadata["id"])
    assert metadata["backend"]["type"] == backend and metadata["python-depends"] == []
    files = metadata["digest"]["files"]
    found = {p.relative_to(variant).as_posix(): p for p in variant.rglob("*") if p.is_file()}
    assert files.keys() == found.keys() - {"metadata.json"}
    assert {"backends/hopper/cuda/forward.cu", "backends/triton/forward.py"} < files.keys()
    for name, digest in files.items():
        data = found[name].read_bytes()
        assert base64.b64encode(hashlib.sha256(data).digest()).decode() == digest
        if name.endswith(".py"):
            nodes = list(ast.walk(ast.parse(data)))
            imported = [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
            imported += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
            assert "fa_ops" not in {module.split(".")[0] for module in imported}, name
            assert not re.search(rb"torch\.ops\.fa\b|\bfa::", data), name


def test_two_kernels_and_the_package_work_in_one_process(folder):
    passes(COMPARE, folder / "build/torch-cpu", folder / "build/torch-cuda")


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs pip install kernels")
def test_kernels_and_transformers_load_it(folder):
    passes(WITH_KERNELS, folder, LOCAL_KERNELS=f"fa-ops/fa-ops={folder}")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["."], "not an empty folder"),
        (["file/new"], "cannot be written: Not a directory"),
        (["new", "--name", "Fa_Ops"], "got 'Fa_Ops'"),
    ],
)
def test_refusals(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    result = command(*arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2 and message in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "source, message",
    [
        (
            "import fa_ops.functions.attention",
            r"a/b.py:1: import fa_ops.functions.attention cannot be made relative",
        ),
        ("from fa_ops.bench import command", r"a/b.py:1: fa_ops.bench.command is left out"),
    ],
)
def test_imports_that_would_not_work_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        hub_kernel._relative("a/b.py", source, ["api.py", "a/b.py"])
