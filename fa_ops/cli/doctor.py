"""`python -m fa_ops doctor`: what is installed, what can run, and why the rest cannot."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import platformdirs
import torch
import typer
from rich.console import Console

from fa_ops import __version__, dispatch

PACKAGES = ("torch", "triton", "transformers")


def run(model: str | None = None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    parts = sections() if model is None else (*sections(), *transformers_model(model))
    for title, rows in parts:
        console.print(f"[bold]{title}[/]")
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            console.print(f"  {name:{width}}  {text}", markup=False)


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    yield "versions", versions()
    yield "devices", devices()
    yield "backends", backends()
    yield "cache", [cache()]


def transformers_model(model: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """What attention a transformers model runs, layer by layer, and the masks it is given."""
    try:
        from hf_integration import doctor
    except ImportError as error:
        raise SystemExit(str(error)) from None
    try:
        yield from doctor.sections(model)
    except LookupError as error:
        raise typer.BadParameter(f"--model: {error}") from None


def versions() -> list[tuple[str, str]]:
    rows = [("fa_ops", __version__), ("python", platform.python_version())]
    return rows + [(name, installed(name) or "not installed") for name in PACKAGES]


def installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def devices() -> list[tuple[str, str]]:
    capability = torch.backends.cpu.get_cpu_capability()
    rows = [("cpu", f"{platform.machine()}, {capability}, {torch.get_num_threads()} threads")]
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"torch is built for {built}, and sees no device" if built else "torch is a CPU build"
        return [*rows, ("cuda", f"none: {why}")]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        memory = f"{about.total_memory / 2**30:.0f} GiB"
        capability = f"compute capability {about.major}.{about.minor}"
        rows.append((f"cuda:{index}", f"{about.name}, {capability}, {memory}"))
    return rows


def backends() -> list[tuple[str, str]]:
    chosen = dispatch.default or "auto"
    rows = [(name, why or "available") for name, why in dispatch.backends()]
    origin = "from FA_OPS_BACKEND" if os.environ.get("FA_OPS_BACKEND") else "the default"
    try:
        dispatch.check_name(chosen)
    except ValueError as error:
        origin += f"; every call will fail: {error}"
    return [*rows, ("in use", f"{chosen} ({origin})")]


def cache() -> tuple[str, str]:
    """The folder for compiled kernels and its state."""
    override = os.environ.get("FA_OPS_CACHE_DIR")
    folder = Path(override or platformdirs.user_cache_dir("fa_ops"))
    origin = " (from FA_OPS_CACHE_DIR)" if override else ""
    return f"{folder}{origin}", state(folder)


def state(folder: Path) -> str:
    if not folder.exists():
        return "does not exist yet; made when a kernel is first compiled"
    if not folder.is_dir():
        return "is not a folder: kernels are compiled again by every process"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "is not writable: kernels are compiled again by every process"
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return f"writable, {len(files)} files, {size / 2**20:.1f} MiB"
