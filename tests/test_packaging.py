"""The wheel is complete, and works without the checkout."""

import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import fa_ops

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fa_ops", "compile_passes", "hf_integration")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="building needs hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = builder.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


def tracked(package: str) -> set[str]:
    git = ["git", "-C", str(ROOT), "ls-files", package]
    listed = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    return {name for name in listed if (ROOT / name).exists()}


def metadata_file(wheel: zipfile.ZipFile, name: str) -> str:
    folder = f"fa_ops-{fa_ops.__version__}.dist-info"
    return wheel.read(f"{folder}/{name}").decode()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_contains_every_file_of_the_packages(wheel, package):
    assert f"{package}/py.typed" in wheel.namelist()
    assert tracked(package) <= set(wheel.namelist())


def test_the_wheel_contains_nothing_else(wheel):
    folders = {name.split("/")[0] for name in wheel.namelist()}
    assert folders == {*PACKAGES, f"fa_ops-{fa_ops.__version__}.dist-info"}


def test_the_source_distribution_contains_the_evaluations(tmp_path):
    builder = pytest.importorskip("hatchling.builders.sdist", reason="building needs hatchling")
    (path,) = builder.SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked("tests/evaluation") <= names


def test_metadata_of_the_wheel(wheel):
    core = metadata_file(wheel, "METADATA").splitlines()
    assert f"Version: {fa_ops.__version__}" in core
    assert "License-Expression: Apache-2.0" in core
    required = [line for line in core if line.startswith("Requires-Dist") and "extra" not in line]
    names = {line.split()[1].split(">")[0] for line in required}
    assert names == {"torch", "numpy"}
    commands = [line for line in core if line.endswith("extra == 'cli'")]
    assert {line.split()[1].split(">")[0] for line in commands} == {"typer", "rich"}
    assert "Apache License" in metadata_file(wheel, "licenses/LICENSE")


def test_entry_points_of_the_wheel_can_be_loaded(wheel):
    text = metadata_file(wheel, "entry_points.txt")
    groups = {"console_scripts": "fa-ops", "torch_dynamo_backends": "fa_ops"}
    for group, name in groups.items():
        target = text.split(f"[{group}]\n{name} = ")[1].splitlines()[0]
        assert callable(metadata.EntryPoint(name, target, group).load())


def test_the_wheel_runs_without_the_checkout(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    code = """
import torch, fa_ops, pathlib
assert pathlib.Path(fa_ops.__file__).is_relative_to(pathlib.Path.cwd() / "site"), fa_ops.__file__
q = torch.randn(1, 2, 8, 16)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
assert torch.allclose(fa_ops.attention(q, q, q, is_causal=True), expected, atol=1e-5)
assert "fa_ops" in torch._dynamo.list_backends()
print("fine")
"""
    run = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "fine", result.stderr
