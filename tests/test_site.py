"""The site is built: links lead to files and anchors, pages are short and fit a phone.

Heights are those of a browser, where Chromium is installed. Without one they are estimated from the
text, and nothing is known of widths.
"""

import functools
import http.server
import importlib
import json
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs", reason="`make docs` installs what builds the site")

ROOT = Path(__file__).resolve().parents[1]
WIDTH, SCREEN, PHONE = 1440, 900, 390  # pixels
MAX_SCREENS = 20
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)
    return folder


VOID = ("img", "link", "meta", "br", "input", "hr", "source")  # tags that are never closed


TUTORIALS = sorted(path.stem for path in (ROOT / "docs/tutorials").glob("*.md"))


@pytest.mark.parametrize("name", TUTORIALS)
def test_notebooks_run(name, site, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(site / f"tutorials/{name}.ipynb", as_version=4)
    nbformat.validate(book)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(book, timeout=None, kernel_name="python3").execute()
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code")


class Content(HTMLParser):
    """The anchors and links of a page, and the blocks of its article that are not folded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.blocks: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)

    def is_shown(self) -> bool:
        """Whether what follows is a part of the article, and not folded."""
        return "article" in self._open and "folded" not in self._open

    def handle_starttag(self, tag: str, attributes: list) -> None:
        """Note anchors and links; remember what is open."""
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]
        if tag not in VOID:
            self._open.append("folded" if tag == "details" and "open" not in given else tag)
        within = tag == "p" and "li" in self._open  # a paragraph is a part of its list item
        if self.is_shown() and tag in LINE and not within:
            self.blocks.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        """Close the tag, and what was left open in it."""
        name = "folded" if tag == "details" and "folded" in self._open else tag
        while name in self._open and self._open.pop() != name:
            pass

    def handle_data(self, text: str) -> None:
        """Add text to the last block."""
        if self.is_shown() and self.blocks:
            tag, before = self.blocks[-1]
            self.blocks[-1] = tag, before + text


# An estimate of the pixels of a block: (characters of a line, its height, what is around it).
LINE = {
    "p": (105, 26, 16),
    "li": (100, 26, 4),
    "td": (30, 19, 0),
    "tr": (1, 0, 21),
    "pre": (0, 19, 36),
    "img": (1, 0, 600),
    "h1": (60, 40, 50),
    "h2": (70, 40, 60),
    "h3": (80, 30, 40),
}


def estimated_screens(content: Content) -> float:
    total, row = 300.0, 0.0  # the header and the footer
    for tag, text in content.blocks:
        characters, height, around = LINE[tag]
        lines = text.count("\n") if tag == "pre" else -(-len(" ".join(text.split())) // characters)
        if tag == "td":  # the highest cell of a row counts
            row = max(row, lines * height)
            continue
        total += row + around + lines * height
        row = 0.0
    return (total + row) / SCREEN


def pages(site: Path) -> dict[str, Content]:
    """Each page, by its address in the site."""
    found = sorted(site.rglob("*.html"))
    return {str(p.relative_to(site)): Content(p.read_text()) for p in found if p.stem != "404"}


def broken_links(site: Path, contents: dict[str, Content]) -> list[str]:
    """Links within the site that lead to no file, or to no anchor of it."""
    broken = []
    for page, content in contents.items():
        for link in content.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (site / page).parent / unquote(parts.path) if parts.path else site / page
            target = (target / "index.html" if target.is_dir() else target).resolve()
            if not target.is_file():
                broken.append(f"{page}: {link}")
            elif parts.fragment and target.suffix == ".html":
                anchors = contents[str(target.relative_to(site.resolve()))].anchors
                broken += [f"{page}: {link}"] if unquote(parts.fragment) not in anchors else []
    return broken


def test_links_of_the_site_lead_to_files_and_anchors(site):
    contents = pages(site)
    assert len(contents) > 40
    assert not broken_links(site, contents)


@pytest.mark.parametrize(
    "name", ["fa_ops", "fa_ops.distributed", "fa_ops.testing", "compile_passes", "hf_integration"]
)
def test_the_reference_shows_every_public_function_and_class(name, site):
    """A function with the name of a module is easily taken for the module, and left out."""
    module = importlib.import_module(name)
    public = [x for x in dir(module) if not x.startswith("_")]
    public = [x for x in getattr(module, "__all__", public) if callable(getattr(module, x))]
    pages_of = {"fa_ops": ("fa_ops", "flex", "selected")}.get(name, (name.rpartition(".")[2],))
    files = [site / f"reference/{page}/index.html" for page in pages_of]
    anchors = {anchor for file in files for anchor in Content(file.read_text()).anchors}
    shown = {anchor.rpartition(".")[2] for anchor in anchors if anchor.startswith(name)}
    assert public and not set(public) - shown


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a").mkdir()
    links = '<a href="a/#y"><a href="b/"><a href="#x">'
    (tmp_path / "index.html").write_text(f'<h2 id="x"></h2>{links}')
    (tmp_path / "a/index.html").write_text('<a href="../#z"><img src="c.svg">')
    wrong = ["a/index.html: ../#z", "a/index.html: c.svg", "index.html: a/#y", "index.html: b/"]
    assert broken_links(tmp_path, pages(tmp_path)) == wrong


# Loads each page in a frame of each width, without scripts, and writes what it measures.
MEASURE = """<!doctype html>
<iframe id="f" sandbox="allow-same-origin" style="border:0;height:900px"></iframe><pre id="o"></pre>
<script>
const pages = PAGES, widths = WIDTHS, found = {}, frame = document.getElementById("f");
const scrolls = e => ["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX);
function wide(body, width) {
  const beyond = [];
  for (const e of body.querySelectorAll(".md-content *")) {
    const box = e.getBoundingClientRect();
    if (!box.width || box.right <= width + 1) continue;
    let parent = e.parentElement;
    while (parent && !scrolls(parent)) parent = parent.parentElement;
    if (!parent) beyond.push(e.tagName + ": " + e.textContent.slice(0, 40));
  }
  return beyond;
}
function unnamed(body) {  // scrolled tables whose first column is out of sight, or too wide
  const found = [];
  for (const table of body.querySelectorAll(".md-content table")) {
    const cell = table.querySelector("td");
    table.scrollLeft = table.scrollWidth;
    const box = cell.getBoundingClientRect();
    if (!table.scrollLeft) continue;
    if (box.left < table.getBoundingClientRect().left - 1 || box.width > 0.5 * table.clientWidth)
      found.push(cell.textContent.slice(0, 40));
  }
  return found;
}
(async () => {
  for (const page of pages) for (const width of widths) {
    frame.style.width = width + "px";
    await new Promise(done => { frame.onload = done; frame.src = page + "?" + width; });
    const root = frame.contentDocument.documentElement;
    (found[page] ??= {})[width] = {
      height: root.scrollHeight, width: root.scrollWidth, beyond: wide(root, width),
      unnamed: unnamed(root)
    };
  }
  document.getElementById("o").textContent = JSON.stringify(found);
})();
</script>"""


class Silent(http.server.SimpleHTTPRequestHandler):
    """A server of files that logs nothing."""

    def log_message(self, *_given) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def measured(site) -> dict:
    """What the browser measures of each page, at the widths of a screen and a phone."""
    if not BROWSER:
        pytest.skip("needs Chromium")
    script = MEASURE.replace("PAGES", json.dumps([*pages(site)]))
    (site / "measure.html").write_text(script.replace("WIDTHS", json.dumps([WIDTH, PHONE])))
    handler = functools.partial(Silent, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--virtual-time-budget=600000",
        ]
        address = f"http://127.0.0.1:{server.server_port}/measure.html"
        command = [BROWSER, *options, "--dump-dom", address]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
        except subprocess.TimeoutExpired:
            pytest.skip("the browser did not answer, on a busy machine; the estimates are tested")
        finally:
            server.shutdown()
    (site / "measure.html").unlink()
    text = re.search(r'<pre id="o">(.*?)</pre>', run.stdout, re.S)
    assert text and text[1], run.stdout[-500:] + run.stderr[-500:]
    return json.loads(text[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


def test_pages_are_short(site, measured):
    screens = {page: at[str(WIDTH)]["height"] / SCREEN for page, at in measured.items()}
    assert len(screens) > 40
    assert not {page: n for page, n in screens.items() if n > MAX_SCREENS}


def test_nothing_is_wider_than_a_phone(measured):
    wide = {page: at[str(PHONE)] for page, at in measured.items()}
    assert not {page: x["width"] for page, x in wide.items() if x["width"] > PHONE}
    assert not {page: x["beyond"] for page, x in wide.items() if x["beyond"]}


def test_the_first_column_of_a_scrolled_table_stays_on_a_phone(measured):
    found = {page: at[str(PHONE)]["unnamed"] for page, at in measured.items()}
    assert not {page: tables for page, tables in found.items() if tables}


def test_pages_are_short_by_an_estimate(site):
    """Where there is no browser; see `LINE`. Estimates are compared with a browser's below."""
    screens = {page: estimated_screens(content) for page, content in pages(site).items()}
    assert not {page: n for page, n in screens.items() if n > MAX_SCREENS}


def test_estimates_are_close_to_what_the_browser_measures(site, measured):
    for page, content in pages(site).items():
        ratio = estimated_screens(content) * SCREEN / measured[page][str(WIDTH)]["height"]
        assert 0.7 < ratio < 1.6, f"{page}: {ratio:.2f}"


def words(page: str) -> int:
    return len((ROOT / page).read_text().split())


@pytest.mark.parametrize(
    "page, most", [("README.md", 600), ("docs/index.md", 500), ("docs/performance/index.md", 1200)]
)
def test_first_pages_are_short(page, most):
    assert words(page) <= most
