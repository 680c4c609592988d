"""Imports and first calls in a new process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    env = {name: value for name, value in os.environ.items() if name != "FA_OPS_CACHE_DIR"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_fa_ops_loads_no_heavy_modules():
    """Neither Triton, transformers nor DTensor are imported, and CUDA is not initialised."""
    code = """
import sys, torch
before = set(sys.modules)
import fa_ops
new = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = ("triton", "transformers", "numpy", "compile_passes", "hf_integration")
print(sorted(new & set(heavy)), "torch.distributed.tensor" in sys.modules)
assert not [name for name in set(sys.modules) - before if name.startswith("torch._inductor")]
print(torch.cuda.is_initialized())
backends = [name for name in sys.modules if name.startswith("fa_ops.backends")]
print(backends)
"""
    assert run(code).split("\n")[:3] == ["[] False", "False", "[]"]


def test_submodules_are_imported_where_they_are_first_used():
    """`import fa_ops` is enough for all of them, and `dir` shows names for users alone."""
    code = """
import sys, fa_ops
lazy = "fa_ops.distributed", "fa_ops.testing", "fa_ops.compat.sdpa", "fa_ops.compat.flash_attn"
print([name for name in lazy if name in sys.modules])
print(set(dir(fa_ops)) == {*fa_ops.__all__, "__version__", "distributed", "testing"})
fa_ops.distributed.context_parallel_attention, fa_ops.testing.make_case, fa_ops.compat.sdpa
fa_ops.compat.flash_attn.flash_attn_func, fa_ops.compat.ring_flash_attn.ring_flash_attn_func
print([name for name in dir(fa_ops.compat) if not hasattr(fa_ops.compat, name)])
for module in (fa_ops, fa_ops.compat):
    try:
        module.distributd
    except AttributeError as error:
        print(error)
"""
    assert run(code).splitlines() == [
        "[]", "True", "[]", "module 'fa_ops' has no attribute 'distributd'",
        "module 'fa_ops.compat' has no attribute 'distributd'",
    ]  # fmt: skip


@pytest.mark.parametrize("level, plans", [("fa_ops", 0), ("+fa_ops", 1)])
def test_torch_logs_shows_new_plans(level, plans, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", level)
    code = """
import sys, torch, fa_ops
sys.stderr = sys.stdout
torch._logging._init_logs()
q = torch.randn(1, 1, 2, 4)
for _ in range(3):
    fa_ops.attention(q, q, q, is_causal=True)
"""
    lines = run(code).splitlines()
    assert sum(line.endswith("new plan") for line in lines) == plans
    assert sum("causal, bottom right: query 0 attends key 0" in line for line in lines) == plans


BLOCKED = "import sys; sys.modules |= dict.fromkeys(('typer', 'rich', 'platformdirs'))\n"


@pytest.mark.parametrize("package", ["compile_passes", "hf_integration"])
def test_packages_work_without_the_dependencies_of_the_commands(package):
    code = f"""
import torch, fa_ops, {package}
from fa_ops.backends.hopper.runtime import nvrtc
q = torch.randn(1, 1, 2, 4)
print(tuple(fa_ops.attention(q, q, q).shape), nvrtc.cache_dir().name)
"""
    assert run(BLOCKED + code) == "(1, 1, 2, 4) fa_ops\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
@pytest.mark.parametrize("command", ["doctor", "bench --help"])
def test_commands_without_their_dependencies_say_how_to_install_them(missing, command):
    code = f"""
