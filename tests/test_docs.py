"""Every Python example in the README and the documentation runs, in the order of each page."""

import doctest
import importlib.util
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import compile_passes
import fa_ops
from fa_ops.plans import dispatch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# an example is skipped if a comment before its fence states what it needs
FENCE = re.compile(r"(<!-- not run: .*? -->\n+)?```python\n(.*?)```", re.DOTALL)


def name_of(page: Path) -> str:
    """The page as the tests name it."""
    return str(page.relative_to(ROOT))


def examples(page: Path) -> list[tuple[int, str]]:
    """(line, source) of the examples on the page that can run."""
    text = page.read_text()
    matches = [(m.start(2), m.group(2)) for m in FENCE.finditer(text) if m.group(1) is None]
    return [(text.count("\n", 0, start), source) for start, source in matches]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A folder with the model that examples load by the name "./my-llama"."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    config = transformers.LlamaConfig(**sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "my-llama")
    return folder


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=name_of)
def test_examples_run(page, request, monkeypatch):
    request.addfinalizer(compile_passes.uninstall)  # examples may install the pass
    if "./my-llama" in page.read_text():
        monkeypatch.chdir(request.getfixturevalue("model_folder"))
    module = types.ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dynamo imports it by its name
    for line, source in examples(page):
        padded = "\n" * line + source  # so that errors have the line numbers of the page
        exec(compile(padded, str(page), "exec"), vars(module))


@pytest.mark.parametrize("page", [p for p in PAGES if FENCE.search(p.read_text())], ids=name_of)
def test_linters_keep_the_imports_of_examples(page):
    """A linter deletes an import whose name is not used: examples call what they import."""
    source = "\n".join(source for _, source in FENCE.findall(page.read_text()))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F401", "-"]
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed: pip install 'fa-ops[dev]'")
    result = subprocess.run(command, input=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


FUNCTIONS = (
    fa_ops.attention, fa_ops.attention_varlen, fa_ops.attention_with_kv_cache, fa_ops.use_backend,
    fa_ops.set_backend, fa_ops.quantized_attention, fa_ops.explain,
    fa_ops.attention_selected, fa_ops.attention_selected_tokens, fa_ops.select_tokens,
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_examples_in_docstrings_print_what_they_show(function, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "_available", {"hopper": "needs a CUDA device"})
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    names = {"torch": torch, "fa_ops": fa_ops, "q": q, "k": k, "v": v}
    assert ">>>" in function.__doc__
    doctest.run_docstring_examples(function, names, optionflags=doctest.ELLIPSIS)
    assert capsys.readouterr().out == ""


def test_every_page_is_in_the_navigation():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", menu))


def test_messages_on_troubleshooting_are_those_of_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^\| (?:\w+: )?`([^`]+)` \|", page, re.M)
    assert len(messages) > 15
    code = ""
    for package in ("fa_ops", "hf_integration"):
        for path in sorted((ROOT / package).rglob("*.py")):
            code += path.read_text()
    code = re.sub(r'"\s*f?"', "", code)  # a literal may continue on the next line
    code = code.replace("{oldest}", "12.1")
    missing = [message for message in messages if message not in code]
    assert not missing


def test_pictures_exist_and_have_words():
    for page in PAGES:
        for words, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text()):
            badge = target.startswith("https://img.shields.io/badge/")
            found = badge or (page.parent / target).is_file()
            assert words and found, f"{page.name}: {target}"


def test_links_lead_to_files_and_headings():
    """`make docs` checks those within the site, but not those of the README and other files."""
    outside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    links = [
        (page, *target.partition("#")[::2])
        for page in [*outside, *PAGES[1:]]
        for target in re.findall(r"(?<!!)\[[^]]+\]\(([^)\s]+)\)", page.read_text())
        if "://" not in target
    ]
    assert len(links) > 70
    wrong = [
        f"{page.name}: {file}#{heading}"
        for page, file, heading in links
        if not (page.parent / file).exists()
        or heading
        and heading not in headings(page.parent / file if file else page)
    ]
    assert not wrong


def headings(page: Path) -> set[str]:
    """The names by which links reach the headings of a page."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    plain = (re.sub(r"[^\w\s-]", "", text).strip().lower() for text in found)
    return {re.sub(r"[-\s]+", "-", text) for text in plain}


def test_roles_in_docstrings_become_links():
    resolved = runpy.run_path(str(ROOT / "docs/hooks.py"))["resolved"]
    addresses = {"a.b": "r/a/", "a.c.b": "r/a/", "a.c.d": "r/a/", "x.d": "r/x/", "x.e": "r/x/"}
    roles = {name: f":func:<code>{name}</code>" for name in ("~a.c.d", "d", "b", "e")}
    links = {name: resolved(role, "r/a/", addresses, "../../") for name, role in roles.items()}
    assert links == {
        "~a.c.d": '<a href="#a.c.d"><code>a.c.d</code></a>',
        "d": '<a href="#a.c.d"><code>d</code></a>',  # of this page, not of the other one
        "b": "<code>b</code>",  # of two functions
        "e": '<a href="../../r/x/#x.e"><code>e</code></a>',
    }


def test_files_of_the_root_become_pages():
    shown = runpy.run_path(str(ROOT / "docs/hooks.py"))["on_page_markdown"]
    text = shown('--8<-- "SECURITY.md"\n', page=None)
    assert "# Security" in text and "](support.md)" in text and "](docs/" not in text
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="backends.md"))
    assert shown("text\n", page=page) == "text\n"


def test_notebooks_have_the_examples_of_their_page():
    hooks = runpy.run_path(str(ROOT / "docs/hooks.py"))
    for page in sorted((ROOT / "docs/tutorials").glob("*.md")):
        cells = hooks["notebook"](page.read_text(), "https://site.example/")["cells"]
        code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        assert code == [source.strip() for _, source in examples(page)]
        text = "".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
        assert "](../" not in text and ".md" not in text


def test_docstrings_have_the_sections_that_the_site_knows():
    """`Example:` would be a quote in it, and a directive of Sphinx text."""
    for package in ("fa_ops", "compile_passes", "hf_integration"):
        for path in (ROOT / package).rglob("*.py"):
            unknown = re.findall(r"^ *(?:Example:|\.\. \w+::)", path.read_text(), re.M)
            assert not unknown, path
