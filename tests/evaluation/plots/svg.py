"""An SVG drawing: elements whose colours follow the light or dark mode of the reader.

Coordinates are pixels from the top left corner. Series are numbered from 0, which is fa_ops; each
has a colour, a dash pattern and a marker of its own, so that no figure depends on colours alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

Point = tuple[float, float]

# Colours of background, text, faint text, grid, and of each series.
LIGHT = ("#ffffff", "#1e293b", "#5b6679", "#e2e8f0")
LIGHT += ("#4338ca", "#b45309", "#0f766e", "#be185d", "#64748b")
DARK = ("#1b1f2b", "#e8ecf4", "#a3adbf", "#384153")
DARK += ("#a5b4fc", "#fbbf24", "#5eead4", "#f9a8d4", "#94a3b8")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


def _rules(colours: Sequence[str]) -> str:
    background, text, faint, grid, *series = colours
    rules = [
        f".background {{ fill: {background} }}",
        f"text {{ fill: {text} }}",
        f".faint {{ fill: {faint} }}",
        f".grid {{ stroke: {grid} }}",
        f".track {{ fill: {grid} }}",
        f"text.inverse {{ fill: {background}; font-weight: 600 }}",
    ]
    for n, colour in enumerate(series):
        rules += [f".line{n} {{ stroke: {colour} }}", f".fill{n} {{ fill: {colour} }}"]
    return "\n".join(rules)


STYLE = f"""text {{ font-family: {FONT}; font-size: 14px }}
.title {{ font-size: 17px; font-weight: 600 }}
.panel {{ font-weight: 600 }}
.number {{ font-weight: 700 }}
path {{ fill: none; stroke-width: 2; stroke-linejoin: round }}
.line0 {{ stroke-width: 3 }}
{_rules(LIGHT)}
@media (prefers-color-scheme: dark) {{
{_rules(DARK)}
}}"""


class Drawing:
    """A drawing of a fixed width, whose height follows from what is drawn."""

    def __init__(self, width: float, title: str, description: str) -> None:
        self.width, self.height = width, 0.0
        self.title, self.description = title, description
        self._elements: list[str] = []

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        """Write words from (or, by the anchor, around or up to) x, on the baseline y."""
        attributes = f' class="{style}"' if style else ""
        attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._add(f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>', y + 8)

    def rule(self, x0: float, x1: float, y: float) -> None:
        """Draw a horizontal grid line."""
        self._add(f'<line class="grid" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>', y)

    def bar(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """Draw a bar with rounded corners from its top left corner."""
        size = f'width="{width:.1f}" height="{height:.1f}"'
        self._add(f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" {size} rx="3"/>', y + height)

    def curve(self, points: Sequence[Point], series: int) -> None:
        """Draw lines between points, and the marker of the series on each."""
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = f' stroke-dasharray="{DASHES[series]}"' if DASHES[series] else ""
        self._add(f'<path class="line{series}" d="M{steps}"{dash}/>')
        for x, y in points:
            self.marker(x, y, series)

    def marker(self, x: float, y: float, series: int) -> None:
        """Draw the marker of a series: a circle, square, triangle, diamond or small circle."""
        style = f'class="fill{series}"'
        corners = {
            1: ((-4, -4), (4, -4), (4, 4), (-4, 4)),
            2: ((0, -5), (4.6, 3.6), (-4.6, 3.6)),
            3: ((0, -5.4), (5.4, 0), (0, 5.4), (-5.4, 0)),
        }.get(series)
        if corners is None:
            radius = 4.5 if series == 0 else 3.5
            self._add(f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')
        else:
            points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
            self._add(f'<polygon {style} points="{points}"/>')

    def _add(self, element: str, bottom: float = 0.0) -> None:
        self._elements.append(element)
        self.height = max(self.height, bottom)

    def __str__(self) -> str:
        width, height = round(self.width), round(self.height + 10)
        names = f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        head += f' width="{width}" height="{height}" role="img">'
        card = f'<rect class="background" width="{width}" height="{height}" rx="8"/>'
        style = f"<style>\n{STYLE}\n</style>"
        return "\n".join([head, names, style, card, *self._elements, "</svg>", ""])
