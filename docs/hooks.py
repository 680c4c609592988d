"""Hooks of MkDocs: files of the repository's root become pages, Sphinx's roles in docstrings links,
and tutorials notebooks too.

A page whose text is ``--8<-- "SECURITY.md"`` shows that file. ``:func:`name` `` is what editors and
other tools know. Where the reference documents the name, it links to it. A notebook has the text
and the examples of its tutorial, and stands beside the page in the site.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_FILE = re.compile(r'--8<-- "(\w+\.md)"\n')
_ROLE = re.compile(r":(?:func|class|meth|mod):<code>~?([\w.]+)</code>")
_ANCHOR = re.compile(r'<h\d id="([\w.]+)"')


def on_page_markdown(markdown: str, page, **_given) -> str:
    """The file that the page names, or the page; a tutorial links to its notebook."""
    if match := _FILE.fullmatch(markdown):  # its links begin in the folder of pages then
        return (_ROOT / match[1]).read_text().replace("](docs/", "](")
    path = Path(page.file.src_uri)
    if path.parent.name != "tutorials":
        return markdown
    title, _, rest = markdown.partition("\n")
    link = f'<a href="../{path.stem}.ipynb" download>Download this page as a notebook</a>'
    return f"{title}\n\n{link}\n{rest}"


def on_env(env, files, **_given):
    """Resolve the roles of all pages, once every page has its anchors."""
    pages = [file.page for file in files.documentation_pages() if file.page]
    addresses = {}
    for page in pages:
        for anchor in _ANCHOR.findall(page.content):
            addresses.setdefault(anchor, page.url)
    for page in pages:
        depth = page.url.count("/")
        page.content = resolved(page.content, page.url, addresses, "../" * depth)
    return env


def on_post_build(config, **_given) -> None:
    """Write the notebooks of the tutorials into the site."""
    for path in sorted(Path(config.docs_dir, "tutorials").glob("*.md")):
        cells = notebook(path.read_text(), config.site_url or "")
        target = Path(config.site_dir, "tutorials", f"{path.stem}.ipynb")
        target.write_text(json.dumps(cells, indent=1) + "\n")


def notebook(markdown: str, address: str) -> dict:
    """A notebook with the text and the examples of a page; its links lead to the site."""

    def link(match: re.Match) -> str:
        path, suffix, anchor = match.groups()
        return f"]({address}{path}{'/' if suffix == '.md' else suffix}{anchor})"

    cells = []
    # examples stand between text: every other part is one
    for n, part in enumerate(re.split(r"(?ms)^```python\n(.*?)^```\n", markdown)):
        text = part if n % 2 else re.sub(r"\]\(\.\./([\w/]+)(\.\w+)([^)]*)\)", link, part)
        if not text.strip():
            continue
        cell = {"id": f"cell-{n}", "metadata": {}, "source": text.strip()}
        code = {"cell_type": "code", "execution_count": None, "outputs": []}
        cells.append(cell | (code if n % 2 else {"cell_type": "markdown"}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def resolved(html: str, url: str, addresses: dict[str, str], root: str) -> str:
    """The page with a link, or the name alone, in place of each role."""

    def link(match: re.Match) -> str:
        shown = f"<code>{match[1]}</code>"
        here = (name for name, page in addresses.items() if page == url)
        for names in (here, addresses):
            found = ending(names, match[1])
            if len(found) == 1:
                page = addresses[found[0]]
                return f'<a href="{"" if page == url else root + page}#{found[0]}">{shown}</a>'
        return shown

    return _ROLE.sub(link, html)


def ending(names: Iterable[str], name: str) -> list[str]:
    """The full names that a role may mean."""
    return [x for x in names if x == name or x.endswith(f".{name}")]
