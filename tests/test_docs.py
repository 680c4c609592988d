"""Every Python example in the README and on the site runs, page by page, from top to bottom."""

import re
from pathlib import Path

import pytest

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
def test_examples_run(page):
    namespace = {"__name__": page.stem}
    for line, source in examples(page):
        padded = "\n" * line + source  # errors then point at the page's own lines
        exec(compile(padded, str(page), "exec"), namespace)


def test_pages_of_the_site_exist_and_are_in_its_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", menu))
