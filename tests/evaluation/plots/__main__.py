"""`python -m tests.evaluation.plots`: draw the figures of the documentation.

A benchmark whose `--json` names a file in docs/figures refreshes its figure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tests.evaluation.plots.figures import FIGURES, Results

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "figures"


def main(
    folder: Annotated[Path, typer.Option(exists=True, file_okay=False)] = FOLDER,
) -> None:
    """Draw an SVG file beside the JSON files of the folder for each figure."""
    results = Results(folder)
    for name, draw in FIGURES.items():
        path = folder / f"{name}.svg"
        path.write_text(str(draw(results)))
        print(path)


if __name__ == "__main__":
    typer.run(main)
