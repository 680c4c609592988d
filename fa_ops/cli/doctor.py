"""`python -m fa_ops doctor`: what is installed, what can run, and why the rest cannot."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
import typer
from rich.console import Console

from fa_ops import __version__, dispatch
from fa_ops.backends.hopper import cubin_cache

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
    yield "cache", cache(cubin_cache.folder())


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


def cache(folder: Path) -> list[tuple[str, str]]:
    """The folder for compiled kernels: where it is, whose, and whether it is used."""
    origin = " (from FA_OPS_CACHE_DIR)" if os.environ.get("FA_OPS_CACHE_DIR") else ""
    rows = [("folder", f"{folder}{origin}")]
    try:
        about = os.stat(folder)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        return [*rows, ("verdict", unused(error))]
    else:
        rows.append(("owner", cubin_cache.owner(about)))
        rows.append(("mode", f"{stat.S_IMODE(about.st_mode):04o}"))
    return [*rows, ("verdict", verdict(folder))]


def verdict(folder: Path) -> str:
    try:
        with cubin_cache.opened(folder) as descriptor:
            files = [about for about in map(_stat, os.scandir(descriptor)) if about]
    except FileNotFoundError:
        above = next(one for one in folder.absolute().parents if one.exists())
        if os.access(above, os.W_OK | os.X_OK):
            return "does not exist yet; made when a kernel is first compiled"
        return unused(f"it does not exist, and {above} is not writable")
    except OSError as error:
        return unused(error)
    contents = f"{len(files)} files, {sum(one.st_size for one in files) / 2**20:.1f} MiB"
    if os.access(folder, os.W_OK | os.X_OK):
        return f"trusted, writable, {contents}"
    return f"trusted, not writable: each process compiles again what is not in it; {contents}"


def _stat(entry: os.DirEntry) -> os.stat_result | None:
    return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None


def unused(reason: object) -> str:
    reason = getattr(reason, "strerror", None) or reason
    return f"not used, each process compiles its kernels again: {reason}"
