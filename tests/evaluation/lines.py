"""`python -m tests.evaluation.lines [CHECKOUT ...]`: source lines of the installed packages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]
PACKAGES = ("fa_ops", "compile_passes", "hf_integration")
SUFFIXES = (".py", ".cu", ".cuh")


def count(checkout: Path) -> dict[str, dict[str, int]]:
    """The numbers of lines by package and suffix, with blank lines and comments."""
    return {
        package: {
            suffix: sum(
                len(path.read_text().splitlines())
                for path in (checkout / package).rglob(f"*{suffix}")
            )
            for suffix in SUFFIXES
        }
        for package in PACKAGES
    }


def main(
    checkouts: Annotated[list[Path] | None, typer.Argument(help="default: this one")] = None,
) -> None:
    """Print the source lines of the installed packages, by package and suffix."""
    for checkout in checkouts or [ROOT]:
        if not (checkout / PACKAGES[0]).is_dir():
            raise typer.BadParameter(f"{checkout} is not a checkout: it has no {PACKAGES[0]}/")
        counts = count(checkout)
        typer.echo(f"{checkout}")
        typer.echo(f"  {'':16}" + "".join(f"{name:>8}" for name in (*SUFFIXES, "all")))
        totals = {
            suffix: sum(by_suffix[suffix] for by_suffix in counts.values()) for suffix in SUFFIXES
        }
        for package, by_suffix in {**counts, "all": totals}.items():
            cells = "".join(f"{n:8}" for n in (*by_suffix.values(), sum(by_suffix.values())))
            typer.echo(f"  {package:16}{cells}")


if __name__ == "__main__":
    typer.run(main)
