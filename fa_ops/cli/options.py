"""Options that several commands have. All raise typer.BadParameter, which ends with status 2."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
import typer


def device(name: str) -> str:
    """ "cuda" or "cpu"; "auto" is the first of them that torch sees."""
    if name not in ("auto", "cuda", "cpu"):
        raise typer.BadParameter(f"device must be auto, cuda or cpu, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("device cuda was asked for, and torch sees none")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def words(option: str | None) -> list[str]:
    """What stands between the commas, each once."""
    found = [word.strip() for word in (option or "").split(",")]
    return [word for word in dict.fromkeys(found) if word]


def matching(option: str | None, names: Collection[str], what: str) -> list[str]:
    """The names that contain one of the words; all of them where there is no word."""
    wanted = words(option)
    for word in wanted:
        if not any(word in name for name in names):
            raise typer.BadParameter(f"no {what} is called {word!r}; there are: {'; '.join(names)}")
    return [name for name in names if not wanted or any(word in name for word in wanted)]


def one_of(option: str, values: Collection | None, allowed: Collection) -> list:
    """The values, each once; all that are allowed where none is given."""
    for value in values or ():
        if value not in allowed:
            known = ", ".join(map(str, allowed))
            raise typer.BadParameter(f"{option} must be of {known}, got {value!r}")
    return list(dict.fromkeys(values or allowed))


def in_a_folder(path: Path | None) -> Path | None:
    """A callback: a file that can be written when all is measured."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {path.parent}")
    return path
