"""`python -m fa_ops doctor`: installed versions, devices, available backends and kernel cache."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from fa_ops import __version__
from fa_ops.backends.hopper.runtime import cubin_cache
from fa_ops.call import backend_option
from fa_ops.plans import dispatch

PACKAGES = ("torch", "triton", "transformers", "fa-ops-cubins")


def run(
    model: Annotated[
        str | None,
        typer.Option(
            help="a transformers model type or model folder: explain its layers and masks"
        ),
    ] = None,
) -> None:
    """Print versions, devices, why each backend is or is not available, and the cache folder."""
    console = Console(highlight=False, soft_wrap=True)
    parts = sections() if model is None else (*sections(), *transformers_model(model))
    for title, rows in parts:
        console.print(f"[bold]{title}[/]")
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            console.print(f"  {name:{width}}  {text}", markup=False)


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each section as its title and rows of (name, text)."""
    yield "versions", versions()
    yield "devices", devices()
    yield "backends", backends()
    yield "cache", cache(cubin_cache.folder())


def transformers_model(model: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield sections on a transformers model: the attention of each layer, and its masks."""
    try:
        from hf_integration import explanations
    except ImportError as error:
        raise SystemExit(str(error)) from None
    try:
        yield from explanations.sections(model)
    except LookupError as error:
        raise typer.BadParameter(f"--model: {error}") from None


def versions() -> list[tuple[str, str]]:
    """Versions of fa_ops, Python and the packages it works with."""
    rows = [("fa_ops", __version__), ("python", platform.python_version())]
    for name in PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def devices() -> list[tuple[str, str]]:
    """The CPU and each CUDA device, or why there is none."""
    capability = torch.backends.cpu.get_cpu_capability()
    rows = [("cpu", f"{platform.machine()}, {capability}, {torch.get_num_threads()} threads")]
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = (
            f"torch is built for {built} but finds no device" if built else "torch is a CPU build"
        )
        return [*rows, ("cuda", f"none: {reason}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        capability = f"compute capability {properties.major}.{properties.minor}"
        rows.append((f"cuda:{index}", f"{properties.name}, {capability}, {memory}"))
    return rows


def backends() -> list[tuple[str, str]]:
    """Each backend with the reason why it is not available, and the default one."""
    chosen = backend_option.chosen() or "auto"
    rows = [(name, reason or "available") for name, reason in dispatch.backends()]
    origin = "from FA_OPS_BACKEND" if os.environ.get("FA_OPS_BACKEND") else "the default"
    try:
        backend_option.check_name(chosen)
    except ValueError as error:
        origin += f"; every call will fail: {error}"
    return [*rows, ("in use", f"{chosen} ({origin})")]


def cache(folder: Path) -> list[tuple[str, str]]:
    """The folder for compiled kernels: its path, owner and mode, and whether it is used."""
    origin = " (from FA_OPS_CACHE_DIR)" if os.environ.get("FA_OPS_CACHE_DIR") else ""
    rows = [("folder", f"{folder}{origin}")]
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        return [*rows, ("verdict", unused(error))]
    else:
        rows.append(("owner", cubin_cache.owner(status)))
        rows.append(("mode", f"{stat.S_IMODE(status.st_mode):04o}"))
    return [*rows, ("verdict", verdict(folder))]


def verdict(folder: Path) -> str:
    """Whether the folder is used for compiled kernels, and its contents or the reason."""
    try:
        with cubin_cache.opened(folder) as descriptor:
            files = [file for file in os.scandir(descriptor) if file.is_file(follow_symlinks=False)]
            size = sum(file.stat(follow_symlinks=False).st_size for file in files)
    except FileNotFoundError:
        parent = next(path for path in folder.absolute().parents if path.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return "does not exist yet; created when a kernel is first compiled"
        return unused(f"it does not exist, and {parent} is not writable")
    except OSError as error:
        return unused(error)
    contents = f"{len(files)} files, {size / 2**20:.1f} MiB"
    if os.access(folder, os.W_OK | os.X_OK):
        return f"trusted, writable, {contents}"
    return f"trusted, not writable: each process compiles kernels missing in it again; {contents}"


def unused(reason: object) -> str:
    """The verdict on a folder that cannot be used."""
    reason = getattr(reason, "strerror", None) or reason
    return f"not used, each process compiles its kernels again: {reason}"
