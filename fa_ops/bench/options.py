"""Options of several commands of `fa_ops`. Errors are typer.BadParameter: exit status 2."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer


def device(name: str) -> str:
    """ "cuda" or "cpu"; "auto" is cuda if torch finds a device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device is cuda, but torch finds no CUDA device")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def words(option: str | None) -> list[str]:
    """The comma-separated words of an option, without duplicates."""
    stripped = [word.strip() for word in (option or "").split(",")]
    return [word for word in dict.fromkeys(stripped) if word]


def matching(option: str | None, names: Collection[str], what: str) -> list[str]:
    """The names that contain one of the option's words; all names if it has none."""
    chosen = words(option)
    for word in chosen:
        if not any(word in name for name in names):
            raise typer.BadParameter(f"no {what} is called {word!r}; there are: {'; '.join(names)}")
    return [name for name in names if not chosen or any(word in name for word in chosen)]


def one_of(option: str, values: Collection[str], allowed: Collection[str]) -> list[str]:
    """The distinct values, each of which must be allowed; all allowed values if there are none."""
    for value in values:
        if value not in allowed:
            known = ", ".join(map(str, allowed))
            raise typer.BadParameter(f"{option} must be one of {known}, got {value!r}")
    return list(dict.fromkeys(values or allowed))


def integers(option: str, text: str) -> list[int]:
    """The distinct positive integers of a comma-separated option."""
    found = words(text)
    if not found or not all(word.isdecimal() and int(word) > 0 for word in found):
        raise typer.BadParameter(f"{option} must be positive integers, got {text!r}")
    return [int(word) for word in found]


def in_existing_folder(path: Path | None) -> Path | None:
    """A typer callback that refuses a file in a folder that does not exist."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {path.parent}")
    return path


Device = Annotated[
    Literal["auto", "cuda", "cpu"], typer.Option(help="auto: cuda if torch finds a device")
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="write all results to this file", callback=in_existing_folder),
]
Only = Annotated[
    str | None,
    typer.Option(help="comma-separated words; measure only what contains one of them in its name"),
]
