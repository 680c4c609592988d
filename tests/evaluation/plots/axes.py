"""Panels of a drawing: curves over lengths on a linear or logarithmic axis, and rows of bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.evaluation.plots.svg import Drawing

LEFT, BOTTOM, TOP = 60, 44, 26  # margins of a panel for the labels of its axes and its title


@dataclass(frozen=True)
class Panel:
    """A rectangle of the drawing with a title and the names of both axes."""

    x: float
    y: float
    width: float
    height: float
    title: str
    across: str
    up: str


def short(number: float) -> str:
    """A number for a tick: 4096 is 4k, 65536 is 64k."""
    if number >= 1024 and number % 1024 == 0:
        return f"{number / 1024:g}k"
    return f"{number:g}"


def _ticks(low: float, top: float, logarithmic: bool) -> list[float]:
    """Round numbers: from 0 beyond the largest value, or around all values if logarithmic."""
    if not logarithmic:
        power = 10.0 ** math.floor(math.log10(top))
        step = next(s for s in (power / 5, power / 2, power, power * 2) if top / s <= 5)
        return [step * n for n in range(math.ceil(top / step) + 1)]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(top)) + 1)
    ticks = [factor * 10.0**n for n in powers for factor in (1, 2, 5)]
    first = max(n for n, tick in enumerate(ticks) if tick <= low)
    last = min(n for n, tick in enumerate(ticks) if tick >= top)
    around = ticks[first : last + 1]
    return around if len(around) <= 9 else [10.0**n for n in powers]


def curves(
    drawing: Drawing,
    panel: Panel,
    values: Mapping[str, Mapping[int, float]],
    series: Mapping[str, int],
    top: float | None = None,
    logarithmic: bool = False,
) -> None:
    """Draw values[name][length] of each name over the lengths, on a logarithmic axis.

    Args:
        series: the number of the series of each name.
        top: the largest value of the vertical axis; default: the largest of the values.
    """
    lengths = sorted({length for line in values.values() for length in line})
    numbers = [number for line in values.values() for number in line.values()]
    ticks = _ticks(min(numbers), top or max(numbers), logarithmic)
    x0, x1 = panel.x + LEFT, panel.x + panel.width - 10
    y0, y1 = panel.y + panel.height - BOTTOM, panel.y + TOP

    def across(length: int) -> float:
        share = math.log(length / lengths[0]) / max(math.log(lengths[-1] / lengths[0]), 1e-9)
        return x0 + 12 + (x1 - x0 - 30) * share

    def up(value: float) -> float:
        low, high = ticks[0], ticks[-1]
        if logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return y0 - (y0 - y1) * (value - low) / (high - low)

    drawing.text(panel.x + 4, panel.y + 12, panel.title, "panel")
    drawing.text(x1, panel.y + 12, panel.up, "faint", "end")
    for tick in ticks:
        drawing.rule(x0, x1, up(tick))
        drawing.text(x0 - 6, up(tick) + 5, f"{tick:,.10g}", "faint", "end")
    for length in lengths:
        drawing.text(across(length), y0 + 18, short(length), "faint", "middle")
    drawing.text((x0 + x1) / 2, y0 + 36, panel.across, "faint", "middle")
    for name in sorted(values, key=lambda name: -series[name]):  # fa_ops last, above the others
        points = [(across(n), up(v)) for n, v in sorted(values[name].items())]
        drawing.curve(points, series[name])


def legend(drawing: Drawing, x: float, y: float, series: Mapping[str, int]) -> None:
    """Write the names of the series in one line, each behind its marker."""
    for name, number in series.items():
        drawing.curve([(x, y), (x + 22, y)], number)
        drawing.text(x + 30, y + 5, name)
        x += 50 + 7.5 * len(name)


@dataclass(frozen=True)
class Comparison:
    """A row of bars: a label and an explanation, times or bytes without fa_ops and with it."""

    label: str
    without: str
    before: float
    after: float
    unit: str  # of the factor between them: "as fast", "less"


def bars(drawing: Drawing, x: float, y: float, width: float, rows: Sequence[Comparison]) -> float:
    """Draw a bar for each row: `after` as a part of `before`. Returns the y below the last row."""
    for row in rows:
        drawing.text(x, y + 12, row.label, "panel")
        factor = row.before / row.after
        words = f"{factor:.{2 if factor < 10 else 0}f}x {row.unit}"
        drawing.text(x + width, y + 12, words, "number", "end")
        drawing.text(x, y + 31, row.without, "faint")
        drawing.bar(x, y + 40, width, 16, "track")
        drawing.bar(x, y + 40, width * row.after / row.before, 16, "fill0")
        y += 76
    return y
