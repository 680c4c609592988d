"""`tests.gpu.compare`: two checkouts in one process."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.gpu import compare

ROOT = Path(__file__).parents[2]
QUICK = ("--preset", "tiny", "--budget", "1", "--bursts", "10")


@pytest.fixture(autouse=True)
def kernel_cache(monkeypatch, tmp_path):
    """Set the cache, as the command would otherwise set one for the whole process."""
    monkeypatch.setenv("FA_OPS_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments):
    app = typer.Typer()
    app.command()(compare.main)
    return CliRunner().invoke(app, [*map(str, arguments), *QUICK], env={"COLUMNS": "200"})


@pytest.fixture
def changed(tmp_path):
    """A checkout with wrong results."""
    tree = tmp_path / "changed"
    shutil.copytree(ROOT / "fa_ops", tree / "fa_ops")
    with (tree / "fa_ops/__init__.py").open("a") as file:
        file.write("\n_exact = attention\n\n\ndef attention(*args, **options):\n")
        file.write("    return 1.5 * _exact(*args, **options)\n")
    return tree


def test_differences_between_results_are_printed(changed):
    result = run(ROOT, ROOT, changed, "--groups", "forward")
    *problems, same, other = result.stdout.splitlines()
    assert len(problems) == 2 and "geometric mean" in same and str(changed) in other
    for line in problems:
        assert line.count("(0e+00)") == 2 and "(5e-01)" in line


def test_every_group_runs_by_public_functions(tmp_path):
    file = tmp_path / "rows.json"
    result = run(ROOT, ROOT, "--json", file)
    assert result.exit_code == 0, result.output
    rows = [compare.Compared(*row) for row in json.loads(file.read_text())]
    assert {row.group for row in rows} == {*compare.ALL}
    assert all(len(row.ms) == 2 and min(row.ms) > 0 and row.differences == [0, 0] for row in rows)
    assert all((row.sdpa_ms is not None) == (row.group == "host") for row in rows)
    assert result.stdout.count("geometric mean") == len(compare.ALL)


def test_processes_rotate_the_order_of_the_checkouts(changed, tmp_path):
    file = tmp_path / "rows.json"
    options = ("--groups", "forward", "--only", "causal", "--processes", 2, "--json", file)
    assert run(ROOT, changed, *options).exit_code == 0
    (row,) = json.loads(file.read_text())
    assert row[3][0] == 0 and 0.4 < row[3][1] < 0.6


def test_skipped_problems_are_printed_with_the_reason():
    result = run(ROOT, "--groups", "forward", "--backend", "hopper")
    assert "skipped:" in result.stdout and "geometric" not in result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["/nowhere"], "/nowhere is no checkout"),
        ([ROOT, "--groups", "forward", "--backend", "nothing"], "got 'nothing'"),
        ([ROOT, "--only", "D64", "--groups", "forward"], "--only must name problems of tiny"),
        ([ROOT, "--groups", "sideways"], "--groups must be one of forward"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output
