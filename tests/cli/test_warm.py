"""`python -m fa_ops warm`: compiling ahead of time, which needs NVRTC but no GPU."""

import os

import pytest
import torch
from typer.testing import CliRunner

from fa_ops.backends.hopper import backward
from fa_ops.backends.hopper.configs import backward_config, forward_config
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import nvrtc as compiler
from fa_ops.cli import app, cubins


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["warm", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_OPS_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def nvrtc():
    try:
        return compiler.nvrtc()
    except compiler.CompileError as error:
        pytest.skip(str(error))


def compile_one(real):
    """A `compile_source` that compiles the first forward kernel; stand-ins are the code of all
    others, which `tests/compile_only` compiles."""
    compiled = []

    def compile_source(program, *extra):
        if "#define ENTRY_forward 1\n" not in program.source or compiled:
            return b"stand-in for " + program.source.encode(), ""
        compiled.append(program)
        return real(program, *extra)

    return compile_source


def test_calls_use_the_kernels_that_were_compiled(folder, nvrtc, monkeypatch):
    compile_source = compile_one(compiler.compile_source)
    monkeypatch.setattr(compiler, "compile_source", compile_source)
    result = invoke("--head-dim", "64", "--dtype", "float16")
    assert result.exit_code == 0
    assert f"52 kernels compiled, 0 were there: {folder}" in result.output
    assert len(list(folder.iterdir())) == 52
    monkeypatch.setattr(compiler, "compile_source", lambda *_: pytest.fail("compiled again"))
    config = forward_config(64, 64)
    full, window = (
        compiler.cubins("forward", ["forward"], macros(config, torch.float16, **options))[0]
        for options in ({}, {"window": True})
    )
    assert full.startswith(b"\x7fELF") and window
    assert (
        "0 kernels compiled, 52 were there"
        in invoke("--head-dim", "64", "--dtype", "float16").output
    )


def test_kernels_with_8_bit_products_are_compiled_on_request(folder, nvrtc, monkeypatch):
    def compile_source(program, *extra):
        return b"stand-in for " + program.source.encode(), ""

    monkeypatch.setattr(compiler, "compile_source", compile_source)
    result = invoke("--head-dim", "64", "--dtype", "float16", "--eight-bit")
    assert "86 kernels compiled" in result.output


def test_kernels_of_wide_heads_are_those_that_calls_launch():
    variants = list(cubins.variants([512], [torch.bfloat16]))
    kinds = [v.kind for v in variants if v.kind not in ("append", "mla")]
    assert kinds == ["forward_wide"] * 4 + ["backward"] * 6
    config, features = backward_config(512, 512), {"window": True, "split": True}
    defines = macros(config, torch.bfloat16, **features)
    entries = tuple(entry.name for entry in backward.entries_of(config, defines))
    assert cubins.Variant("backward", entries, defines) in variants
    assert not {v.kind for v in cubins.eight_bit_variants([512], [torch.bfloat16])} - {
        "append", "dequantize",
    }  # fmt: skip


def test_variants_are_distinct():
    variants = list(cubins.variants())
    assert len(variants) == 2 * (4 * (4 + 3 + 4 + 6) + 6 + 3 + 8 + 4)
    names = {(kind, *entries, *sorted(defines.items())) for kind, entries, defines in variants}
    assert len(names) == len(variants)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--head-dim", "65"], "--head-dim must be a multiple of 8 from 8 to 512, got 65"),
        (["--dtype", "float32"], "--dtype must be one of bfloat16, float16, got 'float32'"),
    ],
)
def test_invalid_options_are_refused(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in result.output


def test_missing_nvrtc_is_reported(folder, monkeypatch):
    monkeypatch.setenv("FA_OPS_NVRTC", os.devnull)
    compiler.nvrtc.cache_clear()
    try:
        result = invoke("--head-dim", "64")
        assert result.exit_code == 1 and "NVRTC 12.1 or newer was not found" in result.output
    finally:
        monkeypatch.undo()
        compiler.nvrtc.cache_clear()