import runpy, sys
sys.modules["{missing}"] = None
sys.argv[1:] = "{command}".split()
runpy.run_module("fa_ops", run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and result.stdout == ""
    assert line.startswith("the commands of fa_ops need typer and rich (")
    assert missing in line and line.endswith("pip install 'typer>=0.19' rich")


def test_calls_on_the_cpu_import_neither_triton_nor_the_reference():
    code = """
import sys, torch, fa_ops
q = torch.randn(1, 1, 2, 4, requires_grad=True)
fa_ops.attention(q, q, q).sum().backward()
print("triton" in sys.modules, "fa_ops.backends.reference" in sys.modules)
"""
    assert run(code) == "False False\n"


def test_the_first_call_can_be_compiled():
    code = """
import torch, fa_ops

@torch.compile(fullgraph=True, backend="aot_eager")
def f(q, k, v):
    return fa_ops.attention(q, k, v, is_causal=True)

q = torch.randn(1, 2, 5, 8, requires_grad=True)
f(q, q, q).sum().backward()
print(q.grad.shape)
"""
    assert run(code) == "torch.Size([1, 2, 5, 8])\n"


def test_the_first_call_can_be_transformed():
    code = """
import torch, fa_ops
q = torch.randn(3, 1, 2, 5, 8)
grad = torch.func.grad(lambda q: fa_ops.attention(q, q, q).sum())
print(torch.vmap(grad)(q).shape)
"""
    assert run(code) == "torch.Size([3, 1, 2, 5, 8])\n"


def test_torch_without_the_private_autograd_function():
    """Without torch's private helpers, torch.func.grad raises and all else works."""
    code = """
import torch, torch._functorch.utils
del torch._functorch.utils.enable_single_level_autograd_function
import fa_ops
q = torch.randn(1, 2, 5, 8, requires_grad=True)
fa_ops.attention(q, q, q).sum().backward()
print(q.grad.shape)
try:
    torch.func.grad(lambda q: fa_ops.attention(q, q, q).sum())(q.detach())
except RuntimeError as error:
    print("raises")
"""
    assert run(code) == "torch.Size([1, 2, 5, 8])\nraises\n"


def test_rules_are_registered_when_the_module_of_torch_is_imported():
    code = """
import sys, torch, fa_ops
from torch.utils.flop_counter import FlopCounterMode, flop_registry
assert torch.ops.fa.attention in flop_registry
before = list(sys.meta_path)
assert "fa_ops.distributed.sharding" not in sys.modules
import torch.distributed.tensor
assert "fa_ops.distributed.sharding" in sys.modules
print(sum(finder not in sys.meta_path for finder in before))
"""
    assert run(code) == "1\n"


def test_find_spec_does_not_drop_the_registration_of_rules():
    code = """
import importlib.util, sys, torch, fa_ops
assert importlib.util.find_spec("torch.distributed.tensor") is not None
assert "fa_ops.distributed.sharding" not in sys.modules
import torch.distributed.tensor
print("fa_ops.distributed.sharding" in sys.modules)
"""
    assert run(code) == "True\n"


def test_modules_may_be_dropped_and_imported_again():
    """As by tools that reload code. Operators then run the new modules, and nothing is doubled."""
    code = """
import sys, torch
from torch._inductor import config
from torch.utils.flop_counter import FlopCounterMode
NAMES = "fa_ops", "compile_passes", "hf_integration"

def load():
    import fa_ops, compile_passes, hf_integration
    compile_passes.install(verify=True)
    return fa_ops, compile_passes, hf_integration

def state():
    dump = torch._C._dispatch_dump("fa::attention").split("catchall")[0]
    return dump.count("registered at"), len(sys.meta_path)

def flops():
    with FlopCounterMode(display=False) as counter:
        torch.ops.fa.attention(q, q, q)
    return counter.get_total_flops()

q = torch.randn(1, 2, 3, 8, requires_grad=True)
load()
operator, before = torch.ops.fa.attention.default, state()
first, counted = operator(q, q, q), flops()
for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
    del sys.modules[name]
fa_ops, compile_passes, hf_integration = load()
from fa_ops.call import checks
from fa_ops.plans import planning
from hf_integration import decoding, hooks, unsupported_models
from transformers import PreTrainedModel, masking_utils

print(before == state(), counted == flops() > 0)
print(operator is torch.ops.fa.attention.default, torch.equal(first, operator(q, q, q)))
torch.autograd.grad(operator(q, q, q).sum(), q)
fusion = config.pre_grad_custom_pass
print(type(fusion) is compile_passes.install.__globals__["FusionPass"], fusion.verify)
for owner, name, module in (
    (PreTrainedModel, "get_correct_attn_implementation", unsupported_models),
    (masking_utils, "_preprocess_mask_arguments", decoding),
):
    wrapper = getattr(owner, name)
    print(wrapper.__globals__ is vars(module), hasattr(wrapper.__wrapped__, "_fa_ops"))

def refuse(*args, **options):
    raise RuntimeError("the new modules run")

planning._prepared.clear()
planning.prepare = checks.dense = refuse
for device in ("cpu", "meta"):
    try:
        operator(*[q.detach().to(device)] * 3)
    except RuntimeError as error:
        print(error)
"""
    expected = ["True True"] * 3 + ["True False"] * 2 + ["the new modules run"] * 2
    assert run(code).splitlines() == expected
