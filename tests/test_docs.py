"""Every Python example in the README and on the site runs, page by page, from top to bottom."""

import doctest
import re
from pathlib import Path

import pytest
import torch

import compile_passes
import fa_ops
from fa_ops import dispatch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# a comment before the fence excuses an example: it says what the example needs
FENCE = re.compile(r"(<!-- not run: .*? -->\n+)?```python\n(.*?)```", re.DOTALL)


def examples(page: Path) -> list[tuple[int, str]]:
    """(line, source) of the page's examples that run."""
    text = page.read_text()
    found = [(m.start(2), m.group(2)) for m in FENCE.finditer(text) if m.group(1) is None]
    return [(text.count("\n", 0, start), source) for start, source in found]


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda p: p.name)
def test_examples_run(page, request):
    request.addfinalizer(compile_passes.uninstall)  # some install the pass for good
    namespace = {"__name__": page.stem}
    for line, source in examples(page):
        padded = "\n" * line + source  # errors then point at the page's own lines
        exec(compile(padded, str(page), "exec"), namespace)


DOORS = ("attention", "attention_varlen", "attention_with_kv_cache", "use_backend")


@pytest.mark.parametrize("function", [*(getattr(fa_ops, name) for name in DOORS), dispatch.explain])
def test_examples_in_docstrings_say_what_happens(function, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "_available", {"hopper": "needs a CUDA device"})
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    known = {"torch": torch, "fa_ops": fa_ops, "dispatch": dispatch, "q": q, "k": k, "v": v}
    assert ">>>" in function.__doc__
    doctest.run_docstring_examples(function, known, optionflags=doctest.ELLIPSIS)
    assert capsys.readouterr().out == ""


def test_pages_of_the_site_exist_and_are_in_its_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", menu))
