"""`python -m tests.evaluation.lines [CHECKOUT ...]`: the size of the installed packages.

Files and source lines of each package, and how its rooms import each other: the folders in the
package, and the files beside them. A room is one level above the highest of those that it imports,
counting imports that run with a module, and rooms of a circle are on one level.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tests.imports import PACKAGES, ROOT, modules, modules_of, ours, reached, top_level_imports

SUFFIXES = (".py", ".cu", ".cuh")


def count(checkout: Path) -> dict[str, dict[str, int]]:
    """Files, and lines by suffix, with blank lines and comments, of each package."""
    return {package: _size(checkout / package) for package in PACKAGES}


def _size(folder: Path) -> dict[str, int]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    lines = {
        suffix: sum(len(path.read_text().splitlines()) for path in files if path.suffix == suffix)
        for suffix in SUFFIXES
    }
    return {"files": len(files), **lines, "lines": sum(lines.values())}


class Rooms(NamedTuple):
    """The graph of a package's rooms."""

    rooms: int
    levels: int
    arrows: int
    circles: list[list[str]]  # rooms that import each other


def rooms_of(graph: dict[str, set[str]]) -> Rooms:
    """The levels and circles of rooms, by the rooms that each of them imports."""
    behind = {room: reached(graph, room) for room in graph}
    circle = {r: frozenset({r, *(o for o in behind[r] if r in behind[o])}) for r in graph}

    def level(room: str) -> int:
        lower = {other for r in circle[room] for other in graph[r]} - circle[room]
        return 1 + max(map(level, lower), default=0)

    circles = sorted({tuple(sorted(found)) for found in circle.values() if len(found) > 1})
    arrows = sum(len(others) for others in graph.values())
    return Rooms(len(graph), max(map(level, graph)), arrows, [list(found) for found in circles])


def room_graph(checkout: Path, package: str) -> dict[str, set[str]]:
    """The rooms of a package, each with the others that it imports."""
    trees = dict(modules(checkout))
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        if name.split(".")[0] == package:
            imported = map(_room, modules_of(ours(top_level_imports(tree)), {*trees}))
            graph.setdefault(_room(name), set()).update(imported)
    return {room: (others & graph.keys()) - {room} for room, others in graph.items()}


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def main(
    checkouts: Annotated[list[Path] | None, typer.Argument(help="default: this one")] = None,
) -> None:
    """Print files, source lines and rooms of the installed packages."""
    for checkout in checkouts or [ROOT]:
        if not (checkout / PACKAGES[0]).is_dir():
            raise typer.BadParameter(f"{checkout} is not a checkout: it has no {PACKAGES[0]}/")
        counts = count(checkout)
        graphs = {package: rooms_of(room_graph(checkout, package)) for package in PACKAGES}
        columns = [*counts[PACKAGES[0]], *Rooms._fields]
        typer.echo(f"{checkout}")
        typer.echo(f"  {'':16}" + "".join(f"{name:>8}" for name in columns))
        for package, found in graphs.items():
            cells = [*counts[package].values(), *found[:3], len(found.circles)]
            typer.echo(f"  {package:16}" + "".join(f"{n:8}" for n in cells))
        totals = [sum(column) for column in zip(*(sizes.values() for sizes in counts.values()))]
        typer.echo(f"  {'all':16}" + "".join(f"{n:8}" for n in totals))
        for found in graphs.values():
            for circle in found.circles:
                typer.echo(f"  circle: {', '.join(circle)}")


if __name__ == "__main__":
    typer.run(main)
