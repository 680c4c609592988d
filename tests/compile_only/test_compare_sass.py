"""Machine code of two checkouts, on the smallest kernels."""

import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("nvidia.cu13", reason="NVRTC (pip install nvidia-cuda-nvrtc) compiles kernels")
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.cli import cubins
from tests.compile_only import compare_sass, configurations

ROOT = Path(__file__).parents[2]


def run(*arguments):
    app = typer.Typer()
    app.command()(compare_sass.main)
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A checkout that has this one's fa_ops alone, and no list of configurations."""
    monkeypatch.setenv("FA_OPS_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(ROOT / "fa_ops", tmp_path / "other" / "fa_ops")
    return tmp_path / "other"


def test_code_changes_instructions_and_comments_do_not(other):
    source = other / "fa_ops/backends/hopper/cuda/mask.cu"
    changed = source.read_text().replace("__ballot_sync(", "1u + __ballot_sync(")  # of one kernel
    source.write_text("// a remark\n" + changed)
    result = run(ROOT, other, "--only", "mask words")
    assert result.exit_code == 1, result.output
    assert "mask words.pack_rows: " in result.stdout and "instructions ->" in result.stdout
    assert "2 programs: 1 have the same instructions, 1 others; 0 on one" in result.stdout


def test_names_are_unique_and_hold_what_is_warmed():
    listed = list(configurations.configurations())
    assert len({c.name for c in listed}) == len(listed)
    for kind, entries, defines in cubins.variants():
        same = [c for c in listed if (c.kind, c.defines) == (kind, defines)]
        assert same and set(entries) <= {*same[0].entries}, (kind, defines)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["/nowhere", ROOT], "/nowhere is no checkout"),
        ([ROOT, ROOT, "--only", "nothing"], "--only must name configurations, got 'nothing'"),
    ],
)
def test_errors_of_the_command(arguments, message, monkeypatch):
    monkeypatch.setattr(compare_sass, "compiled", lambda *_: {})
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output
