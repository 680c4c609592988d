"""Figures are drawn from the checked-in results, which are those of the documentation's tables."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.evaluation.plots import axes
from tests.evaluation.plots.figures import FIGURES, Results
from tests.evaluation.plots.svg import DARK, DASHES, LIGHT, Drawing

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "figures"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", FIGURES)
def test_the_checked_in_figure_is_what_the_command_draws(name):
    drawn = str(FIGURES[name](Results(FOLDER)))
    refresh = "run `python -m tests.evaluation.plots`"
    assert (FOLDER / f"{name}.svg").read_text() == drawn, refresh


@pytest.mark.parametrize("name", FIGURES)
def test_words_and_curves_stay_within_the_figure(name):
    root = ElementTree.fromstring((FOLDER / f"{name}.svg").read_text())
    width, height = (float(root.get(side)) for side in ("width", "height"))
    assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
    for text in root.iter(f"{SVG}text"):
        size = 9.5 if text.get("class") == "title" else 8.0  # generous widths of a character
        extent, x = size * len(text.text), float(text.get("x"))
        start = x - extent * {None: 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        assert start > -2 and start + extent < width + 2, text.text
        assert 0 < float(text.get("y")) < height
    for path in root.iter(f"{SVG}path"):
        for x, y in re.findall(r"([\d.-]+),([\d.-]+)", path.get("d")):
            assert 0 <= float(x) <= width and 0 <= float(y) <= height


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_results_name_their_command_date_and_device(path):
    facts = json.loads(path.read_text())["environment"]
    assert facts["command"].startswith("python -m ") and facts["device"] and facts["torch"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])


def rows_of(page: str) -> dict[str, list[str]]:
    """Cells of each row of all tables, by the first cell; a table continues the one before."""
    rows = {}
    for line in (DOCS / page).read_text().splitlines():
        line = line.strip()  # tables that are folded are indented
        if line.startswith("|"):
            first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows.setdefault(first, []).extend(cells)
    return rows


def records_of(name: str, holds: str) -> list[dict]:
    """The measurements of a file that have a field; there are some."""
    records = [r for r in Results(FOLDER).records(name) if holds in r]
    assert records, f"{name}.json has no measurement with {holds}"
    return records


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_figures_agree_with_the_tables_of_sweeps(name):
    rows = rows_of(f"performance/{name}.md")
    records = Results(FOLDER).records(name)
    for r in records:
        row = rows[f"{r['D']} {'causal' if r['causal'] else 'full'} {r['S']}"]
        assert f"{r['ms']:.3f} / {r['tflops']:.0f}" in row
    assert len(records) > 100


def test_figures_agree_with_the_table_of_decoding():
    rows = rows_of("performance/decoding.md")
    for r in records_of("decode", "results"):
        cells = {cell.partition(" / ")[0] for cell in rows[f"{r['B']} x {r['S']}"]}
        found = {f"{us:.1f}" for us in r["results"].values()}
        assert found and found <= cells


def test_figures_agree_with_the_table_of_memory():
    rows = rows_of("performance/host.md")
    for r in records_of("memory", "mib"):
        assert f"{r['mib']:.1f}" in rows[str(r["S"])]


def test_figures_agree_with_the_table_of_fusion():
    text = (DOCS / "performance/models.md").read_text()
    for r in records_of("fusion", "ms"):
        assert f" {r['ms']:.1f} | {r['gib']:.2f} |" in text


def test_figures_agree_with_the_table_of_compiled_transformers():
    page = (DOCS / "performance/models.md").read_text()
    _, _, text = page.partition("| milliseconds, compiled |")
    cells = {float(number) for number in re.findall(r"(?<=\| )\d+\.\d+(?= \|)", text)}
    for field in ("ms", "ms_per_token"):
        for r in records_of("transformers", field):
            assert r[field] in cells


def test_ticks_are_round_and_enclose_the_values():
    assert axes._ticks(0.1, 803, False) == [0, 200, 400, 600, 800, 1000]
    assert axes._ticks(6.3, 139, True) == [5, 10, 20, 50, 100, 200]
    assert axes._ticks(3, 40000, True) == [1, 10, 100, 1000, 10000, 100000]


def test_every_series_has_colours_and_a_dash_pattern():
    assert len(LIGHT) == len(DARK) == 4 + len(DASHES)
    assert len(set(DASHES)) == len(DASHES) and len(set(LIGHT)) == len(LIGHT)


def test_words_are_escaped():
    drawing = Drawing(100, "a < b & c", "")
    drawing.text(0, 0, "<x>")
    assert ElementTree.fromstring(str(drawing)).find(f"{SVG}text").text == "<x>"
