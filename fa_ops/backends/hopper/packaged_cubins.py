"""Kernels that the optional package fa-ops-cubins brings, compiled ahead of time.

`python -m fa_ops cubins` builds that package for the version of fa_ops that it runs with. A file is
named by the hash of the program, its headers and the flags, so that it is never stale: a kernel
that has changed since is not found, and compiled.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

PACKAGE = "fa_ops_cubins"


@functools.cache
def folder() -> Path | None:
    """The package's folder, or None where it is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.origin).parent if found and found.origin else None


def load(name: str) -> bytes | None:
    """The machine code in a file of the package, which is installed, or None."""
    path = folder() / name
    return path.read_bytes() if path.exists() else None
