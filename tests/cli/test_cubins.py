"""`python -m fa_ops cubins`: the wheel of kernels that are compiled ahead of time."""

import zipfile

import pytest
from typer.testing import CliRunner

import fa_ops
from fa_ops.backends.hopper.runtime import cubin_cache, nvrtc
from fa_ops.cli import app, cubins


def test_the_wheel_has_every_kernel(tmp_path, monkeypatch):
    pytest.importorskip("hatchling")
    monkeypatch.setenv("FA_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: None)
    monkeypatch.setattr(nvrtc, "version", lambda lib: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_source", lambda program: (program.source.encode(), ""))
    options = "--head-dim", "64", "--dtype", "float16"
    result = CliRunner().invoke(
        app, ["cubins", str(tmp_path / "dist"), *options], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"fa_ops_cubins-{fa_ops.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
        (metadata,) = (n for n in files.namelist() if n.endswith("METADATA"))
        assert f"Requires-Dist: fa-ops=={fa_ops.__version__}" in files.read(metadata).decode()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(nvrtc, "compile_source", lambda program: pytest.fail("compiled"))
    monkeypatch.setenv("FA_OPS_CACHE_DIR", str(tmp_path / "empty"))
    cubin_cache.packaged_folder.cache_clear()
    try:
        for kind, entries, defines in cubins.variants([64], [cubins.DTYPES[1]]):
            found = nvrtc.cubins(kind, entries, defines)
            programs = [nvrtc.program(kind, entry, defines) for entry in entries]
            assert found == [program.source.encode() for program in programs]
    finally:
        cubin_cache.packaged_folder.cache_clear()


def test_a_head_dim_without_kernels_is_refused():
    result = CliRunner().invoke(app, ["cubins", "--head-dim", "60"])
    assert result.exit_code == 2 and "--head-dim must be a multiple of 8" in result.output
