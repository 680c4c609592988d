"""What the commands of `fa_ops` share: options, progress on stderr, and JSON files of results.

Errors of options are typer.BadParameter: exit status 2.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

import fa_ops


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


Step = TypeVar("Step")


def header(what: str, device: str, names: Collection[str], extent: str = "") -> Console:
    """Print what runs on which device, of which extent, and the implementations, to stderr.

    Returns the console, for more.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    extent = f"{extent}; " if extent else ""
    console.print(f"{what}, {_device_name(device)}: {extent}{', '.join(names)}", markup=False)
    return console


def watched(
    steps: Sequence[Step], what: str, device: str, names: Collection[str], noun: str = "problems",
    name: Callable[[Step], str] = str,
) -> Iterator[Step]:  # fmt: skip
    """The steps of a command, each of which is named on stderr while it runs.

    The header comes first. In a terminal the current step is beside a bar, elsewhere it is a line.
    """
    console = header(what, device, names, f"{len(steps)} {noun}")
    if not console.is_terminal:
        for at, step in enumerate(steps, 1):
            console.print(f"{what} {at}/{len(steps)}: {name(step)}", markup=False)
            yield step
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=len(steps))
        for step in steps:
            bar.update(task, description=escape(f"{what}: {name(step)}"), refresh=True)
            yield step
            bar.advance(task)


def environment(device: str) -> dict[str, str]:
    """The command, the date, the device and the versions, which are reported with every result."""
    spec = sys.modules["__main__"].__spec__  # None unless started by `python -m`
    module = spec.name.removesuffix(".__main__") if spec else "fa_ops"
    facts = {
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": _device_name(device),
        "fa_ops": f"{fa_ops.__version__} {_commit()}".strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        facts |= {"cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version())}
        import triton

        facts["triton"] = triton.__version__
    else:
        facts["threads"] = str(torch.get_num_threads())
    return facts


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else _cpu_name()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    try:
        git = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""  # installed from a wheel


def write_json(path: Path, device: str, family: str, records: list[dict], **facts: object) -> None:
    """Write the records with the environment that they were measured in, and further facts."""
    content = {"family": family, "environment": environment(device) | facts, "records": records}
    path.write_text(json.dumps(content, indent=1) + "\n")
