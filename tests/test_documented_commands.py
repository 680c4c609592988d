"""Commands in the documentation and in the files of its figures exist, with their options."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from fa_ops.bench import sweep
from fa_ops.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
COMMAND = re.compile(r"(?:`|^\$ (?:\w+=\S+ )*)(python -m (?:fa_ops|tests\.)[^`]*?)(?:`|$)", re.M)


def documented() -> list[str]:
    """The commands of all pages and figures."""
    found = set()
    for page in PAGES:
        text = re.sub(r"`[^`\n]+\n[^`\n]+`", lambda m: m[0].replace("\n", " "), page.read_text())
        found |= {m[1].split("  #")[0].strip() for m in COMMAND.finditer(text)}
    for file in (ROOT / "docs/figures").glob("*.json"):
        found.add(json.loads(file.read_text())["environment"]["command"])
    return sorted(found)


def test_commands_are_found():
    assert len(documented()) > 60


@pytest.mark.parametrize("line", [x for x in documented() if x.startswith("python -m fa_ops")])
def test_command_of_the_package(line):
    words, command = shlex.split(line)[3:], typer.main.get_command(app)
    while words and hasattr(command, "list_commands"):
        assert words[0] in command.list_commands(None)
        command, words = command.get_command(None, words[0]), words[1:]
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
    assert not [word for word in words if word.startswith("-") and word not in known]


def test_all_grids_of_the_sweeps_are_documented():
    text = (ROOT / "docs/performance/method.md").read_text()
    assert not [name for name in sweep._GRIDS if f"`{name}`" not in text]


@pytest.mark.parametrize("line", [x for x in documented() if x.startswith("python -m tests.")])
def test_command_of_the_checkout(line):
    """Their parsers are of several kinds, so that an option is looked for in the source."""
    module, *words = shlex.split(line)[2:]
    path = ROOT.joinpath(*module.split("."))
    files = [*path.glob("*.py")] or [path.with_suffix(".py")]
    source = "\n".join(file.read_text() for file in files)
    assert '__name__ == "__main__"' in source
    options = [word[2:] for word in words if word.startswith("--")]
    missing = [x for x in options if f"--{x}" not in source and x.replace("-", "_") not in source]
    assert not missing
