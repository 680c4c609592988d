"""A hook of MkDocs: Sphinx's roles in docstrings become links.

``:func:`name` `` is what editors and other tools know. Where the page documents the name, it links
to it.
"""

from __future__ import annotations

import re

_ROLE = re.compile(r":(?:func|class|meth|mod):<code>~?([\w.]+)</code>")


def on_page_content(html: str, **_given) -> str:
    """The page with a link, or the name alone, in place of each role."""
    anchors = re.findall(r'<h\d id="([\w.]+)"', html)

    def replaced(match: re.Match) -> str:
        name = match[1]
        found = [x for x in anchors if x == name or x.endswith(f".{name}")]
        shown = f"<code>{name}</code>"
        return f'<a href="#{found[0]}">{shown}</a>' if len(found) == 1 else shown

    return _ROLE.sub(replaced, html)
