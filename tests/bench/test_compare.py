"""Versions of a backend side by side."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.gpu import compare

ROOT = Path(__file__).parents[2]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    compare.main()


def test_a_version_that_computes_something_else_is_seen(tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    shutil.copytree(ROOT / "fa_ops", other / "fa_ops")
    with (other / "fa_ops/backends/reference.py").open("a") as file:
        file.write("\n\nexact = forward\n\n\ndef forward(*args):\n")
        file.write("    out, lse = exact(*args)\n    return 1.25 * out, lse\n")
    options = ("--preset", "tiny", "--backend", "reference", "--budget", 1)
    run(monkeypatch, ROOT, ROOT, other, *options)
    *problems, same, changed = capsys.readouterr().out.splitlines()
    assert len(problems) == 2 and "geometric mean" in same and str(other) in changed
    for line in problems:
        assert "(0e+00)" in line and "(2e-01)" in line


@pytest.mark.parametrize("tree, backend", [("/nowhere", "cpu"), (ROOT, "nothing")])
def test_what_is_no_version_is_refused(tree, backend, monkeypatch):
    with pytest.raises(SystemExit, match=f"has fa_ops/backends/{backend}, got {tree}"):
        run(monkeypatch, tree, "--preset", "tiny", "--backend", backend)


def test_a_filter_that_finds_nothing_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, ROOT, "--preset", "tiny", "--only", "D64")
    assert "--only must name problems of tiny, got 'D64'" in capsys.readouterr().err
