"""Files that a code host and its tools read agree with the Makefile, .ci/run and the packages."""

import re
import subprocess
import sys
from email import message_from_string
from pathlib import Path

import pytest

import fa_ops

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = "https://code.example/owner/fa-ops"


def loaded(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_workflow_runs_the_steps_of_continuous_integration():
    steps = loaded(".github/workflows/ci.yml")["jobs"]["test"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands == re.findall(r"^step (.*)$", (ROOT / ".ci/run").read_text(), re.M)
    later = [step for step in steps if "run" in step][1:]
    assert all(step["if"] == "always()" for step in later)  # as in .ci/run, every step runs


def test_the_workflow_publishes_the_site_of_a_tag_alone():
    jobs = loaded(".github/workflows/ci.yml")["jobs"]
    (upload,) = (x for x in jobs["test"]["steps"] if "upload-pages" in x.get("uses", ""))
    for publishing in (upload, jobs["publish"]):
        assert publishing["if"] == "startsWith(github.ref, 'refs/tags/')"
    assert upload["with"]["path"] == "site"


def test_variables_of_the_workflow_are_read():
    variables = loaded(".github/workflows/ci.yml")["env"]
    build = (ROOT / "hatch_build.py").read_text() + (ROOT / "mkdocs.yml").read_text()
    assert variables.keys() - {"HF_HUB_OFFLINE"} == {*re.findall(r"\b[A-Z]+_UR[LI]\b", build)}


def test_commits_are_checked_by_the_ruff_of_the_project():
    hooks = loaded(".pre-commit-config.yaml")["repos"][0]["hooks"]
    (ruff,) = (x for x in PROJECT["project"]["optional-dependencies"]["dev"] if "ruff" in x)
    assert [hook["additional_dependencies"] for hook in hooks] == [[ruff]] * 2
    makefile = (ROOT / "Makefile").read_text()
    for hook in hooks:
        words = hook["entry"].split()
        assert f"{words[0]} {words[1]}" in makefile
        command = [sys.executable, "-m", *words[:2], "--help"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert all(word in text for word in words[2:])


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_are_complete(name):
    form = loaded(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form["name"] and form["description"]
    assert len({part["id"] for part in form["body"]}) == len(form["body"])
    for part in form["body"]:
        assert part["type"] in ("textarea", "dropdown") and part["attributes"]["label"]


def test_the_form_for_errors_asks_for_doctor():
    first = loaded(".github/ISSUE_TEMPLATE/bug.yml")["body"][0]
    assert "python -m fa_ops doctor" in first["attributes"]["label"]
    assert first["validations"]["required"]


def test_the_citation_is_that_of_this_version():
    citation = loaded("CITATION.cff")
    assert citation["version"] == fa_ops.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["authors"] == PROJECT["project"]["authors"]


def test_versions_of_python_are_those_of_the_classifiers():
    project = PROJECT["project"]
    minors = re.findall(r"Python :: 3\.(\d+)", "\n".join(project["classifiers"]))
    assert project["requires-python"] == f">=3.{minors[0]}"
    words = f"3.{minors[0]} to 3.{minors[-1]}"
    for page in ("README.md", "docs/index.md", "docs/install.md", "docs/support.md"):
        assert words in (ROOT / page).read_text(), page


@pytest.fixture
def description(monkeypatch):
    """The metadata of a build, with or without the address of the repository."""
    pytest.importorskip("hatchling")
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.metadata.spec import get_core_metadata_constructors
    from hatchling.plugin.manager import PluginManager

    def build(**variables: str):
        for name in ("REPO_URL", "SITE_URL"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        metadata = ProjectMetadata(str(ROOT), PluginManager())
        return message_from_string(get_core_metadata_constructors()["2.4"](metadata))

    return build


def test_a_build_with_an_address_has_absolute_links(description):
    built = description(REPO_URL=REPOSITORY, SITE_URL="https://site.example/")
    urls = dict(x.split(", ") for x in built.get_all("Project-URL"))
    assert urls["Homepage"] == REPOSITORY and urls["Documentation"] == "https://site.example/"
    targets = re.findall(r"\]\(([^)\s]+)\)", built.get_payload())
    assert len(targets) > 15
    assert not [x for x in targets if not x.startswith(("https://", "#"))]
    assert f"{REPOSITORY}/raw/main/docs/figures/overview.svg" in targets
    for target in targets:
        kind, _, path = target.removeprefix(f"{REPOSITORY}/").partition("/main/")
        assert kind not in ("raw", "blob") or (ROOT / path).is_file(), target


def test_a_build_without_an_address_invents_none(description):
    built = description()
    assert built.get_all("Project-URL") is None
    assert built.get_payload() == (ROOT / "README.md").read_text()
