"""Hooks of MkDocs: files of the repository's root become pages, Sphinx's roles in docstrings links.

A page whose text is ``--8<-- "SECURITY.md"`` shows that file. ``:func:`name` `` is what editors and
other tools know. Where the reference documents the name, it links to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_FILE = re.compile(r'--8<-- "(\w+\.md)"\n')
_ROLE = re.compile(r":(?:func|class|meth|mod):<code>~?([\w.]+)</code>")
_ANCHOR = re.compile(r'<h\d id="([\w.]+)"')


def on_page_markdown(markdown: str, **_given) -> str:
    """The file that the page names, whose links then begin in the folder of pages."""
    match = _FILE.fullmatch(markdown)
    return (_ROOT / match[1]).read_text().replace("](docs/", "](") if match else markdown


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
