"""The machine code of the Hopper kernels in two checkouts, instruction by instruction:

    python -m tests.compile_only.compare_sass ../before . --only "forward causal,decode bfloat16"

Each checkout compiles the configurations that its own tests/compile_only/configurations.py lists
(this one's where it has none), in a process of its own; which sources that takes is its business.
Needs NVRTC and Triton's wheel, and no GPU. Fails if a configuration has other instructions, or is
missing on one side.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from tests.compile_only.sass import disassembled, instructions
from tests.gpu.checkouts import CACHE

LISTING = Path("tests/compile_only/configurations.py")
OURS = Path(__file__).parents[2] / LISTING


def compiled(checkout: Path, only: str, folder: Path) -> dict[str, bytes]:
    """Machine code by configuration and entry point."""
    own = checkout / LISTING
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    environment.setdefault("FA_OPS_CACHE_DIR", str(CACHE))
    command = [sys.executable, own if own.is_file() else OURS, folder, only]
    if subprocess.run(command, cwd=checkout, env=environment).returncode:
        raise SystemExit(f"the kernels of {checkout} do not compile, see above")
    return {path.stem: path.read_bytes() for path in sorted(folder.glob("*.cubin"))}


def difference(old: bytes, new: bytes) -> str | None:
    """How two programs differ in their instructions; None if they do not."""
    if old == new:
        return None
    with tempfile.TemporaryDirectory() as folder:
        before, after = (instructions(disassembled(code, Path(folder))) for code in (old, new))
    if before == after:
        return None
    first = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), len(before))
    words = [Counter(_operation(line) for line in lines) for lines in (before, after)]
    changed = {op: words[1][op] - words[0][op] for op in words[0] | words[1]}
    counts = ", ".join(f"{op} {n:+}" for op, n in sorted(changed.items()) if n)
    return (
        f"{len(before)} instructions -> {len(after)}, from number {first} on; "
        f"{counts or 'the same operations'}"
    )


def _operation(instruction: str) -> str:
    """Its name, behind a predicate."""
    return next(word for word in instruction.split() if not word.startswith("@"))


def main(
    old: Annotated[Path, typer.Argument(help="a checkout")],
    new: Annotated[Path, typer.Argument(help="another")],
    only: Annotated[str, typer.Option(help="configurations with all words of one of these")] = "",
) -> None:
    """Compare the instructions of every shipped Hopper configuration in two checkouts."""
    found = []
    for checkout in (old, new):
        if not (checkout / "fa_ops").is_dir():
            raise typer.BadParameter(f"{checkout} is no checkout: it has no fa_ops/")
        with tempfile.TemporaryDirectory() as folder:
            found.append(compiled(checkout.resolve(), only, Path(folder)))
    before, after = found
    if not before and not after:
        raise typer.BadParameter(f"--only must name configurations, got {only!r}")
    both = [name for name in before if name in after]
    with ThreadPoolExecutor() as threads:
        texts = list(threads.map(lambda name: difference(before[name], after[name]), both))
    differing = {name: text for name, text in zip(both, texts) if text is not None}
    for name, text in differing.items():
        print(f"{name}: {text}")
    missing = before.keys() ^ after.keys()
    for name in sorted(missing):
        print(f"{name}: only in {old if name in before else new}")
    print(
        f"{len(both)} programs: {len(both) - len(differing)} have the same instructions, "
        f"{len(differing)} others; {len(missing)} on one side alone"
    )
    raise typer.Exit(int(bool(differing or missing)))


if __name__ == "__main__":
    typer.run(main)
