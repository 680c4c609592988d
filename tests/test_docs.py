"""Every Python example in the README and the documentation runs, in the order of each page."""

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
# an example is skipped if a comment before its fence states what it needs
FENCE = re.compile(r"(<!-- not run: .*? -->\n+)?```python\n(.*?)```", re.DOTALL)


def examples(page: Path) -> list[tuple[int, str]]:
    """(line, source) of the examples on the page that can run."""
    text = page.read_text()
    matches = [(m.start(2), m.group(2)) for m in FENCE.finditer(text) if m.group(1) is None]
    return [(text.count("\n", 0, start), source) for start, source in matches]


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda p: p.name)
def test_examples_run(page, request):
    request.addfinalizer(compile_passes.uninstall)  # examples may install the pass
    namespace = {"__name__": page.stem}
    for line, source in examples(page):
        padded = "\n" * line + source  # so that errors have the line numbers of the page
        exec(compile(padded, str(page), "exec"), namespace)


FUNCTIONS = (
    fa_ops.attention, fa_ops.attention_varlen, fa_ops.attention_with_kv_cache, fa_ops.use_backend,
    fa_ops.quantized_attention, dispatch.explain,
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_examples_in_docstrings_print_what_they_show(function, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "_available", {"hopper": "needs a CUDA device"})
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    names = {"torch": torch, "fa_ops": fa_ops, "dispatch": dispatch, "q": q, "k": k, "v": v}
    assert ">>>" in function.__doc__
    doctest.run_docstring_examples(function, names, optionflags=doctest.ELLIPSIS)
    assert capsys.readouterr().out == ""


def test_every_page_is_in_the_navigation():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", menu))
